"""The published result of an output, row by row in input order, with bounded memory.

What belongs to the result is told by the newest manifest alone; where the output is not complete, by that and the
commit records of what was finished since. A part may still lie staged: whoever committed it died before publishing it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.columns import is_json_text, natural_column, unify
from batchrun.data.json_text import parse_json
from batchrun.data.openai_batch import result_of_answer
from batchrun.data.parts import OPTIONAL_COLUMNS, RESULT_COLUMNS
from batchrun.data.records import PartEntry, StoredFile
from batchrun.data.source import to_records
from batchrun.data.view import OutputView, PartFault, current_parts, part_entry
from batchrun.errors import JobError
from batchrun.faults import unknown_name
from batchrun.job import BATCH_FORMAT

Where = Literal["error", "truncated", "ok"]
Record = dict[str, Any]
T = TypeVar("T")

BATCH_ROWS = 1024  # read at once


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows and columns of a result."""

    where: Where | None = None  # rows with an error; that reached max_tokens; without an error. None: all
    columns: tuple[str, ...] | None = None  # as the output names them; None: all
    limit: int | None = None  # rows, of those that ``where`` takes

    def takes(self, error: Any, finish_reason: Any) -> bool:
        """Whether a row that ended so is among them, ``limit`` aside."""
        match self.where:
            case "error":
                return error is not None
            case "truncated":
                return bool(finish_reason == "length")
            case "ok":
                return error is None
        return True


class PartReader(Protocol):
    """Reads the parts of one output format, each as a local file."""

    def schemas(self, path: Path) -> Iterator[pa.Schema]: ...  # of its tables, in order
    def tables(self, path: Path, columns: Sequence[str] | None) -> Iterator[pa.Table]: ...  # other columns may be there
    def records(self, path: Path, columns: Sequence[str] | None) -> Iterator[list[Record]]: ...


