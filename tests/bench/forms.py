"""Tokens/s of each form of the linear layers by number of concurrent rows: ``python -m tests.bench.forms FILE``.

A cell is measured in passes that take turns, each of a freshly made engine under one form of ``model.quantization``;
the ratios are of paired passes, to plain numbers. What `auto` chooses for so many rows is printed beside them, and how
the pairs of that choice and of the fastest form compare.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from statistics import median

from batchrun.bench.engine_side import EngineSide
from batchrun.bench.workload import Workload, bench_job, read_workload
from batchrun.engine.memory import resolve_max_model_len
from batchrun.job import EngineSpec, ModelSpec, Quantization, SpeculativeSpec
from batchrun.model_files import ModelFiles, resolve
from tests.bench.scale import kv_memory, print_row, unshared_prompts, with_interval

PLAIN: Quantization = "dequantize"
FORMS: tuple[Quantization, ...] = (PLAIN, "int8", "none")  # the demo's model is stored in 4 bits
_PROMPT = 48  # tokens
_NEW, _NEW_TOGETHER = 32, 128  # tokens of each row, and of all rows, at least

Rates = dict[Quantization, list[float]]  # output tokens per second, of each pass


def measure_cell(
    rows: int, text: Sequence[int], files: ModelFiles, model: ModelSpec, pairs: int
) -> tuple[Quantization, Rates]:
    """What `auto` chooses for so many rows at once, and passes of each form, in an order that is drawn for each round.

    There is one engine at a time: OpenMP's workers sleep between operations where there are more than processors.
    """
    longest, new = resolve_max_model_len(files.config, model), max(_NEW, _NEW_TOGETHER // rows)
    workload = Workload(list(unshared_prompts(text, rows, _PROMPT)), [new] * rows, longest)
    memory = kv_memory(files, model, rows, _PROMPT + new)
    off = SpeculativeSpec(method="off")  # forms are compared, and drafts pay for some more than for others
    spec = EngineSpec(device="cpu", max_num_seqs=rows, kv_cache_memory=memory, speculative_config=off)

    def side(form: Quantization) -> EngineSide:
        return EngineSide(files, model.model_copy(update={"quantization": form}), spec, workload)

    with closing(side("auto")) as automatic:
        chosen = automatic.engine.model_spec.quantization
    rates: Rates = {form: [] for form in FORMS}
    for form in chain.from_iterable(random.sample(FORMS, len(FORMS)) for _ in range(pairs)):
        with closing(side(form)) as measured:
            run = measured.run()
        rates[form].append(run.output_tokens / run.seconds)
    return chosen, rates


def ratio(rates: Rates, form: Quantization, to: Quantization) -> str:
    return with_interval([a / b for a, b in zip(rates[form], rates[to], strict=True)])


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
        chosen, rates = measure_cell(rows, text, files, model, args.pairs)
        middle = {form: median(rates[form]) for form in FORMS}
        best = max(FORMS, key=lambda form: middle[form])
        print_row(
            [str(rows)]
            + [f"{middle[form]:,.1f}" for form in FORMS]
            + [ratio(rates, form, PLAIN) for form in FORMS if form != PLAIN]
            + [chosen, ratio(rates, chosen, best) if chosen != best else "the fastest"]
        )


if __name__ == "__main__":
    main()
