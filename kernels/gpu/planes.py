"""Products of activations with weights of 4 or 8 bits, which become numbers of the activations' dtype in registers.

A tile of a weight's row is as many planes as a word of 32 bits has codes, each ``PLANE`` neighbouring columns, and its
words hold a code of every plane. So one shift and one mask make of a tile of words a matrix of neighbouring columns,
which have a scale in common. There it becomes floats without a conversion (see :func:`_number`), and by one
multiplication and addition in float32 the weights, rounded once.

Scales and minimums are float16 here, in units of their row (powers of 2). Those that a checkpoint has as float16 or
bfloat16 stay what they are, unless another of their row is far larger, and weights are then those that a product of
plain numbers would have. Others are rounded to float16's 11 bits, and weights are only near to those: the products of
two scales that K-quants have, and float32 ones, as weights that are rounded on loading have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import dot_dtype, launch
from .parts import DESCRIBED_BYTES, Form, add_parts, capability, count_parts, make_parts, store_tile

PLANE = tl.constexpr(16)
BITS = {"int4": 4, "int8": 8, "fp8": 8}
_ROOM = 64  # times a scale is less than a row's unit
_LINES = 64  # rows of a weight that one program unpacks


@dataclass(frozen=True)
class Planes:
    """A weight [N, K] of ``dtype`` in words. ``code`` is one of ``BITS``.

    A number is ``scale * integer + minimum``; int8's codes are 128 more than the integers. fp8's codes (e4m3) are to be
    multiplied by the scale. They have to be finite, and nothing sees to it: the two that are NaN count as 480 and -480.
    """

    words: Tensor  # int32 [tiles, N, PLANE]
    scales: Tensor  # int32 [groups, N]: a float16 scale and, in the upper half, a float16 minimum, in units of the row
    units: Tensor  # float32 [N], powers of 2
    order: Tensor | None  # int64 [K]: the input that each column multiplies; None: its own
    code: str
    group: int  # columns of a group
    columns: int  # K
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.units), self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        parts = (self.words, self.scales, self.units, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def to_dense(self) -> Tensor:
        """The weight as plain numbers [N, K], columns in the input's order."""
        return self._unpacked(None, len(self.units))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` (integers [...]) of it, [..., K]."""
        return self._unpacked(ids.flatten(), ids.numel()).view(*ids.shape, self.columns)

    def _unpacked(self, ids: Tensor | None, count: int) -> Tensor:
        out = torch.empty((count, self.columns), dtype=self.dtype, device=self.words.device)
        launch(
            unpack_kernel,
            (len(self.words), triton.cdiv(count, _LINES)),
            *(self.words, self.scales, self.units, self.order, ids, out, count, *self.shape),
            **self.constants,
            LINES=_LINES,
        )
        return out

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for. RUN: columns of a tile that surely share a group."""
        planes = 32 // BITS[self.code]
        run = math.gcd(PLANE.value * planes, self.group)
        return {"CODE": self.code, "PLANES": planes, "GROUP": self.group, "RUN": run}


def can_pack(group: int, groups: int) -> bool:
    """Whether groups of so many columns are whole planes."""
    return groups == 1 or group % PLANE.value == 0


def pack_planes(
    codes: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    order: Tensor | None,
    *,
    code: str,
    group: int,
    dtype: torch.dtype,
) -> Planes:
    """Planes of ``codes`` uint8 [N, K], with ``scales`` and ``minimums`` float32 [N, groups] (see :func:`can_pack`)."""
    (n, k), bits = codes.shape, BITS[code]
    tiles = functional.pad(codes, (0, -k % (PLANE.value * 32 // bits))).view(n, -1, 32 // bits, PLANE.value)
    words = torch.zeros((n, tiles.shape[1], PLANE.value), dtype=torch.int32, device=codes.device)
    for plane in range(32 // bits):
        words |= tiles[:, :, plane].int() << bits * plane
    least = torch.zeros_like(scales) if minimums is None else minimums
    largest = torch.maximum(_ROOM * scales.abs(), least.abs()).amax(dim=1)
    units = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    low, high = ((each / units[:, None]).half().view(torch.int16).int() for each in (scales, least))
    pairs = (low & 0xFFFF) | high << 16
    return Planes(words.transpose(0, 1).contiguous(), pairs.T.contiguous(), units, order, code, group, k, dtype)


def form(rows: int, dtype: torch.dtype) -> Form:
    """The form for so many rows; all fit in the 99 KiB of shared memory that 8.9 has."""
    if dtype is torch.float32:  # too small a tile for Hopper's products, whose operands would be three times as many
        return Form(32, 16, 8, 2)
    if rows <= 16:
        return Form(128, 16, 8, 4)
    return Form(128, 32 if rows <= 32 else 64 if rows <= 64 else 128, 8, 3)


def multiply_planes(
    x: Tensor, weight: Planes, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None, *, fixed: bool
) -> Tensor:
    """``x`` [M, K], its columns in the weight's order, times ``weight`` transposed, plus ``bias`` [N]: [M, N].

    ``fixed``: with one form of tile and undivided sums, so that the bits of a row are its own.
    """
    rows, (n, k) = len(x), weight.shape
    out = torch.empty((rows, n), dtype=dtype, device=x.device) if out is None else out
    if not rows:
        return out
    chosen = form(64 if fixed else rows, x.dtype)
    grid = (triton.cdiv(n, chosen.outputs), triton.cdiv(rows, chosen.rows))
    count = 1 if fixed or grid[1] > 1 else count_parts(grid[0], len(weight.words))
    parts = make_parts(count, rows, n, x)
    described = capability(x.device) >= (9, 0) and x.dtype is not torch.float32
    if described and any(place * x.element_size() % DESCRIBED_BYTES for place in (x.stride(0), x.storage_offset())):
        x = functional.pad(x, (0, DESCRIBED_BYTES - k % DESCRIBED_BYTES))
    constants = weight.constants
    launch(
        plane_product_kernel,
        (*grid, count),
        TensorDescriptor.from_tensor(x, [chosen.rows, PLANE.value * constants["PLANES"]]) if described else x,
        *(weight.words, weight.scales, weight.units, bias, out, parts, rows, n, k, x.stride(0)),
        **constants,
        OUTPUTS=chosen.outputs,
        ROWS=chosen.rows,
        DESCRIBED=described,
        DOT=dot_dtype(x.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if count > 1:
        add_parts(parts, bias, out)
    return out


@triton.jit(do_not_specialize=["rows"])
def plane_product_kernel(
    x, words, scales, units, bias, out, parts, rows, n, k, stride,
    CODE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of ``x`` [rows, k] times a weight [n, k], or a part of its sum."""
    first, first_row = tl.program_id(0) * OUTPUTS, tl.program_id(1) * ROWS
    column = tl.minimum(first + tl.arange(0, OUTPUTS), n - 1)
    row = first_row + tl.arange(0, ROWS)
    depth = tl.arange(0, PLANE)
    tiles = tl.cdiv(k, PLANE * PLANES)
    share = tl.cdiv(tiles, tl.num_programs(2))
    begin = tl.program_id(2) * share
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    unit = tl.load(units + column)[:, None]
    for tile in tl.range(begin, tl.minimum(begin + share, tiles)):
        word = tl.load(words + (tile * n + column)[:, None] * PLANE + depth[None, :])
        if DESCRIBED:
            # Hopper's products are serialised (C7513) unless all that a step multiplies is one operand.
            weight = _tile(word, scales, tile, column, n, k, CODE, PLANES, GROUP, RUN)
            values = x.load([first_row, tile * PLANE * PLANES])
            # So that a product ends before registers get the next one's weights: Triton does not wait for it otherwise.
            acc += tl.dot(weight.to(DOT), tl.trans(values.to(DOT))) * unit
        else:
            for plane in tl.static_range(PLANES):
                at = (tile * PLANES + plane) * PLANE + depth
                inside = (row < rows)[:, None] & (at < k)[None, :]
                values = tl.load(x + row.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0.0)
                weight = _plane(word, scales, tile, column, n, k, plane, CODE, PLANES, GROUP, RUN)
                # As in attention, of float32.
                acc = tl.dot(weight.to(DOT), tl.trans(values.to(DOT)), acc, input_precision="tf32x3")
    if not DESCRIBED:
        acc *= unit
    store_tile(acc, bias, out, parts, row, first + tl.arange(0, OUTPUTS), rows, n)


@triton.jit(do_not_specialize=["count"])
def unpack_kernel(
    words, scales, units, order, ids, out, count, n, k,
    CODE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A tile of ``LINES`` rows of ``out`` [count, k]: of the weight's rows ``ids``, or of all."""
    tile = tl.program_id(0)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    depth = tl.arange(0, PLANE)
    column = tl.minimum(line, n - 1)
    if ids is not None:
        column = tl.load(ids + line, mask=line < count, other=0).to(tl.int32)
    word = tl.load(words + (tile * n + column)[:, None] * PLANE + depth[None, :])
    unit = tl.load(units + column)[:, None]
    for plane in tl.static_range(PLANES):
        weight = unit * _plane(word, scales, tile, column, n, k, plane, CODE, PLANES, GROUP, RUN)
        place = (tile * PLANES + plane) * PLANE + depth
        inside = (line < count)[:, None] & (place < k)[None, :]
        if order is not None:
            place = tl.load(order + place, mask=place < k, other=0).to(tl.int32)
        target = out + line.to(tl.int64)[:, None] * k + place[None, :]
        tl.store(target, weight.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    word, scales, tile, column, n, k,
    CODE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """All planes of a tile of words [N, PLANE] side by side, [N, PLANES * PLANE]; no number leaves its thread."""
    if PLANES == 4:
        even = _pair(word, scales, tile, column, n, k, 0, CODE, PLANES, GROUP, RUN)
        odd = _pair(word, scales, tile, column, n, k, 1, CODE, PLANES, GROUP, RUN)
    else:
        even = tl.join(
            _pair(word, scales, tile, column, n, k, 0, CODE, PLANES, GROUP, RUN),
            _pair(word, scales, tile, column, n, k, 2, CODE, PLANES, GROUP, RUN),
        )
        odd = tl.join(
            _pair(word, scales, tile, column, n, k, 1, CODE, PLANES, GROUP, RUN),
            _pair(word, scales, tile, column, n, k, 3, CODE, PLANES, GROUP, RUN),
        )
    planes = tl.reshape(tl.join(even, odd), (word.shape[0], PLANE, PLANES))
    return tl.reshape(tl.permute(planes, (0, 2, 1)), (word.shape[0], PLANES * PLANE))


@triton.jit
def _pair(
    word, scales, tile, column, n, k, plane: tl.constexpr,
    CODE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A plane of the first half of the planes, and the one in the same place of the second half."""
    return tl.join(
        _plane(word, scales, tile, column, n, k, plane, CODE, PLANES, GROUP, RUN),
        _plane(word, scales, tile, column, n, k, plane + PLANES // 2, CODE, PLANES, GROUP, RUN),
    )


@triton.jit
def _plane(
    word, scales, tile, column, n, k, plane: tl.constexpr,
    CODE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One plane of a tile of words [N, PLANE] as weights in units of their rows, float32."""
    # Past the last column there are no groups, and activations are 0.
    group = tl.minimum(tile * PLANE * PLANES + plane * PLANE // RUN * RUN, k - 1) // GROUP
    pair = tl.load(scales + group * n + column)
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    least = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    # The largest of these powers of 2, 2^133, is no float32; times a scale, which is less than 2^-6, it is.
    if CODE == "int4":
        scale = scale * 1152921504606846976.0 * 590295810358705651712.0  # 2^60 * 2^69
    elif CODE == "int8":
        least -= 128 * scale
        scale = scale * 1152921504606846976.0 * 9444732965739290427392.0  # 2^60 * 2^73
    else:
        scale = scale * 1152921504606846976.0 * 1152921504606846976.0  # 2^60 * 2^60
    return _number(word, plane, CODE) * scale[:, None] + least[:, None]


@triton.jit
def _number(word, plane: tl.constexpr, CODE: tl.constexpr):
    """The codes of a plane as float32: 2^-129 times them for int4, 2^-133 for int8, 2^-120 for fp8.

    A float32 with nothing above its lowest 24 bits is 2^-149 times what they are as an integer.
    """
    if CODE == "int4":
        bits = _shifted(word, 20 - 4 * plane) & 0x00F00000
    elif CODE == "int8":
        bits = _shifted(word, 16 - 8 * plane) & 0x00FF0000
    else:  # the sign goes to bit 31, exponent and fraction end at bit 20
        bits = (_shifted(word, 24 - 8 * plane) >> 4) & -0x78100000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _shifted(word, left: tl.constexpr):
    """``word`` shifted to the left or, where ``left`` is negative, to the right."""
    return word << left if left >= 0 else word >> -left
