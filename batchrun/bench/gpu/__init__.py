"""Checks and measures the GPU kernels and the engine on the GPU at hand, in a few minutes. No torch in this module.

Every part runs in a process of its own, the worker, so that a kernel that hangs or ruins the device costs one line.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

from batchrun.bench.gpu.budget import PARTS, Budget
from batchrun.bench.gpu.results import Results
from batchrun.bench.gpu.supervisor import supervise, worker_command
from batchrun.engine.memory import resolve_device
from batchrun.errors import JobError


def run_gpu_bench(
    *,
    json_path: Path | None,
    markdown_path: Path | None,
    seconds: float,
    only: str | None,
    seed: int | None,
    echo: Callable[[str], None],
) -> Results:
    """Run the parts, or ``only`` one, within ``seconds``; every result goes to ``echo`` and to the files at once.

    Raises JobError where there is no GPU, or a file cannot be written.
    """
    try:
        resolve_device("cuda")
    except JobError as error:
        raise JobError(f"bench gpu measures a GPU, and there is none to use ({error})") from None
    results = Results(json_path, markdown_path, echo)
    seed = secrets.randbits(31) if seed is None else seed
    parts = [only] if only is not None else list(PARTS)
    supervise(parts, Budget(seconds, parts), results, partial(worker_command, seed))
    results.finish()
    return results
