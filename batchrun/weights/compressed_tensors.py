"""Checkpoints of the ``compressed-tensors`` package: packed integers, integers of 8 bits, and FP8.

With K inputs, N outputs, G groups (one, if each row has a scale) and offsets 2^(bits - 1):

- ``pack-quantized``: ``weight_packed`` int32 [N, K * bits / 32], integers plus offset, lowest bits first;
  ``weight_shape`` [2]; ``weight_scale`` [N, G]; ``weight_zero_point`` int32 [N * bits / 32, G], packed along N, or int8
  as the scale, absent if all are zero; ``weight_g_idx`` [K], the group of each input, absent or -1 if in order.
- ``int-quantized``: ``weight`` int8 [N, K], ``weight_scale`` and ``weight_zero_point`` (int8) [N, G].
- ``float-quantized``: as `batchrun.weights.fp8` has it.

A scale may be one for the whole. What a module stores tells how it is quantized: ``targets`` and ``ignore`` are not
read.
Format: https://github.com/vllm-project/compressed-tensors (``compressors``)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchrun.weights.formats import Int8, Weight
from batchrun.weights.fp8 import weight_of_floats
from batchrun.weights.stored import FLOATS, MadeTensor, Module, SafeTensor, StoredTensor, assemble
from batchrun.weights.unsigned import are_groups, bytes_along_rows, order_of, unpack, unsigned


def tensors(stored: Mapping[str, SafeTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names that models know; ``settings``: see `quantization_config`."""
    return assemble(
        stored,
        {
            ("weight_packed", "I32"): _packed_integers,
            ("weight", "I8"): _integers,
            ("weight", "F8_E4M3"): weight_of_floats,
        },
    )


def _packed_integers(module: Module) -> MadeTensor:
    packed, n, words = module.take_matrix("weight_packed", "I32")
    rows, k = module.take("weight_shape", ("I64", "I32"), (2,)).read().tolist()
    bits = next((bits for bits in (4, 8) if -(-k * bits // 32) == words), None)
    if bits is None or rows != n:
        packed.refuse(f"is {list(packed.shape)}, which is no matrix {[rows, k]} of 4 or 8 bits")
    scales, groups = _scales(module, n, k, bits)
    stored_zeros = module.find("weight_zero_point", ("I32", "I8"))
    if stored_zeros is not None:
        stored_zeros.expect(scales.shape if stored_zeros.encoding == "I8" else (-(-n * bits // 32), groups))
    group_of = module.find("weight_g_idx", ("I32", "I64"), (k,))

    def make(dtype: torch.dtype) -> Weight:
        zeros, order = None, None
        if stored_zeros is not None and stored_zeros.encoding == "I8":
            zeros = _spread(stored_zeros, n) + (1 << (bits - 1))
        elif stored_zeros is not None:
            zeros = unpack(bytes_along_rows(stored_zeros.read()), bits)[:, :n].T
        if group_of is not None and bool((columns := group_of.read()).ge(0).all()):
            order = order_of(columns, groups)
        stored = packed.read().view(torch.uint8)[:, : k * bits // 8].contiguous()
        return unsigned(stored, bits, _spread(scales, n), zeros, dtype, order)

    return module.made((n, k), make)


def _integers(module: Module) -> MadeTensor:
    integers, n, k = module.take_matrix("weight", "I8")
    stored_scales, _ = _scales(module, n, k, bits=8)
    stored_zeros = module.find("weight_zero_point", ("I8",), stored_scales.shape)

    def make(dtype: torch.dtype) -> Weight:
        scales = _spread(stored_scales, n)
        zeros = None if stored_zeros is None else _spread(stored_zeros, n)
        minimums = -scales * zeros if zeros is not None and zeros.any() else None
        return Int8(integers.read(), scales, minimums, dtype)

    return module.made((n, k), make)


def _scales(module: Module, n: int, k: int, bits: int) -> tuple[SafeTensor, int]:
    """The scales of a weight [n, k] of ``bits`` bits, and how many groups of columns they are for."""
    scales = module.take("weight_scale", FLOATS)
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if scales.shape not in ((), (1,), (1, 1), (n,), (n, groups)) or groups == 0 or not are_groups(k, groups, bits):
        shown = f"a weight {[n, k]} of {bits} bits"
        scales.refuse(f"is {list(scales.shape)}, which does not divide {shown} into groups of whole bytes")
    return scales, groups


def _spread(scales: SafeTensor, n: int) -> torch.Tensor:
    """The scales, or their zero points, of each row, float32 ``[n, groups]``."""
    values = scales.read().float()
    return values.view(-1, values.shape[1] if values.ndim == 2 else 1).expand(n, -1).contiguous()
