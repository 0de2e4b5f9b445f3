"""MXFP4 checkpoints: floats of 4 bits (E2M1) in blocks of 32 with a power of two each.

``X_blocks`` is uint8 [..., N, K / 32, 16], the low half of a byte being the first of two numbers; ``X_scales`` uint8
[..., N, K / 32], exponents plus 127; 255: NaN. Twice a number is an integer from -12 to 12: the weights stay exact in
8 bits.
Format: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from batchrun.weights.formats import Int8, Weight
from batchrun.weights.stored import MadeTensor, Module, SafeTensor, StoredTensor, assemble
from batchrun.weights.unsigned import unpack

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice those of E2M1; the highest of four bits is the sign
_BIAS, _NAN = 127, 255


def tensors(stored: Mapping[str, SafeTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names that models know; ``settings``: see `quantization_config`."""
    return assemble(stored, {("_blocks", "U8"): _weight})


def _weight(module: Module) -> MadeTensor:
    blocks = module.take("_blocks", ("U8",))
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or 0 in blocks.shape:
        blocks.refuse(f"is {list(blocks.shape)}, expected blocks of 16 bytes")
    *rows, groups, _ = blocks.shape
    exponents = module.take("_scales", ("U8",), (*rows, groups))

    def make(dtype: torch.dtype) -> Weight:
        table = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], dtype=torch.int8)
        integers = table[unpack(blocks.read(), 4).int()].view(math.prod(rows), groups * 32)
        powers = exponents.read()
        scales = torch.ldexp(torch.full(powers.shape, 0.5), powers.int() - _BIAS)
        scales = scales.masked_fill(powers == _NAN, math.nan)
        return Int8(integers, scales.view(-1, groups), None, dtype)

    return module.made((*rows, groups * 32), make, name="")
