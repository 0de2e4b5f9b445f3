"""The final parts of an output: which columns they have, and how input rows and results are joined into them.

A part holds the kept input columns, then the result columns (:data:`RESULT_COLUMNS`), one record per input row in
input order; a row that could not be read has nulls for its input columns, and its error. The bytes of a part follow
from its rows and their results alone.

Parquet parts type the kept columns by the rules of :mod:`batchrun.data.columns`. JSONL parts carry the values of JSONL
unchanged, and those of Parquet in the JSON forms of :mod:`batchrun.data.json_text`. An input column that turns out to
bear the name of a result column only after the job began is kept as ``input.NAME``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrun.data.columns import (
    LossyColumnError,
    as_json_text,
    conform,
    natural_column,
    typed_column,
    unify,
)
from batchrun.data.json_text import dump_json, replace_surrogates
from batchrun.data.openai_batch import Tokens, answer_line
from batchrun.data.results import LOGPROBS, Results
from batchrun.data.rows import Batch, Split
from batchrun.data.source import python_values, to_records
from batchrun.errors import JobError, row_error
from batchrun.job import BATCH_FORMAT, JobSpec

RESULT_COLUMNS: dict[str, pa.DataType] = {
    "custom_id": pa.string(),
    "generated_text": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "error": pa.string(),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "rerun_max_tokens": pa.int64(),
}
OPTIONAL_COLUMNS = ("logprobs", "prompt_logprobs", "rerun_max_tokens")  # there if the job or one of its rows has them

ROW_GROUP_ROWS = 10_000
ROW_GROUP_BYTES = 128 * 2**20
_WRITE_OPTIONS: dict[str, Any] = {"compression": "zstd", "compression_level": 3, "version": "2.6"}


class MissingResultError(Exception):
    """A split was to be committed before all of its rows had results."""


@dataclass(frozen=True)
class Layout:
    """The form of the output: what decides its columns. Fixed for the life of an output."""

    format: Literal["parquet", "jsonl", "openai-batch"]
    keep: bool | tuple[str, ...]  # input columns carried through: all, none, or these
    id_column: str | None
    names: dict[str, str]  # each of RESULT_COLUMNS -> its name in the output
    logprobs: bool = False
    prompt_logprobs: bool = False
    tokens: Tokens | None = field(default=None, compare=False)  # of OpenAI's format, which spells tokens out

    @classmethod
    def of(cls, job: JobSpec) -> Layout:
        """The layout that a job asks for. Raises JobError on renames of what is not there, or to one name, and on what
        OpenAI's format cannot hold.
        """
        output = job.output
        if output.format == BATCH_FORMAT and (faults := list(_batch_faults(job))):
            raise JobError("\n".join(faults))
        if unknown := sorted(output.columns.keys() - RESULT_COLUMNS.keys()):
            raise JobError(
                f"output.columns: {', '.join(unknown)}: no such result column; there are {', '.join(RESULT_COLUMNS)}"
            )
        names = {name: output.columns.get(name, name) for name in RESULT_COLUMNS}
        if twice := _repeated(names.values()):
            raise JobError(f"output.columns: two result columns would be named {', '.join(twice)}")
        return cls(
            format=output.format,
            keep=output.keep_columns if output.format != BATCH_FORMAT else False,
            id_column=job.input.id_column,
            names=names,
            logprobs=job.sampling.logprobs is not None,
            prompt_logprobs=job.sampling.prompt_logprobs is not None,
        )

    def part_name(self, split: int) -> str:
        """The name of a split's part: it holds nothing but the number."""
        return f"part-{split:05d}.{'parquet' if self.format == 'parquet' else 'jsonl'}"

    def errors_name(self, split: int) -> str:
        """The name of the file for a split's failed rows, where the format keeps them apart."""
        return f"errors-{split:05d}.jsonl"

    def keeps(self, name: str) -> bool:
        """Whether an input column is carried through. The id column called custom_id is the result column itself."""
        if name == self.id_column == self.names["custom_id"]:
            return False
        return self.keep if isinstance(self.keep, bool) else name in self.keep

    def kept_name(self, name: str) -> str:
        """What an input column is called in the output."""
        while name in self.names.values():
            name = f"input.{name}"
        return name

    def asks_for(self, column: str) -> bool:
        """Whether the job as a whole has this result column."""
        return column not in OPTIONAL_COLUMNS or bool(getattr(self, column, False))


def _batch_faults(job: JobSpec) -> Iterator[str]:
    """What of a job has no place in an output of OpenAI's format."""
    if job.input.format != BATCH_FORMAT:
        yield f"output.format: {BATCH_FORMAT} answers lines of input.format: {BATCH_FORMAT}; use parquet or jsonl"
    if job.output.columns:
        yield f"output.columns: {BATCH_FORMAT} has no columns; leave it out"
    if job.output.keep_columns is not True:
        yield f"output.keep_columns: {BATCH_FORMAT} keeps no columns but custom_id; leave it out"
    if job.sampling.prompt_logprobs is not None:
        yield f"sampling.prompt_logprobs: {BATCH_FORMAT} has no place for them; use output.format: parquet or jsonl"


