"""Sampling: what is drawn follows the distribution, filters and penalties do what vLLM's do, rows do not mix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchrun.engine.batch import SampleRow, sampling
from batchrun.engine.request import NO_TOKEN, noise_key
from batchrun.engine.sampler import logprobs, token_logprobs
from batchrun.engine.sampler import sample as sample_with
from batchrun.kernels import cpu
from batchrun.ops import native_ops, torch_ops
from batchrun.ops.noise import MAX_GUMBEL, gumbel, uniform
from batchrun.sampling import SamplingParams
from tests.marks import needs_kernels

VOCAB = 40

on_each_backend = pytest.mark.parametrize(
    "ops", [pytest.param(torch_ops, id="torch_ops"), pytest.param(native_ops, id="native_ops", marks=needs_kernels)]
)


def sample(logits: Tensor, rows: Sequence[SampleRow], buffer: Tensor, ops: ModuleType = torch_ops) -> Tensor:
    return sample_with(logits, sampling(rows), buffer, ops)


def sample_row(params: SamplingParams, key: int = 0, position: int = 0, **changes: object) -> SampleRow:
    given = {"slot": 0, "position": position, "n_prompt": 0, "noise_key": noise_key(key), "stop_ids": frozenset()}
    return SampleRow(params=params, **{**given, **changes})  # type: ignore[arg-type]


def draw(logits: Tensor, params: SamplingParams, count: int, ops: ModuleType) -> Tensor:
    rows = [sample_row(params, key) for key in range(count)]
    return sample(logits.repeat(count, 1), rows, torch.zeros(1, 1, dtype=torch.int64), ops=ops)


def expected(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that the parameters ask for, by sorting and masking in float64."""
    scaled = logits.double() / params.temperature
    if params.min_p > 0:
        scaled[scaled < scaled.max() + math.log(params.min_p)] = -math.inf
    if params.top_k > 0:
        scaled[scaled < scaled.topk(params.top_k).values[-1]] = -math.inf
    probabilities, order = scaled.softmax(-1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= params.top_p] = 0
    result = torch.zeros_like(scaled)
    result[order] = probabilities / probabilities.sum()
    return result


@on_each_backend
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.5, top_k=7),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.8, min_p=0.02),
    ],
    ids=lambda params: str(params.model_dump(exclude_defaults=True)),
)
def test_draws_follow_the_distribution(params: SamplingParams, ops: ModuleType) -> None:
    torch.manual_seed(1)
    logits = torch.randn(VOCAB) * 2
    count = 20_000
    observed = torch.bincount(draw(logits, params, count, ops), minlength=VOCAB).double()
    wanted = expected(logits, params) * count
    assert observed[wanted == 0].sum() == 0
    kept = wanted > 5
    chi_square = ((observed - wanted)[kept] ** 2 / wanted[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@on_each_backend
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(0.8, 0.95, 0), (1.0, 1.0, 0), (1.4, 1.0, 50), (0.7, 0.5, 0)]))
def test_only_what_can_win_is_drawn_for_and_the_winner_is_the_same(
    ops: ModuleType, seed: int, shape: tuple[float, float, int]
) -> None:
    """A vocabulary larger than the head: the same token as from noise for every token of the filtered distribution."""
    temperature, top_p, top_k = shape
    torch.manual_seed(seed)
    logits = torch.randn(3000) * 3
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    row = sample_row(params, seed)
    (token,) = sample(logits[None].clone(), [row], torch.zeros(1, 1, dtype=torch.int64), ops=ops).tolist()
    noise = gumbel(torch.tensor(_signed(row.noise_key)), torch.tensor(0), torch.arange(3000))
    scores = (logits / temperature).masked_fill(expected(logits, params) == 0, -math.inf) + noise
    assert token == int(scores.argmax())


@needs_kernels
@pytest.mark.parametrize("size", [1, 7, 1000, 49_152])
def test_the_kernel_draws_what_torch_draws(size: int) -> None:
    torch.manual_seed(size)
    kinds = [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.7, "top_p": 0.999},
        {"top_k": 1},
        {"top_k": 900, "top_p": 0.9},
        {"min_p": 0.05, "temperature": 0.6},
        {"temperature": 5.0},
        {"temperature": 0.001},
    ]
    rows = [sample_row(SamplingParams(**kinds[index % 8]), index, index) for index in range(48)]
    logits = torch.randn(48, size) * torch.tensor([0.1, 1.0, 5.0])[torch.arange(48) // 16, None]
    logits[::5, size // 2 :: 3] = -math.inf
    logits[::7] = logits[::7].round()  # equal ones
    logits[:, 0] = logits[:, 0].clamp(min=-3)
    buffer = torch.zeros(1, 1, dtype=torch.int64)
    drawn = [sample(logits.clone(), rows, buffer, ops=ops) for ops in (torch_ops, native_ops)]
    assert torch.equal(*drawn)


@needs_kernels
def test_the_kernel_refuses_what_does_not_fit() -> None:
    some = {name: torch.ones(2) for name in ("temperature", "min_p", "top_p")}
    some |= {name: torch.ones(2).long() for name in ("top_k", "key", "position")}
    for name, each in some.items():
        with pytest.raises(ValueError, match=name):
            cpu.draw(torch.zeros(2, 9), **some | {name: each[:1]})


@on_each_backend
def test_what_is_no_number_is_no_token(ops: ModuleType) -> None:
    logits = torch.randn(4, 50)
    logits[1, 7] = logits[2, 49] = math.nan
    greedy, drawn, filtered = SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9, top_k=5)
    for kinds in ([greedy] * 4, [drawn] * 4, [greedy, greedy, filtered, drawn]):
        rows = [sample_row(params, index) for index, params in enumerate(kinds)]
        tokens = sample(logits.clone(), rows, torch.zeros(1, 1, dtype=torch.int64), ops=ops).tolist()
        assert [token == NO_TOKEN for token in tokens] == [False, True, True, False]


def test_noise_is_bounded_and_uniform() -> None:
    key = torch.tensor([noise_key(3) >> 1])
    values = uniform(key, torch.tensor([0]), torch.arange(100_000))
    assert values.min() > 0
    assert values.max() < 1
    assert abs(values.mean().item() - 0.5) < 0.005
    assert -math.log(-math.log(1 - 2.0**-25)) < MAX_GUMBEL
    assert len(values.unique()) > 99_000


@on_each_backend
def test_a_row_draws_the_same_beside_any_neighbours(ops: ModuleType) -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, 500)
    kinds = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3)]
    rows = [sample_row(kinds[index % 4], index) for index in range(9)]
    buffer = torch.zeros(1, 1, dtype=torch.int64)
    together = sample(logits.clone(), rows, buffer, ops=ops).tolist()
    alone = [sample(logits[index : index + 1].clone(), [rows[index]], buffer, ops=ops).item() for index in range(9)]
    assert together == alone


