"""The command line. Commands parse, call one function each and print; nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from batchrun import __version__
from batchrun.errors import EXIT_BAD_JOB, EXIT_OK, BatchrunError
from batchrun.signals import interruptible
from batchrun.streams import outlive_readers
from batchrun.text import parse_duration


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


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
_set = click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a field; VALUE is YAML.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
@click.option("--max-time", type=_Duration(), help="Commit what is done after this time (90, 15m, 04:00:00), exit 75.")
@interruptible()
def submit(
    job: str, overrides: tuple[str, ...], limit: int | None, overwrite: bool, dry_run: bool, max_time: float | None
) -> None:
    """Run a job, or go on with one that stopped. A finished job is left as it is."""
    from batchrun.job import load_job

    spec = load_job(job, overrides)
    if dry_run:
        from batchrun.preflight import preflight

        click.echo(preflight(spec).first_prompt())
        return
    from batchrun.runner import run_job

    sys.exit(run_job(spec, limit=limit, overwrite=overwrite, max_time=max_time))


@main.command()
@click.argument("target", metavar="JOB|OUT")
@_set
@_json
def status(target: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say how far a job is, from its job file or its output directory."""
    from batchrun.observe.status import read_status

    found = read_status(target, overrides)
    click.echo(found.to_json() if as_json else found.describe())
    sys.exit(EXIT_BAD_JOB if found.state == "damaged" else EXIT_OK)


@main.command(cls=_Bench)
@click.argument("target", metavar="FILE|JOB", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--against", type=click.Choice(["transformers", "vllm", "openvino"]), help="Measure this peer in the same run."
)
@click.option("--peer-python", metavar="PATH", help="The Python that has the peer; this one, if not given.")
@click.option("--pairs", type=click.IntRange(min=1), help="Passes of each side, by turns; 3 with a peer, else 1.")
@click.option("--breakdown", is_flag=True, help="Say where a step's time goes, from one more pass.")
@click.option("--model", help="Model reference, for a JSONL file; the demo's, if not given.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--quantization", type=click.Choice(["none", "int8"]), help="Of batchrun's linear layers.")
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
