"""The operations on a GPU with Triton kernels: nothing in here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from batchrun.kernels.gpu import (
    add_rms_norm,
    argmax,
    attention,
    draw,
    gelu_mul,
    rms_norm,
    rope_kv_write,
    silu_mul,
    token_logprobs,
)
from batchrun.kernels.gpu.attention import max_lines
from batchrun.kernels.gpu.attention_plan import Plan, Sizes, padded, plan
from batchrun.ops import dense_torch, fp8_triton, grouped_triton
from batchrun.ops.by_weight import by_weight

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "attention_plan",
    "draw",
    "fill_plan",
    "gelu_mul",
    "linear",
    "pack",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "token_logprobs",
]

pack, linear = by_weight(dense=dense_torch, grouped=grouped_triton, fp8=fp8_triton)


def attention_plan(
    cu_q: np.ndarray,
    kv_len: np.ndarray,
    block_table: np.ndarray,
    *,
    block_size: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> Plan:
    """How a batch's attention is divided among programs: see `batchrun.kernels.gpu.attention_plan`."""
    return make_plan(
        cu_q, kv_len, block_table, block_size=block_size, group=group, head_dim=head_dim, dtype=dtype, window=window
    )


def make_plan(*batch: np.ndarray, head_dim: int, dtype: torch.dtype, **shape: Any) -> Plan:
    """A plan for the current device, whose arrays are tensors."""
    lines = max_lines(torch.device("cuda"), head_dim, dtype)
    return _converted(plan(*batch, **shape, max_lines=lines), torch.from_numpy)


def fill_plan(made: Plan) -> Plan:
    """The plan of a decoding batch for a CUDA graph: with sizes that are powers of two."""
    on_host = _converted(made, torch.Tensor.numpy)
    *sizes, tile = on_host.sizes
    return _converted(padded(on_host, Sizes(*map(_power, sizes), tile)), torch.from_numpy)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _converted(made: Plan, convert: Callable[[Any], Any]) -> Plan:
    arrays = {field.name: getattr(made, field.name) for field in fields(made)}
    return replace(made, **{name: convert(x) for name, x in arrays.items() if not isinstance(x, int)})
