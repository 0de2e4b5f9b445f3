"""Standard output and error that outlive their readers: ``batchrun submit JOB | head -1`` does not end the job."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = (errno.EPIPE, errno.EIO)  # a pipe that nobody reads, a terminal that was closed


class _Unread(io.FileIO):
    """A descriptor that takes what nobody reads any more, and says nothing."""

    unread = False

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.unread = True
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Have standard output and error go on silently once nobody reads them; those that are no descriptor stay."""
    sys.stdout = _outliving(sys.stdout)
    sys.stderr = _outliving(sys.stderr)


def is_unread(stream: IO[str]) -> bool:
    """Whether nobody reads the stream any more, as far as writing to it has shown."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "unread", False)


def _outliving(stream: IO[str] | None) -> IO[str]:
    if stream is None:  # closed before the process began
        return open(os.devnull, "w")  # noqa: PTH123 - takes its descriptor, which no other file then gets
    try:
        raw = _Unread(stream.fileno(), "wb", closefd=False)
    except io.UnsupportedOperation:
        return stream
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
