"""Quantized weights as the compressed-tensors package stores them, and the ``quantization_config`` that says so.

Integers are stored without zero points: transformers does not load those of 4 bits by itself with every release of
the package (0.20.1 expects them unpacked). With them in groups of 64 columns the least squared error of the demo's
model was 14% above that of what is stored here, groups of 32 with a scale alone that may be negative.
Format: https://github.com/vllm-project/compressed-tensors (``pack-quantized`` and ``float-quantized``)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.weights.formats import Fp8, Int4, Int8, Weight

Kind = Literal["int8", "int4", "fp8"]
GROUPS: Mapping[Kind, int] = {"int8": 64, "int4": 32}  # columns with a scale of their own, at most


def compress(weight: Weight, stem: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that stand for the weight of layer ``stem`` (``model.layers.0.mlp.down_proj``), scales in ``dtype``.

    Scales have to be numbers of ``dtype``, and those of 4 bits as `batchrun.weights.quantize.fit_int4`
    finds them ``signed``.
    """
    assert isinstance(weight, Int8 | Int4 | Fp8)
    tensors = {"weight_scale": weight.scales.to(dtype)}
    if isinstance(weight, Fp8):
        tensors["weight"] = weight.stored
    else:
        tensors["weight_shape"] = torch.tensor(weight.shape, device=weight.stored.device)
        tensors["weight_packed"] = _words(_unsigned(weight))
    return {f"{stem}.{name}": tensor for name, tensor in tensors.items()}


def compressed_like(kind: Kind, shape: tuple[int, int], group: int, stem: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """As `compress` of a weight of this shape, in groups of ``group`` columns, on the meta device."""
    n, k = shape
    with torch.device("meta"):
        scales = torch.empty(n, 1 if kind == "fp8" else k // group)
        if kind == "fp8":
            return compress(Fp8(torch.empty(shape, dtype=torch.float8_e4m3fn), scales, dtype), stem, dtype)
        if kind == "int8":
            return compress(Int8(torch.empty(shape, dtype=torch.int8), scales, None, dtype), stem, dtype)
        return compress(Int4(torch.empty(n, k // 2, dtype=torch.uint8), scales, None, dtype), stem, dtype)


def quantization_config(kind: Kind, group: int) -> dict[str, Any]:
    """What ``config.json`` says of a model whose linear layers, but for the output projection, are of ``kind``."""
    weights: dict[str, Any] = {"num_bits": 4 if kind == "int4" else 8, "dynamic": False, "symmetric": True}
    inputs = None
    if kind == "fp8":
        weights |= {"type": "float", "strategy": "channel"}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    else:
        weights |= {"type": "int", "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _unsigned(weight: Int8 | Int4) -> Tensor:
    """Its integers as bytes, counted from 0; of 4 bits, two in each, the first in the low half."""
    return weight.stored if isinstance(weight, Int4) else weight.stored.view(torch.uint8) ^ 0x80


def _words(rows: Tensor) -> Tensor:
    """Rows of bytes as int32, filled up with zeros."""
    padded = functional.pad(rows, (0, -rows.shape[1] % 4))
    return padded.contiguous().view(torch.int32)
