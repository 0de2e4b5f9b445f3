"""The summary that a run ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.errors import EXIT_OK, EXIT_ROW_ERRORS, EXIT_STOPPED, EXIT_THRESHOLD
from batchrun.text import format_duration, table

_SHOWN_POSITIONS = 8
_MEANINGS = {
    EXIT_OK: "done",
    EXIT_ROW_ERRORS: "finished with error rows: `batchrun results --where error` shows them",
    EXIT_THRESHOLD: "more rows failed than errors.error_threshold allows",
    EXIT_STOPPED: "stopped early: the same command goes on from here",
}


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did. Rows are those of the whole job; tokens and seconds are those of this run."""

    name: str
    output: str
    exit_code: int
    total_rows: int
    ok_rows: int
    errors: Mapping[str, int] = field(default_factory=dict)  # kind of row error -> rows
    rows_before: int = 0  # finished by earlier runs
    rows_by_others: int = 0  # finished meanwhile by other workers
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # taken from the prefix cache
    completion_tokens: int = 0
    seconds: float = 0.0
    speculation: SpeculationStats | None = None  # None: off, or nothing was run


def summary(report: RunReport) -> str:
    """A few readable lines: rows, errors by kind, tokens, speed, where the results lie, what the exit code means."""
    failed = sum(report.errors.values())
    rows = f"{report.total_rows:,}: {report.ok_rows:,} ok, {failed:,} errors"
    if report.errors:
        rows += " (" + ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.errors.items())) + ")"
    if left := report.total_rows - report.ok_rows - failed - report.rows_by_others * (report.exit_code == EXIT_STOPPED):
        rows += f", {left:,} to do"
    if report.rows_before:
        rows += f"; {report.rows_before:,} were done before"
    if report.rows_by_others:
        rows += f"; {report.rows_by_others:,} by other workers meanwhile"
    prompt = report.prompt_tokens + report.cached_tokens
    hits = report.cached_tokens / max(1, prompt)
    seconds = max(report.seconds, 1e-9)
    speed = f"{report.prompt_tokens / seconds:,.0f} prompt + {report.completion_tokens / seconds:,.0f} output tokens/s"
    lines = [("rows", rows)]
    if prompt:
        tokens = f"{prompt:,} prompt ({hits:.0%} from the prefix cache) + {report.completion_tokens:,} output"
        lines += [("tokens", tokens), ("time", f"{format_duration(report.seconds)}, {speed}")]
    if prompt and report.speculation is not None:
        lines += _drafts(report.speculation, report.completion_tokens)
    lines += [
        ("output", report.output),
        ("exit", f"{report.exit_code}: {_MEANINGS.get(report.exit_code, 'failed')}"),
    ]
    return f"{report.name}\n{table(lines)}"


def _drafts(stats: SpeculationStats, output_tokens: int) -> list[tuple[str, str]]:
    """What speculation brought: tokens of a forward pass where it gives one without, acceptance, and time."""
    if stats.tokens_per_forward is None:
        return [("drafts", "not worth it here: none were verified")]
    shares = [f"{share:.0%}" for share in stats.acceptance]
    accepted = ", ".join([*shares[:_SHOWN_POSITIONS], *(["..."] if len(shares) > _SHOWN_POSITIONS else [])])
    gain = f"{stats.tokens_per_forward:.2f} tokens per target forward in {stats.tokens / max(1, output_tokens):.0%} of "
    speed = f"the output; all in all about {stats.speedup:.2f} times as fast as without"
    return [("drafts", gain + speed), ("accepted", f"{accepted} by position")]
