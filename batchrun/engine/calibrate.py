"""Measures how long a step takes by its size: a few seconds, once for a processor and a model.

Results do not depend on it: it runs the decoder's layers on numbers and a KV cache of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from time import perf_counter

import torch
from torch import Tensor

from batchrun.engine.executor import use_threads
from batchrun.engine.step_times import StepTimes, Subject, load
from batchrun.models.decoder import Decoder
from batchrun.numerics import describe_operations
from batchrun.ops.attention_batch import AttentionBatch

SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens of a step
HEAD_SIZES = (16, 64, 128, 256, 512, 1024)  # rows of logits
_ROUNDS = 4
_LAYER_SECONDS = 2.0
_HEAD_SECONDS = 1.0

logger = logging.getLogger(__name__)


def step_times(decoder: Decoder, subject: Subject, num_threads: int | None) -> StepTimes:
    """The times of a decoder on the CPU: those kept for ``subject``, or new ones, which are kept.

    Measures in a thread of its own that computes with ``num_threads`` as the executor's will.
    """
    with ThreadPoolExecutor(1, initializer=use_threads, initargs=(num_threads,)) as thread:
        return thread.submit(_step_times, decoder, subject).result()


def _step_times(decoder: Decoder, subject: Subject) -> StepTimes:
    operations, threads = describe_operations(decoder.ops, "cpu"), torch.get_num_threads()
    kept = load(subject)
    if kept is not None and (kept.operations, kept.threads) == (operations, threads):
        return kept
    logger.info("measuring how long a step takes here, once for this model")
    layer, head = measure(decoder)
    times = StepTimes(
        subject=subject,
        operations=operations,
        threads=threads,
        layers={size: seconds * len(decoder.layers) for size, seconds in layer.items()},
        head=head,
    )
    times.save()
    return times


@torch.inference_mode()
def measure(decoder: Decoder) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of one layer by tokens, and of the output projection by rows."""
    random = torch.Generator().manual_seed(0)
    row = torch.randn(decoder.config.hidden_size, generator=random).to(decoder.norm.dtype)
    hidden, residual = (row.repeat(max(SIZES), 1) for _ in range(2))
    head = {size: partial(decoder.logits, hidden[:size]) for size in HEAD_SIZES}
    return (
        _least_seconds(_layer_work(decoder, hidden, residual), _LAYER_SECONDS),
        _least_seconds(head, _HEAD_SECONDS),
    )


def _layer_work(decoder: Decoder, hidden: Tensor, residual: Tensor) -> dict[int, Callable[[], Tensor]]:
    """Calls that each run a layer on so many tokens, every one of them a sequence of its own that sees itself alone.

    They take the layers in turn, so that weights are as far from the processor as they are in a step.
    """
    layers = cycle(decoder.layers)
    shape = (max(SIZES) + 1, decoder.config.n_kv_heads, 1, decoder.config.head_dim)  # blocks of one token
    keys, values = (torch.zeros(shape, dtype=hidden.dtype) for _ in range(2))

    def work(size: int) -> Callable[[], Tensor]:
        blocks = torch.arange(1, size + 1)
        batch = AttentionBatch(
            cu_q=torch.arange(size + 1, dtype=torch.int32),
            kv_len=torch.ones(size, dtype=torch.int32),
            block_table=blocks[:, None].int(),
            slots=blocks,
        )
        tokens = (hidden[:size], residual[:size], torch.zeros(size, dtype=torch.int64))
        return lambda: decoder.run_layer(next(layers), decoder.norm, *tokens, batch, keys, values)

    return {size: work(size) for size in SIZES}


def _least_seconds(works: Mapping[int, Callable[[], object]], seconds: float) -> dict[int, float]:
    """The least time of each of ``works``, which are in ascending order of their size, in rounds over all of them.

    Takes about ``seconds``: a size that is expected to take more than its share, and those above it, are left out.
    """
    least: dict[int, float] = {}
    share = seconds / (2 * _ROUNDS)  # sizes double, so that a round takes twice its largest
    end = perf_counter() + seconds
    for _ in range(_ROUNDS):
        expected = 0.0
        for size, work in works.items():
            expected = least.get(size, expected)
            now = perf_counter()
            if expected > share or now + expected > end:
                break
            work()
            least[size] = min(least.get(size, math.inf), perf_counter() - now)
            expected = 2 * least[size]
    return least
