"""Storage that fails and recovers: what is tried again and for how long, and reading that goes on where it broke off.

Clients of object stores repeat some requests themselves (s3fs and botocore: refused connections, throttling, most 5xx
replies). They do not repeat listings and replies that break off halfway, and what they give up on after seconds may
work again after a minute. All of batchrun's reading and writing goes through :class:`Patience` therefore.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, TypeVar

from batchrun.errors import BatchrunError, StoppedError, without_credentials

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 60.0  # seconds that an operation may go on failing

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
_HOPELESS_NAMES = {  # of botocore and google-auth: nobody to act as, or names that make no sense
    "ConfigNotFound",
    "DefaultCredentialsError",
    "InvalidConfigError",
    "NoCredentialsError",
    "NoRegionError",
    "ParamValidationError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
}
_PASSING_STATUS = {408, 409, 412, 425, 429}  # refusals that the next request need not meet; 412: of an exclusive create
_PASSING_CODES = {  # of S3 replies whose status says more than they mean
    "BadDigest",
    "IncompleteBody",
    "NoSuchUpload",  # the upload was completed by a request whose reply was lost, or swept: begin another
    "RequestTimeout",
    "XAmzContentSHA256Mismatch",
}
_VERSIONS = ("ETag", "etag", "md5", "LastModified", "last_modified", "mtime", "created")  # best first
_SECRET_OPTION = re.compile(r"secret|token|key|password|credential|sas|connection_string|auth", re.IGNORECASE)
_SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "HF_TOKEN",
)


class StorageError(StoppedError):
    """The storage failed for good (full, forbidden, unreachable); what was committed stays, and can be resumed."""


class Patience:
    """Tries storage operations again while their failures may pass, and tells of failures without credentials.

    ``url`` and ``options`` are what opens the storage: the secrets in them, and those in the environment variables of
    the storage clients, are never shown.
    """

    def __init__(self, url: str, options: dict[str, Any], seconds: float | None = None) -> None:
        self.seconds = PATIENCE if seconds is None else seconds
        named = (os.environ.get(name, "") for name in _SECRET_VARIABLES)
        users = re.findall(r"//([^/@]+)@", url)
        secrets = {*_secrets_of(options), *users, *(user.partition(":")[2] for user in users), *named} - {""}
        self._secrets = sorted(secrets, key=len, reverse=True)  # one may be a part of another

    def run(self, doing: str, action: Callable[[], T], *, passing: type[Exception] | tuple[()] = ()) -> T:
        """The action's answer, tried again with growing pauses until it has failed for :attr:`seconds`.

        ``doing`` completes "cannot": "read s3://bucket/x". Failures of type ``passing`` and batchrun's own errors are
        the caller's; others raise :class:`StorageError`, at once when trying again cannot help.
        """
        deadline = None
        delay = 0.1
        while True:
            try:
                return action()
            except passing:
                raise
            except BatchrunError:
                raise
            except Exception as error:
                deadline = deadline or time.monotonic() + self.seconds
                reason = self.shown(f"{type(error).__name__}: {error}")
                if _is_hopeless(error) or time.monotonic() + delay > deadline:
                    raise StorageError(f"cannot {doing}: {reason}") from error
                log.warning("cannot %s, trying again: %s", without_credentials(doing), reason)
            time.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311
            delay = min(2 * delay, 10.0)

    def shown(self, text: str) -> str:
        """``text`` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return without_credentials(text)


class ChangedFileError(StoppedError):
    """A file is no longer what it was when reading began."""


