"""Where an output may lie, and what has to go before another one begins there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec

from batchrun.data.lease import HeldError, LeaseListing, alone, remove_leases
from batchrun.data.records import (
    ASKS,
    HOME,
    JOB,
    KEPT,
    MANIFEST_COPY,
    MANIFESTS,
    PARTIALS,
    REMOVING,
    RERUNS,
    SEGMENTS,
    SHARES,
    SPLITS,
    STAGED,
    START_AGAIN,
)
from batchrun.data.rows import InputFile
from batchrun.data.store import Store
from batchrun.data.view import OutputView, has_state, refuse_state_alone
from batchrun.data.workers import Watch, Worker
from batchrun.errors import JobError

OUTPUT_LEASE = "output"  # for what concerns all of an output

PART_NAME = re.compile(r"(?:part|errors)-\d{5,}\.(?:parquet|jsonl)")
_ASKED, _REMOVING = b"asked", b"removing"  # what REMOVING holds before and after it is sure that nobody is at work


def check_place(store: Store, *, overwrite: bool) -> None:
    """Raises JobError where something else is that an output could do harm to."""
    if store.exists(JOB) or store.exists(REMOVING):
        return
    if not overwrite:
        refuse_state_alone(store)
    elif has_state(store):
        return
    foreign = [name for name in store.entries() if name != HOME and not name.startswith(".")]
    ours_by_name = [name for name in foreign if PART_NAME.fullmatch(name) or name == MANIFEST_COPY]
    if (ours_by_name or (foreign and not overwrite)) and not store.exists(JOB):  # others may have begun it since
        shown = ", ".join([*(ours_by_name or foreign)[:3], *(["..."] if len(foreign) > 3 else [])])
        hint = "" if ours_by_name else ", or --overwrite to write beside what is there"
        raise JobError(f"{store.url} is not empty and no output of batchrun: {shown}; choose another output.path{hint}")


def refuse_inputs(store: Store, inputs: Sequence[InputFile]) -> None:
    """Raises JobError if an input file lies within the output."""
    root = str(Path(store.root).resolve()) if store.local else store.root
    for file in inputs:
        protocol, path = fsspec.core.split_protocol(file.path)
        if store.local and protocol in (None, "file", "local"):
            path = str(Path(path).resolve())
        elif protocol is None or protocol not in store.fs.protocol:
            continue
        if path == root or path.startswith(root.rstrip("/") + "/"):
            raise JobError(f"output.path: {store.url} holds the input file {file.path}; choose another output.path")


def check_configuration(store: Store, configuration: dict[str, Any]) -> None:
    differences = _differences(OutputView(store).recorded_configuration(), configuration)
    if differences:
        raise JobError("\n".join([f"{store.url} holds results of other settings:", *differences, START_AGAIN]))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per field that differs."""
    old, new = _dotted(before), _dotted(now)

    def shown(fields: dict[str, Any], name: str) -> str:
        return json.dumps(fields[name], ensure_ascii=False) if name in fields else "not set"

    return [
        f"  {name}: was {shown(old, name)}, is now {shown(new, name)}"
        for name in dict.fromkeys([*old, *new])
        if name not in old or name not in new or old[name] != new[name]
    ]


def _dotted(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, item in value.items():
        fields |= _dotted(item, f"{prefix}{name}.") if isinstance(item, dict) and item else {f"{prefix}{name}": item}
    return fields


def remove_everything(store: Store, worker: Worker, *, overwrite: bool) -> None:
    """Removes an output on which nobody works, if it is to be overwritten; else finishes a removal that was cut short.

    A worker shows itself before it looks for the mark, and the mark is set before others are looked for: of a removal
    and a worker that come at once, one sees the other. Raises HeldError where others work.
    """
    with alone(store, worker, OUTPUT_LEASE):
        if store.read_if_any(REMOVING) != _REMOVING:
            if not overwrite or not (store.exists(JOB) or has_state(store)):
                store.delete([REMOVING])
                return
            store.put(REMOVING, _ASKED)
            if others := Watch(store, worker.owner.ttl).others(worker.attempt):
                store.delete([REMOVING])
                raise HeldError(f"{store.url} is in use by {others[0]}: let it finish or stop it, then overwrite")
            store.put(REMOVING, _REMOVING)
        parts = [name for name in store.names("") if PART_NAME.fullmatch(name)]
        store.delete([MANIFEST_COPY, *parts])
        for directory in (MANIFESTS, SPLITS, PARTIALS, SEGMENTS, STAGED, SHARES, ASKS, RERUNS, KEPT):
            store.delete(store.names(directory))
        remove_leases(store, [name for name in LeaseListing.of(store).epochs if name != OUTPUT_LEASE])
        store.delete(name for name in store.names(HOME) if name != REMOVING)
        store.sweep_temporary(lambda: Watch(store, worker.owner.ttl).living().keys())
        store.delete([REMOVING])
