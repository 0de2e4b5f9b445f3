"""How long a step of some size takes on this processor: measured for a model, and kept in the cache.

A file's name begins with what a plan knows as well as an engine, its subject, so that both find it; it ends with what
an engine alone knows, its operations and its threads, so that engines for which these are different keep a file each.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from batchrun.job import EngineSpec, ModelSpec
from batchrun.kernels.machine import cache_dir, describe_cpu, slurm_processors
from batchrun.models.config import ModelConfig

Subject = dict[str, Any]
Table = Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)]

_RESULTS_ALONE = {"windows", "rope", "norm_eps"}  # of a configuration: what moves no time that is measured
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PROCESSOR_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def subject(model: ModelSpec, engine: EngineSpec, config: ModelConfig, dtype: str, encodings: str = "") -> Subject:
    """What times are of, as plain JSON data: processor, shape of the model, numbers, and who sets the threads.

    ``encodings``: those of a quantized checkpoint (`ModelFiles.encodings`).
    """
    return {
        "processor": describe_cpu(),
        "processors": _usable_processors(),
        "threads": engine.num_threads,
        "environment": {name: os.environ.get(name) for name in _THREAD_VARIABLES},
        "shape": {name: value for name, value in asdict(config).items() if name not in _RESULTS_ALONE},
        "dtype": dtype,
        "encodings": encodings if model.quantization == "none" else "",
        "model": model.model_dump(mode="json", include={"reproducible", "quantization", "kv_cache_dtype"}),
    }


def _usable_processors() -> float:
    """Processors that this process may run on; the share of Slurm's task or of its container's time, if fewer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = min(allowed, slurm_processors() or allowed)
    try:
        quota, period = _PROCESSOR_QUOTA.read_text(encoding="ascii").split()
        return min(allowed, int(quota) / int(period))
    except (OSError, ValueError):  # there is none; ``max`` is no number
        return allowed


class StepTimes(BaseModel):
    """Seconds of one step by its size, attention to earlier tokens left out, and the rate at which memory is moved."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    subject: Subject
    operations: str  # that were measured, with their versions
    threads: PositiveInt
    measured_at: float  # seconds since 1970
    vocab_size: PositiveInt  # logits in a row
    layers: Table  # tokens of a step -> seconds of all layers
    head: Table  # rows of logits -> seconds of the output projection
    memory_rate: PositiveFloat  # bytes per second

    def seconds(self, tokens: float, sampled: float) -> float:
        """Of a step that computes ``tokens`` and samples ``sampled`` of them.

        Between measured sizes time is linear, and above the largest it is proportional to the size.
        """
        return _at(self.layers, tokens) + _at(self.head, sampled)

    def merged(self, other: StepTimes) -> StepTimes:
        """This measurement with whatever ``other`` found faster: those who share the processor only ever take time."""
        return self.model_copy(
            update={
                "layers": _least(self.layers, other.layers),
                "head": _least(self.head, other.head),
                "memory_rate": max(self.memory_rate, other.memory_rate),
            }
        )

    def save(self) -> None:
        """Keep it for the next engine and plan; where the cache cannot be written there will be none."""
        with suppress(OSError, RuntimeError):  # RuntimeError: no home
            folder = _folder()
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{_digest(self.subject)}-{_digest([self.operations, self.threads])}.json"
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                written = Path(scratch, name)
                written.write_text(self.model_dump_json(indent=1), encoding="utf-8")
                written.replace(folder / name)


def find(wanted: Subject) -> list[StepTimes]:
    """The times of ``wanted`` that the cache holds, the latest first; a file that holds something else is passed over.

    There is one measurement for each set of operations and number of threads that an engine had.
    """
    found = []
    with suppress(OSError, RuntimeError):
        for path in _folder().glob(f"{_digest(wanted)}-*.json"):
            with suppress(OSError, ValueError):
                found.append(StepTimes.model_validate_json(path.read_bytes()))
    of_subject = [times for times in found if times.subject == wanted]
    return sorted(of_subject, key=lambda times: times.measured_at, reverse=True)


def _folder() -> Path:
    return Path(cache_dir(), "calibration")


def _digest(of: Any) -> str:
    text = json.dumps(of, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _at(table: Mapping[int, float], size: float) -> float:
    """A table's seconds at ``size``; none at 0, and below the smallest size those of the smallest."""
    if size <= 0:
        return 0.0
    sizes = sorted(table)
    largest = sizes[-1]
    return float(np.interp(size, sizes, [table[s] for s in sizes])) * max(1.0, size / largest)


def _least(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The lesser of two tables' seconds at each size that either has."""
    return {size: min(one.get(size, math.inf), other.get(size, math.inf)) for size in sorted({*one, *other})}
