"""Products of weights as plain numbers by torch's libraries; on a CPU, of weights in oneDNN's layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.weights.formats import Weight

_PACKED_ROWS = 64  # rows of activations that oneDNN is told to lay weights out for


def pack(weight: Weight) -> Tensor | None:
    """The weight as `linear` multiplies it fastest: on a CPU in oneDNN's layout; None: as it is.

    bfloat16 is packed as float32 where the processor cannot multiply it, which is ten times faster there.
    """
    data = weight.dequantize()
    if not data.is_cpu or data.dtype not in (torch.float32, torch.bfloat16):
        return None
    wide = data if torch.ops.mkldnn._is_mkldnn_bf16_supported() else data.float()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(wide, _PACKED_ROWS)
    return packed


def linear(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `by_weight.Linear`."""
    packed = weight.packed
    if x.is_cuda and bias is None and dtype is torch.float32 and x.dtype is not dtype:  # logits: sums are not rounded
        return torch.mm(x, weight.dequantize().T, out_dtype=dtype, **({} if out is None else {"out": out}))
    if isinstance(packed, Tensor):
        wide_bias = bias if bias is None else bias.to(packed.dtype)
        product = torch.ops.mkldnn._linear_pointwise(x.to(packed.dtype), packed, wide_bias, "none", [], "")
    else:
        product = functional.linear(x, weight.dequantize(), bias)
    return product.to(dtype) if out is None else out.copy_(product)
