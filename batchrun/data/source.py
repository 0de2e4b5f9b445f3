"""Rows out of JSONL files, Parquet files and Hugging Face datasets, in splits and with bounded memory.

A row's identity is its file's key and its number there. Reading is deterministic: the same split gives the same rows
in the same order, whether one by one (:meth:`Source.rows`) or in columns (:meth:`Source.batches`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from batchrun.data import hub, jsonl, openai_batch, parquet
from batchrun.data.files import UnreadableFileError, current_version, file_format, find_files, hive_columns
from batchrun.data.filters import Where
from batchrun.data.patience import StorageError
from batchrun.data.rows import Batch, InputFile, Row, Split
from batchrun.errors import JobError, StoppedError, row_error
from batchrun.job import BATCH_FORMAT, InputSpec

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")

_SCAN_THREADS = 8  # storage is waited for more than computed with
SAMPLED_ROWS = 100


class Source:
    """The rows of ``spec``. One object reads in one thread at a time.

    ``skipped`` holds the paths that :meth:`files` passed over. Raises JobError when ``spec.where`` is no filter.
    """

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec
        self.skipped: list[str] = []
        self._paths = (spec.path,) if isinstance(spec.path, str) else spec.path
        self._where = Where(spec.where) if spec.where is not None else None
        self._jsonl = jsonl.JsonlReader(spec.storage_options)
        self._datasets: dict[str, Dataset] = {}
        self._names: dict[str, list[str]] = {}  # columns of the Parquet files scanned so far, by key
        self._checked: dict[InputFile, list[Split]] = {}  # of the OpenAI batch files checked so far

    def files(self) -> list[InputFile]:
        """The input's files in their order. Raises JobError for a path that leads to none."""
        kind = self.spec.format
        if kind == "datasets":
            loaded = hub.load(self._paths, self.spec.dataset_options)
            self._datasets = {file.key: dataset for file, dataset in loaded.items()}
            return list(loaded)
        wanted = "jsonl" if kind == BATCH_FORMAT else kind
        files, self.skipped = find_files(self._paths, wanted, self.spec.storage_options)
        return files

    def splits(self, files: Sequence[InputFile], first_number: int = 0) -> list[Split]:
        """All of ``files`` in splits of at most ``spec.split_rows`` rows, numbered from ``first_number`` on.

        Reads JSONL files once, of Parquet files the footer and first pages. A file that breaks off ends in a split
        whose ``error`` says why. Raises JobError naming every file that cannot be read at all, and every Parquet
        file or dataset that lacks a column of ``spec.columns`` or ``spec.where``.
        """
        splits = itertools.chain.from_iterable(_each_file(self._scan, files))
        return [replace(split, number=number) for number, split in enumerate(splits, first_number)]

    def check_batch(self, files: Sequence[InputFile]) -> list[openai_batch.BatchCheck]:
        """Reads OpenAI batch files once, for :meth:`splits` too. Raises JobError that names their malformed lines."""
        checks = {file: openai_batch.BatchCheck() for file in files}

        def scan(file: InputFile) -> None:
            options, check = self.spec.storage_options, checks[file].add
            self._checked[file] = jsonl.scan_each(file, options, self.spec.split_rows, check)

        _each_file(scan, files)
        if faults := openai_batch.batch_faults(checks):
            raise JobError("\n".join(f"input.path: {fault}" for fault in faults))
        return list(checks.values())

    def cut(self, split: Split, n_rows: int) -> tuple[Split, Split]:
        """``split`` as its first ``n_rows`` rows and the rest, which may be none. Numbers are left as they are."""
        head = replace(split, n_rows=n_rows, error=None if n_rows < split.n_rows else split.error)
        offset = split.offset
        if self._format(split.file) == "jsonl":
            offset = jsonl.offset_of(split, n_rows, self.spec.storage_options)
        return head, replace(split, first_row=split.first_row + n_rows, n_rows=split.n_rows - n_rows, offset=offset)

    def rows(self, split: Split) -> Iterator[Row]:
        """The split's rows that ``spec.where`` keeps; one that cannot be read or compared comes with its error."""
        return itertools.chain.from_iterable(self.row_groups(split))

    def row_groups(self, split: Split) -> Iterator[list[Row]]:
        """:meth:`rows` in the groups that they are read in: at most about a thousand rows and 16 MB."""
        for batch in self.batches(split):
            records = to_records(batch.table) if batch.table is not None else batch.records or []
            yield list(map(Row, batch.rows, records, batch.errors))

    def batches(self, split: Split) -> Iterator[Batch]:
        """The same rows as :meth:`rows`, in columns where the format has them.

        Raises JobError when the file is not what it was when the split was made.
        """
        hive = hive_columns(split.file.key)
        for batch in self._read(split):
            if self._where is not None:
                batch = _filter(batch, self._where, hive)
            batch = _add_columns(batch, hive)
            if self.spec.columns is not None:
                batch = _project(batch, self.spec.columns)
            if batch.rows:
                yield batch

    @property
    def where_columns(self) -> tuple[str, ...]:
        """The columns that ``spec.where`` looks at."""
        return self._where.columns if self._where is not None else ()

    def is_typed(self, files: Iterable[InputFile]) -> bool:
        """Whether every one of ``files`` has a schema, so that the columns known are all there can be."""
        return all(self._format(file) != "jsonl" for file in files)

    def check_columns(self, files: Sequence[InputFile]) -> None:
        """Raises JobError naming every Parquet file and dataset that lacks a column, as :meth:`splits` does, and every
        file whose directories hold what ``spec.where`` cannot compare.
        """
        _each_file(self._require_columns, [file for file in files if self.is_typed([file])])
        if self._where is not None:
            _each_file(self._check_directories, files)

    def schema_names(self, files: Sequence[InputFile]) -> list[str] | None:
        """The columns known before everything is read, in order, before projection; None when no row tells any.

        Those of every Parquet file and dataset, and of the first 100 lines of every JSONL file. Raises JobError naming
        every file of which nothing can be read.
        """
        names = dict.fromkeys(itertools.chain.from_iterable(_each_file(self._columns, files)))
        return list(names) or None

    def _format(self, file: InputFile) -> str:
        """How the file is read: "jsonl", "parquet" or "datasets"."""
        if self.spec.format == BATCH_FORMAT:
            return "jsonl"
        return self.spec.format if self.spec.format != "auto" else file_format(file.path) or "jsonl"

    def _scan(self, file: InputFile) -> list[Split]:
        if file in self._checked:
            return self._checked[file]
        if self._format(file) == "jsonl":
            return jsonl.scan(file, self.spec.storage_options, self.spec.split_rows)
        splits = self._scan_schema(file)
        self._require_columns(file)
        return splits

    def _scan_schema(self, file: InputFile) -> list[Split]:
        if self._format(file) == "datasets":
            dataset = self._dataset(file)
            splits, names = hub.scan(file, dataset, self.spec.split_rows), dataset.column_names
        else:
            splits, names = parquet.scan(file, self.spec.storage_options, self.spec.split_rows, self._wanted_columns())
        self._names[file.key] = names
        return splits

    def _require_columns(self, file: InputFile) -> None:
        names = self._columns(file)
        missing = [name for name in self._required_columns() if name not in names]
        if missing:
            raise UnreadableFileError(f"has no column {missing[0]!r}; it has {', '.join(names)}")

    def _check_directories(self, file: InputFile) -> None:
        assert self._where is not None
        try:
            directories = hive_columns(file.key)
            own = [] if self._format(file) == "jsonl" else self._names[file.key]
            self._where.check_directories({name: text for name, text in directories.items() if name not in own})
        except ValueError as error:
            raise UnreadableFileError(str(error)) from None

    def _read(self, split: Split) -> Iterator[Batch]:
        if self._format(split.file) == "datasets":
            return hub.read(split, self._dataset(split.file), self._wanted_columns())
        if current_version(split.file, self.spec.storage_options) != split.file:
            raise StoppedError(f"{split.file.path} changed while the job ran; submit again to run it as it is now")
        if self._format(split.file) == "jsonl":
            return self._jsonl.read(split)
        return parquet.read(split, self.spec.storage_options, self._wanted_columns())

    def _required_columns(self) -> list[str]:
        return list(dict.fromkeys([*(self.spec.columns or ()), *self.where_columns]))

    def _wanted_columns(self) -> list[str] | None:
        """What has to be read; None for everything."""
        return None if self.spec.columns is None else self._required_columns()

    def _columns(self, file: InputFile) -> list[str]:
        if self._format(file) == "jsonl":
            head = jsonl.JsonlReader(self.spec.storage_options).read(Split(file, 0, 1, SAMPLED_ROWS))
            records = itertools.chain.from_iterable(batch.records or [] for batch in head)
            names = list(itertools.chain.from_iterable(record for record in records if record is not None))
        else:
            if file.key not in self._names:
                self._scan_schema(file)
            names = self._names[file.key]
        return [*names, *hive_columns(file.key)]

    def _dataset(self, file: InputFile) -> Dataset:
        if file.key not in self._datasets:
            self.files()
        if file.key not in self._datasets:
            raise JobError(f"input.path: dataset {file.key} is gone")
        return self._datasets[file.key]


