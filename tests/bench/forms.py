"""Tokens/s of each form of the linear layers by number of concurrent rows: ``python -m tests.bench.forms FILE``.

A cell is measured by one engine for each form of ``model.quantization``, all loaded before, in passes that take turns;
the ratios are of paired passes, to plain numbers. What `auto` chooses for so many rows is printed beside them, and how
the pairs of that choice and of the fastest form compare.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median

from batchrun.bench.engine_side import EngineSide
from batchrun.bench.report import Measured
from batchrun.bench.workload import Workload, bench_job, read_workload
from batchrun.engine.fastest_form import fastest
from batchrun.engine.memory import resolve_max_model_len
from batchrun.job import EngineSpec, ModelSpec, Quantization, SpeculativeSpec
from batchrun.model_files import ModelFiles, resolve
from tests.bench.scale import kv_memory, print_row, unshared_prompts, with_interval

PLAIN: Quantization = "dequantize"
FORMS: tuple[Quantization, ...] = (PLAIN, "int8", "none")  # the demo's model is stored in 4 bits
_PROMPT, _NEW = 48, 32  # tokens


def measure_cell(
    rows: int, text: Sequence[int], files: ModelFiles, model: ModelSpec, pairs: int
) -> dict[Quantization, Measured]:
    """Passes of engines that run so many rows at once, by turns in an order that is drawn for each round."""
    longest = resolve_max_model_len(files.config, model)
    workload = Workload(list(unshared_prompts(text, rows, _PROMPT)), [_NEW] * rows, longest)
    memory = kv_memory(files, model, rows, _PROMPT + _NEW)
    off = SpeculativeSpec(method="off")  # later passes would draft what earlier ones generated
    spec = EngineSpec(device="cpu", max_num_seqs=rows, kv_cache_memory=memory, speculative_config=off)
    with ExitStack() as stack:
        measured = {}
        for form in FORMS:
            side = EngineSide(files, model.model_copy(update={"quantization": form}), spec, workload)
            stack.callback(side.close)
            measured[form] = Measured(side)
            side.run()  # does not count
        for each in chain.from_iterable(random.sample(list(measured.values()), len(FORMS)) for _ in range(pairs)):
            each.passes.append(each.side.run())
    return measured


def ratio(measured: Mapping[Quantization, Measured], form: Quantization, to: Quantization) -> str:
    return with_interval([a / b for a, b in zip(measured[form].rates(), measured[to].rates(), strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.forms", description=__doc__)
    parser.add_argument("file", type=Path, help="JSONL rows of `messages` or `prompt`: the text")
    parser.add_argument("--rows", type=int, action="append", help="concurrent rows; 1, 16, 64 and 256, if not given")
    parser.add_argument("--pairs", type=int, default=7, help="passes of each form")
    parser.add_argument("--model", help="model reference; the demo's, if not given")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    job = bench_job(args.file, (), args.model)
    model = job.model.model_copy(update={"dtype": args.dtype, "max_model_len": 512})
    files = resolve(model.name_or_path, model.revision)
    workload = read_workload(job, files, resolve_max_model_len(files.config, model), limit=None, temperature=0, top_p=1)
    text = list(chain.from_iterable(workload.prompts))
    ratios = [f"{form} / {PLAIN}" for form in FORMS if form != PLAIN]
    print_row(["rows", *(f"{form} tok/s" for form in FORMS), *ratios, "auto", "auto / fastest"])
    print_row(["---"] * (4 + len(FORMS) + len(ratios) - 1))
    for rows in args.rows or (1, 16, 64, 256):
        chosen = fastest(files, model, EngineSpec(max_num_seqs=rows), "cpu", args.dtype).form
        measured = measure_cell(rows, text, files, model, args.pairs)
        rates = {form: median(each.rates()) for form, each in measured.items()}
        best = max(rates, key=lambda form: rates[form])
        print_row(
            [str(rows)]
            + [f"{rates[form]:,.1f}" for form in FORMS]
            + [ratio(measured, form, PLAIN) for form in FORMS if form != PLAIN]
            + [chosen, ratio(measured, chosen, best) if chosen != best else "the fastest"]
        )


if __name__ == "__main__":
    main()
