"""How often bfloat16 picks float32's most likely token, also transformers': ``python -m tests.bench.agreement FILE``.

Prompts of FILE (rows as ``batchrun bench`` takes them) are continued greedily by batchrun in float32. Then every side
reads prompt and continuation as they are, and its most likely token at each place of the continuation is compared with
float32's, and its log-probability of the continuation's token with float32's of the same. (What quantization costs,
``batchrun quality`` measures.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from batchrun import Engine, SamplingParams
from batchrun.bench.export import hugging_face_directory
from batchrun.bench.workload import bench_job, read_workload
from batchrun.engine.memory import resolve_max_model_len
from batchrun.model_files import ModelFiles, resolve

_SAY_EVERY = 30.0  # seconds between lines of progress


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its continuation."""

    ids: list[int]
    n_prompt: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a side finds at each place of all continuations: the most likely token, the log-probability of theirs."""

    most_likely: list[int]
    logprobs: list[float]

    @staticmethod
    def join(readings: Sequence[Reading]) -> Reading:
        return Reading(
            [i for each in readings for i in each.most_likely], [x for each in readings for x in each.logprobs]
        )


def continued(engine: Engine, prompts: Sequence[list[int]], count: int) -> list[Text]:
    """Every prompt with ``count`` greedy tokens, end of text or not."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    results = sorted(engine.generate(prompts, params), key=lambda result: result.index)
    return [Text([*prompt, *result.token_ids], len(prompt)) for prompt, result in zip(prompts, results, strict=True)]


def read_with_engine(engine: Engine, texts: Sequence[Text]) -> Reading:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    readings: list[Reading] = [Reading([], [])] * len(texts)
    for result in engine.generate([text.ids for text in texts], params):
        assert result.prompt_logprobs is not None, result.error
        places = result.prompt_logprobs[texts[result.index].n_prompt :]
        readings[result.index] = Reading([p.top[0][0] for p in places], [p.logprob or 0.0 for p in places])
    return Reading.join(readings)


def read_with_transformers(files: ModelFiles, dtype: str, texts: Sequence[Text]) -> Reading:
    """One text at a time; prints how far it is."""
    folder = hugging_face_directory(files, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    readings, said = [], time.monotonic()
    for done, text in enumerate(texts):
        if time.monotonic() - said > _SAY_EVERY:
            print(f"transformers {dtype}: {done} of {len(texts)} rows", flush=True)
            said = time.monotonic()
        targets = torch.tensor(text.ids[text.n_prompt :])
        with torch.inference_mode():
            logits = model(torch.tensor([text.ids[:-1]]), logits_to_keep=len(targets)).logits[0].float()
        chosen = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        readings.append(Reading(logits.argmax(-1).tolist(), chosen.tolist()))
    return Reading.join(readings)


def read_with_batchrun(files: ModelFiles, texts: Sequence[Text], **options: str) -> Reading:
    with closing(Engine(files, device="cpu", quantization="dequantize", **options)) as engine:
        return read_with_engine(engine, texts)


def report(name: str, reading: Reading, exact: Reading, seconds: float) -> None:
    same = sum(a == b for a, b in zip(reading.most_likely, exact.most_likely, strict=True))
    gap = max(abs(a - b) for a, b in zip(reading.logprobs, exact.logprobs, strict=True))
    count = len(exact.most_likely)
    print(
        f"{name}: {same / count:.2%} of {count:,} places, largest gap of log-probabilities {gap:.3f} ({seconds:.0f} s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.agreement", description=__doc__)
    parser.add_argument("file", type=Path, help="JSONL rows of `messages` or `prompt`")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--model", help="model reference; the demo's, if not given")
    args = parser.parse_args()
    job = bench_job(args.file, (), args.model)
    files = resolve(job.model.name_or_path, job.model.revision)
    longest = resolve_max_model_len(files.config, job.model)
    prompts = read_workload(job, files, longest, limit=args.rows, temperature=0, top_p=1).prompts
    with closing(Engine(files, device="cpu", dtype="float32", quantization="dequantize")) as engine:
        texts = continued(engine, prompts, args.tokens)
        exact = read_with_engine(engine, texts)
    sides: dict[str, Callable[[], Reading]] = {
        "batchrun bfloat16": lambda: read_with_batchrun(files, texts, dtype="bfloat16"),
        "transformers float32": lambda: read_with_transformers(files, "float32", texts),
        "transformers bfloat16": lambda: read_with_transformers(files, "bfloat16", texts),
    }
    for name, read in sides.items():
        start = time.monotonic()
        reading = read()
        report(name, reading, exact, time.monotonic() - start)


if __name__ == "__main__":
    main()
