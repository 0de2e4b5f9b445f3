"""Names what decides the last bits of a result, for reproducible jobs to be resumed only where they stay the same."""

from __future__ import annotations


def numerics(device: str, dtype: str, *, reproducible: bool) -> str:
    """A short description of device, libraries and kernels; ``any`` where a job does not ask for the same bits."""
    if not reproducible:
        return "any"
    import torch

    from batchrun.ops import backend

    ops = backend(torch.device(device), getattr(torch, dtype), reproducible=True)
    where = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"{ops.__name__.rpartition('.')[2]} on {device} {where}, torch {torch.__version__}"
