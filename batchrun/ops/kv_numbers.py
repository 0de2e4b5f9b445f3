"""Keys and values in 8 or 4 bits: each token's vector of a KV head has a float32 scale of its own.

What a vector [D] is kept as goes by the dtype that it is kept in:

=====================  =======  ============================================================================
`torch.int8`           [D]      integers from -127 to 127; an element is ``scale * integer``
`torch.float8_e4m3fn`  [D]      8-bit floats up to 448; an element is ``scale * float``
`torch.uint8`          [D / 2]  integers from 0 to 15: element i in the low half of byte i and element i + D / 2
                                in the high one; an element is ``scale * (integer - zero)``, zero being the 4
                                lowest bits of the scale's own
=====================  =======  ============================================================================

A vector with anything that is not finite has an infinite scale or NaN, and becomes NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LARGEST: Mapping[torch.dtype, float] = {
    torch.int8: 127,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
    torch.uint8: 15,
}
_LEAST_MAGNITUDE = 1e-30  # a vector without a larger one is rounded as if it had it: no scale is zero
_ZERO = 15  # the bits of a scale that are the zero of integers of 4 bits


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors [..., D] of floats as they are kept in ``dtype``, and their scales [...]."""
    wide = x.float()
    if dtype == torch.uint8:
        return _quantize_to_4_bits(wide)
    scales = _scales(wide.abs().amax(dim=-1), dtype)
    numbers = (wide * scales.reciprocal()[..., None]).nan_to_num()
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales


def _quantize_to_4_bits(wide: Tensor) -> tuple[Tensor, Tensor]:
    low, high = wide.amin(dim=-1).clamp(max=0), wide.amax(dim=-1).clamp(min=0)  # zero is always among the numbers
    scales = _scales(high - low, torch.uint8)
    zeros = (-low / scales).round().nan_to_num()
    scales = (scales.view(torch.int32) & ~_ZERO | zeros.int()).view(torch.float32)
    integers = ((wide * scales.reciprocal()[..., None]).round().nan_to_num() + zeros[..., None]).clamp(
        0, LARGEST[torch.uint8]
    )
    first, second = integers.to(torch.uint8).chunk(2, dim=-1)
    return first | second << 4, scales


def _scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp(min=_LEAST_MAGNITUDE) / LARGEST[dtype]


def dequantize(stored: Tensor, scales: Tensor) -> Tensor:
    """The vectors [..., D] float32 that `quantize` left."""
    if stored.dtype == torch.uint8:
        zeros = scales.contiguous().view(torch.int32) & _ZERO
        numbers = torch.cat((stored & 15, stored >> 4), dim=-1) - zeros[..., None]
    else:
        numbers = stored
    return numbers.float() * scales[..., None]


def write(x: Tensor, cache: Tensor, scales: Tensor | None, blocks: Tensor, offsets: Tensor) -> None:
    """Keep vectors [T, HKV, D] of a token each at its place [T] of a cache [n_blocks, HKV, block_size, D]."""
    if scales is None:
        cache[blocks, :, offsets] = x.to(cache.dtype)
    else:
        cache[blocks, :, offsets], scales[blocks, :, offsets] = quantize(x, cache.dtype)


def read(cache: Tensor, scales: Tensor | None, *index: Any) -> Tensor:
    """The vectors of a cache at ``index``, which leaves its last dimension whole."""
    return cache[index] if scales is None else dequantize(cache[index], scales[index])
