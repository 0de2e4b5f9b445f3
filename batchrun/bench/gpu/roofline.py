"""Part 3: the time of each kernel beside the least that it could take, and beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchrun.bench.gpu import floors
from batchrun.bench.gpu.budget import Line, Unit
from batchrun.bench.gpu.checks import load_kernels
from batchrun.bench.gpu.floors import Ceilings, Work
from batchrun.bench.gpu.inputs import LLAMA_8B, Call, Heads, Inputs, Row
from batchrun.bench.gpu.timing import EventTimer, Timer, measure_ceilings
from batchrun.engine.memory import kv_bytes_per_token
from batchrun.job import KVCacheDType

_HIDDEN, _INTERMEDIATE, _VOCABULARY = 4096, 14336, 128_256
_DTYPE = torch.bfloat16
_FP8 = 1400 / 790  # how many times as fast as bfloat16 products of FP8 are assumed to be
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Target:
    """What an H200 should reach: at least a share of the floor or TFLOP/s, or at most microseconds or a ratio.

    ``than`` names what a ratio is to: another line or another's time on the same one.
    """

    kind: Literal["share", "TFLOP/s", "us", "x"]
    bound: float
    than: str = ""

    def __str__(self) -> str:
        if self.kind == "share":
            return f">= {self.bound:.0%} of the ceiling"
        return f"{'>=' if self.kind == 'TFLOP/s' else '<='} {self.bound:.3g} {self.kind} {self.than}".rstrip()

    def met(self, seconds: float, floor: float, flops: float, others: Mapping[str, float]) -> bool | None:
        """None where what it is compared with was not measured."""
        if self.kind == "share":
            return floor / seconds >= self.bound
        if self.kind == "TFLOP/s":
            return flops / seconds / 1e12 >= self.bound
        if self.kind == "us":
            return seconds * 1e6 <= self.bound
        return seconds <= self.bound * others[self.than] if self.than in others else None


@dataclass(frozen=True)
class Entry:
    """A line of the table. ``make`` gives the call to be timed.

    ``against`` are torch's own ways to the same, each made of the call. ``ops`` has the operation; None: the kernels.
    """

    name: str
    work: Work
    make: Callable[[Inputs], Call]
    targets: Sequence[Target] = ()
    against: Mapping[str, Callable[[Call], Callable[[], object]]] = field(default_factory=dict)
    ops: ModuleType | None = None


def units(device: torch.device, seed: int) -> list[Unit]:
    return Table(load_kernels(), device, seed, EventTimer(device)).units()


class Table:
    """Measures entries; the ceilings are measured when they are first needed."""

    def __init__(self, ops: ModuleType, device: torch.device, seed: int, timer: Timer, shrink: int = 1) -> None:
        self._ops, self._device, self._seed, self._timer, self._shrink = ops, device, seed, timer, shrink
        self._ceilings: Ceilings | None = None
        self._seconds: dict[str, float] = {}  # of the lines so far

    def units(self) -> list[Unit]:
        table = [Unit(entry.name, partial(self._measure, entry)) for entry in entries(self._shrink)]
        return [Unit("ceilings", self._measure_ceilings), *table]

    @property
    def ceilings(self) -> Ceilings:
        if self._ceilings is None:
            sizes = {"copied": (1 << 30) // self._shrink**2, "size": 8192 // self._shrink}
            self._ceilings = measure_ceilings(self._device, self._timer, **sizes)
        return self._ceilings

    def _measure_ceilings(self, _: float) -> Iterator[Line]:
        one = torch.zeros(1, device=self._device)
        yield Line("copy", "measured", {"TB/s": self.ceilings.bandwidth / 1e12})
        yield Line("bfloat16 product", "measured", {"TFLOP/s": self.ceilings.flops / 1e12})
        yield Line("a kernel with nothing to do", "measured", {"us": self._timer(lambda: one.add_(1)) * 1e6})

    def _measure(self, entry: Entry, _: float) -> Iterator[Line]:
        floor = entry.work.seconds(self.ceilings)
        call = entry.make(Inputs(self._ops, self._device, self._seed))
        ops = entry.ops or self._ops
        seconds = self._seconds[entry.name] = self._timer(partial(call, ops))
        figures: dict[str, Any] = {"us": seconds * 1e6, "floor us": floor * 1e6, "share": floor / seconds}
        if entry.work.flops / self.ceilings.flops == floor:
            figures["TFLOP/s"] = entry.work.flops / seconds / 1e12
        others = self._others(entry, call)
        figures |= {f"{name} us": time * 1e6 if isinstance(time, float) else time for name, time in others.items()}
        known = {name: time for name, time in others.items() if isinstance(time, float)} | self._seconds
        met = [target.met(seconds, floor, entry.work.flops, known) for target in entry.targets]
        if entry.targets:
            figures["H200 target"] = "; ".join(map(str, entry.targets))
            figures["met"] = "not known" if None in met else all(met)
        yield Line(entry.name, "measured", figures)

    def _others(self, entry: Entry, call: Call) -> dict[str, float | str]:
        """Seconds of torch's own ways, or why there are none."""
        found: dict[str, float | str] = {}
        for name, make in entry.against.items():
            try:
                found[name] = self._timer(make(call))
            except RuntimeError as error:  # as torch says that a backend does not take the inputs
                found[name] = f"no: {str(error).splitlines()[0][:80]}"
        return found


