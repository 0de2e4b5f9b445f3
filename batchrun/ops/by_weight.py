"""Joins what multiplies each class of weight into one ``pack`` and one ``linear`` of a backend.

What multiplies a class is a module with these two functions, for that class alone:

==============  ===================================================================
`dense_torch`   torch's products, on a CPU of weights in oneDNN's layout
`dense_fixed`   the same, each row's bits its own
`dense_native`  native CPU kernels, each row's bits its own
`int8_torch`    plain torch on any device, each row's bits its own: the reference
`int8_native`   native CPU kernels, each row's bits its own
==============  ===================================================================
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from batchrun.weights.formats import Dense, Int8, Packed, Packer, Weight


class Linear(Protocol):
    """The product of a backend."""

    def __call__(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N].

        Returns [T, N] of ``dtype`` (x's), or ``out``, which is like that, with the product written there.
        """


def by_weight(*, dense: ModuleType, int8: ModuleType) -> tuple[Packer, Linear]:
    """``pack`` and ``linear``, each by the module for the weight's class."""
    modules = {Dense: dense, Int8: int8}

    def pack(weight: Weight) -> Packed | None:
        packed: Packed | None = modules[type(weight)].pack(weight)
        return packed

    def linear(
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        product: Tensor = modules[type(weight)].linear(x, weight, bias, dtype or x.dtype, out)
        return product

    return pack, linear
