"""What attention and the KV write need to know of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of a step as one KV group sees them. All int32 but ``slots``.

    Row ``i``'s queries are the last ``cu_q[i + 1] - cu_q[i]`` of its ``kv_len[i]`` positions.
    """

    cu_q: Tensor  # [B + 1]
    kv_len: Tensor  # [B]
    block_table: Tensor  # [B, P] block ids; entries past a row's length, or behind its window, are 0
    slots: Tensor  # [T] int64, block * block_size + offset: where each token's KV goes
    plan: Any = None  # how the backend divides the work, as its `attention_plan` laid it out on the host


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last tokens of some rows of a step, in order: those whose hidden states are wanted."""

    tokens: Tensor  # [S] int64
    batch: AttentionBatch  # the last layer's, with these tokens alone as queries


def no_plan(
    cu_q: np.ndarray,
    kv_len: np.ndarray,
    block_table: np.ndarray,
    *,
    block_size: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    """``attention_plan`` of a backend that divides its work when it is called.

    Others lay it out on the host, from the batch's arrays there: ``group`` query heads share a KV head.
    """
