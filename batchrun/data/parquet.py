"""Parquet: splits are runs of row groups, or ranges of rows within a large one. Row numbers count from 1 in the file.

Reading holds a few pages of each column and one batch, never a row group: remote column chunks arrive through small
buffers, and a batch has as many rows as make about 16 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from batchrun.data.files import UnreadableFileError, filesystem, open_file
from batchrun.data.rows import Batch, InputFile, Split
from batchrun.errors import row_error

_BUFFER_BYTES = 1 << 20
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 1024
_ERRORS = (pa.ArrowException, OSError)


def scan(
    file: InputFile, options: dict[str, Any], split_rows: int, columns: Sequence[str] | None
) -> tuple[list[Split], list[str]]:
    """The file's splits, numbered from 0, and its column names.

    The first pages of ``columns`` (None: all) are read too, so that a codec or an encryption that cannot be read is
    seen here. Raises UnreadableFileError.
    """
    try:
        with _open(file, options) as parquet:
            names = parquet.schema_arrow.names
            repeated = {name for name in names if names.count(name) > 1}
            if repeated:
                raise UnreadableFileError(f"has more than one column {sorted(repeated)[0]!r}")
            groups = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            wanted = names if columns is None else [name for name in columns if name in names]
            if sum(groups):
                next(parquet.iter_batches(1, columns=wanted, use_threads=False), None)
    except _ERRORS as error:
        raise UnreadableFileError(_reason(error)) from None
    return _splits(file, groups, split_rows), names


def read(split: Split, options: dict[str, Any], columns: Sequence[str] | None) -> Iterator[Batch]:
    """The split's rows with ``columns`` (None: all) that the file has; rows that cannot be decoded become errors."""
    row, end = split.first_row, split.first_row + split.n_rows
    try:
        with _open(split.file, options) as parquet:
            for table in _tables(parquet, split, columns):
                table = table.slice(0, end - row)
                yield from _batches(split.file, row, table)
                row += len(table)
                if row >= end:
                    return
    except _ERRORS as error:
        if not _is_damage(error):
            raise
        message = row_error("unreadable_file", f"{split.file.key} from row {row} on: {_reason(error)}")
        for start in range(row, end, _BATCH_ROWS):
            rows = list(range(start, min(start + _BATCH_ROWS, end)))
            yield Batch(rows, [message] * len(rows), records=[None] * len(rows))


def _open(file: InputFile, options: dict[str, Any]) -> pq.ParquetFile:
    fs, path = filesystem(file.path, options)
    source = path if isinstance(fs, LocalFileSystem) else open_file(file, options)
    return pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)


def _splits(file: InputFile, groups: list[int], split_rows: int) -> list[Split]:
    splits: list[Split] = []
    first, start, count = 0, 0, 0  # first row group, rows before it, rows gathered from it on
    for index, n_rows in enumerate([*groups, 0]):
        if count and (count + n_rows > split_rows or index == len(groups)):
            for offset in range(0, count, split_rows):
                rows = min(split_rows, count - offset)
                splits.append(Split(file, len(splits), start + offset + 1, rows, first))
            first, start, count = index, start + count, 0
        count += n_rows
    return splits


def _tables(parquet: pq.ParquetFile, split: Split, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """Tables from the split's first row on, one row group after the other."""
    metadata = parquet.metadata
    start = 1 + sum(metadata.row_group(i).num_rows for i in range(split.offset))
    skip = split.first_row - start
    names = parquet.schema_arrow.names
    wanted = names if columns is None else [name for name in columns if name in names]
    for index in range(split.offset, metadata.num_row_groups):
        group = metadata.row_group(index)
        size = max(1, group.total_byte_size // max(1, group.num_rows))
        batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // size))
        for batch in parquet.iter_batches(batch_rows, row_groups=[index], columns=wanted, use_threads=False):
            table = pa.Table.from_batches([batch]).select(wanted)
            if skip < len(table):
                yield table.slice(skip)
            skip = max(0, skip - len(table))


def _batches(file: InputFile, row: int, table: pa.Table) -> Iterator[Batch]:
    """``table`` as one batch, or row by row where some text in it is not UTF-8: Arrow does not look when reading."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        if len(table) > 1:
            for index in range(len(table)):
                yield from _batches(file, row + index, table.slice(index, 1))
            return
        message = row_error("unreadable_row", f"{file.key} row {row}: {_reason(error)}")
        yield Batch([row], [message], records=[None])
    else:
        yield Batch(list(range(row, row + len(table))), [None] * len(table), table=table)


def _is_damage(error: Exception) -> bool:
    """Whether the file's content is at fault: Arrow raises plain OSErrors for that, storage its subclasses or errno."""
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
