"""The classes a linear layer's weight can be. Loaders turn every checkpoint format into one of them.

All have the same few methods, so that a model file never knows which it holds: it embeds with ``rows`` and hands the
object to ``ops.linear``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

LARGEST_INT8 = 127  # the scale is symmetric: -128 is not used
_LEAST_MAGNITUDE = 1e-30  # a row without a larger one is rounded as if it had it: no scale is zero


class Packed(Protocol):
    """A weight in the layout that some backend's ``linear`` multiplies."""

    def to_dense(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]``."""


class Weight(ABC):
    """A weight ``[out, in]`` on the device where it is used; ``dtype`` is that of the activations it multiplies."""

    __slots__ = ("_stored", "dtype", "packed", "shape")

    def __init__(self, stored: torch.Tensor, dtype: torch.dtype) -> None:
        if stored.ndim != 2:
            raise ValueError(f"a linear weight is [out, in], not {list(stored.shape)}")
        self._stored: torch.Tensor | None = stored
        self.shape = (stored.shape[0], stored.shape[1])
        self.dtype = dtype
        self.packed: Packed | None = None  # the same numbers as the backend wants them, once `pack` made it

    def pack(self, pack: Packer, *, keep_rows: bool = False) -> None:
        """Lay the weight out for a backend; without ``keep_rows`` the stored form is freed if that made another."""
        self.packed = pack(self)
        if self.packed is not None and not keep_rows:
            self._stored = None

    def dequantize(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]`` of ``dtype``; may be its own storage: not to be written to."""
        if self._stored is not None:
            return self._plain(self._stored)
        assert self.packed is not None
        return self.packed.to_dense().to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (integers ``[...]``) as ``[..., in]``: the embedding lookup."""
        return torch.nn.functional.embedding(ids, self.dequantize())

    @abstractmethod
    def _plain(self, stored: torch.Tensor) -> torch.Tensor:
        """What the stored numbers stand for, in ``dtype``."""


Packer = Callable[[Weight], Packed | None]  # None: the backend multiplies what is stored


class Dense(Weight):
    """A weight stored as plain numbers of any floating dtype."""

    __slots__ = ()

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data, data.dtype)

    def _plain(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


class Int8(Weight):
    """A weight stored as integers ``values`` from -127 to 127 times ``scales`` float32 ``[out]``."""

    __slots__ = ("scales",)

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(values, dtype)
        self.scales = scales

    @classmethod
    def quantize(cls, data: torch.Tensor) -> Int8:
        """The nearest to plain numbers ``[out, in]``."""
        values, scales = round_rows(data, LARGEST_INT8)
        return cls(values.to(torch.int8), scales, data.dtype)

    @property
    def values(self) -> torch.Tensor:
        """int8 ``[out, in]``, as long as they are stored."""
        assert self._stored is not None
        return self._stored

    def _plain(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored * self.scales[:, None]).to(self.dtype)


QUANTIZERS: Mapping[str, Callable[[torch.Tensor], Weight]] = {"none": Dense, "int8": Int8.quantize}


def round_rows(x: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[N, K]`` of floats as integers times scales ``[N]``, all float32; a row's largest becomes ``largest``.

    A row with anything that is not finite becomes zeros times infinity or NaN, so that what is made of it is NaN.
    """
    wide = x.float()
    scales = wide.abs().amax(dim=1).clamp(min=_LEAST_MAGNITUDE) / largest
    integers = (wide * scales.reciprocal()[:, None]).round().nan_to_num()
    return integers, scales
