"""Products of weights as plain numbers by the native CPU kernels: each row's bits are its own."""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.kernels import cpu
from batchrun.weights.formats import Weight


def pack(weight: Weight) -> cpu.Panels:
    """The weight as `linear` multiplies it."""
    return cpu.Panels(weight.dequantize())


def linear(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`; the weight is one that `pack` laid out."""
    assert isinstance(weight.packed, cpu.Panels)
    product: Tensor = cpu.linear(x, weight.packed, bias, dtype, out)
    return product
