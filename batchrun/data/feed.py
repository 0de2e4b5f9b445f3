"""Prepared rows from a process of their own, so that reading, templating and tokenizing never hold the engine's thread.

One child process prepares what is ordered, in turn, and stays one window ahead; a window is a run of rows of one
split, sorted so that shared prefixes lie together. The child ends with its parent, however that dies.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.connection import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

import batchrun
from batchrun.data.rows import PreparedRow, Split
from batchrun.errors import StoppedError
from batchrun.job import InputSpec, PromptSpec, SamplingSpec
from batchrun.model_files import ModelFiles

GO_ON = "what is finished is kept, run the same command again to go on"

_EXIT_SECONDS = 5.0
_CHILD = """
import signal, sys  # nothing slow yet: the parent says when to stop
for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(ignored, signal.SIG_IGN)
sys.path.append(sys.argv[2])
from batchrun.data.feed_worker import serve
serve(int(sys.argv[1]))
"""


class FeedError(StoppedError):
    """The child was killed, ran out of memory or can no longer read the input. Run again, the job may go on."""


@dataclass(frozen=True, slots=True)
class Window:
    """Some rows of one order in prefix order. ``last``: no more of it follows; ``rows`` may then be empty.

    It is pickled in columns, which takes a third of the time that an object for each row would. Token ids arrive as
    arrays: 4 bytes each in place of 36, and nothing that the garbage collector looks at.
    """

    name: str
    rows: list[PreparedRow]
    last: bool

    def __reduce__(self) -> tuple[Callable[..., Window], tuple[Any, ...]]:
        token_ids = array("I")
        for row in self.rows:
            token_ids.extend(row.token_ids)
        lengths = array("I", [len(row.token_ids) for row in self.rows])
        columns = [[getattr(row, name) for row in self.rows] for name in ("row", "params", "own_seed", "error")]
        return _window, (self.name, self.last, token_ids, lengths, columns)


def _window(name: str, last: bool, token_ids: array[int], lengths: array[int], columns: list[list[Any]]) -> Window:
    """What Window.__reduce__ has taken apart."""
    numbers, *others = columns
    ids = [token_ids[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]
    return Window(name, list(map(PreparedRow, numbers, ids, *others)), last)


@dataclass(frozen=True, slots=True)
class Order:
    """Which rows of a split to prepare: ``only`` these, if given, and none of ``skip``."""

    name: str
    split: Split
    only: frozenset[int] | None = None
    skip: frozenset[int] = frozenset()
    max_tokens: int | None = None  # in place of what the job and the row say


class Feed:
    """Prepares rows in a child process; a context manager, for one thread.

    The child holds at most two windows, this side none: a window crosses over when :meth:`poll` takes it. Any error of
    the child is raised here: a BatchrunError as it was, its death by a signal as FeedError, anything else as
    RuntimeError.
    """

    def __init__(
        self, source: InputSpec, prompt: PromptSpec, sampling: SamplingSpec, model: ModelFiles, max_model_len: int
    ) -> None:
        self._connection, theirs = Pipe()
        root = str(Path(batchrun.__file__).parents[1])
        with theirs:
            # Not multiprocessing.Process: it would run the caller's main module again, and import all that it does.
            # A session of its own keeps the terminal's Ctrl-C away.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno()), root],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._unfinished = 0  # orders queued and not yet delivered to their end
        self._send((source, prompt, sampling, model, max_model_len))

    @property
    def process_id(self) -> int:
        """The child's."""
        return self._process.pid

    def request(self, order: Order) -> None:
        """Queue an order; the windows of all come in the order of these."""
        self._unfinished += 1
        self._send(order)

    def poll(self, timeout: float | None = 0.0) -> Window | None:
        """The next window, or None where none came within ``timeout`` seconds (None: no limit) or none is to come."""
        if not self._unfinished:
            return None
        try:
            if not self._connection.poll(timeout):
                return None
            message: Window | Exception = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, Exception):
            self.close()
            raise message
        self._unfinished -= message.last
        return message

    def __iter__(self) -> Iterator[Window]:
        """Windows until every order has ended."""
        while (window := self.poll(None)) is not None:
            yield window

    def close(self) -> None:
        """End the child. What was requested and not taken is dropped."""
        self._unfinished = 0
        self._connection.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._death() from None

    def _death(self) -> Exception:
        self.close()
        code = self._process.returncode
        if code >= 0:
            return RuntimeError(f"the process that prepares prompts died: exit code {code}")
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return FeedError(
            f"the process that prepares prompts ({self.process_id}) was killed by {signal.Signals(-code).name}{hint}; "
            f"{GO_ON}"
        )
