"""Everything that can be wrong with a job and be known before its model loads; ``validate``, ``plan`` and ``submit``
all begin here.

Reads the job's input as far as its schema and first rows, and of the model its configuration, its tokenizer and the
headers of its weights. Writes nothing.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import fsspec

from batchrun.data.openai_batch import CHAT_URL, SHOWN_MODELS, BatchCheck, Tokens, shown
from batchrun.data.parts import Layout, check_columns
from batchrun.data.prompt import PromptBuilder
from batchrun.data.rows import InputFile, PreparedRow
from batchrun.data.source import SAMPLED_ROWS, Source
from batchrun.data.template import RowTemplate
from batchrun.engine import memory
from batchrun.engine.limits import resolve_limits
from batchrun.engine.speculation.draft_files import resolve_draft
from batchrun.errors import JobError, without_credentials
from batchrun.job import BATCH_FORMAT, JobSpec, PromptSpec
from batchrun.model_files import ModelFiles, resolve
from batchrun.models.families import model_config
from batchrun.text import format_bytes, format_count, table
from batchrun.tokenization.tokenizer import Tokenizer

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


@dataclass(frozen=True)
class Preflight:
    """A job that passed every check, and what was learnt on the way."""

    job: JobSpec
    source: Source
    inputs: list[InputFile]
    columns: list[str] | None  # of the input, as far as is known; None: no row told any
    layout: Layout
    model: ModelFiles
    draft: ModelFiles | None  # the draft model, if one is to draft
    tokenizer: Tokenizer
    device: memory.Device
    dtype: str
    max_model_len: int
    kv_budget: int | None  # bytes; None: a GPU whose driver does not tell its memory
    warnings: list[str]  # one line each: what may be meant, and is likely not

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the model's own keys and values."""
        return memory.kv_bytes_per_token(self.model.config, self.dtype, self.job.model.kv_cache_dtype)

    @property
    def pool_bytes_per_token(self) -> int:
        """Of these and of the draft model's."""
        return memory.pool_bytes_per_token(self.model, self.dtype, self.job.model.kv_cache_dtype, self.draft)

    @property
    def draft_weight_bytes(self) -> int:
        return _draft_weight_bytes(self.job, self.draft, self.device, self.dtype)

    def _drafter(self) -> str:
        return self.job.engine.speculative_config.drafter or "off"

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
            ("drafts", f"{self.draft.reference} ({self.draft.revision})" if self.draft else self._drafter()),
            ("runs as", f"{self.dtype} on {self.device}, up to {self.max_model_len:,} tokens a row"),
            ("output", f"{without_credentials(self.job.output.path)} ({self.job.output.format})"),
        ]
        warnings = "".join(f"\nwarning: {warning}" for warning in self.warnings)
        return f"{self.job.name}: valid\n{table(lines)}{warnings}"

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


