"""What tells this machine from others, and where batchrun keeps what it made for it. Standard library alone."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_X86_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_ARM_FIELDS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")


def describe_cpu() -> str:
    """The processor's model and features, which decide what code it can run and how fast."""
    description = [platform.system(), platform.machine(), platform.processor()]
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return "\n".join(description)
    fields = _X86_FIELDS + _ARM_FIELDS
    return "\n".join([*description, *(line for line in first.splitlines() if line.split("\t", 1)[0].strip() in fields)])


def slurm_processors() -> int | None:
    """Processors that Slurm gave each task of the job that this process is in, or None where it does not say.

    Not every cluster binds a task's processes to them.
    """
    share = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(share) if share.isdecimal() and int(share) > 0 else None


def cache_dir() -> Path:
    """Where batchrun keeps what it fetched or made: ``$BATCHRUN_CACHE``, else ``batchrun`` in the user's cache
    directory.

    Raises RuntimeError where there is no home directory.
    """
    if chosen := os.environ.get("BATCHRUN_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "batchrun"
