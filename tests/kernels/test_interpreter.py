"""Runs the checks of ``interpreted/`` under Triton's interpreter, each file in a process of its own.

The interpreter is chosen where kernels are imported, and a kernel that reads out of bounds ends its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
ROOT = Path(__file__).parents[2]

pytest.importorskip("triton")


def check(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1"} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_interpreted(path: Path) -> None:
    result = check(path)
    how = f"killed by signal {-result.returncode}: out of bounds?" if result.returncode < 0 else "failed"
    assert result.returncode == 0, f"{path.name} {how}\n{result.stdout[-8000:]}\n{result.stderr[-2000:]}"
