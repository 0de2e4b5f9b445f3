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
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from batchrun.data.patience import ChangedFileError, Patience, PatientFile
from batchrun.data.patience import StorageError as StorageError  # what every method here may raise
from batchrun.errors import JobError

log = logging.getLogger(__name__)

T = TypeVar("T")

TEMPORARY = "_batchrun/tmp"  # files on their way into place, which a killed writer may leave behind

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_DOWNLOAD_BYTES = 8 << 20  # by one request
_UPLOAD_PART_BYTES = 16 << 20
_UPLOADS_AT_ONCE = 4
_REQUESTS_AT_ONCE = 8  # of one kind, for many small files
_UPLOAD_AGE = timedelta(hours=1)  # after which an upload that names no attempt is given up
_ATTEMPT = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")  # Store.writer within a name


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
    def sweep_uploads(self, is_dead: Callable[[str, timedelta], bool]) -> None: ...  # by name and age


class Store:
    """The files under ``url``: a path, a ``file://`` URL or any fsspec URL whose file system can create exclusively.

    Names are relative and use ``/``. Failures that may pass are tried again for ``patience`` seconds (None: those of
    :class:`Patience`); then, and at once for those that will not pass, :class:`StorageError` is raised, with no
    credential in its text. Remote storage is not for use in a process that was forked since.
    """

    def __init__(
        self, url: str, storage_options: dict[str, Any] | None = None, *, patience: float | None = None
    ) -> None:
        options = storage_options or {}
        self.url = re.sub(r"//[^/@]*@", "//", url).rstrip("/") or "/"
        self.writer = uuid.uuid4().hex  # names this object's temporary files, and whoever writes through it
        self._patience = Patience(url, options, patience)
        if "://" in url or "::" in url:
            # The listing cache would hide what other processes write.
            self.fs, self.root = fsspec.core.url_to_fs(url, **{**options, "use_listings_cache": False})
        else:
            self.fs, self.root = LocalFileSystem(), str(Path(url).absolute())
        self.local = isinstance(self.fs, LocalFileSystem)
        self._backend = self._make_backend()

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

    def read_each(self, names: Iterable[str]) -> list[bytes | None]:
        """The whole files in that order, several at a time where each takes long; None for one that is absent."""
        return self._each(self.read_if_any, names)

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
                if self._backend.size(staged) is not None or self._backend.size(final) is None:
                    raise

        self._persist("publish", final, attempt)

    def delete(self, names: Iterable[str]) -> None:
        """Removes files; absent ones are skipped."""
        self._each(lambda name: self._persist("delete", name, lambda: self._backend.delete(name)), names)

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
            while not self._download(name, copy):
                pass
            yield copy

    def sweep_temporary(self, living: Callable[[], Collection[str]]) -> None:
        """Removes what killed writers left half-built: all but the files of this writer and those of ``living()``.

        That is asked after the files were listed: who writes one and is known by then keeps it.

        On S3 so are unfinished uploads: of this writer and of those that are not alive, and, where the name tells no
        writer, those older than an hour.
        """
        left = self._persist("list", TEMPORARY, lambda: self._backend.names(TEMPORARY))
        alive = living()
        for base, is_directory in left:
            if base.split("-")[0] in {self.writer, *alive}:
                continue
            if is_directory:
                shutil.rmtree(Path(self.root, TEMPORARY, base), ignore_errors=True)
            else:
                self.delete([f"{TEMPORARY}/{base}"])
        self._sweep_uploads({*alive} - {self.writer})  # of its own, those whose failure could not be cleared up

    def has_temporary(self) -> bool:
        """Whether some writer, this one included, has left something half-built or is about to finish it."""
        return bool(self._persist("list", TEMPORARY, lambda: self._backend.names(TEMPORARY)))

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

    def _sweep_uploads(self, alive: set[str]) -> None:
        """Gives up uploads that nobody will finish. If one is given up wrongly, its writer begins it again."""

        def is_dead(name: str, age: timedelta) -> bool:
            attempts = _ATTEMPT.findall(name)
            return not alive & set(attempts) if attempts else age > _UPLOAD_AGE

        try:
            self._persist("sweep uploads under", "", lambda: self._backend.sweep_uploads(is_dead))
        except StorageError as error:  # many may write here who may not list uploads
            log.warning("%s; unfinished uploads may be left there", error)

    def _make_backend(self) -> _Backend:
        if self.local:
            return _Disk(Path(self.root), self.writer)
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
        return (_S3 if "s3" in protocols else _Objects)(self.fs, self.root)

    def _each(self, action: Callable[[str], T], names: Iterable[str]) -> list[T]:
        every = list(names)
        if self.local or len(every) < 2:
            return [action(name) for name in every]
        with ThreadPoolExecutor(max_workers=_REQUESTS_AT_ONCE) as pool:
            return list(pool.map(action, every))

    def _persist(
        self, verb: str, name: str, action: Callable[[], T], *, passing: type[Exception] | tuple[()] = ()
    ) -> T:
        return self._patience.run(f"{verb} {self.path(name)}", action, passing=passing)

    def _download(self, name: str, target: Path) -> bool:
        """Copies a remote file; False if another took its place meanwhile."""
        try:
            with (
                PatientFile(self.fs, f"{self.root}/{name}", self._patience, shown=self.path(name)) as source,
                target.open("wb") as file,
            ):
                shutil.copyfileobj(source, file, _DOWNLOAD_BYTES)
        except ChangedFileError:
            return False
        except FileNotFoundError as error:
            raise StorageError(f"cannot read {self.path(name)}: it is gone") from error
        return True


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

    def sweep_uploads(self, is_dead: Callable[[str, timedelta], bool]) -> None:
        pass

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
        except FileNotFoundError as error:
            if built.exists():
                raise
            raise OSError(errno.ESTALE, "others removed it before it was in place", str(built)) from error
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

    def sweep_uploads(self, is_dead: Callable[[str, timedelta], bool]) -> None:
        """Nothing to do: Google Cloud and Azure drop unfinished uploads themselves after a week."""

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


class _S3(_Objects):
    """S3 and what speaks its language. There, uploads that nobody finishes stay, and are billed, until removed."""

    def write_file(self, source: Path, name: str) -> None:
        options = {"chunksize": _UPLOAD_PART_BYTES, "max_concurrency": _UPLOADS_AT_ONCE}  # bounds the memory
        self.fs.put_file(str(source), self._key(name), **options)

    def sweep_uploads(self, is_dead: Callable[[str, timedelta], bool]) -> None:
        bucket, prefix, _ = self.fs.split_path(self.root)
        prefix = f"{prefix}/" if prefix else ""
        page: dict[str, str] = {}
        while True:
            reply = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
            now = parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"])
            for upload in reply.get("Uploads", []):
                key = upload["Key"]
                name = key.removeprefix(prefix)
                if key.startswith(prefix) and is_dead(name, now - upload["Initiated"]):
                    with suppress(FileNotFoundError):  # finished or swept since
                        self.fs.abort_mpu(bucket, key, upload["UploadId"])
            if not reply.get("IsTruncated"):
                return
            page = {"KeyMarker": reply["NextKeyMarker"], "UploadIdMarker": reply["NextUploadIdMarker"]}


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
