"""Several workers of a job on one machine: processes with processors or a GPU of their own, started again if they die.

The workers are ordinary ``batchrun submit`` processes that share the output; nothing here knows what they do.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from batchrun.engine.memory import Device, visible_gpus
from batchrun.errors import EXIT_BAD_JOB, EXIT_OK, EXIT_ROW_ERRORS, EXIT_STOPPED, EXIT_THRESHOLD, JobError
from batchrun.kernels.machine import slurm_processors
from batchrun.signals import StopSignals

SUPERVISED = "BATCHRUN_SUPERVISED"  # set for a worker that is to stop when its standard input ends

_MOST_DEATHS = 20  # of one worker in a row; to find a row that kills its worker takes about eight
_LONG_LIFE_SECONDS = 600.0  # after which a death is the first one again
_RESTART_SECONDS = 1.0
_PAUSE_SECONDS = 15.0  # before a worker is started again that gave up: what it needs, its storage say, is away
_LOOK_SECONDS = 2.0  # between looks at whether all workers are told to stop
_POLL_SECONDS = 0.1
_ENDED = (EXIT_OK, EXIT_ROW_ERRORS, EXIT_THRESHOLD)


@dataclass
class _Worker:
    """One place for a worker, and the process that has it now."""

    number: int
    command: Sequence[str]
    processors: set[int]  # empty: all
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    relay: threading.Thread | None = None
    started_at: float = 0.0
    deaths: int = 0
    restart_at: float = 0.0
    code: int | None = None  # of a process that is not started again

    def start(self) -> None:
        self.started_at = time.monotonic()
        before = os.sched_getaffinity(0)
        if self.processors:
            os.sched_setaffinity(0, self.processors)  # of this thread: the child inherits it
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **self.environment, SUPERVISED: "1"},
                start_new_session=True,  # a terminal's Ctrl-C comes to the supervisor alone
            )
        finally:
            os.sched_setaffinity(0, before)
        assert self.process.stderr is not None
        self.relay = threading.Thread(target=self._relay, args=(self.process.stderr,), daemon=True)
        self.relay.start()

    def _relay(self, lines: IO[bytes]) -> None:
        for line in lines:
            sys.stderr.write(f"worker {self.number}: {line.decode(errors='replace')}")
            sys.stderr.flush()

    def poll(self) -> int | None:
        """The exit code of a process that has ended since; it is no more then."""
        code = self.process.poll() if self.process is not None else None
        if code is not None and self.relay is not None:
            self.relay.join()
            self.process = self.relay = None
        return code

    def send(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)


def run_workers(
    command: Sequence[str], count: int, device: Device, stop: StopSignals, told_to_stop: Callable[[], bool]
) -> int:
    """Run ``command`` in ``count`` processes until they have done the job; returns the exit code for all of it.

    They end when ``stop`` or ``told_to_stop`` says so. One that dies is started again, a bounded number of times.
    Raises JobError for more workers than GPUs.
    """
    workers = [
        _Worker(number, command, processors, environment)
        for number, (processors, environment) in enumerate(_places(count, device), 1)
    ]
    for worker in workers:
        worker.start()
    try:
        return _watch(workers, stop, told_to_stop)
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)


def _watch(workers: Sequence[_Worker], stop: StopSignals, told_to_stop: Callable[[], bool]) -> int:
    stopping, look_at = False, 0.0
    while any(worker.code is None for worker in workers):
        told = stop.reason is not None
        if time.monotonic() >= look_at:
            told, look_at = told or told_to_stop(), time.monotonic() + _LOOK_SECONDS
        # What is wrong with the job for one of them is so for the others.
        if not stopping and (told or any(worker.code in (EXIT_BAD_JOB, EXIT_THRESHOLD) for worker in workers)):
            stopping = True
            for worker in workers:
                worker.send(signal.SIGTERM)
        for worker in workers:
            if worker.code is None:
                _look_after(worker, told_to_stop, stopping=stopping)
        time.sleep(_POLL_SECONDS)
    codes = [worker.code for worker in workers]
    ranked = (EXIT_BAD_JOB, EXIT_THRESHOLD, EXIT_ROW_ERRORS, EXIT_OK)
    return next((code for code in ranked if code in codes), EXIT_STOPPED)


def _look_after(worker: _Worker, told_to_stop: Callable[[], bool], *, stopping: bool) -> None:
    """Start a worker that has ended before its time again, unless it has too often, or is to end."""
    if worker.process is None:
        if stopping:
            worker.code = EXIT_STOPPED
        elif time.monotonic() >= worker.restart_at:
            worker.start()
        return
    lived = time.monotonic() - worker.started_at
    code = worker.poll()
    if code is None:
        return
    if code in _ENDED or code == EXIT_BAD_JOB or stopping or (code == EXIT_STOPPED and told_to_stop()):
        worker.code = code if code >= 0 else EXIT_STOPPED
        return
    worker.deaths = 1 if lived > _LONG_LIFE_SECONDS else worker.deaths + 1
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if worker.deaths >= _MOST_DEATHS:
        print(f"worker {worker.number} {how}, for the {worker.deaths}th time: it is given up", file=sys.stderr)
        worker.code = EXIT_STOPPED
    else:
        pause = _PAUSE_SECONDS if code == EXIT_STOPPED else _RESTART_SECONDS
        print(f"worker {worker.number} {how}: it is started again", file=sys.stderr)
        worker.restart_at = time.monotonic() + pause


def _places(count: int, device: Device) -> list[tuple[set[int], Mapping[str, str]]]:
    """Processors and environment of each worker: groups of neighbouring processors, or one GPU each."""
    if device == "cuda":
        gpus = visible_gpus()
        if count > len(gpus):
            raise JobError(f"--workers {count}: there are {len(gpus)} GPUs, and each worker needs one of its own")
        return [(set(), {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:count]]
    allowed = sorted(os.sched_getaffinity(0))
    share = min(len(allowed), slurm_processors() or len(allowed))
    if share < max(count, len(allowed)):  # not enough for groups, or shared with others that Slurm does not keep apart
        return [(set(), {"OMP_NUM_THREADS": str(max(1, share // count))})] * count
    bounds = [len(allowed) * number // count for number in range(count + 1)]
    return [(set(allowed[begin:end]), {}) for begin, end in itertools.pairwise(bounds)]


def stop_with_supervisor() -> None:
    """In a supervised worker: stop as on SIGTERM when the supervisor is gone."""
    if os.environ.pop(SUPERVISED, None) is None:
        return

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
