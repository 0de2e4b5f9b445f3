"""What matrix products of quantized weights share: tiles, and the parts of sums that several programs divide.

A tile of a product has outputs of the weight as its rows and rows of activations as its columns: the weight is the left
operand, of which tensor cores take many lines however few rows of activations there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import capability
from .launch import launch

__all__ = ["DESCRIBED_BYTES", "Form", "add_parts", "capability", "count_parts", "make_parts", "store_tile"]

DESCRIBED_BYTES = 16  # of which the strides and the address that a descriptor takes are multiples
_PROGRAMS = 512  # that keep a GPU busy
_LEAST = 4  # steps of a sum that one program makes
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Form:
    """A program's tile, ``outputs`` of the weight for ``rows`` of activations, and how it runs."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int


def count_parts(programs: int, steps: int) -> int:
    """Into how many parts sums of ``steps`` are divided where there are ``programs`` tiles of results."""
    return max(1, min(_PROGRAMS // programs, steps // _LEAST))


def make_parts(count: int, rows: int, n: int, like: Tensor) -> Tensor:
    """Memory for parts of sums, float32 [count, rows, n]; nothing where a sum is one part."""
    return torch.empty((count if count > 1 else 0, rows, n), dtype=torch.float32, device=like.device)


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The sum of ``parts`` [count, rows, n] in order, plus ``bias`` [n], to ``out`` [rows, n]."""
    count, rows, n = parts.shape
    launch(sum_parts_kernel, (rows, triton.cdiv(n, _BLOCK)), parts, bias, out, rows, n, COUNT=count, BLOCK=_BLOCK)


@triton.jit
def store_tile(acc, bias, out, parts, row, column, rows, n):
    """Write a tile ``acc`` [columns, rows] of sums: to ``out``, or where they are parts to those of this program."""
    inside = (row < rows)[:, None] & (column < n)[None, :]
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    if tl.num_programs(2) > 1:
        first = tl.program_id(2).to(tl.int64) * rows * n
        tl.store(parts + first + place, tl.trans(acc), mask=inside)
    else:
        if bias is not None:
            acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, tl.trans(acc).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_parts_kernel(parts, bias, out, rows, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """``BLOCK`` columns of a row of ``out`` [rows, n]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(COUNT):
        total += tl.load(parts + (row + part * rows.to(tl.int64)) * n + column, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, total.to(out.dtype.element_ty), mask=inside)
