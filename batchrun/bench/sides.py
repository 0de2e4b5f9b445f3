"""What is measured against what: a side is loaded once and passes over the workload as often as asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the workload, from prompt ids to output ids; prefix caches were empty before it."""

    seconds: float
    outputs: Sequence[Sequence[int]]  # generated ids of each prompt, in the workload's order
    peak_bytes: int  # of memory that the side's process has ever held
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))


class Side(Protocol):
    """A program that has loaded the model. ``load_seconds`` include what its first use costs."""

    name: str
    settings: dict[str, Any]
    load_seconds: float

    def run(self) -> Pass:
        """Generate for the whole workload."""
