"""GPU attention in Triton's interpreter, against dense attention in float64."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from batchrun.job import KVCacheDType
from batchrun.kernels.gpu import attention_plan
from batchrun.kernels.gpu.attention_plan import padded, plan
from batchrun.models.kv_cache import DTYPES, KVCache
from batchrun.ops import kv_numbers

module = importlib.import_module("batchrun.kernels.gpu.attention")  # the package gives its function that name
form = module.form


@dataclass
class Case:
    rows: list[tuple[int, int]]  # query tokens, earlier keys
    heads: tuple[int, int] = (2, 2)  # query heads, KV heads
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    shared: int = 0  # keys that all rows have in common
    dtype: torch.dtype = torch.float32
    reproducible: bool = False
    scale: float = 0.3
    kept: KVCacheDType = "auto"


class Setup:
    """A cache full of NaN but for the keys that some query sees, and the queries."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        random = torch.Generator().manual_seed(seed)
        n_heads, n_kv_heads = case.heads
        size = case.block_size
        self.q_len = np.array([tokens for tokens, _ in case.rows], np.int32)
        self.kv_len = np.array([sum(row) for row in case.rows], np.int32)
        self.cu_q = np.append(0, np.cumsum(self.q_len)).astype(np.int32)
        blocks = -(-self.kv_len // size)
        free = iter((torch.randperm(int(blocks.sum()) + 2, generator=random) + 1).tolist())
        self.table = np.zeros((len(case.rows), int(blocks.max(initial=1))), np.int32)
        shape = (int(blocks.sum()) + 3, n_kv_heads, size, case.head_dim)
        self.cache = KVCache.zeros(*shape, DTYPES.get(case.kept, case.dtype), torch.device("cpu"))
        caches = tuple(zip((self.cache.keys, self.cache.values), self.cache.scales or (None, None), strict=True))
        for numbers, scales in caches:
            if scales is None:
                numbers.fill_(torch.nan)
            else:
                numbers.view(torch.uint8).random_(0, 256, generator=random)
                scales.fill_(torch.nan)
        self.dense: list[Tensor] = []
        common = torch.randn(2, case.shared, n_kv_heads, case.head_dim, generator=random)
        for row, (tokens, earlier) in enumerate(case.rows):
            first = 0 if case.window is None else max(0, earlier - case.window + 1)
            keep = case.shared // size
            self.table[row, first // size : blocks[row]] = [next(free) for _ in range(first // size, blocks[row])]
            if row:
                self.table[row, :keep] = self.table[0, :keep]
            keys = torch.randn(2, tokens + earlier, n_kv_heads, case.head_dim, generator=random)
            keys[:, : case.shared] = common
            places = torch.arange(first, tokens + earlier)
            held = torch.from_numpy(self.table[row])[places // size].long()
            for (numbers, scales), written in zip(caches, keys.to(case.dtype), strict=True):
                kv_numbers.write(written[first:], numbers, scales, held, places % size)
            kept = [kv_numbers.read(*each, held, slice(None), places % size) for each in caches]
            self.dense.append(functional.pad(torch.stack(kept).double(), (0, 0, 0, 0, first, 0)))
        self.q = torch.randn(int(self.cu_q[-1]), n_heads, case.head_dim, generator=random).to(case.dtype)

    def run(self, **sizes: int) -> Tensor:
        case = self.case
        made = plan(
            self.cu_q,
            self.kv_len,
            self.table,
            block_size=case.block_size,
            group=case.heads[0] // case.heads[1],
            window=case.window,
            reproducible=case.reproducible,
        )
        if sizes:
            made = padded(
                made, made.sizes._replace(**{name: getattr(made.sizes, name) + n for name, n in sizes.items()})
            )
        names = ("few", "many", "merge_tokens", "merge_starts", "merge_partials")
        arrays = {name: torch.from_numpy(getattr(made, name).copy()) for name in names}
        self.plan = SimpleNamespace(
            **arrays, few_tile=made.few_tile, many_tile=made.many_tile, n_partials=made.n_partials
        )
        batch = SimpleNamespace(block_table=torch.from_numpy(self.table), plan=self.plan)
        options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
        cache = self.cache
        return module.attention(self.q, cache.keys, cache.values, batch, kv_scales=cache.scales, **options)

    def expected(self) -> Tensor:
        case, parts = self.case, []
        for row, (tokens, earlier) in enumerate(case.rows):
            q = self.q[self.cu_q[row] : self.cu_q[row + 1]].double()
            k, v = self.dense[row].repeat_interleave(case.heads[0] // case.heads[1], dim=2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * case.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            behind = torch.arange(earlier, earlier + tokens)[:, None] - torch.arange(earlier + tokens)
            hidden = (behind < 0) | (behind >= (case.window or earlier + tokens))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
POINTERS, DESCRIPTORS = (8, 0), (9, 0)
both_forms = pytest.mark.parametrize(
    "capability", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"], indirect=True
)


def form_of_halves(*key: Any) -> Any:
    """The form for bfloat16, which float32 takes here: only its numbers are exact under the interpreter."""
    return form(*key[:4], torch.bfloat16, *key[5:])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "form", form_of_halves)
    monkeypatch.setattr(attention_plan, "SPLIT", 128)
    monkeypatch.setattr(attention_plan, "MIN_SHARED", 64)


@pytest.fixture
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda device: request.param)


def check(case: Case, **sizes: int) -> Setup:
    setup = Setup(case)
    torch.testing.assert_close(setup.run(**sizes).double(), setup.expected(), atol=TOLERANCE[case.dtype], rtol=1e-4)
    return setup


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 1), (16, 2)])
def test_one_token(heads: tuple[int, int]) -> None:
    check(Case([(1, n - 1) for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)], heads))


