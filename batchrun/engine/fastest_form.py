"""What ``model.quantization: auto`` is on this machine: the form of the linear layers that multiplies fastest.

Forms are measured on weights of the model's shapes with made-up numbers, for as many tokens as the engine decodes at
once. Those that lose nothing come first, and a form has to be clearly faster than one before it to be chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import torch

from batchrun.engine import memory
from batchrun.engine.executor import thread_count, use_threads
from batchrun.engine.limits import resolve_limits
from batchrun.engine.memory import Device
from batchrun.job import EngineSpec, ModelSpec, Quantization
from batchrun.model_files import ModelFiles
from batchrun.models.config import ModelConfig
from batchrun.models.families import model_config
from batchrun.ops import backend
from batchrun.weights.formats import Dense, Fp8, Grouped, Int4, Int8, Weight, cat
from batchrun.weights.quantize import QUANTIZERS
from batchrun.weights.source import open_weights

_SAMPLE = "model.layers.1.mlp.up_proj.weight"  # what it is, the other linear layers are taken to be
_ELEMENTS = 64 << 20  # of each form: more than a processor's caches hold in 4 bits
_MOST_OUTPUTS = 8192  # of one weight: time is proportional to them
_ROWS = 64  # of weights that are made up; they are repeated
_SECONDS = 1.0  # of measuring all forms, if no round takes longer
_LEAST_ROUNDS = 3
_CLEARLY = 0.97  # of another form's time

Maker = Callable[[int], Weight]  # of a weight [_ROWS, in]


@dataclass(frozen=True)
class Fastest:
    """The form that takes the least time, and by how much."""

    form: Quantization
    seconds: dict[Quantization, float]  # of each form
    tokens: int

    def __str__(self) -> str:
        others = (
            f"{form} takes {taken / self.seconds[self.form]:.2f} times as long"
            for form, taken in self.seconds.items()
            if form != self.form
        )
        return f"{self.form} ({', '.join(others)} for {self.tokens} tokens at once)"


def fastest(files: ModelFiles, model: ModelSpec, engine: EngineSpec, device: Device, dtype: str) -> Fastest:
    """The fastest form for as many tokens as sequences run at once; measures for a second or two."""
    tokens = resolve_limits(engine, device).max_num_seqs
    forms = memory.auto_forms(files)
    free = memory.available_memory() if device == "cpu" else memory.gpu_memory() or 0
    sizes = {form: memory.weight_bytes(files, memory.DTYPE_BYTES[dtype], form, device) for form in forms}
    if fitting := [form for form in forms if sizes[form] < free]:
        forms = fitting
    seconds = _apart(device, engine, _measure, files, forms, model.reproducible, dtype, device, tokens)
    best = next(iter(seconds))
    for form, taken in seconds.items():
        best = form if taken < _CLEARLY * seconds[best] else best
    return Fastest(best, seconds, tokens)


def _apart(device: Device, engine: EngineSpec, measure: Callable[..., dict[Quantization, float]], *of: Any) -> Any:
    """What ``measure`` returns, of a thread or process of its own, with which goes the memory that torch keeps."""
    threads = (thread_count(engine.num_threads),)
    if device == "cpu":
        with ThreadPoolExecutor(1, initializer=use_threads, initargs=threads) as thread:
            return thread.submit(measure, *of).result()
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=use_threads, initargs=threads) as process:
        return process.submit(measure, *of).result()


@torch.inference_mode()
def _measure(
    files: ModelFiles,
    forms: Sequence[Quantization],
    reproducible: bool,
    dtype: str,
    device: Device,
    tokens: int,
) -> dict[Quantization, float]:
    """Seconds of each form's products."""
    config, torch_device, torch_dtype = model_config(files.config), torch.device(device), getattr(torch, dtype)
    ops = backend(torch_device, torch_dtype, config.head_dim, reproducible=reproducible)
    makers = {form: _maker(form, files, torch_dtype) for form in forms}
    works = {form: _work(make, config, ops, torch_dtype, torch_device, tokens) for form, make in makers.items()}
    least = dict.fromkeys(forms, math.inf)
    end, rounds = time.perf_counter() + _SECONDS, 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        for form, work in works.items():
            start = time.perf_counter()
            work()
            least[form] = min(least[form], time.perf_counter() - start)
        rounds += 1
    return least


def _maker(form: Quantization, files: ModelFiles, dtype: torch.dtype) -> Maker:
    def plain(k: int) -> Weight:
        return Dense(torch.randn(_ROWS, k).to(dtype))

    source = open_weights(files) if form == "none" and files.encodings else None
    stored = source[_SAMPLE].quantized(dtype) if source and _SAMPLE in source.names() else None
    if stored is not None:
        return lambda k: _like(stored, k)
    quantize = QUANTIZERS.get(form)
    return plain if quantize is None else lambda k: quantize(plain(k).stored)


def _like(stored: Weight, k: int) -> Weight:
    """A weight of the class and the groups of ``stored``, as far as ``k`` columns allow."""
    if isinstance(stored, Grouped):
        groups = k // stored.group if stored.scales.shape[1] > 1 and k % stored.group == 0 else 1
        scales = torch.ones(_ROWS, groups)
        minimums = None if stored.minimums is None else scales
        order = None if stored.order is None else torch.randperm(k)
        integers = torch.randint(0, 16, (_ROWS, k), dtype=torch.int8)
        make = Int4.of if isinstance(stored, Int4) else Int8
        return make(integers, scales, minimums, stored.dtype, order)
    if isinstance(stored, Fp8):
        return QUANTIZERS["fp8"](torch.randn(_ROWS, k).to(stored.dtype))
    return Dense(torch.randn(_ROWS, k).to(stored.dtype))


def _work(
    make: Maker, config: ModelConfig, ops: ModuleType, dtype: torch.dtype, device: torch.device, tokens: int
) -> Callable[[], None]:
    """The products of some layers, of weights that no cache holds."""
    heads, hidden, inner = config.n_heads * config.head_dim, config.hidden_size, config.intermediate_size
    qkv = heads + 2 * config.n_kv_heads * config.head_dim
    shapes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
    shapes = [(min(n, _MOST_OUTPUTS), k) for n, k in shapes]
    layers = -(-_ELEMENTS // sum(n * k for n, k in shapes))
    blocks = {k: make(k) for _, k in shapes}
    products = []
    for n, k in shapes * layers:
        weight = cat([blocks[k]] * -(-n // _ROWS)).to(device)
        weight.pack(ops.pack)
        products.append((torch.randn(tokens, k).to(device, dtype), weight))

    def work() -> None:
        for x, weight in products:
            ops.linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return work
