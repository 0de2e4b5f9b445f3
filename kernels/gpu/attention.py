"""Attention of ragged queries over the paged KV cache: one family of kernels for every number of query tokens.

A program takes one item of the plan (see :mod:`batchrun.kernels.gpu.attention_plan`) for one KV head: a tile of lines,
each a token and a query head, goes over the item's keys with a softmax that is corrected as it goes (Milakov and
Gimelshein 2018; Dao et al. 2022, FlashAttention), in float32 and powers of 2. Key tiles that every line sees whole need
no mask; what lies before and after them is masked. Whatever unused places of the cache hold, NaN included, has no
effect.

Of a quantized cache, products are made of its numbers as they are: scales of keys multiply scores, and those of values
probabilities (:mod:`batchrun.kernels.gpu.kv_numbers`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_plan import FEW_LINES, GRAIN
from .kv_numbers import WORD, as_words, check_layout, unpacked
from .launch import INTERPRETED, dot_dtype, launch

__all__ = ["attention", "max_lines"]

MERGED_AT_ONCE = 16


class Plan(Protocol):
    """``attention_plan.Plan`` with its arrays on the queries' device, as int32 tensors."""

    few: Tensor
    many: Tensor
    merge_tokens: Tensor
    merge_starts: Tensor
    merge_partials: Tensor
    few_tile: int
    many_tile: int
    n_partials: int


class AttentionBatch(Protocol):
    """What attention reads of a step: int32 [B, P] block ids, and the plan that was made with them."""

    @property
    def block_table(self) -> Tensor: ...

    @property
    def plan(self) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Form:
    """How the kernel runs for a tile of so many lines. ``by_descriptor``: keys and values are fetched by the TMA."""

    keys: int
    num_warps: int
    num_stages: int
    by_descriptor: bool = False