# ---- the lines


def entries(shrink: int = 1) -> list[Entry]:
    """The table of the kernels' design, lengths and counts divided by ``shrink``, the most important first."""
    small = partial(_divided, shrink)
    tokens, batch = small(8192), small(256)
    heads = LLAMA_8B
    return [
        *_attention_entries(small),
        Entry(
            "RMSNorm + residual T8192 H4096",
            floors.add_rms_norm(tokens, _HIDDEN),
            lambda make: make.add_rms_norm(tokens, _HIDDEN, _DTYPE),
            [Target("share", 0.85)],
        ),
        Entry(
            "SiLU*mul T8192 I14336",
            floors.silu_mul(tokens, _INTERMEDIATE),
            lambda make: make.activation("silu_mul", tokens, _INTERMEDIATE, _DTYPE),
            [Target("share", 0.85)],
        ),
        Entry(
            "RoPE + KV write T8192",
            floors.rope_kv_write(tokens, *heads),
            lambda make: make.rope_kv_write(tokens, heads, _DTYPE, norms=False, padding=False),
            [Target("share", 0.8)],
        ),
        Entry(
            "RoPE + KV write T8192, FP8 KV",
            floors.rope_kv_write(tokens, *heads, kv_bytes=_kv_bytes("fp8")),
            lambda make: make.rope_kv_write(tokens, heads, _DTYPE, norms=False, padding=False, kept="fp8"),
            [Target("share", 0.8)],
        ),
        Entry(
            "sampling B256 V128256",
            floors.one_pass(batch, _VOCABULARY),
            lambda make: make.draw(batch, _VOCABULARY, filtered=False),
            [Target("share", 1 / 1.3)],
        ),
        Entry(
            "sampling, filtered, B128 V131072",
            floors.one_pass(small(128), 131_072),
            lambda make: make.draw(small(128), 131_072, filtered=True),
            [Target("us", 350)],
        ),
        Entry(
            "argmax B256 V128256",
            floors.one_pass(batch, _VOCABULARY),
            lambda make: make.argmax(batch, _VOCABULARY, hard=False),
        ),
        Entry(
            "log-probabilities, 20 beside, B256 V128256",
            floors.one_pass(batch, _VOCABULARY),
            lambda make: make.token_logprobs(batch, _VOCABULARY, 20),
        ),
        Entry(
            "RMSNorm T8192 H4096",
            floors.rms_norm(tokens, _HIDDEN),
            lambda make: make.rms_norm(tokens, _HIDDEN, _DTYPE),
            [Target("share", 0.85)],
        ),
        *_linear_entries(small),
    ]


def _attention_entries(small: Callable[[int], int]) -> Iterator[Entry]:
    def rows(count: int, queries: int, length: int) -> list[Row]:
        return [Row(queries, small(length))] * small(count)

    def entry(name: str, rows: list[Row], *targets: Target, dense: bool = True) -> Entry:
        make = partial(Inputs.attention, rows=rows, heads=LLAMA_8B, dtype=_DTYPE)
        against = {name: partial(_dense_attention, rows, backend) for name, backend in _BACKENDS.items()}
        return Entry(name, floors.attention(rows, *LLAMA_8B), make, targets, against if dense else {})

    share = Target("share", 0.8)
    prefill = (Target("TFLOP/s", 430), Target("x", 1 / 0.65, "cuDNN"))
    yield entry("decode B64 4k", rows(64, 1, 4096), share, Target("us", 310))
    yield entry("prefill B8 S4096 causal", [Row(small(4096), small(4096))] * small(8), *prefill)
    yield entry("decode B1 32k", rows(1, 1, 32_768), Target("us", 48))
    yield entry("decode B256 1k", rows(256, 1, 1024), share)
    yield entry("verify q=8, B64 4k", rows(64, 8, 4096), Target("x", 1.15, "decode B64 4k"), dense=False)
    yield entry("chunk 2048 at 8k context, B1", [Row(small(2048), small(8192))], prefill[0], dense=False)
    block, prefix = 32, small(8192) // 32
    suffixed = [Row(1, prefix * block + small(1024))] * small(256)
    yield Entry(
        "shared beginning of 8k, B256 1k more",
        floors.attention(suffixed, *LLAMA_8B, shared=prefix * block),
        partial(Inputs.attention, rows=suffixed, heads=LLAMA_8B, dtype=_DTYPE, shared=prefix, block_size=block),
        [Target("share", 0.6)],
    )

    def kept_entry(name: str, rows: list[Row], kept: KVCacheDType, *targets: Target) -> Entry:
        work = floors.attention(rows, *LLAMA_8B, kv_bytes=_kv_bytes(kept))
        make = partial(Inputs.attention, rows=rows, heads=LLAMA_8B, dtype=_DTYPE, kept=kept)
        return Entry(f"{name}, {kept.upper()} KV", work, make, targets)

    faster = Target("x", 1 / 1.5, "decode B256 1k")
    for kept in ("fp8", "int8", "int4"):
        yield kept_entry("decode B256 1k", rows(256, 1, 1024), kept, faster)
    yield kept_entry("decode B64 4k", rows(64, 1, 4096), "fp8")
    yield kept_entry("chunk 2048 at 8k context, B1", [Row(small(2048), small(8192))], "fp8")


