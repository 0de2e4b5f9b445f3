"""The native kernels' own tests once more, with the compiler's checks for bad addresses and undefined behaviour."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchrun.kernels.cpu import build

HERE = Path(__file__).parent
TESTS = [HERE / "test_cpu.py", HERE / "test_int8.py", HERE.parent / "engine" / "test_sampler.py"]
RUN = """
import sys
import pytest
from hypothesis import settings
from batchrun.kernels.cpu import build
build.FLAGS += ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
settings.register_profile("few", max_examples=10)
settings.load_profile("few")
chosen = "test_int8 or float64 or argmax or bits or nan or refuses or window or kernel_draws"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *sys.argv[1:]]))
"""


def runtime() -> str | None:
    """The address sanitizer's library, which has to be loaded before all others; None where there is none."""
    try:
        found = subprocess.run([*build.find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True)
    except build.BuildError:
        return None
    path = Path(found.stdout.strip())
    return str(path.resolve()) if path.is_absolute() and path.exists() else None


@pytest.mark.slow
@pytest.mark.skipif(runtime() is None, reason="no compiler with an address sanitizer")
def test_the_kernels_tests_under_sanitizers(tmp_path: Path) -> None:
    environment = os.environ | {
        "LD_PRELOAD": str(runtime()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "BATCHRUN_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "2",
    }
    run = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, TESTS)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert " passed" in run.stdout
