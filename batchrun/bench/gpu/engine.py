"""Part 4: the engine end to end, on Llamas of random weights; greedy, every row to its last token."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from batchrun.bench.gpu.answers import NAMES, compare_answers
from batchrun.bench.gpu.budget import Clock, Line, Unit
from batchrun.bench.gpu.floors import Ceilings
from batchrun.bench.gpu.random_model import SHAPES, Config, random_engine
from batchrun.bench.gpu.steps import Profiler, profile_gpu, profile_steps
from batchrun.bench.gpu.timing import EventTimer, measure_ceilings
from batchrun.engine.engine import Engine
from batchrun.job import KVCacheDType
from batchrun.sampling import SamplingParams

_LEAST = 4.0  # seconds with less than which nothing is begun
_LONGEST = 90.0  # seconds that loading, compiling and making graphs may take
_WARM_UP_TOKENS = (16, 24)  # prompt, and at most so many more
_PREFILL_STEPS, _DECODE_STEPS = 4, 16  # that are profiled


class Load(NamedTuple):
    """``rows`` prompts of so many random tokens, and how many each generates."""

    prompt: int
    output: int
    rows: int
    batch: int  # rows that transformers takes at once

    @property
    def name(self) -> str:
        return f"{self.prompt}/{self.output}"


LOADS = (Load(128, 128, 1024, 256), Load(1000, 1000, 384, 128), Load(2048, 128, 256, 64))
STEPS = Load(512, 64, 256, 1)

# Output tokens a second of the 8B shape under TensorRT-LLM, weights in FP8, as published: measured elsewhere by others.
PUBLISHED = {("8B", "128/128"): 27_911, ("8B", "1000/1000"): 17_744}
_PUBLISHED_NAME = "TensorRT-LLM FP8, published, tok/s"


@dataclass(frozen=True)
class Setting:
    """What is measured, and how; ``options`` are the engine's."""

    device: torch.device
    seed: int
    ceilings: Ceilings
    profiler: Profiler
    shapes: Mapping[str, Config]
    loads: Sequence[Load]
    steps: Load
    dtype: str
    options: Mapping[str, Any]
    clock: Clock = time.monotonic


def units(device: torch.device, seed: int) -> list[Unit]:
    profile_gpu(lambda: None)  # its first use takes seconds
    ceilings = measure_ceilings(device, EventTimer(device))
    return Ends(Setting(device, seed, ceilings, profile_gpu, SHAPES, LOADS, STEPS, "bfloat16", {})).units()


