"""Several workers on one output: they share its rows, take over from the dead, and give what one worker gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchrun import load_job, run_job
from batchrun.data.records import PARTIALS, SHARES, STOP
from batchrun.data.store import Store
from batchrun.engine.engine import Engine
from batchrun.observe.status import read_status
from tests.jobs import output_rows, write_job, write_rows
from tests.outputs import parts_of
from tests.processes import wait_until_ended
from tests.runs import Run

CHECKPOINT_SECONDS = 0.5
SECTIONS: dict[str, Any] = {
    "model": {"reproducible": True},
    "sampling": {"temperature": 0.8, "ignore_eos": True, "max_tokens": 200},
    "output": {"checkpoint_seconds": CHECKPOINT_SECONDS},
    "engine": {"max_num_seqs": 4, "num_threads": 1},
}
QUICKLY = "engine.max_num_seqs=64"  # which changes no result


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": i, "text": f"row {i}"} for i in range(count)]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, bytes]:
    """The parts of 160 rows in one split, made by one run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_job(load_job(write_job(folder, tiny_model, rows(160), **SECTIONS), [QUICKLY])) == 0
    return parts_of(folder)


@pytest.mark.slow
def test_two_runs_share_the_one_split_of_a_job(tmp_path: Path, tiny_model: Path, whole: dict[str, bytes]) -> None:
    job = write_job(tmp_path, tiny_model, rows(160), **SECTIONS)
    with Run(job, tmp_path / "one") as first:
        wait_for(lambda: first.decoded() > 0)
        with Run(job, tmp_path / "two") as second:
            assert second.wait() == 0
            assert first.wait() == 0
    assert parts_of(tmp_path) == whole
    assert second.decoded() > 0
    assert first.decoded() + second.decoded() == 160 * 200, "a token was decoded twice"


@pytest.mark.slow
def test_of_two_local_workers_one_is_killed_and_the_other_finishes(
    tmp_path: Path, tiny_model: Path, whole: dict[str, bytes]
) -> None:
    job = write_job(tmp_path, tiny_model, rows(160), **SECTIONS)
    with Run(job, tmp_path / "one") as first, Run(job, tmp_path / "two") as second:
        wait_for(lambda: first.decoded() > 1000 and second.decoded() > 1000)
        killed = first.kill()
        assert second.wait() == 0
    assert parts_of(tmp_path) == whole
    again = first.decoded() + second.decoded() - 160 * 200
    assert 0 <= again <= first.may_lose(killed, CHECKPOINT_SECONDS)


@pytest.mark.slow
def test_six_workers_come_and_go(tmp_path: Path, tiny_model: Path) -> None:
    sections = SECTIONS | {"input": {"split_rows": 7}}
    (tmp_path / "whole").mkdir()
    assert run_job(load_job(write_job(tmp_path / "whole", tiny_model, rows(240), **sections), [QUICKLY])) == 0
    job = write_job(tmp_path, tiny_model, rows(240), **sections)
    for number in range(3):
        with Run(job, tmp_path / f"a{number}") as one, Run(job, tmp_path / f"b{number}") as other:
            wait_for(lambda one=one, other=other: one.decoded() + other.decoded() > 500)  # type: ignore[misc]
            one.kill()
            os.kill(other.process.pid or 0, signal.SIGTERM)
            assert other.wait() == 75
    quickly = ("--set", QUICKLY)
    with Run(job, tmp_path / "c", *quickly) as one, Run(job, tmp_path / "d", *quickly) as other:
        assert (one.wait(), other.wait()) == (0, 0)
    assert min(one.decoded(), other.decoded()) > 0
    assert parts_of(tmp_path) == parts_of(tmp_path / "whole")
    assert not Store(str(tmp_path / "out")).names(SHARES)


