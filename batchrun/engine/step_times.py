"""How long a step of some size takes on this processor: measured once for a model, and kept in the cache.

A file is named by what a plan knows as well as an engine, so that both find it. What an engine alone knows, its
operations and its threads, is written in it: an engine for which that is different measures anew.
"""

from __future__ import annotations

import hashlib
import json
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
from batchrun.kernels.machine import cache_dir, describe_cpu
from batchrun.models.config import ModelConfig

Subject = dict[str, Any]
Table = Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)]

_RESULTS_ALONE = {"windows", "rope", "norm_eps"}  # of a configuration: what moves no time that is measured
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def subject(model: ModelSpec, engine: EngineSpec, config: ModelConfig, dtype: str) -> Subject:
    """What times are of, as plain JSON data: processor, shape of the model, numbers, and who sets the threads."""
    return {
        "processor": describe_cpu(),
        "processors": os.cpu_count(),
        "threads": engine.num_threads,
        "environment": {name: os.environ.get(name) for name in _THREAD_VARIABLES},
        "shape": {name: value for name, value in asdict(config).items() if name not in _RESULTS_ALONE},
        "dtype": dtype,
        "model": model.model_dump(mode="json", include={"reproducible", "quantization"}),
    }


class StepTimes(BaseModel):
    """Seconds of one step by its size, attention to earlier tokens left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    subject: Subject
    operations: str  # that were measured, with their versions
    threads: PositiveInt
    layers: Table  # tokens of a step -> seconds of all layers
    head: Table  # rows of logits -> seconds of the output projection

    def seconds(self, tokens: float, sampled: float) -> float:
        """Of a step that computes ``tokens`` and samples ``sampled`` of them.

        Between measured sizes time is linear, and above the largest it is proportional to the size.
        """
        return _at(self.layers, tokens) + _at(self.head, sampled)

    def save(self) -> None:
        """Keep it for the next engine and plan; where the cache cannot be written there will be none."""
        with suppress(OSError, RuntimeError):  # RuntimeError: no home
            path = _path(self.subject)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                written = Path(scratch) / path.name
                written.write_text(self.model_dump_json(indent=1), encoding="utf-8")
                written.replace(path)


def load(wanted: Subject) -> StepTimes | None:
    """The times of ``wanted`` that the cache holds; None where it has none, or a file that is not one."""
    try:
        found = StepTimes.model_validate_json(_path(wanted).read_bytes())
    except (OSError, RuntimeError, ValueError):
        return None
    return found if found.subject == wanted else None


def _path(of: Subject) -> Path:
    text = json.dumps(of, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Path(cache_dir(), "calibration", f"{digest}.json")


def _at(table: Mapping[int, float], size: float) -> float:
    """A table's seconds at ``size``; none at 0, and below the smallest size those of the smallest."""
    if size <= 0:
        return 0.0
    sizes = sorted(table)
    largest = sizes[-1]
    return float(np.interp(size, sizes, [table[s] for s in sizes])) * max(1.0, size / largest)
