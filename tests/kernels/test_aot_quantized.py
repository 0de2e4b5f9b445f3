"""What products of quantized weights become on GPUs: the tensor instructions meant, no spills, few operations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from batchrun.kernels import gpu
from batchrun.kernels.gpu import eight_bits, parts, planes
from batchrun.kernels.gpu.parts import Form
from tests.kernels.aot import ARCHS, Compiled, launched, problems

N = K = 8192
FLOATS = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
INTEGERS = {80: "IMMA", 89: "IMMA", 90: "IGMMA", 100: "IMMA"}
FP8 = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA"}
FEWEST_WARPS = {1: 16, 32: 16, 64: 8, 200: 8}  # of a multiprocessor


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def on(arch: int, call: Callable[[], object], chosen: Form | None = None) -> Compiled:
    """What the first launch of ``call`` becomes on such a device; ``chosen``: in this form."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (planes, eight_bits):
            patch.setattr(module, "capability", lambda device: divmod(arch, 10))
        if chosen is not None:
            patch.setattr(planes, "form", lambda *key: chosen)
        return launched(call, arch=arch, alone=True)[0]


@functools.cache
def of_planes(
    arch: int, code: str, group: int, rows: int, dtype: torch.dtype = torch.bfloat16, chosen: Form | None = None
) -> Compiled:
    words = empty(K * planes.BITS[code] // 32 // 16, N, 16, dtype=torch.int32)
    scales = empty(K // group, N, dtype=torch.int32)
    weight = planes.Planes(words, scales, empty(N), None, code, group, K, dtype)
    x, bias = empty(rows, K, dtype=dtype), empty(N, dtype=dtype)
    return on(arch, lambda: gpu.multiply_planes(x, weight, bias, dtype, None, fixed=False), chosen)


def of_bytes(arch: int, kind: torch.dtype, rows: int, *, blocks: bool = False) -> Compiled:
    x = eight_bits.Rounded(empty(rows, K, dtype=kind), empty(rows), empty(rows))
    scales = empty(N // 128, K // 128) if blocks else empty(N, 1)
    minimums = empty(N, 1) if kind is torch.int8 else None
    weight = empty(N, K, dtype=kind)
    call = functools.partial(gpu.multiply_bytes, x, weight, scales, minimums, None, torch.bfloat16, None, fixed=False)
    return on(arch, call)


def waits(result: Compiled) -> set[str]:
    return {line.strip() for line in result.ptx.splitlines() if "wgmma.wait_group" in line}


def rewritten(kernel: Any, text: str, other: str) -> Any:
    """The kernel with other text in its source."""
    changed = copy.copy(kernel)
    changed._unsafe_update_src(kernel.src.replace(text, other))
    return changed


PLANES = [(80, "int4", 32, 1), (80, "int8", 64, 200), (80, "fp8", K, 1), (80, "fp8", 128, 200)]
PLANES += [(90, code, group, rows) for code, group in (("int4", 32), ("int8", 64)) for rows in (1, 64, 200)]
PLANES += [(90, "int4", K, 1), (90, "int8", 16, 1), (100, "int4", 32, 1), (100, "int8", 64, 200)]
MORE = [
    (arch, code, group, rows) for arch in (80, 100) for code, group in (("int4", 32), ("int8", 64)) for rows in (1, 64)
]
MORE += [(90, code, group, 32) for code, group in (("int4", 32), ("int8", 64))]
MORE += [(arch, "int4", group, rows) for arch in ARCHS for group in (128, K) for rows in (1, 200)]
MORE += [(80, "fp8", 128, 1), (80, "fp8", K, 64)]
CASES = [*PLANES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE if each not in PLANES)]


@pytest.mark.parametrize(("arch", "code", "group", "rows"), CASES)
def test_planes(arch: int, code: str, group: int, rows: int) -> None:
    result = of_planes(arch, code, group, rows)
    ahead = "LDGSTS" if arch == 80 else "UTMALDG"
    assert problems(result, instruction=(FLOATS[arch], ahead), min_warps_per_sm=FEWEST_WARPS[rows]) == []
    assert waits(result) <= {"wgmma.wait_group.sync.aligned 0;"}
    assert result.count("I2F") <= 2  # for a division of sizes: no code is converted
    assert arch != 80 or result.shared <= 99 << 10  # of 8.9


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [(90, torch.float16), (80, torch.float32), (90, torch.float32), (100, torch.float32)],
)
def test_other_activations(arch: int, dtype: torch.dtype) -> None:
    result = of_planes(arch, "int4", 32, 16, dtype)
    wanted = "HMMA" if dtype is torch.float32 else FLOATS[arch]
    assert problems(result, instruction=wanted, min_warps_per_sm=8) == []


def test_operations_of_a_weight() -> None:
    """Of 4 bits, in a loop over a tile and in what comes before and after it: the design's budget is about 3.5."""
    result = of_planes(90, "int4", 128, 1)
    weights = 128 * 128 / (32 * result.num_warps)  # of a tile, for a thread
    of_numbers = sum(result.count(name) for name in ("LOP3", "SHF", "FFMA", "F2FP", "FMUL", "HADD2"))
    assert of_numbers / weights < 4


BYTES = [(80, 1), (90, 1), (90, 64), (90, 200), (100, 1)]
MORE_BYTES = [(80, 64), (80, 200), (89, 1), (89, 64), (90, 32), (100, 64), (100, 200)]


@pytest.mark.parametrize(
    ("arch", "rows"), [*BYTES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_BYTES)]
)
def test_bytes(arch: int, rows: int) -> None:
    ahead = "LDGSTS" if arch < 90 else "UTMALDG"
    result = of_bytes(arch, torch.int8, rows)
    assert problems(result, instruction=(INTEGERS[arch], ahead), min_warps_per_sm=8) == []
    assert arch >= 90 or result.shared <= 99 << 10
    if arch == 80:
        return
    for blocks in (False, True):
        result = of_bytes(arch, torch.float8_e4m3fn, rows, blocks=blocks)
        assert problems(result, instruction=(FP8[arch], ahead), min_warps_per_sm=8) == []
        assert waits(result) <= {"wgmma.wait_group.sync.aligned 0;"}