def check_columns(layout: Layout, input_names: Iterable[str]) -> None:
    """Raises JobError if kept input columns clash with result columns."""
    names = list(input_names)
    if twice := _repeated(names):
        raise JobError(f"input: more than one column is named {', '.join(twice)}")
    results = {layout.names[column]: column for column in RESULT_COLUMNS if layout.asks_for(column)}
    if clashes := [name for name in names if layout.keeps(name) and name in results]:
        raise JobError(
            f"output: {', '.join(clashes)} would be both an input column and a result column; give the result another "
            f"name (output.columns: {{{results[clashes[0]]}: NAME}}) or leave the input out of output.keep_columns"
        )


def _repeated(names: Iterable[str]) -> list[str]:
    every = list(names)
    return sorted({name for name in every if every.count(name) > 1})


@dataclass(frozen=True)
class PartContent:
    """What write_part wrote."""

    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    schema: pa.Schema | None  # of a Parquet part
    typed: bool  # the kept columns have types of their own, as Parquet's have, rather than inferred ones
    errors_path: Path | None = None  # the failed rows, where the format keeps them apart and there are any


def write_part(path: Path, batches: Iterable[Batch], results: Results, split: Split, layout: Layout) -> PartContent:
    """Joins input rows and results into one part file at ``path``, a few batches at a time in memory.

    Raises MissingResultError if a readable row has no result.
    """
    columns = [column for column in RESULT_COLUMNS if layout.asks_for(column) or results.has(column)]
    columns += ["answer"] if layout.format == BATCH_FORMAT else []
    tally = _Tally()
    joined = tally.count(
        (batch, _join(batch, results, split, layout, columns)) for batch in _with_remainder(batches, split)
    )
    if layout.format == "jsonl":
        _write_jsonl(path, joined, layout)
        return tally.content(None)
    if layout.format == BATCH_FORMAT:
        errors_path = _write_answers(path, joined, split, layout)
        return replace(tally.content(None), errors_path=errors_path)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        spool = _Spool(file)
        for batch, found in joined:
            spool.append(_frame(batch, found, layout))
        schemas = [*spool.schemas, _result_schema(layout, columns)]
        schema = unify(schemas, layout.names.values(), structs_grow=tally.typed)
        return tally.content(write_parquet(path, spool, schema))


