"""What a job will take, before it takes it: rows, tokens, shared prefixes, KV memory, steps and time.

Tokenizes the rows, or as many of them as a time limit allows, with the job's own prompts, and walks the sorted
prompts as the engine will. Needs the model's configuration and tokenizer, not its weights, and no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from batchrun.data.rows import InputFile, PreparedRow, Row, Split
from batchrun.engine import memory
from batchrun.engine.limits import resolve_limits
from batchrun.estimate import duration, kept_times, work_of
from batchrun.job import JobSpec
from batchrun.preflight import Preflight, preflight
from batchrun.text import format_bytes, format_count, format_duration, table

_SAMPLE_SECONDS = 20.0
_SAMPLE_ROWS = 50_000  # what the engine orders at once
_CHUNK_ROWS = 256
_BAR = 40


@dataclass(frozen=True)
class TokenCounts:
    """Lengths of the sampled prompts, in tokens."""

    total: int
    mean: float
    smallest: int
    median: int
    p95: int
    largest: int
    histogram: list[tuple[int, int, int]]  # (from, to, prompts): from <= length < to

    @classmethod
    def of(cls, lengths: Sequence[int]) -> TokenCounts:
        """``lengths`` must not be empty. The histogram's edges are powers of two."""
        array = np.sort(np.asarray(lengths))
        edges = [1 << k for k in range(int(array[0]).bit_length() - 1, int(array[-1]).bit_length() + 1)]
        counts, _ = np.histogram(array, bins=edges)
        return cls(
            total=int(array.sum()),
            mean=float(array.mean()),
            smallest=int(array[0]),
            median=int(np.median(array)),
            p95=int(np.quantile(array, 0.95, method="higher")),
            largest=int(array[-1]),
            histogram=[(a, b, int(n)) for (a, b), n in zip(itertools.pairwise(edges), counts, strict=True)],
        )


@dataclass(frozen=True)
class Plan:
    """The plan of a job. Figures of the whole job are scaled up from the sample where it is not all of it."""

    job: str
    files: list[tuple[str, int]]  # (key, rows)
    rows: int  # before input.where; blank lines of JSONL included
    sampled_rows: int
    sampled_errors: dict[str, int]  # kind of row error -> sampled rows
    prompts: TokenCounts | None  # None: no sampled row has a prompt
    prefix_share: float  # of the prompt tokens, what the prefix cache will give, 0 to 1
    prompt_tokens: int  # of all rows
    output_tokens: int  # of all rows, were every one to reach its max_tokens
    device: str
    dtype: str
    quantization: str
    packed: bool  # whether the checkpoint is quantized, and stays so
    max_model_len: int
    weight_bytes: int
    draft: str | None  # reference of the draft model
    draft_weight_bytes: int
    draft_kv_bytes_per_token: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_needed: int  # bytes, the draft model's among them, were all rows to run at once
    kv_budget: int | None  # bytes; None: known when the model loads
    kv_blocks: int | None  # that the budget holds
    kv_tokens: int | None  # that these hold
    concurrent: int  # sequences that run at once
    steps: int
    seconds: float | None  # None: no measure of this device
    basis: str  # what the time is worked out from
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def describe(self) -> str:
        """A readable table, ending in the histogram of prompt lengths."""
        lines = [("rows", f"{self.rows:,} in {len(self.files):,} files"), ("sample", self._sample())]
        if self.prompts is not None:
            lines += self._costs(self.prompts)
        text = f"{self.job}: plan\n{table(lines)}"
        if self.prompts is not None:
            text += f"\n\n  prompt tokens\n{_histogram(self.prompts.histogram)}"
        return "\n".join([text, *(f"  note: {note}" for note in self.notes)])

    def _sample(self) -> str:
        errors = sum(self.sampled_errors.values())
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(self.sampled_errors.items()))
        return f"{self.sampled_rows:,} rows tokenized, {errors:,} errors{f' ({kinds})' if kinds else ''}"

    def _costs(self, prompts: TokenCounts) -> list[tuple[str, str]]:
        spread = f"{prompts.smallest:,} to {prompts.largest:,}, median {prompts.median:,}, 95% under {prompts.p95:,}"
        forms = {
            "none": " and packed integers" if self.packed else "",
            "dequantize": ", dequantized,",
            "auto": " or fewer, by quantization auto,",
        }
        form = forms.get(self.quantization, f", linear layers {self.quantization},")
        weights = f"{format_bytes(self.weight_bytes)} ({self.dtype}{form} on {self.device})"
        lines = [
            ("prompts", f"{format_count(self.prompt_tokens)} tokens; {spread}"),
            ("prefixes", f"{self.prefix_share:.0%} of prompt tokens are shared and computed once"),
            ("output", f"at most {format_count(self.output_tokens)} tokens"),
            ("weights", weights),
            ("KV", self._kv()),
            *([("draft", self._draft())] if self.draft is not None else []),
            ("at once", f"{self.concurrent:,} sequences, {format_count(self.steps)} steps"),
        ]
        if self.seconds is not None:
            lines.append(("time", f"about {format_duration(self.seconds)}, loading left out: {self.basis}"))
        return lines

    def _draft(self) -> str:
        weights, per_token = format_bytes(self.draft_weight_bytes), format_bytes(self.draft_kv_bytes_per_token)
        return f"{weights} of weights, and {per_token} a token in the same blocks: {self.draft}"

    def _kv(self) -> str:
        numbers = "" if self.kv_cache_dtype == "auto" else f" ({self.kv_cache_dtype})"
        room = "what the GPU has left"
        if self.kv_budget is not None:
            room = f"{format_bytes(self.kv_budget)} for {self.kv_tokens:,} tokens in {self.kv_blocks:,} blocks"
        per_token, needed = format_bytes(self.kv_bytes_per_token), format_bytes(self.kv_needed)
        return f"{per_token} a token{numbers}, {needed} for all rows at once, {room} to use"


