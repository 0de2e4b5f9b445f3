"""The native kernels' own tests once more, compiled otherwise: with checks, and as for processors that can do less."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from batchrun.kernels.cpu import build
from batchrun.kernels.machine import describe_cpu
from tests.marks import needs_kernels

HERE = Path(__file__).parent
TESTS = [
    HERE / "test_cpu.py",
    HERE / "test_grouped.py",
    HERE / "test_kv_cache.py",
    HERE.parent / "engine" / "test_sampler.py",
]
RUN = """
import sys
import pytest
from hypothesis import settings
from batchrun.kernels.cpu import build
flags, *tests = sys.argv[1:]
build.FLAGS += tuple(flags.split())
settings.register_profile("few", max_examples=10)
settings.load_profile("few")
chosen = "test_grouped or float64 or argmax or bits or nan or extreme or refuses or window or kernel_draws or kept"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *tests]))
"""

pytestmark = [pytest.mark.slow, needs_kernels]


def run_tests(flags: str, cache: Path, **environment: str) -> Path:
    """Run them in a process of its own; returns the library that they used."""
    environment = {**os.environ, "BATCHRUN_CACHE": str(cache), "OMP_NUM_THREADS": "2", **environment}
    command = [sys.executable, "-c", RUN, flags, *map(str, TESTS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert " passed" in run.stdout
    (library,) = (cache / "native").iterdir()
    return library


def sanitizer() -> str | None:
    """The address sanitizer's library, which has to be loaded before all others; None where there is none."""
    try:
        found = subprocess.run([*build.find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True)
    except build.BuildError:
        return None
    path = Path(found.stdout.strip())
    return str(path.resolve()) if path.is_absolute() and path.exists() else None


@pytest.mark.skipif(sanitizer() is None, reason="no compiler with an address sanitizer")
def test_addresses_and_undefined_behaviour(tmp_path: Path) -> None:
    options = {"LD_PRELOAD": str(sanitizer()), "ASAN_OPTIONS": "detect_leaks=0"}  # Python's own
    run_tests("-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all", tmp_path, **options)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.parametrize(
    ("flags", "needed", "columns"),
    [
        ("-march=x86-64", "", 8),
        ("-march=x86-64-v3", "avx2", 16),
        ("-mno-avx512bf16 -mno-avx512vnni", "avx512bw", 48),
    ],
)
def test_narrower_processors(flags: str, needed: str, columns: int, tmp_path: Path) -> None:
    if needed not in describe_cpu():
        pytest.skip(f"this processor has no {needed}")
    library = ctypes.CDLL(str(run_tests(flags, tmp_path)))
    assert (library.batchrun_panel_columns(), library.batchrun_multiplies_bf16()) == (columns, 0)
