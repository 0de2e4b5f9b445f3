"""Compiles ``kernels.cpp`` on first use with the system's own C++ compiler and keeps the library in batchrun's cache.

The cached file is named by a hash of everything its machine code depends on (source, flags, compiler, processor), so a
home directory that is shared between unlike machines holds one library for each, and a new release builds its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch  # noqa: F401  # maps the OpenMP runtime that the library must share, so it comes before the library

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = sorted(SOURCE.parent.glob("*.h"))

# No -ffast-math: sums keep their order, NaN and infinity their meaning. Contraction is off because the compiler would
# choose case by case which multiply-adds to fuse; the kernels fuse explicitly. The two last flags drop only errno and
# floating-point exception flags, which change no value.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_SECONDS = 300

_X86_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_ARM_FIELDS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")


class BuildError(Exception):
    """The library cannot be built or loaded here; the text says why."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None after one warning where they cannot be built."""
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
        warnings.warn(f"no native CPU kernels, falling back to torch (slower): {error}", RuntimeWarning, stacklevel=3)
        return None


def build() -> Path:
    """The compiled library's path, compiling it if the cache has none for this machine.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the cache directory cannot be written.
    """
    command = find_compiler()
    version = _run([*command, "--version"])
    parts = (sources(), repr((command, FLAGS)).encode(), version.encode(), describe_cpu().encode())
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
    target = cache_dir() / f"kernels-{digest}.so"
    if not target.exists():
        _compile(command, target)
    return target


def sources() -> bytes:
    """All source text, which decides what the kernels compute."""
    return b"\0".join(path.read_bytes() for path in (SOURCE, *HEADERS))


def cache_dir() -> Path:
    """Where compiled libraries are kept: ``native`` under $BATCHRUN_CACHE or ~/.cache/batchrun."""
    root = os.environ.get("BATCHRUN_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "batchrun") / "native"


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX if that is set, else the first of c++, g++ and clang++ on the path."""
    wanted = os.environ.get("CXX")
    for candidate in [wanted] if wanted else ["c++", "g++", "clang++"]:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler ({f'CXX={wanted}' if wanted else 'c++, g++, clang++'} is not on the path)")


def describe_cpu() -> str:
    """The processor's model and features, which decide what ``-march=native`` means."""
    description = [platform.system(), platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text().split("\n\n", 1)[0]
        description += [
            line for line in first.splitlines() if line.split("\t", 1)[0].strip() in _X86_FIELDS + _ARM_FIELDS
        ]
    return "\n".join(description)


def _compile(command: list[str], target: Path) -> None:
    """Compile into a file of its own and move it into place, so that no process ever sees half a library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        _run([*command, *FLAGS, str(SOURCE), "-o", str(output)])
        output.replace(target)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
