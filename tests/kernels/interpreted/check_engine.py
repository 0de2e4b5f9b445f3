"""The whole engine with Triton's kernels, interpreted, gives the tokens that it gives on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from batchrun.engine.graphs import fill, takes
from batchrun.engine.request import Request
from batchrun.job import KVCacheDType, Quantization
from batchrun.kernels.gpu import eight_bits, planes
from batchrun.ops import fixed_triton_ops, torch_ops, triton_ops
from batchrun.sampling import SamplingParams
from tests.engine.driver import Driver, load_decoder, request

PARAMS = [
    SamplingParams(temperature=0, max_tokens=3),
    SamplingParams(temperature=0, max_tokens=3, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=3, repetition_penalty=1.3),
    SamplingParams(temperature=1.1, min_p=0.05, max_tokens=3, frequency_penalty=0.5, min_tokens=2),
    SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2),
]
PREFIX = [*range(5, 25)]


def requests() -> list[Request]:
    prompts = [PREFIX + [7 + index] * (1 + index) for index in range(len(PARAMS))]
    return [request(index, prompts[index], params, stop_ids=[3]) for index, params in enumerate(PARAMS)]


def run(path: Path, ops: ModuleType, kept_as: KVCacheDType = "auto") -> list[Request]:
    made = requests()
    with Driver(
        load_decoder(path, ops=ops, kv_cache_dtype=kept_as), block_size=16, n_blocks=64, max_num_seqs=4, budget=40
    ) as driver:
        driver.run(made)
    return made


@pytest.mark.parametrize(
    ("ops", "kept_as"),
    [(triton_ops, "auto"), (triton_ops, "fp8"), (fixed_triton_ops, "int4")],
)  # but not bf16, to which the interpreter rounds otherwise
def test_the_engine_gives_the_tokens_of_the_reference(tiny_model: Path, ops: ModuleType, kept_as: KVCacheDType) -> None:
    for got, wanted in zip(run(tiny_model, ops, kept_as), run(tiny_model, torch_ops, kept_as), strict=True):
        assert got.output_ids == wanted.output_ids
        for ours, theirs in zip(
            got.logprobs + got.prompt_logprobs, wanted.logprobs + wanted.prompt_logprobs, strict=True
        ):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_rows_bits_are_its_own(tiny_model: Path) -> None:
    """Alone, in other chunks and without the prefix cache: the same log-probabilities to the bit."""
    decoder = load_decoder(tiny_model, ops=fixed_triton_ops)
    together, alone = requests()[:3], requests()[:3]
    for each in together + alone:
        each.params = each.params.model_copy(update={"logprobs": 2})
    with Driver(decoder, block_size=16, n_blocks=64) as driver:
        driver.run(together)
    for each in alone:
        with Driver(decoder, block_size=16, n_blocks=64, max_num_seqs=1, budget=9, prefix_caching=False) as driver:
            driver.run([each])
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.output_ids == theirs.output_ids
        assert ours.logprobs == theirs.logprobs


def test_a_batch_filled_up_for_a_graph_gives_the_same_logits(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decoding step is computed twice: as it is, and with the rows and sizes that a graph of it would have."""
    compared = []
    with Driver(load_decoder(tiny_model, ops=triton_ops), block_size=16, n_blocks=64) as driver:
        executor = driver.executor
        run_step = executor._run

        def run_twice(step):  # type: ignore[no-untyped-def]
            if takes(batch := step.batch):
                with torch.inference_mode():
                    more = executor._decode(fill(batch, 7, triton_ops.fill_plan))[: len(batch.token_rows)].clone()
                    torch.testing.assert_close(more, executor._decode(batch), rtol=1e-5, atol=1e-5)
                compared.append(len(more))
            return run_step(step)

        monkeypatch.setattr(executor, "_run", run_twice)
        driver.run(requests()[:3])
    assert compared


def prompt_logprobs(path: Path, ops: ModuleType, quantization: Quantization) -> Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    requests = [request(i, [(7 * i + j * j) % 250 for j in range(20)], params) for i in range(2)]
    decoder = load_decoder(path, dtype=torch.float16, ops=ops, quantization=quantization)
    with Driver(decoder, block_size=16, n_blocks=64) as driver:
        driver.run(requests)
    return torch.tensor([[entry.logprob for entry in each.prompt_logprobs] for each in requests])


@pytest.mark.parametrize(
    ("quantization", "major_minor", "share"),
    [("int8", (8, 0), 2.0), ("int4", (9, 0), 0.1), ("fp8", (8, 0), 0.1)],
)
def test_the_engine_answers_as_with_plain_numbers(
    tiny_model: Path,
    quantization: Quantization,
    major_minor: tuple[int, int],
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for a ``share`` of what rounding the weights changes. INT8 rounds activations, too."""
    for module in (eight_bits, planes):
        monkeypatch.setattr(module, "capability", lambda device: major_minor)
    plain, expected = (prompt_logprobs(tiny_model, torch_ops, each) for each in ("none", quantization))
    found = prompt_logprobs(tiny_model, triton_ops, quantization)
    off, moved = ((each - expected).abs().mean() for each in (found, plain))
    assert moved > 1e-3  # there is something to find
    assert off < share * moved
