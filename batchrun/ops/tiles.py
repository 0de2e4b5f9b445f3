"""Elementwise functions whose result for an element depends on that element alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TILE = 16_384  # elements; below torch's parallel grain and a multiple of every vector width


def tiled(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` applied in tiles of a fixed size.

    torch computes the elements beyond the last full vector, of the tensor or of a thread's share, by another routine.
    """
    flat = x.reshape(-1)
    n = flat.numel()
    if n == 0:
        return function(x)
    padded = flat.new_ones(-(-n // _TILE) * _TILE)
    padded[:n] = flat
    return torch.cat([function(tile) for tile in padded.split(_TILE)])[:n].view(x.shape)