def write_parquet(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> pa.Schema:
    """Writes the tables in ``schema``, or with columns as JSON text where that would lose something.

    ``tables`` is iterated over again for each such column.
    """
    while True:
        try:
            with pq.ParquetWriter(path, schema, **_WRITE_OPTIONS) as writer:
                for group in _row_groups(conform(table, schema) for table in tables):
                    writer.write_table(group.combine_chunks(), row_group_size=max(1, len(group)))
            return schema
        except LossyColumnError as lossy:
            schema = as_json_text(schema, lossy.column)


def rewrite_part(source: Path, target: Path, schema: pa.Schema) -> None:
    """Writes a Parquet part again with another schema. Raises LossyColumnError if a value does not fit."""
    with pq.ParquetFile(source) as file, pq.ParquetWriter(target, schema, **_WRITE_OPTIONS) as writer:
        for index in range(file.num_row_groups):
            group = conform(file.read_row_group(index), schema)
            writer.write_table(group.combine_chunks(), row_group_size=max(1, len(group)))


class _Tally:
    """Counts what passes through on its way into a part."""

    def __init__(self) -> None:
        self.rows = self.errors = self.prompt_tokens = self.completion_tokens = 0
        self.typed = True

    def count(self, joined: Iterable[tuple[Batch, pa.Table]]) -> Iterator[tuple[Batch, pa.Table]]:
        for batch, found in joined:
            self.rows += len(found)
            self.errors += len(found) - found["error"].null_count
            self.prompt_tokens += pc.sum(found["prompt_tokens"]).as_py() or 0
            self.completion_tokens += pc.sum(found["completion_tokens"]).as_py() or 0
            self.typed &= not any(batch.records or ())
            yield batch, found

    def content(self, schema: pa.Schema | None) -> PartContent:
        return PartContent(self.rows, self.errors, self.prompt_tokens, self.completion_tokens, schema, self.typed)


def _with_remainder(batches: Iterable[Batch], split: Split) -> Iterator[Batch]:
    """The batches, and one error record for the rest of a file that breaks off."""
    yield from batches
    if split.error is not None:
        row = split.first_row + split.n_rows
        error = row_error("unreadable_file", f"{split.file.key} from row {row} on: {split.error}")
        yield Batch([row], [error], records=[None])


def _join(batch: Batch, results: Results, split: Split, layout: Layout, columns: Sequence[str]) -> pa.Table:
    """These columns of the results of a batch, by their own names."""
    found = results.take(batch.rows)
    error = pc.coalesce(found["error"], pa.array([replace_surrogates(e) for e in batch.errors], pa.large_string()))
    missing = pc.and_(found["row"].is_null(), error.is_null())
    if (place := pc.index(missing, True).as_py()) >= 0:
        raise MissingResultError(f"{split.file.key}: row {batch.rows[place]} has no result")
    arrays = []
    for column in columns:
        match column:
            case "custom_id":
                arrays.append(pa.array(_custom_ids(batch, split, layout), pa.string()))
            case "error":
                arrays.append(error.cast(pa.string()))
            case "answer":
                arrays.append(found[column])
            case _:
                arrays.append(found[column].cast(RESULT_COLUMNS[column]))
    return pa.table(arrays, names=list(columns))


def _custom_ids(batch: Batch, split: Split, layout: Layout) -> list[str]:
    """The id column as text (what is no string: as JSON), or ``KEY:ROW`` where there is no value."""
    name = layout.id_column
    values: list[Any] = [None] * len(batch.rows)
    if name is not None and batch.table is not None and name in batch.table.column_names:
        column = batch.table[name]
        values = python_values(column.cast(pa.string()) if pa.types.is_integer(column.type) else column)
    elif name is not None and batch.records is not None:
        values = [None if record is None else record.get(name) for record in batch.records]
    key = replace_surrogates(split.file.key)
    return [
        f"{key}:{row}" if value is None else value if isinstance(value, str) else dump_json(value)
        for row, value in zip(batch.rows, values, strict=True)
    ]


def _write_jsonl(path: Path, joined: Iterable[tuple[Batch, pa.Table]], layout: Layout) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for batch, found in joined:
            results = found.rename_columns([layout.names[column] for column in found.column_names]).to_pylist()
            records = to_records(batch.table) if batch.table is not None else batch.records or []
            for record, result in zip(records, results, strict=True):
                kept = {layout.kept_name(k): value for k, value in (record or {}).items() if layout.keeps(k)}
                file.write(dump_json(kept | result) + "\n")


def _write_answers(path: Path, joined: Iterable[tuple[Batch, pa.Table]], split: Split, layout: Layout) -> Path | None:
    """Good rows at ``path``; failed ones, if there are any, at the path that is returned."""
    errors_path = path.with_name(f"{path.name}-errors")
    with (
        path.open("w", encoding="utf-8", newline="\n") as good,
        errors_path.open("w", encoding="utf-8", newline="\n") as failed,
    ):
        for batch, found in joined:
            for row, line, result in zip(batch.rows, batch.records or [], found.to_pylist(), strict=True):
                file = good if result["error"] is None else failed
                answer = result["answer"] or answer_line(line, result, split.file.key, row, layout.tokens)
                file.write(answer + "\n")
    return errors_path if errors_path.stat().st_size else None


class _Spool:
    """Tables of differing schemas, kept on disk in order."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.schemas: list[pa.Schema] = []

    def append(self, table: pa.Table) -> None:
        with pa.ipc.new_stream(self._file, table.schema) as stream:
            stream.write_table(table.unify_dictionaries())
        self.schemas.append(table.schema)

    def __iter__(self) -> Iterator[pa.Table]:
        self._file.seek(0)
        for _ in self.schemas:
            with pa.ipc.open_stream(self._file) as stream:
                yield stream.read_all()


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in groups of ROW_GROUP_ROWS, fewer where rows are large."""
    waiting: list[pa.Table] = []  # joined only when a group is full: there may be thousands
    rows = size = 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        size += table.nbytes
        if rows < ROW_GROUP_ROWS and size < ROW_GROUP_BYTES:
            continue
        rest = pa.concat_tables(waiting)
        while len(rest) >= ROW_GROUP_ROWS:
            yield rest.slice(0, ROW_GROUP_ROWS)
            rest = rest.slice(ROW_GROUP_ROWS)
        if rest.nbytes >= ROW_GROUP_BYTES:
            yield rest
            rest = rest.slice(len(rest))
        waiting, rows, size = [rest], len(rest), rest.nbytes
    if rows:
        yield pa.concat_tables(waiting)


def _frame(batch: Batch, found: pa.Table, layout: Layout) -> pa.Table:
    """One batch of the output: kept columns in types that hold them, then result columns."""
    kept = _kept_columns(batch, layout)
    if not isinstance(layout.keep, bool):
        absent = [layout.kept_name(name) for name in layout.keep if layout.keeps(name)]
        kept = {name: (pa.field(name, pa.null()), pa.nulls(len(batch.rows))) for name in absent} | kept
    fields = [field.with_name(name) for name, (field, _) in kept.items()]
    schema = pa.schema([*fields, *_result_schema(layout, found.column_names)])
    return pa.Table.from_arrays([*(array for _, array in kept.values()), *found.columns], schema=schema)


def _result_schema(layout: Layout, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([(layout.names[column], RESULT_COLUMNS[column]) for column in columns])


def _kept_columns(batch: Batch, layout: Layout) -> dict[str, tuple[pa.Field, Any]]:
    """Output name -> field and values of each kept column."""
    if batch.table is not None:
        return {
            layout.kept_name(field.name): typed_column(field, batch.table[field.name])
            for field in batch.table.schema
            if layout.keeps(field.name)
        }
    records = batch.records or []
    names = dict.fromkeys(name for record in records if record for name in record if layout.keeps(name))
    return {
        layout.kept_name(name): natural_column(
            name, [None if record is None else record.get(name) for record in records]
        )
        for name in names
    }
