"""What a job will take, before it takes it: rows, tokens, shared prefixes, KV memory, steps and time.

Tokenizes the rows, or as many of them as a time limit allows, with the job's own prompts, and walks the sorted
prompts as the engine will. Needs the model's configuration and tokenizer, not its weights, and no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from batchrun.data.rows import InputFile, PreparedRow, Row, Split
from batchrun.engine import memory, step_times
from batchrun.engine.scheduler import Limits
from batchrun.engine.step_times import StepTimes
from batchrun.job import JobSpec
from batchrun.models.families import model_config
from batchrun.preflight import Preflight, preflight
from batchrun.text import format_bytes, format_count, format_duration, table

_SAMPLE_SECONDS = 20.0
_SAMPLE_ROWS = 50_000  # what the engine orders at once
_CHUNK_ROWS = 256
_BAR = 40
_PROBE_SECONDS = 0.1
_PROBE_TRIES = 5  # at least, where others use the processor
_PROBE_SHAPE = (256, 1024, 1024)


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
    max_model_len: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_needed: int  # bytes, were all rows to run at once
    kv_budget: int | None  # bytes; None: known when the model loads
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
        budget = "what the GPU has left" if self.kv_budget is None else format_bytes(self.kv_budget)
        numbers = self.dtype if self.quantization == "none" else f"{self.dtype}, linear layers {self.quantization},"
        weights = f"{format_bytes(self.weight_bytes)} ({numbers} on {self.device})"
        per_token = f"{format_bytes(self.kv_bytes_per_token)} a token"
        lines = [
            ("prompts", f"{format_count(self.prompt_tokens)} tokens; {spread}"),
            ("prefixes", f"{self.prefix_share:.0%} of prompt tokens are shared and computed once"),
            ("output", f"at most {format_count(self.output_tokens)} tokens"),
            ("weights", weights),
            ("KV", f"{per_token}, {format_bytes(self.kv_needed)} for all rows at once, {budget} to use"),
            ("at once", f"{self.concurrent:,} sequences, {format_count(self.steps)} steps"),
        ]
        if self.seconds is not None:
            lines.append(("time", f"about {format_duration(self.seconds)}: {self.basis}"))
        return lines


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
    files = _rows_per_file(checked.inputs, splits)
    rows = sum(count for _, count in files)
    sample = _sample(checked, splits, min(rows, sample_rows), sample_seconds)
    good = [row for row in sample if row.error is None]
    errors: dict[str, int] = {}
    for row in sample:
        if row.error is not None:
            kind = row.error.partition(":")[0]
            errors[kind] = errors.get(kind, 0) + 1
    scale = rows / len(sample) if sample else 0.0
    notes = [
        f"{split.file.key}: only {split.n_rows:,} rows can be read: {split.error}" for split in splits if split.error
    ]
    if len(sample) < rows:
        notes.append("rows that are not in the sample are taken to be like those that are")
    if job.input.where is not None:
        notes.append("rows that input.where drops are counted among the rows")
    costs = _costs(checked, good, scale)
    return Plan(
        job=job.name,
        files=files,
        rows=rows,
        sampled_rows=len(sample),
        sampled_errors=errors,
        device=checked.device,
        dtype=checked.dtype,
        quantization=job.model.quantization,
        max_model_len=checked.max_model_len,
        kv_budget=checked.kv_budget,
        notes=notes,
        **costs,
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


def shared_tokens(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    """Prompt tokens that a prefix cache of whole blocks gives, were none ever evicted; the last token is computed."""
    children: dict[tuple[int, tuple[int, ...]], int] = {}
    hits = 0
    for ids in prompts:
        parent = 0
        usable = (len(ids) - 1) // block_size
        for block in range(len(ids) // block_size):
            key = (parent, tuple(ids[block * block_size : (block + 1) * block_size]))
            seen = children.get(key)
            if seen is not None and block < usable:
                hits += block_size
            parent = children.setdefault(key, len(children) + 1)
    return hits


@dataclass(frozen=True)
class _Work:
    """What rows ask of the engine. Tokens are of all rows that the prepared ones stand for."""

    rows: int
    prompt: int
    computed: int  # of the prompts: what the prefix cache does not give
    output: int
    prompt_pairs: float  # of a computed token and one that it attends to
    output_pairs: float
    output_reads: float  # pairs whose key and value come from memory: a shared beginning stays in the processor's cache
    concurrent: int  # sequences that run at once
    decode_steps: int
    steps: int


def _work(checked: Preflight, rows: Sequence[PreparedRow], scale: float, limits: Limits) -> _Work:
    """The work of prepared rows, each standing for ``scale`` of the job's, every one reaching its max_tokens."""
    engine = checked.job.engine
    lengths = [len(row.token_ids) for row in rows]
    outputs = [min(row.params.max_tokens, checked.max_model_len - len(row.token_ids)) for row in rows if row.params]
    hits = shared_tokens([row.token_ids for row in rows], engine.block_size) if engine.enable_prefix_caching else 0
    total, output, n = sum(lengths), sum(outputs), max(1, len(rows))
    n_rows = round(len(rows) * scale)
    per_token = memory.kv_bytes_per_token(checked.model.config, memory.DTYPE_BYTES[checked.dtype])
    own_tokens = max(1.0, (total - hits + output) / n)  # of a sequence, beside what it shares
    fitting = math.inf if checked.kv_budget is None else checked.kv_budget / per_token / own_tokens
    concurrent = max(1, int(min(limits.max_num_seqs, n_rows, fitting))) if n_rows else 0
    computed, generated = round((total - hits) * scale), round(output * scale)
    decode_steps = max(math.ceil(generated / max(1, concurrent)), max(outputs, default=0))
    return _Work(
        rows=n_rows,
        prompt=round(total * scale),
        computed=computed,
        output=generated,
        prompt_pairs=computed * (total + hits) / 2 / n,
        output_pairs=generated * (total + output / 2) / n,
        output_reads=generated * (total - hits + output / 2) / n,
        concurrent=concurrent,
        decode_steps=decode_steps,
        steps=max(decode_steps, math.ceil((computed + generated) / limits.max_num_batched_tokens)) if n_rows else 0,
    )


