"""Products of integer weights by Triton kernels.

Integers of 8 bits with one scale for a whole row meet activations that are rounded to 8 bits, with a scale for each
token. All others become numbers of the activations' dtype on their way; where many rows meet them, once for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.kernels import gpu
from batchrun.ops import dense_torch
from batchrun.weights.formats import Grouped, Int8

DENSE_ROWS = 1024  # from which on a product of plain numbers takes less, with making them


def pack(weight: Grouped) -> gpu.Planes | None:
    """The weight as `linear` multiplies it; None: as it is."""
    if _is_bytes(weight) or not gpu.can_pack(weight.group, weight.scales.shape[1]):
        return None
    eight = isinstance(weight, Int8)
    return gpu.pack_planes(
        weight.integers().view(torch.uint8) ^ (128 if eight else 0),
        weight.scales,
        weight.minimums,
        weight.order,
        code="int8" if eight else "int4",
        group=weight.group,
        dtype=weight.dtype,
    )


def linear(x: Tensor, weight: Grouped, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`. Groups that kernels do not take are made plain numbers for each product."""
    if has_kernel(weight) and not (weight.packed is not None and len(x) >= DENSE_ROWS):
        return multiply(x, weight, bias, dtype, out, fixed=False)
    return dense_torch.linear(x, weight, bias, dtype, out)


def has_kernel(weight: Grouped) -> bool:
    """Whether `multiply` takes the weight, for which `pack` was called."""
    return weight.packed is not None or _is_bytes(weight)


def _is_bytes(weight: Grouped) -> bool:
    """Whether activations are rounded to 8 bits for it."""
    return isinstance(weight, Int8) and weight.scales.shape[1] == 1 and gpu.takes_bytes(weight.shape[1])


def multiply(
    x: Tensor, weight: Grouped, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None, *, fixed: bool
) -> Tensor:
    """The product by a kernel; ``fixed``: each row's bits are its own."""
    x = x if weight.order is None else x[:, weight.order]
    product: Tensor
    if weight.packed is not None:
        assert isinstance(weight.packed, gpu.Planes)
        product = gpu.multiply_planes(x, weight.packed, bias, dtype, out, fixed=fixed)
    else:
        rounded, scales = gpu.quantize_rows(x, torch.int8), (weight.scales, weight.minimums)
        product = gpu.multiply_bytes(rounded, weight.stored, *scales, bias, dtype, out, fixed=fixed)
    return product
