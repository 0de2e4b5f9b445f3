"""The command line. Commands parse, call one function each and print; nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchrun import __version__
from batchrun.errors import EXIT_BAD_JOB, EXIT_OK, BatchrunError
from batchrun.signals import interruptible
from batchrun.streams import outlive_readers
from batchrun.text import parse_duration

if TYPE_CHECKING:
    from batchrun.job import JobSpec


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Some(click.ParamType[tuple[str, ...]]):
    """Some of the names that a constant of a module holds, with commas between them."""

    name = "names"

    def __init__(self, module: str, constant: str) -> None:
        self._module, self._constant = module, constant

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        known = getattr(import_module(self._module), self._constant)
        names = value if isinstance(value, tuple) else tuple(name.strip() for name in value.split(","))
        if unknown := [name for name in names if name not in known]:
            self.fail(f"{unknown[0]!r}: choose from {', '.join(known)}", param, ctx)
        return names


class _Commands(click.Group):
    """Commands whose own errors are one readable text and an exit code; anything unexpected keeps its traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        outlive_readers()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BatchrunError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)


class _Bench(click.Command):
    """A command whose first argument ``gpu`` is another command; a file of that name is ``./gpu``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["gpu"]:
            return bench_gpu.make_context(f"{info_name} gpu", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


_job = click.argument("job", type=click.Path(dir_okay=False))
_target = click.argument("target", metavar="JOB|OUT")
_set = click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a field; VALUE is YAML.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_dtype = click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
_file = click.Path(dir_okay=False, path_type=Path)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchrun")
def main() -> None:
    """Offline batch inference for large language models: rows in, committed results out."""


@main.command()
@_job
@_set
def validate(job: str, overrides: tuple[str, ...]) -> None:
    """Check a job: its file, input, columns, model and output. Loads no weights, writes nothing."""
    from batchrun.job import load_job
    from batchrun.preflight import preflight

    spec = load_job(job, overrides)
    click.echo(preflight(spec).describe())


@main.command()
@_job
@_set
@click.option("--limit", type=click.IntRange(min=1), help="Plan the first N rows only.")
@_json
def plan(job: str, overrides: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """Say what a job will take: rows, tokens, shared prefixes, memory, steps and time. Loads no weights."""
    from batchrun.job import load_job
    from batchrun.plan import make_plan

    made = make_plan(load_job(job, overrides), limit=limit)
    click.echo(made.to_json() if as_json else made.describe())


@main.command()
@_job
@_set
@click.option("--limit", type=click.IntRange(min=1), help="Run the first N rows only; dropped later, the job goes on.")
@click.option("--overwrite", is_flag=True, help="Discard what the output holds and start again.")
@click.option("--dry-run", is_flag=True, help="Print the first prompt and its token ids, and stop.")
@click.option("--max-time", type=_Duration(), help="Stop after this time (90, 15m, 04:00:00): exit 75.")
@click.option("--workers", type=click.IntRange(min=1), help="Workers to run, each on a GPU or processors of its own.")
@click.option(
    "--rerun",
    type=_Some("batchrun.job", "RERUN_KINDS"),
    default=(),
    metavar="KINDS",
    help="Run done rows again: failed, truncated (also both, with a comma) or all. --set sampling.max_tokens=N goes "
    "with it, and no other change of what results depend on.",
)
@click.option("--slurm", is_flag=True, help="Have Slurm run it, as an array by the job's `slurm:` section.")
@interruptible()
def submit(
    job: str,
    overrides: tuple[str, ...],
    limit: int | None,
    overwrite: bool,
    dry_run: bool,
    max_time: float | None,
    workers: int | None,
    rerun: tuple[str, ...],
    slurm: bool,
) -> None:
    """Run a job, go on with one that stopped, or help others who run it.

    Any number of processes may submit one job at the same time, anywhere: they share the work. Rows of input files
    that are new or have changed since are run, what is done is left as it is.

    With --slurm, submit an array whose tasks do so; --dry-run then prints their script, and --set, --limit, --workers
    and --max-time are passed on to each of them.
    """
    from batchrun.job import load_job

    if overwrite and rerun:
        raise click.UsageError("--rerun keeps what --overwrite discards: give one of them")
    spec = load_job(job, overrides)
    if rerun and limit is not None:
        raise click.UsageError("--limit does not go with --rerun")
    if slurm:
        if overwrite or rerun:
            raise click.UsageError(f"{'--overwrite' if overwrite else '--rerun'} does not go with --slurm")
        options: dict[str, Any] = {"overrides": overrides, "limit": limit, "workers": workers, "max_time": max_time}
        _submit_array(spec, job, dry_run=dry_run, **options)
        return
    if dry_run:
        from batchrun.preflight import preflight

        click.echo(preflight(spec).first_prompt())
        return
    from batchrun.launch.supervisor import stop_with_supervisor
    from batchrun.runner import run_job, run_local_workers

    if workers is not None:
        options = {"limit": limit, "overwrite": overwrite, "max_time": max_time, "rerun": rerun}
        sys.exit(run_local_workers(spec, _submit_command(job, overrides, limit), workers, **options))
    stop_with_supervisor()
    sys.exit(run_job(spec, limit=limit, overwrite=overwrite, max_time=max_time, rerun=rerun))


def _submit_command(job: str, overrides: tuple[str, ...], limit: int | None) -> list[str]:
    """The command of one worker of the job."""
    options = [f"--set={override}" for override in overrides]
    options += [f"--limit={limit}"] if limit is not None else []
    return [sys.executable, "-P", "-m", "batchrun", "submit", job, *options]  # no file of the user's shadows a module


def _submit_array(spec: JobSpec, job: str, *, dry_run: bool, **options: Any) -> None:
    from batchrun.launch.slurm import Submission, script, submit_array

    submission = Submission(spec, job, **options)
    if dry_run:
        click.echo(script(submission), nl=False)
    else:
        submit_array(submission, click.echo)


@main.command()
@_target
@_set
def cancel(target: str, overrides: tuple[str, ...]) -> None:
    """End every worker of a job, its Slurm arrays among them. What is done is kept: `submit` goes on with it."""
    from batchrun.launch.slurm import cancel as cancel_job

    cancel_job(target, overrides, click.echo)


@main.command()
@_target
@click.argument("task", type=click.IntRange(min=0), required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written until the array has ended.")
@click.option("--lines", "-n", type=click.IntRange(min=0), default=10, show_default=True, help="Last lines of each.")
@_set
def logs(target: str, task: int | None, follow: bool, lines: int, overrides: tuple[str, ...]) -> None:
    """Print the ends of the logs of a job's newest Slurm array: of one TASK, or of all."""
    from batchrun.launch.slurm import show_logs

    show_logs(target, overrides, task, lines=lines, follow=follow, echo=click.echo)


