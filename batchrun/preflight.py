"""Everything that can be wrong with a job and be known before its model loads; ``validate``, ``plan`` and ``submit``
all begin here.

Reads the job's input as far as its schema and first rows, and of the model its configuration and tokenizer.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from batchrun.data.files import file_format
from batchrun.data.parts import Layout, check_columns
from batchrun.data.prompt import PromptBuilder
from batchrun.data.rows import InputFile, PreparedRow
from batchrun.data.source import Source
from batchrun.data.template import RowTemplate
from batchrun.engine import memory
from batchrun.errors import JobError
from batchrun.job import InputSpec, JobSpec, PromptSpec
from batchrun.model_files import ModelFiles, resolve
from batchrun.text import format_bytes, format_count, table
from batchrun.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preflight:
    """A job that passed every check, and what was learnt on the way."""

    job: JobSpec
    source: Source
    inputs: list[InputFile]
    columns: list[str] | None  # of the input, as far as is known; None: no row told any
    layout: Layout
    model: ModelFiles
    tokenizer: Tokenizer
    device: memory.Device
    dtype: str
    max_model_len: int
    kv_budget: int | None  # bytes; None: a GPU whose driver does not tell its memory

    def prompts(self) -> PromptBuilder:
        return PromptBuilder(self.job.prompt, self.job.sampling, self.tokenizer, self.max_model_len)

    def describe(self) -> str:
        """A few readable lines that say what the job was understood to be."""
        size = format_bytes(sum(file.size for file in self.inputs))
        skipped = f", {len(self.source.skipped)} passed over" if self.source.skipped else ""
        lines = [
            ("input", f"{len(self.inputs):,} files, {size}{skipped}"),
            ("columns", ", ".join(self.columns or ["none known"])),
            ("model", f"{self.model.reference} ({self.model.revision})"),
            ("runs as", f"{self.dtype} on {self.device}, up to {self.max_model_len:,} tokens a row"),
            ("output", f"{self.job.output.path} ({self.job.output.format})"),
        ]
        return f"{self.job.name}: valid\n{table(lines)}"

    def first_prompt(self) -> str:
        """The prompt of the first row, as the model will see it, with its token ids; or why there is none."""
        prepared = next(self._prepared(), None)
        if prepared is None:
            return "the input has no rows"
        if prepared.error is not None:
            return f"row {prepared.row}: {prepared.error}"
        text = self.tokenizer.decode(prepared.token_ids, skip_special_tokens=False)
        ids = " ".join(map(str, prepared.token_ids))
        return f"{text}\n\n{format_count(len(prepared.token_ids))} tokens: {ids}"

    def _prepared(self) -> Iterator[PreparedRow]:
        builder = self.prompts()
        for file in self.inputs:
            for split in self.source.splits([file]):
                for row in self.source.rows(split):
                    yield from builder.build([row])


def preflight(job: JobSpec) -> Preflight:
    """Check ``job`` in the order of what is cheapest to know. Raises JobError saying what is wrong and where."""
    layout = Layout.of(job)
    source = Source(job.input)
    inputs = source.files()
    _check_places(job, inputs)
    columns = source.schema_names(inputs)
    complete = _is_typed(job.input, inputs)
    if columns is not None:
        _check_prompt_columns(job, columns, complete)
    visible = [name for name in columns or [] if job.input.columns is None or name in job.input.columns]
    check_columns(layout, visible, complete=complete)

    model = resolve(job.model.name_or_path, job.model.revision, weights=False)
    tokenizer = Tokenizer.load(model)
    if (job.prompt.messages or job.prompt.messages_column) and tokenizer.chat_template is None:
        raise JobError(f"prompt: {model.reference} has no chat template; use prompt.template")
    device = memory.resolve_device(job.engine.device)
    dtype = memory.resolve_dtype(job.model.dtype, device)
    max_model_len = memory.resolve_max_model_len(model.config, job.model)
    return Preflight(
        job=job,
        source=source,
        inputs=inputs,
        columns=columns,
        layout=layout,
        model=model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_budget=_kv_budget(job, model, device, dtype, max_model_len),
    )


def _kv_budget(job: JobSpec, model: ModelFiles, device: memory.Device, dtype: str, max_model_len: int) -> int | None:
    width = memory.DTYPE_BYTES[dtype]
    weights = memory.weight_bytes(model.config, width)
    if device == "cpu":
        free = memory.available_memory() - weights
    elif (total := memory.gpu_memory()) is not None:
        free = int(total * job.engine.gpu_memory_utilization) - weights
    elif job.engine.kv_cache_memory == "auto":
        return None
    else:
        free = 0
    per_token = memory.kv_bytes_per_token(model.config, width)
    return memory.kv_budget(job.engine, device, bytes_per_token=per_token, max_model_len=max_model_len, free=free)


def _check_places(job: JobSpec, inputs: list[InputFile]) -> None:
    """The output must not lie where a later run would read it as input, nor the input where results go."""
    if job.input.format == "datasets":
        return
    output = _normal(job.output.path)
    paths = (job.input.path,) if isinstance(job.input.path, str) else job.input.path
    for path in [*paths, *(file.path for file in inputs)]:
        place = _normal(path.partition("**")[0])  # what a recursive pattern may reach
        if place == output or place.startswith(f"{output}/") or output.startswith(f"{place}/"):
            raise JobError(f"output.path: {job.output.path} and input.path: {path} must not lie within each other")


def _normal(path: str) -> str:
    """One spelling of a path or URL, for comparison."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        return f"{scheme}://{posixpath.normpath(rest)}"
    return str(Path(rest if separator else path).resolve())


