"""OpenMP keeps a pool of workers for each thread that computes; an engine's is that of its steps alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import sys, threading
from pathlib import Path
from batchrun import Engine, SamplingParams

def workers():
    "Threads that are not Python's, while an engine of so many threads is between its steps."
    ours = {thread.native_id for thread in threading.enumerate()}
    return sum(int(task.name) not in ours for task in Path("/proc/self/task").iterdir())

for num_threads in (1, 2):
    engine = Engine(sys.argv[1], device="cpu", max_model_len=64, kv_cache_memory="1MiB", num_threads=num_threads)
    list(engine.generate([[3, 4, 5] * 8] * 4, SamplingParams(max_tokens=8)))
    print(workers())
    engine.close()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_loading_leaves_no_workers_behind(tiny_model: Path) -> None:
    command = [sys.executable, "-c", COUNT, str(tiny_model)]
    one, two = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert two == one + 1
