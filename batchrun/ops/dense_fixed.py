"""As `dense_torch`, in tiles of a fixed number of rows, so that a row's bits depend on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.ops import dense_torch
from batchrun.ops.dense_torch import pack
from batchrun.weights.formats import Weight

__all__ = ["linear", "pack"]

_ROWS = 64  # rows of one matrix product


def linear(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`."""
    padded = functional.pad(x, (0, 0, 0, -len(x) % _ROWS))
    out = x.new_empty(len(x), weight.shape[0], dtype=dtype) if out is None else out
    for begin in range(0, len(x), _ROWS):
        tile = out[begin : begin + _ROWS]
        tile.copy_(dense_torch.linear(padded[begin : begin + _ROWS], weight, bias, dtype, None)[: len(tile)])
    return out
