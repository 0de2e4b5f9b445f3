"""What this processor does in a second, by probes of a tenth of a second each. No torch."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

_SECONDS = 0.1
_TRIES = 5  # at least, where others use the processor
_MATMUL_SHAPE = (256, 1024, 1024)
_COPIED = 8 << 20  # float32 numbers: more than caches hold


def matmul_rate() -> float:
    """FLOP per second of a float32 matrix product."""
    m, k, n = _MATMUL_SHAPE
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    return 2 * m * k * n / _least_seconds(lambda: a @ b)


def memory_rate() -> float:
    """Bytes per second that a copy reads and writes."""
    source, target = np.ones(_COPIED, np.float32), np.zeros(_COPIED, np.float32)
    return 2 * source.nbytes / _least_seconds(lambda: np.copyto(target, source))


def _least_seconds(work: Callable[[], object]) -> float:
    times: list[float] = []
    end = perf_counter() + _SECONDS
    while (start := perf_counter()) < end or len(times) < _TRIES:
        work()
        times.append(perf_counter() - start)
    return min(times)