def _costs(checked: Preflight, rows: Sequence[PreparedRow], scale: float) -> dict[str, Any]:
    """The figures of :class:`Plan` that follow from prepared rows, each standing for ``scale`` of the job's."""
    config, width = checked.model.config, memory.DTYPE_BYTES[checked.dtype]
    times = _step_times(checked)
    limits = memory.resolve_limits(checked.job.engine, checked.device, times)
    work = _work(checked, rows, scale, limits)
    per_token = memory.kv_bytes_per_token(config, width)
    seconds, basis = None, "no measure of this device"
    if times is not None:
        seconds = _measured_seconds(checked, work, limits, times)
        basis = "steps of this model as they were measured here, and its attention worked out"
    elif checked.device == "cpu":
        seconds, basis = _roofline(checked, work)
    return {
        "prompts": TokenCounts.of([len(row.token_ids) for row in rows]) if rows else None,
        "prefix_share": 1 - work.computed / max(1, work.prompt),
        "prompt_tokens": work.prompt,
        "output_tokens": work.output,
        "weight_bytes": memory.weight_bytes(config, width, checked.job.model.quantization),
        "kv_bytes_per_token": per_token,
        "kv_needed": (work.computed + work.output) * per_token,
        "concurrent": work.concurrent,
        "steps": work.steps,
        "seconds": seconds,
        "basis": basis,
    }


def expect(checked: Preflight, rows: Sequence[PreparedRow], total: int) -> tuple[float, float] | None:
    """Tokens of a row and tokens in a second, of a run of ``total`` rows that are like ``rows``.

    Every row is taken to reach its max_tokens. None where nothing was measured that tells.
    """
    good = [row for row in rows if row.error is None]
    times = _step_times(checked)
    if not good or times is None:
        return None
    limits = memory.resolve_limits(checked.job.engine, checked.device, times)
    work = _work(checked, good, total / len(rows), limits)
    tokens = work.computed + work.output
    return tokens / total, tokens / _measured_seconds(checked, work, limits, times)


