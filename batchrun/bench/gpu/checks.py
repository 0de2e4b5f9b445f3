"""Part 1: every kernel against float64 on random inputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchrun.bench.gpu.budget import FAILED, Line, Unit
from batchrun.bench.gpu.inputs import LLAMA_8B, WEIGHTS, Call, Heads, Inputs, Row
from batchrun.bench.gpu.references import REFERENCES, draw_error, linear_products, vectors
from batchrun.job import KVCacheDType

# Of an error relative to the size of the numbers. Elementwise a result is rounded once or twice; attention also rounds
# probabilities, and its products of float32 are three of TensorFloat-32.
_ELEMENTWISE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}
_ATTENTION = {torch.bfloat16: 3 * 2.0**-7, torch.float16: 3 * 2.0**-10, torch.float32: 1e-4}
_LINEAR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
# Half a step of a number that is kept in fewer bits, of vectors of normal numbers, beside bfloat16's rounding.
_KEPT: Mapping[KVCacheDType, float] = {"fp8": 2.0**-4 + 2.0**-6, "int8": 2.0**-5 + 2.0**-6, "int4": 0.4}
_LOGPROB = 1e-4  # absolute, of float32 sums over a vocabulary
_SCORE = 2e-3  # of logit plus noise
_PADDING_BLOCK = 0

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Scale:
    """How large inputs are: counts of tokens and lengths are divided by ``divisor``."""

    divisor: int = 1
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128_256

    def __call__(self, count: int) -> int:
        return max(1, count // self.divisor)

    def rows(self, *rows: tuple[int, int]) -> list[Row]:
        return [Row(min(self(queries), self(length)), self(length)) for queries, length in rows]


FULL = Scale()


@dataclass(frozen=True)
class Check:
    """A call to be made of inputs, and how far it may be from its reference."""

    name: str
    make: Callable[[Inputs], Call]
    tolerance: float


def load_kernels() -> ModuleType:
    """The operations by Triton kernels, which need Triton."""
    return import_module("batchrun.ops.triton_ops")


def units(device: torch.device, seed: int) -> list[Unit]:
    ops = load_kernels()
    return [check_unit(check, ops, device, seed) for check in all_checks(FULL)]


def check_unit(check: Check, ops: ModuleType, device: torch.device, seed: int) -> Unit:
    """The same seed and name make the same inputs, whatever was checked before."""

    def run(_: float) -> Iterator[Line]:
        call = check.make(Inputs(ops, device, seed + zlib.crc32(check.name.encode())))
        error = error_of(call, call.outputs(ops))
        status = "passed" if error <= check.tolerance else FAILED
        yield Line(check.name, status, {"error": error, "tolerance": check.tolerance})

    return Unit(check.name, run)


def error_of(call: Call, outputs: Sequence[Tensor]) -> float:
    """The largest error of what a call returned and wrote; infinite where it is wrong whatever the tolerance."""
    if call.operation == "draw":
        return draw_error(call.arguments[0], call.options, outputs[0])
    if call.operation == "linear":
        x, _, bias = call.arguments
        assert call.original is not None
        return min(_relative(outputs[0], product) for product in linear_products(x, call.original, bias))
    expected = REFERENCES[call.operation](*call.arguments, **call.options)
    if call.operation == "rope_kv_write":  # what padding leaves behind nobody reads
        outputs = (outputs[0], *vectors(*outputs[1:]))
        outputs, expected = ((q, *(each[_PADDING_BLOCK + 1 :] for each in kv)) for q, *kv in (outputs, expected))
    if [each.shape for each in outputs] != [each.shape for each in expected]:
        return math.inf
    if call.operation == "token_logprobs":
        return max(map(_absolute, outputs, expected))
    return max(map(_relative, outputs, expected))


def _relative(output: Tensor, expected: Tensor) -> float:
    """The largest error, each against the number it should be plus their root mean square; of integers: any."""
    if not expected.dtype.is_floating_point:
        return _absolute(output, expected)
    size = expected.abs() + expected.square().mean().sqrt()
    return _largest((output.double() - expected).abs() / size)


def _absolute(output: Tensor, expected: Tensor) -> float:
    if not expected.dtype.is_floating_point:
        return 0.0 if output.dtype == expected.dtype and output.equal(expected) else math.inf
    return _largest((output.double() - expected).abs())


def _largest(errors: Tensor) -> float:
    """Not a number counts as infinite."""
    return float(errors.nan_to_num(nan=math.inf).amax()) if errors.numel() else 0.0


def all_checks(scale: Scale) -> list[Check]:
    """The checks, what the engine cannot do without first."""
    first: list[Check] = []
    other: list[Check] = []
    for dtype in DTYPES:
        made = [*_elementwise(scale, dtype), *_attention(scale, dtype)]
        (first if dtype is torch.bfloat16 else other).extend(made)
    return [*first, *_logits(scale), *_linear(scale), *_attention_forms(scale), *_quantized_kv(scale), *other]


def _elementwise(scale: Scale, dtype: torch.dtype) -> Iterator[Check]:
    def check(name: str, make: Callable[[Inputs], Call], times: int = 1) -> Check:
        return Check(f"{name}, {_name(dtype)}", make, times * _ELEMENTWISE[dtype])

    norms = {"rms_norm": Inputs.rms_norm, "add_rms_norm": Inputs.add_rms_norm}
    for name, norm in norms.items():
        of = partial(norm, hidden=scale.hidden, dtype=dtype)
        yield check(f"{name} of a token", partial(of, tokens=1))
        yield check(name, partial(of, tokens=scale(1000)))
        yield check(f"{name} of odd size", partial(of, tokens=scale(100), hidden=scale.hidden - 40))
        yield check(f"{name} with offset", partial(of, tokens=scale(100), offset=1.0))
    for name in ("silu_mul", "gelu_mul"):
        make = partial(Inputs.activation, operation=name, tokens=scale(300), width=scale.intermediate, dtype=dtype)
        yield check(name, make)
    rope = partial(Inputs.rope_kv_write, tokens=scale(1000) + 5, dtype=dtype, padding=True)
    yield check("rope_kv_write", partial(rope, heads=LLAMA_8B, norms=False))
    # What is rounded after the norm is turned, and may all but cancel.
    yield check("rope_kv_write with norms", partial(rope, heads=LLAMA_8B, norms=True), times=2)


def _linear(scale: Scale) -> Iterator[Check]:
    """Quantized linear layers: a weight's and a sum's roundings are as those elementwise."""
    for kind in WEIGHTS:
        for dtype in (torch.bfloat16, torch.float16):
            for rows in (1, 17, 64, 300, 1100) if dtype is torch.bfloat16 else (1, 300):
                of = partial(Inputs.linear, kind=kind, out=scale.hidden + 72, inner=scale.hidden, dtype=dtype)
                make = partial(of, rows=rows, bias=rows == 17)
                yield Check(f"linear, {kind}, {rows} rows, {_name(dtype)}", make, _LINEAR[dtype])


def _attention(scale: Scale, dtype: torch.dtype) -> Iterator[Check]:
    lists = {
        "decode": scale.rows(*((1, length) for length in (16, 500, 512, 513, 1000, 2049, 4097))),
        "prefill": scale.rows(*((n, n) for n in (16, 270, 2048, 700, 1500))),
        "mixed": scale.rows((1, 3000), (300, 1000), (64, 4000), (8, 513), (1, 16), (129, 129)),
        "decode of a long row": scale.rows((1, 33_000), (1, 48)),
    }
    for name, rows in lists.items():
        make = partial(Inputs.attention, rows=rows, heads=LLAMA_8B, dtype=dtype)
        yield Check(f"attention, {name}, {_name(dtype)}", make, _ATTENTION[dtype])


def _attention_forms(scale: Scale) -> Iterator[Check]:
    """What else attention has to do, each in bfloat16."""
    dtype = torch.bfloat16
    mixed = scale.rows((1, 3000), (300, 1000), (64, 4000), (8, 513), (1, 16), (129, 129))
    verify = [Row(8, 8 + scale(length)) for length in (0, 505, 2000, 4096)]
    decode = [Row(1, 64 + scale(length)) for length in (1000, 1000, 17, 2000, 4000, 300, 900, 500, 64, 65, 66, 3000)]
    prefix = [*decode, Row(5, 64 + scale(900)), Row(1, 64 + scale(128))]

    def check(name: str, rows: list[Row], heads: Heads = LLAMA_8B, **options: Any) -> Check:
        make = partial(Inputs.attention, rows=rows, heads=heads, dtype=dtype, **options)
        return Check(f"attention, {name}, {_name(dtype)}", make, _ATTENTION[dtype])

    yield check("a shared beginning", prefix, block_size=16, shared=4)
    yield check("rows of 8 queries", verify)
    yield check("window", mixed, window=scale(300))
    yield check("softcap", mixed, softcap=30.0)
    yield check("window and softcap", mixed, window=scale(300), softcap=50.0)
    for heads in (Heads(32, 8, 64), Heads(28, 4, 128), Heads(16, 16, 128), Heads(8, 4, 256)):
        yield check(f"heads {heads.query}/{heads.kv} of {heads.dim}", mixed, heads)
    for block_size in (16, 64, 128):
        yield check(f"blocks of {block_size}", mixed, block_size=block_size)


def _quantized_kv(scale: Scale) -> Iterator[Check]:
    """Keys and values in fewer bits: what is written, and attention to what is held; all that it does for one kind."""
    decode = scale.rows(*((1, length) for length in (16, 500, 512, 513, 1000, 2049, 4097)))
    mixed = scale.rows((1, 3000), (300, 1000), (64, 4000), (8, 513), (1, 16), (129, 129))
    beginning = [Row(1, 64 + scale(length)) for length in (1000, 1000, 17, 2000, 300)]

    def check(kept: KVCacheDType, name: str, rows: list[Row], dtype: torch.dtype, **options: Any) -> Check:
        make = partial(Inputs.attention, rows=rows, dtype=dtype, kept=kept, **({"heads": LLAMA_8B} | options))
        # Where operations make vectors of what is kept, they round these once more.
        return Check(f"attention, {kept} KV, {name}, {_name(dtype)}", make, 1.5 * _ATTENTION[dtype])

    for kept, tolerance in _KEPT.items():
        rope = partial(Inputs.rope_kv_write, tokens=scale(1000) + 5, heads=LLAMA_8B, norms=False, padding=True)
        yield Check(f"rope_kv_write, {kept} KV", partial(rope, dtype=torch.bfloat16, kept=kept), tolerance)
        for name, rows in (("decode", decode), ("mixed", mixed)):
            yield check(kept, name, rows, torch.bfloat16)
        yield check(kept, "heads of 64, blocks of 16", mixed, torch.bfloat16, heads=Heads(28, 4, 64), block_size=16)
    yield check("fp8", "a shared beginning", beginning, torch.bfloat16, block_size=16, shared=4)
    yield check("fp8", "window and softcap", mixed, torch.bfloat16, window=scale(300), softcap=50.0)
    yield check("fp8", "heads of 256", mixed, torch.bfloat16, heads=Heads(8, 4, 256))
    for dtype in (torch.float16, torch.float32):
        yield check("fp8", "mixed", mixed, dtype)


def _logits(scale: Scale) -> Iterator[Check]:
    vocabulary = scale.vocabulary
    yield Check("argmax", lambda make: make.argmax(scale(64), vocabulary, hard=False), 0.0)
    yield Check("argmax of equals, infinities and NaN", lambda make: make.argmax(8, vocabulary, hard=True), 0.0)
    yield Check("draw", lambda make: make.draw(scale(64) + 3, vocabulary, filtered=False, nan=True), _SCORE)
    yield Check("draw, filtered", lambda make: make.draw(scale(64) + 9, vocabulary, filtered=True, nan=True), _SCORE)
    for count in (0, 1, 20, 100):
        make = partial(Inputs.token_logprobs, rows=scale(64), vocabulary=vocabulary, count=count)
        yield Check(f"token_logprobs, {count} beside", make, _LOGPROB)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
