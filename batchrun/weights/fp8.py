"""FP8 checkpoints: ``weight`` float8_e4m3fn [N, K] and a scale: of the whole, of each row, or of blocks of 128 x 128.

The scale is called ``weight_scale`` or ``weight_scale_inv``: it is the multiplier under both names.
Format: https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchrun.weights.formats import Fp8, Weight
from batchrun.weights.stored import FLOATS, MadeTensor, Module, SafeTensor, StoredTensor, assemble


def tensors(stored: Mapping[str, SafeTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names that models know; ``settings``: see `quantization_config`."""
    return assemble(stored, {("weight", "F8_E4M3"): weight_of_floats})


def weight_of_floats(module: Module) -> MadeTensor:
    """The weight of one layer. One scale for the whole is spread over the rows, so that weights can be joined."""
    floats, n, k = module.take_matrix("weight", "F8_E4M3")
    blocks = (-(-n // Fp8.BLOCK), -(-k // Fp8.BLOCK))
    shapes = ((), (1,), (1, 1), (n,), (n, 1), blocks)
    encodings = (*FLOATS, "F8_E8M0")
    found = module.find("weight_scale_inv", encodings, *shapes)
    stored_scales = found or module.take("weight_scale", encodings, *shapes)

    def make(dtype: torch.dtype) -> Weight:
        scales = stored_scales.read().float()
        if scales.shape != blocks or scales.numel() == 1:
            scales = scales.view(-1, 1).expand(n, 1).contiguous()
        return Fp8(floats.read(), scales, dtype)

    return module.made((n, k), make)
