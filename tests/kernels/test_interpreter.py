"""Runs the checks of ``interpreted/`` under Triton's interpreter, each file in a process of its own.

The interpreter is chosen where kernels are imported, and a kernel that reads out of bounds ends its process. That the
checks see a fault is itself tested, with faults that are written into a copy of the kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))

FAULTS = {
    "an unmasked tail": ("norm.py", "column, mask=inside, other=0.0)", "column)", "elementwise", "test_norms"),
    "a missing scale": ("norm.py", "normed * (OFFSET + scale)", "normed", "elementwise", "test_norms"),
    "the last of equals": ("sampling.py", "values > best", "values >= best", "sampling", "test_argmax"),
    "a round too few": ("noise.py", "static_range(10)", "static_range(9)", "sampling", "same_bits"),
    "one token too many": ("filters.py", "weight, 0.0)) >= goal", "weight, 0.0)) > goal", "filters", "test_top_k"),
    "noise too seldom": ("sampling.py", "reached - MAX_GUMBEL", "reached", "sampling", "test_draw_equals"),
    "nibbles the other way round": (
        "planes.py",
        "20 - 4 * plane",
        "4 * plane - 8",
        "quantized",
        "test_groups and Int4",
    ),
    "a forgotten minimum": ("planes.py", "+ least[:, None]", "", "quantized", "test_groups and True"),
    "the next group's scale": ("planes.py", "k - 1) // GROUP", "k - 1) // GROUP ^ 1", "quantized", "test_groups"),
    "integers without a sign": ("planes.py", "least -= 128 * scale", "pass", "quantized", "test_groups and Int8"),
    "a part left out": ("parts.py", "tl.static_range(COUNT)", "tl.static_range(COUNT - 1)", "quantized", "test_groups"),
    "minimums with every part": (
        *("eight_bits.py", "tl.where(tl.program_id(2) == 0, ", "tl.where(True, ", "quantized"),
        "test_integers_of_one_group",
    ),
    "one scale for all blocks": ("eight_bits.py", " + start // BLOCK)", ")", "quantized", "test_fp8"),
    "halves of a key the other way round": (
        *("kv_numbers.py", "words & 15) - zero, _raised(words >> 4)", "words >> 4) - zero, _raised(words & 15)"),
        *("attention", "fewer_bits and int4"),
    ),
    "a forgotten zero": ("kv_numbers.py", "& 15)[:, None]", "& 0)[:, None]", "attention", "fewer_bits and int4"),
    "values without their scales": (
        *("attention.py", "weight *= v_scale[None, :]", "weight *= 1.0", "attention", "fewer_bits and int8"),
    ),
    "scales of another head": (
        *("attention.py", "tl.load(k_scales + first + place)", "tl.load(k_scales + first - of_head + place)"),
        *("attention", "fewer_bits and fp8"),
    ),
    "scales kept for another head": (
        *("kv_numbers.py", "head * (stride // 4)", "(head ^ 1) * (stride // 4)", "elementwise", "fewer_bits and int8"),
    ),
    "halves away from zero": ("kv_numbers.py", "(size >> 20 & 1)", "1", "elementwise", "fewer_bits and float8"),
    "what no line sees weighs": (
        *("attention.py", "weight = tl.where(seen, weight, 0.0)\n        acc", "pass\n        acc"),
        *("attention", "bad_vector and values and int8"),
    ),
    "one block alone": ("filters.py", "while (size > BLOCK)", "while (size < 0)", "filters", "workspace"),
}


# What all runs import is imported once: for each line of its input, a folder and pytest's arguments, a fork runs pytest
# there, its output in the file `log`, and the fork's exit code is printed.
SERVER = """
import os, sys
import hypothesis, numpy, pydantic, pytest, torch, triton
for line in sys.stdin:
    folder, *arguments = line.rstrip("\\n").split("\\t")
    if not (fork := os.fork()):
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT), 1)
        code = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_interpreted(path: Path) -> None:
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": python_path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    how = f"killed by signal {-result.returncode}: out of bounds?" if result.returncode < 0 else "failed"
    assert result.returncode == 0, f"{path.name} {how}\n{result.stdout[-8000:]}\n{result.stderr[-2000:]}"


def plant(fault: str, folder: Path) -> str:
    """Write the kernels with a fault, and their checks, into ``folder``; returns the line that runs those to fail."""
    file, text, faulty, name, selected = FAULTS[fault]
    shutil.copytree(ROOT / "batchrun", folder / "batchrun", ignore=shutil.ignore_patterns("kernels", "__pycache__"))
    shutil.copytree(ROOT / "kernels", folder / "batchrun" / "kernels")
    for checks in ("conftest.py", f"check_{name}.py"):
        shutil.copy(ROOT / "tests" / "kernels" / "interpreted" / checks, folder)
    kernel = folder / "batchrun" / "kernels" / "gpu" / file
    source = kernel.read_text(encoding="utf-8")
    assert text in source
    kernel.write_text(source.replace(text, faulty), encoding="utf-8")
    return "\t".join([str(folder), f"check_{name}.py", "-q", "-x", "-p", "no:cacheprovider", "-k", selected])


@pytest.mark.parametrize("name", sorted({name for _, _, _, name, _ in FAULTS.values()}))
def test_planted_faults_are_seen(name: str, tmp_path: Path) -> None:
    faults = [fault for fault in FAULTS if FAULTS[fault][3] == name]
    folders = [tmp_path / str(number) for number in range(len(faults))]
    lines = [plant(fault, folder) for fault, folder in zip(faults, folders, strict=True)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SERVER]
    served = subprocess.run(
        command, env=environment, input="\n".join(lines), capture_output=True, text=True, check=True
    )
    for fault, folder, code in zip(faults, folders, map(int, served.stdout.split()), strict=True):
        log = (folder / "log").read_text(encoding="utf-8")
        assert code == 1 or code < 0, f"{fault}: {log[-4000:]}"
        assert code < 0 or "1 failed" in log, fault
