"""What drafts bring, by number of concurrent rows: ``python -m tests.bench.speculation [FILE] [options]``.

The templated workload copies the fields of generated records into JSON; the free one is the rows of FILE, as
``batchrun bench`` takes them. Every method of ``engine.speculative_config`` passes over the same rows as ``off``, by
turns in an order that is drawn for each round, and every pass is one of a freshly made engine: nothing is known of its
rows before. Ratios are of the passes of one round; a cell's rows of the table are printed when it is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from batchrun.bench.engine_side import EngineSide
from batchrun.bench.report import median_interval
from batchrun.bench.sides import Pass
from batchrun.bench.workload import DEMO_MODEL, Workload, bench_job, read_workload
from batchrun.engine.memory import DTYPE_BYTES, resolve_max_model_len
from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.job import EngineSpec, ModelSpec, SpeculativeSpec
from batchrun.model_files import ModelFiles, resolve
from batchrun.quality.plot import check_plot
from batchrun.tokenization.tokenizer import Tokenizer
from tests.bench.scale import kv_memory, print_row, with_interval

OFF = SpeculativeSpec(method="off")
METHODS = ("auto", "ngram", "suffix")
HEAD = (
    "rows at once",
    "method",
    "tok/s",
    "ratio to off",
    "with drafts",  # share of output tokens that came of forward passes with drafts
    "tok / forward",  # of these; without drafts it is 1
    "accepted",
    "CPU time",
    "same output",
)
_SEED = 7
_LEAST_ROWS, _TURNS = 16, 2  # of a pass: so many, or so often as many as run at once

_FIRST = ("Maria", "James", "Aiko", "Lena", "Omar", "Priya", "Tomas", "Grace", "Ivan", "Chloe", "Samuel", "Nadia")
_LAST = ("Lopez", "Carter", "Tanaka", "Fischer", "Haddad", "Sharma", "Novak", "Okafor", "Petrov", "Martin", "Reyes")
_COLORS = ("blue", "dark green", "red", "white", "black", "yellow", "silver", "light grey")
_ITEMS = ("ceramic mug", "desk lamp", "cotton shirt", "garden chair", "steel bottle", "phone case", "wool blanket")
_STREETS = ("Oak Street", "Mill Lane", "Station Road", "Harbour View", "Church Hill", "Park Avenue", "King Street")
_TOWNS = ("Leeds", "Portland", "Galway", "Bristol", "Dunedin", "Halifax", "Salem", "Norwich")


@dataclass(frozen=True, slots=True)
class Rows:
    """A named workload, and of a templated one what a perfect copy answers."""

    name: str
    workload: Workload
    answers: list[list[int]] | None = None

    def first(self, count: int) -> Workload:
        return replace(
            self.workload, prompts=self.workload.prompts[:count], max_tokens=self.workload.max_tokens[:count]
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One pass of a freshly made engine."""

    run: Pass
    cpu_seconds: float  # of all of this process's threads, and of processes that it waited for
    drafts: SpeculationStats | None

    @property
    def rate(self) -> float:
        return self.run.output_tokens / self.run.seconds


Ratios = dict[str, dict[int, list[float]]]  # method -> rows at once -> ratios to off


def record(draw: random.Random) -> dict[str, str]:
    """An order's fields."""
    return {
        "customer": f"{draw.choice(_FIRST)} {draw.choice(_LAST)}",
        "order": f"{draw.choice('ABCDEFGH')}{draw.randrange(10_000, 100_000)}",
        "item": f"{draw.choice(_COLORS)} {draw.choice(_ITEMS)}",
        "date": f"2024-{draw.randrange(1, 13):02d}-{draw.randrange(1, 29):02d}",
        "address": f"{draw.randrange(1, 200)} {draw.choice(_STREETS)}, {draw.choice(_TOWNS)}",
        "email": f"{draw.choice(_FIRST)}.{draw.choice(_LAST)}{draw.randrange(100)}@example.com".lower(),
    }


def sentence(fields: dict[str, str]) -> str:
    return (
        f"{fields['customer']} ({fields['email']}) placed order {fields['order']} on {fields['date']}: one "
        f"{fields['item']}, to be sent to {fields['address']}."
    )


