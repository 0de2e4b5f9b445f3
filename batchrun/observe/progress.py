"""How far a run is: a tqdm bar on a terminal, a log line every few seconds elsewhere, both with a token-weighted ETA.

Rows differ in length by orders of magnitude, so time left is judged by tokens: what finished rows took, on average,
is what the rows to come are expected to take, and the tokens already spent on running rows are subtracted.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.text import format_count, format_duration

_LINE_SECONDS = 15.0
_BAR_SECONDS = 0.5
_UNSIZED_COLUMNS = 120
_RATE_SECONDS = 60.0  # rates are those of the last minute
_LEAST_SECONDS = 1.0  # that a rate is of: the first step's tokens count before it has taken any time
_PRIOR_ROWS = 8.0  # how many finished rows the estimate of tokens per row weighs as much as,
_PRIOR_SECONDS = 15.0  # and until when that of tokens per second stands for what is not seen yet


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a run stands. Counts are of this run, from its start; they never fall."""

    rows: int  # finished, error rows included
    row_errors: int = 0
    others: int = 0  # rows that other workers have finished meanwhile
    prompt_tokens: int = 0  # to compute for rows admitted so far, again for a row that is set back
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache instead
    completion_tokens: int = 0  # generated, those of unfinished rows included
    finished_tokens: int = 0  # computed prompt and generated tokens of finished rows alone
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0  # share of the KV pool that is in use, 0 to 1
    speculation: SpeculationStats | None = None  # None: off

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def prefix_hits(self) -> float:
        """Share of prompt tokens that the prefix cache gave, 0 to 1."""
        return self.cached_tokens / max(1, self.cached_tokens + self.prompt_tokens)


def tokens_left(now: Snapshot, total_rows: int, tokens_per_row: float | None = None) -> float | None:
    """Tokens still to compute, from the finished rows' mean; ``tokens_per_row`` is the estimate to begin with.

    None while there is nothing to judge by: no row is finished, or what is running has outgrown the mean.
    """
    weight = 0.0 if tokens_per_row is None else _PRIOR_ROWS
    if now.rows + weight == 0:
        return None
    mean = (now.finished_tokens + weight * (tokens_per_row or 0.0)) / (now.rows + weight)
    started = now.tokens - now.finished_tokens
    left = (total_rows - now.rows) * mean - started
    return 0.0 if now.rows == total_rows else left if left > 0 else None


def eta_seconds(left: float | None, tokens_per_second: float) -> float | None:
    """Seconds until ``left`` tokens are computed; None: cannot tell yet."""
    if left == 0:
        return 0.0
    return None if left is None or tokens_per_second <= 0 else left / tokens_per_second


