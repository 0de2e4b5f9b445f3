"""Products of integer weights by the native CPU kernels: each row's bits are its own."""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.kernels import cpu
from batchrun.weights.formats import Grouped


def pack(weight: Grouped) -> cpu.GroupedPanels:
    """The weight as `linear` multiplies it."""
    return cpu.GroupedPanels(weight.stored, weight.scales, weight.minimums, weight.order, bits=weight.bits)


def linear(x: Tensor, weight: Grouped, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`; the weight is one that `pack` laid out."""
    assert isinstance(weight.packed, cpu.GroupedPanels)
    product: Tensor = cpu.linear_grouped(x, weight.packed, bias, dtype, out)
    return product