@pytest.mark.parametrize("arch", ARCHS)
def test_what_goes_with_them(arch: int) -> None:
    vectors = ("LDG.E.128", "STG.E.128")
    summed = on(arch, lambda: parts.add_parts(empty(8, 16, N), None, empty(16, N, dtype=torch.bfloat16)))
    assert problems(summed, instruction="LDG.E.128", min_warps_per_sm=32) == []
    x = empty(9, 4096, dtype=torch.bfloat16)
    rounded = on(arch, lambda: gpu.quantize_rows(x, torch.int8))
    assert problems(rounded, instruction=vectors, min_warps_per_sm=32) == []
    if arch >= 90:
        rounded = on(arch, lambda: gpu.quantize_rows(x, torch.float8_e4m3fn))
        assert problems(rounded, instruction="LDG.E.128", min_warps_per_sm=32) == []
    words, scales = empty(K // 128, N, 16, dtype=torch.int32), empty(K // 32, N, dtype=torch.int32)
    weight = planes.Planes(words, scales, empty(N), None, "int4", 32, K, torch.bfloat16)
    unpacked = on(arch, weight.to_dense)
    assert problems(unpacked, instruction="LDG", min_warps_per_sm=16) == []


def test_a_tile_that_spills_has_problems() -> None:
    found = problems(of_planes(90, "int4", 32, 64, chosen=Form(256, 256, 8, 2)))
    assert any("spilled" in line for line in found)


def test_few_outputs_are_not_what_hopper_multiplies() -> None:
    found = problems(of_planes(90, "int4", 32, 64, chosen=Form(32, 64, 4, 2)), instruction="HGMMA")
    assert found == ["sm_90: no HGMMA"]


def test_a_product_without_an_end_of_its_own_has_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does about it is seen: sums that the next step goes on with are not waited for."""
    source = planes.plane_product_kernel.src
    chained = "acc = tl.dot(weight.to(DOT), tl.trans(values.to(DOT)), acc)"
    waiting = "acc += tl.dot(weight.to(DOT), tl.trans(values.to(DOT))) * unit"
    assert waiting in source
    monkeypatch.setattr(planes, "plane_product_kernel", rewritten(planes.plane_product_kernel, waiting, chained))
    assert waits(of_planes.__wrapped__(90, "int4", 128, 1)) > {"wgmma.wait_group.sync.aligned 0;"}