def test_a_request_to_stop_ends_every_worker(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, rows(160), **SECTIONS)
    store = Store(str(tmp_path / "out"))
    store.put(STOP, b"an old one")
    with Run(job, tmp_path / "one") as run:
        wait_for(lambda: run.decoded() > 0)
        store.put(STOP, b"a new one")
        assert run.wait() == 75
    assert read_status(str(job)).state == "stopped"


# ---- workers that one command starts

POISON = """
import os
from batchrun.engine.engine import Engine
add = Engine.add
def poisoned(self, request):
    if request.key[1] == {row}:
        os.kill(os.getpid(), 9)
    add(self, request)
Engine.add = poisoned
"""


def workers_command(job: Path) -> list[str]:
    return [sys.executable, "-m", "batchrun", "submit", str(job), "--workers", "2"]


def run_workers(job: Path, *, inject: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PYTHONPATH": os.pathsep.join([str(inject), *sys.path])} if inject else {})
    command = workers_command(job)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


@pytest.mark.slow
def test_local_workers_do_a_job_together(tmp_path: Path, tiny_model: Path, whole: dict[str, bytes]) -> None:
    job = write_job(tmp_path, tiny_model, rows(160), **SECTIONS)
    done = run_workers(job)
    assert done.returncode == 0, done.stderr
    assert parts_of(tmp_path) == whole
    assert "worker 1: " in done.stderr
    assert "worker 2: " in done.stderr
    assert run_workers(job).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_stop_with_their_supervisor(
    tmp_path: Path, tiny_model: Path, whole: dict[str, bytes], number: signal.Signals
) -> None:
    job = write_job(tmp_path, tiny_model, rows(160), **SECTIONS)
    with subprocess.Popen(workers_command(job), stderr=subprocess.PIPE, text=True) as supervisor:
        wait_for(lambda: len(list((tmp_path / "out" / PARTIALS).glob("*"))) == 2)  # both have begun
        workers = psutil.Process(supervisor.pid).children(recursive=True)
        supervisor.send_signal(number)
        assert supervisor.wait() == (75 if number == signal.SIGTERM else -number)
    wait_until_ended(workers, 30)
    status = read_status(str(job))
    assert (status.state, status.workers) == ("stopped", [])
    assert run_job(load_job(job, [QUICKLY])) == 0
    assert parts_of(tmp_path) == whole


@pytest.mark.slow
def test_a_row_that_kills_its_worker_becomes_an_error(tmp_path: Path, tiny_model: Path) -> None:
    inject = tmp_path / "inject"
    inject.mkdir()
    (inject / "sitecustomize.py").write_text(POISON.format(row=33))
    job = write_job(tmp_path, tiny_model, rows(100), **SECTIONS | {"sampling": {"max_tokens": 2}})
    done = run_workers(job, inject=inject)
    assert done.returncode == 3, done.stderr
    found = output_rows(tmp_path)
    assert [row["id"] for row in found] == list(range(100))
    assert [row["id"] for row in found if row["error"]] == [32]
    assert found[32]["error"].startswith("worker_died: ")
    assert done.stderr.count("was killed by SIGKILL: it is started again") <= 8


@pytest.mark.slow
def test_a_row_that_gets_on_is_not_what_kills_its_worker(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, rows(1), **SECTIONS | {"output": {"checkpoint_seconds": 60}})
    for number in range(6):
        with Run(job, tmp_path / f"{number}", "--set", "sampling.max_tokens=480") as run:
            wait_for(lambda run=run: run.decoded() > 60)  # type: ignore[misc]
            run.kill()
    with Run(job, tmp_path / "last", "--set", "sampling.max_tokens=480") as last:
        assert last.wait() == 0
    assert last.decoded() > 0


def test_a_job_that_is_wrong_ends_all_workers(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, rows(4), prompt={"template": "{{ nothing }}"})
    done = run_workers(job)
    assert (done.returncode, done.stderr.count("column 'nothing' is not in the input")) == (2, 1)


# ---- what came or changed since


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The unit and row of every request that is made of an engine."""
    keys: list[tuple[str, int]] = []
    original = Engine.add

    def add(self: Engine, request: Any) -> None:
        keys.append(request.key)
        original(self, request)

    monkeypatch.setattr(Engine, "add", add)
    return keys


def test_only_new_and_changed_files_are_run(tmp_path: Path, tiny_model: Path, asked: list[tuple[str, int]]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("b", "c", "d"):
        write_rows(folder / f"{name}.jsonl", [{"id": f"{name}{i}", "text": name} for i in range(3)])
    job = write_job(tmp_path, tiny_model, [], input={"path": str(folder)}, sampling={"max_tokens": 2})
    assert run_job(load_job(job)) == 0
    write_rows(folder / "a.jsonl", [{"id": "a0", "text": "a"}])
    write_rows(folder / "c.jsonl", [{"id": f"c{i}", "text": "changed"} for i in range(2)])
    (folder / "d.jsonl").unlink()
    asked.clear()
    assert run_job(load_job(job)) == 0
    assert len(asked) == 3
    ids = sorted(row["id"] for row in output_rows(tmp_path))
    assert ids == ["a0", "b0", "b1", "b2", "c0", "c1", "d0", "d1", "d2"]
    asked.clear()
    assert run_job(load_job(job)) == 0
    assert asked == []


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_truncated_rows_are_run_again(
    tmp_path: Path, tiny_model: Path, asked: list[tuple[str, int]], form: str
) -> None:
    limits = [
        {"id": i, "text": f"row {i}", "params": {"max_tokens": 3} if i % 3 else {"stop": ["e", "a", " "]}}
        for i in range(12)
    ]
    sampling = {"max_tokens": 40, "temperature": 0.8, "from_column": "params"}
    job = write_job(tmp_path, tiny_model, limits, sampling=sampling, output={"format": form})
    assert run_job(load_job(job)) == 0
    before = output_rows(tmp_path)
    truncated = [row["id"] for row in before if row["finish_reason"] == "length"]
    assert 0 < len(truncated) < 12
    asked.clear()
    assert run_job(load_job(job, ["sampling.max_tokens=50"]), rerun=("truncated",)) == 0
    assert sorted(row for _, row in asked) == [row + 1 for row in truncated]
    after = output_rows(tmp_path)
    for was, now in zip(before, after, strict=True):
        if was["id"] in truncated:
            assert now["rerun_max_tokens"] == 50
            assert now["generated_text"].startswith(was["generated_text"].rstrip("\ufffd"))
            assert now["completion_tokens"] > was["completion_tokens"]
        else:
            assert now.pop("rerun_max_tokens") is None
            assert now == was
    asked.clear()
    assert run_job(load_job(job)) == 0
    assert asked == []


# ---- told to stop


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "time"])
def test_local_workers_that_are_told_to_stop_are_not_started_again(tmp_path: Path, tiny_model: Path, how: str) -> None:
    job = write_job(tmp_path, tiny_model, rows(160), **SECTIONS)
    options = ["--max-time", "4"] if how == "time" else []
    with subprocess.Popen([*workers_command(job), *options], stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stderr is not None
        if how == "cancel":
            wait_for(lambda: len(list((tmp_path / "out" / PARTIALS).glob("*"))) == 2)
            Store(str(tmp_path / "out")).put(STOP, b"now")
        said = supervisor.stderr.read()
        assert supervisor.wait() == 75, said
    assert "started again" not in said
    assert read_status(str(job)).state == "stopped"


@pytest.mark.slow
def test_local_workers_run_truncated_rows_again(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, rows(12), sampling={"max_tokens": 3, "ignore_eos": True, "temperature": 0})
    assert run_workers(job).returncode == 0
    command = [*workers_command(job), "--rerun", "truncated", "--set", "sampling.max_tokens=5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {(row["completion_tokens"], row["rerun_max_tokens"]) for row in output_rows(tmp_path)} == {(5, 5)}