class Ends:
    """End to end. One model is on the device at a time: the engine's stays for the next unit of the same shape."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._loaded: tuple[str, Engine] | None = None
        self._rates: dict[tuple[str, str], float] = {}  # output tokens a second by shape and load

    def units(self) -> list[Unit]:
        """A small model's answers; what the engine does with each shape, then the peer's first load; its others."""
        setting = self._setting
        first = [Unit(name, partial(self._answers, kept), 1.0, _LEAST, _LONGEST) for kept, name in NAMES.items()]
        last: list[Unit] = []
        for index, shape in enumerate(setting.shapes):
            weight = 3.0 if index == 0 else 2.0
            for load in setting.loads:
                run = partial(self._measure, shape, load)
                first.append(Unit(f"{shape} shape, {load.name}", run, weight, _LEAST, _LONGEST))
            first.append(Unit(f"{shape} shape, steps", partial(self._profile, shape), 2.0, _LEAST, _LONGEST))
            for load in setting.loads:
                run = partial(self._peer, shape, load)
                unit = Unit(f"{shape} shape, {load.name}, transformers", run, 1.0, _LEAST, _LONGEST)
                (first if load is setting.loads[0] else last).append(unit)
        return [*first, *last]

    def _answers(self, kept: KVCacheDType, _: float) -> Iterator[Line]:
        return compare_answers(self._setting.device, self._setting.seed, kept)

    def _measure(self, shape: str, load: Load, seconds: float) -> Iterator[Line]:
        engine, clock = self._engine(shape), self._setting.clock
        engine.reset_prefix_cache()
        before, start = engine.stats(), clock()
        _add(engine, load, self._setting.seed, load.output)
        finished = 0
        while engine.has_work and clock() < start + seconds:
            for request in engine.step():
                engine.text(request)
                finished += 1
        taken, after = clock() - start, engine.stats()
        engine.abort()
        tokens = after.output_tokens - before.output_tokens
        self._rates[shape, load.name] = tokens / taken
        yield Line(
            f"{shape} shape, {load.name}",
            "measured" if finished == load.rows else "cut",
            {
                "output tok/s": tokens / taken,
                "prompt and output tok/s": (after.computed_tokens - before.computed_tokens) / taken,
                "seconds": taken,
                "rows": load.rows,
                "finished": finished,
                "steps": after.steps - before.steps,
                "preemptions": after.preemptions - before.preemptions,
                _PUBLISHED_NAME: PUBLISHED.get((shape, load.name)),
            },
        )

    def _profile(self, shape: str, _: float) -> Iterator[Line]:
        """Steps of prompts, then steps in which every row computes one token."""
        engine, setting = self._engine(shape), self._setting
        engine.reset_prefix_cache()
        load = setting.steps
        _add(engine, load, setting.seed + 1, load.output)
        name = f"{shape} shape, {load.rows} rows of {load.prompt}"
        try:
            shown = profile_steps(engine, _PREFILL_STEPS, setting.profiler, setting.ceilings)
            yield Line(f"{name}: prompts", "measured", shown)
            running = engine.scheduler.running
            while engine.scheduler.waiting or any(request.computed < request.n_prompt for request in running):
                engine.step()
            shown = profile_steps(engine, _DECODE_STEPS, setting.profiler, setting.ceilings)
            yield Line(f"{name}: decoding", "measured", shown)
        finally:
            engine.abort()

    def _engine(self, shape: str) -> Engine:
        if self._loaded is None or self._loaded[0] != shape:
            self._release()
            setting = self._setting
            longest = max(load.prompt + load.output for load in (*setting.loads, setting.steps))
            engine = random_engine(
                setting.shapes[shape],
                setting.seed,
                dtype=setting.dtype,
                device=setting.device.type,
                max_model_len=longest,
                **setting.options,
            )
            self._loaded = shape, engine
            _warm_up(engine, setting)
        return self._loaded[1]

    def _release(self) -> None:
        """Give the device's memory back."""
        if self._loaded is not None:
            self._loaded[1].close()
            self._loaded = None
        gc.collect()
        if self._setting.device.type == "cuda":
            torch.cuda.empty_cache()

    def _peer(self, shape: str, load: Load, seconds: float) -> Iterator[Line]:
        name = f"{shape} shape, {load.name}, transformers"
        if find_spec("transformers") is None:
            yield Line(name, "left out", {"why": "it is not installed"})
            return
        self._release()
        rate, taken, done = _transformers(self._setting, shape, load, seconds)
        ours = self._rates.get((shape, load.name))
        yield Line(
            name,
            "measured" if done == load.output else "cut",
            {
                "output tok/s": rate,
                "seconds": taken,
                "rows": load.batch,
                "batchrun / transformers": None if ours is None else ours / rate,
            },
        )
        self._release()


def _prompts(load: Load, vocabulary: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, (load.rows, load.prompt))


def _add(engine: Engine, load: Load, seed: int, output: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    vocabulary = engine.executor.model.config.vocab_size
    for index, ids in enumerate(_prompts(load, vocabulary, seed).tolist()):
        engine.add(engine.request(index, ids, params, index))


def _warm_up(engine: Engine, setting: Setting) -> None:
    """What first use costs: kernels are compiled, and graphs made of steps of as many rows as there will be and fewer.

    Rows end one after the other, from the most that any load has.
    """
    prompt, more = _WARM_UP_TOKENS
    rows = max(load.rows for load in (*setting.loads, setting.steps))
    vocabulary = engine.executor.model.config.vocab_size
    for index, ids in enumerate(_prompts(Load(prompt, 0, rows, 1), vocabulary, setting.seed + 2).tolist()):
        params = SamplingParams(temperature=0, max_tokens=2 + index * more // rows, ignore_eos=True)
        engine.add(engine.request(index, ids, params, index))
    while engine.has_work:
        engine.step()


def _transformers(setting: Setting, shape: str, load: Load, seconds: float) -> tuple[float, float, int]:
    """Output tokens a second of one static batch, its seconds, and how many tokens each row came to in them."""
    import transformers

    made: Any = transformers  # untyped
    config = made.LlamaConfig(**{key: value for key, value in setting.shapes[shape].items() if key != "model_type"})
    torch.manual_seed(setting.seed)
    with torch.device(setting.device):
        model = made.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype)).eval()
    model.generation_config = made.GenerationConfig()
    ids = torch.from_numpy(_prompts(load, config.vocab_size, setting.seed)[: load.batch]).to(setting.device)

    def generate(count: int, limit: float | None = None) -> int:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0, max_time=limit,
        )  # fmt: skip
        return int(out.cpu().shape[1]) - load.prompt

    generate(2)
    start = setting.clock()
    done = generate(load.output, seconds)
    taken = setting.clock() - start
    return done * len(ids) / taken, taken, done
