"""Measures how long a step takes by its size: a few seconds, at most once a week for a model and a processor.

Results do not depend on it: it runs the decoder's layers on numbers and a KV cache of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from batchrun.engine.limits import logits_fit
from batchrun.engine.step_times import StepTimes, Subject, find
from batchrun.models.decoder import Decoder
from batchrun.numerics import describe_operations
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.probe import memory_rate

SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens of a step
HEAD_SIZES = (16, 64, 128, 256, 512, 1024)  # rows of logits
_TRUSTED_SECONDS = 7 * 86400  # how long a measurement stands alone
_ROUNDS = 4
_BLOCK_SIZE = 2  # tokens: the fewest that the kernels take in any dtype
_LAYER_SECONDS = 2.0
_HEAD_SECONDS = 1.0

logger = logging.getLogger(__name__)


def calibrated(decoder: Decoder, subject: Subject) -> StepTimes:
    """The times of a decoder on the CPU: those kept for ``subject``, or new ones, which are kept.

    Others may have used the processor in the meantime: what was kept for a week is measured again, and of each time
    the faster holds. Measures with as many threads as the calling one computes with, which have to be the executor's.
    """
    operations, threads = describe_operations(decoder.ops, "cpu"), torch.get_num_threads()
    kept = next((times for times in find(subject) if (times.operations, times.threads) == (operations, threads)), None)
    now = time.time()
    if kept is not None and now - kept.measured_at < _TRUSTED_SECONDS:
        return kept
    logger.info("measuring how long steps of this model take here")
    layer, head = measure(decoder)
    times = StepTimes(
        subject=subject,
        operations=operations,
        threads=threads,
        measured_at=now,
        vocab_size=decoder.config.vocab_size,
        layers={size: seconds * len(decoder.layers) for size, seconds in layer.items()},
        head=head,
        memory_rate=memory_rate(),
    )
    if kept is not None:
        times = times.merged(kept)
    times.save()
    return times


@torch.inference_mode()
def measure(decoder: Decoder) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of one layer by tokens, and of the output projection by rows."""
    random = torch.Generator().manual_seed(0)
    row = torch.randn(decoder.config.hidden_size, generator=random).to(decoder.norm.dtype)
    hidden, residual = (row.repeat(max(SIZES), 1) for _ in range(2))
    sizes = [size for size in HEAD_SIZES if logits_fit(size, decoder.config.vocab_size)]
    room = torch.empty((max(sizes), decoder.config.vocab_size), dtype=torch.float32)
    head = {size: partial(decoder.logits, hidden[:size], room[:size]) for size in sizes}
    return (
        _least_seconds(_layer_work(decoder, hidden, residual), _LAYER_SECONDS),
        _least_seconds(head, _HEAD_SECONDS),
    )


def _layer_work(decoder: Decoder, hidden: Tensor, residual: Tensor) -> dict[int, Callable[[], Tensor]]:
    """Calls that each run a layer on so many tokens, every one of them a sequence of its own that sees itself alone.

    They take the layers in turn, so that weights are as far from the processor as they are in a step.
    """
    layers = cycle(decoder.layers)
    cache = decoder.new_cache(max(SIZES) + 1, _BLOCK_SIZE, hidden.device)

    def work(size: int) -> Callable[[], Tensor]:
        blocks = torch.arange(1, size + 1)
        batch = AttentionBatch(
            cu_q=torch.arange(size + 1, dtype=torch.int32),
            kv_len=torch.ones(size, dtype=torch.int32),
            block_table=blocks[:, None].int(),
            slots=blocks * _BLOCK_SIZE,
        )
        tokens = (hidden[:size], residual[:size], torch.zeros(size, dtype=torch.int64))
        return lambda: decoder.run_layer(next(layers), decoder.norm, *tokens, batch, cache)

    return {size: work(size) for size in SIZES}


def _least_seconds(works: Mapping[int, Callable[[], object]], seconds: float) -> dict[int, float]:
    """The least time of each of ``works``, which are in ascending order of their size, in rounds over all of them.

    Takes about ``seconds``: a size that is expected to take more than its share, and those above it, are left out.
    """
    least: dict[int, float] = {}
    share = seconds / (2 * _ROUNDS)  # sizes double, so that a round takes twice its largest
    end = time.perf_counter() + seconds
    for _ in range(_ROUNDS):
        expected = 0.0
        for size, work in works.items():
            expected = least.get(size, expected)
            now = time.perf_counter()
            if expected > share or now + expected > end:
                break
            work()
            least[size] = min(least.get(size, math.inf), time.perf_counter() - now)
            expected = 2 * least[size]
    return least
