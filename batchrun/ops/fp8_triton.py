"""Products of weights of 8-bit floats: by tensor cores that multiply such, with activations rounded to them, a scale
for each token; on a GPU without those, of weights that become numbers of the activations' dtype on their way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.kernels import gpu
from batchrun.ops import dense_torch
from batchrun.ops.grouped_triton import DENSE_ROWS
from batchrun.weights.formats import Fp8

_LIBRARY_ROWS = 64  # from which on the library's product takes less
_LIBRARY_MULTIPLE = 16  # of which the library takes inputs and outputs


def pack(weight: Fp8) -> gpu.Planes | None:
    """The weight as `linear` multiplies it; None: as it is."""
    if gpu.multiplies_fp8(weight.stored.device) and gpu.takes_bytes(weight.shape[1]):
        return None
    scales = weight.scales if weight.by_row else weight.scales.repeat_interleave(Fp8.BLOCK, 0)[: weight.shape[0]]
    group = weight.shape[1] if weight.by_row else Fp8.BLOCK
    codes = weight.stored.view(torch.uint8)
    return gpu.pack_planes(codes, scales, None, None, code="fp8", group=group, dtype=weight.dtype)


def linear(x: Tensor, weight: Fp8, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`."""
    if weight.packed is not None and len(x) >= DENSE_ROWS:
        return dense_torch.linear(x, weight, bias, dtype, out)
    if weight.packed is None and _library_takes(len(x), weight, dtype):
        return _library(x, weight, bias, dtype, out)
    return multiply(x, weight, bias, dtype, out, fixed=False)


def multiply(
    x: Tensor, weight: Fp8, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None, *, fixed: bool
) -> Tensor:
    """The product by a kernel of ours; ``fixed``: each row's bits are its own."""
    product: Tensor
    if weight.packed is not None:
        assert isinstance(weight.packed, gpu.Planes)
        product = gpu.multiply_planes(x, weight.packed, bias, dtype, out, fixed=fixed)
    else:
        rounded = gpu.quantize_rows(x, torch.float8_e4m3fn)
        product = gpu.multiply_bytes(rounded, weight.stored, weight.scales, None, bias, dtype, out, fixed=fixed)
    return product


def _library_takes(rows: int, weight: Fp8, dtype: torch.dtype) -> bool:
    """Whether torch multiplies them: with scales for rows, to bfloat16."""
    whole = not any(size % _LIBRARY_MULTIPLE for size in weight.shape)
    return rows >= _LIBRARY_ROWS and weight.by_row and whole and dtype is torch.bfloat16


def _library(x: Tensor, weight: Fp8, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    rounded = gpu.quantize_rows(x, torch.float8_e4m3fn)
    scale_a, scale_b = rounded.scales[:, None], weight.scales.T
    product = torch._scaled_mm(rounded.codes, weight.stored.T, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
    if bias is not None:
        product += bias
    return product if out is None else out.copy_(product)