@both_forms
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 1)])
@pytest.mark.parametrize("earlier", [0, 31, 100])
def test_chunks(heads: tuple[int, int], earlier: int, capability: None) -> None:
    check(Case([(n, earlier) for n in (1, 2, 5, 17, 33)], heads))


@both_forms
@pytest.mark.parametrize("tokens", [31, 32, 33, 63, 64, 65])
def test_prompts_around_tiles(tokens: int, capability: None) -> None:
    check(Case([(tokens, 0), (tokens, 32)], (2, 1)))


@both_forms
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (5, 2.0), (64, None), (70, 2.0), (None, 2.0)])
def test_windows_and_caps(window: int | None, softcap: float | None, capability: None) -> None:
    rows = [(1, 0), (1, 63), (1, 64), (1, 200), (3, 130), (40, 90), (70, 0)]
    check(Case(rows, (2, 1), window=window, softcap=softcap))


@both_forms
def test_verifying_a_draft(capability: None) -> None:
    assert len(check(Case([(8, n - 8) for n in (8, 63, 64, 65, 131, 260)], (4, 1))).plan.many) == 9


@both_forms
@pytest.mark.parametrize("block_size", [16, 24, 32, 64, 128])
def test_block_sizes(block_size: int, capability: None) -> None:
    check(Case([(1, 140), (6, 100), (30, 50)], (4, 2), block_size=block_size))


@both_forms
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_dims(head_dim: int, dtype: torch.dtype, capability: None) -> None:
    check(Case([(1, 70), (20, 45)], (4, 1), head_dim, dtype=dtype, block_size=32, scale=head_dim**-0.5))


@pytest.mark.parametrize(("heads", "n_few", "n_many"), [((1, 1), 7, 0), ((4, 1), 6, 1), ((40, 1), 6, 2)])
@both_forms
def test_shared_prefixes(heads: tuple[int, int], n_few: int, n_many: int, capability: None) -> None:
    plan = check(Case([(1, 64 + n) for n in (1, 5, 64, 16, 40)], heads, shared=64)).plan
    assert (len(plan.few), len(plan.many), len(plan.merge_tokens)) == (n_few, n_many, 5)


def test_more_pieces_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT", 64)
    assert check(Case([(1, 64 * 18), (1, 3), (2, 63)], (1, 1))).plan.n_partials == 19 + 4


@both_forms
def test_padding(capability: None) -> None:
    case = Case([(1, 150), (0, 0), (30, 40), (1, 2)], (4, 1))
    plan = check(case, few=3, many=2, merges=2, merged=3, partials=4).plan
    assert min(plan.few[:, 2].min(), plan.many[:, 2].min()) == 0
    assert plan.merge_tokens.min() == -1


@both_forms
@pytest.mark.parametrize("window", [None, 37])
def test_reproducible_bits_do_not_depend_on_chunks_or_neighbours(window: int | None, capability: None) -> None:
    def row(setup: Setup, first: int, last: int) -> Tensor:
        """What the last row's tokens from ``first`` to ``last`` get, as a chunk, behind the other rows."""
        case = replace(setup.case, rows=[*setup.case.rows[:-1], (last - first, first)])
        part = copy.copy(setup)
        part.case, part.kv_len = case, np.array([sum(row) for row in case.rows], np.int32)
        part.cu_q = np.append(0, np.cumsum([tokens for tokens, _ in case.rows])).astype(np.int32)
        start = int(setup.cu_q[-2])
        part.q = torch.cat((setup.q[:start], setup.q[start + first : start + last]))
        return part.run()[start:]

    setup = Setup(Case([(1, 30), (90, 0)], (2, 1), window=window, reproducible=True))
    whole = setup.run()[1:]
    for cuts in ([0, 33, 34, 90], [0, 7, 64, 89, 90]):
        assert torch.equal(torch.cat([row(setup, *cut) for cut in pairwise(cuts)]), whole)


