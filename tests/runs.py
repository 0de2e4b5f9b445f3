"""Runs of a job in processes of their own, with a log of what their engines do that outlives them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from batchrun import Engine
from batchrun.cli import main
from batchrun.data.sink import Output
from tests.processes import PROCESSES, wait_until_ended


def _submit(job: str, log: str, options: tuple[str, ...]) -> None:
    """`batchrun submit`, logging steps and writes; in a process of its own."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(what: str, tokens: int = 0) -> None:
        os.write(file, f"{what} {time.monotonic()} {tokens}\n".encode())

    def logged_step(self: Engine) -> Any:
        finished = step(self)
        note("step", self.stats().output_tokens)
        return finished

    def logged_write(write: Any) -> Any:
        def logged(*args: Any) -> None:
            note("write")
            write(*args)
            note("written")

        return logged

    step = Engine.step
    Engine.step = logged_step  # type: ignore[method-assign]
    for method in ("checkpoint", "commit_split"):
        setattr(Output, method, logged_write(getattr(Output, method)))
    note("begin")
    main(["submit", job, *options])


class Run:
    """A job in a process of its own, and the log of its steps. A context manager that leaves no process behind."""

    def __init__(self, job: Path, log: Path, *options: str) -> None:
        self.process = PROCESSES.Process(target=_submit, args=(str(job), str(log), options))
        self.log = log

    def __enter__(self) -> Run:
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def kill(self) -> float:
        """kill -9, and the moment of it. What the process had started ends with it."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        moment = time.monotonic()
        self.process.kill()
        assert self.wait() == -signal.SIGKILL, "it had ended by itself"
        wait_until_ended(started)
        return moment

    def notes(self, *kinds: str) -> list[tuple[str, float, int]]:
        """(kind, time, tokens decoded so far) of what was logged."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        parts = [line.split() for line in lines if line.endswith("\n")]
        return [(kind, float(at), int(tokens)) for kind, at, tokens in parts if kind in kinds]

    def decoded(self) -> int:
        return max((tokens for _, _, tokens in self.notes("step")), default=0)

    def may_lose(self, killed: float, checkpoint_seconds: float) -> int:
        """How many of its tokens a run that was killed at that time may have lost."""
        writes = [*(at for _, at, _ in self.notes("write", "written")), killed]  # begin, end, begin, ...; or cut short
        slowest = max((end - begin for begin, end in zip(writes[::2], writes[1::2], strict=False)), default=0)
        window = checkpoint_seconds + max(0, slowest - checkpoint_seconds / 5)
        safe = [tokens for _, at, tokens in self.notes("step") if at <= killed - window][:-1]
        return self.decoded() - (safe[-1] if safe else 0)