class _Faults:
    """What is wrong with a job, gathered so that all of it is told at once."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._found: list[str] = []

    @contextmanager
    def about(self, field: str) -> Iterator[None]:
        """What is done within is about ``field``, and is left where it fails: what follows there needs what failed."""
        try:
            yield
        except JobError as error:
            self._found += [_with_field(line, field) for line in str(error).splitlines()]

    def raise_any(self) -> None:
        if self._found:
            raise JobError("\n".join(self._job.located(dict.fromkeys(self._found))))


def _with_field(message: str, field: str) -> str:
    """``message``, beginning with a field of the job: its own, or else ``field``."""
    own, separator, _ = message.partition(": ")
    return message if separator and own.partition(".")[0] in JobSpec.model_fields else f"{field}: {message}"


def preflight(job: JobSpec, *, to_run: bool = False) -> Preflight:
    """Check ``job``. Raises JobError with a line for each fault, saying what is wrong and where.

    What depends on something that is wrong is not looked at. Only where the job is ``to_run`` here has the device that
    it names to be here: a job for a GPU can be planned on a machine without one.
    """
    faults = _Faults(job)
    layout: Layout | None = None
    device: memory.Device | None = None
    draft: ModelFiles | None = None
    warnings: list[str] = []
    checks: list[BatchCheck] = []
    with faults.about("output"):
        layout = Layout.of(job)
    with faults.about("output.path"):
        _check_writable(job.output.path)
    with faults.about("input"):
        source = Source(job.input)
        inputs = source.files()
        with faults.about("output.path"):
            _check_places(job, inputs)
        if job.input.format == BATCH_FORMAT:
            checks = source.check_batch(inputs)
            warnings += _other_models(job, checks)
        columns = source.schema_names(inputs)
        if columns is not None:
            with faults.about("output"):
                _check_layout(job, layout, columns)
            warnings += _check_columns(job, source, columns, complete=source.is_typed(inputs))
            source.check_columns(inputs)
    with faults.about("engine.device"):
        device = _resolve_device(job, warnings, to_run=to_run)
        resolve_limits(job.engine, device)
    with faults.about("model.name_or_path"):
        model = resolve(job.model.name_or_path, job.model.revision, weights=False)
        with faults.about("model.name_or_path"):
            tokenizer = Tokenizer.load(model)
            with faults.about("engine.speculative_config.model"):
                draft = resolve_draft(job.engine.speculative_config, model, tokenizer, weights=False)
            _check_chat_template(job.prompt, checks, model, tokenizer)
            if layout is not None and layout.format == BATCH_FORMAT:
                layout = replace(layout, tokens=Tokens(tokenizer))
        model_config(model.config)
        if job.model.quantization in ("int8", "int4", "fp8") and model.encodings:
            warnings.append(f"model.quantization: {model.reference} is quantized, and is rounded again; none keeps it")
        max_model_len = memory.resolve_max_model_len(model.config, job.model)
        if device is not None:
            dtype = memory.resolve_dtype(job.model.dtype, device)
            kv_budget = _kv_budget(job, model, draft, device, dtype, max_model_len)
    faults.raise_any()
    assert layout is not None  # else there was a fault
    assert device is not None
    return Preflight(
        job=job,
        source=source,
        inputs=inputs,
        columns=columns,
        layout=layout,
        model=model,
        draft=draft,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_budget=kv_budget,
        warnings=job.located(warnings),
    )


def _resolve_device(job: JobSpec, warnings: list[str], *, to_run: bool) -> memory.Device:
    """The device that the job runs on; that it is not here is a warning where the job is not ``to_run`` here."""
    try:
        return memory.resolve_device(job.engine.device)
    except JobError as error:
        if to_run:
            raise
        warnings.append(str(error))
        return "cuda"  # the one that can be named and missing


def _other_models(job: JobSpec, checks: list[BatchCheck]) -> list[str]:
    """A warning where lines of an OpenAI batch file name other models than the job's: hosted ones, as a rule."""
    names = dict.fromkeys(name for check in checks for name in check.models if name != job.model.name_or_path)
    if not names:
        return []
    some = [*map(shown, list(names)[:SHOWN_MODELS]), *(["..."] if len(names) > SHOWN_MODELS else [])]
    return [f"input.path: lines name {', '.join(some)} as their model; model.name_or_path answers them all"]


def _check_chat_template(prompt: PromptSpec, checks: list[BatchCheck], model: ModelFiles, tokenizer: Tokenizer) -> None:
    if tokenizer.chat_template is not None:
        return
    if prompt.messages or prompt.messages_column:
        raise JobError(f"prompt: {model.reference} has no chat template; use prompt.template")
    if any(check.has_chats for check in checks):
        raise JobError(f"input.path: {model.reference} has no chat template, which lines for {CHAT_URL} need")


def _draft_weight_bytes(job: JobSpec, draft: ModelFiles | None, device: memory.Device, dtype: str) -> int:
    if draft is None:
        return 0
    quantization = job.engine.speculative_config.quantization
    return memory.weight_bytes(draft, memory.DTYPE_BYTES[dtype], quantization, device)


def _kv_budget(
    job: JobSpec, model: ModelFiles, draft: ModelFiles | None, device: memory.Device, dtype: str, max_model_len: int
) -> int | None:
    weights = memory.weight_bytes(model, memory.DTYPE_BYTES[dtype], job.model.quantization, device)
    weights += _draft_weight_bytes(job, draft, device, dtype)
    if device == "cpu":
        free = memory.available_memory() - weights
    elif (total := memory.gpu_memory()) is not None:
        free = int(total * job.engine.gpu_memory_utilization) - weights
    elif job.engine.kv_cache_memory == "auto":
        return None
    else:
        free = 0
    per_token = memory.pool_bytes_per_token(model, dtype, job.model.kv_cache_dtype, draft)
    return memory.kv_budget(job.engine, device, bytes_per_token=per_token, max_model_len=max_model_len, free=free)


