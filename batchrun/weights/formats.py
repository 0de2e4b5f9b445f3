"""The classes a linear layer's weight can be. Loaders turn every checkpoint format into one of them.

:class:`Dense` is the first. Each later one (``Int8``, ``Int4``, ``Fp8``) has the same few methods, so that a model
file never knows which it holds: it embeds with ``rows`` and hands the object to ``ops.linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Packed(Protocol):
    """A weight in the layout that some backend's ``linear`` multiplies."""

    def to_dense(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]``."""


Packer = Callable[[torch.Tensor], Packed | None]  # None: the backend multiplies plain numbers


class Dense:
    """A weight ``[out, in]`` stored as plain numbers of any floating dtype, on the device where it is used."""

    __slots__ = ("_data", "dtype", "packed", "shape")

    def __init__(self, data: torch.Tensor) -> None:
        if data.ndim != 2:
            raise ValueError(f"a linear weight is [out, in], not {list(data.shape)}")
        self._data: torch.Tensor | None = data
        self.shape = (data.shape[0], data.shape[1])
        self.dtype = data.dtype  # of the activations that are multiplied by it
        self.packed: Packed | None = None  # the same numbers as the backend wants them, once `pack` made it

    def pack(self, pack: Packer, *, keep_rows: bool = False) -> None:
        """Lay the weight out for a backend; without ``keep_rows`` the plain form is freed if that made another."""
        self.packed = pack(self.dequantize())
        if self.packed is not None and not keep_rows:
            self._data = None

    def dequantize(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]``; its own storage where there is one: not to be written to."""
        if self._data is not None:
            return self._data
        assert self.packed is not None
        return self.packed.to_dense().to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (integers ``[...]``) as ``[..., in]``: the embedding lookup."""
        return torch.nn.functional.embedding(ids, self.dequantize())