def _is_typed(spec: InputSpec, inputs: list[InputFile]) -> bool:
    """Whether the columns that are known are all there can be."""
    return spec.format in ("parquet", "datasets") or all(file_format(file.path) == "parquet" for file in inputs)


def _check_prompt_columns(job: JobSpec, columns: list[str], complete: bool) -> None:
    """Every column that the prompt or an id needs has to be known; of JSONL, the first 100 lines of each file tell.

    Per-row sampling may be rare, so that only a schema can say that its column is not there.
    """
    wanted: list[tuple[str, str | None, bool]] = [
        (f"prompt.{form}", name, True) for form, name in _prompt_columns(job.prompt)
    ]
    wanted += [
        ("input.id_column", job.input.id_column, True),
        ("sampling.from_column", job.sampling.from_column, complete),
    ]
    faults = []
    for field, name, has_to_be_known in wanted:
        if name is None:
            continue
        if job.input.columns is not None and name not in job.input.columns:
            faults.append(f"{field}: column {name!r} is not among input.columns")
        elif has_to_be_known and name not in columns:
            close = get_close_matches(name, columns, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(columns)}"
            faults.append(f"{field}: column {name!r} is not in the input; {hint}")
    if faults:
        raise JobError("\n".join(faults))


def _prompt_columns(prompt: PromptSpec) -> Iterator[tuple[str, str]]:
    """The columns that every row must have, each with the field that names it."""
    for form in ("messages_column", "token_ids_column"):
        if (name := getattr(prompt, form)) is not None:
            yield form, name
    templates = [("template", prompt.template)] if prompt.template is not None else []
    templates += [(f"messages.{i}.content", message.content) for i, message in enumerate(prompt.messages or ())]
    for form, template in templates:
        for name in sorted(RowTemplate(template, f"prompt.{form}").columns - _optional(template)):
            yield form, name


def _optional(template: str) -> set[str]:
    """Names that a template tests with ``is defined`` or gives a ``default``: rows may lack them."""
    uses = SandboxedEnvironment().parse(template).find_all((nodes.Test, nodes.Filter))
    return {
        use.node.name
        for use in uses
        if isinstance(use, nodes.Test | nodes.Filter)
        and isinstance(use.node, nodes.Name)
        and use.name in ("defined", "undefined", "default", "d")
    }
