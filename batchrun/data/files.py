"""Which files an input consists of: files, globs, directories and any fsspec URL, expanded in a fixed order.

A path that exists is taken literally, whatever characters it holds; else it is a glob. Directories are read to any
depth, without names that begin with ``.`` or ``_`` and without files of unknown kinds. Directories named
``column=value`` below the input's root give their files a column (Hive's layout).
"""

from __future__ import annotations

import glob
import io
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from batchrun.data.patience import Patience, PatientFile, StorageError, identity_of
from batchrun.data.rows import InputFile
from batchrun.errors import JobError, without_credentials

T = TypeVar("T")
Format = Literal["jsonl", "parquet"]

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_KINDS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


class UnreadableFileError(Exception):
    """A file of which no row can be read; the text is the reason."""


def filesystem(path: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path within it. Listings are never cached."""
    if "://" not in path and "::" not in path:
        return LocalFileSystem(), str(Path(path).absolute())
    try:
        fs, inner = fsspec.core.url_to_fs(path, use_listings_cache=False, **options)
    except Exception as error:  # unknown protocol or option, its package is not installed, ...
        raise JobError(f"input.path: {Patience(path, options).shown(f'{path}: {error}')}") from None
    return fs, inner


def open_file(file: InputFile, options: dict[str, Any]) -> io.RawIOBase:
    """The file's bytes, unbuffered: each read is one of the disk, or one request.

    Reading them raises StorageError where a remote storage fails for good, and ChangedFileError where the
    file is not the one that ``file`` describes.
    """
    fs, path = filesystem(file.path, options)
    if isinstance(fs, LocalFileSystem):
        return Path(path).open("rb", buffering=0)
    patience = Patience(file.path, options)
    return PatientFile(fs, path, patience, shown=without_credentials(file.path), identity=(file.size, file.version))


def file_format(path: str) -> Format | None:
    """The format that a file's name tells, or None."""
    name = without_query(path).lower()
    plain = next((name.removesuffix(suffix) for suffix in COMPRESSIONS if name.endswith(suffix)), name)
    kind = _KINDS.get(posixpath.splitext(plain)[1])
    return None if kind == "parquet" and plain != name else kind


def without_query(path: str) -> str:
    """A URL without what follows ``?``, which signs it and changes; in other paths ``?`` is part of a name."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def hive_columns(key: str) -> dict[str, str | None]:
    """Columns that the directories in a file's key name."""
    columns: dict[str, str | None] = {}
    for part in key.split("/")[:-1]:
        name, equals, value = part.partition("=")
        if equals and name:
            columns[unquote(name)] = None if value == _HIVE_NULL else unquote(value)
    return columns


def find_files(
    paths: Sequence[str], wanted: Literal["auto", "jsonl", "parquet"], options: dict[str, Any]
) -> tuple[list[InputFile], list[str]]:
    """The input's files in the order of ``paths`` and then of their keys, and the paths that were passed over.

    ``wanted`` other than "auto" also takes files of unknown kinds that a path or glob names itself. Keys are unique:
    of two files with equal keys under different ``paths``, the later gets ``#2`` at its end. A file that two paths
    name is taken once. Raises JobError for a path that leads to no file, and for links that lead nowhere.
    """
    files: dict[str, InputFile] = {}
    skipped: list[str] = []
    faults: list[str] = []
    keys: set[str] = set()
    for path in paths:
        before = len(skipped)
        found = list(_expand(path, wanted, options, skipped, faults))
        if faults:
            continue
        if not found:
            passed = f"; passed over {', '.join(skipped[before:][:5])}" if len(skipped) > before else ""
            raise JobError(f"input.path: no input file at {path}{passed}")
        for file in found:
            if file.path not in files:
                files[file.path] = replace(file, key=_unique(file.key, keys))
    if faults:
        raise JobError("\n".join(faults))
    return list(files.values()), skipped


def current_version(file: InputFile, options: dict[str, Any]) -> InputFile:
    """``file`` with the size and version that it has now. Raises FileNotFoundError when it is gone, or StorageError."""
    fs, path = filesystem(file.path, options)
    info = Patience(file.path, options).run(f"look at {file.path}", lambda: fs.info(path), passing=FileNotFoundError)
    return _input_file(fs, file.key, file.path, info)


def _expand(
    path: str, wanted: str, options: dict[str, Any], skipped: list[str], faults: list[str]
) -> Iterator[InputFile]:
    fs, inner = filesystem(path, options)

    def ask(question: Callable[[], T]) -> T:
        try:
            return Patience(path, options).run(f"look at {path}", question)
        except StorageError as error:
            raise JobError(f"input.path: {error}") from None

    own = ask(lambda: _info(fs, inner))
    if own["type"] == "file":
        if wanted == "auto" and file_format(inner) is None:
            raise JobError(f"input.path: {path}: its name tells no format; set input.format")
        yield _input_file(fs, posixpath.basename(without_query(inner)), _url(fs, inner, path), own)
        return
    matches = {inner: own} if own["type"] == "directory" else ask(lambda: _glob(fs, inner))
    root = inner if own["type"] == "directory" else _fixed_part(inner)
    infos: dict[str, Any] = {}
    for match, info in matches.items():
        infos |= ask(partial(fs.find, match, detail=True)) if info["type"] == "directory" else {match: info}
    for name in sorted(infos):
        key, url = name.removeprefix(root.rstrip("/") + "/"), _url(fs, name, path)
        if not _taken(key, wanted, named=matches.get(name) is not None):
            skipped.append(url)
            continue
        try:
            file = _input_file(fs, key, url, infos[name])
        except OSError as error:
            link = "is a link that leads nowhere: " if infos[name].get("islink") else ""
            faults.append(f"input.path: {url}: {link}{error.strerror}")
        else:
            yield file


def _info(fs: Any, path: str) -> dict[str, Any]:
    """What fsspec says of a path; of one that does not exist, that it has no type."""
    try:
        return dict(fs.info(path))
    except FileNotFoundError:
        return {"type": None}


def _glob(fs: Any, pattern: str) -> dict[str, Any]:
    return dict(fs.glob(pattern, detail=True)) if glob.has_magic(pattern) else {}


def _fixed_part(pattern: str) -> str:
    """The directory above the first part of a glob that has a special character."""
    parts = pattern.split("/")
    magic = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return "/".join(parts[:magic])


def _taken(key: str, wanted: str, *, named: bool) -> bool:
    """Whether a file below the root is input; ``named``: a glob matched it, not a directory above it."""
    if any(part.startswith((".", "_")) for part in key.split("/")):
        return False
    kind = file_format(key)
    if kind is None:
        return named and wanted != "auto"
    return wanted in ("auto", kind)


def _input_file(fs: Any, key: str, path: str, info: dict[str, Any]) -> InputFile:
    """The version is what changes with the content: an etag, else a time of modification."""
    if isinstance(fs, LocalFileSystem):
        stat = Path(path).stat()
        return InputFile(key, path, stat.st_size, str(stat.st_mtime_ns))
    return InputFile(key, path, *identity_of(info))


def _url(fs: Any, inner: str, given: str) -> str:
    """What opens ``inner`` again, ``given`` being the path of the input that led to it."""
    if isinstance(fs, LocalFileSystem):
        return inner
    head, chained, rest = given.partition("::")
    if not chained:
        return str(fs.unstrip_protocol(inner))
    if "://" in head:  # zip://inner::archive
        return f"{head.partition('://')[0]}://{inner}::{rest}"
    return f"{head}::{rest.partition('://')[0]}://{inner}"  # simplecache::https://inner


def _unique(key: str, taken: set[str]) -> str:
    unique, count = key, 1
    while unique in taken:
        count += 1
        unique = f"{key}#{count}"
    taken.add(unique)
    return unique
