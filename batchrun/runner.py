"""A job from its checks to its last manifest, as one worker of any number sees it."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from typing import Any

from batchrun.data.rerun import open_again
from batchrun.data.rows import Split
from batchrun.data.scope import splits_to_do
from batchrun.data.sink import Output
from batchrun.data.view import OutputView
from batchrun.data.work import Work
from batchrun.engine.memory import head_dim
from batchrun.errors import EXIT_OK, EXIT_ROW_ERRORS, EXIT_THRESHOLD, JobError, StoppedError, without_credentials
from batchrun.job import JobSpec
from batchrun.launch.supervisor import run_workers
from batchrun.loop import Loop, all_errors
from batchrun.model_files import resolve
from batchrun.numerics import numerics
from batchrun.observe.report import summary
from batchrun.preflight import Preflight, preflight
from batchrun.signals import StopSignals

_PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow")


@dataclass(frozen=True)
class _Begun:
    """A job whose output this process has joined, with its input recorded."""

    ready: Preflight
    output: Output
    splits: list[Split]
    limit: int | None

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the run: nothing of it is secret, nothing of it decides what the parts hold."""
        return {
            "job": self.ready.job.name,
            "limit": self.limit,
            "model": self.ready.model.reference,
            "device": self.ready.device,
            "machine": platform.machine(),
            "versions": {"batchrun": version("batchrun-llm")} | {name: version(name) for name in _PACKAGES},
        }


def run_job(
    job: JobSpec,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    max_time: float | None = None,
    rerun: Collection[str] = (),
) -> int:
    """Run a job, go on with one, or help others who do, until it is done; print how it went.

    ``limit`` bounds the input rows that are run; ``max_time`` is in seconds. Done rows of the kinds in ``rerun`` (see
    RERUN_KINDS) are run again; ``sampling.max_tokens`` may then be another than it was for the others. Returns the
    exit code of `batchrun.errors`. Raises JobError before the model is loaded, and HeldError where an output is to be
    overwritten on which others work.
    """
    started = time.monotonic()
    deadline = None if max_time is None else started + max_time
    with _begin(job, limit=limit, overwrite=overwrite, rerun=rerun) as begun, StopSignals(deadline) as stop:
        ready, output = begun.ready, begun.output
        scope = None if limit is None else {split.number for split in begun.splits}
        loop = Loop(ready, output, Work(output, ready.inputs, scope), stop)
        loop.run()
        report = loop.report(time.monotonic() - started)
        if not loop.stopped:
            manifest = output.finish(begun.describe() | loop.describe_steps())
            report = replace(
                report,
                rows_by_others=max(0, manifest.rows - loop.rows_before - loop.finished_rows),
                total_rows=manifest.rows,
                ok_rows=manifest.ok,
                errors=all_errors(report.errors, manifest.errors),
                exit_code=_exit_code(job, manifest.rows, manifest.errors),
            )
    print(summary(report), file=sys.stderr, flush=True)
    return report.exit_code


def run_local_workers(
    job: JobSpec,
    command: Sequence[str],
    workers: int,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    max_time: float | None = None,
    rerun: Collection[str] = (),
) -> int:
    """Run a job by ``command`` (a ``batchrun submit`` of it) in so many processes on this machine; as `run_job`.

    What is to be done once, and by one process, is done here before they start.
    """
    deadline = None if max_time is None else time.monotonic() + max_time
    with _begin(job, limit=limit, overwrite=overwrite, rerun=rerun) as begun:
        device, output = begun.ready.device, begun.output
        if rerun:  # what the rows that are run again have otherwise is recorded
            command = [*command, f"--set=sampling.max_tokens={begun.ready.job.sampling.max_tokens}"]
    with StopSignals(deadline) as stop:
        return run_workers(command, workers, device, stop, lambda: _is_told_to_stop(output))


def _is_told_to_stop(output: Output) -> bool:
    """As far as the storage tells: that it is away ends no worker from outside."""
    try:
        return output.is_told_to_stop()
    except StoppedError:
        return False


