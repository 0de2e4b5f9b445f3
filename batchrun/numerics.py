"""Names what decides the last bits of a result, for reproducible jobs to be resumed only where they stay the same."""

from __future__ import annotations

from types import ModuleType


def numerics(device: str, dtype: str, head_dim: int, *, reproducible: bool) -> str:
    """A short description of device, libraries and kernels; ``any`` where a job does not ask for the same bits.

    Raises JobError where the reproducible mode is not to be had.
    """
    if not reproducible:
        return "any"
    import torch

    from batchrun.ops import backend

    return describe_operations(
        backend(torch.device(device), getattr(torch, dtype), head_dim, reproducible=True), device
    )


def describe_operations(ops: ModuleType, device: str) -> str:
    """A module of `batchrun.ops` with what its results, and their cost, depend on beside the processor's model."""
    import torch

    from batchrun.kernels import cpu

    name = ops.__name__.rpartition(".")[2]
    kernels = f" {cpu.version()}" if "native" in name or "onednn" in name else ""
    capability = torch.backends.cpu.get_cpu_capability()
    products = "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    return f"{name}{kernels} on {device} {capability}, oneDNN's bfloat16 {products}, torch {torch.__version__}"
