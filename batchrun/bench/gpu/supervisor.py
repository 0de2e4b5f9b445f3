"""Runs workers one after the other, takes in what they say, and goes on after one that died or hangs.

A worker says, as lines of JSON: ``{"environment": {...}}``; ``{"units": [names]}``, all of its part's; and, for each
unit from the one it is told to begin with, ``{"unit": index, "patience": seconds}`` and then ``{"line": {...}}`` for
each result; at the end ``{"done": null}``.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from batchrun.bench.gpu.budget import FAILED, Budget, Line
from batchrun.bench.gpu.results import Results

_START_SECONDS = 60.0  # in which a worker has to say something

Command = Callable[[str, int, float], Sequence[str]]  # of a part, its first unit and the seconds it has


def worker_command(seed: int, part: str, first: int, seconds: float) -> list[str]:
    """The command line of a worker."""
    return [sys.executable, "-m", "batchrun.bench.gpu.worker", part, str(first), str(seconds), str(seed)]


def supervise(parts: Sequence[str], budget: Budget, results: Results, command: Command) -> None:
    """Run ``parts`` in order, each by as many workers as it takes."""
    for part in parts:
        first: int | None = 0
        while first is not None:
            if budget.left(part) <= 0:
                what = f"unit {first + 1} and all after it" if first else "all of it"
                results.add(part, Line(what, "left out", {"why": "no time"}))
                break
            first = _Attempt(part, first, budget, results).run(command)


class _Attempt:
    """One worker's run of a part, from unit ``first`` on."""

    def __init__(self, part: str, first: int, budget: Budget, results: Results) -> None:
        self._part, self._first, self._budget, self._results = part, first, budget, results
        self._unit: int | None = None  # in work
        self._names: list[str] = []
        self._patience = _START_SECONDS

    def run(self, command: Command) -> int | None:
        """Until the worker ends; returns the unit to go on with, None where there is none."""
        with _worker(command(self._part, self._first, self._budget.left(self._part))) as messages:
            while True:
                try:
                    message = messages.get(timeout=max(0.0, min(self._patience, self._budget.patience(self._part))))
                except queue.Empty:
                    return self._lost("took too long and was stopped")
                if isinstance(message, int):
                    return self._lost(f"its process ended with exit code {message}")
                if "done" in message:
                    return None
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "environment" in message:
            self._results.describe_environment(message["environment"])
        elif "units" in message:
            self._names = message["units"]
        elif "unit" in message:
            self._unit, self._patience = message["unit"], message["patience"]
        else:
            self._results.add(self._part, Line(**message["line"]))

    def _lost(self, why: str) -> int | None:
        if self._unit is None:
            self._results.add(self._part, Line("worker", FAILED, {"why": why}))
            return None
        self._results.add(self._part, Line(self._names[self._unit], FAILED, {"why": why}))
        following = self._unit + 1
        return following if following < len(self._names) else None


@contextmanager
def _worker(command: Sequence[str]) -> Iterator[queue.Queue[Any]]:
    """What a new process says, object by object, and at last its exit code. It does not outlive the context."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    messages: queue.Queue[Any] = queue.Queue()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            messages.put(json.loads(line))
        messages.put(process.wait())

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield messages
    finally:
        process.kill()
        process.wait()
