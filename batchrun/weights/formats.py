"""The classes a linear layer's weight can be. Loaders turn every checkpoint format into one of them.

All have the same few methods, so that a model file never knows which it holds: it embeds with ``rows`` and hands the
object to ``ops.linear``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch


class Packed(Protocol):
    """A weight in the layout that some backend's ``linear`` multiplies."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""

    def to_dense(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]``."""


@runtime_checkable
class PackedRows(Packed, Protocol):
    """One whose rows can be looked up."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (integers ``[...]``) of it, ``[..., in]``."""


class Weight(ABC):
    """A weight ``[out, in]`` on the device where it is used; ``dtype`` is that of the activations it multiplies."""

    __slots__ = ("_stored", "dtype", "packed", "shape")

    _freed: ClassVar[Sequence[str]] = ()  # what goes with the stored form

    def __init__(self, stored: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._stored: torch.Tensor | None = stored
        self.shape = shape
        self.dtype = dtype
        self.packed: Packed | None = None  # the same numbers as the backend wants them, once `pack` made it

    @property
    def stored(self) -> torch.Tensor:
        """The numbers as the class stores them, until they are packed."""
        assert self._stored is not None, "the weight was packed"
        return self._stored

    def pack(self, pack: Packer, *, keep_rows: bool = False) -> None:
        """Lay the weight out for a backend; the stored form is freed if that made another.

        ``keep_rows`` says that its rows are looked up: the stored form stays where those of the other cannot be.
        """
        self.packed = pack(self)
        if self.packed is not None and not (keep_rows and not isinstance(self.packed, PackedRows)):
            self._stored = None
            for name in self._freed:
                delattr(self, name)

    def dequantize(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]`` of ``dtype``; may be its own storage: not to be written to."""
        if self._stored is not None:
            return self._plain(slice(None)).to(self.dtype)
        assert self.packed is not None
        return self.packed.to_dense().to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (integers ``[...]``) as ``[..., in]`` of ``dtype``: the embedding lookup."""
        if self._stored is not None:
            return self._plain(ids.flatten()).to(self.dtype).view(*ids.shape, self.shape[1])
        if isinstance(self.packed, PackedRows):
            return self.packed.rows(ids).to(self.dtype)
        return self.dequantize()[ids]

    def to(self, device: torch.device) -> Self:
        """It on a device, not packed."""
        moved: Sequence[Any] = [x.to(device) if isinstance(x, torch.Tensor) else x for x in self._arguments()]
        return type(self)(*moved)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        packed = 0 if self.packed is None else self.packed.nbytes
        if self._stored is None:
            return packed
        return packed + sum(part.nbytes for part in self._arguments() if isinstance(part, torch.Tensor))

    @classmethod
    @abstractmethod
    def cat(cls, weights: Sequence[Self]) -> Weight:
        """Weights of this class that share their input, none of them packed, joined along ``out``."""

    @abstractmethod
    def shard(self, dim: int, index: int, count: int) -> Self:
        """Part ``index`` of ``count`` equal ones of an unpacked weight: of its outputs (``dim`` 0) or inputs (1).

        Raises ValueError where the parts would not be whole rows, columns, groups or blocks.
        """

    @abstractmethod
    def _plain(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """What the stored numbers of these rows stand for, as any floats."""

    @abstractmethod
    def _arguments(self) -> Sequence[torch.Tensor | torch.dtype | None]:
        """What its class makes it of."""


Packer = Callable[[Weight], Packed | None]  # None: the backend multiplies what is stored


class Dense(Weight):
    """A weight stored as plain numbers of any floating dtype."""

    __slots__ = ()

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data, _matrix(data), data.dtype)

    @classmethod
    def cat(cls, weights: Sequence[Self]) -> Self:
        return cls(torch.cat([weight.stored for weight in weights]))

    def shard(self, dim: int, index: int, count: int) -> Self:
        return type(self)(_part(self.stored, dim, index, count).contiguous())

    def _plain(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return self.stored[rows]

    def _arguments(self) -> Sequence[torch.Tensor | torch.dtype | None]:
        return (self.stored,)


class Grouped(Weight):
    """Integers of ``bits`` bits with a scale, and perhaps a minimum, for each group of neighbouring columns of a row.

    A number is ``scale * integer + minimum``. ``scales`` and ``minimums`` are float32 ``[out, groups]``, every group
    having ``in / groups`` columns; ``minimums`` None: all zero. Columns may be stored in another order than the input's
    (GPTQ's ``desc_act``): column ``i`` multiplies input ``order[i]`` (int64 ``[in]``).
    """

    __slots__ = ("minimums", "order", "scales")

    _freed = ("scales", "minimums")
    bits: ClassVar[int]

    def __init__(
        self,
        stored: torch.Tensor,
        scales: torch.Tensor,
        minimums: torch.Tensor | None,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
    ) -> None:
        n, k = _matrix(stored)
        shape = (n, k * 8 // self.bits)
        groups = scales.shape[-1]
        if scales.shape != (n, groups) or groups == 0 or shape[1] % groups:
            raise ValueError(f"scales {list(scales.shape)} are no groups of a weight {list(shape)}")
        if minimums is not None and minimums.shape != scales.shape:
            raise ValueError(f"minimums are {list(minimums.shape)}, scales {list(scales.shape)}")
        if shape[1] // groups * self.bits % 8:
            raise ValueError(f"groups of {shape[1] // groups} columns are no whole bytes of {self.bits} bits")
        super().__init__(stored, shape, dtype)
        self.scales, self.minimums, self.order = scales, minimums, order

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.scales.shape[1]

    @abstractmethod
    def integers(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """The integers of these rows, int8 ``[rows, in]``."""

    @classmethod
    def cat(cls, weights: Sequence[Self]) -> Weight:
        first = weights[0]
        if any(not _same_order(first.order, weight.order) for weight in weights):
            return Dense(torch.cat([weight.dequantize() for weight in weights]))
        groups = max(weight.scales.shape[1] for weight in weights)
        if any(groups % weight.scales.shape[1] for weight in weights):
            return Dense(torch.cat([weight.dequantize() for weight in weights]))

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(groups // x.shape[1], dim=1)

        minimums = None
        if any(weight.minimums is not None for weight in weights):
            zeros = (weight.minimums if weight.minimums is not None else weight.scales * 0 for weight in weights)
            minimums = torch.cat([spread(each) for each in zeros])
        scales = torch.cat([spread(weight.scales) for weight in weights])
        return cls(torch.cat([weight.stored for weight in weights]), scales, minimums, first.dtype, first.order)

    def shard(self, dim: int, index: int, count: int) -> Self:
        if dim == 1 and self.order is not None:
            raise ValueError("columns in an order of their own cannot be divided")
        scales = self.scales if dim == 1 and self.scales.shape[1] == 1 else _part(self.scales, dim, index, count)
        minimums = self.minimums
        if minimums is not None and scales is not self.scales:
            minimums = _part(minimums, dim, index, count).contiguous()
        stored = _part(self.stored, dim, index, count).contiguous()
        return type(self)(stored, scales.contiguous(), minimums, self.dtype, self.order)

    def _plain(self, rows: slice | torch.Tensor) -> torch.Tensor:
        scales = self.scales[rows]
        numbers = self.integers(rows).unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        if self.minimums is not None:
            numbers += self.minimums[rows][..., None]
        numbers = numbers.flatten(1)
        return numbers if self.order is None else torch.empty_like(numbers).index_copy_(1, self.order, numbers)

    def _arguments(self) -> Sequence[torch.Tensor | torch.dtype | None]:
        return (self.stored, self.scales, self.minimums, self.dtype, self.order)


class Int8(Grouped):
    """8 bits: ``stored`` is int8 ``[out, in]``."""

    __slots__ = ()
    bits = 8

    @classmethod
    def widen(cls, weight: Grouped) -> Int8:
        """The same numbers in 8 bits."""
        return cls(weight.integers(), weight.scales, weight.minimums, weight.dtype, weight.order)

    def integers(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        return self.stored[rows]


class Int4(Grouped):
    """4 bits: ``stored`` is uint8 ``[out, in / 2]``, the low half of a byte being the first of two columns, 0 to 15."""

    __slots__ = ()
    bits = 4

    @classmethod
    def of(
        cls,
        integers: torch.Tensor,
        scales: torch.Tensor,
        minimums: torch.Tensor | None,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
    ) -> Self:
        """From integers 0 to 15 ``[out, in]`` of any dtype."""
        low, high = integers.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
        return cls(low | high << 4, scales, minimums, dtype, order)

    def integers(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        stored = self.stored[rows]
        return torch.stack((stored & 15, stored >> 4), dim=2).flatten(1).to(torch.int8)


class Fp8(Weight):
    """Floats of 8 bits, ``stored`` float8_e4m3fn ``[out, in]``, times float32 ``scales``.

    ``scales`` is ``[out, 1]``, one for each row, or ``[out / 128, in / 128]`` (rounded up), one for each block.
    """

    __slots__ = ("scales",)

    _freed = ("scales",)
    BLOCK: ClassVar[int] = 128

    def __init__(self, stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        n, k = _matrix(stored)
        if scales.shape not in ((n, 1), (-(-n // self.BLOCK), -(-k // self.BLOCK))):
            raise ValueError(f"scales {list(scales.shape)} are neither for rows nor for blocks of a weight {[n, k]}")
        super().__init__(stored, (n, k), dtype)
        self.scales = scales

    @property
    def by_row(self) -> bool:
        """Whether there is a scale for each row rather than for each block."""
        return self.scales.shape == (self.shape[0], 1)

    @classmethod
    def cat(cls, weights: Sequence[Self]) -> Weight:
        if all(weight.by_row for weight in weights) or all(
            not weight.by_row and weight.shape[0] % cls.BLOCK == 0 for weight in weights
        ):
            scales = torch.cat([weight.scales for weight in weights])
            return cls(torch.cat([weight.stored for weight in weights]), scales, weights[0].dtype)
        return Dense(torch.cat([weight.dequantize() for weight in weights]))

    def shard(self, dim: int, index: int, count: int) -> Self:
        if count > 1 and not self.by_row and self.shape[dim] // count % self.BLOCK:
            raise ValueError(f"{self.shape[dim]} / {count} is no whole number of blocks of {self.BLOCK}")
        scales = self.scales if dim == 1 and self.by_row else _part(self.scales, dim, index, count)
        return type(self)(_part(self.stored, dim, index, count).contiguous(), scales.contiguous(), self.dtype)

    def _plain(self, rows: slice | torch.Tensor) -> torch.Tensor:
        stored = self.stored[rows].float()
        if self.by_row:
            return stored * self.scales[rows]
        numbers = torch.arange(self.shape[0], device=stored.device)[rows]
        scales = self.scales[numbers // self.BLOCK].repeat_interleave(self.BLOCK, dim=1)
        return stored * scales[:, : self.shape[1]]

    def _arguments(self) -> Sequence[torch.Tensor | torch.dtype | None]:
        return (self.stored, self.scales, self.dtype)


def cat(weights: Sequence[Weight]) -> Weight:
    """Weights that share their input, of any classes and none of them packed, joined along ``out``.

    What they are is not lost where one class can hold all of them; else the result is Dense.
    """
    classes = {type(weight) for weight in weights}
    if len(weights) == 1:
        return weights[0]
    if len(classes) == 1:
        return weights[0].cat(weights)
    if classes == {Int8, Int4}:
        return Int8.cat([Int8.widen(weight) for weight in weights if isinstance(weight, Grouped)])
    return Dense(torch.cat([weight.dequantize() for weight in weights]))


def _matrix(data: torch.Tensor) -> tuple[int, int]:
    if data.ndim != 2:
        raise ValueError(f"a linear weight is [out, in], not {list(data.shape)}")
    return data.shape[0], data.shape[1]


def _part(x: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    if x.shape[dim] % count:
        raise ValueError(f"{x.shape[dim]} cannot be divided by {count}")
    return x.chunk(count, dim)[index]


def _same_order(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
