"""What passes amount to: medians of each side, the ratio of paired passes with its interval, as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from statistics import median
from typing import Any

from batchrun.bench.sides import Pass, Side
from batchrun.bench.workload import Workload
from batchrun.text import table

_CONFIDENCE = 0.95
_FIRST_TOKENS = 4


def median_interval(values: Sequence[float], confidence: float = _CONFIDENCE) -> tuple[float, float] | None:
    """The narrowest pair of order statistics that holds the median of what ``values`` are drawn from.

    Exact for independent values of any distribution: the number of values below the median is binomial. None where
    even the smallest and the largest value hold it with less than ``confidence``.
    """
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0  # the chance that the median lies below the `rank`-th smallest, doubled
    while rank < n // 2 and 1 - (outside + 2 * comb(n, rank) / 2**n) >= confidence:
        outside += 2 * comb(n, rank) / 2**n
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


@dataclass(slots=True)
class Measured:
    """One side and its passes over a workload."""

    side: Side
    passes: list[Pass] = field(default_factory=list)

    def rates(self, *, load: bool = False) -> list[float]:
        """Output tokens per second of each pass; with ``load``, as if the model had been loaded for it alone."""
        extra = self.side.load_seconds if load else 0.0
        return [each.output_tokens / (each.seconds + extra) for each in self.passes]

    def summary(self, workload: Workload) -> dict[str, Any]:
        total = 1 + workload.prompt_tokens / workload.output_tokens  # tokens computed for each output token
        return {
            "name": self.side.name,
            "output_rate": median(self.rates()),
            "total_rate": median(self.rates()) * total,
            "output_rate_with_load": median(self.rates(load=True)),
            "total_rate_with_load": median(self.rates(load=True)) * total,
            "load_seconds": self.side.load_seconds,
            "seconds": median(each.seconds for each in self.passes),
            "peak_bytes": max(each.peak_bytes for each in self.passes),
            "settings": self.side.settings,
            "passes": [_pass_summary(each) for each in self.passes],
        }


def _pass_summary(each: Pass) -> dict[str, Any]:
    figures = asdict(each)
    del figures["outputs"]
    return figures | {"output_tokens": each.output_tokens, "output_rate": each.output_tokens / each.seconds}


@dataclass(slots=True)
class Report:
    """A whole measurement: batchrun first, then the peer if one was measured, pass for pass beside it."""

    workload: Workload
    measured: list[Measured]
    notes: list[str] = field(default_factory=list)
    breakdown: Mapping[str, float] | None = None

    def to_json(self) -> str:
        return json.dumps(
            {
                "workload": self.workload.summary(),
                "sides": [each.summary(self.workload) for each in self.measured],
                "ratio": self.ratio(),
                "breakdown": self.breakdown,
                "notes": self.notes,
            },
            indent=2,
        )

    def describe(self) -> str:
        return "\n".join([self._sides(), "", table(self._lines()), *(f"  {note}" for note in self.notes)])

    def ratio(self) -> dict[str, Any] | None:
        """batchrun's output tokens per second over the peer's, of the pairs of passes that both finished."""
        if len(self.measured) < 2:
            return None
        ours, theirs = self.measured
        pairs = [a / b for a, b in zip(ours.rates(), theirs.rates(), strict=False)]
        loaded = [a / b for a, b in zip(ours.rates(load=True), theirs.rates(load=True), strict=False)]
        return {
            "median": median(pairs),
            "interval": median_interval(pairs),
            "confidence": _CONFIDENCE,
            "pairs": pairs,
            "median_with_load": median(loaded),
            "same_beginnings": self._same_beginnings() if self.workload.temperature == 0 else None,
        }

    def _same_beginnings(self) -> float:
        """The share of prompts whose first output ids are the same on both sides; near-ties part the rest."""
        ours, theirs = (each.passes[0].outputs for each in self.measured)
        same = [[*a[:_FIRST_TOKENS]] == [*b[:_FIRST_TOKENS]] for a, b in zip(ours, theirs, strict=True)]
        return sum(same) / len(same)

    def _sides(self) -> str:
        head = ("", "output tok/s", "total tok/s", "output, with load", "load s", "pass s", "peak GB")
        rows = [head]
        for each in self.measured:
            s = each.summary(self.workload)
            figures = (s["output_rate"], s["total_rate"], s["output_rate_with_load"], s["load_seconds"], s["seconds"])
            rows.append((s["name"], *(f"{figure:,.1f}" for figure in figures), f"{s['peak_bytes'] / 1e9:.2f}"))
        return table(rows)

    def _lines(self) -> list[tuple[str, str]]:
        workload = self.workload
        rows = (
            f"{len(workload.prompts):,} rows, {workload.prompt_tokens:,} prompt and {workload.output_tokens:,} output"
        )
        drawn = f"temperature {workload.temperature:g}, top_p {workload.top_p:g}" if workload.temperature else "greedy"
        lines = [("workload", f"{rows} tokens, {drawn}")]
        lines += [
            (each.side.name, ", ".join(f"{name} {value}" for name, value in each.side.settings.items()))
            for each in self.measured
        ]
        if ratio := self.ratio():
            n = len(ratio["pairs"])
            held = "too few for a 95% interval"
            if ratio["interval"]:
                held = "95% interval {:.2f}x to {:.2f}x".format(*ratio["interval"])
            lines.append(
                ("ratio", f"{ratio['median']:.2f}x (median of {n}, {held}); {ratio['median_with_load']:.2f}x with load")
            )
            if ratio["same_beginnings"] is not None:
                lines.append(("same text", f"first {_FIRST_TOKENS} tokens in {ratio['same_beginnings']:.0%} of rows"))
        if self.breakdown:
            lines.append(("breakdown", ", ".join(f"{part} {share:.1%}" for part, share in self.breakdown.items())))
        return lines
