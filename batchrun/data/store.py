"""Durable files under one directory or object-store prefix: the few operations that the commit protocol stands on.

Three guarantees, whatever lies underneath: a file is either absent or whole; :meth:`Store.create` has one winner
among any number of writers; and an operation whose reply was lost can be repeated. Local disk and NFS give them by
fsync, rename and hard links; object stores by complete puts and ``If-None-Match``.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from batchrun.errors import JobError, StoppedError

log = logging.getLogger(__name__)

T = TypeVar("T")

TEMPORARY = "_batchrun/tmp"  # files on their way into place, which a killed writer may leave behind

_HOPELESS_ERRNO = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
}
_HOPELESS_TYPES = (FileNotFoundError, PermissionError, ValueError, TypeError, NotImplementedError, ImportError)
_HOPELESS_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_SECRET_OPTION = re.compile(r"secret|token|key|password|credential|sas|connection_string", re.IGNORECASE)


class StorageError(StoppedError):
    """The storage failed for good (full, forbidden, unreachable); what was committed stays, and can be resumed."""


class _Backend(Protocol):
    """One kind of storage. Names are relative to the root; every method may raise whatever the storage raises."""

    def read(self, name: str) -> bytes: ...
    def size(self, name: str) -> int | None: ...
    def names(self, directory: str) -> list[tuple[str, bool]]: ...  # (base name, is a directory)
    def sizes(self, directory: str) -> dict[str, int]: ...  # base name of each file -> bytes
    def write(self, name: str, data: bytes) -> None: ...
    def write_file(self, source: Path, name: str) -> None: ...
    def create(self, name: str, data: bytes) -> None: ...
    def move(self, source: str, target: str) -> None: ...
    def delete(self, name: str) -> None: ...


class Store:
    """The files under ``url``: a path, a ``file://`` URL or any fsspec URL whose file system can create exclusively.

    Names are relative and use ``/``. Failures that may pass are tried again for ``patience`` seconds; then, and at
    once for those that will not pass, :class:`StorageError` is raised, with no credential in its text.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None, *, patience: float = 60.0) -> None:
        options = storage_options or {}
        self.url = re.sub(r"//[^/@]*@", "//", url).rstrip("/") or "/"
        self.patience = patience
        self.writer = uuid.uuid4().hex  # names this object's temporary files, and whoever writes through it
        self._secrets = [*_secrets_of(options), *re.findall(r"//([^/@]+)@", url)]
        if "://" in url or "::" in url:
            # The listing cache would hide what other processes write.
            self.fs, self.root = fsspec.core.url_to_fs(url, **{**options, "use_listings_cache": False})
        else:
            self.fs, self.root = LocalFileSystem(), str(Path(url).absolute())
        self.local = isinstance(self.fs, LocalFileSystem)
        self._backend: _Backend = _Disk(Path(self.root), self.writer) if self.local else _Objects(self.fs, self.root)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def path(self, name: str) -> str:
        """The address of a file, for people."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError when it is absent."""
        return self._persist("read", name, lambda: self._backend.read(name), passing=FileNotFoundError)

    def read_if_any(self, name: str) -> bytes | None:
        """The whole file, or None when it is absent."""
        with suppress(FileNotFoundError):
            return self.read(name)
        return None

    def size(self, name: str) -> int | None:
        """Bytes in the file, or None when it is absent."""
        return self._persist("look at", name, lambda: self._backend.size(name))

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def names(self, directory: str) -> list[str]:
        """Names of the files directly in ``directory`` (relative to the root), sorted; none when it does not exist."""
        found = self._persist("list", directory, lambda: self._backend.names(directory))
        return sorted(f"{directory}/{base}" if directory else base for base, is_directory in found if not is_directory)

    def sizes(self, directory: str) -> dict[str, int]:
        """Base names of the files directly in ``directory``, and their bytes."""
        return self._persist("list", directory, lambda: self._backend.sizes(directory))

    def entries(self) -> list[str]:
        """Base names of the files and directories at the root, sorted; none when it does not exist."""
        return sorted(base for base, _ in self._persist("list", "", lambda: self._backend.names("")))

    def put(self, name: str, data: bytes) -> None:
        """Writes the whole file, replacing what is there; readers see the old content or the new."""
        self._persist("write", name, lambda: self._backend.write(name, data))

    def put_file(self, source: Path, name: str) -> None:
        """Moves a local file here, replacing what is there. Build ``source`` in :meth:`scratch`."""
        self._persist("write", name, lambda: self._backend.write_file(source, name))

    def create(self, name: str, data: bytes) -> bool:
        """Writes the file unless it exists; True if the file now holds ``data``.

        Of writers with different data one gets True. A refusal may be the echo of our own write whose reply was lost,
        so that only the content decides: ``data`` has to name its writer (an attempt id), and must not be empty,
        because some stores truncate on an empty exclusive put.
        """
        if not data:
            raise ValueError("an exclusive create needs content")

        def attempt() -> bool:
            try:
                self._backend.create(name, data)
            except Exception:
                try:
                    return self._backend.read(name) == data
                except FileNotFoundError:
                    pass
                raise
            return True

        return self._persist("create", name, attempt)

    def publish(self, staged: str, final: str) -> None:
        """Moves ``staged`` over ``final``; done already if only ``final`` exists. Any number may do it at once."""

        def attempt() -> None:
            try:
                self._backend.move(staged, final)
            except FileNotFoundError:
                if self._backend.size(final) is None:
                    raise

        self._persist("publish", final, attempt)

    def delete(self, names: Iterable[str]) -> None:
        """Removes files; absent ones are skipped."""

        def one(name: str) -> None:
            self._persist("delete", name, lambda: self._backend.delete(name))

        every = list(names)
        if self.local or len(every) < 2:
            for name in every:
                one(name)
            return
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(one, every))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A local directory to build files in, gone afterwards; on the store's own file system if that is local."""
        where = None
        if self.local:
            where = Path(self.root, TEMPORARY)
            where.mkdir(parents=True, exist_ok=True)
        prefix = f"{self.writer}-" if self.local else "batchrun-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as directory:
            yield Path(directory)

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """The file as a local path, to be read only."""
        if self.local:
            yield Path(self.root, name)
            return
        with self.scratch() as directory:
            copy = directory / "copy"
            self._persist("read", name, lambda: self.fs.get_file(f"{self.root}/{name}", str(copy)))
            yield copy

    def sweep_temporary(self, alive: Collection[str]) -> None:
        """Removes what killed writers left half-built: all but the files of this writer and those of ``alive``."""
        left = self._persist("list", TEMPORARY, lambda: self._backend.names(TEMPORARY))
        for base, is_directory in left:
            if base.split("-")[0] in {self.writer, *alive}:
                continue
            if is_directory:
                shutil.rmtree(Path(self.root, TEMPORARY, base), ignore_errors=True)
            else:
                self.delete([f"{TEMPORARY}/{base}"])

    def probe_exclusive_create(self) -> None:
        """Raises JobError if the storage lets two writers create one file (some ignore the condition)."""
        name = f"{TEMPORARY}/{self.writer}-{uuid.uuid4().hex}"
        try:
            first, second = self.create(name, b"first"), self.create(name, b"second")
        finally:
            self.delete([name])
        if not first or second:
            raise JobError(
                f"{self.url}: this storage does not refuse to create a file that exists, "
                "so results could not be committed exactly once; choose another output.path"
            )

    def _persist(
        self, verb: str, name: str, action: Callable[[], T], *, passing: type[Exception] | tuple[()] = ()
    ) -> T:
        """The action's answer, tried again while its failures may pass; those of type ``passing`` are the caller's."""
        deadline = time.monotonic() + self.patience
        delay = 0.1
        while True:
            try:
                return action()
            except passing:
                raise
            except StorageError:
                raise
            except Exception as error:
                reason = self._without_secrets(f"{type(error).__name__}: {error}")
                if _is_hopeless(error) or time.monotonic() + delay > deadline:
                    raise StorageError(f"cannot {verb} {self.path(name)}: {reason}") from error
                log.warning("cannot %s %s, trying again: %s", verb, self.path(name), reason)
            time.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311
            delay = min(2 * delay, 10.0)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _secrets_of(options: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, dict):
            found += _secrets_of(value)
        elif isinstance(value, str) and value and _SECRET_OPTION.search(name):
            found.append(value)
    return found


