"""Compiles the kernels on first use with the system's own C++ compiler and keeps the library in batchrun's cache.

The cached file is named by a hash of everything its machine code depends on (source, flags, compiler, processor), so a
home directory that is shared between unlike machines holds one library for each, and a new release builds its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch  # noqa: F401  # maps the OpenMP runtime that the library must share, so it comes before the library

from ..machine import cache_dir, describe_cpu

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))

# No -ffast-math: sums keep their order, NaN and infinity their meaning. Contraction is off because the compiler would
# choose case by case which multiply-adds to fuse; the kernels fuse explicitly. The two last flags drop only errno and
# floating-point exception flags, which change no value.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_SECONDS = 300


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
    target = cache_dir() / "native" / f"kernels-{digest}.so"
    if not target.exists():
        _compile_once(command, target)
    return target


def sources() -> bytes:
    """All source text, which decides what the kernels compute."""
    return b"\0".join(path.read_bytes() for path in (*SOURCES, *HEADERS))


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX if that is set, else the first of c++, g++ and clang++ on the path."""
    wanted = os.environ.get("CXX")
    for candidate in [wanted] if wanted else ["c++", "g++", "clang++"]:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler ({f'CXX={wanted}' if wanted else 'c++, g++, clang++'} is not on the path)")


def _compile_once(command: list[str], target: Path) -> None:
    """Compile unless another process does, for which to wait: the workers of a job start together."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # where a file system has no locks, each compiles, and either library does
            fcntl.flock(folder, fcntl.LOCK_EX)
        if not target.exists():
            _compile(command, target)
    finally:
        os.close(folder)


def _compile(command: list[str], target: Path) -> None:
    """Compile all sources at once, link, and move the library into place, so that no process ever sees half of it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, ThreadPoolExecutor() as pool:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in SOURCES]
        compile_one = [*command, *FLAGS, "-c", "-o"]
        list(pool.map(_run, ([*compile_one, out, str(source)] for out, source in zip(objects, SOURCES, strict=True))))
        output = Path(scratch) / target.name
        _run([*command, *FLAGS, "-shared", "-o", str(output), *objects])
        output.replace(target)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