class Result:
    """The result as it was published when this object was made.

    Raises JobError where a record or a part is damaged or gone.
    """

    def __init__(self, view: OutputView) -> None:
        output = view.recorded_configuration()["output"]
        self.store = view.store
        self.names: dict[str, str] = {name: output["columns"].get(name, name) for name in RESULT_COLUMNS}
        self._format = part_reader(output["format"], self.names)
        _, splits = view.recorded_input() or ([], [])
        self.splits = len(splits)
        manifest = view.manifest()
        named = {part.split for part in manifest.parts} if manifest is not None and manifest.complete else set()
        self.complete = manifest is not None and manifest.complete and named >= {split.number for split in splits}
        self._typed = self.complete  # parts of one schema: nothing is left to unite
        if manifest is not None and self.complete:
            parts = {part.split: part for part in manifest.parts}
        else:
            records = view.committed()
            self._typed = all(record.typed for record in records.values())
            committed = {
                number: part_entry(record).model_copy(
                    update={"staged": record.staged, "errors_file": record.errors_file}
                )
                for number, record in records.items()
            }
            parts = committed | current_parts(manifest, records)
        self._parts = [parts[number] for number in sorted(parts)]
        self.rows = sum(part.rows for part in self._parts)

    def __str__(self) -> str:
        state = "complete" if self.complete else "not complete"
        return f"{self.store.url}: {state}, {len(self._parts):,} of {self.splits:,} splits, {self.rows:,} rows"

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises JobError if no row of the result has one of these columns."""
        missing, known = list(columns), dict[str, None]()
        for schema in self._schemas():
            known |= dict.fromkeys(schema.names)
            missing = [name for name in missing if name not in known]
            if not missing:
                return
        if missing and self.rows:
            raise JobError(f"--columns: {missing[0]}: {unknown_name('column', missing[0], list(known))}")

    def schema(self, selection: Selection) -> pa.Schema:
        """The one schema that can take all of its tables. What is JSON has to be read through for it."""
        schemas = self._schemas()
        if self.complete and isinstance(self._format, _Parquet):
            schemas = itertools.islice(schemas, 1)
        schema = unify(list(schemas), self.names.values(), structs_grow=self._typed)
        if selection.columns is None:
            return schema
        return pa.schema([schema.field(name) for name in selection.columns if name in schema.names])

    def tables(self, selection: Selection) -> Iterator[pa.Table]:
        """The rows as Arrow tables. Their schemas differ where the output is JSON, or not complete."""
        error, finish_reason = self.names["error"], self.names["finish_reason"]
        tables = self._each(lambda path: self._format.tables(path, self._read_columns(selection)))
        left = selection.limit
        for table in tables:
            if selection.where is not None:
                ends = zip(table[error].to_pylist(), table[finish_reason].to_pylist(), strict=True)
                table = table.filter(pa.array([selection.takes(*end) for end in ends], pa.bool_()))
            if selection.columns is not None:
                table = table.select([name for name in selection.columns if name in table.column_names])
            if left is not None:
                table = table.slice(0, left)
                left -= len(table)
            if len(table):
                yield table
            if left == 0:
                return

    def records(self, selection: Selection) -> Iterator[Record]:
        """The rows as JSON data: what Parquet holds as JSON text is the value that it stands for."""
        error, finish_reason = self.names["error"], self.names["finish_reason"]
        batches = self._each(lambda path: self._format.records(path, self._read_columns(selection)))
        every = itertools.chain.from_iterable(batches)
        taken = (record for record in every if selection.takes(record.get(error), record.get(finish_reason)))
        for record in itertools.islice(taken, selection.limit):
            columns = selection.columns
            yield record if columns is None else {name: record.get(name) for name in columns}

    def _read_columns(self, selection: Selection) -> list[str] | None:
        if selection.columns is None:
            return None
        return list(dict.fromkeys([*selection.columns, self.names["error"], self.names["finish_reason"]]))

    def _schemas(self) -> Iterator[pa.Schema]:
        return self._each(self._format.schemas)

    def _each(self, read: Callable[[Path], Iterator[T]]) -> Iterator[T]:
        """What ``read`` gives of every part, in order."""
        sizes = self.store.sizes("")
        for part, file in [(entry, file) for entry in self._parts for file in entry.files]:
            with self.store.local_copy(self._place(part, file, sizes.get(file.name))) as path:
                try:
                    yield from read(path)
                except (pa.ArrowException, OSError, ValueError) as error:
                    raise JobError(f"{self.store.path(file.name)} cannot be read: {error}") from error

    def _place(self, part: PartEntry, file: StoredFile, size: int | None) -> str:
        """Where the file lies: under its name, or still staged."""
        if size == file.bytes:
            return file.name
        if file.staged is not None and self.store.size(file.staged) == file.bytes:
            return file.staged
        raise JobError(f"{self.store.url}: {PartFault(part, file, size)}; `batchrun submit` says what can be done")


def part_reader(format: str, names: dict[str, str]) -> PartReader:
    """The reader of an `output.format`; ``names`` says what each of RESULT_COLUMNS is called in the parts."""
    return _FORMATS[format](names)


def lines_of(path: Path) -> Iterator[list[str]]:
    """The lines of a part that has one for each row, some at a time."""
    with path.open(encoding="utf-8", newline="\n") as file:
        while lines := list(itertools.islice(file, BATCH_ROWS)):
            yield lines


class _Parquet:
    def __init__(self, names: dict[str, str]) -> None:
        pass

    def schemas(self, path: Path) -> Iterator[pa.Schema]:
        yield pq.read_schema(path)

    def tables(self, path: Path, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                yield pa.Table.from_batches([batch])

    def records(self, path: Path, columns: Sequence[str] | None) -> Iterator[list[Record]]:
        for table in self.tables(path, columns):
            records = to_records(table)
            for field in table.schema:
                if is_json_text(field):
                    for record in records:
                        text = record[field.name]
                        record[field.name] = None if text is None else parse_json(text)
            yield records


class _JsonLines:
    def __init__(self, names: dict[str, str]) -> None:
        self._types = {names[column]: kind for column, kind in RESULT_COLUMNS.items()}
        self._always = pa.schema([(names[c], k) for c, k in RESULT_COLUMNS.items() if c not in OPTIONAL_COLUMNS])

    def schemas(self, path: Path) -> Iterator[pa.Schema]:
        yield self._always  # of a part without rows, too
        for table in self.tables(path, None):
            yield table.schema

    def tables(self, path: Path, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        for records in self.records(path, columns):
            names = columns or dict.fromkeys(name for record in records for name in record)
            typed = [self._column(name, [record.get(name) for record in records]) for name in names]
            yield pa.Table.from_arrays([values for _, values in typed], schema=pa.schema([field for field, _ in typed]))

    def records(self, path: Path, columns: Sequence[str] | None) -> Iterator[list[Record]]:
        for lines in lines_of(path):
            yield [parse_json(line) for line in lines]

    def _column(self, name: str, values: list[Any]) -> tuple[pa.Field, Any]:
        if name in self._types:
            return pa.field(name, self._types[name]), pa.array(values, self._types[name])
        return natural_column(name, values)


class _Answers(_JsonLines):
    """OpenAI's batch format: of each split the answers, then the errors."""

    def records(self, path: Path, columns: Sequence[str] | None) -> Iterator[list[Record]]:
        for lines in super().records(path, columns):
            yield [result_of_answer(line) for line in lines]


_FORMATS: dict[str, Callable[[dict[str, str]], PartReader]] = {
    "parquet": _Parquet,
    "jsonl": _JsonLines,
    BATCH_FORMAT: _Answers,
}