def to_records(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of an Arrow table as dicts; a date or time beyond Python's calendar becomes text."""
    if not table.column_names:
        return [{} for _ in range(len(table))]
    names, columns = table.column_names, [python_values(column) for column in table.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def python_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """The values of an Arrow column; a date or time beyond Python's calendar becomes text."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_cell(scalar) for scalar in column]


def _cell(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        pass
    try:
        return scalar.cast(pa.string()).as_py()
    except pa.ArrowException:  # within a list or struct
        return f"<{scalar.type} out of range>"


def _each_file(read: Callable[[InputFile], T], files: Iterable[InputFile]) -> list[T]:
    """``read`` of every file; raises one JobError that names every file that could not be read."""
    faults: list[str] = []

    def attempt(file: InputFile) -> list[T]:
        try:
            return [read(file)]
        except StorageError as error:
            faults.append(f"input.path: {error}")
            return []
        except (UnreadableFileError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            faults.append(f"input.path: {file.path}: {reason}")
            return []

    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        results = list(itertools.chain.from_iterable(pool.map(attempt, files)))
    if faults:
        raise JobError("\n".join(sorted(faults)))
    return results


def _add_columns(batch: Batch, columns: dict[str, str | None]) -> Batch:
    """With constant columns at the end, where a row has none of that name."""
    if batch.table is None:
        records = [
            r if r is None else r | {k: v for k, v in columns.items() if k not in r} for r in batch.records or []
        ]
        return replace(batch, records=records)
    table = batch.table
    for name, value in columns.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(table)))
    return replace(batch, table=table)


def _filter(batch: Batch, where: Where, hive: dict[str, str | None]) -> Batch:
    """Only the rows that ``where`` keeps, or cannot judge: those stay with an error.

    ``hive`` says what directories tell of a row that does not have the column itself.
    """
    records: Sequence[dict[str, Any] | None] = batch.records or []
    if batch.table is not None:
        records = to_records(batch.table.select([n for n in where.columns if n in batch.table.column_names]))
    errors = list(batch.errors)
    kept = []
    for index, record in enumerate(records):
        try:
            if record is None or where.holds(record, hive):
                kept.append(index)
        except ValueError as error:
            errors[index] = row_error("bad_filter", str(error))
            kept.append(index)
    return Batch(
        [batch.rows[i] for i in kept],
        [errors[i] for i in kept],
        None if batch.table is None else batch.table.take(pa.array(kept, pa.int64())),
        None if batch.records is None else [batch.records[i] for i in kept],
    )


def _project(batch: Batch, columns: Sequence[str]) -> Batch:
    """With those of ``columns`` that there are."""
    if batch.table is None:
        records = [r if r is None else {name: r[name] for name in columns if name in r} for r in batch.records or []]
        return replace(batch, records=records)
    return replace(batch, table=batch.table.select([name for name in columns if name in batch.table.column_names]))