def _step_times(checked: Preflight) -> StepTimes | None:
    """What an engine on this processor measured of this model, if one ever did."""
    if checked.device != "cpu":
        return None
    job = checked.job
    return step_times.load(step_times.subject(job.model, job.engine, model_config(checked.model.config), checked.dtype))


def _measured_seconds(checked: Preflight, work: _Work, limits: Limits, times: StepTimes) -> float:
    """Seconds of the steps that will run: prompts in steps as full as can be, outputs in steps of all that run.

    To these, what was not measured: a token that attends to another takes 4 operations for each element of its query,
    at half the rate of the linear layers; outputs read keys and values from memory, which counts where it takes longer.
    """
    config = checked.model.config
    full = min(limits.max_num_batched_tokens, max(1, work.computed))
    decoding = work.output / max(1, work.decode_steps)
    steps = work.computed / full * times.seconds(full, 0) + work.decode_steps * times.seconds(decoding, decoding)
    flops = 4 * int(config["num_hidden_layers"]) * int(config["num_attention_heads"]) * memory.head_dim(config)
    largest = max(times.layers)
    flops_rate = memory.parameter_count(config)[0] * largest / times.layers[largest]  # half of it
    read = memory.kv_bytes_per_token(config, memory.DTYPE_BYTES[checked.dtype])
    prompts = work.prompt_pairs * flops / flops_rate
    outputs = max(work.output_pairs * flops / flops_rate, work.output_reads * read / _memory_rate())
    return steps + prompts + outputs


def _roofline(checked: Preflight, work: _Work) -> tuple[float, str]:
    """Seconds by the simplest roofline, and what it rests on.

    Each token multiplies by every matrix once and attends to those before it; each sampled token by the LM head; each
    step reads the weights once. The slower of arithmetic and memory counts.
    """
    config = checked.model.config
    matrices, _ = memory.parameter_count(config)
    head = int(config["vocab_size"]) * int(config["hidden_size"])
    attention = 2 * int(config["num_hidden_layers"]) * int(config["num_attention_heads"]) * memory.head_dim(config)
    pairs = work.prompt_pairs + work.output_pairs
    flops = 2 * ((work.computed + work.output) * matrices + attention * pairs + work.output * head)
    width = memory.DTYPE_BYTES[checked.dtype]
    weights = memory.weight_bytes(config, width, checked.job.model.quantization)
    flops_rate = _matmul_rate()
    seconds = max(flops / flops_rate, work.steps * weights / _memory_rate())
    basis = f"{format_count(flops)} FLOP at the {flops_rate / 1e9:,.0f} GFLOP/s of a float32 matmul measured here"
    return seconds, basis


def _matmul_rate() -> float:
    """This CPU's float32 matmul rate in FLOP/s, the best of about 0.1 s."""
    m, k, n = _PROBE_SHAPE
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    return 2 * m * k * n / _best(lambda: a @ b)


def _memory_rate() -> float:
    """This CPU's memory rate in bytes/s, the best of about 0.1 s."""
    big, target = np.ones(8 << 20, np.float32), np.zeros(8 << 20, np.float32)
    return 2 * big.nbytes / _best(lambda: np.copyto(target, big))


def _best(work: Any) -> float:
    times: list[float] = []
    end = time.perf_counter() + _PROBE_SECONDS
    while (start := time.perf_counter()) < end or len(times) < _PROBE_TRIES:
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _histogram(histogram: Sequence[tuple[int, int, int]]) -> str:
    most = max(count for *_, count in histogram)
    return table(
        [
            (f"{low:,} to {high - 1:,}", f"{count:,}", "#" * math.ceil(_BAR * count / most))
            for low, high, count in histogram
        ],
        indent="    ",
    )
