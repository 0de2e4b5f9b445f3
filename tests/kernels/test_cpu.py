"""The native CPU kernels against float64, and the promise that a token's bits depend on that token alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchrun.kernels import cpu
from batchrun.kernels.cpu import build
from batchrun.ops import torch_ops
from tests.marks import needs_kernels

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
examples = settings.default.max_examples
quick = settings(max_examples=examples * 6 // 10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Batch:
    cu_q: Tensor
    kv_len: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class Sequence:
    """All tokens of one request: q [n, HQ, D], k and v [n, HKV, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


Row = tuple[Sequence, int, int]  # the queries [start, end) of a sequence


class Options(TypedDict, total=False):
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class Case:
    rows: list[Row]
    block_size: int
    options: Options

    @property
    def lengths(self) -> list[int]:
        return [end - start for _, start, end in self.rows]


def make_sequence(n: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(n, heads, dim, generator=generator).to(dtype)

    return Sequence(draw(q_heads) * 2, draw(kv_heads), draw(kv_heads))


def words(dtype: torch.dtype) -> int:
    """Elements in a word of the cache."""
    return 4 // dtype.itemsize


def lay_out(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [n_blocks, HKV, block_size, D] in the layouts of a cache."""
    per_word = words(k.dtype)
    keys, values = k.unflatten(3, (-1, per_word)).transpose(2, 3), v.unflatten(2, (-1, per_word)).transpose(3, 4)
    return keys.reshape(k.shape), values.reshape(v.shape)


def in_order(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """What `lay_out` laid out."""
    per_word, (block_size, dim) = words(k_cache.dtype), k_cache.shape[2:]
    keys, values = k_cache.flatten(2), v_cache.flatten(2)
    keys = keys.unflatten(2, (-1, block_size, per_word)).transpose(2, 3)
    values = values.unflatten(2, (-1, dim, per_word)).transpose(3, 4)
    return keys.reshape(k_cache.shape), values.reshape(v_cache.shape)


def paged(
    rows: list[tuple[Sequence, int, int]], block_size: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Queries [start, end) of each sequence as a batch over shuffled blocks; what no token owns is NaN.

    Full blocks of sequences that begin alike are the same.
    """
    known: dict[bytes, int] = {}
    blocks = [-(-end // block_size) for _, _, end in rows]
    kv_heads, dim = rows[0][0].k.shape[1:]
    order = (torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    shape = (sum(blocks) + 1, kv_heads, 2, block_size, dim)
    k, v = torch.full(shape, torch.nan, dtype=rows[0][0].k.dtype).unbind(2)
    table = torch.zeros(len(rows), max(blocks) + 1, dtype=torch.int32)
    for i, (sequence, _, end) in enumerate(rows):
        for j in range(blocks[i]):
            kept = slice(j * block_size, min((j + 1) * block_size, end))
            prefix = sequence.k[: kept.stop].contiguous().view(torch.uint8).numpy().tobytes()
            block = known.get(prefix, 0) or order.pop()
            if kept.stop - kept.start == block_size:
                known[prefix] = block
            table[i, j] = block
            k[block, :, : kept.stop - kept.start] = sequence.k[kept].transpose(0, 1)
            v[block, :, : kept.stop - kept.start] = sequence.v[kept].transpose(0, 1)
    k_cache, v_cache = torch.stack(lay_out(k, v), dim=2).unbind(2)
    lengths = torch.tensor([0] + [end - start for _, start, end in rows])
    batch = Batch(lengths.cumsum(0).int(), torch.tensor([end for _, _, end in rows], dtype=torch.int32), table)
    return torch.cat([s.q[start:end] for s, start, end in rows]), k_cache, v_cache, batch


def after(stem: Sequence, own: Sequence) -> Sequence:
    """A sequence that begins with all of ``stem``."""
    return Sequence(*(torch.cat([getattr(stem, name), getattr(own, name)]) for name in ("q", "k", "v")))


def run(rows: list[Row], block_size: int = 16, seed: int = 0, **options: Unpack[Options]) -> Tensor:
    q, k_cache, v_cache, batch = paged(rows, block_size, seed)
    return cpu.attention(q, k_cache, v_cache, batch, scale=q.shape[-1] ** -0.5, **options)


def reference(s: Sequence, start: int, end: int, window: int | None = None, softcap: float | None = None) -> Tensor:
    group = s.q.shape[1] // s.k.shape[1]
    q = s.q[start:end].double().transpose(0, 1)
    k, v = (x[:end].double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (s.k, s.v))
    scores = q @ k.transpose(1, 2) * s.q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(start, end)[:, None] - torch.arange(end)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.matmul(scores.masked_fill(hidden, -torch.inf).softmax(-1), v).transpose(0, 1)


@st.composite
def batches(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    dim = draw(st.sampled_from([8, 24, 64, 72, 80, 96, 128, 256]))
    block_size = draw(st.sampled_from([2, 6, 8, 16, 32, 64]))
    dtype = draw(st.sampled_from(DTYPES))
    multiple = st.sampled_from([block_size, 64, 128, 512, 1024])
    length = st.integers(1, 150) | st.builds(lambda m, off: max(1, m + off), multiple, st.integers(-1, 1))
    rows = []
    for seed, end in enumerate(draw(st.lists(length, min_size=1, max_size=4))):
        n_queries = min(draw(st.sampled_from([1, 1, 2, 5, 33, 64, 200])), end)
        rows.append((make_sequence(end, kv_heads * group, kv_heads, dim, dtype, seed), end - n_queries, end))
    window, softcap = (
        draw(st.none() | st.sampled_from([1, 7, 64, 65, 500])),
        draw(st.none() | st.sampled_from([5.0, 50.0])),
    )
    return Case(rows, block_size, {"window": window, "softcap": softcap})


@needs_kernels
@given(batches())
@quick
def test_attention_equals_float64(case: Case) -> None:
    out = run(case.rows, case.block_size, **case.options)
    expected = torch.cat([reference(*row, **case.options) for row in case.rows])
    tolerance = 12 * ROUNDING[out.dtype]  # large scores magnify rounding; a wrong mask or order is off by far more
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@given(batches())
@quick
def test_attention_bits_do_not_depend_on_the_batch(case: Case) -> None:
    together = torch.split(run(case.rows, case.block_size, **case.options), case.lengths)
    for row, expected in zip(case.rows, together, strict=True):
        assert torch.equal(run([row], case.block_size, seed=9, **case.options), expected)
        assert torch.equal(run([row], 128 - case.block_size, **case.options), expected)
    backwards = torch.split(run(case.rows[::-1], case.block_size, seed=5, **case.options), case.lengths[::-1])
    assert all(torch.equal(a, b) for a, b in zip(together, backwards[::-1], strict=True))


@st.composite
def decoding_families(draw: st.DrawFn) -> Case:
    """Rows of one query each (and a few of more), in groups that begin alike, some of them for longer than others."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (3, 3), (2, 8), (1, 40)]))
    dim, dtype = draw(st.sampled_from([8, 64, 72])), draw(st.sampled_from(DTYPES))
    make = partial(make_sequence, q_heads=kv_heads * group, kv_heads=kv_heads, dim=dim, dtype=dtype)
    stem_length = st.sampled_from([1, 63, 64, 65, 130, 448, 511, 512, 513, 700])
    rows: list[Row] = []
    for stem in range(draw(st.integers(1, 3))):
        begin = make(draw(stem_length), seed=100 + stem)
        for seed in range(draw(st.integers(1, 40 // group + 2))):
            if draw(st.integers(0, 5)) == 0:
                begin = after(begin, make(draw(st.sampled_from([16, 64, 200])), seed=200 + seed))
            sequence = after(begin, make(draw(st.integers(1, 70)), seed=len(rows)))
            end = len(sequence.q)
            rows.append((sequence, end - min(end, draw(st.sampled_from([1, 1, 1, 1, 1, 1, 3]))), end))
    return Case(rows, draw(st.sampled_from([8, 16, 32, 64])), {"window": draw(st.sampled_from([None, None, 64]))})


@needs_kernels
@given(decoding_families())
@settings(quick, max_examples=examples * 4 // 10)
def test_rows_that_begin_alike_keep_their_bits_and_equal_float64(case: Case) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many rows for a thread: their KV heads take turns
    try:
        together = torch.split(run(case.rows, case.block_size, **case.options), case.lengths)
    finally:
        torch.set_num_threads(threads)
    for row, out in zip(case.rows, together, strict=True):
        assert torch.equal(run([row], case.block_size, seed=9, **case.options), out)
        tolerance = 12 * ROUNDING[out.dtype]
        torch.testing.assert_close(out.double(), reference(*row, **case.options), rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (7, 1, 128)])
def test_attention_bits_do_not_depend_on_chunks(
    dtype: torch.dtype, window: int | None, q_heads: int, kv_heads: int, dim: int
) -> None:
    sequence = make_sequence(601, q_heads, kv_heads, dim, dtype)
    whole = run([(sequence, 0, 601)], window=window)
    for chunk in (1, 7, 64, 100, 512):
        starts = range(0, 601, chunk) if chunk > 7 else (0, 63, 64, 300, 511, 512, 600)
        for start in starts:
            end = min(start + chunk, 601)
            assert torch.equal(run([(sequence, start, end)], window=window), whole[start:end])


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("lengths", [[3000], [1, 700, 5, 2100], [64] * 40])
def test_attention_bits_do_not_depend_on_threads(lengths: list[int], restore_threads: None) -> None:
    rows = [(make_sequence(n, 4, 2, 64, torch.float32, n), max(0, n - 30), n) for n in lengths]
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(run(rows))
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("at", [70, 71])  # two tokens of bfloat16 share a word
def test_a_nan_reaches_the_tokens_that_see_it_alone(dtype: torch.dtype, window: int | None, at: int) -> None:
    clean = make_sequence(100, 6, 2, 64, dtype)
    dirty = Sequence(clean.q.clone(), clean.k.clone(), clean.v.clone())
    for x in (dirty.q, dirty.k, dirty.v):
        x[at] = torch.nan
    out, expected = run([(dirty, 0, 100)], window=window), run([(clean, 0, 100)], window=window)
    last = at + window if window else 100
    assert torch.equal(out[:at], expected[:at])
    assert out[at:last].isnan().all()
    assert torch.equal(out[last:], expected[last:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scores(dtype: torch.dtype) -> None:
    s = make_sequence(80, 2, 1, 64, dtype)
    s.q[:], s.k[:] = 1, 0
    s.k[3], s.k[4], s.k[5] = -30, 40, torch.inf
    s.q[79] = -1
    out, value = run([(s, 0, 80)]).float(), s.v[:, 0].float()
    mean = value.cumsum(0) / torch.arange(1, 81)[:, None]
    tolerance = {"rtol": 4 * ROUNDING[dtype], "atol": 4 * ROUNDING[dtype]}
    torch.testing.assert_close(out[2, 0], mean[2], **tolerance)
    torch.testing.assert_close(out[3, 0], mean[2], **tolerance)  # the fourth key scores -240: it counts for nothing
    torch.testing.assert_close(out[4, 0], value[4], **tolerance)  # the fifth scores 320: it is all that counts
    assert out[5:79].isnan().all()  # an infinite score is no weight
    torch.testing.assert_close(out[79, 0], value[3], **tolerance)  # every infinite score is negative


@needs_kernels
def test_attention_reads_no_window_freed_block_and_zeroes_padding() -> None:
    sequence = make_sequence(300, 4, 2, 64, torch.float32)
    q, k_cache, v_cache, batch = paged([(sequence, 290, 300)], 16)
    batch.block_table[0, : (290 - 50) // 16] = 0
    padded = torch.cat([q, q.new_full((6, 4, 64), torch.nan)])
    out = cpu.attention(padded, k_cache, v_cache, batch, scale=0.125, window=50)
    assert torch.equal(out[:10], run([(sequence, 290, 300)], window=50))
    assert (out[10:] == 0).all()


@needs_kernels
def test_attention_mixes_dtypes() -> None:
    s = make_sequence(90, 4, 2, 64, torch.bfloat16)
    q, k_cache, v_cache, batch = paged([(s, 80, 90)], 16)
    out = cpu.attention(q.float(), k_cache, v_cache, batch, scale=0.125)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), reference(s, 80, 90), rtol=0.02, atol=0.02)  # of bfloat16 probabilities


@needs_kernels
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_table", -1, "block -1 at 0"),
        ("block_table", 99, "block 99"),
        ("kv_len", 10_000, "kv_len 10000"),
        ("kv_len", 3, "kv_len 3, with 10 query"),
        ("cu_q", 11, "cu_q"),
    ],
)
def test_attention_refuses_indices_out_of_range(field: str, value: int, message: str) -> None:
    q, k_cache, v_cache, batch = paged([(make_sequence(40, 4, 2, 64, torch.float32), 30, 40)], 16)
    getattr(batch, field).view(-1)[-1 if field == "cu_q" else 0] = value
    with pytest.raises(ValueError, match=message):
        cpu.attention(q, k_cache, v_cache, batch, scale=1.0)


@needs_kernels
def test_attention_refuses_wrong_tensors() -> None:
    q, k_cache, v_cache, batch = paged([(make_sequence(40, 4, 2, 64, torch.float32), 30, 40)], 16)
    for bad_q in (q.half(), q[:, :3].contiguous(), q.transpose(0, 1), q[:, :, :32].contiguous()):
        with pytest.raises(ValueError, match=r"must be|query over|head_dim"):
            cpu.attention(bad_q, k_cache, v_cache, batch, scale=1.0)
    odd = torch.zeros(9, 2, 2, 7, 64, dtype=torch.bfloat16).unbind(2)
    with pytest.raises(ValueError, match="block_size must be even"):
        cpu.attention(q.bfloat16(), *odd, batch, scale=1.0)
    for bad_k, bad_v in (
        (k_cache, v_cache.contiguous()),
        (k_cache.transpose(0, 1), v_cache),
        (k_cache[:, :, :8], v_cache),
    ):
        with pytest.raises(ValueError, match=r"contiguous blocks of a head"):
            cpu.attention(q, bad_k, bad_v, batch, scale=1.0)
    with pytest.raises(ValueError, match="window"):
        cpu.attention(q, k_cache, v_cache, batch, scale=1.0, window=0)


# ----------------------------------------------------------------------------------------------------------------------


@needs_kernels
@given(
    st.sampled_from(DTYPES), st.integers(0, 200) | st.sampled_from([768, 900]), st.integers(1, 150),
    st.sampled_from([1, 8, 72, 511, 512, 513, 1100, 2049]), st.booleans(), st.integers(0, 9),
)  # fmt: skip
@quick
def test_linear_equals_float64_and_rows_stand_alone(
    dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    added = torch.randn(n).to(dtype) if bias else None
    panels = cpu.Panels(weight)
    assert torch.equal(panels.to_dense(), weight)
    out = cpu.linear(x, panels, added)
    expected = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    size = x.double().abs() @ weight.double().abs().T + 1  # what rounding is relative to
    assert ((out.double() - expected).abs() <= size * 2e-6 + expected.abs() * ROUNDING[dtype]).all()
    assert torch.equal(cpu.linear(x, panels, added, torch.float32).to(dtype), out)
    for begin, end in ((0, 1), (rows // 2, rows), (rows // 3, rows // 3 + 7)):
        assert torch.equal(cpu.linear(x[begin:end].contiguous(), panels, added), out[begin:end])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_bits_do_not_depend_on_threads(dtype: torch.dtype, restore_threads: None) -> None:
    x, panels = torch.randn(1000, 301).to(dtype), cpu.Panels(torch.randn(500, 301).to(dtype))
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(cpu.linear(x, panels))
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernels
def test_linear_refuses_what_does_not_fit() -> None:
    panels = cpu.Panels(torch.randn(8, 16))
    for x, bias in (
        (torch.randn(2, 8), None),
        (torch.randn(2, 16).bfloat16(), None),
        (torch.randn(2, 16), torch.randn(9)),
    ):
        with pytest.raises(ValueError, match=r"the weight|bias must be"):
            cpu.linear(x, panels, bias)


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(0, 70), width=st.integers(1, 700), seed=st.integers(0, 99))
@quick
def test_norms_equal_float64_and_rows_stand_alone(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, width), (rows, width), (width,)))
    out = cpu.rms_norm(x, weight, 1e-5)
    tolerance = 2 * ROUNDING[dtype]
    torch.testing.assert_close(out.double(), norm64(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
    total = x + residual
    normed = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, cpu.rms_norm(total, weight, 1e-5))
    for i in range(0, rows, 17):
        assert torch.equal(cpu.rms_norm(x[i], weight, 1e-5), out[i])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(0, 40), width=st.integers(1, 600))
@quick
def test_silu_mul_equals_float64_and_rows_stand_alone(dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 6).to(dtype)
    out = cpu.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    tolerance = ROUNDING[dtype]
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=1e-9)
    for i in range(0, rows, 11):
        assert torch.equal(cpu.silu_mul(gate_up[i : i + 1])[0], out[i])


@needs_kernels
@given(st.integers(0, 5), st.integers(1, 100), st.integers(0, 99))
@quick
def test_argmax_is_the_first_of_the_largest_and_minds_nan(rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randint(-3, 3, (rows, width)).float().masked_fill(torch.rand(rows, width) < 0.2, -torch.inf)
    for _ in range(2):
        assert torch.equal(cpu.argmax(logits), torch_ops.argmax(logits))
        logits[:1, seed % width] = torch.nan
    assert (cpu.argmax(logits[:1]) == -1).all()


@needs_kernels
def test_silu_of_extremes() -> None:
    gate = torch.tensor([-torch.inf, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, torch.inf, torch.nan])
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(cpu.silu_mul(torch.cat([gate, torch.ones(9)])[None])[0], expected, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_bf16_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(4000), torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, 1e-37, -2.0])])
    values = x.view(501, 8)
    qkv = torch.cat([torch.zeros(501, 16), values], dim=1)
    k_cache, v_cache = (torch.zeros(501, 1, 8, 8, dtype=dtype) for _ in range(2))
    cpu.rope_kv_write(
        qkv, torch.ones(1, 8), torch.zeros(501, dtype=torch.int32), torch.arange(501) * 8, k_cache, v_cache
    )
    written = in_order(k_cache, v_cache)[1][:, 0, 0]
    torch.testing.assert_close(written, values.to(dtype), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@given(
    tokens=st.integers(1, 40),
    dim=st.sampled_from([8, 24, 64, 80, 128]),
    heads=st.sampled_from([(9, 3), (4, 4), (7, 1)]),
    normed=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
)
@quick
def test_rope_equals_float64_and_tokens_stand_alone(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    tokens: int,
    dim: int,
    heads: tuple[int, int],
    normed: bool,
    index: torch.dtype,
) -> None:
    q_heads, kv_heads = heads
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.arange(100)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions, slots = torch.randint(0, 100, (tokens,)).to(index), torch.randperm(48)[:tokens].to(index)
    norms = [torch.randn(dim).to(dtype) if normed else None for _ in range(2)]
    caches = [torch.zeros(6, kv_heads, 8, dim, dtype=cache_dtype) for _ in range(2)]
    rope = partial(cpu.rope_kv_write, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
    q = rope(qkv, cos_sin, positions, slots, *caches)

    parts = torch.split(qkv.double().view(tokens, -1, dim), [q_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions.long()].double()[:, None].chunk(2, dim=-1)
    expected = []
    for x, weight in zip(parts[:2], norms, strict=True):
        x = x if weight is None else norm64(x, weight, 1e-6)
        a, b = x.chunk(2, dim=-1)
        expected.append(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
    ordered = in_order(*caches)
    written = [c.transpose(1, 2).reshape(48, kv_heads, dim)[slots.long()] for c in ordered]
    for got, want in ((q, expected[0]), (written[0], expected[1]), (written[1], parts[2])):
        tolerance = 4 * ROUNDING[got.dtype]
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)

    for i in range(0, tokens, 13):
        again = [torch.zeros_like(c) for c in caches]
        alone = rope(qkv[i : i + 1], cos_sin, positions[i : i + 1], slots[i : i + 1], *again)
        assert torch.equal(alone[0], q[i])
        where = divmod(int(slots[i]), 8)
        for a, b in zip(in_order(*again), ordered, strict=True):
            assert torch.equal(a[where[0], :, where[1]], b[where[0], :, where[1]])


@needs_kernels
@pytest.mark.parametrize(("position", "slot"), [(-1, 0), (10, 0), (0, -1), (0, 32)])
def test_rope_refuses_indices_before_it_writes(position: int, slot: int) -> None:
    caches = [torch.zeros(2, 1, 16, 8) for _ in range(2)]
    positions, slots = torch.tensor([0, position]), torch.tensor([1, slot])
    with pytest.raises(ValueError, match="token 1 has"):
        cpu.rope_kv_write(torch.ones(2, 24), torch.ones(10, 8), positions, slots, *caches)
    assert all((c == 0).all() for c in caches)


# ----------------------------------------------------------------------------------------------------------------------


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_a_compiler_there_is_one_warning(tmp_path: Path) -> None:
    code = "from batchrun.kernels import cpu; print(cpu.available(), cpu.available())"
    said = python(code, CXX="no-such-compiler", BATCHRUN_CACHE=str(tmp_path))
    assert "False False" in said
    assert said.count("RuntimeWarning") == 1
    assert "no-such-compiler" in said


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'out of patience' >&2; exit 3\n")
    compiler.chmod(0o755)
    said = python(
        "from batchrun.kernels import cpu; print(cpu.available())", CXX=str(compiler), BATCHRUN_CACHE=str(tmp_path)
    )
    assert "False" in said
    assert "out of patience" in said
    assert [p.name for p in (tmp_path / "native").iterdir()] == []


@needs_kernels
def test_concurrent_processes_build_one_library_and_share_torchs_openmp(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from batchrun.kernels import cpu
from batchrun.kernels.cpu import build
build.FLAGS += ("-O0",)  # takes less time
assert cpu.available()
maps = Path("/proc/self/maps")
if maps.exists():
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes
"""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexec {shlex.join(build.find_compiler())} "$@"\n')
    compiler.chmod(0o755)
    environment = {"BATCHRUN_CACHE": str(tmp_path), "CXX": str(compiler)}
    children = [subprocess.Popen([sys.executable, "-c", code], env=os.environ | environment) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    python(code, **environment)
    assert len(list((tmp_path / "native").iterdir())) == 1
    assert calls.read_text().count("-shared") == 1


def test_importing_costs_no_build() -> None:
    said = python("from batchrun.kernels import cpu", CXX="no-such-compiler")
    assert said == ""
