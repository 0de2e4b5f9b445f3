"""Root-mean-square norms: one program a row, which it reads once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_PER_WARP = 512  # elements: 16 of a thread
_MOST_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension (Zhang and Sennrich 2019).

    ``x`` [..., H] and ``weight`` [H], sums in float32. Without an offset the norm is rounded to x's dtype before it
    meets the weight; with one (Gemma) only the product is.
    """
    return _rms_norm(x, None, weight, eps, offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Add ``x`` to ``residual`` in place, and return the norm of the (rounded) sum."""
    return _rms_norm(x, residual, weight, eps, offset)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.view(-1, width)
    residual = None if residual is None else residual.view(-1, width)
    block = triton.next_power_of_2(width)
    launch(
        norm_kernel,
        (len(x),),
        *(x, residual, weight, out, x.stride(0), 0 if residual is None else residual.stride(0), width, eps),
        OFFSET=offset,
        BLOCK=block,
        num_warps=min(max(block // _PER_WARP, 1), _MOST_WARPS),
    )
    return out


@triton.jit
def norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, width, eps, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    """A row of ``out`` [T, width] from one of ``x``, and of ``residual`` where there is one."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        sums = residual + row * residual_stride + column
        values += tl.load(sums, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(sums, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values) / width + eps)
    if OFFSET == 0:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (normed * (OFFSET + scale)).to(out.dtype.element_ty), mask=inside)