def _kv_bytes(kept: KVCacheDType) -> float:
    """Of an element of a key or value, its share of their scale included."""
    heads = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": LLAMA_8B.dim}
    return kv_bytes_per_token(heads, "bfloat16", kept) / (2 * LLAMA_8B.dim)


def _linear_entries(small: Callable[[int], int]) -> Iterator[Entry]:
    """Products of bfloat16, which torch makes, and those of narrower weights."""
    out, inner = small(28_672), small(8192)
    for rows in (16, 256):
        name = f"28672x8192 at M={rows}"
        make = partial(_product, rows, out, inner)
        yield Entry(f"{name}, bfloat16 (torch.mm)", floors.linear(rows, out, inner), make, ops=torch)
        four = floors.linear(rows, out, inner, weight_bytes=0.5 + 4 / 128)
        eight = floors.linear(rows, out, inner, weight_bytes=1)
        fewer = Work(eight.bytes, eight.flops / _FP8)
        beside = Target("x", 1 / 0.6, f"{name}, bfloat16 (torch.mm)")
        for kind, work, target in (
            ("W4", four, beside),
            ("FP8", fewer, Target("share", 0.7)),
            ("INT8", fewer, Target("share", 0.7)),
            ("W4 in groups of 32", floors.linear(rows, out, inner, weight_bytes=0.5 + 4 / 32), beside),
            ("INT8 in groups of 64", floors.linear(rows, out, inner, weight_bytes=1 + 4 / 64), beside),
        ):
            quantized = partial(Inputs.linear, kind=kind, rows=rows, out=out, inner=inner, dtype=_DTYPE)
            yield Entry(f"{name}, {kind}", work, quantized, [target] if rows <= 16 or target is beside else [])
    square = small(8192)
    yield Entry(
        "8192x8192 at M=1, W4",
        floors.linear(1, square, square, weight_bytes=0.5 + 4 / 128),
        partial(Inputs.linear, kind="W4", rows=1, out=square, inner=square, dtype=_DTYPE),
        [Target("us", 24)],
    )


def _divided(shrink: int, count: int) -> int:
    return max(1, count // shrink)


def _product(rows: int, out: int, inner: int, make: Inputs) -> Call:
    x, weight = make.normal(rows, inner, dtype=_DTYPE), make.normal(out, inner, dtype=_DTYPE)
    return Call("mm", (x, weight.T))


def _dense_attention(rows: Sequence[Row], backend: SDPBackend, call: Call) -> Callable[[], Tensor]:
    """torch's attention over as many keys and values, which lie in order, for equal rows of one or all positions.

    Where all positions are queries and the backend does not take grouped heads, keys and values are repeated, which
    costs next to nothing there. Raises RuntimeError where the backend does not take the inputs.
    """
    q, k_cache = call.arguments[:2]
    queries, length = rows[0]
    heads = Heads(q.shape[1], k_cache.shape[1], q.shape[2])
    query = q.view(len(rows), queries, heads.query, heads.dim).transpose(1, 2).contiguous()
    shape = (len(rows), heads.kv, length, heads.dim)
    key, value = (torch.randn(shape, dtype=q.dtype, device=q.device) for _ in range(2))

    def attend(key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=queries > 1, enable_gqa=True)

    try:
        attend(key, value)
    except RuntimeError:
        if queries == 1:
            raise
        key, value = (each.repeat_interleave(heads.group, 1) for each in (key, value))
    return partial(attend, key, value)
