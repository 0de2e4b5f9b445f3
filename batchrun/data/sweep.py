"""Removes what an output has no use for: of a split that is committed, and of an output that is complete."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

from batchrun.data.lease import LeaseListing, remove_leases
from batchrun.data.place import PART_NAME
from batchrun.data.records import (
    ASKS,
    EMPTY_PART,
    KEPT,
    PARTIALS,
    SEGMENTS,
    SHARES,
    SPLITS,
    STAGED,
    Manifest,
    share_file,
    share_of,
    unit_name,
    unit_of,
)
from batchrun.data.store import Store
from batchrun.data.view import OutputView, split_of
from batchrun.data.workers import Watch, Worker, worker_attempts, worker_file

_MOST_WORKER_FILES = 100  # that a complete output is left with, so that its last workers need not remove each other's


def _named_files(manifest: Manifest) -> set[str]:
    """The files that the manifest names."""
    return {file.name for part in manifest.parts for file in part.files}


def forget_units(store: Store, splits: Collection[int]) -> None:
    """Removes the leases and shares of these splits, which are done for good."""
    shares = shares_of(store, splits)
    free_units(store, splits, shares)
    store.delete(share_file(*unit) for unit in shares)


def free_units(store: Store, splits: Collection[int], shares: Collection[tuple[int, int]]) -> None:
    """Lets anybody claim these splits and shares, whoever holds them."""
    remove_leases(store, {*map(unit_name, splits), *itertools.starmap(unit_name, shares)})


def shares_of(store: Store, splits: Collection[int]) -> list[tuple[int, int]]:
    """The shares of these splits, as (split, share)."""
    return [unit for name in store.names(SHARES) if (unit := share_of(name)) and unit[0] in splits]


def sweep(view: OutputView, worker: Worker, manifest: Manifest) -> None:
    """Removes what a complete output has no use for. Other workers may have begun with rows that came since."""
    store = view.store
    staged, parts, temporary = store.names(STAGED), store.names(""), view.segments()
    begun = {unit[0] for unit in map(unit_of, LeaseListing.of(store).epochs) if unit}
    commits, record = view.commits(), view.input_record()
    if record is None or view.manifest() != manifest:
        return
    current = {entry.number for entry in record.splits}
    if {part.split for part in manifest.parts} - {EMPTY_PART} != current:
        return  # the input has changed since: what the manifest names stands until the next one is complete
    over = (commits.keys() & current) | (commits.keys() | temporary.keys() | begun) - current
    store.delete(itertools.chain.from_iterable(temporary.get(number, ()) for number in over))
    store.delete(name for name in store.names(KEPT) if split_of(name) in over)
    forget_units(store, over)
    named = {f.staged for n, name in commits.items() if n in current for f in view.record(name).files if f.staged}
    _remove_replaced(store, parts, _named_files(manifest), current)
    _sweep_after_workers(store, worker, staged, named)


def is_swept(view: OutputView, manifest: Manifest, files: Collection[str]) -> bool:
    """Whether :func:`sweep` would find nothing, files of a few workers apart; ``files`` are those in the output.

    ``manifest`` names all splits of the input.
    """
    store = view.store
    current, named = {part.split for part in manifest.parts}, _named_files(manifest)
    return not (
        any(PART_NAME.fullmatch(name) and name not in named for name in files)
        or any(map(store.names, (STAGED, SEGMENTS, KEPT, PARTIALS, SHARES, ASKS)))
        or any(map(unit_of, LeaseListing.of(store).epochs))
        or not {split_of(name) for name in store.names(SPLITS)} <= {None, *current}
        or len(worker_attempts(store)) > _MOST_WORKER_FILES
        or store.has_temporary()
    )


def _remove_replaced(store: Store, parts: list[str], named: set[str], current: set[int]) -> None:
    """Removes the parts and commit records of splits whose rows were replaced by those of a changed file."""
    store.delete(name for name in parts if PART_NAME.fullmatch(name) and name not in named)
    store.delete(name for name in store.names(SPLITS) if (split := split_of(name)) is not None and split not in current)


def _sweep_after_workers(store: Store, worker: Worker, staged: list[str], named: set[str]) -> None:
    """Removes what workers that are gone have left, and this one, of ``staged`` what is not ``named``."""
    partials, asks, attempts = store.names(PARTIALS), store.names(ASKS), worker_attempts(store)
    watch = Watch(store, worker.owner.ttl)
    living = watch.living().keys() - {worker.attempt}  # looked at after what others may have left
    store.delete(name for name in staged if name[-32:] not in living and name not in named)
    store.delete(name for name in partials if Path(name).name[:32] not in living)
    store.delete(name for name in asks if Path(name).name not in living)
    store.delete(map(worker_file, set(attempts) - living - {worker.attempt}))
    store.sweep_temporary(lambda: watch.living().keys())
