"""Progress, its estimate of the time left, the summary, and the numbers they print."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import termios
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.observe.progress import Progress, Snapshot, eta_seconds, tokens_left
from batchrun.observe.report import RunReport, summary
from batchrun.text import format_bytes, format_count, format_duration, parse_duration, table


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rows_to_come_are_expected_to_take_what_finished_ones_took() -> None:
    now = Snapshot(rows=10, prompt_tokens=1000, completion_tokens=300, finished_tokens=1000)
    assert tokens_left(now, total_rows=30) == 20 * 100 - 300


def test_the_estimate_begins_with_the_plan_and_moves_to_what_is_seen() -> None:
    assert tokens_left(Snapshot(rows=0), total_rows=10) is None
    assert tokens_left(Snapshot(rows=0), total_rows=10, tokens_per_row=50) == 500
    late = Snapshot(rows=8000, prompt_tokens=8000 * 10, finished_tokens=8000 * 10)
    assert tokens_left(late, total_rows=8010, tokens_per_row=50) == pytest.approx(10 * 10, rel=0.01)


def test_eta_of_nothing_and_of_no_speed() -> None:
    assert eta_seconds(0, 0) == 0
    assert eta_seconds(None, 10) is None
    assert eta_seconds(10, 0) is None
    assert eta_seconds(1000, 50) == 20


def test_the_first_eta_is_the_plans_and_gives_way_to_what_is_seen() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(100, stream=stream, clock=clock) as progress:
        clock.now = 20.0  # the model took so long to load
        progress.expect(tokens_per_row=50, tokens_per_second=100)
        progress.update(Snapshot(rows=0, running=4))
        clock.now = 60.0
        progress.update(Snapshot(rows=10, prompt_tokens=400, finished_tokens=400, running=4))
    first, later = stream.getvalue().splitlines()[:2]
    assert "ETA 50s" in first
    assert " 10+0 tok/s" in later
    assert "ETA 6m" in later


@given(
    rows=st.integers(0, 1000),
    more=st.integers(0, 1000),
    finished=st.integers(0, 10**6),
    started=st.integers(0, 10**6),
    prior=st.none() | st.floats(1, 1e4),
)
def test_tokens_left_is_never_negative_and_ends_at_zero(
    rows: int, more: int, finished: int, started: int, prior: float | None
) -> None:
    now = Snapshot(rows=rows, prompt_tokens=finished + started, finished_tokens=finished)
    left = tokens_left(now, rows + more, prior)
    assert left is None or left >= 0
    assert left != 0 or more == 0
    if more == 0 and left is not None:
        assert left == 0


def test_running_rows_that_outgrow_the_mean_leave_the_time_open() -> None:
    assert tokens_left(Snapshot(rows=9, prompt_tokens=9000, finished_tokens=900), total_rows=10) is None


def test_the_first_tokens_are_no_rate_of_an_instant() -> None:
    stream = io.StringIO()
    with Progress(10, stream=stream, clock=Clock()) as progress:
        progress.update(Snapshot(rows=0, prompt_tokens=500))
    assert " 500+0 tok/s" in stream.getvalue()


def test_lines_without_a_terminal_are_few_and_complete() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(200, rows_before=100, name="demo", stream=stream, clock=clock) as progress:
        for second in range(41):
            clock.now = float(second)
            progress.update(
                Snapshot(
                    rows=second,
                    row_errors=second // 20,
                    prompt_tokens=100 * second,
                    cached_tokens=300 * second,
                    completion_tokens=10 * second,
                    finished_tokens=110 * second,
                    running=4,
                    waiting=9,
                    kv_use=0.5,
                )
            )
    lines = stream.getvalue().splitlines()
    assert [line.split(" rows")[0] for line in lines] == [
        "demo: 100/200",
        "demo: 115/200",
        "demo: 130/200",
        "demo: 140/200",
    ]
    assert lines[-1] == (
        "demo: 140/200 rows (70%), 2 errors, 4.0k+400 tok, 100+10 tok/s, 4 running, 9 waiting, KV 50%, "
        "prefix hits 75%, ETA 1m00s"
    )


def test_drafts_are_shown_while_they_are_verified() -> None:
    clock, stream = Clock(), io.StringIO()
    stats = SpeculationStats()
    with Progress(100, stream=stream, clock=clock) as progress:
        for second in range(0, 181, 15):
            clock.now = float(second)
            if 30 < second <= 60:  # half of the time with drafts, each of which saves as much as it takes
                stats = SpeculationStats(
                    forwards=stats.forwards + 10,
                    tokens=stats.tokens + 31,
                    drafted=[*stats.drafted, 10],
                    accepted=[*stats.accepted, 5],
                    seconds=stats.seconds + 15,
                    seconds_on=stats.seconds_on + 7.5,
                    seconds_plain=stats.seconds_plain + 15,
                )
            progress.update(Snapshot(rows=0, speculation=stats if second else None))
    lines = stream.getvalue().splitlines()
    assert [number for number, line in enumerate(lines) if "drafts" in line] == [3, 4, 5, 6, 7]
    assert "prefix hits 0%, drafts 3.1 tok/forward (1.50x), ETA ?" in lines[4]


def test_rates_are_those_of_the_last_minute() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(10**6, stream=stream, clock=clock)
    tokens = 0
    for second in range(1, 301):
        clock.now = float(second)
        tokens += 1000 if second <= 200 else 10
        progress.update(Snapshot(rows=second, prompt_tokens=tokens, finished_tokens=tokens))
    assert " 10+0 tok/s" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize("columns", [200, 0])
def test_a_terminal_gets_a_bar(columns: int) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with os.fdopen(slave, "w") as stream, Progress(4, name="demo", stream=stream) as progress:
        progress.update(Snapshot(rows=4, completion_tokens=20))
        progress.write("a line")
    shown = ""
    while select.select([master], [], [], 0.5)[0]:  # what a terminal was given comes through in pieces
        try:
            shown += os.read(master, 65536).decode()
        except OSError:  # all of it, and the other end is closed
            break
    os.close(master)
    assert "4/4 rows" in shown
    assert "a line" in shown


def test_an_empty_job_shows_no_division_by_zero() -> None:
    stream = io.StringIO()
    Progress(0, stream=stream).close()
    assert "0/0 rows (100%)" in stream.getvalue()


def test_the_summary_says_what_happened() -> None:
    text = summary(
        RunReport(
            name="demo",
            output="out/demo",
            exit_code=75,
            total_rows=1200,
            ok_rows=1000,
            errors={"prompt_too_long": 2, "missing_value": 3},
            rows_before=400,
            prompt_tokens=6000,
            cached_tokens=2000,
            completion_tokens=1000,
            seconds=100,
        )
    )
    assert text.splitlines() == [
        "demo",
        "  rows    1,200: 1,000 ok, 5 errors (3 missing_value, 2 prompt_too_long), 195 to do; 400 were done before",
        "  tokens  8,000 prompt (25% from the prefix cache) + 1,000 output",
        "  time    1m40s, 60 prompt + 10 output tokens/s",
        "  output  out/demo",
        "  exit    75: stopped early: the same command goes on from here",
    ]


def test_the_summary_says_what_drafts_brought() -> None:
    run = RunReport(name="demo", output="out", exit_code=0, total_rows=5, ok_rows=5, prompt_tokens=10, seconds=10)
    run = replace(run, completion_tokens=462)
    stats = SpeculationStats(100, 231, [100] * 10, [71, 52, *[40] * 8], seconds=10, seconds_on=5, seconds_plain=9)
    drafts = [
        line
        for line in summary(replace(run, speculation=stats)).splitlines()
        if line[2:].startswith(("drafts", "accepted"))
    ]
    assert drafts == [
        "  drafts    2.31 tokens per target forward in 50% of the output; "
        "all in all about 1.40 times as fast as without",
        "  accepted  71%, 52%, 40%, 40%, 40%, 40%, 40%, 40%, ... by position",
    ]
    unused = summary(replace(run, speculation=SpeculationStats(seconds=10)))
    assert "  drafts  not worth it here: none were verified\n" in unused
    assert "drafts" not in summary(run)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), st.integers(0, 5))
def test_what_came_since_is_what_was_added(counts: list[tuple[int, int]], positions: int) -> None:
    def add(a: Sequence[int], b: Sequence[int]) -> list[int]:
        return [x + y for x, y in zip_longest(a, b, fillvalue=0)]

    more = SpeculationStats(3, 7, [d for d, _ in counts], [a for _, a in counts], 3.0, 2.0, 4.0)
    first = SpeculationStats(1, 2, [4] * positions, [1] * positions, 1.0, 0.5, 0.5)
    both = SpeculationStats(4, 9, add(first.drafted, more.drafted), add(first.accepted, more.accepted), 4.0, 2.5, 4.5)
    found = both.since(first)
    assert [*found.drafted][: len(counts)] == more.drafted
    assert not any(found.drafted[len(counts) :])
    assert replace(found, drafted=more.drafted, accepted=more.accepted) == more
    assert (found.speedup, found.tokens_per_forward) == ((3 - 2 + 4) / 3, 7 / 3)


def test_the_summary_of_a_run_that_had_nothing_to_do_is_short() -> None:
    report = RunReport(name="demo", output="out", exit_code=0, total_rows=5, ok_rows=5, rows_before=5, seconds=1)
    assert summary(report).splitlines() == [
        "demo",
        "  rows    5: 5 ok, 0 errors; 5 were done before",
        "  output  out",
        "  exit    0: done",
    ]


def test_numbers_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "7.0 TiB",
    ]
    assert [format_count(n) for n in (0, 999, 1000, 12_345, 4.5e6, 7e9)] == [
        "0",
        "999",
        "1.0k",
        "12.3k",
        "4.5M",
        "7.0G",
    ]
    assert [format_duration(n) for n in (0.2, 59.4, 125, 11_220, 187_300)] == ["0s", "59s", "2m05s", "3h07m", "2d04h"]
    assert table([("a", "bb"), ("ccc", "d")]) == "  a    bb\n  ccc  d"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("15m", 900),
        ("1h30m", 5400),
        ("04:00:00", 14400),
        ("1-00:00:30", 86430),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "5 parsecs", "1h30", "2:30"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)