def _is_hopeless(error: Exception) -> bool:
    """Whether trying again cannot help."""
    if isinstance(error, _HOPELESS_TYPES) or type(error).__name__ in _HOPELESS_NAMES:
        return True
    return isinstance(error, OSError) and error.errno in _HOPELESS_ERRNO


class _Disk:
    """Local disk, or a network mount that behaves like one."""

    def __init__(self, root: Path, writer: str) -> None:
        self.root = root
        self.writer = writer

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, directory: str) -> list[tuple[str, bool]]:
        try:
            with os.scandir(self.root / directory) as entries:
                return [(entry.name, entry.is_dir()) for entry in entries]
        except FileNotFoundError:
            return []

    def sizes(self, directory: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for base, is_directory in self.names(directory):
            with suppress(FileNotFoundError):  # gone since, or a link to nothing
                if not is_directory:
                    found[base] = (self.root / directory / base).stat().st_size
        return found

    def write(self, name: str, data: bytes) -> None:
        self._build(data, lambda built: self._rename(built, self.root / name))

    def write_file(self, source: Path, name: str) -> None:
        with source.open("rb") as file:
            os.fsync(file.fileno())
        try:
            self._rename(source, self.root / name)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._build(source, lambda built: self._rename(built, self.root / name))
            source.unlink()

    def create(self, name: str, data: bytes) -> None:
        self._build(data, lambda built: self._link(built, self.root / name))

    def move(self, source: str, target: str) -> None:
        self._rename(self.root / source, self.root / target)
        _fsync_directory((self.root / source).parent)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def _build(self, content: bytes | Path, finish: Callable[[Path], None]) -> None:
        """Hands ``finish`` a synced file of that content."""
        built = self.root / TEMPORARY / f"{self.writer}-{uuid.uuid4().hex}"
        _make_directory(built.parent)
        try:
            with built.open("xb") as file:
                if isinstance(content, Path):
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            finish(built)
        finally:
            built.unlink(missing_ok=True)

    def _rename(self, source: Path, target: Path) -> None:
        _make_directory(target.parent)
        source.replace(target)
        _fsync_directory(target.parent)

    def _link(self, source: Path, target: Path) -> None:
        _make_directory(target.parent)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise StorageError(
                f"{self.root}: this file system has no hard links ({error.strerror}), which batchrun needs to commit "
                "results exactly once; choose another output.path"
            ) from error
        _fsync_directory(target.parent)


class _Objects:
    """An object store behind fsspec. Every write is one complete put of bytes or of a finished file."""

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")

    def read(self, name: str) -> bytes:
        return cast(bytes, self.fs.cat_file(self._key(name)))

    def size(self, name: str) -> int | None:
        self.fs.invalidate_cache()
        try:
            info = self.fs.info(self._key(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def names(self, directory: str) -> list[tuple[str, bool]]:
        return [(base, entry["type"] == "directory") for base, entry in self._list(directory)]

    def sizes(self, directory: str) -> dict[str, int]:
        return {base: int(entry["size"]) for base, entry in self._list(directory) if entry["type"] != "directory"}

    def write(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(self._key(name), data)

    def write_file(self, source: Path, name: str) -> None:
        self.fs.put_file(str(source), self._key(name))

    def create(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(self._key(name), data, mode="create")

    def move(self, source: str, target: str) -> None:
        self.fs.cp_file(self._key(source), self._key(target))
        self.delete(source)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._key(name))

    def _list(self, directory: str) -> list[tuple[str, dict[str, Any]]]:
        """Base name and fsspec's description of what is directly in the directory."""
        self.fs.invalidate_cache()
        key = self._key(directory)
        try:
            found = self.fs.ls(key, detail=True)
        except FileNotFoundError:
            return []
        inside = ((entry["name"].rstrip("/"), entry) for entry in found)
        return [(path.rsplit("/", 1)[-1], entry) for path, entry in inside if path != key]

    def _key(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root


def _make_directory(directory: Path) -> None:
    """Makes the directory and its parents, and makes their existence durable."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        if path.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "is a link to nothing", str(path))
        path.mkdir(exist_ok=True)
        _fsync_directory(path.parent)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
