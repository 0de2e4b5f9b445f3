"""As `dense_torch`, in tiles of a fixed number of rows, so that a row's bits depend on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.ops import dense_torch
from batchrun.ops.dense_torch import pack
from batchrun.weights.formats import Dense

__all__ = ["linear", "pack"]

_ROWS = 64  # rows of one matrix product


def linear(x: Tensor, weight: Dense, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `by_weight.Linear`."""
    n = len(x)
    padded = functional.pad(x, (0, 0, 0, -n % _ROWS))
    out = x.new_empty(len(padded), weight.shape[0], dtype=dtype)
    for begin in range(0, len(padded), _ROWS):
        out[begin : begin + _ROWS] = dense_torch.linear(padded[begin : begin + _ROWS], weight, bias, dtype)
    return out[:n]
