"""GGML's tensor encodings back into numbers.

Plain floats and the three common block formats are decoded here by whole-array operations; every other format goes to
the ``gguf`` package, whose decoders work on sixteen rows at a time and are several times slower.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GGMLType = gguf.GGMLQuantizationType
_PLAIN = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}


def float_dtype(kind: int) -> torch.dtype:
    """The dtype that :func:`dequantize` gives: the stored one if it is a float, else float32."""
    return _PLAIN.get(GGMLType(kind), torch.float32)


def dequantize(raw: Bytes, kind: int) -> torch.Tensor:
    """The numbers in ``raw`` (whole rows of encoding ``kind``), flat. Plain floats share ``raw``'s memory.

    Raises ``NotImplementedError`` for an encoding that nobody here can decode.
    """
    kind = GGMLType(kind)
    if kind in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[kind])
    decode = _BLOCK_DECODERS.get(kind)
    values = decode(raw) if decode else gguf.quants.dequantize(raw, kind)
    return torch.from_numpy(values).flatten()


def _blocks(raw: Bytes, *fields: tuple[Any, ...]) -> Any:
    return raw.view(np.dtype(list(fields)))


def _nibbles(packed: Bytes) -> Floats:
    """``[blocks, 16]`` bytes to ``[blocks, 32]``: all the low halves come before all the high ones."""
    values = np.empty((len(packed), 2, packed.shape[1]), np.float32)
    np.bitwise_and(packed, 15, out=values[:, 0], casting="unsafe")
    np.right_shift(packed, 4, out=values[:, 1], casting="unsafe")
    return values.reshape(len(packed), -1)


def _scaled(values: Floats, scale: npt.NDArray[np.float16]) -> Floats:
    values *= scale.astype(np.float32)[:, None]
    return values


def _q4_0(raw: Bytes) -> Floats:
    blocks = _blocks(raw, ("scale", "<f2"), ("packed", "u1", (16,)))
    values = _nibbles(blocks["packed"])
    values -= 8
    return _scaled(values, blocks["scale"])


def _q4_1(raw: Bytes) -> Floats:
    blocks = _blocks(raw, ("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", (16,)))
    values = _scaled(_nibbles(blocks["packed"]), blocks["scale"])
    values += blocks["minimum"].astype(np.float32)[:, None]
    return values


def _q8_0(raw: Bytes) -> Floats:
    blocks = _blocks(raw, ("scale", "<f2"), ("values", "i1", (32,)))
    return _scaled(blocks["values"].astype(np.float32), blocks["scale"])


_BLOCK_DECODERS: dict[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q8_0: _q8_0,
}
