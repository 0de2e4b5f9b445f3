"""Products of 8-bit weights in plain torch on any device: what `int8_native` computes, to the bit.

Activations are rounded to integers with a scale for each row, as large as int16 and exact sums in int32 allow. Each
row's bits are its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.weights.formats import LARGEST_INT8, Int8, round_rows

_LARGEST_INT16, _LARGEST_INT32 = (1 << 15) - 1, (1 << 31) - 1


def pack(weight: Int8) -> None:
    """The weight stays as it is stored."""


def linear(x: Tensor, weight: Int8, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`. A row with anything that is not finite gives NaN."""
    integers, scales = round_rows(x, largest_integer(weight.shape[1]))
    total = integers.double() @ weight.values.double().T  # exact, in whatever order
    product = total.float() * scales[:, None] * weight.scales
    product = product if bias is None else product + bias.float()
    return product.to(dtype) if out is None else out.copy_(product)


def largest_integer(depth: int) -> int:
    """The largest integer for activations of which ``depth`` products with 8-bit weights are summed."""
    return min(_LARGEST_INT16, _LARGEST_INT32 // (LARGEST_INT8 * depth))
