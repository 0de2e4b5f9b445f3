"""The thread that claims work and looks around, so that the engine's never waits for storage."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection
from types import TracebackType

from batchrun.data.work import Claim, Work

_LOOK_SECONDS = 1.0  # between looks around; with many workers more,
_LOOK_SECONDS_PER_WORKER = 0.05
_SURVEY_SECONDS = 15.0  # between looks at what the others say of themselves
_ASK_AFTER = 1.0  # seconds without anything to claim after which it is asked for


class Claims:
    """Keeps what a worker holds, and what it learns of the others. A context manager, for one thread.

    The methods never wait for storage. What failed in the thread is raised by :meth:`check`.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()  # of the lists that both threads change
        self._claimed: list[Claim] = []  # and not taken yet
        self._held: dict[str, Claim] = {}  # taken, by unit
        self._lost: list[Claim] = []
        self._cessions: deque[tuple[Claim, Collection[int]]] = deque()
        self._wanted = 0  # rows to claim
        self._idle_since: float | None = None
        self._poked, self._news = threading.Event(), threading.Event()  # something for the thread; something from it
        self._asked = self._finished = self._told_to_stop = self._closing = False
        self._total_rows = work.total_rows()
        self._survey = work.survey()
        self._surveyed = time.monotonic()
        self._first = dict(self._survey.rows)  # attempt -> rows that it had finished when it was first heard of
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="claims", daemon=True)

    def want(self, rows: int) -> None:
        """How many rows to claim; 0: none."""
        if rows > 0 and self._wanted == 0:
            self._poked.set()
        self._wanted = rows

    def take(self) -> list[Claim]:
        """What was claimed since."""
        with self._lock:
            claims, self._claimed = self._claimed, []
            self._held |= {claim.unit: claim for claim in claims}
        if claims:
            self._idle_since = None
        return claims

    def drop(self, claim: Claim) -> None:
        """The unit is done."""
        with self._lock:
            self._held.pop(claim.unit, None)

    def cede(self, claim: Claim, rows: Collection[int]) -> None:
        """Leave rows of a unit, that this worker has dropped, to others."""
        self._asked = False
        self._cessions.append((claim, rows))
        self._poked.set()

    def is_ceding(self, claim: Claim) -> bool:
        """Whether rows of the unit are left to others, and that is not recorded yet."""
        return any(ceded.unit == claim.unit for ceded, _ in tuple(self._cessions))

    def lost(self) -> list[Claim]:
        """Units that were found to be others' since, or done by them."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def idle(self, timeout: float, *, look: bool) -> None:
        """This worker has nothing to do: wait for news, for so many seconds at most.

        ``look``: it has just committed something, so that all may be.
        """
        if self._idle_since is None:
            self._idle_since, look = time.monotonic(), True
        if look:
            self._poked.set()
        self._news.wait(timeout)
        self._news.clear()

    def check(self) -> None:
        """Raises what the thread failed with."""
        if self._error is not None:
            raise self._error

    @property
    def asked(self) -> bool:
        """Whether another worker has nothing to do and finds nothing to claim."""
        return self._asked

    @property
    def finished(self) -> bool:
        """Whether all is committed."""
        return self._finished

    @property
    def told_to_stop(self) -> bool:
        return self._told_to_stop

    @property
    def total_rows(self) -> int:
        """Rows of all splits, as far as they are recorded."""
        return self._total_rows

    @property
    def others_rows(self) -> int:
        """Rows that other workers have finished since this one came."""
        return sum(rows - self._first.get(attempt, 0) for attempt, rows in self._survey.rows.items())

    @property
    def n_workers(self) -> int:
        return self._survey.n_workers

    def _run(self) -> None:
        next_look = time.monotonic() + self._pause
        try:
            while not self._closing:
                self._poked.wait(max(0.0, next_look - time.monotonic()))
                self._poked.clear()
                while self._cessions:
                    self._work.cede(*self._cessions[0])
                    self._cessions.popleft()  # only now: until then it counts as not recorded
                self._claim()
                if self._idle_since is not None or time.monotonic() >= next_look:
                    self._look()
                    next_look = time.monotonic() + self._pause
            self._work.stop_asking()
        except BaseException as error:
            self._error = error
        self._news.set()

    @property
    def _pause(self) -> float:
        """Seconds between looks around: more with more workers, that the storage is not kept busy with them."""
        return _LOOK_SECONDS + _LOOK_SECONDS_PER_WORKER * self._survey.n_workers

    def _claim(self) -> None:
        if self._claimed or not self._wanted:
            return
        claims = self._work.claim(self._wanted)
        if claims:
            self._wanted = 0
            self._work.stop_asking()
            with self._lock:
                self._claimed += claims
            self._news.set()

    def _look(self) -> None:
        self._told_to_stop = self._work.output.is_told_to_stop()
        self._finished = not self._work.todo()
        self._total_rows = self._work.total_rows()
        self._asked = not self._cessions and self._work.is_asked()
        with self._lock:
            held = list(self._held.values())
        lost = self._work.lost(held) if held else []
        with self._lock:
            self._lost += [claim for claim in lost if self._held.pop(claim.unit, None)]
        if time.monotonic() - self._surveyed > max(_SURVEY_SECONDS, self._survey.n_workers / 4):
            self._survey = self._work.survey()
            self._first = {attempt: self._first.get(attempt, 0) for attempt in self._survey.rows}
            self._surveyed = time.monotonic()
        if self._idle_since is not None and time.monotonic() - self._idle_since > _ASK_AFTER and not self._finished:
            self._work.ask()
        self._news.set()

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._poked.set()
        self._thread.join()
