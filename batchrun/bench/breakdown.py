"""Where a step's time goes: one more pass of the engine, with a clock around its operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from batchrun.bench.engine_side import EngineSide

_OPERATIONS = {
    "linear": "linear",
    "attention": "attention",
    "token_logprobs": "sampling",
}  # every other operation is elementwise
_HOST = ("pack", "attention_plan")  # the host's work before an operation
PARTS = ("linear", "attention", "elementwise", "head", "sampling", "host")


class Clock:
    """Seconds of named parts; what runs within a part belongs to it. For functions that one thread calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time counted for ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return function(*args, **kwargs)
            self._running = True
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += perf_counter() - start
                self._running = False

        return call


def measure_breakdown(side: EngineSide) -> dict[str, float]:
    """Each of `PARTS` as a share of the time of one pass, on a CPU, where an operation is done when it returns.

    ``linear`` leaves out the output projection, which is ``head``; ``elementwise`` is norms, activations, and RoPE with
    the writing of KV. ``host`` is what is left: scheduling, batches, embedding lookups, taking results in.
    """
    from batchrun.engine import executor, sampler

    clock = Clock()
    model = side.engine.executor.model
    operations = {name: getattr(model.ops, name) for name in model.ops.__all__}
    timed = {
        name: call if name in _HOST else clock.timed(_OPERATIONS.get(name, "elementwise"), call)
        for name, call in operations.items()
    }
    with ExitStack() as stack:
        stack.enter_context(_replaced(model, "ops", SimpleNamespace(**timed)))
        stack.enter_context(_replaced(model, "logits", clock.timed("head", model.logits)))
        stack.enter_context(_replaced(executor, "sample", clock.timed("sampling", sampler.sample)))
        seconds = side.run().seconds
    shares = {part: clock.seconds[part] / seconds for part in PARTS}
    return shares | {"host": 1 - sum(shares.values())}


@contextmanager
def _replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
