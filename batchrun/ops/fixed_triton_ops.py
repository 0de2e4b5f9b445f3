"""As `triton_ops`, with a row's bits its own: one form of attention tile, nothing split or shared, and matrix products
in tiles of a fixed number of rows.
"""

from __future__ import annotations

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
from batchrun.kernels.gpu.attention_plan import Plan
from batchrun.ops import dense_fixed, fp8_triton_fixed, grouped_triton_fixed
from batchrun.ops.by_weight import by_weight
from batchrun.ops.triton_ops import fill_plan, make_plan

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

pack, linear = by_weight(dense=dense_fixed, grouped=grouped_triton_fixed, fp8=fp8_triton_fixed)


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
    """As `triton_ops.attention_plan`."""
    return make_plan(
        cu_q,
        kv_len,
        block_table,
        block_size=block_size,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        window=window,
        reproducible=True,
    )
