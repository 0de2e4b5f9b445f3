"""Decompression of a byte stream piece by piece, with every member or frame of the file, and honest about damage.

The standard library's file objects hide a truncated end (zstd) or lose what they had decoded before it; here
everything that can be decoded comes out first.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import zstandard

_INPUT_BYTES = 1 << 16
_OUTPUT_BYTES = 1 << 20


class DamagedError(Exception):
    """The compressed data ends early or is corrupt; everything before that point has been given out."""


class _Zlib:
    """zlib's decompressor with the interface of bz2's and lzma's."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


class _Zstd:
    """zstd's decompressor with that interface; output is bounded by the input given at once alone."""

    needs_input = True

    def __init__(self) -> None:
        self._inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(data)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": _Zlib,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": _Zstd,
}
_ERRORS = (zlib.error, OSError, EOFError, lzma.LZMAError, zstandard.ZstdError)


def decompress(stream: BinaryIO, suffix: str) -> Iterator[bytes]:
    """Decoded pieces of a ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` stream; raises DamagedError where it cannot go on.

    Members follow one another to the end; zero bytes after a member are padding.
    """
    pending = stream.read(_INPUT_BYTES)
    if not pending:
        raise DamagedError("is empty")
    while pending:
        decoder = DECOMPRESSORS[suffix]()
        while not decoder.eof:
            if not pending and decoder.needs_input:
                pending = stream.read(_INPUT_BYTES)
                if not pending:
                    raise DamagedError(f"truncated: the {suffix} data ends before its end marker")
            try:
                piece = decoder.decompress(pending, _OUTPUT_BYTES)
            except _ERRORS as error:
                raise DamagedError(f"invalid {suffix} data: {error}") from None
            pending = b""
            if piece:
                yield piece
        pending = _after_padding(stream, decoder.unused_data)


def _after_padding(stream: BinaryIO, data: bytes) -> bytes:
    """The first bytes at or after ``data`` that are not zero; empty at the end of the stream."""
    while not (data := data.lstrip(b"\0")):
        data = stream.read(_INPUT_BYTES)
        if not data:
            return b""
    return data
