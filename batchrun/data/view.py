"""What an output holds, as its readers see it: what is committed, done or begun, and whether all of it is there."""

from __future__ import annotations

import datetime
import io
import json
import logging
import re
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.lease import Owner, holder
from batchrun.data.records import (
    EMPTY_PART,
    FORMAT,
    HOME,
    JOB,
    MANIFEST_COPY,
    MANIFESTS,
    PARTIALS,
    PUT_BACK,
    REMOVING,
    SEGMENTS,
    SPLITS,
    STAGED,
    START_AGAIN,
    InputRecord,
    JobRecord,
    Manifest,
    PartEntry,
    SplitRecord,
    lost_mark,
    manifest_file,
    read_record,
)
from batchrun.data.results import partials_of
from batchrun.data.rows import InputFile, PartialRow, Split
from batchrun.data.store import StorageError, Store
from batchrun.errors import JobError

OUTPUT_LEASE = "job"
_SEGMENT_NAME = re.compile(rf"{SEGMENTS}/(\d+)-[0-9a-f]+-\d+\.parquet")
_PARTIALS_NAME = re.compile(rf"{PARTIALS}/([0-9a-f]+)-(\d+)\.parquet")
_RECORD_NAME = re.compile(rf"{SPLITS}/(\d+)-(\d+)\.json")
_INPUT_NAME = re.compile(rf"{HOME}/input-(\d+)\.json")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartFault:
    """A published part that is not what was published."""

    part: PartEntry
    size: int | None  # bytes that it has now; None: it is gone

    def __str__(self) -> str:
        state = "is missing" if self.size is None else f"has {self.size:,} bytes, not {self.part.bytes:,}"
        return f"{self.part.name} {state}"


