"""What is guessed of inputs is what they are, of hidden states without a direction; and rounding minds it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.models import input_sizes
from batchrun.weights.formats import Dense
from batchrun.weights.quantize import QUANTIZERS, to_int4

HIDDEN, HEADS, KV_HEADS, HEAD, WIDE = 64, 6, 2, 8, 96


def uneven(rows: int) -> Tensor:
    """A matrix whose rows differ much in size."""
    return torch.randn(rows, HIDDEN) * torch.rand(rows, 1).mul(3).exp()


def relative_error(found: Tensor, squares: Tensor) -> float:
    """The median over elements, of sizes relative to their mean; each counts a little whatever its size."""
    expected = squares / squares.mean()
    return float((((found - 0.02) - expected).abs() / expected).median())


def test_sizes_are_those_of_random_hidden_states() -> None:
    torch.manual_seed(0)
    norm = torch.rand(HIDDEN) + 0.2
    states = torch.randn(4000, HIDDEN) * norm
    qkv = uneven((HEADS + 2 * KV_HEADS) * HEAD)
    values = (states @ qkv[-KV_HEADS * HEAD :].T).unflatten(1, (KV_HEADS, HEAD))
    attended = values.repeat_interleave(HEADS // KV_HEADS, dim=1).flatten(1)
    found = input_sizes.of_output(Dense(qkv), norm, HEADS, KV_HEADS)
    assert found.shape == (HEADS * HEAD,)
    assert relative_error(found, attended.square().mean(0)) < 0.05
    gate_up = uneven(2 * WIDE)
    gate, up = (states @ gate_up.T).chunk(2, dim=1)
    found = input_sizes.of_down(Dense(gate_up), norm)
    assert relative_error(found, (functional.silu(gate) * up).square().mean(0)) < 0.5


def test_rounding_to_4_bits_minds_larger_inputs() -> None:
    torch.manual_seed(0)
    data, sizes = torch.randn(50, 128), torch.rand(128).mul(6).exp()
    by_size = QUANTIZERS["int4"](data, lambda: sizes).dequantize()

    def error(rounded: Tensor) -> Tensor:
        return ((rounded - data).square() * sizes).sum()

    assert error(by_size) < 0.9 * error(to_int4(data).dequantize())


def test_only_4_bits_ask() -> None:
    def never() -> Tensor:
        raise AssertionError

    for kind in ("int8", "fp8"):
        QUANTIZERS[kind](torch.randn(4, 64), never)