def form(
    capability: tuple[int, int], lines: int, head_dim: int, block_size: int, dtype: torch.dtype, code: str | None = None
) -> Form:
    """The form for a compute capability; those for 8.x fit in the 99 KiB of shared memory that 8.9 has."""
    if dtype is torch.float32:
        return Form(16 if head_dim > 128 else 32, 8, 1)
    wide, descriptors = head_dim > 128, capability >= (9, 0)
    if lines < 64:
        # It takes registers to make numbers of a tile's codes.
        num_warps = 8 if wide or (code is not None and head_dim > 64) else 4
        return Form(64, num_warps, 3 if not wide and (descriptors or head_dim <= 64) else 2)
    num_warps = 8 if wide and capability < (10, 0) else lines // 16
    if not descriptors:
        return Form(32 if head_dim > 64 else 64, num_warps, 2 if wide else 3)
    most = 32 if wide else GRAIN
    if code is not None:  # what is multiplied is made in registers, not as a descriptor fetches it
        return Form(most // 2, num_warps, 2)
    keys = math.gcd(block_size, most)
    if keys >= 16:
        return Form(keys, num_warps, 2 if wide else 3, by_descriptor=True)
    # Triton 3.6 lacks a fence between copies that are ahead of time and Hopper's products, so there are none.
    return Form(most, num_warps, 1)


def max_lines(device: torch.device, head_dim: int, dtype: torch.dtype) -> int:
    """The largest tile that the device has registers for, to be given to the plan."""
    if dtype is torch.float32:
        return FEW_LINES
    return 64 if head_dim > 128 and capability(device) < (9, 0) else 128


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of ragged queries [T, HQ, D] over the paged cache [n_blocks, HKV, block_size, D]; like q.

    ``kv_scales`` as in `rope_kv_write`. A query at position p sees positions in (p - window, p]. Scores are
    ``softcap * tanh(scores / softcap)`` if given.
    ``batch.plan`` was made for this window and group of heads. Tokens of no row are left undefined.
    """
    if scale <= 0:
        raise ValueError(f"the scale is {scale}; it has to be positive")
    plan, (_, n_heads, head_dim) = batch.plan, q.shape
    code = check_layout(k_cache, v_cache, kv_scales, head_dim)
    out = torch.empty_like(q)
    partials = torch.empty(plan.n_partials, n_heads, head_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(plan.n_partials, n_heads, dtype=torch.float32, device=q.device)
    for items, lines in ((plan.few, plan.few_tile), (plan.many, plan.many_tile)):
        if len(items):
            caches, results = (k_cache, v_cache, *(kv_scales or (None, None))), (out, partials, weights)
            _launch_items(items, lines, q, caches, code, results, batch.block_table, scale, window, softcap)
    launch(
        _merge,
        (len(plan.merge_tokens) * n_heads,),
        partials,
        weights,
        out,
        plan.merge_tokens,
        plan.merge_starts,
        plan.merge_partials,
        HEADS=n_heads,
        D=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        AT_ONCE=MERGED_AT_ONCE,
        num_warps=4,
        num_stages=1,
    )
    return out


def _launch_items(
    items: Tensor,
    lines: int,
    q: Tensor,
    caches: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    code: str | None,
    results: tuple[Tensor, Tensor, Tensor],
    block_table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Launch ``_attend`` for one list of items, whose tiles have so many lines."""
    k_cache, v_cache, *scales = caches
    (_, n_heads, head_dim), (_, n_kv_heads, block_size, _) = q.shape, k_cache.shape
    major_minor = capability(q.device)
    chosen = form(major_minor, lines, head_dim, block_size, q.dtype, code)
    unit = head_dim if code is None else WORD
    # Probabilities times scales, which may have any size, are not in float16's range.
    values_dtype = torch.bfloat16 if code is not None and q.dtype is torch.float16 else q.dtype
    if softcap is None:
        inner, outer = 0.0, scale * math.log2(math.e)
    else:
        inner, outer = 2 * math.log2(math.e) * scale / softcap, softcap * math.log2(math.e)
    launch(
        _attend,
        (len(items) * n_kv_heads,),
        q,
        _lines(k_cache, chosen),
        _lines(v_cache, chosen),
        *scales,
        *results,
        items,
        block_table,
        block_table.stride(0),
        k_cache.stride(0) // unit,
        k_cache.stride(1) // unit,
        window or 0,
        inner,
        outer,
        HEADS=n_kv_heads,
        GROUP=n_heads // n_kv_heads,
        D=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        LINES=lines,
        KEYS=chosen.keys,
        BY_DESCRIPTOR=chosen.by_descriptor,
        CODE=code,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        DOT=dot_dtype(q.dtype),
        VALUES=dot_dtype(values_dtype),
        # Hopper's products are serialised (C7515) if this loop is not pipelined; elsewhere registers run out if it is.
        HEAD_STAGES=None if major_minor[0] == 9 and lines >= 64 else 1,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; under the interpreter, one without descriptors."""
    return (8, 0) if INTERPRETED else torch.cuda.get_device_capability(device)


def _lines(memory: Tensor, chosen: Form) -> Any:
    """A cache as the kernel takes it: a descriptor of its memory as lines of D numbers, or a pointer."""
    if not chosen.by_descriptor:
        return as_words(memory)
    n_blocks, n_heads, block_size, head_dim = memory.shape
    n_lines = ((n_blocks - 1) * memory.stride(0) + (n_heads - 1) * memory.stride(1)) // head_dim + block_size
    lines = memory.as_strided((n_lines, head_dim), (head_dim, 1))
    return TensorDescriptor.from_tensor(lines, [chosen.keys, triton.next_power_of_2(head_dim)])


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    q, k, v, k_scales, v_scales, out, partials, weights, items, table, table_stride, block_stride, head_stride, window,
    inner, outer, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, CODE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, DOT: tl.constexpr, VALUES: tl.constexpr, HEAD_STAGES: tl.constexpr,
):  # fmt: skip
    """One item for one KV head. A score is the product of query and key or, capped, the tanh of it that ``inner`` times
    it as a power of 2 gives; ``outer`` times a score, as a power of 2, is its weight. Strides of a cache are counted in
    vectors, or where it has a ``CODE`` in scales.
    """
    kv_head = tl.program_id(0) % HEADS
    item = items + tl.program_id(0) // HEADS * 8
    tokens, position = tl.load(item + 2), tl.load(item + 3)
    if tokens == 0:
        return
    key_begin, key_end = tl.load(item + 4), tl.load(item + 5)
    table += tl.load(item).to(tl.int64) * table_stride
    of_head = kv_head * head_stride

    line = tl.arange(0, LINES)
    used = line // GROUP < tokens
    positions = position + line // GROUP
    columns = tl.arange(0, WIDTH)
    inside = used[:, None] & (columns < D)[None, :]
    if CODE == "int4":
        columns = columns % 2 * (D // 2) + columns // 2
    heads = line // GROUP * (HEADS * GROUP) + line % GROUP
    places = heads[:, None] * D + columns[None, :]
    first_head = (tl.load(item + 1).to(tl.int64) * HEADS + kv_head) * GROUP
    queries = tl.load(q + first_head * D + places, mask=inside, other=0.0).to(DOT)

    acc = tl.zeros((LINES, WIDTH), tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    top = tl.full((LINES,), float("-inf"), tl.float32)
    # Every line sees all keys in [full_begin, full_end).
    begin = key_begin // KEYS * KEYS
    full_begin = begin
    if WINDOWED:
        full_begin = tl.cdiv(tl.maximum(key_begin, position + tokens - window), KEYS) * KEYS
        full_begin = tl.minimum(full_begin, tl.cdiv(key_end, KEYS) * KEYS)
    full_end = tl.maximum(full_begin, tl.minimum(key_end, position + 1) // KEYS * KEYS)
    if WINDOWED:
        acc, total, top = _over(
            begin, full_begin, acc, total, top, queries, k, v, k_scales, v_scales, table, block_stride, of_head,
            key_begin, key_end, positions, window, inner, outer, D, WIDTH, BLOCK_SIZE, KEYS, BY_DESCRIPTOR, CODE, True,
            WINDOWED, CAPPED, DOT, VALUES, HEAD_STAGES,
        )  # fmt: skip
    acc, total, top = _over(
        full_begin, full_end, acc, total, top, queries, k, v, k_scales, v_scales, table, block_stride, of_head,
        key_begin, key_end, positions, window, inner, outer, D, WIDTH, BLOCK_SIZE, KEYS, BY_DESCRIPTOR, CODE, False,
        WINDOWED, CAPPED, DOT, VALUES, None,
    )  # fmt: skip
    acc, total, top = _over(
        full_end, key_end, acc, total, top, queries, k, v, k_scales, v_scales, table, block_stride, of_head,
        key_begin, key_end, positions, window, inner, outer, D, WIDTH, BLOCK_SIZE, KEYS, BY_DESCRIPTOR, CODE, True,
        WINDOWED, CAPPED, DOT, VALUES, 1,
    )  # fmt: skip

    # A line that saw no key of this item has weight 0; one that met NaN stays NaN.
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = acc / divisor[:, None]
    partial = tl.load(item + 6)
    if partial < 0:
        # Read once more, it takes no registers meanwhile.
        first_head = (tl.load(item + 1).to(tl.int64) * HEADS + kv_head) * GROUP
        tl.store(out + first_head * D + places, acc.to(out.dtype.element_ty), mask=inside)
    else:
        first_head = (partial.to(tl.int64) * HEADS + kv_head) * GROUP
        tl.store(partials + first_head * D + places, acc, mask=inside)
        tl.store(weights + first_head + heads, top * outer + tl.log2(divisor), mask=used)


@triton.jit
def _over(
    begin, end, acc, total, top, queries, k, v, k_scales, v_scales, table, block_stride, of_head, key_begin, key_end,
    positions, window, inner, outer, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, CODE: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, DOT: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go over the keys from ``begin`` to ``end``, tile by tile; returns ``acc``, ``total`` and ``top``.

    A masked key has weight 0 exactly, so a line's bits are the same wherever a tile is masked for the sake of others.
    """
    # What a descriptor fetches lies in one block.
    of_tile = tl.arange(0, KEYS)
    in_tile = 0 if BY_DESCRIPTOR else of_tile
    # Each turn fetches the next one's block ids, so that keys never wait for them.
    block = tl.load(table + (begin + in_tile) // BLOCK_SIZE, mask=begin + in_tile < key_end, other=0)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        first, place = block.to(tl.int64) * block_stride + of_head, (start + in_tile) % BLOCK_SIZE
        coming = start + KEYS + in_tile
        block = tl.load(table + coming // BLOCK_SIZE, mask=coming < key_end, other=0)
        key = start + of_tile
        if CODE is None:
            held = (key >= key_begin) & (key < key_end)
            keys, values = _plain(k, v, first + place, held, D, WIDTH, BY_DESCRIPTOR, MASKED)
        else:
            k_scale, v_scale = tl.load(k_scales + first + place), tl.load(v_scales + first + place)
            keys = _numbers(k, k_scale, first, place, D, WIDTH, CODE)
            values = _numbers(v, v_scale, first, place, D, WIDTH, CODE)

        # Of float32, three products of TensorFloat-32 come as near as one of its own, and take tensor cores.
        scores = tl.dot(queries, tl.trans(keys.to(DOT)), input_precision="tf32x3")
        if CODE is not None:
            scores *= k_scale[None, :]
        if CAPPED:
            scores = 1.0 - 2.0 / (tl.exp2(scores * inner) + 1.0)
        if MASKED:
            seen = key[None, :] <= positions[:, None]
            if WINDOWED:
                seen &= key[None, :] > positions[:, None] - window
            peak = tl.maximum(top, tl.max(tl.where(seen, scores, float("-inf")), 1))
            base = tl.where(peak == float("-inf"), 0.0, peak)
        else:
            peak = tl.maximum(top, tl.max(scores, 1))
            base = peak
        power = tl.fma(scores, outer, (-base * outer)[:, None])
        weight = tl.exp2(power)
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
        decay = tl.exp2((top - base) * outer)
        total = total * decay + tl.sum(weight, 1)
        if CODE is not None:
            weight *= v_scale[None, :]
            if MASKED:  # once more: the scale of what a line does not see may be anything
                weight = tl.where(seen, weight, 0.0)
        acc = tl.dot(weight.to(VALUES), values.to(VALUES), acc * decay[:, None], input_precision="tf32x3")
        top = peak
    return acc, total, top


@triton.jit
def _plain(k, v, place, held, D: tl.constexpr, WIDTH: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, MASKED: tl.constexpr):
    """A tile's keys and values [KEYS, WIDTH], from ``place`` or places on; values of keys that are not held are 0."""
    if BY_DESCRIPTOR:
        keys = k.load([place.to(tl.int32), 0])
        values = v.load([place.to(tl.int32), 0])
        if MASKED:
            values = tl.where(held[:, None], values, 0.0)
    else:
        columns = tl.arange(0, WIDTH)
        places = place[:, None] * D + columns[None, :]
        wide = (columns < D)[None, :]
        keys = tl.load(k + places, mask=wide, other=0.0)
        values = tl.load(v + places, mask=(held[:, None] & wide) if MASKED else wide, other=0.0)
    return keys, values


@triton.jit
def _numbers(cache, scale, first, place, D: tl.constexpr, WIDTH: tl.constexpr, CODE: tl.constexpr):
    """A tile's keys or values in units of their ``scale`` [KEYS]: [KEYS, WIDTH], finite whatever the memory holds."""
    size: tl.constexpr = 1 if CODE == "int4" else 4  # bytes of a word
    length: tl.constexpr = D // 2 if CODE == "int4" else D // 4
    column = tl.arange(0, WIDTH // 2 if CODE == "int4" else WIDTH // 4)
    places = (first * (4 // size) + place * length)[:, None] + column[None, :]
    words = tl.load(cache + places, mask=(column < length)[None, :], other=0)
    return unpacked(words, scale, CODE)


@triton.jit
def _merge(
    partials,
    weights,
    out,
    merge_tokens,
    merge_starts,
    merge_partials,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The result of one token and head from partial ones, in ascending order of keys. ``weights``: powers of 2."""
    merge, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    token = tl.load(merge_tokens + merge)
    if token < 0:
        return
    begin, end = tl.load(merge_starts + merge), tl.load(merge_starts + merge + 1)
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros((WIDTH,), tl.float32)
    total, top = 0.0, float("-inf")
    for start in range(begin, end, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        held = at < end
        result = tl.load(merge_partials + at, mask=held, other=0).to(tl.int64) * HEADS + head
        power = tl.load(weights + result, mask=held, other=float("-inf"))
        inside = held[:, None] & (columns < D)[None, :]
        values = tl.load(partials + result[:, None] * D + columns[None, :], mask=inside, other=0.0)
        peak = tl.maximum(top, tl.max(power, 0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight, decay = tl.exp2(power - base), tl.exp2(top - base)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(weight[:, None] * values, 0)
        top = peak
    place = (token.to(tl.int64) * HEADS + head) * D + columns
    tl.store(out + place, (acc / total).to(out.dtype.element_ty), mask=columns < D)
