"""The output of a job: checkpoints while it runs, one part per split when that is done, and the manifest over all.

A split is committed by exclusively creating its record, an output by exclusively creating a manifest. Both name staged
files, which are published after that by whoever comes first, so that a process may die between any two steps. A commit
counts until its part is found missing: a mark beside the record then makes way for the split's next one. What is stored
where: :mod:`batchrun.data.records`.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import itertools
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.columns import LossyColumnError, as_json_text, unify
from batchrun.data.lease import DEFAULT_TTL, Lease, acquire, live_attempts
from batchrun.data.parts import Layout, MissingResultError, PartContent, rewrite_part, write_part
from batchrun.data.records import (
    EMPTY_PART,
    FORMAT,
    HOME,
    JOB,
    MANIFEST_COPY,
    MANIFESTS,
    PARTIALS,
    REMOVING,
    SEGMENTS,
    SPLITS,
    STAGED,
    START_AGAIN,
    InputRecord,
    Manifest,
    PartEntry,
    SplitEntry,
    SplitRecord,
    decoded_schema,
    encode,
    encoded_schema,
    lost_mark,
    manifest_file,
    split_file,
)
from batchrun.data.results import Results, partials_table, results_table
from batchrun.data.rows import Batch, InputFile, PartialRow, RowResult, Split
from batchrun.data.store import StorageError, Store, sha256_of
from batchrun.data.view import OUTPUT_LEASE, OutputView, current_parts, has_state, part_entry, refuse_state_alone
from batchrun.errors import JobError, without_credentials
from batchrun.job import OutputSpec

log = logging.getLogger(__name__)

_PART_NAME = re.compile(r"part-\d{5,}\.(parquet|jsonl)")


class Batches(Protocol):
    """What a part is joined from; :class:`batchrun.data.source.Source` is one."""

    def batches(self, split: Split) -> Iterator[Batch]: ...


class Output(OutputView):
    """An output that this process may write: it holds the output's lease until :meth:`close`.

    The methods that write are for one thread at a time.
    """

    def __init__(self, store: Store, layout: Layout, configuration: dict[str, Any], lease: Lease) -> None:
        super().__init__(store)
        self.layout = layout
        self.configuration = configuration
        self.attempt = store.writer
        self.lease = lease
        self._counter = itertools.count()
        self._snapshot: str | None = None  # the newest partials file of this attempt

    @classmethod
    def open(
        cls,
        spec: OutputSpec,
        configuration: dict[str, Any],
        layout: Layout,
        *,
        inputs: Sequence[InputFile] = (),
        overwrite: bool = False,
        ttl: float = DEFAULT_TTL,
    ) -> Output:
        """Begins an output, or takes up what an earlier run left.

        ``configuration`` is plain JSON data and covers what ``layout`` depends on. ``inputs`` must not lie within the
        output. ``overwrite`` removes what batchrun wrote there before, and nothing else. ``ttl`` in seconds: see
        :func:`batchrun.data.lease.acquire`.

        The rows of a published part that is gone are to be run again, which a warning says.

        Raises JobError if the output belongs to another configuration, is a directory of something else, is damaged, or
        cannot be written; and HeldError while another process works on it.
        """
        configuration = json.loads(encode(configuration))
        try:
            store = Store(spec.path, spec.storage_options)
            _check_place(store, overwrite=overwrite)
            _refuse_inputs(store, inputs)
            anew = overwrite or store.exists(REMOVING)
            if not anew and store.exists(JOB):
                _check_configuration(store, configuration)
            store.probe_exclusive_create()
            lease = acquire(store, OUTPUT_LEASE, ttl=ttl)
        except (StorageError, OSError, ValueError, ImportError) as error:
            raise JobError(f"output.path: {error}") from error
        try:
            if anew:
                _remove_everything(store)
            if not store.create(JOB, encode({"format": FORMAT, "configuration": configuration})):
                _check_configuration(store, configuration)
            output = cls(store, layout, configuration, lease)
            output._give_up_lost_parts()
        except BaseException:
            lease.release()
            raise
        return output

    def close(self) -> None:
        """Releases the lease."""
        self.lease.release()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record_input(self, files: Sequence[InputFile], splits: Sequence[Split]) -> None:
        """Records the scanned input, or that it goes on with more splits than the recorded one had.

        Raises JobError if it is not the recorded input.
        """
        recorded = self.recorded_input()
        if recorded is not None:
            known = self.check_input(files)
            if list(splits[: len(known)]) != known:
                raise JobError(f"{self.store.url}: the input no longer splits as it did: {START_AGAIN}")
            if len(known) == len(splits):
                return
        generation = max((int(name[-10:-5]) for name in self._input_records()), default=0) + 1
        place = {file.key: index for index, file in enumerate(files)}
        record = InputRecord(
            attempt=self.attempt,
            files=[replace(file, path=without_credentials(file.path)) for file in files],
            splits=[SplitEntry(**asdict(split) | {"file": place[split.file.key]}) for split in splits],
        )
        if not self.store.create(f"{HOME}/input-{generation:05d}.json", encode(record)):
            self.record_input(files, splits)

    def checkpoint(self, results: Sequence[RowResult], partials: Sequence[PartialRow]) -> None:
        """Makes finished rows and the state of all unfinished ones durable.

        ``partials`` replaces what this attempt said before: a row may be missing from it once its result is in
        ``results`` of this call or an earlier one.
        """
        by_split: dict[int, list[RowResult]] = defaultdict(list)
        for result in results:
            by_split[result.split].append(result)
        for split, rows in sorted(by_split.items()):
            name = f"{SEGMENTS}/{split:05d}-{self.attempt}-{next(self._counter):06d}.parquet"
            self.store.put(name, _parquet(results_table(rows)))
        superseded, self._snapshot = self._snapshot, None
        if partials:
            self._snapshot = f"{PARTIALS}/{self.attempt}-{next(self._counter):06d}.parquet"
            self.store.put(self._snapshot, _parquet(partials_table(partials)))
        if superseded:
            self.store.delete([superseded])

    def write_status(self, status: dict[str, Any]) -> None:
        """Leaves word of this attempt's progress: plain JSON data, replacing what it said before."""
        status = {"attempt": self.attempt, "written": _timestamp(), **status}
        self.store.put(f"{HOME}/status-{self.attempt}.json", encode(status))

    def commit_split(self, split: Split, source: Batches) -> SplitRecord:
        """Makes the split's part out of its segments and publishes it. Of several workers the first one's part counts.

        Safe to call again after any interruption. Raises StorageError when a row has no result (its segment is
        damaged): running the job again makes it anew.
        """
        name = self._next_record(split.number)
        if not self.store.exists(name):
            self._commit(split, source, name)
        record = self._record(name)
        self._publish(record.staged, record.part)
        self.store.delete(self._segments(split.number))
        self._retire_snapshots()
        return record

    def finish(self, run: dict[str, Any]) -> Manifest:
        """Names what is committed in a new manifest, once all parts share one schema, and removes what none names.

        ``run`` is what this run says of itself (model revision, versions, device); nothing in it may be secret. If
        nothing was committed since the newest manifest, that one is returned. Raises StorageError if a published part
        is gone or has another size.
        """
        newest = self.manifest()
        records = self.committed()
        named = self._published_parts(newest, records)
        if newest is not None:
            self._settle_manifest(newest, named.values())
        for number in sorted(records.keys() - named.keys()):
            self._publish(records[number].staged, records[number].part)
            self._check_published(records[number].part, records[number].bytes)
        recorded = self.recorded_input()
        complete = recorded is not None and records.keys() >= {split.number for split in recorded[1]}
        kept = newest is not None and len(named) == len(newest.parts)
        if newest is None or not kept or newest.complete != complete or named.keys() - {EMPTY_PART} != records.keys():
            manifest = self._next_manifest(newest, named, records, run, complete=complete)
            if not self.store.create(manifest_file(manifest.generation), encode(manifest)):
                return self.finish(run)
            self._settle_manifest(manifest, manifest.parts)
            newest = manifest
        if complete:
            self._sweep()
        return newest

    def _give_up_lost_parts(self) -> None:
        """Marks the commit records whose parts are gone: they count no more, so that their rows are run again.

        A mark and the record it is about never change or go, so that any number of workers may do this, and die at
        it. Raises JobError if a part is there with another size: it may be the user's.
        """
        faults = self.faulty_parts()
        if changed := [f"  {fault}" for fault in faults if fault.size is not None]:
            advice = "put the right files back, or delete these, and their rows are run again"
            raise JobError(
                "\n".join([f"{self.store.url} has parts that are not as they were published:", *changed, advice])
            )
        commits = self._commits()
        for fault in faults:
            if fault.part.split in commits:
                mark = {"attempt": self.attempt, "noticed": _timestamp()}
                self.store.put(lost_mark(commits[fault.part.split]), encode(mark))
            log.warning("%s/%s: its %s rows are run again", self.store.url, fault, f"{fault.part.rows:,}")

    def _next_record(self, split: int) -> str:
        """The name of the commit record that counts for the split, once it is there."""
        names = set(self.store.names(SPLITS))
        return next(name for n in itertools.count(1) if lost_mark(name := split_file(split, n)) not in names)

    def _commit(self, split: Split, source: Batches, name: str) -> None:
        """Stages the split's part and tries to create its commit record."""
        tables = {segment: self._table(segment) for segment in self._segments(split.number)}
        results = Results([table for table in tables.values() if table is not None])
        with self.store.scratch() as directory:
            path = directory / "part"
            try:
                content = write_part(path, source.batches(split), results, split, self.layout)
            except MissingResultError as error:
                self.store.delete(segment for segment, table in tables.items() if table is None)
                raise StorageError(f"{error}; run the same command again to make it") from error
            record = self._split_record(split, content, path)
            self.store.put_file(path, record.staged)
        if not self.store.create(name, encode(record)):
            self.store.delete([record.staged])

    def _split_record(self, split: Split, content: PartContent, path: Path) -> SplitRecord:
        return SplitRecord(
            split=split.number,
            attempt=self.attempt,
            part=self.layout.part_name(split.number),
            staged=f"{STAGED}/{split.number:05d}-{self.attempt}",
            rows=content.rows,
            ok=content.rows - content.errors,
            errors=content.errors,
            prompt_tokens=content.prompt_tokens,
            completion_tokens=content.completion_tokens,
            bytes=path.stat().st_size,
            sha256=sha256_of(path),
            typed=content.typed,
            columns=_described(content.schema),
            schema_ipc=encoded_schema(content.schema),
        )

    def _publish(self, staged: str | None, part: str) -> None:
        """Publishes a committed part unless that is done."""
        if staged is not None and self.store.exists(staged):
            self.store.publish(staged, part)

    def _check_published(self, part: str, size: int) -> None:
        found = self.store.size(part)
        if found != size:
            state = "is gone" if found is None else f"has {found:,} bytes, not {size:,},"
            raise StorageError(f"{self.store.path(part)} {state} since it was published: run the same command again")

    def _retire_snapshots(self) -> None:
        """Removes other attempts' partials of which every row is committed."""
        committed = self._commits().keys()
        for attempt, names in self._snapshots().items():
            if attempt != self.attempt and {row.split for row in self._newest_snapshot(names)} <= committed:
                self.store.delete(names)

    def _next_manifest(
        self,
        newest: Manifest | None,
        named: dict[int, PartEntry],
        records: dict[int, SplitRecord],
        run: dict[str, Any],
        *,
        complete: bool,
    ) -> Manifest:
        """The manifest after ``newest``; the parts that it names otherwise than they are published lie staged."""
        generation = newest.generation + 1 if newest else 1
        parts = {
            number: named[number].model_copy(update={"staged": None}) if number in named else part_entry(record)
            for number, record in sorted(records.items())
        }
        schema = None
        if complete and not records:
            parts[EMPTY_PART], schema = self._empty_part(generation)
        elif complete and self.layout.format == "parquet":
            parts, schema = self._unify(records, parts, generation)
        totals = ("rows", "ok", "errors", "prompt_tokens", "completion_tokens")
        return Manifest(
            generation=generation,
            attempt=self.attempt,
            created=_timestamp(),
            complete=complete,
            fingerprint=hashlib.sha256(encode(self.configuration)).hexdigest(),
            configuration=self.configuration,
            run=run,
            columns=_described(schema),
            **{total: sum(getattr(record, total) for record in records.values()) for total in totals},
            parts=list(parts.values()),
        )

    def _unify(
        self, records: dict[int, SplitRecord], parts: dict[int, PartEntry], generation: int
    ) -> tuple[dict[int, PartEntry], pa.Schema]:
        """The parts in the one schema for all; those that have another are written anew and staged."""
        schemas = {number: self._published_schema(records[number], parts[number]) for number in parts}
        typed = all(record.typed for record in records.values())
        schema = unify(list(schemas.values()), self.layout.names.values(), structs_grow=typed)
        while True:
            try:
                return {
                    number: entry
                    if schemas[number].equals(schema, check_metadata=True)
                    else self._rewrite(entry, schema, generation)
                    for number, entry in parts.items()
                }, schema
            except LossyColumnError as lossy:
                schema = as_json_text(schema, lossy.column)

    def _published_schema(self, record: SplitRecord, entry: PartEntry) -> pa.Schema:
        if entry.sha256 == record.sha256:
            return record.schema_arrow
        with self.store.local_copy(entry.name) as path:  # an earlier manifest had it written anew
            written = pq.read_metadata(path).metadata[b"ARROW:schema"]  # reading by it would rename what lists hold
        return decoded_schema(written)

    def _rewrite(self, entry: PartEntry, schema: pa.Schema, generation: int) -> PartEntry:
        with self.store.scratch() as directory, self.store.local_copy(entry.name) as published:
            path = directory / "part"
            rewrite_part(published, path, schema)
            return self._stage(path, entry, generation)

    def _empty_part(self, generation: int) -> tuple[PartEntry, pa.Schema | None]:
        """A part without rows, so that an output without any is a readable data set."""
        nothing = Split(InputFile("", "", 0, ""), 0, 1, 0)
        name = self.layout.part_name(0)
        entry = PartEntry(name=name, split=EMPTY_PART, attempt=self.attempt, rows=0, ok=0, errors=0, bytes=0, sha256="")
        with self.store.scratch() as directory:
            path = directory / "part"
            content = write_part(path, [], Results([]), nothing, self.layout)
            return self._stage(path, entry, generation), content.schema

    def _stage(self, path: Path, entry: PartEntry, generation: int) -> PartEntry:
        staged = f"{STAGED}/{generation:08d}-{entry.name}-{self.attempt}"
        change = {"bytes": path.stat().st_size, "sha256": sha256_of(path), "staged": staged}
        self.store.put_file(path, staged)
        return entry.model_copy(update=change)

    def _published_parts(self, newest: Manifest | None, records: dict[int, SplitRecord]) -> dict[int, PartEntry]:
        """The current parts of ``newest``, an empty part that is gone apart."""
        parts = current_parts(newest, records)
        empty = parts.get(EMPTY_PART)
        if empty and not self.store.exists(empty.name) and not (empty.staged and self.store.exists(empty.staged)):
            del parts[EMPTY_PART]
        return parts

    def _settle_manifest(self, manifest: Manifest, parts: Iterable[PartEntry]) -> None:
        """Publishes what the manifest has staged of ``parts`` unless that is done, checks them, and copies it."""
        for part in parts:
            self._publish(part.staged, part.name)
            self._check_published(part.name, part.bytes)
        copy = encode(manifest)
        if self.store.read_if_any(MANIFEST_COPY) != copy:
            self.store.put(MANIFEST_COPY, copy)

    def _sweep(self) -> None:
        """Removes what a complete output has no use for. A worker that still writes there commits nothing any more."""
        own_status = f"{HOME}/status-{self.attempt}.json"
        self.store.delete(self.store.names(SEGMENTS))
        self.store.delete(self.store.names(PARTIALS))
        self.store.delete(self.store.names(STAGED))
        self.store.delete(name for name in self._home_files("status-") if name != own_status)
        self.store.sweep_temporary(live_attempts(self.store))


