"""What drafts brought: how many were accepted, by position, and the time that they won."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest


@dataclass(slots=True)
class SpeculationStats:
    """Totals since the engine was made. A row-step is one sequence's part of one step of the model."""

    forwards: int = 0  # row-steps that verified drafts
    tokens: int = 0  # that these gave: accepted drafts, and the one that follows them
    drafted: list[int] = field(default_factory=list)  # that were verified, by position among those of their row-step
    accepted: list[int] = field(default_factory=list)  # of these
    seconds: float = 0.0  # of all steps
    seconds_on: float = 0.0  # of those that verified drafts
    seconds_plain: float = 0.0  # that the same tokens would have taken without, by estimate

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens of a row-step with drafts; 1 is what it gives without. None where there was no such row-step."""
        return self.tokens / self.forwards if self.forwards else None

    @property
    def acceptance(self) -> list[float]:
        """The share of drafts that were accepted, 0 to 1, by position."""
        return [kept / tried for kept, tried in zip(self.accepted, self.drafted, strict=True) if tried]

    @property
    def speedup(self) -> float:
        """How many times as long all steps would have taken without drafts, by estimate."""
        without = self.seconds - self.seconds_on + self.seconds_plain
        return without / self.seconds if self.seconds > 0 else 1.0

    def note(self, drafted: int, accepted: int) -> None:
        """A row-step verified ``drafted`` tokens, of which the first ``accepted`` came true."""
        self.forwards += 1
        self.tokens += 1 + accepted
        missing = drafted - len(self.drafted)
        self.drafted.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted

    def copy(self) -> SpeculationStats:
        return replace(self, drafted=[*self.drafted], accepted=[*self.accepted])

    def since(self, before: SpeculationStats) -> SpeculationStats:
        """What came after ``before``, which is of the same engine."""
        return SpeculationStats(
            forwards=self.forwards - before.forwards,
            tokens=self.tokens - before.tokens,
            drafted=_differences(self.drafted, before.drafted),
            accepted=_differences(self.accepted, before.accepted),
            seconds=self.seconds - before.seconds,
            seconds_on=self.seconds_on - before.seconds_on,
            seconds_plain=self.seconds_plain - before.seconds_plain,
        )


def _differences(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip_longest(now, before, fillvalue=0)]
