"""How long the GPU takes, and what it reaches at best."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from batchrun.bench.gpu.floors import Ceilings

_FLUSHED = 1 << 30  # bytes read between two calls, many times a cache: nothing of a call's inputs is left in it
_WARM_UP = 3
_CALLS = (10, 50)
_SECONDS = 0.3  # of timed calls, about
_COPIED = 1 << 30  # bytes
_MATRIX = 8192

Timer = Callable[[Callable[[], object]], float]


class EventTimer:
    """Seconds of a call: the median by CUDA events, each call with the level 2 cache full of other things.

    Reading leaves nothing there that has to be written back first, and takes long enough for the host to queue the call
    meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._other = torch.zeros(_FLUSHED // 4, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        for _ in range(_WARM_UP):
            once = self._timed(call, 1)[0]
        fewest, most = _CALLS
        return median(self._timed(call, min(most, max(fewest, int(_SECONDS / once)))))

    def _timed(self, call: Callable[[], object], count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            self._other.sum()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def measure_ceilings(device: torch.device, timer: Timer, *, copied: int = _COPIED, size: int = _MATRIX) -> Ceilings:
    """By a copy of ``copied`` bytes, and the bfloat16 product of two random matrices [size, size]."""
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copied / timer(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return Ceilings(bandwidth, 2 * size**3 / timer(lambda: torch.mm(a, b)))
