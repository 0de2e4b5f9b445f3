"""Runs a part's units in a process of its own: ``python -m batchrun.bench.gpu.worker PART FIRST SECONDS SEED``.

What it says is for the `supervisor`; whatever libraries print goes to standard error.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import import_module, metadata
from typing import Any

from batchrun import __version__
from batchrun.bench.gpu.budget import FAILED, Line, Unit, turns

_LEAST_PATIENCE = 1.0
_LONGEST_WHY = 400  # characters

Say = Callable[[dict[str, Any]], None]


def run_units(units: Sequence[Unit], first: int, seconds: float, say: Say, alive: Callable[[], None]) -> None:
    """Run the units from ``first`` on, as far as ``seconds`` go, and say their results.

    A unit that fails is a result; ``alive`` is called after it, and raises where the device is of no use any more.
    """
    say({"units": [unit.name for unit in units]})
    left_out = []
    for index, (unit, share) in enumerate(turns(units[first:], seconds), first):
        if share is None:
            left_out.append(unit.name)
            continue
        say({"unit": index, "patience": max(share, _LEAST_PATIENCE) + unit.longest})
        try:
            for line in unit.run(share):
                say({"line": _as_dict(line)})
        except Exception as error:
            say({"line": _failure(unit.name, error)})
            alive()
    if left_out:
        say({"line": _as_dict(Line(", ".join(left_out), "left out", {"why": "no time"}))})
    say({"done": None})


def environment(seed: int) -> dict[str, Any]:
    """The card and what runs on it."""
    import torch

    return {
        "card": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "batchrun": __version__,
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "seed": seed,
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.split()[0]


def _failure(name: str, error: Exception) -> dict[str, Any]:
    return _as_dict(Line(name, FAILED, {"why": f"{type(error).__name__}: {error}"[:_LONGEST_WHY]}))


def _as_dict(line: Line) -> dict[str, Any]:
    return {"name": line.name, "status": line.status, "figures": {k: _plain(v) for k, v in line.figures.items()}}


def _plain(value: Any) -> Any:
    """``value`` as JSON holds it, which knows no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main(part: str, first: int, seconds: float, seed: int) -> None:
    started = time.monotonic()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    import torch

    try:
        say({"environment": environment(seed)})
        units = import_module(f"batchrun.bench.gpu.{part}").units(torch.device("cuda"), seed)
    except Exception as error:
        say({"line": _failure("worker", error)})
        say({"done": None})
        return
    run_units(units, first, seconds - (time.monotonic() - started), say, torch.cuda.synchronize)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