class Progress:
    """Shows snapshots of a run on ``stream`` (a terminal gets a bar). A context manager.

    ``total_rows`` counts all rows of the job and ``rows_before`` those that an earlier run finished.
    """

    def __init__(
        self,
        total_rows: int,
        *,
        rows_before: int = 0,
        name: str = "batchrun",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows_before = rows_before
        self._total_rows = total_rows
        self._tokens_per_row: float | None = None
        self._tokens_per_second = 0.0
        self._name = name
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start = clock()
        self._shown_at: float | None = None
        self._last = Snapshot(rows=0)
        self._window: deque[tuple[float, Snapshot]] = deque([(self._start, self._last)])
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            sized = os.get_terminal_size(self._stream.fileno()).columns > 0  # a container's terminal may have no size
            self._bar = tqdm(
                total=total_rows,
                initial=rows_before,
                desc=name,
                file=self._stream,
                dynamic_ncols=sized,
                ncols=None if sized else _UNSIZED_COLUMNS,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows [{elapsed}{postfix}]",
            )

    def expect(self, tokens_per_row: float, tokens_per_second: float) -> None:
        """What is estimated of a run that begins now: it counts as long as little has been seen."""
        self._tokens_per_row, self._tokens_per_second = tokens_per_row, tokens_per_second
        self._window = deque([(self._clock(), self._last)])

    def update(self, now: Snapshot, total_rows: int | None = None) -> None:
        """Take note of ``now``; shown at most every half second (a bar) or 15 seconds (lines).

        ``total_rows``: as many as are known by now.
        """
        self._last = now
        self._total_rows = self._total_rows if total_rows is None else total_rows
        moment = self._clock()
        self._window.append((moment, now))
        while len(self._window) > 2 and self._window[1][0] <= moment - _RATE_SECONDS:
            self._window.popleft()
        due = _BAR_SECONDS if self._bar is not None else _LINE_SECONDS
        if self._shown_at is None or moment - self._shown_at >= due:
            self._show(moment)

    def write(self, message: str) -> None:
        """A line of its own that does not disturb the bar."""
        if self._bar is not None:
            tqdm.write(message, file=self._stream)
        else:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        """Show the last snapshot and end the bar."""
        self._show(self._clock())
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rates(self, moment: float) -> tuple[float, float]:
        """Prompt and output tokens per second over the last minute."""
        since, before = self._window[0]
        seconds = max(moment - since, _LEAST_SECONDS)
        return (
            (self._last.prompt_tokens - before.prompt_tokens) / seconds,
            (self._last.completion_tokens - before.completion_tokens) / seconds,
        )

    def _drafts(self) -> str | None:
        """What drafts brought over the last minute; None while none are verified."""
        before, now = self._window[0][1].speculation or SpeculationStats(), self._last.speculation
        recent = None if now is None else now.since(before)
        if recent is None or recent.tokens_per_forward is None:
            return None
        return f"drafts {recent.tokens_per_forward:.1f} tok/forward ({recent.speedup:.2f}x)"

    def _expected_rate(self, moment: float, seen: float) -> float:
        """Tokens per second to come: those seen, with the estimate in place of what is missing of the first seconds."""
        seconds = moment - self._window[0][0]
        if self._tokens_per_second == 0 or seconds >= _PRIOR_SECONDS:
            return seen
        return (seen * seconds + self._tokens_per_second * (_PRIOR_SECONDS - seconds)) / _PRIOR_SECONDS

    def _rows_here(self) -> int:
        """Rows of this worker, done and to come, if it goes on to do the same share of them as it did so far."""
        now, left = self._last, self._total_rows - self._rows_before - self._last.rows - self._last.others
        share = now.rows / (now.rows + now.others) if now.rows else 1.0
        return now.rows + round(max(0, left) * share)

    def _details(self, moment: float) -> str:
        now = self._last
        prompt_rate, output_rate = self._rates(moment)
        left = tokens_left(now, self._rows_here(), self._tokens_per_row)
        eta = eta_seconds(left, self._expected_rate(moment, prompt_rate + output_rate))
        parts = [
            f"{format_count(now.prompt_tokens)}+{format_count(now.completion_tokens)} tok",
            f"{format_count(prompt_rate)}+{format_count(output_rate)} tok/s",
            f"{now.running} running, {now.waiting} waiting",
            f"KV {now.kv_use:.0%}",
            f"prefix hits {now.prefix_hits:.0%}",
            f"ETA {'?' if eta is None else format_duration(eta)}",
        ]
        if drafts := self._drafts():
            parts.insert(-1, drafts)
        if now.row_errors:
            parts.insert(0, f"{now.row_errors} errors")
        return ", ".join(parts)

    def _show(self, moment: float) -> None:
        self._shown_at = moment
        done = self._rows_before + self._last.rows + self._last.others
        if self._bar is None:
            share = f"{done / self._total_rows:.0%}" if self._total_rows else "100%"
            self.write(f"{self._name}: {done}/{self._total_rows} rows ({share}), {self._details(moment)}")
            return
        self._bar.n, self._bar.total = done, self._total_rows
        self._bar.set_postfix_str(self._details(moment), refresh=False)
        self._bar.refresh()
