"""Who may work on something: leases with epochs, kept in the output's own storage.

A lease is a chain of exclusively created files ``NAME-EPOCH.json``; the newest epoch holds it. Its owner renews a
``.beat`` file beside it. A lease is free once it is released, once its process on this host is dead, or once its beat
has not changed for its time to live, by the clock of the one who watches. Taking it creates the next epoch; older
ones are removed only then, so that the newest epoch never goes down. A wrong lease costs repeated work, never a wrong
result: results are safe by the commit protocol alone.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil

from batchrun.data.store import Store
from batchrun.errors import StoppedError

log = logging.getLogger(__name__)

LEASES = "_batchrun/leases"
DEFAULT_TTL = 60.0  # seconds

_START_TOLERANCE = 10.0  # seconds by which a process's start time may seem to move when the wall clock is set
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


class HeldError(StoppedError):
    """Another process holds the lease; the text names it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process behind a lease."""

    attempt: str  # Store.writer
    host: str
    machine: str  # this boot and process namespace of the host: where ``pid`` means something
    pid: int
    started: float  # when the process started, seconds since 1970
    since: str  # when the lease was taken, ISO 8601
    ttl: float  # seconds of silence after which others may take over

    @classmethod
    def current(cls, attempt: str, ttl: float) -> Owner:
        """This process."""
        return cls(
            attempt=attempt,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            ttl=ttl,
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
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """A held lease, renewed by a thread of its own until it is released. Use :func:`acquire`."""

    def __init__(self, store: Store, name: str, epoch: int, owner: Owner) -> None:
        self.name = name
        self.epoch = epoch
        self.owner = owner
        self._store = store
        self._superseded = False
        self._renewed = _now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether others may rightly think that it is theirs: a newer epoch was seen, or our beat was silent too long.

        Silence can pass (storage that was away for a while); being superseded cannot.
        """
        return self._superseded or _now() - self._renewed > self.owner.ttl

    def release(self) -> None:
        """Gives it up: the next one need not wait. Does nothing when it is gone already."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=self.owner.ttl)
        if not self._superseded:
            self._beat(released=True)

    def _keep(self) -> None:
        beats = 0
        while not self._superseded:
            asked = _now()
            try:
                if _newest_epoch(self._store, self.name) > self.epoch:
                    self._superseded = True
                    return
                self._beat(count=beats)
                self._renewed = asked
                beats += 1
            except StoppedError as error:
                log.warning("cannot renew lease %s: %s", self.name, error)
            if self._stop.wait(self.owner.ttl / 4):
                return

    def _beat(self, count: int = 0, *, released: bool = False) -> None:
        content = {"attempt": self.owner.attempt, "beat": count, "released": released}
        self._store.put(_file(self.name, self.epoch, "beat"), json.dumps(content).encode())

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def acquire(store: Store, name: str, *, ttl: float = DEFAULT_TTL) -> Lease:
    """Takes the lease ``name``, waiting at most the holder's time to live to learn whether a far holder is alive.

    Raises :class:`HeldError` (exit code 75), naming the holder, when it is.
    """
    first: tuple[int, bytes | None] | None = None
    watched_since, waiting = _now(), False
    while True:
        epoch = _newest_epoch(store, name)
        owner = _owner(store, name, epoch)
        beat = store.read_if_any(_file(name, epoch, "beat")) if epoch else None
        state = "dead" if epoch == 0 or _is_released(beat) else owner.state() if owner else "elsewhere"
        seen = (epoch, beat)
        first = first or seen
        silent = _now() - watched_since > (owner.ttl if owner else ttl)
        if state == "dead" or (state == "elsewhere" and seen == first and silent):
            lease = _take(store, name, epoch + 1, Owner.current(store.writer, ttl))
            if lease:
                return lease
            first, watched_since = None, _now()
        elif state == "alive" or seen != first:
            by = owner or "another process"
            raise HeldError(f"{store.url} is held by {by}: let it finish or stop it, then run the same command again")
        else:
            if not waiting:
                log.warning(
                    "%s was taken by %s: waiting to see whether it is alive", store.url, owner or "another process"
                )
            waiting = True
            time.sleep(min(1.0, ttl / 20))


def holder(store: Store, name: str) -> Owner | None:
    """Who holds the lease as far as one look can tell: it is neither released nor its process known to be dead."""
    epoch = _newest_epoch(store, name)
    owner = _owner(store, name, epoch)
    if owner is None or _is_released(store.read_if_any(_file(name, epoch, "beat"))):
        return None
    return None if owner.state() == "dead" else owner


def live_attempts(store: Store) -> set[str]:
    """The attempts behind all leases that are held as far as one look can tell."""
    names = {match[1] for file in store.names(LEASES) if (match := re.fullmatch(rf"{LEASES}/(.+)-\d{{8}}\.json", file))}
    return {owner.attempt for name in names if (owner := holder(store, name))}


def _take(store: Store, name: str, epoch: int, owner: Owner) -> Lease | None:
    """The lease at that epoch, or None if another was faster."""
    record = _file(name, epoch, "json")
    if not store.create(record, json.dumps(asdict(owner)).encode()):
        return None
    if _newest_epoch(store, name) > epoch:  # the listing that we started from was old: this epoch had come and gone
        store.delete([record])
        return None
    older = [file for file in store.names(LEASES) if (e := _epoch_of(file, name)) is not None and e < epoch]
    store.delete(older)
    return Lease(store, name, epoch, owner)


def _owner(store: Store, name: str, epoch: int) -> Owner | None:
    """Who took that epoch; None when the record cannot be read."""
    data = store.read_if_any(_file(name, epoch, "json")) if epoch else None
    try:
        return Owner(**json.loads(data)) if data else None
    except (ValueError, TypeError):
        return None


def _newest_epoch(store: Store, name: str) -> int:
    """The newest epoch with a record, or 0."""
    records = (file for file in store.names(LEASES) if file.endswith(".json"))
    return max((epoch for file in records if (epoch := _epoch_of(file, name)) is not None), default=0)


def _epoch_of(file: str, name: str) -> int | None:
    match = re.fullmatch(rf"{LEASES}/{re.escape(name)}-(\d{{8}})\.(json|beat)", file)
    return int(match[1]) if match else None


def _file(name: str, epoch: int, suffix: str) -> str:
    return f"{LEASES}/{name}-{epoch:08d}.{suffix}"


def _is_released(beat: bytes | None) -> bool:
    try:
        return beat is not None and bool(json.loads(beat)["released"])
    except (ValueError, TypeError, KeyError):
        return False


def _machine() -> str:
    """Names this boot and process namespace, so that equal names mean that process ids can be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()}/{int(psutil.boot_time())}"


def _now() -> float:
    return time.clock_gettime(_CLOCK)
