"""Caches of 8 and 4 bits: what is written, and attention against float64 of what was, by every kind of operations."""

from __future__ import annotations

from collections.abc import Sequence as Several
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchrun.job import KVCacheDType
from batchrun.models.kv_cache import DTYPES, KVCache
from batchrun.ops import fixed_ops, kv_numbers, native_ops, torch_ops
from batchrun.ops.attention_batch import AttentionBatch
from tests.kernels.test_cpu import (
    Case,
    Row,
    Sequence,
    batches,
    decoding_families,
    make_sequence,
    reference,
    restore_threads,
)
from tests.marks import needs_kernels

__all__ = ["restore_threads"]  # a fixture

CPU = torch.device("cpu")
SMALL: list[KVCacheDType] = ["fp8", "int8", "int4"]
OPS = [torch_ops, fixed_ops, pytest.param(native_ops, marks=needs_kernels)]
examples = settings.default.max_examples
few = settings(max_examples=examples // 12 + 1, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rounded(x: Tensor, kept: KVCacheDType) -> Tensor:
    """Vectors [..., D] as the cache keeps them, float32."""
    return kv_numbers.dequantize(*kv_numbers.quantize(x, DTYPES[kept]))


def from_cache(cache: KVCache, *, native: bool) -> tuple[Tensor, Tensor]:
    """Keys and values [n_blocks, HKV, block_size, D] float32."""
    assert cache.scales is not None
    keys, values = cache.keys, cache.values
    block_size, dim = keys.shape[2:]
    if native and keys.dtype == torch.int8:
        keys = keys.flatten(2).unflatten(2, (-1, block_size, 2)).transpose(2, 3).flatten(3)
        values = values.flatten(2).unflatten(2, (-1, dim, 2)).transpose(3, 4).reshape(*keys.shape)
    elif native:
        keys, values = (x.contiguous().view(torch.uint8).flatten(2) for x in (keys, values))
        if cache.keys.dtype == torch.uint8:  # neighbours in a byte, and here the halves
            pairs = keys.unflatten(2, (-1, block_size)).transpose(2, 3)
            elements = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(3)
            low, high = elements.chunk(2, dim=-1)
            keys, values = low | high << 4, values.unflatten(2, (block_size, -1))
        else:
            keys = keys.unflatten(2, (-1, block_size, 2)).transpose(2, 3).flatten(3)
            values = values.unflatten(2, (block_size, -1, 2)).transpose(3, 4).flatten(3)
            keys, values = keys.contiguous().view(cache.keys.dtype), values.contiguous().view(cache.keys.dtype)
    k, v = (kv_numbers.dequantize(x, scales) for x, scales in zip((keys, values), cache.scales, strict=True))
    return k, v


def write(ops: ModuleType, cache: KVCache, rows: Several[Sequence], slots: Tensor) -> None:
    """Keep the keys and values of sequences, which are turned by nothing."""
    qkv = torch.cat([torch.cat((s.q, s.k, s.v), dim=1).flatten(1) for s in rows])
    dim = rows[0].q.shape[-1]
    still = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), dim=1)
    positions = torch.zeros(len(qkv), dtype=torch.int64)
    ops.rope_kv_write(qkv, still, positions, slots, cache.keys, cache.values, kv_scales=cache.scales)


