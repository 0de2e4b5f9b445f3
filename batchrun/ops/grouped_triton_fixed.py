"""As `grouped_triton`, each row's bits its own."""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.ops import dense_fixed
from batchrun.ops.grouped_triton import has_kernel, multiply, pack
from batchrun.weights.formats import Grouped

__all__ = ["linear", "pack"]


def linear(x: Tensor, weight: Grouped, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`."""
    if has_kernel(weight):
        return multiply(x, weight, bias, dtype, out, fixed=True)
    return dense_fixed.linear(x, weight, bias, dtype, out)
