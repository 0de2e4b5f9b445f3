"""The ahead-of-time harness sees what it is there to see: planted bad kernels have problems, a plain one has none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.kernels.aot import ARCHS, compiled, problems, warnings


@triton.jit
def _scale(x, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < n).to(tl.float32) * 2, mask=at < n)


@triton.jit
def _product(a, b, out, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    rows, columns, depth = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for begin in range(0, 1024, K):
        left = tl.load(a + rows * 1024 + begin + depth[None, :])
        acc += tl.dot(left, tl.load(b + columns * 1024 + begin + depth[:, None]))
    tl.store(out + rows * N + columns, acc)


def scale(arch: int, n: str = "i32:16"):
    return compiled(_scale, {"x": "*bf16", "out": "*bf16", "n": n}, {"SIZE": 1024}, arch=arch)


def product(arch: int, m: int, n: int, num_warps: int):
    types = {"a": "*bf16", "b": "*bf16", "out": "*fp32"}
    return compiled(_product, types, {"K": 64, "M": m, "N": n}, arch=arch, num_warps=num_warps)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_plain_kernel_has_no_problems(arch: int) -> None:
    result = scale(arch)
    assert problems(result, instruction=("LDG.E.128", "STG.E.128"), min_warps_per_sm=64) == []
    assert result.count("LDG") > 0
    assert f".target sm_{arch}" in result.ptx
    assert 0 < result.registers <= 64
    assert result.shared == 0


def test_a_spilling_kernel_has_problems() -> None:
    (found, *_) = problems(product(80, 128, 256, 4))
    assert "spilled" in found


def test_missing_instructions_and_low_occupancy_are_problems() -> None:
    result = product(90, 64, 64, 4)
    assert problems(result, instruction="HGMMA") == []
    assert problems(result, instruction="QGMMA") == ["sm_90: no QGMMA"]
    (found,) = problems(result, min_warps_per_sm=64)
    assert "warps on a multiprocessor" in found
    assert problems(scale(90, n="i32"), instruction="LDG.E.128") == ["sm_90: no LDG.E.128"]


def test_what_ptxas_says_of_lost_speed_is_a_problem() -> None:
    told = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert warnings(f"ptxas info    : Used 40 registers\n{told}\n") == (told,)
    assert problems(replace(scale(90), warnings=(told,))) == [f"sm_90: ptxas: {told}"]


@pytest.mark.slow
def test_kernels_become_the_same_with_the_oldest_triton(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    installed = subprocess.run([*pip, "--target", str(tmp_path), "triton==3.6.*"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip cannot install it: {installed.stderr.strip()[-200:]}")
    tests = sorted(str(path) for path in Path(__file__).parent.glob("test_aot_*.py"))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    version = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    environment = os.environ | {"PYTHONPATH": path}
    assert subprocess.run(version, env=environment, capture_output=True, text=True).stdout.startswith("3.6.")
    selected = ["-m", "not slow", "-k", "90"]  # those of Hopper
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", *selected],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout[-8000:]
