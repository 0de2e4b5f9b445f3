"""Products of 8-bit weights in plain torch on any device: what `int8_native` computes, to the bit.

Activations are rounded to int8 with a scale for each row, and the sums of products are exact: each row's bits are its
own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.weights.formats import LARGEST_INT8, Int8, rows_to_int8

_EXACT = (1 << 24) // LARGEST_INT8**2  # products whose sum is a whole number that float32 holds, in whatever order


def pack(weight: Int8) -> None:
    """The weight stays as it is stored."""


def linear(x: Tensor, weight: Int8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `by_weight.Linear`. A row with anything that is not finite gives NaN."""
    values, scales = rows_to_int8(x)
    total = torch.zeros(len(x), weight.shape[0], dtype=torch.int64, device=x.device)
    for ours, theirs in zip(values.split(_EXACT, dim=1), weight.values.split(_EXACT, dim=1), strict=True):
        total += (ours.float() @ theirs.float().T).long()
    product = total.float() * scales[:, None] * weight.scales
    return (product if bias is None else product + bias.float()).to(dtype)
