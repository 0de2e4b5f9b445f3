"""Memory for keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from batchrun.job import KVCacheDType
from batchrun.ops.kv_numbers import LARGEST

_CACHE_LINE = 64  # bytes
DTYPES: Mapping[KVCacheDType, torch.dtype] = {  # but of `auto`, which is the model's own
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}


def is_quantized(kv_cache_dtype: KVCacheDType) -> bool:
    """Whether its numbers have scales."""
    return DTYPES.get(kv_cache_dtype) in LARGEST


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one layer: ``[n_blocks, HKV, block_size, D]`` each, in the backend's order within a head.

    In 8 or 4 bits they are what `batchrun.ops.kv_numbers` makes of them: instead of D numbers as many as it keeps, and
    ``scales`` of keys and of values, float32 ``[n_blocks, HKV, block_size]`` each.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @classmethod
    def zeros(
        cls, n_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Memory for ``n_blocks`` blocks. Masked positions meet a product with it, so it must be numbers."""
        # A head's keys of a block and its values, which are read one after the other, lie side by side.
        if dtype not in LARGEST:
            keys, values = zeros((n_blocks, kv_heads, 2, block_size, head_dim), dtype, device).unbind(2)
            return cls(keys, values)
        width = head_dim // 2 if dtype == torch.uint8 else head_dim  # bytes
        numbers, scales = block_size * width, block_size * torch.float32.itemsize
        page = 2 * (numbers + scales)
        memory = zeros((n_blocks * kv_heads * page,), torch.uint8, device)

        def part(dtype: torch.dtype, start: int, *shape: int) -> Tensor:
            apart, inner = page // dtype.itemsize, (shape[-1], 1)[-len(shape) :]
            size, strides = (n_blocks, kv_heads, *shape), (kv_heads * apart, apart, *inner)
            return memory.view(dtype).as_strided(size, strides, start // dtype.itemsize)

        keys, values = (part(dtype, start, block_size, width) for start in (0, numbers))
        of_keys, of_values = (part(torch.float32, 2 * numbers + start, block_size) for start in (0, scales))
        return cls(keys, values, (of_keys, of_values))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU their pages are free until written, large where the system has such, and start a cache line."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    memory = np.zeros(count + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[start : start + count]).view(dtype).view(shape)