def _check_writable(path: str) -> None:
    """A local output has to be a directory that can be written, or be made; a far one of a kind that is known here."""
    scheme, separator, rest = path.partition("://")
    if (separator and scheme != "file") or "::" in path:
        _check_protocol(path)
        return
    place = Path(rest if separator else path).absolute()
    found = next(parent for parent in (place, *place.parents) if os.path.lexists(parent))
    if not found.exists():
        reason = f"{found} is a link that leads nowhere"
    elif not found.is_dir():
        reason = f"{found} is no directory"
    elif not os.access(found, os.W_OK | os.X_OK):
        reason = f"{found} is read-only"
    else:
        return
    raise JobError(f"{path} cannot be written: {reason}")


def _check_protocol(path: str) -> None:
    for scheme in (fsspec.core.split_protocol(path)[0] or "").split("::"):
        if scheme == "memory":
            raise JobError(f"{path} is in the memory of one process: results would be gone with it")
        try:
            fsspec.get_filesystem_class(scheme)
        except (ValueError, ImportError) as error:
            extra = _EXTRAS.get(scheme)
            hint = f"; pip install 'batchrun-llm[{extra}]'" if extra else ""
            raise JobError(f"{path}: {error}{hint}") from None


def _check_places(job: JobSpec, inputs: list[InputFile]) -> None:
    """The output must not lie where a later run would read it as input, nor the input where results go."""
    if job.input.format == "datasets":
        return
    output = _normal(job.output.path)
    paths = (job.input.path,) if isinstance(job.input.path, str) else job.input.path
    for path in [*paths, *(file.path for file in inputs)]:
        place = _normal(path.partition("**")[0])  # what a recursive pattern may reach
        if place == output or place.startswith(f"{output}/") or output.startswith(f"{place}/"):
            raise JobError(f"{job.output.path} and input.path: {path} must not lie within each other")


def _normal(path: str) -> str:
    """One spelling of a path or URL, for comparison."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        return f"{scheme}://{posixpath.normpath(rest)}"
    return os.path.realpath(rest if separator else path)


def _check_layout(job: JobSpec, layout: Layout | None, columns: list[str]) -> None:
    if layout is not None:
        check_columns(layout, [name for name in columns if job.input.columns is None or name in job.input.columns])


def _check_columns(job: JobSpec, source: Source, columns: list[str], *, complete: bool) -> list[str]:
    """Every column that the job names has to be known; of JSONL, the first lines of each file tell.

    Returns warnings: what few rows may have and none of those lines has. ``complete``: there are no more columns.
    """
    faults, warnings = [], []
    for field, name, is_rare in _named_columns(job, source):
        if job.input.columns is not None and name not in job.input.columns and field != "input.where":
            faults.append(f"{field}: column {name!r} is not among input.columns")
        elif name not in columns and is_rare and not complete:
            warnings.append(f"{field}: column {name!r} is in none of the first {SAMPLED_ROWS} lines of any file")
        elif name not in columns:
            close = get_close_matches(name, columns, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(columns)}"
            faults.append(f"{field}: column {name!r} is not in the input; {hint}")
    if faults:
        raise JobError("\n".join(faults))
    return warnings


def _named_columns(job: JobSpec, source: Source) -> Iterator[tuple[str, str, bool]]:
    """Each column that the job names, with the field that does, and whether few rows may have it."""
    for field, name in _prompt_columns(job.prompt):
        yield f"prompt.{field}", name, False
    if job.input.id_column is not None:
        yield "input.id_column", job.input.id_column, False
    for name in source.where_columns:
        yield "input.where", name, False
    if not isinstance(job.output.keep_columns, bool):
        for name in job.output.keep_columns:
            yield "output.keep_columns", name, False
    for name in job.input.columns or ():
        yield "input.columns", name, False
    if job.sampling.from_column is not None:
        yield "sampling.from_column", job.sampling.from_column, True


def _prompt_columns(prompt: PromptSpec) -> Iterator[tuple[str, str]]:
    """The columns that every row must have, each with the key that names it."""
    for form in ("messages_column", "token_ids_column"):
        if (name := getattr(prompt, form)) is not None:
            yield form, name
    templates = [("template", prompt.template)] if prompt.template is not None else []
    templates += [(f"messages.{i}.content", message.content) for i, message in enumerate(prompt.messages or ())]
    for key, template in templates:
        for name in sorted(RowTemplate(template, f"prompt.{key}").required):
            yield key, name