class OutputView:
    """What lies in an output, for readers. Nothing here writes. Whatever finds a damaged record raises JobError."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._records: dict[str, SplitRecord] = {}  # commit records read so far, by name: they never change

    @classmethod
    def at(cls, path: str, storage_options: dict[str, Any] | None = None) -> OutputView | None:
        """The output at that path or URL, or None if there is none. Raises JobError for an impossible path."""
        try:
            store = Store(path, storage_options)
            if not store.exists(JOB):
                refuse_state_alone(store)
                return None
            return cls(store)
        except (StorageError, OSError, ValueError, ImportError) as error:
            raise JobError(f"{path}: {error}") from error

    def recorded_configuration(self) -> dict[str, Any]:
        """The configuration whose results these are. Raises JobError if another version of batchrun wrote it."""
        job = read_record(self.store, JOB, JobRecord)
        if job.format != FORMAT:
            raise JobError(f"{self.store.url} was written by another version of batchrun: {START_AGAIN}")
        return job.configuration

    def recorded_input(self) -> tuple[list[InputFile], list[Split]] | None:
        """The files and splits of the recorded input, or None before there is one."""
        begun = self._begun_splits()  # looked at first: what is recorded only grows
        names = self._input_records()
        record = read_record(self.store, names[-1], InputRecord) if names else None
        if begun and max(begun) >= (len(record.splits) if record else 0):
            raise JobError(f"{self.store.path(HOME)}: the input-*.json that has split {max(begun)} is gone: {PUT_BACK}")
        if record is None:
            return None
        splits = [Split(**entry.model_dump() | {"file": record.files[entry.file]}) for entry in record.splits]
        return record.files, splits

    def check_input(self, files: Sequence[InputFile]) -> list[Split]:
        """The recorded splits, to be read from ``files``. Raises JobError showing what changed since."""
        recorded = self.recorded_input()
        if recorded is None:
            raise JobError(f"{self.store.url}: no input is recorded")
        before, now = ({file.key: file for file in some} for some in (recorded[0], files))
        if changes := _input_changes(before, now):
            raise JobError(
                "\n".join([f"the input has changed since {self.store.url} was begun:", *changes, START_AGAIN])
            )
        return [replace(split, file=now[split.file.key]) for split in recorded[1]]

    def committed(self) -> dict[int, SplitRecord]:
        """The commit record of each committed split."""
        return {number: self._record(name) for number, name in self._commits().items()}

    def faulty_parts(self) -> list[PartFault]:
        """The published parts that are missing or have another size, told by names and sizes alone."""
        records, manifest = self.committed(), self.manifest()
        parts = {number: part_entry(record) for number, record in records.items()} | current_parts(manifest, records)
        staged = set(self.store.names(STAGED))  # looked at before the parts, which are made of these
        sizes = self.store.sizes("")
        faults = [
            PartFault(part, sizes.get(part.name))
            for number, part in parts.items()
            if sizes.get(part.name) != part.bytes
            and staged.isdisjoint([part.staged, records[number].staged if number in records else None])
        ]
        if faults and self.manifest() != manifest:  # another worker published parts of its own meanwhile
            return self.faulty_parts()
        return faults

    def done_rows(self) -> dict[int, dict[int, bool]]:
        """Uncommitted split -> its rows that are in segments, and whether as a result rather than an error.

        A damaged segment counts for nothing.
        """
        committed = self._commits().keys()
        done: dict[int, dict[int, bool]] = defaultdict(dict)
        for name in self.store.names(SEGMENTS):
            match = _SEGMENT_NAME.fullmatch(name)
            if match is None or int(match[1]) in committed:
                continue
            table = self._table(name, columns=["row", "error"])
            if table is not None:
                rows = done[int(match[1])]
                for row, ok in zip(table["row"].to_pylist(), table["error"].is_null().to_pylist(), strict=True):
                    rows[row] = ok or rows.get(row, False)
        return done

    def partials(self) -> dict[tuple[int, int], PartialRow]:
        """(split, row) -> what is known of it, for rows of uncommitted splits that an attempt left unfinished.

        Of several attempts at a row, the longest. The row may have been finished since: see :meth:`done_rows`.
        """
        committed = self._commits().keys()
        longest: dict[tuple[int, int], PartialRow] = {}
        for names in self._snapshots().values():
            for partial in self._newest_snapshot(names):
                known = longest.get((partial.split, partial.row))
                if partial.split not in committed and (known is None or len(known.token_ids) < len(partial.token_ids)):
                    longest[partial.split, partial.row] = partial
        return longest

    def manifest(self) -> Manifest | None:
        """The newest manifest."""
        copied = self._copied_generation()  # looked at first: the copy follows the chain
        names = self.store.names(MANIFESTS)
        if copied is not None and manifest_file(copied) > max(names, default=""):
            names = [manifest_file(copied)]
        return read_record(self.store, names[-1], Manifest) if names else None

    def holder(self) -> Owner | None:
        """Who works on the output, as far as one look can tell."""
        return holder(self.store, OUTPUT_LEASE)

    def read_status(self) -> dict[str, Any] | None:
        """What the newest attempt last said of its progress, with ``attempt`` and ``written`` (ISO 8601, UTC)."""
        found = []
        for name in self._home_files("status-"):
            try:
                status = json.loads(self.store.read_if_any(name) or b"")
                found.append((str(status["written"]), name, dict(status)))
            except (ValueError, TypeError, KeyError):
                continue  # a word about progress is worth no more than that
        return max(found, default=(None, None, None))[-1]

    def _copied_generation(self) -> int | None:
        """The generation of the manifest that was copied for people, as far as the copy can be read."""
        try:
            return int(json.loads(self.store.read_if_any(MANIFEST_COPY) or b"")["generation"])
        except (ValueError, TypeError, KeyError):
            return None

    def _home_files(self, prefix: str) -> list[str]:
        return [name for name in self.store.names(HOME) if name.startswith(f"{HOME}/{prefix}")]

    def _input_records(self) -> list[str]:
        return [name for name in self.store.names(HOME) if _INPUT_NAME.fullmatch(name)]

    def _segments(self, split: int) -> list[str]:
        matches = (_SEGMENT_NAME.fullmatch(name) for name in self.store.names(SEGMENTS))
        return [match[0] for match in matches if match and int(match[1]) == split]

    def _snapshots(self) -> dict[str, list[str]]:
        """Attempt -> its partials files, newest first."""
        found: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for name in self.store.names(PARTIALS):
            if match := _PARTIALS_NAME.fullmatch(name):
                found[match[1]].append((int(match[2]), name))
        return {attempt: [name for _, name in sorted(names, reverse=True)] for attempt, names in found.items()}

    def _newest_snapshot(self, names: Sequence[str]) -> list[PartialRow]:
        """The partial rows of an attempt, from the newest of its files that is whole."""
        for name in names:
            table = self._table(name)
            if table is not None:
                return partials_of(table)
        return []

    def _table(self, name: str, columns: list[str] | None = None) -> pa.Table | None:
        """A small Parquet file, or None if it is damaged, or gone (another worker may have removed it)."""
        data = self.store.read_if_any(name)
        if data is None:
            return None
        try:
            return pq.read_table(io.BytesIO(data), columns=columns, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            log.warning("%s is damaged, its rows are run again: %s", self.store.path(name), error)
            return None

    def _commits(self) -> dict[int, str]:
        """Committed split -> the name of the commit record that counts."""
        names = set(self.store.names(SPLITS))
        found = sorted(
            (int(match[1]), int(match[2]), match[0]) for match in map(_RECORD_NAME.fullmatch, names) if match
        )
        return {number: name for number, _, name in found if lost_mark(name) not in names}

    def _record(self, name: str) -> SplitRecord:
        if name not in self._records:
            self._records[name] = read_record(self.store, name, SplitRecord)
        return self._records[name]

    def _begun_splits(self) -> set[int]:
        """The splits that have commit records or segments."""
        names = [*self.store.names(SPLITS), *self.store.names(SEGMENTS)]
        return {
            int(match[1]) for name in names if (match := _RECORD_NAME.fullmatch(name) or _SEGMENT_NAME.fullmatch(name))
        }


def has_state(store: Store) -> bool:
    """Whether batchrun recorded anything there, its job apart."""
    return any(map(store.names, (SPLITS, MANIFESTS, SEGMENTS, PARTIALS))) or any(
        map(_INPUT_NAME.fullmatch, store.names(HOME))
    )


def refuse_state_alone(store: Store) -> None:
    """Raises JobError if there is an output whose job nobody knows; one that is being removed is none."""
    if not store.exists(REMOVING) and has_state(store):
        raise JobError(f"{store.path(JOB)} is missing: {PUT_BACK}")


def _input_changes(before: dict[str, InputFile], now: dict[str, InputFile]) -> list[str]:
    """One line per file that differs, and how to go on if nothing but times do."""
    changes = [f"  {key}: is new" for key in now if key not in before]
    changes += [f"  {key}: is gone" for key in before if key not in now]
    touched = []
    for key, was in before.items():
        is_now = now.get(key, was)
        if was.size != is_now.size:
            changes.append(f"  {key}: size was {was.size:,}, is now {is_now.size:,} bytes")
        elif was.version != is_now.version:
            versions = (_shown_version(was.version), _shown_version(is_now.version))
            changes.append(f"  {key}: {versions[1]}, was {versions[0]}; its size is the same")
            if versions[0].startswith("modified"):
                touched.append(f"touch -d @{was.version[:-9]}.{was.version[-9:]} {shlex.quote(is_now.path)}")
    if touched and len(touched) == len(changes):
        changes.append(f"if the content is the same, too, give each file its time back, as in: {touched[0]}")
    return changes


def _shown_version(version: str) -> str:
    """What :attr:`InputFile.version` says to people: a time in local time, if it is one."""
    if re.fullmatch(r"\d{19}", version) is None:  # nanoseconds since 1970, from 2001 on
        return f"version {version}"
    moment = datetime.datetime.fromtimestamp(int(version) / 1e9).astimezone()
    return f"modified {moment:%Y-%m-%d %H:%M:%S}"


def current_parts(manifest: Manifest | None, records: dict[int, SplitRecord]) -> dict[int, PartEntry]:
    """The manifest's parts by split, without those of commit records that count no more."""
    return {
        part.split: part
        for part in (manifest.parts if manifest else ())
        if (part.attempt == records[part.split].attempt if part.split in records else part.split == EMPTY_PART)
    }


def part_entry(record: SplitRecord) -> PartEntry:
    return PartEntry(
        name=record.part, **record.model_dump(include={"split", "attempt", "rows", "ok", "errors", "bytes", "sha256"})
    )
