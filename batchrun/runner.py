"""One worker: splits become prompts, prompts become results, results become committed parts.

Three things go on at once. The engine's thread (the caller's) runs steps and nothing else that takes time; a child
process reads, templates and tokenizes ahead (`batchrun.data.feed`); a writer thread turns finished requests into text
and makes them durable (`batchrun.data.writer`). The caller's thread waits for storage only where results would pile up.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter, deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from batchrun.data.feed import Feed, FeedError, Window
from batchrun.data.rows import PartialRow, PreparedRow, RowResult, Split
from batchrun.data.scope import splits_to_do
from batchrun.data.sink import Output
from batchrun.data.writer import Writer
from batchrun.engine.memory import head_dim
from batchrun.errors import (
    EXIT_OK,
    EXIT_ROW_ERRORS,
    EXIT_STOPPED,
    EXIT_THRESHOLD,
    ROW_ERROR_KINDS,
    StoppedError,
    ThresholdError,
    row_error,
    without_credentials,
)
from batchrun.estimate import expect
from batchrun.job import JobSpec
from batchrun.model_files import resolve
from batchrun.numerics import numerics
from batchrun.observe.progress import Progress, Snapshot
from batchrun.observe.report import RunReport, summary
from batchrun.preflight import Preflight, preflight
from batchrun.signals import StopSignals

if TYPE_CHECKING:
    from batchrun.engine.engine import Engine
    from batchrun.engine.request import Request

_OPEN_SPLITS = 2  # splits in work at once: the next one fills the engine while the last rows of one run out,
_OPEN_ROWS = 10_000  # or, of small splits, as many as hold these rows
_MAX_RESULTS = 20_000  # finished rows, and log-probabilities of theirs, that make a checkpoint due,
_MAX_LOGPROBS = 200_000  # however young the last one is
_EXPECTED_ROWS = 512  # of the first window, that the first ETA is judged by
_IDLE_SECONDS = 0.2  # how long to wait for prompts while the engine has nothing to do
_PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow")


def run_job(job: JobSpec, *, limit: int | None = None, overwrite: bool = False, max_time: float | None = None) -> int:
    """Run a job, or go on with one, and print how it went. Returns the exit code of `batchrun.errors`.

    ``limit`` bounds the input rows that are run; ``max_time`` is in seconds. Raises JobError before the model is
    loaded, and StoppedError where another process works on the output.
    """
    started = time.monotonic()
    ready = preflight(job, to_run=True)
    for warning in ready.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    configuration = job.configuration(
        revision=ready.model.revision,
        dtype=ready.dtype,
        max_model_len=ready.max_model_len,
        numerics=numerics(ready.device, ready.dtype, head_dim(ready.model.config), reproducible=job.model.reproducible),
    )
    deadline = None if max_time is None else started + max_time
    with ExitStack() as stack:
        output = stack.enter_context(
            Output.open(job.output, configuration, ready.layout, inputs=ready.inputs, overwrite=overwrite)
        )
        splits = splits_to_do(output, ready.source, ready.inputs, limit)
        run = _Run(ready, output, splits, stack.enter_context(StopSignals(deadline)))
        run.work()
        report = run.report(time.monotonic() - started)
        if not run.stopped:
            manifest = output.finish(_describe_run(ready, limit) | run.describe_steps())
            report = replace(
                report,
                total_rows=manifest.rows,
                ok_rows=manifest.ok,
                errors=_all_errors(report.errors, manifest.errors),
                exit_code=_exit_code(job, manifest.rows, manifest.errors),
            )
    print(summary(report), file=sys.stderr, flush=True)
    return report.exit_code


def _exit_code(job: JobSpec, rows: int, errors: int) -> int:
    threshold = 0.0 if job.errors.on_error == "fail" else job.errors.error_threshold
    if threshold is not None and errors > threshold * rows:
        return EXIT_THRESHOLD
    return EXIT_ROW_ERRORS if errors else EXIT_OK


def _all_errors(of_this_run: Any, total: int) -> dict[str, int]:
    """Errors by kind; those of earlier runs, whose kinds the manifest does not count, as one."""
    errors = dict(of_this_run)
    if earlier := total - sum(errors.values()):
        errors["in earlier runs"] = earlier
    return errors


def _describe_run(ready: Preflight, limit: int | None) -> dict[str, Any]:
    """What the manifest says of the run: nothing of it is secret, nothing of it decides what the parts hold."""
    return {
        "job": ready.job.name,
        "limit": limit,
        "model": ready.model.reference,
        "device": ready.device,
        "machine": platform.machine(),
        "versions": {"batchrun": version("batchrun-llm")} | {name: version(name) for name in _PACKAGES},
    }


@dataclass(slots=True)
class _OpenSplit:
    """A split in work. It is complete when all its windows were delivered and every row of them is finished."""

    split: Split
    delivered: bool = False
    unfinished: int = 0

    @property
    def complete(self) -> bool:
        return self.delivered and self.unfinished == 0


class _Run:
    """What `run_job` does between opening the output and finishing it."""

    def __init__(self, ready: Preflight, output: Output, splits: list[Split], stop: StopSignals) -> None:
        self.ready = ready
        self.job = ready.job
        self.output = output
        self.stop = stop
        self.stopped = False
        self.errors: Counter[str] = Counter()  # kind -> rows, of this run
        committed = output.committed()
        self._todo = deque(split for split in splits if split.number not in committed)
        self._total_rows = sum(
            committed[split.number].rows if split.number in committed else _row_count(split) for split in splits
        )
        self._done = output.done_rows()
        self.rows_before = sum(record.rows for record in committed.values()) + sum(map(len, self._done.values()))
        self._errors_before = sum(record.errors for record in committed.values())
        self._errors_before += sum(not ok for rows in self._done.values() for ok in rows.values())
        self._partials = {
            place: partial for place, partial in output.partials().items() if place[1] not in self._done[place[0]]
        }
        self._open: dict[int, _OpenSplit] = {}
        self._results: list[Request | RowResult] = []
        self._held_logprobs = 0  # entries among these results
        self._finished_rows = 0
        self._finished_tokens = 0
        self._engine: Engine | None = None

    def work(self) -> None:
        """Run every split that is not committed, until all are, or until told to stop."""
        if not self._todo:
            done = f"all {self.rows_before:,} rows were done before" if self.rows_before else "there are no rows to run"
            print(f"{self.job.name}: {done}", file=sys.stderr)
            return
        if self.rows_before or self._partials:
            tokens = sum(len(partial.token_ids) for partial in self._partials.values())
            print(
                f"{self.job.name}: resuming: {self.rows_before:,} of {self._total_rows:,} rows are done, "
                f"{len(self._partials):,} begun ({tokens:,} tokens)",
                file=sys.stderr,
            )
        with ExitStack() as stack:
            feed = stack.enter_context(
                Feed(self.job.input, self.job.prompt, self.job.sampling, self.ready.model, self.ready.max_model_len)
            )
            self._request_splits(feed)
            import_module("batchrun.engine.engine")  # takes seconds, in which the feed prepares the first rows
            writer = stack.enter_context(Writer(self.output, self.ready.source, self.job.output.checkpoint_seconds))
            progress = stack.enter_context(Progress(self._total_rows, rows_before=self.rows_before, name=self.job.name))
            stack.callback(self._close_engine)
            try:
                self._loop(feed, writer, progress)
            except Exception as error:
                if isinstance(error, FeedError) or not isinstance(error, StoppedError | ThresholdError):
                    with suppress(Exception):  # what went wrong may go wrong again
                        self._save(writer)
                raise

    def _loop(self, feed: Feed, writer: Writer, progress: Progress) -> None:
        while self._open:
            if self.stop.reason is not None:
                progress.write(
                    f"{self.job.name}: stopping ({self.stop.reason}): making finished and begun rows durable"
                )
                self._save(writer)
                self.stopped = True
                return
            busy = self._engine is not None and self._engine.has_work
            self._take_windows(feed, progress, 0.0 if busy else _IDLE_SECONDS)
            if self._engine is not None:
                for request in self._engine.step():
                    self._finish_row(request)
            if self.output.lease.lost:
                raise StoppedError(f"{self.output.store.url}: another process took this output over; its results stand")
            self._check_errors(writer)
            self._close_splits(feed, writer)
            if writer.due or len(self._results) >= _MAX_RESULTS or self._held_logprobs >= _MAX_LOGPROBS:
                self._checkpoint(writer)
            progress.update(self._snapshot())
        progress.update(self._snapshot())

    # ---- rows in

    def _request_splits(self, feed: Feed) -> None:
        rows = sum(opened.split.n_rows for opened in self._open.values())
        while self._todo and (len(self._open) < _OPEN_SPLITS or rows < _OPEN_ROWS):
            rows += self._todo[0].n_rows
            split = self._todo.popleft()
            self._open[split.number] = _OpenSplit(split)
            feed.request(split, self._done.pop(split.number, ()))

    def _take_windows(self, feed: Feed, progress: Progress, timeout: float) -> None:
        """Take prepared rows in while the engine has fewer than it could run."""
        while self._engine is None or self._engine.hungry:
            window = feed.poll(timeout)
            if window is None:
                return
            begins = self._engine is None
            self._take(window)
            if begins and self._engine is not None:
                self._expect(window, self._engine, progress)
            timeout = 0.0

    def _expect(self, window: Window, engine: Engine, progress: Progress) -> None:
        """Let the first ETA be that of rows like the first window's."""
        rows = window.rows[:_EXPECTED_ROWS]
        left = self._total_rows - self.rows_before
        if expected := expect(self.ready, rows, left, engine.limits, engine.step_times):
            progress.expect(*expected)

    def _take(self, window: Window) -> None:
        opened = self._open[window.split]
        opened.delivered = window.last
        opened.unfinished += len(window.rows)
        for prepared in window.rows:
            if prepared.error is None:
                self._add(opened.split, prepared)
            else:
                self._finish_row(RowResult(window.split, prepared.row, error=prepared.error))

    def _add(self, split: Split, prepared: PreparedRow) -> None:
        engine, params = self.engine, prepared.params
        assert params is not None
        partial = self._partials.pop((split.number, prepared.row), None)
        try:
            request = engine.request(
                (split.number, prepared.row),
                prepared.token_ids,
                params,
                self._noise_key(split, prepared),
                partial.token_ids if partial else (),
            )
        except ValueError as error:
            self._finish_row(RowResult(split.number, prepared.row, error=row_error("engine_error", str(error))))
            return
        if partial is not None:
            request.logprobs = list(partial.logprobs or ())
            request.prompt_logprobs = list((partial.prompt_logprobs or ())[1:])
        engine.add(request)

    def _noise_key(self, split: Split, prepared: PreparedRow) -> int:
        from batchrun.engine.request import noise_key

        assert prepared.params is not None
        seed = prepared.params.seed
        if seed is None:
            return int.from_bytes(os.urandom(8), "little")
        return noise_key("seed", seed) if prepared.own_seed else noise_key(seed, split.file.key, prepared.row, 0)

    @property
    def engine(self) -> Engine:
        """The engine, loaded when the first row needs it."""
        if self._engine is None:
            from batchrun.engine.engine import Engine

            spec = self.job.model
            files = resolve(spec.name_or_path, spec.revision)
            if files.revision != self.ready.model.revision:
                raise StoppedError(f"{files.reference} changed while the job started; run the same command again")
            options = spec.model_dump(exclude={"name_or_path"}) | self.job.engine.model_dump()
            self._engine = Engine(files, tokenizer=self.ready.tokenizer, **options)
        return self._engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()

    # ---- results out

    def _finish_row(self, result: Request | RowResult) -> None:
        if not isinstance(result, RowResult) and result.error is not None:
            split, row = result.key
            result = RowResult(split, row, error=row_error("engine_error", result.error))
        if isinstance(result, RowResult):
            split = result.split
            kind = (result.error or "").partition(":")[0]
            self.errors[kind if kind in ROW_ERROR_KINDS else "other"] += 1
        else:
            split = result.key[0]
            self._finished_tokens += len(result.tokens) - result.cached
            self._held_logprobs += len(result.logprobs) + len(result.prompt_logprobs)
        self._open[split].unfinished -= 1
        self._finished_rows += 1
        self._results.append(result)

    def _close_splits(self, feed: Feed, writer: Writer) -> None:
        """Hand complete splits to the writer, and request those that come after."""
        complete = [opened.split for opened in self._open.values() if opened.complete]
        if not complete:
            return
        self._checkpoint(writer)
        for split in complete:
            del self._open[split.number]
            writer.commit(split)
            if split.error is not None:  # the part tells of the rest of a damaged file as one more row
                self._finished_rows += 1
                self.errors["unreadable_file"] += 1
        self._request_splits(feed)

    def _checkpoint(self, writer: Writer) -> None:
        results, self._results, self._held_logprobs = self._results, [], 0
        engine = self._engine
        unfinished = engine.unfinished() if engine is not None else []
        partials = [_partial(request) for request in unfinished if request.n_output]
        # Rows that an earlier attempt began and this one has not reached stay known by that attempt's snapshot.
        writer.checkpoint((_row_result(result, engine) for result in results), partials, self._status())

    def _check_errors(self, writer: Writer) -> None:
        """End the run where its first error has to: good rows become durable, so that only bad ones are run again."""
        if not self.errors or self.job.errors.on_error == "record":
            return
        failed = next((result for result in self._results if isinstance(result, RowResult)), None)
        if failed is None:
            return
        self._results = [result for result in self._results if not isinstance(result, RowResult)]
        self._checkpoint(writer)
        key = self._open[failed.split].split.file.key
        raise ThresholdError(f"{key}: row {failed.row}: {failed.error} (errors.on_error is fail)")

    def _save(self, writer: Writer) -> None:
        """Settle the step in flight and make everything durable that is known."""
        if self._engine is not None:
            for request in self._engine.drain():
                self._finish_row(request)
        self._checkpoint(writer)

    # ---- what it says of itself

    def _snapshot(self) -> Snapshot:
        stats = self._engine.stats() if self._engine is not None else None
        errors = self.errors.total()
        if stats is None:
            return Snapshot(rows=self._finished_rows, row_errors=errors)
        return Snapshot(
            rows=self._finished_rows,
            row_errors=errors,
            prompt_tokens=stats.admitted_tokens - stats.cached_tokens,
            cached_tokens=stats.cached_tokens,
            completion_tokens=stats.output_tokens,
            finished_tokens=self._finished_tokens,
            running=stats.running,
            waiting=stats.waiting,
            kv_use=stats.kv_used,
        )

    def _status(self) -> dict[str, Any]:
        now = self._snapshot()
        return {
            "rows": self.rows_before + now.rows,
            "of": self._total_rows,
            "errors": self._errors_before + now.row_errors,
            "prompt_tokens": now.prompt_tokens,
            "output_tokens": now.completion_tokens,
            "running": now.running,
            "waiting": now.waiting,
        }

    def describe_steps(self) -> dict[str, int]:
        """The bounds of the engine's steps, for the manifest; none where every row had been done before."""
        if self._engine is None:
            return {}
        limits = self._engine.limits
        return {"max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens}

    def report(self, seconds: float) -> RunReport:
        now = self._snapshot()
        return RunReport(
            name=self.job.name,
            output=without_credentials(self.job.output.path),
            exit_code=EXIT_STOPPED,
            total_rows=self._total_rows,
            ok_rows=self.rows_before - self._errors_before + now.rows - now.row_errors,
            errors=_all_errors(self.errors, self._errors_before + now.row_errors),
            rows_before=self.rows_before,
            prompt_tokens=now.prompt_tokens,
            cached_tokens=now.cached_tokens,
            completion_tokens=now.completion_tokens,
            seconds=seconds,
        )


def _row_count(split: Split) -> int:
    """Rows that its part will have, as far as is known."""
    return split.n_rows + (split.error is not None)


def _partial(request: Request) -> PartialRow:
    from batchrun.engine.engine import prompt_logprobs

    split, row = request.key
    return PartialRow(split, row, request.output_ids, list(request.logprobs) or None, prompt_logprobs(request))


def _row_result(result: Request | RowResult, engine: Engine | None) -> RowResult:
    """What the output stores of a finished request; its text is made here, off the engine's thread."""
    if isinstance(result, RowResult):
        return result
    from batchrun.engine.engine import prompt_logprobs

    assert engine is not None
    split, row = result.key
    return RowResult(
        split=split,
        row=row,
        text=engine.text(result),
        finish_reason=result.finish_reason,
        prompt_tokens=result.n_prompt,
        completion_tokens=result.n_output,
        logprobs=result.logprobs if result.params.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs(result),
    )
