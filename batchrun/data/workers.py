"""Who works on an output: each worker keeps a file there, which it rewrites for as long as it lives.

A worker is gone once it has left, once its process on this host is dead, once its file (of a far one) has not changed
for its time to live by the clock of the one who watches, or is older than ten of these. To think wrongly that one is
gone costs repeated work, never a wrong result: results are safe by the commit protocol alone.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from batchrun.data.store import Store
from batchrun.errors import StoppedError

log = logging.getLogger(__name__)

WORKERS = "_batchrun/workers"
DEFAULT_TTL = 60.0  # seconds

_GONE_AFTER = 10  # times to live since a worker's file was written: it is gone to those, too, who look once
_START_TOLERANCE = 10.0  # seconds by which a process's start time may seem to move when the wall clock is set
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


@dataclass(frozen=True, slots=True)
class Owner:
    """The process behind an attempt."""

    attempt: str  # Store.writer
    host: str
    machine: str  # this boot and process namespace of the host: where ``pid`` means something
    pid: int
    started: float  # when the process started, seconds since 1970
    since: str  # when it came, ISO 8601
    ttl: float  # seconds of silence after which others may take over
    task: str | None = None  # of a Slurm job: its id, ``ARRAY_INDEX`` for one of an array

    @classmethod
    def current(cls, attempt: str, ttl: float) -> Owner:
        """This process."""
        return cls(
            attempt=attempt,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            since=timestamp(),
            ttl=ttl,
            task=_slurm_task(),
        )

    def state(self) -> Literal["alive", "dead", "elsewhere"]:
        """What this host can tell about the process."""
        if self.machine != _machine():
            return "elsewhere"
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) <= _START_TOLERANCE
            return "alive" if same and process.status() != psutil.STATUS_ZOMBIE else "dead"
        except psutil.NoSuchProcess:
            return "dead"
        except psutil.AccessDenied:
            return "alive"

    def __str__(self) -> str:
        task = f" (Slurm task {self.task})" if self.task else ""
        return f"process {self.pid} on {self.host}{task} since {self.since[:19]}"


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """What a worker's file says."""

    owner: Owner
    beat: int
    released: bool  # it has left
    written: str  # ISO 8601
    progress: dict[str, Any]  # what it last said of its progress: plain JSON data

    @property
    def age(self) -> float:
        """Seconds since it was written, as far as the clocks of both hosts agree."""
        written = datetime.datetime.fromisoformat(self.written)
        return (datetime.datetime.now(datetime.UTC) - written).total_seconds()


class Worker:
    """This process as a worker of an output; a context manager. It is known to others from the start on.

    A thread renews its file four times in ``ttl`` seconds, with what :attr:`progress` holds at the time.
    """

    def __init__(self, store: Store, *, ttl: float = DEFAULT_TTL) -> None:
        self.owner = Owner.current(store.writer, ttl)
        self.progress: dict[str, Any] = {}
        self._store = store
        self._beats = 0
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._keep, name="worker", daemon=True)
        self._thread.start()

    @property
    def attempt(self) -> str:
        return self.owner.attempt

    def leave(self) -> None:
        """Say that it has left: what it held is free at once. It may be called again."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=self.owner.ttl)
        try:
            self._beat(released=True)
        except StoppedError as error:
            log.warning("cannot tell that this worker has left: %s", error)

    def _keep(self) -> None:
        while not self._stop.wait(self.owner.ttl / 4):
            try:
                self._beat()
            except StoppedError as error:
                log.warning("cannot tell that this worker is alive: %s", error)

    def _beat(self, *, released: bool = False) -> None:
        record = WorkerFile(self.owner, self._beats, released, timestamp(), self.progress)
        self._store.put(worker_file(self.attempt), json.dumps(asdict(record), indent=1).encode())
        self._beats += 1

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class Watch:
    """What one process knows of the others; it has to look again and again to learn that a far one is silent."""

    def __init__(self, store: Store, ttl: float = DEFAULT_TTL) -> None:
        self._store = store
        self._ttl = ttl  # of a worker whose file cannot be read
        self._seen: dict[str, tuple[bytes, float]] = {}  # attempt -> its file, and since when that is the same

    def is_gone(self, attempt: str) -> bool:
        data = self._store.read_if_any(worker_file(attempt))
        if data is None:
            return True  # a worker's file is there before anything else of it
        record = parse_worker(data)
        state = record.owner.state() if record else "elsewhere"
        if record is not None and (state == "dead" or record.released or record.age > _GONE_AFTER * record.owner.ttl):
            return True
        known = self._seen.get(attempt)
        if known is None or known[0] != data:
            known = self._seen[attempt] = (data, now())
        return state == "elsewhere" and now() - known[1] > (record.owner.ttl if record else self._ttl)

    def living(self) -> dict[str, WorkerFile | None]:
        """Attempt -> file of the workers that are not known to be gone; None where it cannot be read."""
        attempts = [attempt for attempt in worker_attempts(self._store) if not self.is_gone(attempt)]
        return {attempt: read_worker(self._store, attempt) for attempt in attempts}

    def others(self, attempt: str) -> list[str]:
        """The living workers but that one, for people."""
        found = {name: worker for name, worker in self.living().items() if name != attempt}
        return [str(worker.owner) if worker else f"another worker ({name})" for name, worker in found.items()]


def worker_file(attempt: str) -> str:
    return f"{WORKERS}/{attempt}.json"


def worker_attempts(store: Store) -> list[str]:
    """The attempts that have a file, gone or not."""
    return [name.removeprefix(f"{WORKERS}/").removesuffix(".json") for name in store.names(WORKERS)]


def read_worker(store: Store, attempt: str) -> WorkerFile | None:
    """What the worker last said; None where its file is gone or cannot be read."""
    data = store.read_if_any(worker_file(attempt))
    return None if data is None else parse_worker(data)


def parse_worker(data: bytes) -> WorkerFile | None:
    try:
        record = json.loads(data)
        known = {field.name for field in fields(Owner)}
        owner = Owner(**{name: value for name, value in record.pop("owner").items() if name in known})
        datetime.datetime.fromisoformat(record["written"])
        return WorkerFile(owner=owner, **record)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def timestamp() -> str:
    """Now, in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def now() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def _machine() -> str:
    """Names this boot and process namespace, so that equal names mean that process ids can be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()}/{int(psutil.boot_time())}"


def _slurm_task() -> str | None:
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else os.environ.get("SLURM_JOB_ID")
