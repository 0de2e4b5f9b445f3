"""How far a job is, read from its output alone: works while it runs, after it ended, and from another machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from batchrun.data.store import Store
from batchrun.data.view import OutputView
from batchrun.data.workers import WorkerFile
from batchrun.errors import JobError, without_credentials
from batchrun.job import output_of
from batchrun.launch.slurm import ArrayStatus, array_status
from batchrun.text import table


@dataclass(frozen=True)
class Status:
    """What an output says of its job. Rows of a split that is not committed count as done once they are durable."""

    output: str
    state: Literal["queued", "running", "stopped", "done", "damaged"]
    workers: list[dict[str, Any]]  # who works on it: host, pid, since, written, and what it last said of its progress
    rows: int  # of the input; blank lines and rows that input.where drops count until their split is committed
    done_rows: int
    committed_rows: int
    error_rows: int  # among the committed
    splits: int
    committed_splits: int
    reopened_splits: int  # by a rerun that is not finished: their earlier results stand until then
    prompt_tokens: int  # of committed rows
    completion_tokens: int
    manifest: str | None  # when the newest manifest was written, ISO 8601
    progress: dict[str, Any] | None  # what the worker that was heard of last said then
    faults: list[str]  # what is wrong with published parts; not looked for while somebody works on them
    slurm: list[ArrayStatus]  # arrays with tasks in the queue, and the newest

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def describe(self) -> str:
        """A few readable lines."""
        share = self.done_rows / self.rows if self.rows else 1.0
        lines = [
            ("rows", f"{self.done_rows:,} of {self.rows:,} done ({share:.0%}), {self.committed_rows:,} in final parts"),
            ("errors", f"{self.error_rows:,} rows in final parts"),
            ("splits", f"{self.committed_splits:,} of {self.splits:,} committed"),
            ("tokens", f"{self.prompt_tokens:,} prompt + {self.completion_tokens:,} output in final parts"),
        ]
        if self.reopened_splits:
            lines.append(
                ("rerun", f"{self.reopened_splits:,} splits are open again; their earlier results stand meanwhile")
            )
        for worker in self.workers:
            running, waiting = (worker.get(name, "?") for name in ("running", "waiting"))
            said = f"{running} running, {waiting} waiting at {worker['written'][:19]}"
            lines.append(("worker", f"{worker['pid']} on {worker['host']} since {worker['since'][:19]}: {said}"))
        lines += [("slurm", array.describe()) for array in self.slurm]
        lines += [("damaged", fault) for fault in self.faults]
        return f"{self.output}: {self.state}\n{table(lines)}"


def read_status(target: str, overrides: Sequence[str] = ()) -> Status:
    """The status of a job file's output, or of an output directory or URL. Raises JobError where there is none."""
    path, options = output_of(target, overrides)
    view = OutputView.at(path, options)
    if view is None:
        if arrays := array_status(Store(path, options)):
            return _queued(path, arrays)
        raise JobError(f"{path}: no output of batchrun is there; nothing was submitted yet")
    view.recorded_configuration()
    workers = view.workers()
    _, splits = view.recorded_input() or ([], [])
    committed = view.committed()
    rows = sum(committed[split.number].rows if split.number in committed else split.n_rows for split in splits)
    committed_rows = sum(record.rows for record in committed.values())
    done = view.done_rows()
    pending = sum(len(done.get(split.number, ())) for split in splits)
    manifest = view.manifest()
    faults = [] if workers else [str(fault) for fault in view.faulty_parts()]
    last = view.last_word()
    complete = manifest is not None and manifest.complete and committed.keys() >= {split.number for split in splits}
    return Status(
        output=without_credentials(path),
        state="running" if workers else "damaged" if faults else "done" if complete else "stopped",
        workers=[_described(worker) for worker in workers],
        rows=rows,
        done_rows=committed_rows + pending,
        committed_rows=committed_rows,
        error_rows=sum(record.errors for record in committed.values()),
        splits=len(splits),
        committed_splits=len(committed),
        reopened_splits=len(view.rerun_splits()),
        prompt_tokens=sum(record.prompt_tokens for record in committed.values()),
        completion_tokens=sum(record.completion_tokens for record in committed.values()),
        manifest=None if manifest is None else manifest.created,
        progress=None if last is None else {"written": last.written, **last.progress},
        faults=faults,
        slurm=array_status(view.store),
    )


def _queued(path: str, arrays: list[ArrayStatus]) -> Status:
    """Of a job that was submitted to Slurm and has not begun."""
    return Status(
        output=without_credentials(path),
        state="queued",
        workers=[],
        rows=0,
        done_rows=0,
        committed_rows=0,
        error_rows=0,
        splits=0,
        committed_splits=0,
        reopened_splits=0,
        prompt_tokens=0,
        completion_tokens=0,
        manifest=None,
        progress=None,
        faults=[],
        slurm=arrays,
    )


def _described(worker: WorkerFile) -> dict[str, Any]:
    owner = worker.owner
    who = {"attempt": owner.attempt, "host": owner.host, "pid": owner.pid, "since": owner.since, "task": owner.task}
    return who | {"written": worker.written, **worker.progress}
