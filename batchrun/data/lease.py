"""Who may work on what: leases with epochs, kept in the output's own storage.

A lease is a chain of exclusively created files ``NAME-EPOCH.json``; the newest epoch holds it, on behalf of the
worker that it names (:mod:`batchrun.data.workers`). It is free once it was given back (``NAME-EPOCH.free``) or once
that worker is gone. Taking it creates the next epoch; older ones are removed only then, so that the newest epoch never
goes down. A wrong lease costs repeated work, never a wrong result: results are safe by the commit protocol alone.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from batchrun.data.store import Store
from batchrun.data.workers import Watch, Worker, read_worker
from batchrun.errors import StoppedError

log = logging.getLogger(__name__)

LEASES = "_batchrun/leases"
_FILE = re.compile(rf"{LEASES}/(.+)-(\d{{8}})\.(json|free|suspects)")
_POLL_SECONDS = 0.2


class HeldError(StoppedError):
    """Others work on the output, and what was asked for needs it alone; the text names them."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One epoch of a lease."""

    name: str
    epoch: int
    attempt: str  # of the worker that holds it; "" where the record cannot be read
    deaths: int = 0  # holders before this one that died and had done nothing for the lease since the death before
    done: tuple[int, int] = (0, 0)  # rows, and tokens of others, done when it was taken: the next holder compares
    suspects: tuple[int, ...] = ()  # rows that ran, and no others, when the holder before this one died
    alone: int = 0  # holders in a row that died with the one suspect, and had not got on

    @property
    def file(self) -> str:
        return lease_file(self.name, self.epoch)


@dataclass(frozen=True)
class LeaseListing:
    """The leases of an output, by name, as one look saw them."""

    epochs: dict[str, int]  # name -> newest epoch, by any of its files
    free: frozenset[str]  # those that were given back

    @classmethod
    def of(cls, store: Store) -> LeaseListing:
        epochs: dict[str, int] = {}
        given_back: dict[str, int] = {}
        for match in map(_FILE.fullmatch, store.names(LEASES)):
            if match:
                for newest in (epochs, given_back) if match[3] == "free" else (epochs,):
                    newest[match[1]] = max(int(match[2]), newest.get(match[1], 0))
        free = frozenset(name for name, epoch in given_back.items() if epoch == epochs.get(name))
        return cls(epochs, free)


def read_lease(store: Store, name: str, epoch: int) -> Lease:
    """That epoch of the lease."""
    try:
        record = json.loads(store.read_if_any(lease_file(name, epoch)) or b"")
        return Lease(**record | {name: tuple(record[name]) for name in ("done", "suspects")})
    except (ValueError, TypeError, KeyError):
        return Lease(name, epoch, "")


def take(store: Store, lease: Lease) -> bool:
    """Takes the lease at its epoch, the one after the newest; False if another was faster."""
    if not store.create(lease.file, json.dumps(asdict(lease)).encode()):
        return False
    matches = [match for match in map(_FILE.fullmatch, store.names(LEASES)) if match and match[1] == lease.name]
    if any(int(match[2]) > lease.epoch for match in matches):
        store.delete([lease.file])  # the listing that we started from was old: this epoch had come and gone
        return False
    store.delete(match[0] for match in matches if int(match[2]) < lease.epoch)
    return True


def give_back(store: Store, lease: Lease) -> None:
    """The next one need not wait for its holder to go."""
    store.put(lease_file(lease.name, lease.epoch, "free"), b"1")


def write_suspects(store: Store, lease: Lease, rows: Collection[int]) -> None:
    """Says which rows run, and no others, from now on; none: that the unit is begun."""
    store.put(lease_file(lease.name, lease.epoch, "suspects"), json.dumps(sorted(rows)).encode())


def read_suspects(store: Store, lease: Lease) -> tuple[int, ...] | None:
    """Which rows ran, and no others, when the holder last said; None if it never did."""
    try:
        data = store.read_if_any(lease_file(lease.name, lease.epoch, "suspects"))
        return None if data is None else tuple(json.loads(data))
    except (ValueError, TypeError):
        return None


def remove_leases(store: Store, names: Collection[str]) -> None:
    """Removes all of these leases: what they were for is done for good."""
    files = [match[0] for match in map(_FILE.fullmatch, store.names(LEASES)) if match and match[1] in names]
    store.delete(files)


@contextmanager
def alone(store: Store, worker: Worker, name: str) -> Iterator[None]:
    """Holds the lease ``name``, for something short; waits for who holds it."""
    watch = Watch(store, worker.owner.ttl)
    said = False
    while True:
        listing = LeaseListing.of(store)
        epoch = listing.epochs.get(name, 0)
        held = read_lease(store, name, epoch) if epoch and name not in listing.free else None
        if held is None or watch.is_gone(held.attempt):
            lease = Lease(name, epoch + 1, worker.attempt)
            if take(store, lease):
                break
            continue
        if not said:
            other = read_worker(store, held.attempt)
            log.info("%s: waiting for %s", store.url, other.owner if other else "another worker")
            said = True
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        give_back(store, lease)


def lease_file(name: str, epoch: int, suffix: str = "json") -> str:
    return f"{LEASES}/{name}-{epoch:08d}.{suffix}"
