"""Products of 8-bit weights by the native CPU kernels: each row's bits are its own."""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.kernels import cpu
from batchrun.weights.formats import Int8


def pack(weight: Int8) -> cpu.Int8Panels:
    """The weight as `linear` multiplies it."""
    return cpu.Int8Panels(weight.values, weight.scales)


def linear(x: Tensor, weight: Int8, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`; the weight is one that `pack` laid out."""
    assert isinstance(weight.packed, cpu.Int8Panels)
    product: Tensor = cpu.linear_int8(x, weight.packed, bias, dtype, out)
    return product
