"""Keys and values in 8 or 4 bits as kernels write and read them; `batchrun.ops.kv_numbers` says what they are.

Numbers become bits and bits numbers by arithmetic that every device does alike: not all convert floats of 8 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CODES = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "int4"}
WORD = 4  # bytes, those of a scale


def check_layout(
    k_cache: Tensor, v_cache: Tensor, kv_scales: tuple[Tensor, Tensor] | None, head_dim: int
) -> str | None:
    """The code of caches [n_blocks, HKV, block_size, ...] that kernels take, None of plain numbers; else ValueError.

    A head's vectors of a block follow one another, and so do their scales [n_blocks, HKV, block_size], which lie as far
    from those of other heads and blocks as the vectors do. Codes of 8 bits fill whole words.
    """
    code = CODES.get(k_cache.dtype)
    width = head_dim // 2 if code == "int4" else head_dim
    if k_cache.stride() != v_cache.stride() or k_cache.shape[3] != width or k_cache.stride()[2:] != (width, 1):
        raise ValueError(f"caches {[*k_cache.shape]} with strides {k_cache.stride()} and {v_cache.stride()}")
    if (code is None) != (kv_scales is None):
        raise ValueError(f"a cache of {k_cache.dtype} {'without' if kv_scales is None else 'with'} scales")
    if code in ("fp8", "int8") and width % WORD:
        raise ValueError(f"heads of {head_dim} elements in {code}: they have to be a multiple of {WORD}")
    for scales in kv_scales or ():
        apart = [WORD * stride for stride in scales.stride()[:2]]
        if scales.dtype is not torch.float32 or scales.stride(2) != 1 or apart != [*k_cache.stride()[:2]]:
            raise ValueError(f"{scales.dtype} scales with strides {scales.stride()} of {k_cache.stride()}")
    return code


def as_bytes(cache: Tensor) -> Tensor:
    """A cache as kernels write it: where it has codes, bytes."""
    return cache.view(torch.uint8) if cache.dtype in CODES else cache


def as_words(cache: Tensor) -> Tensor:
    """A cache as kernels read it: where it has codes, words of 32 bits, or where these have 4 bits, bytes."""
    return cache.view(torch.int32) if CODES.get(cache.dtype) in ("fp8", "int8") else cache


@triton.jit
def unpacked(words, scale, CODE: tl.constexpr):
    """The numbers [N, D] that times ``scale`` [N] are the vectors kept in ``words`` [N, D / 4] or [N, D / 2], float32.

    Those of 4 bits come in the order 0, D / 2, 1, D / 2 + 1 and so on.
    """
    if CODE == "int4":
        zero = _raised(scale.to(tl.int32, bitcast=True) & 15)[:, None]
        return tl.interleave(_raised(words & 15) - zero, _raised(words >> 4) - zero)
    else:
        even = tl.interleave(_number(words, 0, CODE), _number(words, 2, CODE))
        odd = tl.interleave(_number(words, 1, CODE), _number(words, 3, CODE))
        return tl.interleave(even, odd)


@triton.jit
def _number(words, place: tl.constexpr, CODE: tl.constexpr):
    """The numbers in one of the four places of words."""
    if CODE == "fp8":  # the sign goes to bit 31, exponent and fraction end at bit 20
        bits = words << 24 - 8 * place >> 4 & -0x78100000
        return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120
    else:
        return ((words >> 8 * place & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128


@triton.jit
def _raised(integer):
    """2^23 plus integers below that, without a conversion: they are the last bits of such a float32."""
    return (integer.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def store_packed(
    first, second, numbers, scales, stride, head, column, inside, heads, DIM: tl.constexpr, CODE: tl.constexpr
):
    """Keep vectors of heads ``head`` [H, 1], given as halves [H, DIM / 2], at their places from that of head 0 on.

    ``stride``: bytes from a head's numbers to those of the next, and from its scale to the next.
    """
    first, second = first.to(tl.float32), second.to(tl.float32)
    broken = tl.sum(first * 0.0 + second * 0.0, axis=1, keep_dims=True)  # 0, or NaN
    first = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    second = tl.where(tl.abs(second) < float("inf"), second, 0.0)
    numbers += head * stride + column
    if CODE == "int4":
        low = tl.min(tl.minimum(tl.minimum(first, second), 0.0), axis=1, keep_dims=True)
        high = tl.max(tl.maximum(tl.maximum(first, second), 0.0), axis=1, keep_dims=True)
        scale = _scale(high - low, 15.0)
        zero = _nearest(tl.div_rn(-low, scale))
        scale = (scale.to(tl.int32, bitcast=True) & -16 | zero).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(1.0, scale)
        first = tl.minimum(tl.maximum(_nearest(first * inverse) + zero, 0), 15)
        second = tl.minimum(tl.maximum(_nearest(second * inverse) + zero, 0), 15)
        tl.store(numbers, (first | second << 4).to(tl.uint8), mask=inside)
    else:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
        scale = _scale(largest, 448.0 if CODE == "fp8" else 127.0)
        inverse = tl.div_rn(1.0, scale)
        tl.store(numbers, _coded(first * inverse, CODE), mask=inside)
        tl.store(numbers + DIM // 2, _coded(second * inverse, CODE), mask=inside)
    tl.store(scales + head * (stride // 4), scale + broken, mask=head < heads)


@triton.jit
def _scale(largest, LARGEST: tl.constexpr):
    return tl.div_rn(tl.maximum(largest, 1e-30), LARGEST)


@triton.jit
def _coded(x, CODE: tl.constexpr):
    """The bytes of the nearest numbers."""
    if CODE == "int8":
        return _nearest(x).to(tl.uint8)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - 960  # 8 * 120, by which the exponents differ
    code = tl.where(tl.abs(x) < 0.015625, _nearest(tl.abs(x) * 512.0), normal)  # below 2^-6, multiples of 2^-9
    return (code | bits >> 24 & 128).to(tl.uint8)


@triton.jit
def _nearest(x):
    """The nearest integers, of halves the even one, of numbers below 2^22."""
    x = tl.maximum(x, -4194304.0)  # a product, which is to be rounded before the sum: these two are not fused
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2^23, and its bits
