"""The thread that makes results durable, so that the engine's never waits for storage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from batchrun.data.files import UnreadableFileError
from batchrun.data.results import partials_table
from batchrun.data.rows import Batch, PartialRow, RowResult, Split
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.errors import StoppedError

_MOST_CHECKPOINTS = 2  # that wait, or are being written


class _Reread:
    """The input, whose kept columns are read again when a split is committed."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def batches(self, split: Split) -> Iterator[Batch]:
        try:
            yield from self._source.batches(split)
        except (OSError, UnreadableFileError) as error:
            raise StoppedError(f"{split.file.key}: {error}; its results are kept, run it again to go on") from error


class Writer:
    """Makes results durable in the order in which it is given them. A context manager, for one thread."""

    def __init__(self, output: Output, source: Source, checkpoint_seconds: float) -> None:
        self._output = output
        self._source = source
        self._interval = checkpoint_seconds
        self._thread = ThreadPoolExecutor(1, "writer")
        self._pending: deque[Future[None]] = deque()
        self._checkpoints: deque[Future[None]] = deque()  # those of them that hold results
        self._failed = False
        self._taken = time.monotonic()  # when the newest checkpoint's state was taken
        self._took = 0.0  # seconds that the last one needed to become durable

    @property
    def due(self) -> bool:
        """Whether to take a checkpoint now, for it to be durable within the interval after the last one's state.

        A fifth of the interval is left for a step that takes long, and for storage that is slower than it was.
        """
        busy = any(not future.done() for future in self._pending)
        age = time.monotonic() - self._taken
        return not busy and age >= max(0.5 * self._interval, 0.8 * self._interval - 2 * self._took)

    def checkpoint(
        self,
        results: Iterable[RowResult],
        partials: list[PartialRow],
    ) -> None:
        """Queue a checkpoint; wait where two wait already, that results do not pile up.

        ``results`` may be lazy: they are taken on the writer's thread.
        """
        taken = self._taken = time.monotonic()

        def write() -> None:
            self._output.checkpoint(list(results), partials)
            self._took = time.monotonic() - taken

        self._submit(write)
        self._checkpoints.append(self._pending[-1])
        while len(self._checkpoints) > _MOST_CHECKPOINTS:
            self._checkpoints.popleft().result()

    def commit(self, split: Split) -> None:
        """Queue the commit of a split of whose rows all that this worker has to do were given."""

        def write() -> None:
            self._output.commit_split(split, _Reread(self._source))

        self._submit(write)

    def settle(self, timeout: float = 0.0) -> bool:
        """Whether nothing is queued or in progress, or will be within so many seconds.

        Raises what an earlier piece failed with.
        """
        wait(self._pending, timeout)
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        return not self._pending

    def drain(self) -> None:
        """Wait until all that was queued is durable. Raises what a piece of it failed with."""
        while self._pending:
            self._pending.popleft().result()

    def _submit(self, write: Callable[[], None]) -> None:
        """Queue work, to be done unless a piece before it fails. Raises what an earlier piece failed with."""

        def attempt() -> None:
            if self._failed:  # what comes after builds on it, and its own fault would hide the first
                return
            try:
                write()
            except BaseException:
                self._failed = True
                raise

        self.settle()
        self._pending.append(self._thread.submit(attempt))

    def __enter__(self) -> Writer:
        def prepare() -> None:
            partials_table([])  # with its first table pyarrow imports pandas, which would hold the first checkpoint up

        self._submit(prepare)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):  # an interrupt does not wait
                self.drain()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
