"""Reads windows of a text with the engine's own decoder, operations and paged KV cache, and compares all logits.

Memory does not hold two whole models at once, nor the logits of more than a step: what stays of the reference are its
hidden states of the text, in host memory, and its output projection, which makes the same logits of them each time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from batchrun.engine import memory
from batchrun.engine.batch import Groups, build_batch
from batchrun.engine.engine import Engine
from batchrun.engine.executor import thread_count, use_threads
from batchrun.engine.memory import Device
from batchrun.engine.request import Request, Step, StepRow
from batchrun.engine.transfer import Transfer
from batchrun.job import EngineSpec
from batchrun.models.decoder import Decoder, Linear
from batchrun.quality.report import Configuration, Measured, Reading, perplexity
from batchrun.sampling import SamplingParams

_STEP = 128  # tokens read at once: those after them find their keys and values in the cache
_SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0)

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the reference makes of a text."""

    model: Decoder  # without its layers
    hidden: list[Tensor]  # of each step, after the final norm, on the host
    loss: np.ndarray  # as in `Reading`


def measure(
    exact: Configuration,
    others: Sequence[Configuration],
    windows: Windows,
    device: Device,
    context: int,
    say: Callable[[str], None],
) -> list[Measured]:
    """The figures of the reference ``exact``, and those of ``others`` by it.

    No window has more than ``context`` tokens; ``say`` is told what is being read.
    """
    use_threads(thread_count("auto"))
    say(f"reading with {exact.name}")
    reference, first = _reference(exact, windows, device, context)
    measured = [first]
    for each in others:
        say(f"reading with {each.name}")
        measured.append(_compared(each, reference, windows, device, context))
    return measured


def _reference(
    configuration: Configuration, windows: Windows, device: Device, context: int
) -> tuple[Reference, Measured]:
    start = time.monotonic()
    with closing(load(configuration, device, context)) as engine:
        reference = read(engine, windows)
    size = weight_bytes(reference.model)
    reference.model.layers.clear()
    return reference, Measured(configuration, size, perplexity(reference.loss), time.monotonic() - start)


def _compared(
    configuration: Configuration, reference: Reference, windows: Windows, device: Device, context: int
) -> Measured:
    start = time.monotonic()
    with closing(load(configuration, device, context)) as engine:
        reading = compare(engine, reference, windows)
        configuration = replace(configuration, name=_named(configuration, engine))
    size = weight_bytes(engine.executor.model)
    return Measured.of(configuration, reading, weight_bytes=size, seconds=time.monotonic() - start)


def _named(configuration: Configuration, engine: Engine) -> str:
    """With what `auto` is here."""
    chosen = f"auto: {engine.model_spec.quantization}"
    return configuration.name.replace("auto", chosen, 1) if configuration.weights == "auto" else configuration.name


def load(configuration: Configuration, device: Device, context: int) -> Engine:
    """An engine whose cache holds one window of ``context`` tokens."""
    config, spec = configuration.files.config, EngineSpec()
    per_token = memory.kv_bytes_per_token(config, configuration.dtype, configuration.kv_cache)
    return Engine(
        configuration.files,
        dtype=configuration.dtype,
        quantization=configuration.weights,
        kv_cache_dtype=configuration.kv_cache,
        device=device,
        max_model_len=context,
        max_num_seqs=1,
        max_num_batched_tokens=_STEP,
        kv_cache_memory=memory.sequence_bytes(context, bytes_per_token=per_token, block_size=spec.block_size),
        block_size=spec.block_size,
    )


@torch.inference_mode()
def read(engine: Engine, windows: Windows) -> Reference:
    """What a model makes of the windows."""
    model = engine.executor.model
    hidden, losses = [], []
    for states, targets in _steps(engine, windows):
        hidden.append(states.cpu())
        losses.append(_loss(_log_probabilities(model, states), targets))
    return Reference(model, hidden, torch.cat(losses).numpy())


@torch.inference_mode()
def compare(engine: Engine, reference: Reference, windows: Windows) -> Reading:
    """What another model makes of the same windows, place by place beside the reference."""
    model = engine.executor.model
    losses, divergences, same = [], [], []
    for (states, targets), wanted in zip(_steps(engine, windows), reference.hidden, strict=True):
        found = _log_probabilities(model, states)
        exact = _log_probabilities(reference.model, wanted.to(states.device))
        losses.append(_loss(found, targets))
        divergences.append((exact.exp() * (exact - found)).sum(-1).cpu())
        same.append((found.argmax(-1) == exact.argmax(-1)).double().cpu())
    return Reading(
        window=np.repeat(np.arange(len(windows)), [len(window) - 1 for window in windows]),
        loss=torch.cat(losses).numpy(),
        exact_loss=reference.loss,
        divergence=torch.cat(divergences).numpy(),
        same_top=torch.cat(same).numpy(),
    )


def weight_bytes(model: Decoder) -> int:
    """Bytes of memory that a model's matrices take, each once."""
    linears = [getattr(layer, field.name) for layer in model.layers for field in fields(layer)]
    weights = {model.embedding, model.head.weight, *(each.weight for each in linears if isinstance(each, Linear))}
    return sum(weight.nbytes for weight in weights)


def _steps(engine: Engine, windows: Windows) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states [T, H] of each token of a window but the last, and the tokens [T] that follow, step by step."""
    executor, block_size = engine.executor, engine.spec.block_size
    model, transfer = executor.model, Transfer(executor.device)
    groups = Groups.of(model)
    for window in windows:
        n_blocks = -(-len(window) // block_size)
        blocks = array("i", range(memory.RESERVED_BLOCKS, memory.RESERVED_BLOCKS + n_blocks))
        request = Request(None, list(window), len(window), _SCORED, 0, frozenset(), len(window), slot=0)
        request.blocks = [blocks] * len(model.windows)
        ids = torch.tensor(window, device=executor.device)
        for start in range(0, len(window) - 1, _STEP):
            count = min(_STEP, len(window) - 1 - start)
            row = StepRow(request, start, count, samples=False, incarnation=0)
            batch = transfer.send(build_batch(Step([row], []), block_size, groups))
            states = model.forward(ids[batch.positions], batch.positions, batch.groups, executor.caches)
            yield states, ids[start + 1 : start + 1 + count]


def _log_probabilities(model: Decoder, states: Tensor) -> Tensor:
    """Float64 [T, V]: what two that are nearly equal differ in is little beside the rounding of float32."""
    return model.logits(states).double().log_softmax(-1)


def _loss(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities.gather(1, targets[:, None])[:, 0].cpu()