def attend(
    ops: ModuleType, rows: Several[Row], kept: KVCacheDType, block_size: int = 16, seed: int = 0, **options: object
) -> list[Tensor]:
    """Attention of the queries [start, end) of each sequence; full blocks of sequences that begin alike are the same.

    What no token owns is anything, where the operations allow it.
    """
    known: dict[bytes, int] = {}
    blocks = [-(-end // block_size) for _, _, end in rows]
    order = (torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    table = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    for i, (sequence, _, end) in enumerate(rows):
        for j in range(blocks[i]):
            stop = min((j + 1) * block_size, end)
            prefix = sequence.k[:stop].contiguous().view(torch.uint8).numpy().tobytes()
            table[i, j] = known.get(prefix, 0) or order.pop()
            if stop == (j + 1) * block_size:
                known[prefix] = int(table[i, j])
    kv_heads, dim = rows[0][0].k.shape[1:]
    cache = KVCache.zeros(sum(blocks) + 1, kv_heads, block_size, dim, DTYPES[kept], CPU)
    if ops is not torch_ops and cache.scales is not None:
        for numbers, scales in zip((cache.keys, cache.values), cache.scales, strict=True):
            numbers.view(torch.uint8).random_(0, 256)
            scales.fill_(torch.nan)
    places = [torch.arange(end) for _, _, end in rows]
    slots = [
        line[at // block_size].long() * block_size + at % block_size for line, at in zip(table, places, strict=True)
    ]
    write(ops, cache, [Sequence(s.q[:end], s.k[:end], s.v[:end]) for s, _, end in rows], torch.cat(slots))
    lengths = [end - start for _, start, end in rows]
    batch = AttentionBatch(
        torch.tensor([0, *lengths]).cumsum(0).int(),
        torch.tensor([end for *_, end in rows]).int(),
        table,
        torch.empty(0),
    )
    q = torch.cat([s.q[start:end] for s, start, end in rows])
    scale = dim**-0.5
    out = ops.attention(q, cache.keys, cache.values, batch, scale=scale, kv_scales=cache.scales, **options)
    return list(out.split(lengths))


def expected(row: Row, kept: KVCacheDType, **options: object) -> Tensor:
    sequence, start, end = row
    k, v = rounded(sequence.k, kept), rounded(sequence.v, kept)
    return reference(Sequence(sequence.q, k, v), start, end, **options)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Large scores magnify rounding, that of queries to 16 bits among it; a wrong mask or scale is off by far more."""
    size = 2e-3 if dtype == torch.float32 else 16 * 2**-8
    return {"rtol": size, "atol": size}


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.__name__)
@pytest.mark.parametrize("kept", SMALL)
@given(case=batches())
@few
def test_attention_equals_float64_of_what_was_kept(ops: ModuleType, kept: KVCacheDType, case: Case) -> None:
    for row, out in zip(case.rows, attend(ops, case.rows, kept, case.block_size, **case.options), strict=True):
        torch.testing.assert_close(out.double(), expected(row, kept, **case.options), **tolerance(out.dtype))


@needs_kernels
@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_integers_are_multiplied_more_exactly_than_bfloat16_is(kept: KVCacheDType) -> None:
    row = (make_sequence(400, 4, 2, 64, torch.float32), 300, 400)
    (out,) = attend(native_ops, [row], kept)
    torch.testing.assert_close(out.double(), expected(row, kept), rtol=3e-4, atol=3e-4)


@needs_kernels
@pytest.mark.parametrize("kept", SMALL)
@given(case=batches())
@few
def test_attention_bits_do_not_depend_on_the_batch(kept: KVCacheDType, case: Case) -> None:
    together = attend(native_ops, case.rows, kept, case.block_size, **case.options)
    for row, out in zip(case.rows, together, strict=True):
        assert torch.equal(attend(native_ops, [row], kept, case.block_size, seed=9, **case.options)[0], out)
        assert torch.equal(attend(native_ops, [row], kept, 128 - case.block_size, **case.options)[0], out)


@needs_kernels
@pytest.mark.parametrize("kept", SMALL)
@given(case=decoding_families())
@few
def test_rows_that_begin_alike_keep_their_bits(kept: KVCacheDType, case: Case) -> None:
    together = attend(native_ops, case.rows, kept, case.block_size, **case.options)
    for row, out in zip(case.rows, together, strict=True):
        assert torch.equal(attend(native_ops, [row], kept, case.block_size, seed=9, **case.options)[0], out)


@pytest.mark.parametrize("ops", OPS[1:], ids=lambda ops: ops.__name__)
@pytest.mark.parametrize("kept", SMALL)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_bits_do_not_depend_on_chunks(
    ops: ModuleType, kept: KVCacheDType, window: int | None, dtype: torch.dtype
) -> None:
    sequence = make_sequence(301, 6, 2, 24, dtype)
    (whole,) = attend(ops, [(sequence, 0, 301)], kept, window=window)
    for start, end in ((0, 1), (63, 65), (64, 70), (90, 190), (255, 257), (300, 301)):
        assert torch.equal(attend(ops, [(sequence, start, end)], kept, window=window)[0], whole[start:end])


@needs_kernels
@pytest.mark.parametrize("kept", SMALL)
@pytest.mark.usefixtures("restore_threads")
def test_attention_bits_do_not_depend_on_threads(kept: KVCacheDType) -> None:
    rows = [(make_sequence(n, 4, 2, 64, torch.bfloat16, n), max(0, n - 30), n) for n in (1, 700, 5, 2100)]
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(torch.cat(attend(native_ops, rows, kept)))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.__name__)
@pytest.mark.parametrize("kept", SMALL)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dim=st.sampled_from([8, 24, 64, 80, 256]),
    size=st.sampled_from([1e-36, 1e-3, 1.0, 1e30]),
    offset=st.sampled_from([0.0, 3.0, -3.0]),
    seed=st.integers(0, 99),
)
@few
def test_the_nearest_numbers_are_kept(
    ops: ModuleType, kept: KVCacheDType, dtype: torch.dtype, dim: int, size: float, offset: float, seed: int
) -> None:
    drawn = make_sequence(13, 2, 2, dim, torch.float32, seed)
    k, v = (((x + offset) * size).to(dtype) for x in (drawn.k, drawn.v))
    cache = KVCache.zeros(5, 2, 4, dim, DTYPES[kept], CPU)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:13]
    write(ops, cache, [Sequence(drawn.q.to(dtype), k, v)], slots)
    for found, x in zip(from_cache(cache, native=ops is native_ops), (k.float(), v.float()), strict=True):
        written = found.transpose(1, 2).flatten(0, 1)[slots]
        assert torch.equal(written, rounded(x, kept))
        unit = {"int8": x.abs().amax(-1) / 127, "int4": (x.amax(-1).clamp(0) - x.amin(-1).clamp(max=0)) / 15}
        if kept == "fp8":
            step = torch.maximum(x.abs() * 2**-3, (x.abs().amax(-1) / 448 * 2**-9)[..., None])
        else:
            step = unit[kept][..., None]
        assert ((written - x).abs() <= step * 0.501 + 1e-30).all()
        untouched = torch.ones(20, dtype=torch.bool)
        untouched[slots] = False
        assert (found.transpose(1, 2).flatten(0, 1)[untouched] == 0).all()


@pytest.mark.parametrize("ops", OPS[1:], ids=lambda ops: ops.__name__)
@pytest.mark.parametrize("kept", SMALL)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_nan_reaches_the_tokens_that_see_it_alone(
    ops: ModuleType, kept: KVCacheDType, window: int | None, bad: float, part: str
) -> None:
    clean = make_sequence(100, 6, 2, 64, torch.float32)
    dirty = Sequence(clean.q.clone(), clean.k.clone(), clean.v.clone())
    getattr(dirty, part)[71, :, 5] = bad
    (out,), (plain,) = (attend(ops, [(each, 0, 100)], kept, window=window) for each in (dirty, clean))
    last = 72 if part == "q" else 71 + window if window else 100
    assert torch.equal(out[:71], plain[:71])
    if (part, ops) != ("v", fixed_ops):  # where values that are no numbers count for nothing, and their keys tell
        assert out[71:last].isnan().all()
    assert torch.equal(out[last:], plain[last:])


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    q = torch.zeros(1, 4, 64)
    batch = AttentionBatch(
        torch.tensor([0, 1]).int(), torch.tensor([5]).int(), torch.tensor([[1]]).int(), torch.empty(0)
    )
    cache = KVCache.zeros(3, 2, 8, 64, torch.int8, CPU)
    assert cache.scales is not None
    k_scales, v_scales = cache.scales
    for scales in (None, (k_scales, v_scales.contiguous()), (k_scales[:, :1], v_scales), (k_scales.half(), v_scales)):
        with pytest.raises(ValueError, match="scales"):
            native_ops.attention(q, cache.keys, cache.values, batch, scale=1.0, kv_scales=scales)
    plain = KVCache.zeros(3, 2, 8, 64, torch.float32, CPU)
    with pytest.raises(ValueError, match="scales"):
        native_ops.attention(q, plain.keys, plain.values, batch, scale=1.0, kv_scales=cache.scales)
    odd = KVCache.zeros(3, 2, 7, 64, torch.int8, CPU)
    with pytest.raises(ValueError, match="block_size must be even"):
        native_ops.attention(q, odd.keys, odd.values, batch, scale=1.0, kv_scales=odd.scales)
    wide = KVCache.zeros(3, 2, 8, 128, torch.uint8, CPU)
    with pytest.raises(ValueError, match="head_dim 64, the cache 128"):
        native_ops.attention(q, wide.keys, wide.values, batch, scale=1.0, kv_scales=wide.scales)
    batch.block_table[0, 0] = 3
    with pytest.raises(ValueError, match="block 3 at 0"):
        native_ops.attention(q, cache.keys, cache.values, batch, scale=1.0, kv_scales=cache.scales)
    s = make_sequence(1, 4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="cache slot 24"):
        write(native_ops, cache, [s], torch.tensor([24]))
    assert (cache.keys == 0).all()
    assert (k_scales == 0).all()
