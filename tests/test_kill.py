"""`kill -9` at random moments: every row comes out once, its bytes are those of a run that nobody killed, and what was
decoded twice is no more than a checkpoint's worth per kill.

How tokens are counted. Each run is `batchrun submit` with one addition: it logs when each step ended and how many
tokens its engine had decoded by then, and when each write to the output began and ended; the log outlives it. What is
durable is read from the output itself: tokens of committed parts, of segments, and of unfinished rows. What a kill lost
is what was durable before the run, plus what the run decoded, less what is durable after. It may not be more than the
run decoded within its last ``checkpoint_seconds`` and the step before those, steps being the grain in which an engine
stops to look. A fifth of the interval is the storage's: where a busy machine made a write of this run take longer, the
excess counts too. A step in flight counts for nobody.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchrun import Engine
from batchrun.cli import main
from batchrun.data.records import SEGMENTS
from batchrun.data.sink import Output
from batchrun.data.view import OutputView
from batchrun.observe.status import read_status
from tests.jobs import output_rows, write_job
from tests.outputs import parts_of

KILLS_AT_START = 5  # before the first step
KILLS_AT_WORK = 15
CHECKPOINT_SECONDS = 0.5

# Each run is forked from a server that has imported everything and done nothing: 20 starts in place of 20 imports.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def _submit(job: str, log: str) -> None:
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
    main(["submit", job])


class Run:
    """A job in a process of its own, and the log of its steps. A context manager that leaves no process behind."""

    def __init__(self, job: Path, log: Path) -> None:
        self.process = _PROCESSES.Process(target=_submit, args=(str(job), str(log)))
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
        _, orphans = psutil.wait_procs(started, timeout=20)
        assert not orphans
        return moment

    def notes(self, *kinds: str) -> list[tuple[str, float, int]]:
        """(kind, time, tokens decoded so far) of what was logged."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        parts = [line.split() for line in lines if line.endswith("\n")]
        return [(kind, float(at), int(tokens)) for kind, at, tokens in parts if kind in kinds]

    def decoded(self) -> int:
        return max((tokens for _, _, tokens in self.notes("step")), default=0)

    def may_lose(self, killed: float) -> int:
        """How many of its tokens a run that was killed at that time may have lost."""
        writes = [*(at for _, at, _ in self.notes("write", "written")), killed]  # begin, end, begin, ...; or cut short
        slowest = max((end - begin for begin, end in zip(writes[::2], writes[1::2], strict=False)), default=0)
        window = CHECKPOINT_SECONDS + max(0, slowest - CHECKPOINT_SECONDS / 5)
        safe = [tokens for _, at, tokens in self.notes("step") if at <= killed - window][:-1]
        return self.decoded() - (safe[-1] if safe else 0)


def durable_tokens(out: Path) -> int:
    view = OutputView.at(str(out))
    if view is None:
        return 0
    committed = view.committed()
    tokens = sum(record.completion_tokens for record in committed.values())
    done: set[tuple[int, int]] = set()
    for path in (out / SEGMENTS).glob("*.parquet"):
        split, table = int(path.name.partition("-")[0]), pq.read_table(path)
        if split not in committed:
            rows = {(split, row) for row in table["row"].to_pylist()}
            assert not rows & done, "a finished row was run again"
            done |= rows
            tokens += pc.sum(table["completion_tokens"]).as_py() or 0
    return tokens + sum(len(begun.token_ids) for place, begun in view.partials().items() if place not in done)


def make_rows() -> list[dict[str, Any]]:
    lengths = random.Random(1)
    rows = [{"id": i, "text": f"row {i}", "params": {"max_tokens": lengths.randint(20, 300)}} for i in range(60)]
    rows[17]["text"] = None
    return rows


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path: Path, tiny_model: Path) -> None:
    rows = make_rows()
    sections: dict[str, Any] = {
        "model": {"reproducible": True},
        "input": {"split_rows": 13},
        "sampling": {"temperature": 0.8, "ignore_eos": True, "logprobs": 1, "from_column": "params"},
        "output": {"checkpoint_seconds": CHECKPOINT_SECONDS},
        "engine": {"max_num_seqs": 16, "num_threads": 1},
    }
    total = sum(row["params"]["max_tokens"] for row in rows if row["text"])
    (tmp_path / "whole").mkdir()
    with Run(write_job(tmp_path / "whole", tiny_model, rows, **sections), tmp_path / "log") as whole:
        assert whole.wait() == 3
    assert whole.decoded() == total
    began, first = (at for _, at, _ in whole.notes("begin", "step")[:2])

    job = write_job(tmp_path, tiny_model, rows, **sections)
    chance = random.Random(2)
    moments = ["work"] * KILLS_AT_WORK + ["start"] * KILLS_AT_START
    chance.shuffle(moments)
    durable = lost = decoded = 0
    for number, moment in enumerate(moments):  # of work done rather than of the clock: machines differ in speed
        with Run(job, tmp_path / f"log-{number}") as run:
            if moment == "start":
                time.sleep(chance.uniform(0, first - began))
            else:
                tokens = chance.uniform(0, total / KILLS_AT_WORK)
                while run.decoded() <= tokens and run.process.is_alive():
                    time.sleep(0.005)
            killed = run.kill()
        before, durable = durable, durable_tokens(tmp_path / "out")
        again = before + run.decoded() - durable
        assert 0 <= again <= run.may_lose(killed)
        decoded, lost = decoded + run.decoded(), lost + again

    with Run(job, tmp_path / "log-last") as last:
        assert last.wait() == 3
    assert decoded + last.decoded() - lost == total
    assert read_status(str(tmp_path / "out")).holder is None
    assert [row["id"] for row in output_rows(tmp_path)] == [row["id"] for row in rows]
    assert parts_of(tmp_path) == parts_of(tmp_path / "whole")