def templated(tokenizer: Tokenizer, max_model_len: int, count: int, temperature: float = 0.0) -> Rows:
    """``count`` records as prompts, each with three others before it that are answered; the same ones every time."""
    draw = random.Random(_SEED)
    shots = [record(draw) for _ in range(3)]
    shown = "".join(f"Text: {sentence(fields)}\nJSON: {json.dumps(fields)}\n\n" for fields in shots)
    instruction = f"Write the fields of each order as JSON, exactly as they stand in the text.\n\n{shown}"
    records = [record(draw) for _ in range(count)]
    prompts = tokenizer.encode_batch(
        [f"{instruction}Text: {sentence(fields)}\nJSON:" for fields in records], add_special_tokens=True
    )
    answers = tokenizer.encode_batch([f" {json.dumps(fields)}" for fields in records], add_special_tokens=False)
    workload = Workload(prompts, [len(answer) for answer in answers], max_model_len, temperature)
    return Rows("templated", workload, answers)


def copied(rows: Rows, outputs: Sequence[Sequence[int]]) -> float:
    """Share of output tokens that are those of a perfect copy, 0 to 1, up to the first of a row that is not."""
    same = total = 0
    for answer, output in zip(rows.answers or [], outputs, strict=False):
        parted = next((at for at, (a, b) in enumerate(zip(answer, output, strict=True)) if a != b), len(answer))
        same, total = same + parted, total + len(answer)
    return same / max(1, total)


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_trial(files: ModelFiles, model: ModelSpec, spec: EngineSpec, workload: Workload) -> Trial:
    """Make an engine, let it pass over the workload once, and close it."""
    with closing(EngineSide(files, model, spec, workload)) as side:
        before, drafts = cpu_seconds(), side.engine.speculation_stats()
        run = side.run()
        after = side.engine.speculation_stats()
        brought = after.since(drafts) if after is not None and drafts is not None else after
        return Trial(run, cpu_seconds() - before, brought)


def measure_cell(
    at_once: int,
    workload: Workload,
    files: ModelFiles,
    model: ModelSpec,
    methods: Sequence[SpeculativeSpec],
    *,
    pairs: int,
    threads: int | None = None,
) -> list[list[Trial]]:
    """Trials of ``OFF`` and of each of ``methods``, ``pairs`` of each, that run so many rows at once."""
    longest = max(len(prompt) + new for prompt, new in zip(workload.prompts, workload.max_tokens, strict=True))
    sides: list[tuple[EngineSpec, list[Trial]]] = []
    for method in (OFF, *methods):
        draft = None if method.model is None else resolve(method.model)
        memory = kv_memory(files, model, at_once, longest, draft)
        options: dict[str, Any] = {"max_num_seqs": at_once, "kv_cache_memory": memory, "num_threads": threads or "auto"}
        sides.append((EngineSpec(**options, speculative_config=method), []))
    for spec, trials in chain.from_iterable(random.sample(sides, len(sides)) for _ in range(pairs)):
        trials.append(run_trial(files, model, spec, workload))
    return [trials for _, trials in sides]


def ratios(trials: Sequence[Trial], off: Sequence[Trial]) -> list[float]:
    """Of output tokens per second, round by round."""
    return [ours.rate / plain.rate for ours, plain in zip(trials, off, strict=True)]


def line(at_once: int, method: str, trials: Sequence[Trial], off: Sequence[Trial]) -> list[str]:
    """The method's row of the table."""
    cpu = median(ours.cpu_seconds / plain.cpu_seconds for ours, plain in zip(trials, off, strict=True))
    outputs = [list(map(tuple, trial.run.outputs)) for trial in (trials[0], off[0])]
    same = sum(ours == plain for ours, plain in zip(*outputs, strict=True))
    compared = [with_interval(ratios(trials, off)), *drafting(trials), f"{cpu:.2f}", f"{same:,} of {len(outputs[1]):,}"]
    rate = f"{median(trial.rate for trial in trials):,.1f}"
    return [f"{at_once}", method, rate, *(compared if trials is not off else [""] * len(compared))]


def drafting(trials: Sequence[Trial]) -> list[str]:
    """What became of drafts: the share of tokens that they took part in, tokens of each such forward, acceptance."""
    drafts = [trial.drafts for trial in trials if trial.drafts is not None]
    forwards, tokens = sum(each.forwards for each in drafts), sum(each.tokens for each in drafts)
    if not forwards:
        return ["0%", "", ""]
    accepted, drafted = sum(sum(each.accepted) for each in drafts), sum(sum(each.drafted) for each in drafts)
    share = tokens / sum(trial.run.output_tokens for trial in trials)
    return [f"{share:.0%}", f"{tokens / forwards:.2f}", f"{accepted / drafted:.0%}"]