@on_each_backend
def test_noise_depends_on_key_and_position(ops: ModuleType) -> None:
    logits = torch.zeros(1, 500)
    buffer = torch.zeros(1, 8, dtype=torch.int64)
    drawn = {
        (key, position): sample(logits.clone(), [sample_row(SamplingParams(), key, position)], buffer, ops=ops).item()
        for key in range(4)
        for position in range(4)
    }
    assert len(set(drawn.values())) > 12


def test_tiny_temperatures_are_greedy() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    for temperature in (1e-40, 1e-38, 1e-6):
        row = sample_row(SamplingParams(temperature=temperature))
        assert sample(logits.clone(), [row], torch.zeros(1, 1, dtype=torch.int64)).item() == 2


@on_each_backend
def test_filters_do_not_depend_on_threads(ops: ModuleType) -> None:
    torch.manual_seed(4)
    logits = torch.randn(8, 50_003) * 4
    rows = [sample_row(SamplingParams(top_p=0.9, top_k=0 if key % 2 else 3000), key) for key in range(8)]
    drawn = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        drawn.append(sample(logits.clone(), rows, torch.zeros(1, 1, dtype=torch.int64), ops=ops).tolist())
    torch.set_num_threads(threads)
    assert drawn[0] == drawn[1] == drawn[2]


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, 0.5]])
    buffer = torch.tensor([[0, 1, 2, 2, 0]])  # prompt 0, 1; output 2, 2

    def best(**penalties: float) -> list[float]:
        params = SamplingParams(temperature=0, **penalties)
        row = sample_row(params, position=4, n_prompt=2)
        changed = logits.clone()
        sample(changed, [row], buffer)
        return changed[0].tolist()

    assert best(repetition_penalty=2.0) == [1.0, -2.0, 0.75, 0.5]  # prompt and output
    assert best(presence_penalty=0.5) == [2.0, -1.0, 1.0, 0.5]  # output alone, once
    assert best(frequency_penalty=0.5) == [2.0, -1.0, 0.5, 0.5]  # output alone, per occurrence


def test_penalties_and_min_tokens_of_a_row_leave_its_neighbours_alone() -> None:
    torch.manual_seed(5)
    logits = torch.randn(5, VOCAB)
    buffer = torch.randint(VOCAB, (5, 12))
    kinds: list[dict[str, float]] = [
        {"repetition_penalty": 1.3},
        {},
        {"presence_penalty": -0.4, "frequency_penalty": 0.3},
        {"min_tokens": 9, "max_tokens": 20},
        {"repetition_penalty": 0.7, "frequency_penalty": 1.1, "min_tokens": 2, "max_tokens": 20},
    ]
    rows = [
        sample_row(
            SamplingParams(temperature=0, **kind),
            slot=4 - index,
            position=6 + index,
            n_prompt=4,
            stop_ids=frozenset({index, 30}),
        )
        for index, kind in enumerate(kinds)
    ]
    together = logits.clone()
    sample(together, rows, buffer)
    for index, row in enumerate(rows):
        alone = logits[index : index + 1].clone()
        sample(alone, [row], buffer)
        assert torch.equal(together[index], alone[0])
        assert torch.equal(alone[0], logits[index]) is (index == 1)
    assert (together == -math.inf).nonzero().tolist() == [[3, 3], [3, 30]]


def test_min_tokens_forbids_stopping() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=5)
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    buffer = torch.zeros(1, 8, dtype=torch.int64)
    for position, token in ((3, 2), (4, 2), (5, 1)):
        row = sample_row(params, position=position, n_prompt=3, stop_ids=frozenset({1}))
        assert sample(logits.clone(), [row], buffer).item() == token


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, 50)
    logits[1, 7] = -math.inf
    got = token_logprobs(logprobs(logits[:2], torch.tensor([4, 7]), 2, torch_ops), [2, 0])
    table = logits.double().log_softmax(-1)
    assert got[0].token_id == 4
    assert got[0].logprob == pytest.approx(table[0, 4].item(), abs=1e-5)
    assert [token for token, _ in got[0].top] == table[0].topk(2).indices.tolist()
    assert got[1].logprob is None  # minus infinity
    assert got[1].top == []


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key
