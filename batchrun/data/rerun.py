"""Some rows of an output are run again: their splits are opened anew, with the results of the other rows kept."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchrun.data.json_text import parse_json
from batchrun.data.lease import alone
from batchrun.data.openai_batch import answer_id, result_of_answer
from batchrun.data.parts import Layout
from batchrun.data.place import OUTPUT_LEASE
from batchrun.data.reader import lines_of, part_reader
from batchrun.data.records import RERUNS, RerunRecord, StoredFile, encode, kept_file
from batchrun.data.results import KEPT_SCHEMA
from batchrun.data.rows import InputFile, Split
from batchrun.data.sink import Output, encoded_table
from batchrun.data.source import Source
from batchrun.data.view import current_parts, splits_of
from batchrun.errors import JobError
from batchrun.job import BATCH_FORMAT

log = logging.getLogger(__name__)


def open_again(
    output: Output, source: Source, files: Sequence[InputFile], kinds: Iterable[str], max_tokens: int | None
) -> int:
    """Opens the committed splits that have rows of these kinds, for those rows to be run again; returns how many.

    ``max_tokens`` is what they run with in place of the job's, if given. Where such a rerun has begun and is not
    finished, it is joined: 0. Raises JobError where one of another kind has.
    """
    wanted = sorted(set(kinds))
    with alone(output.store, output.worker, OUTPUT_LEASE):
        before = output.rerun()
        if before is not None and output.rerun_splits():
            if (before.kinds, before.max_tokens) != (wanted, max_tokens):
                raise JobError(f"--rerun {','.join(before.kinds)} has begun: finish it first, by submit alone")
            return 0
        now = {file.key: file for file in files}
        commits, rows = {}, 0
        candidates = list(_candidates(output, wanted))
        output.publish_checked(file for *_, part in candidates for file in part)  # their workers may have died before
        for split, commit, part in candidates:
            if now.get(split.file.key) is None:
                log.warning("%s is gone: none of its rows is run again", split.file.key)
                continue
            again = _keep_others(output, source, replace(split, file=now[split.file.key]), commit, part, wanted)
            if again:
                commits[split.number] = commit
                rows += again
        if commits:
            rerun = RerunRecord(attempt=output.attempt, kinds=wanted, max_tokens=max_tokens, commits=commits)
            generation = len(output.store.names(RERUNS)) + 1
            output.store.put(f"{RERUNS}/{generation:05d}.json", encode(rerun))
            output.take_back_commits()
    return rows


def _candidates(output: Output, kinds: Sequence[str]) -> Iterator[tuple[Split, str, list[StoredFile]]]:
    """The committed splits that may have rows of these kinds, with commit record and files of the part."""
    record, counting = output.input_record(), output.commits()
    splits = [split for split in splits_of(record) if split.number in counting] if record else []
    records = {split.number: output.record(counting[split.number]) for split in splits}
    parts = current_parts(output.manifest(), records)  # a manifest may have had some written anew
    for split in splits:
        done = records[split.number]
        failed_rows = done.errors - (split.error is not None)  # the rest of a file that breaks off is no row
        if failed_rows or list(kinds) != ["failed"]:
            part = parts[split.number].files if split.number in parts else done.files
            yield split, counting[split.number], part


def _keep_others(
    output: Output, source: Source, split: Split, commit: str, part: Sequence[StoredFile], kinds: Sequence[str]
) -> int:
    """Makes the results of rows that are not of these kinds durable beside the part; returns how many are."""
    rows = [row for batch in source.batches(split) for row in batch.rows]
    results = _results(output, part, split, rows)
    if len(rows) != len(results):
        raise JobError(f"{split.file.key}: has {len(rows):,} rows where the results have {len(results):,}")
    again = _is_of(kinds, results)
    results = results.set_column(0, KEPT_SCHEMA.field("row"), pa.array(rows, pa.int64()))
    results = results.set_column(1, KEPT_SCHEMA.field("sample_index"), pa.array([0] * len(rows), pa.int32()))
    kept = results.filter(pc.invert(again))
    if len(kept) == len(results):
        return 0
    output.store.put(kept_file(commit), encoded_table(kept))
    return len(results) - len(kept)


def _is_of(kinds: Sequence[str], results: pa.Table) -> pa.Array:
    nothing = pa.array([False] * len(results), pa.bool_())
    failed = results["error"].is_valid() if "failed" in kinds else nothing
    truncated = pc.fill_null(pc.equal(results["finish_reason"], "length"), False) if "truncated" in kinds else nothing
    return pa.array([True] * len(results), pa.bool_()) if "all" in kinds else pc.or_(failed, truncated)


def _results(output: Output, part: Sequence[StoredFile], split: Split, rows: Sequence[int]) -> pa.Table:
    """The results of a split's rows in their order, out of its part, as KEPT_SCHEMA but for the numbers."""
    with ExitStack() as copies:
        paths = [copies.enter_context(output.store.local_copy(file.name)) for file in part]
        try:
            if output.layout.format == BATCH_FORMAT:
                return _read_answers(paths, [answer_id(split.file.key, row) for row in rows])
            results = _read_rows(paths, output.layout)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise JobError(f"{output.store.path(part[0].name)} cannot be read: {error}") from error
    return results.slice(0, len(results) - (split.error is not None))


def _read_rows(paths: Sequence[Path], layout: Layout) -> pa.Table:
    reader = part_reader(layout.format, layout.names)
    tables = [table for path in paths for table in reader.tables(path, list(layout.names.values()))]
    return pa.concat_tables([KEPT_SCHEMA.empty_table(), *(_as_kept(table, layout) for table in tables)])


def _as_kept(table: pa.Table, layout: Layout) -> pa.Table:
    columns = [
        table[name] if (name := layout.names.get(field.name)) in table.column_names else pa.nulls(len(table))
        for field in KEPT_SCHEMA
    ]
    return pa.Table.from_arrays(columns, KEPT_SCHEMA.names).cast(KEPT_SCHEMA)


def _read_answers(paths: Sequence[Path], ids: Sequence[str]) -> pa.Table:
    """What has these ids, in their order: good and failed rows have files of their own."""
    found = {}
    for line in itertools.chain.from_iterable(lines for path in paths for lines in lines_of(path)):
        answer = parse_json(line)
        found[answer["id"]] = result_of_answer(answer) | {"answer": line.removesuffix("\n")}
    return pa.Table.from_pylist([found[id] for id in ids if id in found], KEPT_SCHEMA)
