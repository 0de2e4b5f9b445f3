"""Part 2: the same call many times over. A race shows as bits that differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from batchrun.bench.gpu.budget import FAILED, Line, Unit
from batchrun.bench.gpu.checks import FULL, Scale, load_kernels
from batchrun.bench.gpu.inputs import LLAMA_8B, Call, Inputs, Row

_MOST = 2000  # calls
_ROUND = 25  # calls after which the clock is looked at, and the device waited for
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def units(device: torch.device, seed: int) -> list[Unit]:
    ops = load_kernels()
    return [stress_unit(name, make, ops, device, seed) for name, make in stressed(FULL).items()]


def stress_unit(name: str, make: Callable[[Inputs], Call], ops: ModuleType, device: torch.device, seed: int) -> Unit:
    def run(seconds: float) -> Iterator[Line]:
        call = make(Inputs(ops, device, seed))
        calls, differ = repeat(call, ops, seconds)
        yield Line(name, FAILED if differ else "passed", {"calls": calls, "calls that differ": differ})

    return Unit(name, run)


def repeat(call: Call, ops: ModuleType, seconds: float) -> tuple[int, int]:
    """How many calls there were after the first, and how many of them had other bits than it."""
    first = [_bits(each) for each in call.outputs(ops)]
    end = time.monotonic() + seconds
    calls = differ = 0
    while calls < _MOST and (calls == 0 or time.monotonic() < end):
        wrong = torch.zeros((), dtype=torch.int64, device=first[0].device)
        for _ in range(_ROUND):
            outputs = [_bits(each) for each in call.outputs(ops)]
            wrong += torch.stack([(a != b).any() for a, b in zip(outputs, first, strict=True)]).any()
        calls += _ROUND
        differ += int(wrong)
    return calls, differ


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def stressed(scale: Scale) -> dict[str, Callable[[Inputs], Call]]:
    """The calls, by name: those whose programs work together on a result first."""
    dtype, vocabulary = torch.bfloat16, scale.vocabulary
    attention = partial(Inputs.attention, heads=LLAMA_8B, dtype=dtype)
    lengths, beginning = [1000 + 37 * index for index in range(64)], scale(16)
    return {
        "attention, decode with merges": partial(
            attention, rows=scale.rows((1, 33_000), *((1, length) for length in lengths))
        ),
        "attention, a shared beginning": partial(
            attention, rows=[Row(1, 32 * beginning + scale(length)) for length in lengths], shared=beginning
        ),
        "attention, mixed": partial(attention, rows=scale.rows((2048, 2048), (512, 4096), (1, 3000), (16, 500))),
        "attention, mixed, FP8 KV": partial(
            attention, rows=scale.rows((512, 4096), (1, 3000), (1, 33_000), (16, 500)), kept="fp8"
        ),
        "draw, filtered": lambda make: make.draw(scale(128), vocabulary, filtered=True),
        "draw": lambda make: make.draw(scale(128), vocabulary, filtered=False),
        "token_logprobs": lambda make: make.token_logprobs(scale(64), vocabulary, 20),
        "argmax": lambda make: make.argmax(scale(256), vocabulary, hard=False),
        "rope_kv_write": lambda make: make.rope_kv_write(scale(4096), LLAMA_8B, dtype, norms=True, padding=False),
        "add_rms_norm": lambda make: make.add_rms_norm(scale(4096), scale.hidden, dtype),
        "rms_norm": lambda make: make.rms_norm(scale(4096), scale.hidden, dtype),
        "silu_mul": lambda make: make.activation("silu_mul", scale(4096), scale.intermediate, dtype),
        "gelu_mul": lambda make: make.activation("gelu_mul", scale(4096), scale.intermediate, dtype),
    }
