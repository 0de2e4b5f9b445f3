"""As `fp8_triton`, each row's bits its own."""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.ops.fp8_triton import multiply, pack
from batchrun.weights.formats import Fp8

__all__ = ["linear", "pack"]


def linear(x: Tensor, weight: Fp8, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`."""
    return multiply(x, weight, bias, dtype, out, fixed=True)
