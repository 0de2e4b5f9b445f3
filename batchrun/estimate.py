"""What rows ask of an engine, and how long it takes: by steps as they were measured here, else by short probes.

A plan tells a job's time by it, and a run its first ETA. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchrun import probe
from batchrun.data.rows import PreparedRow
from batchrun.engine import memory
from batchrun.engine.scheduler import Limits
from batchrun.engine.step_times import StepTimes, find, subject
from batchrun.models.families import model_config
from batchrun.preflight import Preflight
from batchrun.text import format_count

_ATTENTION_SHARE = 0.5  # of the rate of linear layers, as was seen


@dataclass(frozen=True)
class Work:
    """What rows ask of the engine. Tokens are of all rows that the prepared ones stand for."""

    prompt: int
    computed: int  # of the prompts: what the prefix cache does not give
    output: int
    prompt_pairs: float  # of a computed token and one that it attends to
    output_pairs: float
    output_reads: float  # pairs whose key and value come from memory: a shared beginning stays in the processor's cache
    concurrent: int  # sequences that run at once
    decode_steps: int
    steps: int


@dataclass(frozen=True)
class Duration:
    """How long work takes, and what that is worked out from."""

    seconds: float | None  # None: no measure of the device
    basis: str


def kept_times(checked: Preflight) -> StepTimes | None:
    """What an engine on this processor measured of the job's model, if one ever did."""
    if checked.device != "cpu":
        return None
    job = checked.job
    model = checked.model
    of = subject(job.model, job.engine, model_config(model.config), checked.dtype, model.encodings)
    return next(iter(find(of)), None)


def work_of(checked: Preflight, rows: Sequence[PreparedRow], scale: float, limits: Limits) -> Work:
    """The work of prepared rows, each standing for ``scale`` of the job's, every one reaching its max_tokens."""
    engine = checked.job.engine
    lengths = [len(row.token_ids) for row in rows]
    outputs = [min(row.params.max_tokens, checked.max_model_len - len(row.token_ids)) for row in rows if row.params]
    # Rows whose prompts are scored compute all of them.
    sharing = [row.token_ids for row in rows if row.params is None or row.params.prompt_logprobs is None]
    hits = shared_tokens(sharing, engine.block_size) if engine.enable_prefix_caching else 0
    total, output, n = sum(lengths), sum(outputs), max(1, len(rows))
    n_rows = round(len(rows) * scale)
    own_tokens = max(1.0, (total - hits + output) / n)  # of a sequence, beside what it shares
    fitting = math.inf if checked.kv_budget is None else checked.kv_budget / checked.pool_bytes_per_token / own_tokens
    concurrent = max(1, int(min(limits.max_num_seqs, n_rows, fitting))) if n_rows else 0
    computed, generated = round((total - hits) * scale), round(output * scale)
    decode_steps = max(math.ceil(generated / max(1, concurrent)), max(outputs, default=0))
    return Work(
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


def duration(checked: Preflight, work: Work, limits: Limits, times: StepTimes | None) -> Duration:
    """How long ``work`` takes by ``times``; without them, on a CPU, by what it does in a probe."""
    if times is not None:
        basis = "steps of this model as they were measured here, and its attention worked out"
        return Duration(_by_steps(checked, work, limits, times), basis)
    if checked.device == "cpu":
        return _by_probes(checked, work)
    return Duration(None, "no measure of this device")


def expect(
    checked: Preflight, rows: Sequence[PreparedRow], total: int, limits: Limits, times: StepTimes | None
) -> tuple[float, float] | None:
    """Tokens of a row and tokens in a second, of a run of ``total`` rows that are like ``rows``.

    Every row is taken to reach its max_tokens. None where nothing was measured that tells.
    """
    good = [row for row in rows if row.error is None]
    if not good or times is None:
        return None
    work = work_of(checked, good, total / len(rows), limits)
    tokens = work.computed + work.output
    return tokens / total, tokens / _by_steps(checked, work, limits, times)


def _by_steps(checked: Preflight, work: Work, limits: Limits, times: StepTimes) -> float:
    """Seconds of the steps that will run: prompts in steps as full as can be, outputs in steps of all that run.

    To these, what was not measured: attention to earlier tokens. Outputs read their keys and values from memory, which
    counts where it takes longer.
    """
    config = checked.model.config
    full = min(limits.max_num_batched_tokens, max(1, work.computed))
    decoding = work.output / max(1, work.decode_steps)
    steps = work.computed / full * times.seconds(full, 0) + work.decode_steps * times.seconds(decoding, decoding)
    largest = max(times.layers)
    linear_rate = 2 * memory.parameter_count(config)[0] * largest / times.layers[largest]
    pair = _attention_flops(config) / (_ATTENTION_SHARE * linear_rate)
    read = checked.kv_bytes_per_token / times.memory_rate
    return steps + work.prompt_pairs * pair + max(work.output_pairs * pair, work.output_reads * read)


def _by_probes(checked: Preflight, work: Work) -> Duration:
    """Seconds by the simplest roofline.

    Each token multiplies by every matrix once and attends to those before it; each sampled token by the LM head; each
    step reads the weights once. The slower of arithmetic and memory counts.
    """
    config = checked.model.config
    matrices, _ = memory.parameter_count(config)
    head = int(config["vocab_size"]) * int(config["hidden_size"])
    linear = 2 * ((work.computed + work.output) * matrices + work.output * head)
    flops = linear + _attention_flops(config) * (work.prompt_pairs + work.output_pairs)
    width, quantization = memory.DTYPE_BYTES[checked.dtype], checked.job.model.quantization
    weights = memory.weight_bytes(checked.model, width, quantization, checked.device)
    rate = probe.matmul_rate()
    seconds = max(flops / rate, work.steps * weights / probe.memory_rate())
    basis = f"{format_count(flops)} FLOP at the {rate / 1e9:,.0f} GFLOP/s of a float32 matmul measured here"
    return Duration(seconds, basis)


def _attention_flops(config: Mapping[str, Any]) -> int:
    """FLOP of all layers for one token to attend to one: a product with its key and one with its value in each head."""
    return 4 * int(config["num_hidden_layers"]) * int(config["num_attention_heads"]) * memory.head_dim(config)
