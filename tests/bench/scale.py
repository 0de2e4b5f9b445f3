"""Tokens/s by number of concurrent rows and by length of prompt: ``python -m tests.bench.scale FILE [options]``.

The prompts of FILE (rows as ``batchrun bench`` takes them) are joined and cut into prompts of one length that do not
begin alike, so that nothing is shared. Each cell of the table is measured by both sides, freshly loaded, in passes that
take turns, and printed when it is done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from batchrun.bench import measure
from batchrun.bench.peers import PEERS
from batchrun.bench.report import Measured, Report, median_interval
from batchrun.bench.workload import Workload, bench_job, read_workload
from batchrun.engine.memory import (
    DTYPE_BYTES,
    kv_bytes_per_token,
    pool_bytes_per_token,
    resolve_max_model_len,
    sequence_bytes,
)
from batchrun.errors import BatchrunError
from batchrun.job import EngineSpec, ModelSpec
from batchrun.model_files import ModelFiles, resolve

_BLOCK = EngineSpec().block_size
_TOKENS = 50_000  # of a cell's passes together: short passes are repeated, at most `_MOST_PAIRS` times
_MOST_PAIRS = 5
HEAD = ("rows", "prompt", "new", "batchrun tok/s", "total", "{peer} tok/s", "total", "ratio", "least", "passes")


@dataclass(frozen=True, slots=True)
class Cell:
    """So many rows at once, each with a prompt of so many tokens, generate so many."""

    rows: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt + self.new)


PARTS = {
    "rows": [Cell(rows, 100, 64) for rows in (1, 4, 16, 64, 256, 1024)],
    "prompts": [Cell(rows, prompt, 16) for rows in (1, 16) for prompt in (256, 1024, 4096, 7936)],
}


def unshared_prompts(text: Sequence[int], rows: int, length: int) -> Iterator[list[int]]:
    """``rows`` cuts of ``text``, a ring of token ids, from places spread over it; no two begin with the same block.

    Raises ValueError where the text repeats itself too much for that.
    """
    if length > len(text):
        raise ValueError(f"{len(text):,} tokens of text are too few for prompts of {length:,}")
    ring = [*text, *text[: length + len(text) // rows]]
    taken: set[tuple[int, ...]] = set()
    for row in range(rows):
        for at in range(row * len(text) // rows, (row + 1) * len(text) // rows):
            beginning = tuple(ring[at : at + min(length, _BLOCK)])
            if beginning not in taken:
                break
        else:
            raise ValueError(f"{len(text):,} tokens of text are too few for {rows:,} prompts that do not begin alike")
        taken.add(beginning)
        yield ring[at : at + length]


def kv_memory(files: ModelFiles, model: ModelSpec, rows: int, tokens: int, draft: ModelFiles | None = None) -> int:
    """Bytes of KV that hold so many rows of so many tokens at once, and one that is as long as the model allows."""
    longest = resolve_max_model_len(files.config, model)
    per_token = pool_bytes_per_token(files, model.dtype, model.kv_cache_dtype, draft)
    row, whole = (sequence_bytes(length, bytes_per_token=per_token, block_size=_BLOCK) for length in (tokens, longest))
    return max(rows * row, whole)


def with_interval(ratios: Sequence[float]) -> str:
    """The median of paired passes' ratios, and its 95% interval where they are enough for one."""
    interval = median_interval(ratios)
    return f"{median(ratios):.2f}" + (" ({:.2f} to {:.2f})".format(*interval) if interval else "")


def run_cell(
    cell: Cell, text: Sequence[int], files: ModelFiles, model: ModelSpec, args: argparse.Namespace
) -> tuple[Report, int]:
    """Measure one cell; batchrun is told to run all rows at once, with KV memory for them."""
    longest = resolve_max_model_len(files.config, model)
    prompts = list(unshared_prompts(text, cell.rows, cell.prompt))
    workload = Workload(prompts, [cell.new] * cell.rows, longest)
    held = max(cell.tokens + cell.rows * _BLOCK, longest) + 2 * _BLOCK
    memory = held * kv_bytes_per_token(files.config, model.dtype, model.kv_cache_dtype)
    engine = EngineSpec(
        device="cpu", max_num_seqs=cell.rows, kv_cache_memory=memory, num_threads=args.threads or "auto"
    )
    pairs = args.pairs or min(_MOST_PAIRS, max(1, _TOKENS // cell.tokens))
    return measure(files, model, engine, workload, args.against, args.peer_python, pairs=pairs), pairs


def line(cell: Cell, report: Report) -> list[str]:
    """The cell's row of the table."""

    def figures(side: Measured) -> list[str]:
        summary = side.summary(report.workload)
        return [f"{summary['output_rate']:,.1f}", f"{summary['total_rate']:,.0f}"]

    sides = [figures(side) for side in report.measured]
    ratio = report.ratio()
    compared = [f"{ratio['median']:.2f}", f"{min(ratio['pairs']):.2f}"] if ratio else ["", ""]
    shape = [f"{number:,}" for number in (cell.rows, cell.prompt, cell.new)]
    return [*shape, *sides[0], *(sides[1] if len(sides) > 1 else ["", ""]), *compared]


def show_cell(cell: Cell, text: Sequence[int], files: ModelFiles, model: ModelSpec, args: argparse.Namespace) -> None:
    """Measure one cell and print its row of the table, and on standard error all else there is to say of it."""
    try:
        report, pairs = run_cell(cell, text, files, model, args)
    except (BatchrunError, ValueError) as error:
        print(f"{cell}: {error}", file=sys.stderr, flush=True)
        return
    print_row([*line(cell, report), str(pairs)])
    for remark in [f"{each.side.name}: {each.side.settings}" for each in report.measured] + report.notes:
        print(f"{cell}: {remark}", file=sys.stderr, flush=True)


def print_row(values: Sequence[str]) -> None:
    print("| " + " | ".join(values) + " |", flush=True)


def main() -> None:
    args = _arguments()
    job = bench_job(args.file, (), args.model)
    model = job.model.model_copy(update={"dtype": args.dtype})
    files = resolve(model.name_or_path, model.revision)
    longest = resolve_max_model_len(files.config, model)
    rows = read_workload(job, files, longest, limit=None, temperature=0, top_p=1)
    text = list(chain.from_iterable(rows.prompts))
    print_row([name.format(peer=args.against or "peer") for name in HEAD])
    print_row(["---"] * len(HEAD))
    for cell in chain.from_iterable(PARTS[part] for part in args.part or PARTS):
        if not args.only or f"{cell.rows}x{cell.prompt}" in args.only:
            show_cell(cell, text, files, model, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("file", type=Path, help="JSONL rows of `messages` or `prompt`: the text")
    parser.add_argument("--part", choices=PARTS, action="append", help="one part of the table; both, if not given")
    parser.add_argument("--only", metavar="ROWSxPROMPT", action="append", help="only this cell, such as 64x100")
    parser.add_argument("--against", choices=PEERS, help="measure this peer too")
    parser.add_argument("--peer-python", metavar="PATH", default=sys.executable, help="the Python that has the peer")
    parser.add_argument("--pairs", type=int, help=f"passes of each side; up to {_MOST_PAIRS}, if not given")
    parser.add_argument("--model", help="model reference; the demo's, if not given")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="float32")
    parser.add_argument("--threads", type=int, help="CPU threads, of both sides")
    return parser.parse_args()


if __name__ == "__main__":
    main()
