"""GPTQ checkpoints, of 4 and 8 bits.

With K inputs, N outputs and G groups a layer is ``qweight`` int32 [K * bits / 32, N], packed along K, lowest bits
first; ``scales`` [G, N]; ``qzeros`` int32 [G, N * bits / 32], packed along N; and, if made with ``desc_act``, ``g_idx``
int32 [K], the group of each input. The first version of the format stores zero points less one: that is subtracted from
each of a word, with borrows.
Symmetric checkpoints have their zero in the middle, whatever version they say they are: as either stores it, if at all.
Format: https://github.com/ModelCloud/GPTQModel (``gptqmodel/nn_modules/qlinear``)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from batchrun.weights.formats import Weight
from batchrun.weights.stored import FLOATS, MadeTensor, Module, SafeTensor, StoredTensor, assemble
from batchrun.weights.unsigned import bytes_along_rows, order_of, unpack, unsigned, whole_groups


def tensors(stored: Mapping[str, SafeTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names that models know; ``settings``: see `quantization_config`."""
    second = "gptq_v2" in (settings["checkpoint_format"], settings["format"])
    read = partial(
        _weight,
        bits=settings["bits"],
        group_size=settings["group_size"],
        symmetric=settings["sym"],
        less_one=not second,
    )
    return assemble(stored, {("qweight", "I32"): read})


def _weight(module: Module, *, bits: int, group_size: int, symmetric: bool, less_one: bool) -> MadeTensor:
    integers, words, n = module.take_matrix("qweight", "I32")
    k = words * 32 // bits
    groups = whole_groups(integers, k, group_size, bits)
    scales = module.take("scales", FLOATS, (groups, n))
    shape = (groups, -(-n * bits // 32))
    zeros = module.find("qzeros", ("I32",), shape) if symmetric else module.take("qzeros", ("I32",), shape)
    group_of = module.find("g_idx", ("I32", "I64"), (k,))

    def make(dtype: torch.dtype) -> Weight:
        order = None if group_of is None else order_of(group_of.read(), groups)
        offsets = None
        if zeros is not None and symmetric:
            _check_middle(zeros, bits, n)
        elif zeros is not None:
            ones = 0x11111111 if bits == 4 else 0x01010101
            packed = zeros.read() + (ones if less_one else 0)
            offsets = unpack(packed.view(torch.uint8), bits)[:, :n].T
        return unsigned(bytes_along_rows(integers.read()), bits, scales.read().T, offsets, dtype, order)

    return module.made((n, k), make)


def _check_middle(zeros: SafeTensor, bits: int, n: int) -> None:
    """Raises :class:`JobError` if these are not the zero points of symmetric weights, in either version."""
    stored, middle = unpack(zeros.read().view(torch.uint8), bits)[:, :n], 1 << (bits - 1)
    if not ((stored == middle - 1).all() or (stored == middle).all()):
        zeros.refuse("holds zero points that are not symmetric, although sym in quantization_config says so")
