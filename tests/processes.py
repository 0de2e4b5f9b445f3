"""Processes that tests start and kill."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

# Forked from a server that has imported what they run, and done nothing: 20 starts in place of 20 imports, and no
# connection shared with the test. A test process has one such server, so there is one list of what it imports.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.runs", "tests.test_storage_faults"])


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float = 20) -> None:
    """Wait for processes of others. One that its new parent has not taken notice of, which can take long, has ended."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"{process} goes on"
                time.sleep(0.01)
