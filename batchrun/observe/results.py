"""Results for people: a table on the terminal, JSON lines, or one file to hand on."""

from __future__ import annotations

import csv
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.data.json_text import dump_json
from batchrun.data.parts import write_parquet
from batchrun.data.reader import Record, Result, Selection
from batchrun.data.store import Store
from batchrun.data.view import OutputView
from batchrun.errors import JobError, without_credentials
from batchrun.job import output_of
from batchrun.streams import is_unread
from batchrun.text import display_width, shorten, table

SHOWN_ROWS = 20  # of a table, where no limit is given

_TABLE_COLUMNS = ("custom_id", "generated_text", "finish_reason", "error")
_TABLE_ROWS = 100  # of which one table is made: its columns are as wide as these need
_LEAST_WIDTH = 8  # of a column that is too wide for the terminal


def show_results(
    target: str, overrides: Sequence[str], selection: Selection, *, to: str | None = None, as_json: bool = False
) -> None:
    """Prints rows of the result of a job file's output, or of an output directory or URL, or writes them ``to`` a file.

    A table shows the first SHOWN_ROWS, unless ``selection`` has a limit. Raises JobError where there is no output, no
    such column, or a damaged part.
    """
    place, options = output_of(target, overrides)
    view = OutputView.at(place, options)
    if view is None:
        raise JobError(f"{place}: no output of batchrun is there; nothing was submitted yet")
    result = Result(view)
    if selection.columns is not None:
        result.check_columns(selection.columns)
    if not result.complete:
        print(result, file=sys.stderr)
    if to is not None:
        rows = export(result, selection, to, storage_options_for(to, place, options))
        print(f"{rows:,} rows written to {without_credentials(to)}", file=sys.stderr)
    elif as_json:
        write_lines(result, selection, sys.stdout)
    else:
        limit = selection.limit or SHOWN_ROWS
        shown = write_table(result, replace(selection, limit=limit), sys.stdout)
        if selection.limit is None and shown == limit < result.rows:
            print(f"the first {shown} rows; --limit N shows more, --json and --to FILE give all", file=sys.stderr)


def write_lines(result: Result, selection: Selection, file: IO[str]) -> int:
    """One JSON record for each row; stops when nobody reads them any more. Returns their number."""
    count = 0
    for record in result.records(selection):
        file.write(dump_json(record) + "\n")
        count += 1
        if is_unread(file):
            break
    return count


def write_table(result: Result, selection: Selection, file: IO[str]) -> int:
    """A table as wide as the terminal, texts cut to fit. Returns its number of rows."""
    if selection.columns is None:
        selection = replace(selection, columns=tuple(result.names[column] for column in _TABLE_COLUMNS))
    records, count = result.records(selection), 0
    while group := list(itertools.islice(records, _TABLE_ROWS)):
        count += len(group)
        file.write(_table(group) + "\n")
        if is_unread(file):
            break
    return count


def _table(records: Sequence[Record]) -> str:
    """The records as a table with a heading; a column that is null in all of them is left out."""
    names = [name for name in records[0] if any(record[name] is not None for record in records)]
    rows = [names, *([_cell(record[name]) for name in names] for record in records)]
    widths = _fitted([max(display_width(row[i]) for row in rows) for i in range(len(names))])
    return table(([shorten(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows), indent="")


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else dump_json(value)


def _fitted(widths: list[int]) -> list[int]:
    """Column widths that the terminal has room for: the widest ones give way."""
    room = shutil.get_terminal_size().columns - 2 * (len(widths) - 1)
    widths = list(widths)
    while sum(widths) > room and max(widths, default=0) > _LEAST_WIDTH:
        widest = max(widths)
        second = max([_LEAST_WIDTH, *(width for width in widths if width < widest)])
        few = [place for place, width in enumerate(widths) if width == widest]
        cut = min(widest - second, -(-(sum(widths) - room) // len(few)))
        for place in few:
            widths[place] -= cut
    return widths


def export(result: Result, selection: Selection, target: str, storage_options: dict[str, Any]) -> int:
    """Writes one ``.parquet``, ``.jsonl`` or ``.csv`` file, a path or an fsspec URL. Returns its number of rows.

    The file appears when it is whole, and replaces one that is there. Raises JobError for another kind of file, and for
    a place within the output.
    """
    write = _WRITERS.get(Path(target).suffix.lower())
    if write is None:
        raise JobError(f"--to: {target}: its name has to end in {', '.join(_WRITERS)}")
    parent, _, name = target.rpartition("/")
    store = _writable(target, parent, storage_options)
    if _is_within(store, result.store):
        raise JobError(f"--to: {target} is within the output itself; choose another place")
    try:
        with tempfile.TemporaryDirectory(prefix=".batchrun-", dir=store.root if store.local else None) as directory:
            built = Path(directory) / "result"
            rows = write(result, selection, built)
            store.put_file(built, name)
            return rows
    except OSError as error:
        raise JobError(f"--to: {without_credentials(target)}: {error}") from None


def _writable(target: str, parent: str, storage_options: dict[str, Any]) -> Store:
    """The place that ``target`` is written to. Raises JobError where it cannot be."""
    try:
        store = Store(parent or ("/" if target.startswith("/") else "."), storage_options)
        if store.local:
            Path(store.root).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, ImportError) as error:
        raise JobError(f"--to: {without_credentials(target)}: {error}") from None
    return store


def storage_options_for(target: str, output: str, options: dict[str, Any]) -> dict[str, Any]:
    """The output's own ``options`` where ``target`` lies in storage of the same kind, else none."""
    protocol = fsspec.core.split_protocol(target)[0]
    return options if protocol == fsspec.core.split_protocol(output)[0] else {}


def _is_within(store: Store, output: Store) -> bool:
    if store.local != output.local or (not store.local and store.fs.protocol != output.fs.protocol):
        return False
    inner, outer = ((str(Path(s.root).resolve()) if s.local else s.root).rstrip("/") for s in (store, output))
    return f"{inner}/".startswith(f"{outer}/")


def _write_parquet(result: Result, selection: Selection, path: Path) -> int:
    write_parquet(path, _Tables(result, selection), result.schema(selection))
    return int(pq.read_metadata(path).num_rows)


def _write_lines(result: Result, selection: Selection, path: Path) -> int:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        return write_lines(result, selection, file)


def _write_csv(result: Result, selection: Selection, path: Path) -> int:
    """RFC 4180: null is empty, what is no text is JSON."""
    names = result.schema(selection).names
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for record in result.records(selection):
            writer.writerow([_cell(record.get(name)) for name in names])
            count += 1
    return count


_WRITERS: dict[str, Callable[[Result, Selection, Path], int]] = {
    ".parquet": _write_parquet,
    ".jsonl": _write_lines,
    ".csv": _write_csv,
}


@dataclass(frozen=True)
class _Tables(Iterable[pa.Table]):
    """The tables of a result, as often as they are asked for."""

    result: Result
    selection: Selection

    def __iter__(self) -> Iterator[pa.Table]:
        return self.result.tables(self.selection)
