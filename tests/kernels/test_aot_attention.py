"""What GPU attention becomes for each architecture: tensor instructions, registers, shared memory."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from batchrun.job import KVCacheDType
from batchrun.kernels.gpu.attention import Form, form, max_lines
from batchrun.models.kv_cache import DTYPES, KVCache
from tests.kernels.aot import Compiled, compiled, problems

module = importlib.import_module("batchrun.kernels.gpu.attention")  # the package gives its function that name

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Case:
    arch: int
    lines: int
    head_dim: int = 128
    block_size: int = 32
    features: bool = False  # window and cap
    dtype: torch.dtype = torch.bfloat16
    kept: KVCacheDType = "auto"


def type_of(argument: Any, kernel: Any, name: str) -> str:
    """The argument's type as the launch would have it."""
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{NAMES[argument.base.dtype]}[{','.join(map(str, argument.block_shape))}]>"
    if isinstance(argument, Tensor):
        return f"*{NAMES[argument.dtype]}"
    if isinstance(argument, float):
        return "fp32"
    return "i32:16" if argument % 16 == 0 and name not in (kernel.do_not_specialize or ()) else "i32"


@functools.cache
def launched(case: Case, chosen: Form | None = None, *, merge: bool = False) -> Compiled:
    """The kernel that a call of ``attention`` would launch for one list of items, or the one that would ``merge``."""
    n_kv_heads, group = 8, 4
    kept = DTYPES.get(case.kept, case.dtype)
    cache = KVCache.zeros(4, n_kv_heads, case.block_size, case.head_dim, kept, torch.device("cpu"))
    q = torch.zeros(3, n_kv_heads * group, case.head_dim, dtype=case.dtype)
    items = torch.zeros(1, 8, dtype=torch.int32)
    plan = SimpleNamespace(few=items[:0], many=items, few_tile=16, many_tile=case.lines, n_partials=1)
    plan.merge_tokens = plan.merge_starts = plan.merge_partials = items[0]
    batch = SimpleNamespace(block_table=items, plan=plan)
    calls: list[Callable[[], Compiled]] = []

    def launch(kernel: Any, grid: Any, *args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        if all(grid):
            given = dict(zip(kernel.arg_names, args, strict=False))
            absent = {name: None for name, arg in given.items() if arg is None}
            types = {name: type_of(arg, kernel, name) for name, arg in given.items() if name not in absent}
            options = {"arch": case.arch, "num_warps": num_warps, "num_stages": num_stages}
            calls.append(functools.partial(compiled, kernel, types, absent | constants, **options))

    with (
        mock.patch.object(module, "launch", launch),
        mock.patch.object(module, "capability", return_value=divmod(case.arch, 10)),
        mock.patch.object(module, "form", side_effect=lambda *key: chosen or form(*key)),
    ):
        window, softcap = (1000, 50.0) if case.features else (None, None)
        options = {"kv_scales": cache.scales, "window": window, "softcap": softcap}
        module.attention(q, cache.keys, cache.values, batch, scale=0.1, **options)
    of_items, of_partials = calls
    return of_partials() if merge else of_items()


def instruction(arch: int, lines: int) -> tuple[str, ...]:
    if lines < 64:
        return ("HMMA", "LDGSTS")
    return {80: ("HMMA", "LDGSTS"), 90: ("HGMMA", "UTMALDG"), 100: ("UTCHMMA", "UTMALDG")}[arch]


FLOOR = {(16, 64): 16, (16, 128): 12}  # warps of a multiprocessor, by lines and head size; else 8

CASES = [
    Case(arch, lines, head_dim, features=features)
    for arch in (80, 90, 100)
    for lines in (16, 64, 128)
    for head_dim in (64, 128, 256)
    for features in (False, True)
    if not (arch == 80 and lines * head_dim > 64 * 256)
    if not (features and (lines == 64 or head_dim == 64 or (head_dim == 256 and arch != 90)))
]
CASES += [
    *(Case(90, lines, head_dim) for lines in (16, 128) for head_dim in (80, 96)),
    *(Case(arch, 128, block_size=block_size) for arch in (90, 100) for block_size in (16, 64)),
    Case(90, 128, dtype=torch.float16),
    *(Case(arch, 16, head_dim, dtype=torch.float32) for arch in (80, 90, 100) for head_dim in (64, 128, 256)),
    Case(100, 64, 64, features=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case: Case) -> None:
    result = launched(case)
    floor = 8 if case.dtype is torch.float32 else FLOOR.get((case.lines, case.head_dim), 8)
    wanted = "HMMA" if case.dtype is torch.float32 else instruction(case.arch, case.lines)
    assert problems(result, instruction=wanted, min_warps_per_sm=floor) == []
    waits = {line.strip() for line in result.ptx.splitlines() if "wgmma.wait_group" in line}
    assert waits <= {"wgmma.wait_group.sync.aligned 0;"}
    assert case.arch != 80 or result.shared <= 99 << 10  # of 8.9


FEWER = [Case(90, lines, kept=kept) for lines in (16, 128) for kept in ("fp8", "int8", "int4")]
FEWER += [Case(arch, lines, kept="fp8") for arch in (80, 100) for lines in (16, 128)]
FEWER += [Case(90, 128, features=True, kept="int4"), Case(90, 16, dtype=torch.float32, kept="fp8")]
MORE = [Case(arch, 16, kept=kept) for arch in (80, 100) for kept in ("int8", "int4")]
MORE += [Case(arch, lines, features=True, kept="fp8") for arch in (80, 90, 100) for lines in (16, 128)]
MORE += [Case(arch, 128, features=True, kept=kept) for arch in (80, 100) for kept in ("int8", "int4")]
MORE += [Case(90, lines, dim, features=True, kept="int8") for lines in (16, 128) for dim in (64, 80, 256)]
MORE += [Case(90, 128, dim, features=True, kept=kept) for dim in (64, 256) for kept in ("fp8", "int4")]
MORE += [Case(90, 16, dtype=torch.float32, kept=kept) for kept in ("bf16", "int8", "int4")]
MORE += [Case(90, 128, dtype=torch.float16, kept=kept) for kept in ("bf16", "fp8")]


@pytest.mark.parametrize("case", [*FEWER, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)], ids=str)
def test_fewer_bits(case: Case) -> None:
    result = launched(case)
    single, floor = case.dtype is torch.float32, 16 if case.lines == 16 and case.head_dim <= 128 else 8
    product = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[case.arch] if case.lines >= 64 else "HMMA"
    ahead = () if single else ("UTMALDG",) if case.kept == "bf16" and case.arch > 80 else ("LDGSTS",)
    assert problems(result, instruction=(product, *ahead), min_warps_per_sm=8 if single else floor) == []
    waits = {line.strip() for line in result.ptx.splitlines() if "wgmma.wait_group" in line}
    assert waits <= {"wgmma.wait_group.sync.aligned 0;"}
    assert "wgmma" not in result.ptx or "fence.proxy.async" in result.ptx or "UTMALDG" in ahead
    assert case.arch != 80 or result.shared <= 99 << 10  # of 8.9
    assert result.count("I2F") <= 8  # of divisions by block sizes: no code is converted


@pytest.mark.parametrize("kept", ["fp8", "int8", "int4"])
def test_operations_of_a_number(kept: KVCacheDType) -> None:
    """What a decoding step needs to make numbers of codes, in a loop over whole tiles and one over masked ones.

    That is beside what plain numbers need. The design's budget is about 6.9 for a byte, which two of 4 bits share.
    """
    made, plain = (launched(Case(90, 16, kept=each)) for each in (kept, "auto"))
    names = ("LOP3", "SHF", "IMAD.SHL", "PRMT", "FADD", "FMUL", "F2FP")
    more, less = (each.num_warps * sum(each.count(name) for name in names) for each in (made, plain))
    assert 2 < (more - less) / (2 * 2 * 64 * 128 / 32) < 6


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_merge(arch: int, head_dim: int) -> None:
    result = launched(Case(arch, 16, head_dim), merge=True)
    assert problems(result, instruction=("LDG.E.128", "STG"), min_warps_per_sm=32) == []


def test_blocks_that_no_descriptor_takes() -> None:
    result = launched(Case(90, 128, block_size=24))
    assert problems(result, instruction="HGMMA", min_warps_per_sm=8) == []
    assert result.count("UTMALDG") == result.count("LDGSTS") == 0
    assert "fence.proxy.async" in result.ptx


def test_forms() -> None:
    assert form((8, 9), 128, 128, 32, torch.bfloat16) == Form(32, 8, 3)
    assert form((9, 0), 16, 128, 32, torch.bfloat16) == Form(64, 4, 3)
    assert [form((9, 0), 128, 128, size, torch.bfloat16).keys for size in (16, 32, 48, 64, 96, 128)] == [
        16,
        32,
        16,
        64,
        32,
        64,
    ]
    assert (
        form((9, 0), 64, 128, 32, torch.bfloat16)
        == form((10, 3), 64, 128, 32, torch.bfloat16)
        == Form(32, 4, 3, by_descriptor=True)
    )
    assert form((9, 0), 128, 128, 32, torch.bfloat16, "fp8") == Form(32, 8, 2)
    assert form((9, 0), 16, 128, 32, torch.bfloat16, "fp8") == Form(64, 8, 3)
    device = torch.device("cuda")
    for capability, most in (((8, 0), 64), ((9, 0), 128)):
        with mock.patch.object(module, "capability", return_value=capability):
            assert tuple(max_lines(device, dim, torch.bfloat16) for dim in (256, 128)) == (most, 128)
            assert max_lines(device, 64, torch.float32) == 16


def test_a_tile_that_spills_has_problems() -> None:
    found = problems(launched(Case(90, 128), Form(128, 4, 2)))
    assert any("spilled" in line for line in found)


def test_the_small_tile_is_not_what_prefill_needs() -> None:
    assert problems(launched(Case(90, 16)), instruction="HGMMA") == ["sm_90: no HGMMA"]


def test_serialised_products_have_problems() -> None:
    found = problems(launched(Case(90, 128, 256, 64), Form(64, 16, 2, by_descriptor=True)))
    assert any("C7512" in line for line in found)
