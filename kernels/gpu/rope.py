"""Rotary embedding and the KV write: one program for some heads of a token, of queries or of keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_numbers import as_bytes, check_layout, store_packed
from .launch import launch

_ELEMENTS = 2048  # of a program
_PER_WARP = 1024  # 32 of a thread: of keys and of values 16, which are two vectors of 8 in the halves


def rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, write keys and values into the paged cache, return the queries [T, HQ, D].

    ``qkv`` [T, (HQ + 2 HKV) D]; ``cos_sin`` [P, D] float32, cosines then sines of D/2 frequencies (rotate-half form,
    Su et al. 2021); ``slots`` [T] int64; caches [n_blocks, HKV, block_size, D], or as `batchrun.ops.kv_numbers` keeps D
    numbers with ``kv_scales`` [n_blocks, HKV, block_size] (see `kv_numbers.check_layout`). ``q_norm`` and ``k_norm``
    [D] are applied per head before the rotation (Qwen3).
    """
    kv_heads, block_size, dim = k_cache.shape[1], k_cache.shape[2], cos_sin.shape[1]
    code = check_layout(k_cache, v_cache, kv_scales, dim)
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty((len(qkv), q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    heads, half = _tile(max(q_heads, 2 * kv_heads), dim)
    q_parts, kv_parts = triton.cdiv(q_heads, heads), triton.cdiv(kv_heads, heads // 2)
    launch(
        rope_kernel,
        (len(qkv), q_parts + kv_parts),
        *(qkv, cos_sin, positions, slots, q, as_bytes(k_cache), as_bytes(v_cache), *(kv_scales or (None, None))),
        *(q_norm, k_norm, qkv.stride(0), *k_cache.stride()[:2], q_parts, q_heads, kv_heads, eps),
        BLOCK_SIZE=block_size,
        DIM=dim,
        HEADS=heads,
        HALF=half,
        CODE=code,
        num_warps=max(2 * heads * half // _PER_WARP, 1),
    )
    return q


def _tile(heads: int, dim: int) -> tuple[int, int]:
    """Heads of a program, and elements of half a head, as powers of two."""
    half = triton.next_power_of_2(dim // 2)
    return max(min(triton.next_power_of_2(heads), _ELEMENTS // (2 * half)), 2), half


@triton.jit
def rope_kernel(
    qkv, cos_sin, positions, slots, q, k_cache, v_cache, k_scales, v_scales, q_norm, k_norm,
    stride, block_stride, head_stride, q_parts, q_heads, kv_heads, eps,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """``HEADS`` query heads of a token, or ``HEADS / 2`` of keys and as many of values."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv + token * stride
    column = tl.arange(0, HALF)[None, :]
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * DIM + column
    cos = tl.load(angles, mask=column < DIM // 2, other=0.0)
    sin = tl.load(angles + DIM // 2, mask=column < DIM // 2, other=0.0)
    if part < q_parts:
        head = part * HEADS
        _queries(row, q + token * q_heads * DIM, head, q_heads, cos, sin, q_norm, eps, DIM, HEADS)
    else:
        head = (part - q_parts) * (HEADS // 2)
        slot = tl.load(slots + token).to(tl.int64)
        block, place = slot // BLOCK_SIZE * block_stride, slot % BLOCK_SIZE
        if CODE is not None:
            k_scales += block // 4 + place
            v_scales += block // 4 + place
        place *= DIM // 2 if CODE == "int4" else DIM
        keys, values = k_cache + block + place, v_cache + block + place
        row += q_heads * DIM
        _keys(row, keys, k_scales, head_stride, head, kv_heads, cos, sin, k_norm, eps, DIM, HEADS // 2, CODE)
        row += kv_heads * DIM
        _values(row, values, v_scales, head_stride, head, kv_heads, DIM, HALF, HEADS // 2, CODE)


@triton.jit
def _queries(source, target, head, heads, cos, sin, norm, eps, DIM: tl.constexpr, HEADS: tl.constexpr):
    first, second, head, column, inside = _rotated(source, head, heads, cos, sin, norm, eps, DIM, HEADS)
    tl.store(target + head * DIM + column, first, mask=inside)
    tl.store(target + head * DIM + column + DIM // 2, second, mask=inside)


@triton.jit
def _keys(
    source, target, scales, stride, head, heads, cos, sin, norm, eps,
    DIM: tl.constexpr, HEADS: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    first, second, head, column, inside = _rotated(source, head, heads, cos, sin, norm, eps, DIM, HEADS)
    if CODE is None:
        dtype: tl.constexpr = target.dtype.element_ty
        tl.store(target + head * stride + column, first.to(dtype), mask=inside)
        tl.store(target + head * stride + column + DIM // 2, second.to(dtype), mask=inside)
    else:
        store_packed(first, second, target, scales, stride, head, column, inside, heads, DIM, CODE)


@triton.jit
def _values(
    source, target, scales, stride, head, heads,
    DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    head += tl.arange(0, HEADS)[:, None]
    if CODE is None:
        column = tl.arange(0, 2 * HALF)[None, :]
        inside = (head < heads) & (column < DIM)
        values = tl.load(source + head * DIM + column, mask=inside)
        tl.store(target + head * stride + column, values.to(target.dtype.element_ty), mask=inside)
    else:
        column = tl.arange(0, HALF)[None, :]
        inside = (head < heads) & (column < DIM // 2)
        first = tl.load(source + head * DIM + column, mask=inside, other=0.0)
        second = tl.load(source + head * DIM + column + DIM // 2, mask=inside, other=0.0)
        store_packed(first, second, target, scales, stride, head, column, inside, heads, DIM, CODE)


@triton.jit
def _rotated(source, head, heads, cos, sin, norm, eps, DIM: tl.constexpr, HEADS: tl.constexpr):
    """The halves [HEADS, D/2] of rotated heads from ``head`` on, in their own dtype; their places; which are real."""
    dtype: tl.constexpr = source.dtype.element_ty
    head += tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, cos.shape[1])[None, :]
    inside = (head < heads) & (column < DIM // 2)
    source += head * DIM + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1, keep_dims=True) / DIM + eps)
        first_weight = tl.load(norm + column, mask=column < DIM // 2, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + column + DIM // 2, mask=column < DIM // 2, other=0.0).to(tl.float32)
        # Rounded after the norm and after the weight, as any other norm.
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype), head, column, inside
