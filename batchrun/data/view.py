"""What an output holds, as its readers see it: what is committed, done or begun, and whether all of it is there."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.records import (
    EMPTY_PART,
    FORMAT,
    HOME,
    JOB,
    KEPT,
    MANIFEST_COPY,
    MANIFESTS,
    PARTIALS,
    PUT_BACK,
    REMOVING,
    RERUNS,
    SEGMENTS,
    SPLITS,
    STAGED,
    START_AGAIN,
    InputRecord,
    JobRecord,
    Manifest,
    PartEntry,
    R,
    Record,
    RerunRecord,
    SplitRecord,
    StoredFile,
    kept_file,
    lost_mark,
    manifest_file,
    read_record,
    read_records,
    split_file,
)
from batchrun.data.results import partials_of
from batchrun.data.rows import InputFile, PartialRow, Split
from batchrun.data.store import StorageError, Store
from batchrun.data.workers import Watch, WorkerFile, read_worker, worker_attempts
from batchrun.errors import JobError

_SEGMENT_NAME = re.compile(rf"{SEGMENTS}/(\d+)-[0-9a-f]+-\d+\.parquet")
_PARTIALS_NAME = re.compile(rf"{PARTIALS}/([0-9a-f]+)-(\d+)\.parquet")
_RECORD_NAME = re.compile(rf"{SPLITS}/(\d+)-\d+\.(?:json|lost)")
_KEPT_NAME = re.compile(rf"{KEPT}/(\d+)-(\d+)\.parquet")
_INPUT_NAME = re.compile(rf"{HOME}/input-(\d+)\.json")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartFault:
    """A published file that is not what was published."""

    part: PartEntry  # that it belongs to
    file: StoredFile
    size: int | None  # bytes that it has now; None: it is gone

    def __str__(self) -> str:
        state = "is missing" if self.size is None else f"has {self.size:,} bytes, not {self.file.bytes:,}"
        return f"{self.file.name} {state}"


class OutputView:
    """What lies in an output, for readers. Nothing here writes. Whatever finds a damaged record raises JobError."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._records: dict[str, Record] = {}  # what was read so far, by name, of those that never change
        self._segment_rows: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = {}

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
        record = self.whole_input_record()
        return None if record is None else (record.files, splits_of(record))

    def whole_input_record(self) -> InputRecord | None:
        """The newest record of the input. Raises JobError if that is gone, as what was begun tells."""
        begun = self._begun_splits()  # looked at first: what is recorded only grows
        record = self.input_record()
        if begun and max(begun) >= (record.next_split if record else 0):
            raise JobError(f"{self.store.path(HOME)}: the input-*.json that has split {max(begun)} is gone: {PUT_BACK}")
        return record

    def input_record(self) -> InputRecord | None:
        """The newest record of the input."""
        names = self._input_records()
        if not names:
            return None
        return self._read(names[-1], InputRecord)

    def committed(self) -> dict[int, SplitRecord]:
        """The commit record of each committed split of the recorded input."""
        record = self.input_record()
        numbers = {entry.number for entry in record.splits} if record else set()
        names = {number: name for number, name in self.commits().items() if number in numbers}
        unread = [name for name in names.values() if name not in self._records]
        self._records.update(read_records(self.store, unread, SplitRecord))
        return {number: self.record(name) for number, name in names.items()}

    def faulty_parts(self) -> list[PartFault]:
        """The published parts that are missing or have another size, told by names and sizes alone."""
        records, manifest = self.committed(), self.manifest()
        parts = {number: part_entry(record) for number, record in records.items()} | current_parts(manifest, records)
        staged = set(self.store.names(STAGED))  # looked at before the parts, which are made of these
        sizes = self.store.sizes("")
        committed = {file.name: file.staged for record in records.values() for file in record.files}
        faults = [
            PartFault(part, file, sizes.get(file.name))
            for part in parts.values()
            for file in part.files
            if sizes.get(file.name) != file.bytes and staged.isdisjoint([file.staged, committed.get(file.name)])
        ]
        if faults and (self.manifest() != manifest or self.committed() != records):
            return self.faulty_parts()  # another worker published parts of its own meanwhile
        return faults

    def done_rows(self) -> dict[int, dict[int, bool]]:
        """Uncommitted split -> its rows that are in segments, and whether as a result rather than an error.

        A damaged segment counts for nothing.
        """
        committed = self.commits().keys()
        return {split: self.rows_in(names) for split, names in self.segments().items() if split not in committed}

    def partials(self, splits: Collection[int] | None = None) -> dict[tuple[int, int], PartialRow]:
        """(split, row) -> what is known of it, for rows that an attempt left unfinished.

        Of ``splits``, if given, else of all that are not committed. Of several attempts at a row, the longest. The row
        may have been finished since: see :meth:`done_rows`.
        """
        committed = self.commits().keys() if splits is None else ()
        longest: dict[tuple[int, int], PartialRow] = {}
        for partial in itertools.chain.from_iterable(self._newest_snapshots()):
            if partial.split in committed or (splits is not None and partial.split not in splits):
                continue
            known = longest.get((partial.split, partial.row))
            if known is None or len(known.token_ids) < len(partial.token_ids):
                longest[partial.split, partial.row] = partial
        return longest

    def segments(self) -> dict[int, list[str]]:
        """Split -> the files that hold results of its rows, in the order that decides between equals.

        Of what several reruns kept, the newest alone counts: rows that it has not are run again.
        """
        kept = self.store.names(KEPT)
        marks = set(self.store.names(SPLITS)) if kept else set()
        newest: dict[int, int] = {}
        for match in map(_KEPT_NAME.fullmatch, kept):
            if match and lost_mark(split_file(split := int(match[1]), n := int(match[2]))) in marks:
                newest[split] = max(n, newest.get(split, 0))
        found: dict[int, list[str]] = defaultdict(list)
        for split, n in newest.items():
            found[split].append(kept_file(split_file(split, n)))
        for match in map(_SEGMENT_NAME.fullmatch, self.store.names(SEGMENTS)):
            if match:
                found[int(match[1])].append(match[0])
        return found

    def rows_in(self, segments: Iterable[str]) -> dict[int, bool]:
        """The rows that have results there, and whether they are results rather than errors."""
        every = list(segments)
        unread = [name for name in every if name not in self._segment_rows]
        for name, table in self.tables(unread, columns=["row", "error"]).items():
            if table is not None:
                self._segment_rows[name] = (table["row"].to_numpy(), table["error"].is_null().to_numpy())
        found: dict[int, bool] = {}
        for name in filter(self._segment_rows.__contains__, every):
            rows, ok = self._segment_rows[name]
            for row, good in zip(rows.tolist(), ok.tolist(), strict=True):
                found[row] = good or found.get(row, False)
        return found

    def rerun(self) -> RerunRecord | None:
        """The newest rerun."""
        names = self.store.names(RERUNS)
        return read_record(self.store, names[-1], RerunRecord) if names else None

    def rerun_splits(self) -> set[int]:
        """The splits that the newest rerun has opened and that are not committed again."""
        rerun = self.rerun()
        if rerun is None:
            return set()
        kept = set(self.store.names(KEPT))
        return {split for split, commit in rerun.commits.items() if kept_file(commit) in kept} - self.commits().keys()

    def manifest(self) -> Manifest | None:
        """The newest manifest."""
        copied = self._copied_generation()  # looked at first: the copy follows the chain
        names = self.store.names(MANIFESTS)
        if copied is not None and manifest_file(copied) > max(names, default=""):
            names = [manifest_file(copied)]
        return self._read(names[-1], Manifest) if names else None

    def workers(self) -> list[WorkerFile]:
        """Who works on the output, as far as one look can tell; the one that came last is the last."""
        living = Watch(self.store).living().values()
        return sorted((worker for worker in living if worker), key=lambda worker: worker.owner.since)

    def last_word(self) -> WorkerFile | None:
        """What the worker that was heard of last said then."""
        found = (read_worker(self.store, attempt) for attempt in worker_attempts(self.store))
        return max((worker for worker in found if worker), key=lambda worker: worker.written, default=None)

    def _copied_generation(self) -> int | None:
        """The generation of the manifest that was copied for people, as far as the copy can be read."""
        try:
            return int(json.loads(self.store.read_if_any(MANIFEST_COPY) or b"")["generation"])
        except (ValueError, TypeError, KeyError):
            return None

    def _input_records(self) -> list[str]:
        return [name for name in self.store.names(HOME) if _INPUT_NAME.fullmatch(name)]

    def _newest_snapshots(self) -> Iterator[list[PartialRow]]:
        """The partial rows of each attempt, from the newest of its files that is whole."""
        left: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for match in map(_PARTIALS_NAME.fullmatch, self.store.names(PARTIALS)):
            if match:
                left[match[1]].append((int(match[2]), match[0]))
        for files in left.values():
            files.sort()
        while left:
            newest = {files.pop()[1]: attempt for attempt, files in left.items()}
            for name, table in self.tables(newest).items():
                if table is not None:
                    yield partials_of(table)
                if table is not None or not left[newest[name]]:
                    del left[newest[name]]

    def tables(self, names: Iterable[str], columns: list[str] | None = None) -> dict[str, pa.Table | None]:
        """Small Parquet files; None for one that is damaged, or gone (another worker may have removed it)."""
        every = list(names)
        found = zip(every, self.store.read_each(every), strict=True)
        return {name: None if data is None else self._table(name, data, columns) for name, data in found}

    def _table(self, name: str, data: bytes, columns: list[str] | None) -> pa.Table | None:
        try:
            return pq.read_table(io.BytesIO(data), columns=columns, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            log.warning("%s is damaged, its rows are run again: %s", self.store.path(name), error)
            return None

    def commits(self) -> dict[int, str]:
        """Committed split -> the name of the commit record that counts."""
        names = set(self.store.names(SPLITS))
        splits = sorted({split for name in names if (split := split_of(name)) is not None})
        return {split: name for split in splits if (name := counting_record(split, names)) in names}

    def record(self, name: str) -> SplitRecord:
        """The commit record of that name."""
        return self._read(name, SplitRecord)

    def _read(self, name: str, kind: type[R]) -> R:
        record = self._records.get(name)
        if not isinstance(record, kind):
            record = self._records[name] = read_record(self.store, name, kind)
        return record

    def _begun_splits(self) -> set[int]:
        """The splits that have commit records or segments."""
        names = [*self.store.names(SPLITS), *self.store.names(SEGMENTS)]
        return {split for name in names if (split := split_of(name)) is not None}


def counting_record(split: int, names: Collection[str]) -> str:
    """The name of the commit record that counts for the split, once it is there; ``names`` are those in SPLITS."""
    return next(name for n in itertools.count(1) if lost_mark(name := split_file(split, n)) not in names)


def split_of(name: str) -> int | None:
    """The split of a commit record, a mark beside one, kept results or a segment; None for any other file."""
    match = next(filter(None, (kind.fullmatch(name) for kind in (_RECORD_NAME, _KEPT_NAME, _SEGMENT_NAME))), None)
    return int(match[1]) if match else None


def has_state(store: Store) -> bool:
    """Whether batchrun recorded anything there, its job apart."""
    return any(map(store.names, (SPLITS, MANIFESTS, SEGMENTS, PARTIALS))) or any(
        map(_INPUT_NAME.fullmatch, store.names(HOME))
    )


def refuse_state_alone(store: Store) -> None:
    """Raises JobError if there is an output whose job nobody knows; one that is being removed is none."""
    # The marks are looked at last: the job comes first and goes last, and while it goes the other is there.
    if has_state(store) and not store.exists(JOB) and not store.exists(REMOVING):
        raise JobError(f"{store.path(JOB)} is missing: {PUT_BACK}")


def splits_of(record: InputRecord) -> list[Split]:
    """The splits that a record of the input names."""
    return [Split(**entry.model_dump() | {"file": record.files[entry.file]}) for entry in record.splits]


def current_parts(manifest: Manifest | None, records: dict[int, SplitRecord]) -> dict[int, PartEntry]:
    """The manifest's parts by split, without those of commit records that count no more."""
    return {
        part.split: part
        for part in (manifest.parts if manifest else ())
        if (
            part.commit == records[part.split].commit
            if part.split in records
            else part.split == EMPTY_PART and not records
        )
    }


def part_entry(record: SplitRecord) -> PartEntry:
    errors_file = record.errors_file and record.errors_file.model_copy(update={"staged": None})
    same = record.model_dump(include={"split", "commit", "rows", "ok", "errors", "bytes", "sha256"})
    return PartEntry(name=record.part, errors_file=errors_file, **same)
