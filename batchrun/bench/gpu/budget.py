"""Who may take how much of the time. What a part leaves goes to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

Clock = Callable[[], float]

FAILED = "failed"  # the status that decides the exit code

PARTS: Mapping[str, float] = {"checks": 130, "stress": 30, "roofline": 100, "engine": 220}  # shares, in order
_OVERRUN = 20.0  # seconds that a unit begun in time may run past the end of its part


@dataclass(frozen=True, slots=True)
class Line:
    """One result. ``status`` is a word or two: passed, failed, measured, cut, left out, ..."""

    name: str
    status: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work of a part: ``run`` takes the seconds it may use and yields its results."""

    name: str
    run: Callable[[float], Iterable[Line]]
    weight: float = 1.0  # its share of the part's time, beside the other units'
    least: float = 0.0  # seconds with less than which it is not begun
    longest: float = 60.0  # seconds after which it hangs, beyond what it may use


class Budget:
    """The time of each of ``parts``, in shares of ``seconds`` from now."""

    def __init__(self, seconds: float, parts: Sequence[str], clock: Clock = time.monotonic) -> None:
        self._clock = clock
        start, total = clock(), sum(PARTS[part] for part in parts)
        ends = accumulate(PARTS[part] / total * seconds for part in parts)
        self._ends = dict(zip(parts, (start + end for end in ends), strict=True))
        self._end = start + seconds

    def left(self, part: str) -> float:
        """Seconds in which units of ``part`` may begin."""
        return self._ends[part] - self._clock()

    def patience(self, part: str) -> float:
        """Seconds in which what was begun has to end."""
        return min(self._ends[part] + _OVERRUN, self._end) - self._clock()


def turns(units: Sequence[Unit], seconds: float, clock: Clock = time.monotonic) -> Iterator[tuple[Unit, float | None]]:
    """The units, each with the seconds it may use, or None where it has to be left out.

    Each gets its share of what is left when its turn comes.
    """
    end = clock() + seconds
    for index, unit in enumerate(units):
        left = end - clock()
        share = left * unit.weight / sum(each.weight for each in units[index:])
        yield unit, share if left > 0 and share >= unit.least else None
