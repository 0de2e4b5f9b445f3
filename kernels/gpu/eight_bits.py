"""Products of activations and weights of 8 bits each, integers or floats (e4m3), on the tensor cores that take them.

Activations are rounded here, with a scale for each row. Sums of integers are exact. Those of floats are made by tensor
cores over ``DEPTH`` columns, of which Hopper's keep some 14 bits, and beyond that in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import launch
from .parts import DESCRIBED_BYTES, Form, add_parts, capability, count_parts, make_parts, store_tile

DEPTH = 128  # columns that are multiplied at a time
BLOCK = 128  # rows and columns of a weight that have a scale in common, where not whole rows have
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
_PER_WARP = 512  # elements: 16 of a thread
_MOST_WARPS = 16


def takes_bytes(columns: int) -> bool:
    """Whether :func:`multiply_bytes` takes rows of so many columns."""
    return columns % DESCRIBED_BYTES == 0


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has tensor cores for floats of 8 bits."""
    return capability(device) >= (8, 9)


class Rounded(NamedTuple):
    """Rows [M, K] of activations as ``scale * code``. A row that holds no numbers has a scale of NaN."""

    codes: Tensor  # int8 or float8_e4m3fn [M, K]
    scales: Tensor  # float32 [M]
    sums: Tensor  # float32 [M], of a row's scaled codes


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Rounded:
    """``x`` [M, K] rounded to ``dtype``; a row's largest number becomes the largest code."""
    rows, k = x.shape
    codes = torch.empty((rows, k), dtype=dtype, device=x.device)
    scales, sums = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    block = triton.next_power_of_2(k)
    launch(
        quantize_kernel,
        (rows,),
        *(x, codes, scales, sums, x.stride(0), k),
        LARGEST=_LARGEST[dtype],
        BLOCK=block,
        num_warps=min(max(block // _PER_WARP, 1), _MOST_WARPS),
    )
    return Rounded(codes, scales, sums)


def form(capability: tuple[int, int], rows: int) -> Form:
    """The form for so many rows; those for 8.x fit in the 99 KiB of shared memory that 8.9 has."""
    if rows <= 64:
        return Form(128, 16 if rows <= 16 else 32 if rows <= 32 else 64, 8, 4 if capability >= (9, 0) else 3)
    return Form(128, 128, 8, 4 if capability >= (9, 0) else 3)


def multiply_bytes(
    x: Rounded,
    weight: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
    *,
    fixed: bool,
) -> Tensor:
    """``x`` [M, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [M, N]. Both have the same kind of codes;
    of their rows see :func:`takes_bytes`.

    A weight is ``scale * code + minimum``, with ``scales`` float32 of rows [N, 1] or, of floats, of blocks, and
    ``minimums`` [N, 1]. ``fixed``: with one form of tile and undivided sums, so that the bits of a row are its own.
    """
    rows, (n, k) = len(x.codes), weight.shape
    out = torch.empty((rows, n), dtype=dtype, device=weight.device) if out is None else out
    if not rows:
        return out
    major_minor = capability(weight.device)
    chosen = form(major_minor, 64 if fixed else rows)
    grid = (triton.cdiv(n, chosen.outputs), triton.cdiv(rows, chosen.rows))
    count = 1 if fixed or grid[1] > 1 else count_parts(grid[0], triton.cdiv(k, DEPTH))
    parts = make_parts(count, rows, n, weight)
    described = major_minor >= (9, 0)

    def tiles(codes: Tensor, lines: int) -> Any:
        return TensorDescriptor.from_tensor(codes, [lines, DEPTH]) if described else codes

    launch(
        byte_product_kernel,
        (*grid, count),
        tiles(weight, chosen.outputs),
        tiles(x.codes, chosen.rows),
        *(scales, minimums, x.scales, x.sums, bias, out, parts, rows, n, k, scales.shape[1]),
        FLOATS=weight.dtype is torch.float8_e4m3fn,
        BLOCK=0 if scales.shape == (n, 1) else BLOCK,
        OUTPUTS=chosen.outputs,
        ROWS=chosen.rows,
        DEPTH=DEPTH,
        DESCRIBED=described,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if count > 1:
        add_parts(parts, bias, out)
    return out


@triton.jit
def quantize_kernel(x, codes, scales, sums, stride, k, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """A row of ``codes`` [rows, k], its scale, and the sum of what the codes stand for."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < k
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    broken = tl.sum(values * 0.0)  # 0, or NaN
    values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    scale = tl.maximum(tl.max(tl.abs(values)), 1e-30) / LARGEST
    scaled = tl.minimum(tl.maximum(values * (1.0 / scale), -LARGEST), LARGEST)
    if codes.dtype.element_ty == tl.int8:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    code = _code(scaled, codes.dtype.element_ty)
    tl.store(codes + row * k + column, code, mask=inside)
    tl.store(scales + row, scale + broken)
    tl.store(sums + row, tl.sum(code.to(tl.float32)) * scale + broken)


@triton.jit
def _code(scaled, dtype: tl.constexpr):
    """The nearest number of 8 bits."""
    return scaled.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def byte_product_kernel(
    weight, x, scales, minimums, row_scales, row_sums, bias, out, parts, rows, n, k, blocks,
    FLOATS: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A tile of ``x`` [rows, k] times ``weight`` [n, k], or a part of its sum. ``BLOCK`` 0: rows have scales."""
    first, first_row = tl.program_id(0) * OUTPUTS, tl.program_id(1) * ROWS
    column, row = first + tl.arange(0, OUTPUTS), first_row + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    steps = tl.cdiv(k, DEPTH)
    share = tl.cdiv(steps, tl.num_programs(2))
    begin = tl.program_id(2) * share
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32 if FLOATS else tl.int32)
    scale = 0.0 if BLOCK else tl.load(scales + tl.minimum(column, n - 1))[:, None]
    for step in tl.range(begin, tl.minimum(begin + share, steps)):
        start = step * DEPTH
        if DESCRIBED:
            left, right = weight.load([first, start]), x.load([first_row, start])
        else:
            at = start + depth[None, :]
            left_at = tl.minimum(column, n - 1).to(tl.int64)[:, None] * k + at
            left = tl.load(weight + left_at, mask=at < k, other=0.0)
            right_at = tl.minimum(row, rows - 1).to(tl.int64)[:, None] * k + at
            right = tl.load(x + right_at, mask=at < k, other=0.0)
        if not FLOATS:
            acc = tl.dot(left, tl.trans(right), acc, out_dtype=tl.int32)
        else:
            if BLOCK:
                scale = tl.load(scales + first // BLOCK * blocks + start // BLOCK)
            acc += tl.dot(left, tl.trans(right)) * scale
    total = acc if FLOATS else acc.to(tl.float32) * scale
    total *= tl.load(row_scales + row, mask=row < rows, other=0.0)[None, :]
    if minimums is not None:  # of all parts of a sum the first has them
        least = tl.where(tl.program_id(2) == 0, tl.load(minimums + tl.minimum(column, n - 1)), 0.0)
        total += least[:, None] * tl.load(row_sums + row, mask=row < rows, other=0.0)[None, :]
    store_tile(total, bias, out, parts, row, column, rows, n)
