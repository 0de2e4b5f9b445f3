"""How large the inputs of linear layers are, guessed from the weights that make them.

Of a normed hidden state all elements are about as large as the norm's weight says. So an element of a value is about
as large as its row of the projection, and one of the gated MLP as its rows of gate and up multiplied. Where nothing
is known of a model's activations, rounding minds the columns more that meet larger inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.weights.formats import Weight

_LEAST = 0.02  # of the mean: how little a column may count


def of_output(qkv: Weight, norm: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
    """Mean squares, up to a factor, of what attention gives the output projection: float32 [heads * head_dim].

    ``qkv`` [(heads + 2 kv_heads) * head_dim, H] made it of inputs behind a norm of weight ``norm`` [H].
    """
    count = qkv.shape[0] // (n_heads + 2 * n_kv_heads) * n_kv_heads
    values = torch.arange(qkv.shape[0] - count, qkv.shape[0], device=norm.device)
    squares = _squares(qkv.rows(values), norm).view(n_kv_heads, -1)
    return _relative(squares.repeat_interleave(n_heads // n_kv_heads, dim=0).flatten())


def of_down(gate_up: Weight, norm: Tensor) -> Tensor:
    """The same of what the gated MLP gives its last projection, [I]; ``gate_up`` [2 I, H] made it."""
    gate, up = _squares(gate_up.dequantize(), norm).chunk(2)
    return _relative(gate * up)


def _squares(rows: Tensor, norm: Tensor) -> Tensor:
    return (rows.float() * norm.float()).square().sum(dim=1)


def _relative(squares: Tensor) -> Tensor:
    return squares / squares.mean().clamp(min=torch.finfo(torch.float32).tiny) + _LEAST
