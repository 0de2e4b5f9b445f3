"""GGML's tensor encodings: the integers, scales and minimums in them, or the numbers that these stand for.

Plain floats and the block formats of integers in groups are decoded here by whole-array operations; every other format
goes to the ``gguf`` package, whose decoders work on sixteen rows at a time and are several times slower.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch

from batchrun.weights.formats import Grouped, Int4, Int8

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GGMLType = gguf.GGMLQuantizationType
_PLAIN = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}


class Groups(NamedTuple):
    """Blocks of integers in groups of neighbours: a number is ``scale * integer + minimum``.

    ``integers`` are ``[blocks, elements]``: uint8 if all are from 0 to 15, else int8. ``scales`` and ``minimums`` are
    ``[blocks, groups]``; None: no minimums. All of ggml's products of scales are exact here, but for Q6_K's with an
    integer, which is rounded once: the numbers are those of the ``gguf`` package to the last bit.
    """

    integers: npt.NDArray[np.uint8 | np.int8]
    scales: Floats
    minimums: Floats | None = None

    def numbers(self) -> Floats:
        values = self.integers.astype(np.float32).reshape(*self.scales.shape, -1)
        values *= self.scales[..., None]
        if self.minimums is not None:
            values += self.minimums[..., None]
        return values


def float_dtype(kind: int) -> torch.dtype:
    """The dtype that :func:`dequantize` gives: the stored one if it is a float, else float32."""
    return _PLAIN.get(GGMLType(kind), torch.float32)


def is_plain(kind: int) -> bool:
    """Whether encoding ``kind`` is plain floats."""
    return GGMLType(kind) in _PLAIN


def is_grouped(kind: int) -> bool:
    """Whether encoding ``kind`` is integers in groups, such as :func:`grouped` takes."""
    return GGMLType(kind) in _GROUPS


def dequantize(raw: Bytes, kind: int) -> torch.Tensor:
    """The numbers in ``raw`` (whole rows of encoding ``kind``), flat. Plain floats share ``raw``'s memory.

    Raises ``NotImplementedError`` for an encoding that nobody here can decode.
    """
    kind = GGMLType(kind)
    if kind in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[kind])
    decode = _GROUPS.get(kind)
    values = decode(raw).numbers() if decode else gguf.quants.dequantize(raw, kind)
    return torch.from_numpy(values).flatten()


def grouped(raw: Bytes, kind: int, length: int, dtype: torch.dtype) -> Grouped:
    """The same numbers, of rows of ``length``, with their integers kept: the smaller class that holds them."""
    integers, scales, minimums = (
        None if part is None else torch.from_numpy(part) for part in _GROUPS[GGMLType(kind)](raw)
    )
    assert integers is not None
    assert scales is not None
    rows = integers.numel() // length
    make = Int4.of if integers.dtype == torch.uint8 else Int8
    minimums = None if minimums is None else minimums.view(rows, -1)
    return make(integers.reshape(rows, length), scales.view(rows, -1), minimums, dtype)


def _blocks(raw: Bytes, *fields: tuple[Any, ...]) -> Any:
    return raw.view(np.dtype(list(fields)))


def _split(packed: Bytes, bits: int) -> Bytes:
    """Bytes ``[blocks, parts, width]`` to ``[blocks, parts, 8 / bits, width]``: the lowest bits of all come first."""
    values = np.empty((*packed.shape[:2], 8 // bits, packed.shape[2]), np.uint8)
    for index in range(8 // bits):
        np.right_shift(packed, index * bits, out=values[:, :, index])
    values &= (1 << bits) - 1
    return values


def _nibbles(packed: Bytes, parts: int = 1) -> Bytes:
    """Halves of bytes, ``[blocks, 2 * bytes]``: in each part the low halves, then the high ones."""
    return _split(packed.reshape(len(packed), parts, -1), 4).reshape(len(packed), -1)


def _crumbs(packed: Bytes, parts: int) -> Bytes:
    """Quarters of bytes, ``[blocks, 4 * bytes]``, as `_nibbles`."""
    return _split(packed.reshape(len(packed), parts, -1), 2).reshape(len(packed), -1)


def _bits(packed: Bytes) -> Bytes:
    """Bits of bytes, ``[blocks, 8 * bytes]``, as `_nibbles` in one part."""
    return _split(packed[:, None], 1).reshape(len(packed), -1)


def _signed(values: Bytes, zero: int = 0) -> npt.NDArray[np.int8]:
    """``values - zero`` as int8; overwrites them."""
    values -= np.uint8(zero)  # wraps around
    return values.view(np.int8)


def _floats(scales: npt.NDArray[Any]) -> Floats:
    """One scale a block as ``[blocks, 1]``."""
    return np.asarray(scales.astype(np.float32)[:, None])


def _q4_0(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("scale", "<f2"), ("packed", "u1", (16,)))
    scales = _floats(blocks["scale"])
    return Groups(_nibbles(blocks["packed"]), scales, scales * np.float32(-8))


def _q4_1(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", (16,)))
    return Groups(_nibbles(blocks["packed"]), _floats(blocks["scale"]), _floats(blocks["minimum"]))


def _five_bits(blocks: Any) -> Bytes:
    values = _nibbles(blocks["packed"])
    values |= np.unpackbits(blocks["high"], axis=1, bitorder="little") << 4
    return values


def _q5_0(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("scale", "<f2"), ("high", "u1", (4,)), ("packed", "u1", (16,)))
    return Groups(_signed(_five_bits(blocks), 16), _floats(blocks["scale"]))


def _q5_1(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("scale", "<f2"), ("minimum", "<f2"), ("high", "u1", (4,)), ("packed", "u1", (16,)))
    return Groups(_signed(_five_bits(blocks)), _floats(blocks["scale"]), _floats(blocks["minimum"]))


def _q8_0(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("scale", "<f2"), ("values", "i1", (32,)))
    return Groups(blocks["values"], _floats(blocks["scale"]))


def _q2_k(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("scales", "u1", (16,)), ("packed", "u1", (64,)), ("scale", "<f2"), ("minimum", "<f2"))
    scales = _floats(blocks["scale"]) * (blocks["scales"] & 15)
    minimums = -_floats(blocks["minimum"]) * (blocks["scales"] >> 4)
    return Groups(_crumbs(blocks["packed"], 2), scales, minimums)


def _q3_k(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("high", "u1", (32,)), ("packed", "u1", (64,)), ("scales", "u1", (12,)), ("scale", "<f2"))
    six_bits = _nibbles(blocks["scales"][:, :8])
    six_bits |= _crumbs(blocks["scales"][:, 8:], 1) << 4
    scales = _floats(blocks["scale"]) * _signed(six_bits, 32)
    values = _crumbs(blocks["packed"], 2)
    values |= _bits(blocks["high"]) << 2
    return Groups(values, scales, scales * np.float32(-4))


def _scales_and_minimums(blocks: Any) -> tuple[Floats, Floats]:
    """Those of Q4_K and Q5_K, ``[blocks, 8]`` each: 6 bits, the upper two of the last four lying with the first."""
    first, second, mixed = blocks["scales"].reshape(-1, 3, 4).swapaxes(0, 1)
    scales = np.concatenate((first & 63, (mixed & 15) | (first >> 6 << 4)), axis=1)
    minimums = np.concatenate((second & 63, (mixed >> 4) | (second >> 6 << 4)), axis=1)
    return _floats(blocks["scale"]) * scales, -_floats(blocks["minimum"]) * minimums


def _q4_k(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("scale", "<f2"), ("minimum", "<f2"), ("scales", "u1", (12,)), ("packed", "u1", (128,)))
    return Groups(_nibbles(blocks["packed"], 4), *_scales_and_minimums(blocks))


def _q5_k(raw: Bytes) -> Groups:
    fields = ("scale", "<f2"), ("minimum", "<f2"), ("scales", "u1", (12,)), ("high", "u1", (32,))
    blocks = _blocks(raw, *fields, ("packed", "u1", (128,)))
    values = _nibbles(blocks["packed"], 4)
    values |= _bits(blocks["high"]) << 4
    return Groups(_signed(values), *_scales_and_minimums(blocks))


def _q6_k(raw: Bytes) -> Groups:
    blocks = _blocks(raw, ("packed", "u1", (128,)), ("high", "u1", (64,)), ("scales", "i1", (16,)), ("scale", "<f2"))
    values = _nibbles(blocks["packed"], 2)
    values |= _crumbs(blocks["high"], 2) << 4
    return Groups(_signed(values, 32), _floats(blocks["scale"]) * blocks["scales"])


_GROUPS: dict[GGMLType, Callable[[Bytes], Groups]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
