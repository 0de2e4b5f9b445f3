"""Names what decides the last bits of a result, for reproducible jobs to be resumed only where they stay the same."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from types import ModuleType


def numerics(device: str, dtype: str, head_dim: int, *, reproducible: bool) -> str:
    """A short description of device, libraries and kernels; ``any`` where a job does not ask for the same bits."""
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
    if device == "cuda":
        kernels = f" {_triton_kernels()}" if "triton" in name else ""
        return f"{name}{kernels} on {torch.cuda.get_device_name()}, torch {torch.__version__}"
    kernels = f" {cpu.version()}" if "native" in name or "onednn" in name else ""
    capability = torch.backends.cpu.get_cpu_capability()
    products = "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    return f"{name}{kernels} on {device} {capability}, oneDNN's bfloat16 {products}, torch {torch.__version__}"


def _triton_kernels() -> str:
    """A hash of the GPU kernels' source, and what compiles it."""
    from batchrun.kernels import gpu

    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(gpu.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()}, Triton {metadata.version('triton')}"
