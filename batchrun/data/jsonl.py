"""JSON Lines: one object per line, plain or compressed. Row numbers are physical lines, from 1.

Only ``\\n`` ends a line; a ``\\r`` before it, a byte order mark at the start and blank lines are ignored. A scan finds
where splits begin; reading starts at a byte offset, or, in a compressed file, at its beginning again unless the
splits are read in order.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from batchrun.data.compression import DECOMPRESSORS, DamagedError, decompress
from batchrun.data.files import UnreadableFileError, filesystem, open_file, without_query
from batchrun.data.json_text import parse_json
from batchrun.data.rows import Batch, InputFile, Split
from batchrun.errors import row_error

_CHUNK_BYTES = 1 << 20
_BUFFER_BYTES = 8 << 20  # of a remote file, by one request
_BATCH_ROWS = 256
_BATCH_BYTES = 4 << 20
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


def scan(file: InputFile, options: dict[str, Any], split_rows: int) -> list[Split]:
    """The file's splits, numbered from 0. Raises UnreadableFileError when not one row can be read."""
    boundaries, lines, error = _scan_lines(file, options, split_rows)
    if error and not lines:
        raise UnreadableFileError(error)
    return _splits(file, boundaries, lines, split_rows, error)


def scan_each(
    file: InputFile, options: dict[str, Any], split_rows: int, check: Callable[[int, bytes], None]
) -> list[Split]:
    """As :func:`scan`, calling ``check`` with the number and the bytes of every line that is not blank.

    Raises UnreadableFileError when the file breaks off, however much of it can be read.
    """
    boundaries: list[int] = []
    number = position = 0
    try:
        for number, line in enumerate(_split_lines(_chunks(file, options, 0)), 1):
            if (number - 1) % split_rows == 0:
                boundaries.append(position)
            position += len(line) + 1
            if line.strip(_BLANK):
                check(number, line)
    except DamagedError as damage:
        raise UnreadableFileError(f"breaks off after line {number}: {damage}") from None
    return _splits(file, boundaries, number, split_rows, None)


def _splits(file: InputFile, boundaries: list[int], lines: int, split_rows: int, error: str | None) -> list[Split]:
    splits = []
    for number, offset in enumerate(boundaries):
        first = number * split_rows + 1
        n_rows = min(split_rows, lines - first + 1)
        last = first + n_rows > lines
        splits.append(Split(file, number, first, n_rows, offset, error if last else None))
    return splits


class JsonlReader:
    """Reads splits, going on where it stopped when those of a compressed file come in order. For one thread."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._ahead: tuple[str, int, Iterator[bytes]] | None = None  # path, line number, lines from there on

    def read(self, split: Split) -> Iterator[Batch]:
        """The split's rows in batches of a few megabytes; lines that hold no object become errors."""
        rows: list[int] = []
        size = 0
        lines: list[bytes] = []
        for number, line in enumerate(self._lines(split), split.first_row):
            if line.strip(_BLANK):
                rows.append(number)
                lines.append(line)
                size += len(line)
            if size >= _BATCH_BYTES or len(rows) == _BATCH_ROWS:
                yield _parse(split.file, rows, lines)
                rows, lines, size = [], [], 0
        if rows:
            yield _parse(split.file, rows, lines)

    def _lines(self, split: Split) -> Iterator[bytes]:
        if _suffix(split.file.path) is None:
            yield from itertools.islice(_read_lines(split.file, self._options, split.offset), split.n_rows)
            return
        position = (split.file.path, split.first_row)
        if self._ahead is not None and self._ahead[:2] == position:
            lines = self._ahead[2]
        else:
            lines = itertools.islice(_read_lines(split.file, self._options, 0), split.first_row - 1, None)
        self._ahead = None
        yield from itertools.islice(lines, split.n_rows)
        self._ahead = (split.file.path, split.first_row + split.n_rows, lines)


def offset_of(split: Split, n_rows: int, options: dict[str, Any]) -> int:
    """``Split.offset`` of the row that comes ``n_rows`` after the split's first."""
    if _suffix(split.file.path) is not None:
        return split.offset
    lines = itertools.islice(_read_lines(split.file, options, split.offset), n_rows)
    return split.offset + sum(len(line) + 1 for line in lines)


def _suffix(path: str) -> str | None:
    name = without_query(path).lower()
    return next((suffix for suffix in DECOMPRESSORS if name.endswith(suffix)), None)


def _chunks(file: InputFile, options: dict[str, Any], offset: int) -> Iterator[bytes]:
    """Pieces of the decoded file from a byte offset on (0 in a compressed file)."""
    _, path = filesystem(file.path, options)
    suffix = _suffix(path)
    with io.BufferedReader(open_file(file, options), _BUFFER_BYTES) as stream:
        if suffix is not None:
            yield from decompress(stream, suffix)
            return
        stream.seek(offset)
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def _scan_lines(file: InputFile, options: dict[str, Any], split_rows: int) -> tuple[list[int], int, str | None]:
    """Byte offsets of every ``split_rows``-th line, the number of lines, and why the file cannot be read further."""
    boundaries: list[int] = []
    lines = position = 0
    ends_line = True
    error = None
    try:
        for chunk in _chunks(file, options, 0):
            if not boundaries:
                boundaries.append(0)
            newlines = chunk.count(b"\n")
            wanted = len(boundaries) * split_rows - lines  # newlines until the next split begins
            if newlines >= wanted:
                ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))[wanted - 1 :: split_rows]
                boundaries.extend(int(end) + position + 1 for end in ends)
            lines += newlines
            position += len(chunk)
            ends_line = chunk.endswith(b"\n")
    except DamagedError as damage:
        error = str(damage)
    lines += not ends_line
    return [b for i, b in enumerate(boundaries) if i * split_rows < lines], lines, error


def _read_lines(file: InputFile, options: dict[str, Any], offset: int) -> Iterator[bytes]:
    """Lines from a byte offset on, without their newline; ends where a damaged file does."""
    return _split_lines(_until_damage(_chunks(file, options, offset)))


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    head: list[bytes] = []  # pieces of the line that has begun
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        head.append(first)
        if rest:
            yield b"".join(head)
            yield from rest[:-1]
            head = [rest[-1]]
    if tail := b"".join(head):
        yield tail


def _until_damage(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """``chunks`` up to the damage, which the scan has put into the split's ``error``.

    Raises UnreadableFileError, as the scan does, where nothing comes before it.
    """
    begun = False
    try:
        for chunk in chunks:
            begun = True
            yield chunk
    except DamagedError as damage:
        if not begun:
            raise UnreadableFileError(str(damage)) from None


def _parse(file: InputFile, rows: list[int], lines: list[bytes]) -> Batch:
    records: list[dict[str, Any] | None] = []
    errors: list[str | None] = []
    for number, line in zip(rows, lines, strict=True):
        try:
            records.append(parse_line(number, line))
            errors.append(None)
        except ValueError as error:
            records.append(None)
            errors.append(row_error("unreadable_row", f"{file.key} line {number}: {error}"))
    return Batch(rows, errors, records=records)


def parse_line(number: int, line: bytes) -> dict[str, Any]:
    """The object that line ``number`` of a file holds. Raises ValueError saying why it holds none."""
    try:
        value = parse_json((line.removeprefix(_BOM) if number == 1 else line).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1} of the line: {error.reason}") from None
    if not isinstance(value, dict):
        raise ValueError(f"is {_KINDS.get(type(value), 'a number')}, not a JSON object")
    return value


_KINDS = {list: "an array", str: "a text", bool: "a boolean", type(None): "null"}