def save_plot(path: Path, measured: Mapping[str, Ratios]) -> None:
    """Draw the ratios of each workload into a panel of its own."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(measured), 4), layout="constrained")
    panels = figure.subplots(1, len(measured), sharey=True, squeeze=False)[0]
    for axes, (name, methods) in zip(panels, measured.items(), strict=True):
        for method, cells in methods.items():
            middle = [median(pairs) for pairs in cells.values()]
            ends = [median_interval(pairs) or (min(pairs), max(pairs)) for pairs in cells.values()]
            errors = [[m - low for m, (low, _) in zip(middle, ends, strict=True)]]
            errors.append([high - m for m, (_, high) in zip(middle, ends, strict=True)])
            axes.errorbar(list(cells), middle, yerr=errors, marker="o", capsize=3, label=method)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(cells), [str(at_once) for at_once in cells])
        axes.set_xlabel("rows at once")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("output tokens/s, ratio to speculation off")
    panels[0].legend()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def pass_rows(at_once: int, args: argparse.Namespace) -> int:
    count: int = args.pass_rows or max(_LEAST_ROWS, _TURNS * at_once)
    return count


def show(
    rows: Rows, methods: dict[str, SpeculativeSpec], files: ModelFiles, model: ModelSpec, args: argparse.Namespace
) -> Ratios:
    """Measure all cells of one workload, printing each."""
    found: Ratios = {method: {} for method in methods}
    for at_once in args.rows:
        workload = rows.first(pass_rows(at_once, args))
        specs = list(methods.values())
        off, *others = measure_cell(at_once, workload, files, model, specs, pairs=args.pairs, threads=args.threads)
        print_row([rows.name, *line(at_once, "off", off, off)])
        for method, trials in zip(methods, others, strict=True):
            print_row([rows.name, *line(at_once, method, trials, off)])
            found[method][at_once] = ratios(trials, off)
        if rows.answers is not None:
            print(f"copied: {copied(rows, off[0].run.outputs):.0%} of output tokens", file=sys.stderr, flush=True)
    return found


def main() -> None:
    args = _arguments()
    if args.plot:
        check_plot(args.plot)
    model = ModelSpec(
        name_or_path=args.model, dtype=args.dtype, quantization=args.quantization, reproducible=args.reproducible
    )
    files = resolve(model.name_or_path)
    longest = resolve_max_model_len(files.config, model)
    args.rows = args.rows or [1, 4, 16, 64, 256]
    most = max(pass_rows(at_once, args) for at_once in args.rows)
    loads = [templated(Tokenizer.load(files), longest, most, args.temperature)]
    if args.file is not None:
        job = bench_job(args.file, (), args.model)
        free = read_workload(job, files, longest, limit=None, temperature=args.temperature, top_p=1)
        loads.append(Rows(args.file.stem, free))
    methods = {method: SpeculativeSpec(method=method) for method in args.method or METHODS}
    if args.draft is not None:
        methods["draft_model"] = SpeculativeSpec(method="draft_model", model=args.draft)
    print_row(["workload", *HEAD])
    print_row(["---"] * (1 + len(HEAD)))
    measured = {rows.name: show(rows, methods, files, model, args) for rows in loads}
    if args.plot:
        save_plot(args.plot, measured)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speculation", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="JSONL rows of `messages` or `prompt`, measured too")
    parser.add_argument("--rows", type=int, action="append", help="concurrent rows; 1, 4, 16, 64 and 256, if not given")
    parser.add_argument("--pass-rows", type=int, help="rows of a pass; twice as many as run at once, if not given")
    parser.add_argument("--pairs", type=int, default=7, help="passes of each method")
    parser.add_argument("--method", choices=METHODS, action="append", help="only this method beside off")
    parser.add_argument("--draft", metavar="MODEL", help="measure this draft model too")
    parser.add_argument("--model", default=DEMO_MODEL, help="model reference; the demo's, if not given")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    parser.add_argument("--quantization", default="dequantize", help="as model.quantization")
    parser.add_argument("--reproducible", action="store_true", help="as model.reproducible: all outputs are the same")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios into an .svg or .png file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
