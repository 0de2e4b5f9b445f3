"""The signals that end a run, and its deadline."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any


class StopSignals:
    """Turns SIGINT, SIGTERM, SIGUSR1 and a deadline into a question that the loop asks; a second SIGINT interrupts."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._received: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: whoever embeds the run handles signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self._received is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._received = "--max-time"
        return self._received