class PatientFile(io.RawIOBase):
    """A remote file, for reading, by one thread. A read that fails goes on at the byte where it broke off.

    Each read is one request for just those bytes, and is full unless the file ends: put an ``io.BufferedReader``
    around it to read it in small pieces. All reads are of one content: that of ``identity``, or, if that is None, the
    one that the first read finds. Raises ChangedFileError when there is another, FileNotFoundError when there is none.
    """

    def __init__(
        self, fs: Any, path: str, patience: Patience, *, shown: str, identity: tuple[int, str] | None = None
    ) -> None:
        super().__init__()
        self._fs = fs
        self._path = path
        self._patience = patience
        self._shown = shown
        self._identity = identity
        self._handle: Any = None
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}.get(whence)
        self._position = offset + (self._size() if base is None else base)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).nbytes
        data = self._patience.run(f"read {self._shown}", lambda: self._attempt(wanted), passing=FileNotFoundError)
        memoryview(buffer).cast("B")[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def _size(self) -> int:
        """Bytes in the file; 0 if the storage does not tell."""
        if self._identity is None:
            self._patience.run(f"read {self._shown}", self._open, passing=FileNotFoundError)
        assert self._identity is not None
        return self._identity[0]

    def _attempt(self, wanted: int) -> bytes:
        try:
            self._open()
            _move(self._handle, self._position)
            data = b"".join(_pieces(self._handle, wanted))
            if len(data) < wanted and self._position + len(data) < self._size():
                raise OSError(errno.EIO, f"broke off at byte {self._position + len(data):,} of {self._size():,}")
            return data
        except BaseException:
            self._drop()  # whatever state it is in
            raise

    def _open(self) -> None:
        if self._handle is not None:
            return
        handle = self._fs.open(self._path, "rb", cache_type="none")
        details = getattr(handle, "details", None) or {}
        # Looked at after opening: what is read is then no newer than what is compared.
        found = identity_of(details if _version_of(details) else self._fs.info(self._path))
        if self._identity is None:
            self._identity = found
        elif self._identity != found:
            handle.close()
            raise ChangedFileError(f"{self._shown} changed while the job ran; submit again to run it as it is now")
        self._handle = handle

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                handle.close()
            except Exception as error:
                log.debug("closing %s: %s", self._shown, error)


def identity_of(info: dict[str, Any]) -> tuple[int, str]:
    """Bytes in a file (0 if unknown) and what changes with its content, from what fsspec says of it."""
    return int(info.get("size") or 0), _version_of(info)


def _version_of(info: dict[str, Any]) -> str:
    version = next((info[name] for name in _VERSIONS if info.get(name)), "")
    if isinstance(version, datetime):  # some listings give the same time as a number
        version = version.timestamp()
    return str(version)


def _pieces(handle: Any, wanted: int) -> Iterator[bytes]:
    """``wanted`` bytes, or those up to the end: a stream may give fewer at once."""
    while wanted > 0 and (piece := handle.read(wanted)):
        wanted -= len(piece)
        yield piece


def _move(handle: Any, position: int) -> None:
    """Goes to that byte; where a stream cannot jump, by reading on."""
    if handle.tell() == position:
        return
    try:
        handle.seek(position)
    except ValueError:
        for _ in iter(lambda: handle.read(min(1 << 20, position - handle.tell())), b""):
            pass
        if handle.tell() != position:
            raise


def _secrets_of(options: dict[str, Any]) -> Iterable[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _secrets_of(value)
        elif isinstance(value, str) and value and _SECRET_OPTION.search(name):
            yield value


def _is_hopeless(error: Exception) -> bool:
    """Whether trying again cannot help."""
    status, code = _reply(error)
    if code in _PASSING_CODES or status in _PASSING_STATUS:
        return False
    if status is not None and (300 <= status < 500 or status == 501):
        return True
    if isinstance(error, _HOPELESS_TYPES) or type(error).__name__ in _HOPELESS_NAMES:
        return True
    return isinstance(error, OSError) and error.errno in _HOPELESS_ERRNO


def _reply(error: Exception) -> tuple[int | None, str]:
    """The HTTP status and the code of the reply behind an error, as far as botocore, Azure, gcsfs or aiohttp tell."""
    cause: BaseException | None = error
    while cause is not None:  # s3fs raises its own errors from those of botocore
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(response.get("Error", {}).get("Code", ""))
        cause = cause.__cause__
    for name in ("status_code", "status", "code"):
        if isinstance(status := getattr(error, name, None), int) and 300 <= status < 600:
            return status, ""
    return None, ""
