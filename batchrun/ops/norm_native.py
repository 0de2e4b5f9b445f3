"""Root-mean-square norms by the native kernels, which know no offset: with one, in torch."""

from __future__ import annotations

from torch import Tensor

from batchrun.kernels import cpu
from batchrun.ops import torch_ops


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As `torch_ops.rms_norm`."""
    return torch_ops.rms_norm(x, weight, eps, offset=offset) if offset else cpu.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As `torch_ops.add_rms_norm`."""
    if offset:
        return torch_ops.add_rms_norm(x, residual, weight, eps, offset=offset)
    normed: Tensor = cpu.add_rms_norm(x, residual, weight, eps)
    return normed
