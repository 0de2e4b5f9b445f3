"""How long steps take: plain ones, and those that draft and verify, each learned from the steps that were run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchrun.engine.step_times import StepTimes

_SAMPLES = 16  # of a range of sizes: a change shows in its middle after 12 of them
_KEPT = 4  # of them, where they are stale and new ones come
STALE = 500  # steps after which a time is measured anew
_FORGOTTEN = 4 * STALE  # steps after which a size counts as never measured, so that it is tried again
_CREDIBLE = 1.5  # times what near sizes say, of the first samples of a size
_NEAR = 1.4  # sizes whose times tell each other's
_REACH = 2  # times the largest measured size may be tried without any idea of its time
_EXACT = 16  # sizes up to here have a cell each, those above a quarter of an octave
_LARGEST = 1 << 20

Floats = NDArray[np.float64]


class Curve:
    """A noisy quantity by size: the middle of the latest samples of each range of sizes, and linear between them.

    ``wary``: of something that is large by accident. A range counts from its second sample on, and its first ones are
    held against what near ones say. ``rising``: below the smallest measured size it is proportional to the size.
    """

    def __init__(self, *, wary: bool = False, rising: bool = False) -> None:
        self._wary = wary
        self._first = int(rising)  # of the known: before it there is a point of nothing
        self._cells: dict[int, _Cell] = {}
        self._known: list[int] = []  # cells that count, in order, and as arrays their sizes and values
        self._sizes: Floats = np.empty(0)
        self._values: Floats = np.empty(0)

    def note(self, size: int, value: float, step: int) -> None:
        index = size if size <= _EXACT else _EXACT + round(4 * math.log2(size / _EXACT))
        cell = self._cells.get(index)
        if cell is None:
            cell = self._cells[index] = _Cell()
        if self._wary and len(cell.samples) < _KEPT and any(each.is_near(size) for each in self._cells.values()):
            value = min(value, _CREDIBLE * float(self.at(size, value)))
        cell.add(size, value, step)
        place = bisect_left(self._known, index)
        if place < len(self._known) and self._known[place] == index:
            place += self._first
            self._sizes[place], self._values[place] = cell.middle()
        elif len(cell.samples) > self._wary:
            self._arrange()

    def at(self, sizes: ArrayLike, otherwise: float) -> Floats:
        """The quantity at ``sizes``; beyond those measured that of the nearest, ``otherwise`` where there are none."""
        if not self._known:
            return np.full(np.shape(sizes), otherwise)
        return np.asarray(np.interp(np.asarray(sizes), self._sizes, self._values))

    def smallest(self) -> float:
        """Measured size; 0: none was."""
        return float(self._sizes[self._first]) if self._known else 0.0

    def largest(self) -> float:
        """Measured size; 0: none was."""
        return float(self._sizes[-1]) if self._known else 0.0

    def _arrange(self) -> None:
        self._known = sorted(index for index, cell in self._cells.items() if len(cell.samples) > self._wary)
        middles = [(0.0, 0.0)] * self._first + [self._cells[index].middle() for index in self._known]
        self._sizes, self._values = np.array(middles, dtype=float).reshape(-1, 2).T.copy()

    def count(self, size: float, since: int) -> int:
        """Samples at about ``size`` in cells that had one after step ``since``."""
        near = (cell for cell in self._cells.values() if cell.last > since and cell.is_near(size))
        return sum(len(cell.samples) for cell in near)

    def forget(self, before: int) -> None:
        """Drop what was not measured since step ``before``."""
        stale = [index for index, cell in self._cells.items() if cell.last < before]
        for index in stale:
            del self._cells[index]
        if stale:
            self._arrange()


class _Cell:
    __slots__ = ("last", "samples")

    def __init__(self) -> None:
        self.samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # value, size
        self.last = 0  # step of the latest

    def add(self, size: int, value: float, step: int) -> None:
        if step - self.last > STALE:
            while len(self.samples) > _KEPT:
                self.samples.popleft()
        self.samples.append((value, size))
        self.last = step

    def middle(self) -> tuple[float, float]:
        """Mean size, and the mean of the middle half of the values.

        Of two or three values the largest is left out: a step is slow by accident (the machine was busy, something was
        compiled), and never fast.
        """
        values, sizes = zip(*self.samples, strict=True)
        low = len(values) // 4
        kept = sorted(values)[low : len(values) - max(low, len(values) > 1)]
        return sum(sizes) / len(sizes), sum(kept) / len(kept)

    def is_near(self, size: float) -> bool:
        own = self.samples[-1][1] if self.samples else 0
        return own <= size * _NEAR and size <= own * _NEAR


class StepClock:
    """Seconds of a step by what it computes.

    A plain step takes what ``times`` says times a factor, by its tokens. Without ``times`` the factor is the time:
    above the sizes that were measured it is thought to stay as it is, so that more is tried, and below them to be
    proportional to the size.

    A step that drafts and verifies takes that of a plain one of as many tokens, and what drafting takes: for each of
    ``depth`` steps of a draft model ``draft_cost`` plain steps. What it was seen to take beyond that (above all since
    it does not overlap with the host) is learned in units of a plain step, by its tokens, or of a draft model by depth;
    with less than was measured it is proportional to what is added.
    """

    def __init__(self, times: StepTimes | None, draft_cost: float = 0.0) -> None:
        self._draft_cost = draft_cost
        self._factors = Curve(wary=True, rising=times is None)
        self._excess = Curve()
        self._verified = Curve()  # which sizes steps with drafts had
        self._grid: tuple[Floats, Floats, Floats] | None = None  # sizes, seconds of layers, seconds of the head
        if times is not None:
            sizes = [*range(_EXACT), *(_EXACT * 2 ** (i / 4) for i in range(4 * int(math.log2(_LARGEST / _EXACT))))]
            layers = [times.seconds(size, 0) for size in sizes]
            self._grid = np.array(sizes), np.array(layers), np.array([times.seconds(0, size) for size in sizes])

    def plain(self, tokens: ArrayLike, rows: ArrayLike) -> Floats:
        """Of plain steps of ``tokens`` and ``rows`` of logits."""
        return self._expected(tokens, rows) * self._factors.at(tokens, 1.0)

    def drafted(self, tokens: ArrayLike, rows: ArrayLike, depth: ArrayLike, n: int) -> Floats:
        """Of steps that verify: ``tokens`` and ``rows`` with drafts, of which a request has at most ``depth``.

        ``n``: requests that sample in them.
        """
        tokens, rows, depth = np.asarray(tokens), np.asarray(rows), np.asarray(depth)
        unit = self.plain(n, n)
        size, base = (depth, 0) if self._draft_cost else (tokens, tokens - rows + n)
        smallest = self._excess.smallest()
        part = np.where(size < smallest, (size - base) / np.maximum(smallest - base, 1), 1.0)
        excess = part * self._excess.at(size, 0.0)
        return np.maximum(unit, self.plain(tokens, rows) + unit * (depth * self._draft_cost + excess))

    def catch_up(self, tokens: int, n: int) -> float:
        """Of the draft model, to compute ``tokens`` besides one of each of ``n`` requests; what is unknown: at most."""
        if not tokens or not self._draft_cost:
            return 0.0
        size, largest = n + tokens, self._factors.largest()
        more = size / largest if self._grid is None and 0 < largest < size else 1.0
        return self._draft_cost * max(0.0, more * float(self.plain(size, n)) - float(self.plain(n, n)))

    def note_plain(self, seconds: float, tokens: int, rows: int, step: int) -> None:
        self._factors.note(tokens, seconds / float(self._expected(tokens, rows)), step)

    def note_drafted(self, seconds: float, tokens: int, rows: int, depth: int, n: int, step: int) -> None:
        unit = float(self.plain(n, n))
        excess = (max(seconds, unit) - float(self.plain(tokens, rows))) / unit - depth * self._draft_cost
        self._excess.note(depth if self._draft_cost else tokens, excess, step)
        self._verified.note(tokens, 0.0, step)

    def knows(self, tokens: int) -> bool:
        """Whether the time of a plain step of ``tokens`` is more than a guess."""
        return self._grid is not None or tokens <= _NEAR * self._factors.largest()

    def is_new(self, tokens: int, drafts: int) -> bool:
        """Whether steps of about ``tokens`` were measured, but none that had ``drafts`` as well."""
        return self._factors.count(tokens, -1) > 0 and not self._verified.count(tokens + drafts, -1)

    def is_measured(self, n: int, step: int, count: int) -> bool:
        """Whether plain steps of about ``n`` tokens were measured ``count`` times, the last time not long ago."""
        return self._factors.count(n, step - STALE) >= count

    def reach(self) -> float:
        """The most tokens of a step whose time can be guessed."""
        if self._grid is not None:
            return math.inf
        return _REACH * max(self._verified.largest(), self._factors.largest())

    def forget(self, step: int) -> None:
        """Drop what was measured too long before ``step`` to be told from what has changed."""
        for curve in (self._factors, self._excess, self._verified):
            curve.forget(step - _FORGOTTEN)

    def _expected(self, tokens: ArrayLike, rows: ArrayLike) -> Floats | float:
        if self._grid is None:
            return 1.0
        sizes, layers, head = self._grid
        return np.asarray(np.interp(np.asarray(tokens), sizes, layers) + np.interp(np.asarray(rows), sizes, head))