@contextmanager
def _begin(job: JobSpec, *, limit: int | None, overwrite: bool, rerun: Collection[str]) -> Iterator[_Begun]:
    """Checks the job and joins its output; raises as `run_job`."""
    job, max_tokens = _as_begun(job) if rerun else (job, None)
    ready = preflight(job, to_run=True)
    for warning in ready.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with _open(ready, overwrite=overwrite) as (ready, output):
        splits = splits_to_do(output, ready.source, ready.inputs, limit)
        if rerun:
            rows = open_again(output, ready.source, ready.inputs, rerun, max_tokens)
            print(f"{job.name}: {rows:,} rows are opened to be run again", file=sys.stderr)
        yield _Begun(ready, output, splits, limit)


@contextmanager
def _open(ready: Preflight, *, overwrite: bool) -> Iterator[tuple[Preflight, Output]]:
    """Joins the job's output. Of a quantization that is ``auto``, what the output was begun with holds for all."""
    auto = ready.job.model.quantization == "auto"
    recorded = _recorded_quantization(ready.job) if auto and not overwrite else None
    if auto:
        ready = _with_quantization(ready, recorded or _fastest_quantization(ready))
    if recorded:
        print(f"{ready.job.name}: model.quantization: {recorded}, as the output was begun with", file=sys.stderr)
    try:
        output = _opened(ready, overwrite=overwrite)
    except JobError:
        others = _recorded_quantization(ready.job) if auto and recorded is None and not overwrite else None
        if others in (None, ready.job.model.quantization):
            raise
        ready = _with_quantization(ready, others)  # another worker, for which another is faster, came at once
        output = _opened(ready, overwrite=False)
    with output:
        yield ready, output


def _opened(ready: Preflight, *, overwrite: bool) -> Output:
    job = ready.job
    configuration = job.configuration(
        revision=ready.model.revision,
        dtype=ready.dtype,
        max_model_len=ready.max_model_len,
        numerics=numerics(ready.device, ready.dtype, head_dim(ready.model.config), reproducible=job.model.reproducible),
    )
    return Output.open(job.output, configuration, ready.layout, inputs=ready.inputs, overwrite=overwrite)


def _recorded_quantization(job: JobSpec) -> str | None:
    view = OutputView.at(job.output.path, job.output.storage_options)
    return None if view is None else view.recorded_configuration().get("model", {}).get("quantization")


def _fastest_quantization(ready: Preflight) -> str:
    files = resolve(ready.model.reference, ready.job.model.revision)
    fastest = import_module("batchrun.engine.fastest_form").fastest(
        files, ready.job.model, ready.job.engine, ready.device, ready.dtype
    )
    print(f"{ready.job.name}: model.quantization: {fastest}", file=sys.stderr)
    return str(fastest.form)


def _with_quantization(ready: Preflight, quantization: str | None) -> Preflight:
    model = ready.job.model.model_copy(update={"quantization": quantization})
    return replace(ready, job=ready.job.model_copy(update={"model": model}))


def _as_begun(job: JobSpec) -> tuple[JobSpec, int | None]:
    """The job with the ``max_tokens`` that its output was begun with, and its own, if that is another."""
    view = OutputView.at(job.output.path, job.output.storage_options)
    if view is None:
        raise JobError(f"--rerun: {without_credentials(job.output.path)} is no output of batchrun: nothing is done yet")
    before = view.recorded_configuration().get("sampling", {}).get("max_tokens", job.sampling.max_tokens)
    if before == job.sampling.max_tokens:
        return job, None
    sampling = job.sampling.model_copy(update={"max_tokens": before})
    return job.model_copy(update={"sampling": sampling}), job.sampling.max_tokens


def _exit_code(job: JobSpec, rows: int, errors: int) -> int:
    threshold = 0.0 if job.errors.on_error == "fail" else job.errors.error_threshold
    if threshold is not None and errors > threshold * rows:
        return EXIT_THRESHOLD
    return EXIT_ROW_ERRORS if errors else EXIT_OK
