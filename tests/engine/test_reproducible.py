"""With ``reproducible`` each row's bits are its own: per operation and end to end, and not so with the mode off."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from batchrun.engine.request import Request
from batchrun.engine.scheduler import Scheduler
from batchrun.job import KVCacheDType
from batchrun.ops import backend, fixed_onednn_ops, fixed_ops, native_ops, onednn_ops, torch_ops
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.ops.noise import gumbel, philox
from batchrun.sampling import SamplingParams
from batchrun.weights.formats import Dense, Weight
from batchrun.weights.quantize import to_int4, to_int8
from tests.engine.driver import Driver, guesses, load_decoder, request
from tests.marks import needs_kernels
from tests.models import save_model

INVARIANT = [
    fixed_ops,
    pytest.param(native_ops, marks=needs_kernels),
    pytest.param(fixed_onednn_ops, marks=needs_kernels),
]
DTYPES = [torch.float32, torch.bfloat16]
SIZES = (1, 2, 3, 5, 16, 63, 64, 65, 130)


def rows_are_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether every row of ``function(x)`` keeps its bits in batches of other sizes and at other places."""
    whole = function(x)
    for size in SIZES:
        for start in {0, max(0, min(7, len(x) - size)), len(x) - size}:
            if not torch.equal(function(x[start : start + size]), whole[start : start + size]):
                return False
    shuffle = torch.randperm(len(x))
    return torch.equal(function(x[shuffle]), whole[shuffle])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", INVARIANT, ids=lambda ops: ops.__name__.rpartition(".")[2])
@pytest.mark.parametrize("shape", [(96, 64), (192, 72), (960, 576)], ids=str)
@pytest.mark.parametrize("quantize", [Dense, to_int8, to_int4])
def test_linear(
    ops: ModuleType, dtype: torch.dtype, shape: tuple[int, int], quantize: Callable[[Tensor], Weight]
) -> None:
    weight = quantize(torch.randn(shape).to(dtype))
    weight.pack(ops.pack)
    bias = torch.randn(shape[0]).to(dtype)
    x = torch.randn(130, shape[1]).to(dtype)
    assert rows_are_alone(lambda x: ops.linear(x, weight, bias), x)
    product, out = ops.linear(x, weight, bias, torch.float32), torch.full((130, shape[0]), torch.nan)
    assert ops.linear(x, weight, bias, torch.float32, out) is out
    assert torch.equal(out, product)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", INVARIANT, ids=lambda ops: ops.__name__.rpartition(".")[2])
