"""Checkpoints of the ``bitsandbytes`` package: 8 bits, and floats of 4 bits (NF4 and FP4).

- 8 bits: ``weight`` int8 [N, K] and ``SCB`` float32 [N], the largest magnitude of each row, which is the integer 127.
- 4 bits: ``weight`` uint8 [N * K / 2, 1], the *high* half of a byte being the first of two numbers; each is an index
  into ``weight.quant_map`` [16], and multiplied by ``weight.absmax`` of its block. These may be quantized in turn: then
  they are indices into ``weight.nested_quant_map`` [256], times ``weight.nested_absmax`` of a block of them, plus an
  offset. ``weight.quant_state.bitsandbytes__nf4`` is the JSON text of shape, sizes of blocks and offset.

The 16 numbers of NF4 are no multiples of one another: such weights become plain numbers.
Format: https://github.com/bitsandbytes-foundation/bitsandbytes (``functional.QuantState``)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from batchrun.weights.formats import Dense, Int8, Weight
from batchrun.weights.stored import MadeTensor, Module, SafeTensor, StoredTensor, assemble

_TOO_LARGE = 1 << 31  # for a size of anything


def tensors(stored: Mapping[str, SafeTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names that models know; ``settings``: see `quantization_config`."""
    return assemble(stored, {("weight", "I8"): _integers, ("weight", "U8"): _floats})


def _integers(module: Module) -> MadeTensor:
    integers, n, k = module.take_matrix("weight", "I8")
    largest = module.take("SCB", ("F32",), (n,))
    layout = module.find("weight_format", ("U8",), (), (1,))
    if layout is not None and layout.read().item():
        layout.refuse("names a layout for one kind of GPU; only that by rows (0) is supported")

    def make(dtype: torch.dtype) -> Weight:
        return Int8(integers.read(), largest.read()[:, None] / 127, None, dtype)

    return module.made((n, k), make)


def _floats(module: Module) -> MadeTensor:
    packed = module.take("weight", ("U8",))
    scales = module.take("weight.absmax", ("F32", "U8"))
    state = _state(module, nested=scales.encoding == "U8")
    (n, k), block = state["shape"], state["blocksize"]
    if math.prod(packed.shape) * 2 != n * k:
        packed.refuse(f"is {list(packed.shape)}, which is no matrix {[n, k]} of 4 bits")
    n_blocks = -(-n * k // block)
    table = module.take("weight.quant_map", ("F32",), (16,))
    scales.expect((n_blocks,))
    nested = None
    if scales.encoding == "U8":
        shape = (-(-n_blocks // state["nested_blocksize"]),)
        nested = (
            module.take("weight.nested_quant_map", ("F32",), (256,)),
            module.take("weight.nested_absmax", ("F32",), shape),
        )

    def make(dtype: torch.dtype) -> Weight:
        magnitudes = scales.read()
        if nested is not None:
            levels, largest = (part.read() for part in nested)
            magnitudes = _in_blocks(levels[magnitudes.int()], largest, state["nested_blocksize"])
            magnitudes += state["nested_offset"]
        values = table.read()
        pairs = torch.cartesian_prod(values, values)  # both numbers of each byte
        return Dense(_in_blocks(pairs[packed.read().flatten().int()].flatten(), magnitudes, block).view(n, k).to(dtype))

    return module.made((n, k), make, kept=False)


def _state(module: Module, *, nested: bool) -> dict[str, Any]:
    """What a layer of 4 bits says of itself; ``nested``: of its quantized scales, too."""
    name = "weight.quant_state.bitsandbytes__"
    text = module.find(f"{name}fp4", ("U8",)) or module.take(f"{name}nf4", ("U8",))
    try:
        state = json.loads(bytes(text.read().tolist()))
        _, _ = state["shape"]
        sizes = [*state["shape"], state["blocksize"], *([state["nested_blocksize"]] if nested else [])]
        offset = state["nested_offset"] if nested else 0.0
        if all(type(size) is int and 0 < size < _TOO_LARGE for size in sizes) and type(offset) in (int, float):
            return {**state, "nested_offset": float(offset)}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    text.refuse("is no description of a matrix of 4 bits")


def _in_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Flat ``values`` times the scale of the block of ``block`` neighbours that each is in; overwrites them."""
    whole = values.numel() // block
    values[: whole * block].view(whole, block).mul_(scales[:whole, None])
    values[whole * block :] *= scales[whole:]
    return values
