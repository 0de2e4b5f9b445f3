"""The operations on a CPU with native kernels: each row's bits are its own."""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.kernels import cpu
from batchrun.kernels.cpu import add_rms_norm, argmax, attention, rms_norm, rope_kv_write, silu_mul
from batchrun.weights.formats import Dense

__all__ = ["add_rms_norm", "argmax", "attention", "linear", "pack", "rms_norm", "rope_kv_write", "silu_mul"]


def pack(weight: Tensor) -> cpu.Panels:
    """A weight [N, K] as `linear` multiplies it."""
    return cpu.Panels(weight)


def linear(x: Tensor, weight: Dense, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch_ops.linear`, of a weight that `pack` laid out."""
    assert isinstance(weight.packed, cpu.Panels)
    product: Tensor = cpu.linear(x, weight.packed, bias, dtype)
    return product
