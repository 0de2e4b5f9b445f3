"""Picks the module of operations. A backend is a module that exports the same few functions.

==================  ======================================================================================
`torch_ops`         plain torch on any device: the reference
`fixed_ops`         plain torch, each row's bits its own
`native_ops`        native CPU kernels, each row's bits its own
`onednn_ops`        native CPU kernels beside oneDNN's matrix products, for processors that multiply in tiles
`fixed_onednn_ops`  the same, each row's bits its own
`triton_ops`        Triton kernels, on a GPU
`fixed_triton_ops`  the same, each row's bits its own
==================  ======================================================================================
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import torch

from batchrun.kernels import cpu
from batchrun.kernels.machine import describe_cpu


def backend(device: torch.device, dtype: torch.dtype, head_dim: int, *, reproducible: bool) -> ModuleType:
    """The fastest operations for a model on ``device``; ``reproducible``: where each row's bits are its own."""
    from batchrun.ops import fixed_onednn_ops, fixed_ops, native_ops, onednn_ops, torch_ops

    if device.type == "cuda" and find_spec("triton"):
        from batchrun.ops import fixed_triton_ops, triton_ops

        return fixed_triton_ops if reproducible else triton_ops
    if device.type == "cpu" and cpu.takes(dtype, head_dim) and cpu.available():
        if dtype == torch.bfloat16 and "amx_bf16" in describe_cpu():  # tiles, which the kernels do not use
            return fixed_onednn_ops if reproducible else onednn_ops
        return native_ops
    return fixed_ops if reproducible else torch_ops
