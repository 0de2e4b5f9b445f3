"""Joins what multiplies each class of weight into one ``pack`` and one ``linear`` of a backend.

What multiplies a class is a module with these two functions, for that class alone:

======================  ===================================================================
`dense_torch`           torch's products, on a CPU of weights in oneDNN's layout
`dense_fixed`           the same, each row's bits its own
`dense_native`          native CPU kernels, each row's bits its own
`grouped_native`        native CPU kernels for integers, each row's bits its own
`grouped_triton`        Triton kernels for integers, on a GPU
`grouped_triton_fixed`  the same, each row's bits its own
`fp8_triton`            Triton kernels for floats of 8 bits, on a GPU, and torch's products
`fp8_triton_fixed`      Triton kernels alone, each row's bits its own
======================  ===================================================================

A class for which a backend has no module of its own is multiplied as plain numbers of its ``dtype``: made once where
plain weights are laid out for the backend, else for each product.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from batchrun.weights.formats import Fp8, Int4, Int8, Packed, Packer, Weight


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


def by_weight(
    *, dense: ModuleType, grouped: ModuleType | None = None, fp8: ModuleType | None = None
) -> tuple[Packer, Linear]:
    """``pack`` and ``linear``, each by the module for the weight's class; ``grouped``: for Int8 and Int4."""
    of_classes: dict[type[Weight], ModuleType | None] = {Int8: grouped, Int4: grouped, Fp8: fp8}
    modules = {kind: module for kind, module in of_classes.items() if module is not None}

    def pack(weight: Weight) -> Packed | None:
        packed: Packed | None = modules.get(type(weight), dense).pack(weight)
        return packed

    def linear(
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        product: Tensor = modules.get(type(weight), dense).linear(x, weight, bias, dtype or x.dtype, out)
        return product

    return pack, linear
