"""How far a job is, read from its output alone: works while it runs, after it ended, and from another machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from batchrun.data.view import OutputView
from batchrun.errors import JobError, without_credentials
from batchrun.job import load_job
from batchrun.text import table


@dataclass(frozen=True)
class Status:
    """What an output says of its job. Rows of a split that is not committed count as done once they are durable."""

    output: str
    state: Literal["done", "running", "stopped", "damaged"]
    holder: str | None  # who works on it
    rows: int  # of the input; blank lines and rows that input.where drops count until their split is committed
    done_rows: int
    committed_rows: int
    error_rows: int  # among the committed
    splits: int
    committed_splits: int
    prompt_tokens: int  # of committed rows
    completion_tokens: int
    manifest: str | None  # when the newest manifest was written, ISO 8601
    progress: dict[str, Any] | None  # what the newest attempt last said of itself
    faults: list[str]  # what is wrong with published parts; not looked for while somebody works on them

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
        if self.holder is not None:
            lines.append(("held by", self.holder))
        if self.holder is not None and self.progress is not None:
            running, waiting = (self.progress.get(name, "?") for name in ("running", "waiting"))
            lines.append(("last word", f"{running} running, {waiting} waiting at {self.progress.get('written')}"))
        lines += [("damaged", fault) for fault in self.faults]
        return f"{self.output}: {self.state}\n{table(lines)}"


def read_status(target: str, overrides: Sequence[str] = ()) -> Status:
    """The status of a job file's output, or of an output directory or URL. Raises JobError where there is none."""
    path, options = target, {}
    if Path(target).is_file():
        output = load_job(target, overrides).output
        path, options = output.path, output.storage_options
    view = OutputView.at(path, options)
    if view is None:
        raise JobError(f"{path}: no output of batchrun is there; nothing was submitted yet")
    view.recorded_configuration()
    holder = view.holder()
    _, splits = view.recorded_input() or ([], [])
    committed = view.committed()
    rows = sum(committed[split.number].rows if split.number in committed else split.n_rows for split in splits)
    committed_rows = sum(record.rows for record in committed.values())
    pending = sum(map(len, view.done_rows().values()))
    manifest = view.manifest()
    faults = [] if holder is not None else [str(fault) for fault in view.faulty_parts()]
    complete = manifest is not None and manifest.complete and committed.keys() >= {split.number for split in splits}
    return Status(
        output=without_credentials(path),
        state="running" if holder else "damaged" if faults else "done" if complete else "stopped",
        holder=None if holder is None else str(holder),
        rows=rows,
        done_rows=committed_rows + pending,
        committed_rows=committed_rows,
        error_rows=sum(record.errors for record in committed.values()),
        splits=len(splits),
        committed_splits=len(committed),
        prompt_tokens=sum(record.prompt_tokens for record in committed.values()),
        completion_tokens=sum(record.completion_tokens for record in committed.values()),
        manifest=None if manifest is None else manifest.created,
        progress=view.read_status(),
        faults=faults,
    )
