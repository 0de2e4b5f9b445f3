"""Gated activations: one program for a run of one row's columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 2048  # columns of a program, 16 of a thread
_WARPS = 4


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [T, 2I] whose halves are gate and up; returns [T, I]."""
    return _gated(gate_up, "silu")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of [T, 2I], GELU (Hendrycks and Gimpel 2016) in its tanh form; returns [T, I]."""
    return _gated(gate_up, "gelu")


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        gated_kernel,
        (tokens, triton.cdiv(width, _BLOCK)),
        *(gate_up, out, gate_up.stride(0), width),
        ACTIVATION=activation,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def gated_kernel(gate_up, out, stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """``BLOCK`` columns of a row of ``out`` [T, width]; the activation is rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    gates = gate_up + row * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width + column, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if ACTIVATION == "gelu":  # (1 + tanh(y)) / 2 is the sigmoid of 2y; 1.5957691 = 2 sqrt(2 / pi)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1 + tl.exp(-slope))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (active * up).to(out.dtype.element_ty), mask=inside)
