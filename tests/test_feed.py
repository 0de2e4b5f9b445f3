"""Prompts from the child process: what arrives, in which order, and what happens when either process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchrun.data.feed import Feed, FeedError, Order, Window
from batchrun.data.rows import PreparedRow, Split
from batchrun.data.source import Source
from batchrun.errors import StoppedError
from batchrun.job import InputSpec, PromptSpec, SamplingSpec
from batchrun.model_files import ModelFiles, resolve
from tests.processes import wait_until_ended


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelFiles:
    return resolve(str(tiny_model))


def write(path: Path, count: int) -> InputSpec:
    path.write_text("".join(json.dumps({"n": n, "text": f"{n % 7} rows"}) + "\n" for n in range(count)))
    return InputSpec(path=str(path), split_rows=1500)


def splits_of(spec: InputSpec) -> list[Split]:
    source = Source(spec)
    return source.splits(source.files())


def feed_of(spec: InputSpec, model: ModelFiles, **prompt: Any) -> Feed:
    return Feed(spec, PromptSpec(**(prompt or {"template": "{{ text }}"})), SamplingSpec(), model, 512)


def order_of(split: Split, skip: Iterable[int] = (), only: Iterable[int] | None = None) -> Order:
    return Order(str(split.number), split, None if only is None else frozenset(only), frozenset(skip))


def order(rows: list[PreparedRow]) -> list[tuple[list[int], int]]:
    return [(list(row.token_ids), row.row) for row in rows]


def test_windows_hold_every_row_once_in_prefix_order(tmp_path: Path, model: ModelFiles) -> None:
    spec = write(tmp_path / "a.jsonl", 4000)
    splits = splits_of(spec)
    skip = {2, 3, 1400}
    with feed_of(spec, model) as feed:
        assert feed.poll(10) is None
        for split in splits:
            feed.request(order_of(split, skip if split.number == 0 else ()))
        windows = list(feed)
        assert feed.poll(None) is None
        feed.request(order_of(splits[2]))  # it goes on after all was delivered
        again = list(feed)
    assert [window.name for window in windows if window.last] == ["0", "1", "2"]
    assert [window.name for window in windows] == sorted(window.name for window in windows)
    assert [len(window.rows) for window in windows][:2] == [256, 1024]
    for window in windows:
        assert order(window.rows) == sorted(order(window.rows))
    rows = [row.row for window in windows for row in window.rows]
    assert sorted(rows) == sorted(set(range(1, 4001)) - skip)
    assert sum(len(window.rows) for window in again) == 1000
    assert all(row.error is None and row.params is not None for window in windows for row in window.rows)


def test_an_empty_rest_still_ends_its_split(tmp_path: Path, model: ModelFiles) -> None:
    spec = write(tmp_path / "a.jsonl", 3)
    (split,) = splits_of(spec)
    with feed_of(spec, model) as feed:
        feed.request(order_of(split, {1, 2, 3}))
        assert list(feed) == [Window("0", [], last=True)]


def test_row_errors_arrive_with_the_rows(tmp_path: Path, model: ModelFiles) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nbad\n{}\n')
    spec = InputSpec(path=str(tmp_path / "a.jsonl"))
    with feed_of(spec, model) as feed:
        feed.request(order_of(splits_of(spec)[0]))
        (window,) = feed
    errors = {row.row: row.error for row in window.rows}
    assert errors[1] is None
    assert str(errors[2]).startswith("unreadable_row: a.jsonl line 2")
    assert str(errors[3]).startswith("missing_value: ")


def test_requests_larger_than_a_pipe_never_block(tmp_path: Path, model: ModelFiles) -> None:
    spec = write(tmp_path / "a.jsonl", 20)
    (split,) = splits_of(spec)
    with feed_of(spec, model) as feed:
        for _ in range(20):
            feed.request(order_of(split, range(10**9, 10**9 + 50_000)))
        assert sum(len(window.rows) for window in feed) == 400


def test_an_error_of_the_job_is_raised_here(tmp_path: Path, model: ModelFiles) -> None:
    spec = write(tmp_path / "a.jsonl", 3)
    (split,) = splits_of(spec)
    (tmp_path / "a.jsonl").write_text("{}\n")
    with feed_of(spec, model) as feed:
        feed.request(order_of(split))
        with pytest.raises(StoppedError, match=r"a\.jsonl changed while the job ran"):
            list(feed)


def test_input_that_is_gone_is_told_in_one_line(tmp_path: Path, model: ModelFiles) -> None:
    spec = write(tmp_path / "a.jsonl", 3)
    (split,) = splits_of(spec)
    (tmp_path / "a.jsonl").unlink()
    with feed_of(spec, model) as feed:
        feed.request(order_of(split))
        with pytest.raises(
            FeedError, match=r"^the input can no longer be read: .*a\.jsonl.*; what is finished is kept"
        ):
            list(feed)


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGKILL, r"killed by SIGKILL \(out of memory\?\)"), (signal.SIGSEGV, "killed by SIGSEGV")],
)
def test_a_child_that_is_killed_is_told_with_its_signal(
    tmp_path: Path, model: ModelFiles, number: signal.Signals, text: str
) -> None:
    spec = write(tmp_path / "a.jsonl", 4000)
    with feed_of(spec, model) as feed:
        for split in splits_of(spec):
            feed.request(order_of(split))
        assert feed.poll(60) is not None
        os.kill(feed.process_id, number)
        with pytest.raises(StoppedError, match=text):
            list(feed)


def test_signals_to_stop_are_left_to_the_parent(tmp_path: Path, model: ModelFiles) -> None:
    spec = write(tmp_path / "a.jsonl", 4000)
    with feed_of(spec, model) as feed:
        for split in splits_of(spec):
            feed.request(order_of(split))
        first = feed.poll(60)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(feed.process_id, number)
        assert first is not None
        assert len(first.rows) + sum(len(window.rows) for window in feed) == 4000


def test_closing_in_the_middle_ends_the_child(tmp_path: Path, model: ModelFiles) -> None:
    spec = write(tmp_path / "a.jsonl", 4000)
    with feed_of(spec, model) as feed:
        child = psutil.Process(feed.process_id)
        for split in splits_of(spec):
            feed.request(order_of(split))
        assert feed.poll(60) is not None
    assert not child.is_running()


PARENT = """
import sys, time
from batchrun.data.feed import Feed, Order
from batchrun.data.source import Source
from batchrun.job import InputSpec, PromptSpec, SamplingSpec
from batchrun.model_files import resolve
import torch  # the child must not have it, even so

spec = InputSpec(path=sys.argv[1], split_rows=1500)
source = Source(spec)
feed = Feed(spec, PromptSpec(template="{{ text }}"), SamplingSpec(), resolve(sys.argv[2]), 512)
for split in source.splits(source.files()):
    feed.request(Order(str(split.number), split))
feed.poll(60)
print(feed.process_id, flush=True)
time.sleep(60)
"""


def test_the_child_has_no_torch_and_ends_with_a_killed_parent(tmp_path: Path, tiny_model: Path) -> None:
    write(tmp_path / "a.jsonl", 4000)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "a.jsonl"), str(tiny_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert not [library.path for library in child.memory_maps() if "libtorch" in library.path]
        assert child.memory_info().rss < 300 << 20
        parent.kill()
    wait_until_ended([child], 10)
