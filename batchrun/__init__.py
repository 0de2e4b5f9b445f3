"""batchrun: offline batch inference for large language models. Rows in, committed results out.

The public names load on first use, so that ``import batchrun`` and the command line never wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun.engine.engine import Engine
    from batchrun.errors import BatchrunError
    from batchrun.job import JobSpec, load_job
    from batchrun.runner import run_job
    from batchrun.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["BatchrunError", "Engine", "JobSpec", "SamplingParams", "load_job", "run_job"]

_HOMES = {
    "BatchrunError": "batchrun.errors",
    "Engine": "batchrun.engine.engine",
    "JobSpec": "batchrun.job",
    "SamplingParams": "batchrun.sampling",
    "load_job": "batchrun.job",
    "run_job": "batchrun.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
