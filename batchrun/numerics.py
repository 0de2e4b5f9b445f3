"""Names what decides the last bits of a result, for reproducible jobs to be resumed only where they stay the same."""

from __future__ import annotations


def numerics(device: str, dtype: str, head_dim: int, *, reproducible: bool) -> str:
    """A short description of device, libraries and kernels; ``any`` where a job does not ask for the same bits.

    Raises JobError where the reproducible mode is not to be had.
    """
    if not reproducible:
        return "any"
    import torch

    from batchrun.kernels import cpu
    from batchrun.ops import backend

    chosen = backend(torch.device(device), getattr(torch, dtype), head_dim, reproducible=True)
    ops = chosen.__name__.rpartition(".")[2]
    kernels = f" {cpu.version()}" if "native" in ops or "onednn" in ops else ""
    capability = torch.backends.cpu.get_cpu_capability()
    products = "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    return f"{ops}{kernels} on {device} {capability}, bfloat16 products {products}, torch {torch.__version__}"