def _check_place(store: Store, *, overwrite: bool) -> None:
    """Raises JobError where something else is that an output could do harm to."""
    if store.exists(JOB) or store.exists(REMOVING):
        return
    if not overwrite:
        refuse_state_alone(store)
    elif has_state(store):
        return
    foreign = [name for name in store.entries() if name != HOME and not name.startswith(".")]
    ours_by_name = [name for name in foreign if _PART_NAME.fullmatch(name) or name == MANIFEST_COPY]
    if ours_by_name or (foreign and not overwrite):
        shown = ", ".join([*(ours_by_name or foreign)[:3], *(["..."] if len(foreign) > 3 else [])])
        hint = "" if ours_by_name else ", or --overwrite to write beside what is there"
        raise JobError(f"{store.url} is not empty and no output of batchrun: {shown}; choose another output.path{hint}")


def _refuse_inputs(store: Store, inputs: Sequence[InputFile]) -> None:
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


def _check_configuration(store: Store, configuration: dict[str, Any]) -> None:
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


def _remove_everything(store: Store) -> None:
    """Removes an output, leases apart. A removal that was cut short is known by its mark, and is finished first."""
    if not store.exists(JOB) and not store.exists(REMOVING) and not has_state(store):
        return
    store.put(REMOVING, b"1")
    parts = [name for name in store.names("") if _PART_NAME.fullmatch(name)]
    store.delete([MANIFEST_COPY, *parts])
    for directory in (MANIFESTS, SPLITS, PARTIALS, SEGMENTS, STAGED):
        store.delete(store.names(directory))
    store.delete(name for name in store.names(HOME) if name != REMOVING)
    store.sweep_temporary(alive=())
    store.delete([REMOVING])


def _described(schema: pa.Schema | None) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema or ()}


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def _timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