def test_elementwise(ops: ModuleType, dtype: torch.dtype) -> None:
    weight = torch.rand(200).to(dtype) + 0.5
    assert rows_are_alone(lambda x: ops.rms_norm(x, weight, 1e-5), torch.randn(130, 200).to(dtype))
    assert rows_are_alone(ops.silu_mul, 4 * torch.randn(130, 1000).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", INVARIANT, ids=lambda ops: ops.__name__.rpartition(".")[2])
@pytest.mark.parametrize("window", [None, 50])
def test_attention_of_a_row_in_any_batch_and_chunk(ops: ModuleType, dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [1, 7, 64, 129, 200, 300]
    block_size, n_heads, n_kv, dim = 16, 6, 2, 32
    n_blocks = 1 + sum(-(-length // block_size) for length in lengths)
    k, v = (torch.randn(n_blocks, n_kv, block_size, dim).to(dtype) for _ in range(2))
    order = iter((torch.randperm(n_blocks - 1) + 1).tolist())
    tables = [[next(order) for _ in range(-(-length // block_size))] for length in lengths]
    queries = [torch.randn(length, n_heads, dim).to(dtype) for length in lengths]

    def attend(rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attention of rows (sequence, first query, end) in one batch."""
        counts = torch.tensor([0] + [end - begin for _, begin, end in rows])
        table = torch.zeros(len(rows), max(len(tables[s]) for s, _, _ in rows), dtype=torch.int32)
        for line, (sequence, _, _) in zip(table, rows, strict=True):
            line[: len(tables[sequence])] = torch.tensor(tables[sequence])
        batch = AttentionBatch(
            counts.cumsum(0).int(), torch.tensor([end for _, _, end in rows]).int(), table, torch.zeros(0)
        )
        q = torch.cat([queries[sequence][begin:end] for sequence, begin, end in rows])
        out = ops.attention(q, k, v, batch, scale=dim**-0.5, window=window)
        return list(out.split(counts[1:].tolist()))

    whole = attend([(index, 0, length) for index, length in enumerate(lengths)])
    for index, length in enumerate(lengths):
        assert torch.equal(attend([(index, 0, length)])[0], whole[index])
        cuts = sorted({0, length, length - 1, length // 3, length // 2})
        chunks = [(index, begin, end) for begin, end in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat([attend([chunk])[0] for chunk in chunks]), whole[index])
        assert torch.equal(torch.cat(attend(chunks)), whole[index])


def test_plain_operations_are_not_invariant() -> None:
    """The negative control: if this fails, the tests above show nothing."""
    weight = Dense(torch.randn(960, 576))
    assert not rows_are_alone(lambda x: torch_ops.linear(x, weight), torch.randn(130, 576))


# ---- end to end

SAMPLED = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=16, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.2, max_tokens=16, ignore_eos=True, logprobs=0, repetition_penalty=1.1),
    SamplingParams(temperature=1, top_k=20, min_p=0.01, max_tokens=16, ignore_eos=True, logprobs=1),
]


def make_requests(count: int) -> list[Request]:
    rng = random.Random(5)
    stem = [rng.randrange(256) for _ in range(70)]
    made = []
    for index in range(count):
        prompt = stem[: rng.choice((0, 20, 70))] + [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        made.append(request(index, prompt, SAMPLED[index % len(SAMPLED)]))
    return made


Outcome = dict[int, tuple[list[int], list[object]]]


def outcome(requests: list[Request]) -> Outcome:
    return {each.key: (each.output_ids, [(e.logprob, e.top) for e in each.logprobs]) for each in requests}


def runs(
    path: Path, ops: ModuleType, dtype: torch.dtype, *, packed: bool, count: int, kept_as: KVCacheDType = "auto"
) -> dict[str, Outcome]:
    """The same requests run in as many ways as there are; every way a fresh set of pools."""
    decoder = load_decoder(path, dtype=dtype, ops=ops, packed=packed, kv_cache_dtype=kept_as)

    def run(requests: list[Request], disturb: Callable[[int, Scheduler], None] | None = None, **shape: int) -> Outcome:
        with Driver(decoder, **{"max_num_seqs": 32, **shape}) as driver:
            driver.run(requests, disturb)
        return outcome(requests)

    results = {"whole": run(make_requests(count))}
    results["alone"] = {key: value for each in make_requests(count) for key, value in run([each]).items()}
    shuffled = make_requests(count)
    random.Random(1).shuffle(shuffled)
    results["shuffled"] = run(shuffled, max_num_seqs=7)
    for budget in (33, 64, 512):
        results[f"chunks of {budget}"] = run(make_requests(count), budget=budget)
    results["no prefix cache"] = run(make_requests(count), prefix_caching=False)
    with Driver(decoder, max_num_seqs=32) as driver:
        driver.run(make_requests(count))
        warm = make_requests(count)
        driver.run(warm)
        results["prefix warm"] = outcome(warm)
    results["preempted"] = run(
        make_requests(count), lambda number, scheduler: number % 3 == 2 and number < 60 and scheduler.preempt_newest(),
        max_num_seqs=9,
    )  # fmt: skip
    results["small pool"] = run(make_requests(count), n_blocks=40)
    scored = request(count, [7] * 50, SAMPLED[0].override({"prompt_logprobs": 1}))
    results["beside a scored prompt"] = run([*make_requests(count), scored])
    del results["beside a scored prompt"][count]
    resumed = []
    for fresh in make_requests(count):
        tokens, logprobs = results["whole"][fresh.key]
        kept = fresh.key % 16
        again = request(fresh.key, fresh.tokens, fresh.params, tokens[:kept])
        resumed.append((again, logprobs[:kept]))
    outcomes = run([each for each, _ in resumed])
    answers = {key: tokens for key, (tokens, _) in results["whole"].items()}
    for overlap in (False, True):
        drafted = make_requests(count)
        with Driver(decoder, max_num_seqs=9, overlap=overlap, n_blocks=80) as driver:
            driver.run(drafted, guess=guesses(answers, random.Random(3)))
        assert driver.scheduler.counters.steps < 4 * count
        results[f"drafted, overlap {overlap}"] = outcome(drafted)
    results["resumed"] = {
        each.key: (outcomes[each.key][0], [*before, *outcomes[each.key][1]]) for each, before in resumed
    }
    return results


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Logits close to each other, so that a change of bits is a change of tokens.
    return save_model(tmp_path_factory.mktemp("models") / "flat", "llama", initializer_range=0.05, layers=2)


@pytest.mark.parametrize(
    ("dtype", "kept_as"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "int8")],
    ids=str,
)
@pytest.mark.parametrize("ops", INVARIANT, ids=lambda ops: ops.__name__.rpartition(".")[2])
def test_every_way_to_run_gives_the_same_bits(
    model_path: Path, ops: ModuleType, dtype: torch.dtype, kept_as: KVCacheDType
) -> None:
    count = 12 if ops is fixed_ops else 32  # torch's fixed tiles are slow
    results = runs(model_path, ops, dtype, packed=ops is not fixed_ops, count=count, kept_as=kept_as)
    whole = results["whole"]
    assert len({tuple(tokens) for tokens, _ in whole.values()}) > count // 2  # they are not all alike
    different = [name for name, result in results.items() if result != whole]
    assert different == []


def test_with_the_mode_off_bits_move(model_path: Path) -> None:
    """The negative control, end to end."""
    results = runs(model_path, torch_ops, torch.float32, packed=False, count=12)
    assert any(result != results["whole"] for result in results.values())


def test_the_mode_chooses_invariant_operations() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert backend(torch.device("cpu"), dtype, 64, reproducible=True) in (fixed_ops, native_ops, fixed_onednn_ops)


@needs_kernels
@pytest.mark.parametrize(
    ("flags", "free", "reproducible"),
    [("avx512_bf16", native_ops, native_ops), ("avx512_bf16 amx_bf16", onednn_ops, fixed_onednn_ops)],
)
def test_onednn_multiplies_bfloat16_in_tiles(
    monkeypatch: pytest.MonkeyPatch, flags: str, free: ModuleType, reproducible: ModuleType
) -> None:
    monkeypatch.setattr("batchrun.ops.describe_cpu", lambda: flags)
    cpu = torch.device("cpu")
    assert backend(cpu, torch.bfloat16, 64, reproducible=False) is free
    assert backend(cpu, torch.bfloat16, 64, reproducible=True) is reproducible
    assert backend(cpu, torch.float32, 64, reproducible=False) is native_ops


# ---- noise


def test_philox_is_the_published_one() -> None:
    """The known answer of Random123 for Philox4x32-10 with counter and key zero."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox(zero, zero, zero).item() == 0x6627E8D5


def test_noise_does_not_depend_on_the_shape_it_is_drawn_in() -> None:
    key = torch.full((1,), 12345, dtype=torch.int64)
    position = torch.tensor([7])
    words = torch.arange(40_001)
    whole = gumbel(key, position, words)
    for begin, end in ((0, 1), (3, 20), (16_000, 17_001), (40_000, 40_001)):
        assert torch.equal(gumbel(key, position, words[begin:end]), whole[begin:end])
