"""The output of a job: checkpoints while it runs, one part per split when that is done, and the manifest over all.

A split is committed by exclusively creating its record, an output by exclusively creating a manifest. Both name staged
files, which are published after that by whoever comes first, so that a process may die between any two steps. A commit
counts until its part is found missing: a mark beside the record then makes way for the split's next one. What is stored
where: :mod:`batchrun.data.records`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.columns import LossyColumnError, as_json_text, unify
from batchrun.data.lease import alone
from batchrun.data.parts import Layout, MissingResultError, PartContent, rewrite_part, write_part
from batchrun.data.place import OUTPUT_LEASE, check_configuration, check_place, refuse_inputs, remove_everything
from batchrun.data.records import (
    EMPTY_PART,
    FORMAT,
    HOME,
    JOB,
    KEPT,
    MANIFEST_COPY,
    PARTIALS,
    REMOVING,
    SEGMENTS,
    SPLITS,
    STAGED,
    STOP,
    InputRecord,
    JobRecord,
    Manifest,
    PartEntry,
    SplitEntry,
    SplitRecord,
    StoredFile,
    decoded_schema,
    encode,
    encoded_schema,
    kept_file,
    lost_mark,
    manifest_file,
    read_record_if_any,
    split_file,
)
from batchrun.data.results import Results, partials_table, results_table
from batchrun.data.rows import Batch, InputFile, PartialRow, RowResult, Split
from batchrun.data.store import StorageError, Store, sha256_of
from batchrun.data.sweep import forget_units, free_units, is_swept, shares_of, sweep
from batchrun.data.view import OutputView, counting_record, current_parts, part_entry
from batchrun.data.workers import DEFAULT_TTL, Worker, timestamp
from batchrun.errors import JobError, StoppedError, without_credentials
from batchrun.job import OutputSpec

log = logging.getLogger(__name__)


class Batches(Protocol):
    """What a part is joined from; :class:`batchrun.data.source.Source` is one."""

    def batches(self, split: Split) -> Iterator[Batch]: ...


class Output(OutputView):
    """An output as one of its workers writes it, until :meth:`close`. Any number of workers may be at it.

    The methods that write are for one thread at a time.
    """

    def __init__(self, store: Store, layout: Layout, configuration: dict[str, Any], worker: Worker) -> None:
        super().__init__(store)
        self.layout = layout
        self.configuration = configuration
        self.attempt = store.writer
        self.worker = worker
        self._id = self._recorded_id()
        self._stop_before = store.read_if_any(STOP)
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
        """Begins an output, or joins what others work on or have left.

        ``configuration`` is plain JSON data and covers what ``layout`` depends on. ``inputs`` must not lie within the
        output. ``overwrite`` removes what batchrun wrote there before, and nothing else. ``ttl`` in seconds: how long
        this worker may be silent before others take over what it holds.

        The rows of a published part that is gone are to be run again, which a warning says.

        Raises JobError if the output belongs to another configuration, is a directory of something else, is damaged,
        or cannot be written; and HeldError if it is to be overwritten while others work on it.
        """
        configuration = json.loads(encode(configuration))
        try:
            store = Store(spec.path, spec.storage_options)
            check_place(store, overwrite=overwrite)
            refuse_inputs(store, inputs)
            if not overwrite and store.exists(JOB):
                check_configuration(store, configuration)
        except (StorageError, OSError, ValueError, ImportError) as error:
            raise JobError(f"output.path: {error}") from error
        with ExitStack() as begun:
            try:
                worker = begun.enter_context(Worker(store, ttl=ttl))
                store.probe_exclusive_create()  # a worker's: to those who sweep its files are no dead one's
            except StorageError as error:
                raise JobError(f"output.path: {error}") from error
            if overwrite or store.exists(REMOVING):  # looked at only when other workers can see this one
                remove_everything(store, worker, overwrite=overwrite)
            job = JobRecord(format=FORMAT, id=store.writer, configuration=configuration)
            if not store.create(JOB, encode(job)):
                check_configuration(store, configuration)
            output = cls(store, layout, configuration, worker)
            if output.reopened():
                with alone(store, worker, OUTPUT_LEASE):
                    output.take_back_commits()
            output._give_up_lost_parts()
            begun.pop_all()
        return output

    def is_told_to_stop(self) -> bool:
        """Whether somebody has, since this worker came, told all workers to stop."""
        return self.store.read_if_any(STOP) != self._stop_before

    def check_same(self) -> None:
        """Raises StoppedError if others have begun the output anew since this worker came.

        They do so where none is at work; one that was silent for long seems not to be. Nothing of it may get into
        theirs: it is to ask before it writes.
        """
        if self._recorded_id() != self._id:
            raise StoppedError(f"{self.store.url} was begun anew by others, who took this worker for gone")

    def _recorded_id(self) -> str | None:
        job = read_record_if_any(self.store, JOB, JobRecord)
        return None if job is None else job.id

    def close(self) -> None:
        """Leaves the output: what this worker holds is free for others at once."""
        self.worker.leave()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record_input(
        self, files: Sequence[InputFile], splits: Sequence[Split], whole: Collection[str], next_split: int
    ) -> None:
        """Records the input's files and splits, in place of what was recorded before. One worker at a time may do so.

        ``whole`` are the keys of the files all of whose rows are in ``splits``; ``next_split`` is above the number of
        every split that there ever was.
        """
        names, before = self._input_records(), self.input_record()
        place = {file.key: index for index, file in enumerate(files)}
        record = InputRecord(
            attempt=self.attempt,
            files=[replace(file, path=without_credentials(file.path)) for file in files],
            splits=[SplitEntry(**asdict(split) | {"file": place[split.file.key]}) for split in splits],
            whole=sorted(place[key] for key in whole),
            next_split=next_split,
        )
        if before is None or before.model_copy(update={"attempt": self.attempt}) != record:
            generation = max((int(name[-10:-5]) for name in names), default=0) + 1
            if not self.store.create(f"{HOME}/input-{generation:05d}.json", encode(record)):
                raise StoppedError(f"{self.store.url}: another worker recorded the input at once; submit again")

    def checkpoint(self, results: Sequence[RowResult], partials: Sequence[PartialRow]) -> None:
        """Makes finished rows and the state of all unfinished ones durable.

        ``partials`` replaces what this attempt said before: a row may be missing from it once its result is in
        ``results`` of this call or an earlier one.
        """
        self.check_same()
        by_split: dict[int, list[RowResult]] = defaultdict(list)
        for result in results:
            by_split[result.split].append(result)
        for split, rows in sorted(by_split.items()):
            name = f"{SEGMENTS}/{split:05d}-{self.attempt}-{next(self._counter):06d}.parquet"
            self.store.put(name, encoded_table(results_table(rows)))
        superseded, self._snapshot = self._snapshot, None
        if partials:
            self._snapshot = f"{PARTIALS}/{self.attempt}-{next(self._counter):06d}.parquet"
            self.store.put(self._snapshot, encoded_table(partials_table(partials)))
        if superseded:
            self.store.delete([superseded])

    def commit_split(self, split: Split, source: Batches) -> SplitRecord | None:
        """Makes the split's part out of its segments and publishes it. Of several workers the first one's part counts.

        A part that follows an earlier one of the split, which readers may be at, is left staged: :meth:`finish`
        publishes all of these together.

        None if it cannot be yet: some of its rows are left to others who have not finished them (the last of them
        commits it), or a segment is damaged (whoever claims its rows then).

        Safe to call again after any interruption. Raises StorageError when a row has no result although nothing is
        damaged: running the job again makes it anew.
        """
        names = set(self.store.names(SPLITS))
        name, segments = counting_record(split.number, names), self.segments().get(split.number, [])
        if name not in names and not self._commit(split, source, name, segments) and not self.store.exists(name):
            return None
        record = self.record(name)
        for file in record.files if name == split_file(split.number) else ():
            self._publish(file)
        self.store.delete(segment for segment in segments if segment.startswith(SEGMENTS))
        forget_units(self.store, {split.number})
        return record

    def reopened(self) -> dict[int, str]:
        """Split -> commit record, of the splits that the newest rerun opens again, where that record counts still."""
        rerun = self.rerun()
        commits, kept = self.commits(), set(self.store.names(KEPT))
        opened = rerun.commits if rerun else {}
        return {s: name for s, name in opened.items() if commits.get(s) == name and kept_file(name) in kept}

    def take_back_commits(self) -> None:
        """Makes those records count no more. For a worker that has the output alone."""
        reopened = self.reopened()
        segments = self.segments() if reopened else {}
        for split, commit in reopened.items():
            self.store.delete(name for name in segments.get(split, ()) if name.startswith(SEGMENTS))
            self.store.put(lost_mark(commit), encode({"attempt": self.attempt, "noticed": timestamp()}))

    def finish(self, run: dict[str, Any]) -> Manifest:
        """Names what is committed in a new manifest, once all parts share one schema, and removes what none names.

        ``run`` is what this run says of itself (model revision, versions, device); nothing in it may be secret. If
        nothing was committed since the newest manifest, that one is returned; so it is while rows of it are run again.
        Raises StorageError if a published part is gone or has another size.
        """
        if (settled := self._settled_manifest()) is not None:
            return settled
        with alone(self.store, self.worker, OUTPUT_LEASE):
            self.check_same()
            self.take_back_commits()  # who opened a rerun may have died before it had
            manifest = self._finish(run)
            if manifest.complete:
                sweep(self, self.worker, manifest)
            return manifest

    def _settled_manifest(self) -> Manifest | None:
        """The newest manifest, if :meth:`finish` has nothing to do: most workers of a job find that another did it."""
        manifest, records, input_record = self.manifest(), self.committed(), self.input_record()
        if manifest is None or not manifest.complete or input_record is None:
            return None
        parts, sizes = current_parts(manifest, records), self.store.sizes("")
        settled = (
            len(records) == len(input_record.splits)
            and parts.keys() - {EMPTY_PART} == records.keys()
            and len(parts) == len(manifest.parts)
            and all(sizes.get(file.name) == file.bytes for part in parts.values() for file in part.files)
            and self.store.read_if_any(MANIFEST_COPY) == encode(manifest)
            and is_swept(self, manifest, sizes)
        )
        return manifest if settled else None

    def _finish(self, run: dict[str, Any]) -> Manifest:
        newest = self.manifest()
        try:
            return self._follow(newest, run) or self._finish(run)
        except StorageError:
            if self.manifest() == newest:
                raise
            return self._finish(run)  # another worker took this one for gone, and published parts of its own

    def _follow(self, newest: Manifest | None, run: dict[str, Any]) -> Manifest | None:
        """The manifest after ``newest``, or that one if nothing is new; None if another worker was faster."""
        records = self.committed()
        input_record = self.input_record()
        complete = input_record is not None and len(records) == len(input_record.splits)
        named = self._published_parts(newest, records)
        if newest is not None and not complete and len(named) < len(newest.parts):
            return newest  # nothing of it is replaced before all of what replaces it is there
        parts = [entry.files for entry in named.values()]
        parts += [record.files for number, record in records.items() if number not in named]
        self.publish_checked(itertools.chain.from_iterable(parts))
        if newest is not None:
            self._copy(newest)
        kept = newest is not None and len(named) == len(newest.parts)
        if newest is None or not kept or newest.complete != complete or named.keys() - {EMPTY_PART} != records.keys():
            manifest = self._next_manifest(newest, named, records, run, complete=complete)
            if not self.store.create(manifest_file(manifest.generation), encode(manifest)):
                return None
            self.publish_checked(file for part in manifest.parts for file in part.files)
            self._copy(manifest)
            newest = manifest
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
        commits = self.commits()
        for fault in faults:
            if fault.part.split in commits:
                mark = {"attempt": self.attempt, "noticed": timestamp()}
                self.store.put(lost_mark(commits[fault.part.split]), encode(mark))
            log.warning("%s/%s: its %s rows are run again", self.store.url, fault, f"{fault.part.rows:,}")

    def _commit(self, split: Split, source: Batches, name: str, segments: Sequence[str]) -> bool:
        """Stages the split's part, made of these segments, and tries to create its commit record; False if it did not.

        That is so when others have not finished their shares of the split, when another was faster, and when a segment
        is damaged: its rows can be claimed again.
        """
        tables = self.tables(segments)
        results = Results([table for table in tables.values() if table is not None])
        with self.store.scratch() as directory:
            path = directory / "part"
            try:
                content = write_part(path, source.batches(split), results, split, self.layout)
            except MissingResultError as error:
                if damaged := [segment for segment, table in tables.items() if table is None]:
                    self.store.delete(damaged)
                    free_units(self.store, {split.number}, shares_of(self.store, {split.number}))
                elif not (shares_of(self.store, {split.number}) or self.store.exists(name) or self._is_replaced(split)):
                    self.check_same()
                    raise StorageError(f"{error}; run the same command again to make it") from error
                return False
            record = self._split_record(split, content, path)
            self.store.put_file(path, record.staged)
            if content.errors_path and record.errors_file and record.errors_file.staged:
                self.store.put_file(content.errors_path, record.errors_file.staged)
        self.check_same()
        if self.store.create(name, encode(record)):
            self._records[name] = record
            return True
        self.store.delete(file.staged for file in record.files if file.staged)
        return False

    def _is_replaced(self, split: Split) -> bool:
        """Whether the split is no more one of the recorded input: its file has changed since."""
        record = self.input_record()
        return record is not None and all(entry.number != split.number for entry in record.splits)

    def _split_record(self, split: Split, content: PartContent, path: Path) -> SplitRecord:
        errors_file = None
        if content.errors_path is not None:
            errors_file = StoredFile(
                name=self.layout.errors_name(split.number),
                bytes=content.errors_path.stat().st_size,
                sha256=sha256_of(content.errors_path),
                staged=f"{STAGED}/{split.number:05d}-errors-{self.attempt}",
            )
        return SplitRecord(
            split=split.number,
            attempt=self.attempt,
            commit=uuid.uuid4().hex,
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
            errors_file=errors_file,
        )

    def _publish(self, file: StoredFile) -> None:
        """Publishes a committed file unless that is done."""
        if file.staged is not None and self.store.exists(file.staged):
            self.store.publish(file.staged, file.name)

    def publish_checked(self, files: Iterable[StoredFile]) -> None:
        """Publishes committed files unless that is done. Raises StorageError if one is gone or has another size."""
        every = list(files)
        staged = set(self.store.names(STAGED))
        for file in every:
            if file.staged in staged:
                self.store.publish(file.staged, file.name)
        sizes = self.store.sizes("")
        for file in every:
            found = sizes.get(file.name)
            if found != file.bytes:
                state = "is gone" if found is None else f"has {found:,} bytes, not {file.bytes:,},"
                path = self.store.path(file.name)
                raise StorageError(f"{path} {state} since it was published: run the same command again")

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
            created=timestamp(),
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
        schemas = {
            number: decoded_schema(entry.schema_ipc) if entry.schema_ipc else records[number].schema_arrow
            for number, entry in parts.items()
        }
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

    def _rewrite(self, entry: PartEntry, schema: pa.Schema, generation: int) -> PartEntry:
        with self.store.scratch() as directory, self.store.local_copy(entry.name) as published:
            path = directory / "part"
            rewrite_part(published, path, schema)
            return self._stage(path, entry.model_copy(update={"schema_ipc": encoded_schema(schema)}), generation)

    def _empty_part(self, generation: int) -> tuple[PartEntry, pa.Schema | None]:
        """A part without rows, so that an output without any is a readable data set."""
        nothing = Split(InputFile("", "", 0, ""), 0, 1, 0)
        name = self.layout.part_name(0)
        entry = PartEntry(name=name, split=EMPTY_PART, commit=self.attempt, rows=0, ok=0, errors=0, bytes=0, sha256="")
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

    def _copy(self, manifest: Manifest) -> None:
        """Copies the manifest for people, unless that is done."""
        copy = encode(manifest)
        if self.store.read_if_any(MANIFEST_COPY) != copy:
            self.store.put(MANIFEST_COPY, copy)


def _described(schema: pa.Schema | None) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema or ()}


def encoded_table(table: pa.Table) -> bytes:
    """A table as the bytes of a small Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()