@both_forms
def test_a_bad_row_shows_and_stays_alone(capability: None) -> None:
    setup = Setup(Case([(1, 70), (1, 200), (40, 30)], (2, 1)))
    good = setup.run()
    for row, key in ((1, 3), (2, 20)):
        setup.cache.keys[setup.table[row, key // 16], :, key % 16] = torch.nan
    bad = setup.run()
    assert torch.equal(bad[:1], good[:1])
    assert bad[1:].isnan().all()


QUANTIZED = {
    "one token": Case([(1, n - 1) for n in (1, 15, 64, 65, 129, 200)], (4, 1)),
    "one token, 64": Case([(1, 70), (1, 130)], (4, 2), 64, 32),
    "128": Case([(1, 70), (20, 45)], (8, 2), 128, 32, scale=0.1),
    "half empty": Case([(1, 70), (20, 45)], (4, 2), 20, 2),
    "80, in blocks of 24": Case([(6, 100), (30, 50)], (3, 1), 80, 24, scale=0.1),
    "window and cap": Case([(1, 0), (1, 200), (3, 130), (40, 90), (70, 0)], (2, 1), window=50, softcap=3.0),
    "a shared beginning": Case([(1, 64 + n) for n in (1, 5, 64)], (40, 1), shared=64),
    "reproducible": Case([(1, 150), (33, 100)], (4, 2), reproducible=True),
    "float16": Case([(1, 70), (20, 45)], (4, 1), 64, dtype=torch.float16, scale=0.1),
    "bfloat16": Case([(1, 70), (20, 45)], (4, 1), 64, dtype=torch.bfloat16, scale=0.1),
}


@pytest.mark.parametrize("case", QUANTIZED)
@pytest.mark.parametrize("kept", ["fp8", "int8", "int4"])
def test_fewer_bits(case: str, kept: KVCacheDType) -> None:
    check(replace(QUANTIZED[case], kept=kept), few=1, many=1, merges=1, merged=1, partials=1)


@pytest.mark.parametrize("kept", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("capability", [DESCRIPTORS], ids=["9.0"], indirect=True)
def test_fewer_bits_on_devices_with_descriptors(kept: KVCacheDType, capability: None) -> None:
    check(Case([(1, 150), (70, 70)], (4, 2), 32, kept=kept))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bfloat16_cache_of_another_models_dtype(dtype: torch.dtype) -> None:
    check(Case([(1, 150), (20, 70)], (4, 2), 32, dtype=dtype, kept="bf16"))


@pytest.mark.parametrize("kept", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_a_bad_vector_reaches_the_tokens_that_see_it_alone(kept: KVCacheDType, part: int) -> None:
    setup = Setup(Case([(1, 70), (90, 0)], (2, 1), kept=kept))
    good = setup.run()
    assert setup.cache.scales is not None
    for key, bad in ((40, torch.nan), (60, torch.inf)):
        scales = setup.cache.scales[part]
        block = setup.table[1, key // 16]
        before = scales[block, :, key % 16].clone()
        scales[block, :, key % 16] = bad
        if bad == torch.inf:  # as of a vector with infinity, whose numbers are 0
            numbers = (setup.cache.keys, setup.cache.values)[part].view(torch.uint8)
            numbers[block, :, key % 16] = 0
        found = setup.run()
        assert torch.equal(found[: 1 + key], good[: 1 + key])
        assert found[1 + key :].isnan().all()
        scales[block, :, key % 16] = before


def test_refuses_a_scale_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match="the scale is 0"):
        Setup(Case([(1, 1)], scale=0.0)).run()


FAULTS = {
    "a token does not see itself": ("key[None, :] <= positions", "key[None, :] < positions"),
    "no mask where the last tile begins": ("tl.minimum(key_end, position + 1)", "tl.minimum(key_end, position + KEYS)"),
    "a window of one more": ("> positions[:, None] - window", ">= positions[:, None] - window"),
    "no mask where the window begins": ("position + tokens - window)", "position - window)"),
    "no scale": ("0.0, scale * math.log2(math.e)", "0.0, math.log2(math.e)"),
    "no scale inside the cap": ("math.log2(math.e) * scale / softcap", "math.log2(math.e) / softcap"),
    "values past the end": ("mask=(held[:, None] & wide) if MASKED else wide", "mask=wide"),
    "values past the end, by descriptor": ("values = tl.where(held[:, None], values, 0.0)", "pass"),
    "lines that see nothing": ('base = tl.where(peak == float("-inf"), 0.0, peak)', "base = peak"),
    "merged without decay": ("acc = acc * decay + tl.sum(", "acc = acc + tl.sum("),
    "merged the wrong way": ("tl.exp2(power - base)", "tl.exp2(power + base)"),
}


@both_forms
def test_the_case_of_the_faults(capability: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGED_AT_ONCE", 2)
    check_all(monkeypatch)


def check_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT", 64)
    rows = [(1, 64 * 6), (5, 100), (40, 90)]
    check(Case(rows, (2, 1), scale=0.5))
    check(Case(rows[1:], (2, 1), window=50, softcap=3.0))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, (right, wrong) = Path(str(module.__file__)).read_text(), FAULTS[fault]
    assert right in source
    file = tmp_path / "faulty.py"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("batchrun.kernels.gpu.faulty", file)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, faulty)
    spec.loader.exec_module(faulty)
    monkeypatch.setattr(faulty, "capability", lambda device: DESCRIPTORS)
    monkeypatch.setattr(faulty, "form", form_of_halves)
    monkeypatch.setattr(faulty, "MERGED_AT_ONCE", 2)
    monkeypatch.setattr(module, "attention", faulty.attention)
    with pytest.raises(AssertionError, match="not close"):
        check_all(monkeypatch)
