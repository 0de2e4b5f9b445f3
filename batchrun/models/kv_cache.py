"""Memory for keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE = 64  # bytes


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one layer: ``[n_blocks, HKV, block_size, D]`` each, in the backend's order within a head."""

    keys: Tensor
    values: Tensor

    @classmethod
    def zeros(
        cls, n_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Memory for ``n_blocks`` blocks. Masked positions meet a product with it, so it must be numbers."""
        # A head's keys of a block and its values, which are read one after the other, lie side by side.
        return cls(*zeros((n_blocks, kv_heads, 2, block_size, head_dim), dtype, device).unbind(2))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU their pages are free until written, large where the system has such, and start a cache line."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    memory = np.zeros(count + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[start : start + count]).view(dtype).view(shape)
