"""The host works while the device does: steps are scheduled and results taken in while another step is in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchrun import Engine, SamplingParams
from batchrun.engine import engine as engine_module

_STEP_SECONDS = 0.03


class Spans:
    """When calls of some functions began and ended."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[float, float]]] = {}

    def timed(self, name: str, function: Callable[..., Any], least: float = 0.0) -> Callable[..., Any]:
        """``function``, which takes ``least`` seconds at least."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                time.sleep(max(0.0, begin + least - time.perf_counter()))
                self.of.setdefault(name, []).append((begin, time.perf_counter()))

        return call

    def within(self, name: str, outer: str) -> int:
        """How many calls of ``name`` were made while one of ``outer`` ran."""
        return sum(any(a <= begin and end <= b for a, b in self.of[outer]) for begin, end in self.of[name])


def texts(engine: Engine) -> list[tuple[int, ...]]:
    prompts = [list(range(3 + index, 9 + 2 * index)) for index in range(6)]
    params = [SamplingParams(max_tokens=6 + index % 3, temperature=0.8, seed=index, logprobs=2) for index in range(6)]
    results = sorted(engine.generate(prompts, params), key=lambda result: result.index)
    return [result.token_ids for result in results]


def step_on(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_the_host_works_while_a_step_is_in_flight(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(str(tiny_model), device="cpu", dtype="float32")
    expected = texts(engine)
    spans = Spans()
    executor = engine.executor
    run, launch, began = executor._run, executor.launch, threading.Semaphore(0)

    def begin(step: Any) -> Any:
        began.release()
        return run(step)

    def launch_and_begin(step: Any) -> Any:
        """The step is on the device when the host goes on."""
        running = launch(step)
        began.acquire()
        return running

    monkeypatch.setattr(executor, "_run", spans.timed("device", begin, _STEP_SECONDS))
    monkeypatch.setattr(executor, "launch", launch_and_begin)
    monkeypatch.setattr(engine.scheduler, "schedule", spans.timed("schedule", engine.scheduler.schedule))
    monkeypatch.setattr(engine_module, "finish_reason", spans.timed("detokenize", engine_module.finish_reason))
    assert texts(engine) == expected
    steps = len(spans.of["device"])
    assert steps >= 8
    # The first step is scheduled before any runs, and nothing runs when the last call finds no work.
    assert spans.within("schedule", "device") >= steps - 2
    # Only the last step's results come in after all others.
    last = max(end for _, end in spans.of["device"])
    late = sum(begin >= last for begin, _ in spans.of["detokenize"])
    assert spans.within("detokenize", "device") == len(spans.of["detokenize"]) - late
    assert late <= 6
    engine.close()


def test_without_overlap_results_are_the_same(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), device="cpu", dtype="float32", reproducible=True)
    expected = texts(engine)
    launch = engine.executor.launch

    def launch_and_wait(step: Any) -> Any:
        running = launch(step)
        running.result()
        return running

    engine.executor.launch = launch_and_wait  # type: ignore[method-assign]
    assert texts(engine) == expected
    engine.close()


def test_nothing_is_taken_from_steps_after_one_that_failed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is on its way when one fails, and it would miss the tokens of that one."""
    engine = Engine(str(tiny_model), device="cpu", dtype="float32")
    launch, calls = engine.executor._launch, iter(range(100))

    def fail_once(*laid_out: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("planted")
        return launch(*laid_out)

    monkeypatch.setattr(engine.executor, "_launch", fail_once)
    engine.add(request := engine.request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=20), 1))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        step_on(engine, 20)
    settled = list(request.output_ids)
    assert len(settled) == 3
    assert engine.drain() == []
    assert request.output_ids == settled
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        step_on(engine, 2)
    engine.close()