@main.command()
@_target
@_set
@_json
def status(target: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say how far a job is, from its job file or its output directory."""
    from batchrun.observe.status import read_status

    found = read_status(target, overrides)
    click.echo(found.to_json() if as_json else found.describe())
    sys.exit(EXIT_BAD_JOB if found.state == "damaged" else EXIT_OK)


@main.command()
@click.argument("target", metavar="JOB|OUT")
@_set
@click.option("--where", type=click.Choice(["error", "truncated", "ok"]), help="Only rows that ended so.")
@click.option("--columns", metavar="A,B", help="Only these columns, named as in the output.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N of these rows.")
@click.option("--to", metavar="FILE", help="Write one .parquet, .jsonl or .csv file, a path or URL.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record on a line for each row.")
def results(
    target: str, overrides: tuple[str, ...], columns: str | None, to: str | None, as_json: bool, **rows: Any
) -> None:
    """Show what a job has given so far, or write it to one file.

    Only what is committed counts: of a job that is not finished, its finished splits, and a line on standard error says
    how far it is. A table shows the first 20 rows, with columns that hold something; --json prints all of every row.
    `truncated` are rows whose finish_reason is length; `ok` are those without an error. A file appears at its place
    when it is whole.
    """
    from batchrun.data.reader import Selection
    from batchrun.observe.results import show_results

    if to is not None and as_json:
        raise click.UsageError("--json prints, --to writes a file: give one of them")
    names = None if columns is None else tuple(dict.fromkeys(filter(None, columns.split(","))))
    show_results(target, overrides, Selection(columns=names, **rows), to=to, as_json=as_json)


@main.command()
@_job
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- SUBMIT OPTIONS]")
@_set
@click.option("--cron", metavar="EXPRESSION", help='When: minute hour day month weekday, as in "0 2 * * *".')
@click.option(
    "--kind",
    type=click.Choice(["crontab", "scrontab", "systemd"]),
    default="crontab",
    show_default=True,
    help="Whose entry.",
)
@click.option(
    "--log", type=_file, help="What runs say is added to it; JOB's name with .log in this directory, if not given."
)
@click.option("--install", is_flag=True, help="Install the entry instead of printing it; replaces JOB's earlier one.")
@click.option("--remove", is_flag=True, help="Remove JOB's entry.")
@click.pass_context
def schedule(
    ctx: click.Context, /, job: str, options: tuple[str, ...], overrides: tuple[str, ...], **choices: Any
) -> None:
    """Have `batchrun submit JOB` run at given times: print the entry of a crontab, scrontab or systemd timer.

    The entry runs this Python in this directory. What follows -- goes to `batchrun submit`:

    \b
      batchrun schedule jobs/nightly.yaml --cron "0 2 * * *" --install -- --max-time 5h

    Every run appends what it says and its exit code to the log: 0 done, 2 a bad job, 3 finished with error rows, 4 over
    the error threshold, 75 stopped early (the next run goes on). Runs that overlap are safe: a `submit` on an output
    that another one works on shares its work or leaves it alone, and no row is done twice. Schedulers start programs
    with an environment of their own, so variables that JOB names, and credentials, have to be set there or in files.

    A scrontab entry takes its #SCRON lines from the job's slurm section and runs as one Slurm job. A systemd timer is
    the user's own, and makes up for times at which the machine was off.
    """
    from batchrun.launch.schedule import run_schedule

    arguments = [*(part for override in overrides for part in ("--set", override)), *options]
    submitted = submit.make_context("submit", [job, *arguments], parent=ctx.parent).params
    run_schedule(job, submitted["overrides"], arguments, **choices)


@main.command()
@click.argument("model")
@click.option("--to", "kind", type=click.Choice(["int8", "int4", "fp8"]), required=True, help="Of the linear layers.")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new directory.")
@click.option("--revision", help="Of a Hub model or a pypi:// distribution; the newest, if not given.")
@click.option("--calibrate", metavar="JOB", type=click.Path(dir_okay=False), help="Round by a job's prompts.")
@click.option("--rows", type=click.IntRange(min=1), help="Calibrate with the first N rows; 128, if not given.")
@interruptible()
def quantize(model: str, kind: Any, output: Path, calibrate: str | None, rows: int | None, **options: Any) -> None:
    """Write MODEL to a directory with linear layers of fewer bits, as transformers reads it.

    MODEL is what a job's model.name_or_path may be. The checkpoint is in compressed-tensors format; embedding, output
    projection and norms stay plain. With --calibrate, GPTQ rounds the layers by the activations of a job's prompts,
    for which all of the model has to fit into memory; else one tensor at a time is.
    """
    from batchrun.quantizing import run_quantize

    if rows is not None and calibrate is None:
        raise click.UsageError("--rows goes with --calibrate")
    run_quantize(model, kind, output, calibrate=calibrate, rows=rows or 128, echo=click.echo, **options)


@main.command(cls=_Bench)
@click.argument("target", metavar="FILE|JOB", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--against", type=click.Choice(["transformers", "vllm", "openvino"]), help="Measure this peer in the same run."
)
@click.option("--peer-python", metavar="PATH", help="The Python that has the peer; this one, if not given.")
@click.option("--pairs", type=click.IntRange(min=1), help="Passes of each side, by turns; 3 with a peer, else 1.")
@click.option("--breakdown", is_flag=True, help="Say where a step's time goes, from one more pass.")
@click.option("--model", help="Model reference, for a JSONL file; the demo's, if not given.")
@_dtype
@click.option(
    "--quantization",
    type=click.Choice(["none", "auto", "dequantize", "int8", "int4", "fp8"]),
    help="As `model.quantization`; `dequantize`, if not given, for a JSONL file.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Measure the first N rows only.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads, of both sides.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="Sample; 0, if not given, is greedy.")
@click.option("--top-p", type=click.FloatRange(min=0, min_open=True, max=1), default=1.0, help="With a temperature.")
@_set
@_json
def bench(target: str, as_json: bool, overrides: tuple[str, ...], **options: Any) -> None:
    """Measure throughput on JSONL rows of `messages` or `prompt` and `max_tokens`, or on the rows of a job.

    `batchrun bench gpu` checks and measures the GPU kernels instead: see `batchrun bench gpu --help`.
    """
    from batchrun.bench import run_bench

    report = run_bench(Path(target), overrides=overrides, **options)
    click.echo(report.to_json() if as_json else report.describe())


@click.command()
@click.option("--json", "json_path", type=_file, help="Write the results here as they come.")
@click.option("--markdown", "markdown_path", type=_file, help="Write them here as tables.")
@click.option("--seconds", type=click.FloatRange(min=1), default=480.0, show_default=True, help="Stop after this time.")
@click.option("--only", type=click.Choice(["checks", "stress", "roofline", "engine"]), help="Run this part alone.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the random inputs, as an earlier run printed it.")
def bench_gpu(**options: Any) -> None:
    """Check the GPU kernels against float64, look for races, and measure them and the engine on random weights.

    Needs a CUDA device. The most important comes first, and what there was no time for is named. The exit code is 1
    where something failed.
    """
    from batchrun.bench.gpu import run_gpu_bench

    results = run_gpu_bench(**options, echo=click.echo)
    sys.exit(1 if results.failed else EXIT_OK)


@main.command()
@click.argument("model")
@click.option("--text", type=_file, required=True, help="What is read: a UTF-8 file.")
@click.option("--against", metavar="REF", help="The reference, another reference to a model; MODEL, if not given.")
@click.option(
    "--weights",
    type=_Some("batchrun.quality", "WEIGHTS"),
    default="none,int8,int4",
    show_default=True,
    metavar="A,B",
    help="Each of these as model.quantization.",
)
@click.option(
    "--kv-cache",
    "kv_caches",
    type=_Some("batchrun.quality", "KV_CACHES"),
    default="auto",
    show_default=True,
    metavar="A,B",
    help="Each of these with each of the weights.",
)
@_dtype
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--context", type=click.IntRange(min=16), default=512, show_default=True, help="Tokens of a window.")
@click.option("--limit", type=click.IntRange(min=2), help="Read the first N tokens only.")
@click.option("--json", "json_path", type=_file, help="Write all figures here.")
@click.option("--plot", "plot_path", type=_file, help="Draw them into this .svg or .png; needs the extra `plot`.")
def quality(model: str, text: Path, **options: Any) -> None:
    """Measure what quantization costs: perplexity, and how far predictions are from those of a reference.

    MODEL reads a text in each configuration, and REF reads it in float32, dequantized, with plain keys and values. The
    text is cut into windows, of each of which every token but the first is predicted from those before it. A row of
    the table is also REF in the dtype of the configurations, so that what the dtype costs can be told from what
    quantization does.
    """
    from batchrun.quality import run_quality

    click.echo(run_quality(model, text, **options, say=lambda line: click.echo(line, err=True)).describe())
