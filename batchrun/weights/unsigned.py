"""Weights that checkpoints store as unsigned integers with a zero point, several of them in a word of 32 bits."""

from __future__ import annotations

import torch

from batchrun.weights.formats import Int4, Int8
from batchrun.weights.stored import SafeTensor


def bytes_along_rows(words: torch.Tensor) -> torch.Tensor:
    """Words that are packed along the rows, int32 ``[rows, columns]``, as bytes, uint8 ``[columns, 4 * rows]``."""
    rows, columns = words.shape
    return words.contiguous().view(torch.uint8).view(rows, columns, 4).transpose(0, 1).reshape(columns, 4 * rows)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes ``[..., n]`` as integers of 8 or 4 bits, uint8 ``[..., 8 * n / bits]``, the lowest bits first."""
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unsigned(
    packed: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
) -> Int4 | Int8:
    """``scale * (integer - zero)``, of unsigned integers of 4 or 8 ``bits``.

    ``packed`` is uint8 ``[out, in * bits / 8]``, lowest bits first; ``scales`` and ``zeros`` are of any dtype,
    ``[out, groups]``; None: zero is the middle, as in symmetric formats. With ``order`` (int64 ``[in]``), column ``i``
    of the weight is column ``order[i]`` of ``packed``, and multiplies that input.
    """
    scales = scales.float().contiguous()
    zeros = torch.full_like(scales, 1 << (bits - 1)) if zeros is None else zeros.float().contiguous()
    if order is not None:
        columns = unpack(packed, bits)[:, order]
        packed = columns if bits == 8 else columns[:, ::2] | columns[:, 1::2] << 4
    if bits == 4:
        return Int4(packed, scales, -scales * zeros, dtype, order)
    zeros = zeros - 128
    minimums = -scales * zeros if zeros.any() else None
    return Int8((packed ^ 128).view(torch.int8), scales, minimums, dtype, order)


def order_of(group_of: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The order that makes columns of a group neighbours, int64 ``[in]``; None where they are.

    ``group_of``: the group of each column, ``[in]``. Raises ValueError where groups differ in size.
    """
    order = group_of.argsort(stable=True)
    columns = torch.arange(len(order))
    if not torch.equal(group_of[order].long(), columns // (len(order) // groups)):
        raise ValueError(f"its g_idx does not divide {len(order)} columns into {groups} equal groups")
    return None if torch.equal(order, columns) else order


def whole_groups(integers: SafeTensor, columns: int, size: int, bits: int) -> int:
    """How many groups of ``size`` of a layer's columns there are; -1: one of them all.

    Raises :class:`JobError`, naming ``integers``, if one of them is not whole, or `are_groups` says no.
    """
    size = columns if size == -1 else size
    if columns % size or not are_groups(columns, columns // size, bits):
        integers.refuse(f"has {columns} inputs, which are no whole groups of {size} integers of {bits} bits")
    return columns // size


def are_groups(columns: int, groups: int, bits: int) -> bool:
    """Whether so many columns can be so many groups: of equal, even size, but for one group of whole bytes."""
    if columns % groups:
        return False
    return columns // groups % 2 == 0 or (groups == 1 and bits == 8)
