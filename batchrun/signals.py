"""The signals that end a command: before its run has begun they interrupt it, from then on its loop asks for them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from batchrun.errors import StoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class _Interrupt(KeyboardInterrupt):
    """Once KeyboardInterrupt itself has passed through certain C code, Python ends by SIGINT whatever becomes of it."""


@contextmanager
def interruptible() -> Iterator[None]:
    """The signals interrupt what is within, wherever it stands, and it ends in StoppedError."""
    received: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        again = bool(received)
        received.append(signal.Signals(number).name)
        if not again or number == signal.SIGINT:  # others may repeat themselves while this one unwinds
            raise _Interrupt

    previous = _handle(interrupt)
    try:
        yield
    except KeyboardInterrupt:
        reason = received[0] if received else "SIGINT"
        raise StoppedError(f"interrupted ({reason}); run the same command again to go on") from None
    finally:
        _restore(previous)


class StopSignals:
    """Turns the signals and a deadline into a question that the loop asks; a second SIGINT interrupts."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._received: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = _handle(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise _Interrupt
        self._received = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self._received is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._received = "--max-time"
        return self._received


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Have the signals handled; returns the handlers before. SIGHUP that is ignored (nohup) stays so."""
    previous: dict[int, Any] = {}
    for number in _SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        try:
            previous[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread: whoever embeds the run handles signals
            break
    return previous


def _restore(previous: dict[int, Any]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)
