"""AWQ checkpoints, 4 bits with zero points, in the layout called ``gemm``.

With K inputs, N outputs and G groups a layer is ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8] and
``scales`` [G, N]. Integers and zero points are packed along N, eight columns in a word, in the order `_COLUMNS`.
Format: https://github.com/casper-hansen/AutoAWQ (``awq/modules/linear/gemm.py``)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from batchrun.weights.formats import Int4, Weight
from batchrun.weights.stored import FLOATS, MadeTensor, Module, SafeTensor, StoredTensor, assemble
from batchrun.weights.unsigned import unpack, whole_groups

_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the lowest four bits, of the next four, ...


def tensors(stored: Mapping[str, SafeTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names that models know; ``settings``: see `quantization_config`."""
    read = partial(_weight, group_size=settings["group_size"])
    return assemble(stored, {("qweight", "I32"): read})


def _weight(module: Module, *, group_size: int) -> MadeTensor:
    integers, k, words = module.take_matrix("qweight", "I32")
    n = words * 8
    groups = whole_groups(integers, k, group_size, bits=4)
    scales = module.take("scales", FLOATS, (groups, n))
    zeros = module.take("qzeros", ("I32",), (groups, words))

    def make(dtype: torch.dtype) -> Weight:
        scale = scales.read().T.float().contiguous()
        return Int4.of(_columns(integers.read()), scale, -scale * _columns(zeros.read()), dtype)

    return module.made((n, k), make)


def _columns(words: torch.Tensor) -> torch.Tensor:
    """Words ``[rows, N / 8]`` as the integers of each column, uint8 ``[N, rows]``."""
    integers = unpack(words.view(torch.uint8), 4).unflatten(1, (-1, 8))
    order = torch.tensor(_COLUMNS).argsort()
    return torch.flatten(integers[:, :, order], 1).T.contiguous()