def make_plan(
    job: JobSpec,
    *,
    limit: int | None = None,
    sample_rows: int = _SAMPLE_ROWS,
    sample_seconds: float = _SAMPLE_SECONDS,
) -> Plan:
    """Plan ``job``, or its first ``limit`` rows, from as many of them as ``sample_rows`` and ``sample_seconds`` allow.

    Raises JobError as :func:`~batchrun.preflight.preflight` does.
    """
    checked = preflight(job)
    splits = checked.source.splits(checked.inputs)
    if limit is not None:
        splits = _first_rows(checked, splits, limit)
    rows = sum(split.n_rows for split in splits)
    sample = _sample(checked, splits, min(rows, sample_rows), sample_seconds)
    notes = list(checked.warnings)
    notes += [
        f"{split.file.key}: only {split.n_rows:,} rows can be read: {split.error}" for split in splits if split.error
    ]
    if len(sample) < rows:
        notes.append("rows that are not in the sample are taken to be like those that are")
    if job.input.where is not None:
        notes.append("rows that input.where drops are counted among the rows")
    return _plan(checked, _rows_per_file(checked.inputs, splits), sample, notes)


def _plan(checked: Preflight, files: list[tuple[str, int]], sample: Sequence[PreparedRow], notes: list[str]) -> Plan:
    """The plan of ``files``, each with its rows, whose rows are like those of the sample."""
    job, width = checked.job, memory.DTYPE_BYTES[checked.dtype]
    rows = sum(count for _, count in files)
    good = [row for row in sample if row.error is None]
    times = kept_times(checked)
    limits = resolve_limits(job.engine, checked.device, times)
    work = work_of(checked, good, rows / len(sample) if sample else 0.0, limits)
    expected = duration(checked, work, limits, times)
    per_token, block_size = checked.pool_bytes_per_token, job.engine.block_size
    blocks = None if checked.kv_budget is None else checked.kv_budget // (per_token * block_size)
    return Plan(
        job=job.name,
        files=files,
        rows=rows,
        sampled_rows=len(sample),
        sampled_errors=dict(Counter(row.error.partition(":")[0] for row in sample if row.error is not None)),
        prompts=TokenCounts.of([len(row.token_ids) for row in good]) if good else None,
        prefix_share=1 - work.computed / max(1, work.prompt),
        prompt_tokens=work.prompt,
        output_tokens=work.output,
        device=checked.device,
        dtype=checked.dtype,
        quantization=job.model.quantization,
        packed=bool(checked.model.encodings) and job.model.quantization == "none",
        max_model_len=checked.max_model_len,
        weight_bytes=memory.weight_bytes(checked.model, width, job.model.quantization, checked.device),
        draft=None if checked.draft is None else checked.draft.reference,
        draft_weight_bytes=checked.draft_weight_bytes,
        draft_kv_bytes_per_token=per_token - checked.kv_bytes_per_token,
        kv_cache_dtype=job.model.kv_cache_dtype,
        kv_bytes_per_token=checked.kv_bytes_per_token,
        kv_needed=(work.computed + work.output) * per_token,
        kv_budget=checked.kv_budget,
        kv_blocks=blocks,
        kv_tokens=None if blocks is None else (blocks - memory.RESERVED_BLOCKS) * block_size,
        concurrent=work.concurrent,
        steps=work.steps,
        seconds=expected.seconds,
        basis=expected.basis,
        notes=notes,
    )


def _first_rows(checked: Preflight, splits: Sequence[Split], limit: int) -> list[Split]:
    """The splits up to the row with number ``limit``, the last of them cut there."""
    kept: list[Split] = []
    for split in splits:
        if limit <= 0:
            break
        kept.append(split if split.n_rows <= limit else checked.source.cut(split, limit)[0])
        limit -= split.n_rows
    return kept


def _rows_per_file(inputs: Sequence[InputFile], splits: Sequence[Split]) -> list[tuple[str, int]]:
    counts = dict.fromkeys((file.key for file in inputs), 0)
    for split in splits:
        counts[split.file.key] += split.n_rows
    return list(counts.items())


def _sample(checked: Preflight, splits: Sequence[Split], rows: int, seconds: float) -> list[PreparedRow]:
    """Prepared rows: all of them if they are few, else the first of each split in turn until time is up."""
    builder = checked.prompts()
    deadline = time.monotonic() + seconds
    prepared: list[PreparedRow] = []
    for chunk in _chunks(checked, splits, rows):
        prepared += builder.build(chunk)
        if time.monotonic() > deadline:
            break
    return prepared


def _chunks(checked: Preflight, splits: Sequence[Split], rows: int) -> Iterator[list[Row]]:
    """At most ``rows`` rows, the splits taking turns, with no more than 64 of them (evenly spaced) open."""
    spaced = splits[:: max(1, len(splits) // 64)]
    whole = sum(split.n_rows for split in splits) <= rows
    open_splits = [checked.source.rows(split) for split in (splits if whole else spaced)]
    while open_splits and rows > 0:
        for reader in list(open_splits):
            chunk = list(itertools.islice(reader, min(_CHUNK_ROWS, rows)))
            rows -= len(chunk)
            if chunk:
                yield chunk
            else:
                open_splits.remove(reader)


def _histogram(histogram: Sequence[tuple[int, int, int]]) -> str:
    most = max(count for *_, count in histogram)
    return table(
        [
            (f"{low:,} to {high - 1:,}", f"{count:,}", "#" * math.ceil(_BAR * count / most))
            for low, high, count in histogram
        ],
        indent="    ",
    )
