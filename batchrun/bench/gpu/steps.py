"""Where the time of the engine's steps goes on the GPU, beside the least that each kind of work could take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from batchrun.bench.gpu import floors
from batchrun.bench.gpu.floors import Ceilings, Work
from batchrun.engine.engine import Engine
from batchrun.engine.request import Step
from batchrun.models.config import ModelConfig

# The kind of a kernel by what its name has in it: our own kernels', and those of the libraries that multiply for torch.
_KINDS = {
    "attention": ("_attend", "_merge"),
    "linear": (
        *("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk"),
        *("product_kernel", "sum_parts_kernel", "quantize_kernel", "unpack_kernel"),
    ),
    "sampling": ("pick_kernel", "merge_kernel", "top_k_kernel", "top_p_kernel", "logprob_kernel"),
    "elementwise": ("norm_kernel", "gated_kernel", "rope_kernel"),
}
KINDS = (*_KINDS, "other")


class Kernel(NamedTuple):
    """What ran on the device, from when to when, in microseconds."""

    name: str
    start: float
    end: float


Profiler = Callable[[Callable[[], None]], Sequence[Kernel]]


def profile_gpu(run: Callable[[], None]) -> list[Kernel]:
    """The kernels, copies and fills of ``run``. Being watched takes the host some time, so the GPU idles a bit more."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return kernels_of(profile.events() or (), "CUDA")


def kernels_of(events: Iterable[Any], device: str) -> list[Kernel]:
    """What ran on a kind of device, of the events of a profile."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == device
    ]


def profile_steps(engine: Engine, count: int, profiler: Profiler, ceilings: Ceilings) -> dict[str, Any]:
    """Figures of the next ``count`` steps, as far as there is work for them."""
    steps: list[Step] = []
    schedule = engine.scheduler.schedule

    def recorded() -> Step | None:
        step = schedule()
        if step is not None:
            steps.append(step)
        return step

    def run() -> None:
        while len(steps) < count and engine.has_work:
            engine.step()
        engine.drain()

    engine.drain()
    engine.scheduler.schedule = recorded  # type: ignore[method-assign]
    try:
        kernels = profiler(run)
    finally:
        engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    config = engine.executor.model.config
    works = [step_work(config, [(row.n, row.start + row.n, row.samples) for row in step.rows]) for step in steps]
    tokens = sum(row.n for step in steps for row in step.rows)
    return figures(kernels, works, ceilings) | {"steps": len(steps), "tokens a step": tokens / max(1, len(steps))}


def step_work(config: ModelConfig, rows: Sequence[tuple[int, int, bool]]) -> dict[str, list[Work]]:
    """What a step of rows (tokens, length, whether it samples) has to do: operations by kind, one after the other."""
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    tokens, sampled = sum(count for count, _, _ in rows), sum(samples for _, _, samples in rows)
    attended = [(count, length) for count, length, _ in rows]
    heads, kv_heads = config.n_heads, config.n_kv_heads
    layer = {
        "linear": [
            floors.linear(tokens, (heads + 2 * kv_heads) * dim, hidden),
            floors.linear(tokens, hidden, heads * dim),
            floors.linear(tokens, 2 * width, hidden),
            floors.linear(tokens, hidden, width),
        ],
        "attention": [floors.attention(attended, heads, kv_heads, dim)],
        "elementwise": [
            *[floors.add_rms_norm(tokens, hidden)] * 2,
            floors.silu_mul(tokens, width),
            floors.rope_kv_write(tokens, heads, kv_heads, dim),
        ],
    }
    work = {kind: operations * config.n_layers for kind, operations in layer.items()}
    work["linear"].append(floors.linear(sampled, config.vocab_size, hidden))
    return work | {"sampling": [floors.one_pass(sampled, config.vocab_size)]}


def figures(kernels: Sequence[Kernel], steps: Sequence[dict[str, list[Work]]], ceilings: Ceilings) -> dict[str, Any]:
    """Milliseconds of a step: from the first kernel's start to the last one's end, by kind, and their floors.

    ``idle`` is the share of that time in which nothing ran on the device.
    """
    if not kernels or not steps:
        return {}
    span = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    spent: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        spent[kind_of(kernel.name)] += kernel.end - kernel.start
    least: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for kind, operations in step.items():
            least[kind] += 1e3 * sum(work.seconds(ceilings) for work in operations)
    floor = sum(least.values())
    out: dict[str, Any] = {
        "ms a step": span / 1e3 / len(steps),
        "floor ms": floor / len(steps),
        "share": floor * 1e3 / span,
        "idle": 1 - _covered(kernels) / span,
    }
    for kind in KINDS:
        out[f"{kind} ms"] = spent[kind] / 1e3 / len(steps)
        if kind in least:
            out[f"{kind} floor ms"] = least[kind] / len(steps)
    return out


def kind_of(name: str) -> str:
    """What kind of work a kernel of this name does."""
    lower = name.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in lower for part in parts)), "other")


def _covered(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of them ran."""
    covered, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        covered += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return covered
