"""Jobs from end to end: what comes out, what a stop costs, what is refused, and with which exit code it ends.

Requests are counted where the engine is asked for them, so that "never computed again" is seen and not inferred.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batchrun import Engine, SamplingParams, load_job, run_job
from batchrun.cli import main
from batchrun.data.lease import HeldError, Lease, take
from batchrun.data.records import MANIFEST_COPY
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.data.store import StorageError, Store
from batchrun.data.view import OutputView
from batchrun.data.workers import Worker
from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.errors import JobError, ThresholdError
from batchrun.loop import Loop
from batchrun.observe.status import read_status
from tests.jobs import output_rows, write_job, write_rows
from tests.outputs import parts_of
from tests.processes import wait_until_ended

ROWS = [{"id": f"r{i}", "text": f"row {i}", "n": i} for i in range(12)]
GREEDY = {"temperature": 0, "max_tokens": 8}
LONG: dict[str, Any] = {  # a job whose rows are long enough to be stopped in, and whose parts are the same bytes always
    "model": {"reproducible": True, "dtype": "float32"},
    "input": {"split_rows": 5},
    "sampling": {"temperature": 0.8, "max_tokens": 32, "ignore_eos": True, "logprobs": 1},
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(str(tiny_model), dtype="float32")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, bytes]:
    """The parts of the LONG job over ROWS, run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    assert submit(write_job(folder, tiny_model, ROWS, **LONG)) == 0
    return parts_of(folder)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Key, and number of tokens from earlier runs, of every request that jobs make of their engines."""
    requests: list[tuple[Any, int]] = []
    original = Engine.request

    def request(self: Engine, key: Any, prompt: Any, params: Any, noise: int, output_ids: Any = ()) -> Any:
        requests.append((key, len(output_ids)))
        return original(self, key, prompt, params, noise, output_ids)

    monkeypatch.setattr(Engine, "request", request)
    return requests


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each run's engine had generated when it was closed."""
    tokens: list[int] = []
    original = Engine.close

    def close(self: Engine) -> None:
        original(self)
        tokens.append(self.stats().output_tokens)

    monkeypatch.setattr(Engine, "close", close)
    return tokens


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Any) -> None:
    """Do something before the ``number``-th step of the engines from now on."""
    steps = itertools.count(1)
    original = Engine.step

    def step(self: Engine) -> Any:
        if next(steps) == number:
            action()
        return original(self)

    monkeypatch.setattr(Engine, "step", step)


def send(number: int) -> Any:
    return lambda: os.kill(os.getpid(), number)


def submit(job: Path, *overrides: str, **options: Any) -> int:
    return run_job(load_job(job, overrides), **options)


def texts(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["generated_text"] for row in rows]


# ---- what comes out


@pytest.mark.parametrize("output", ["parquet", "jsonl"])
@pytest.mark.parametrize("given", ["parquet", "jsonl"])
def test_results_are_those_of_the_engine(
    tmp_path: Path, tiny_model: Path, engine: Engine, given: str, output: str
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, model={"dtype": "float32"}, sampling=GREEDY, output={"format": output})
    if given == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=5)
    assert submit(job, f"input.path={tmp_path}/rows.{given}") == 0

    expected = {r.index: r for r in engine.generate([f"Say {row['text']}" for row in ROWS], SamplingParams(**GREEDY))}
    for index, (row, record) in enumerate(zip(ROWS, output_rows(tmp_path), strict=True)):
        result = expected[index]
        assert record == row | {
            "custom_id": row["id"],
            "generated_text": result.text,
            "finish_reason": result.finish_reason,
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(result.token_ids),
            "error": None,
        }


def test_every_prompt_form_reaches_the_engine_as_its_own(tmp_path: Path, tiny_model: Path, engine: Engine) -> None:
    messages = [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": row["text"]}] for row in ROWS]
    ids = [list(f"Say {row['text']}".encode()) for row in ROWS]
    rows = [row | {"messages": m, "ids": i} for row, m, i in zip(ROWS, messages, ids, strict=True)]
    templates = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "{{ text }}"}]
    forms: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "messages": ({"messages": templates}, messages),
        "messages_column": ({"messages_column": "messages"}, messages),
        "token_ids_column": ({"token_ids_column": "ids"}, ids),
    }
    for name, (prompt, prompts) in forms.items():
        folder = tmp_path / name
        folder.mkdir()
        job = write_job(folder, tiny_model, rows, model={"dtype": "float32"}, prompt=prompt, sampling=GREEDY)
        assert submit(job) == 0
        expected = {result.index: result.text for result in engine.generate(prompts, SamplingParams(**GREEDY))}
        assert texts(output_rows(folder)) == [expected[i] for i in range(len(ROWS))]


def test_files_and_splits_come_out_in_input_order(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_rows(folder / "a.jsonl", ROWS[:5])
    write_rows(folder / "b.jsonl", [ROWS[5], "", "{broken", ROWS[6]])
    write_rows(folder / "c.jsonl", [])
    pq.write_table(pa.Table.from_pylist(ROWS[7:]), folder / "d.parquet")
    job = write_job(tmp_path, tiny_model, [], input={"path": str(folder), "split_rows": 3}, sampling=GREEDY)
    assert submit(job) == 3
    ids = [row["custom_id"] for row in output_rows(tmp_path)]
    assert ids == [*(f"r{i}" for i in range(6)), "b.jsonl:3", *(f"r{i}" for i in range(6, 12))]
    assert [len(pq.read_table(tmp_path / "out" / name)) for name in parts_of(tmp_path)] == [3, 2, 2, 1, 3, 2]


def test_columns_are_chosen_and_renamed(tmp_path: Path, tiny_model: Path) -> None:
    output = {"keep_columns": ["n"], "columns": {"generated_text": "label", "error": "why"}}
    assert submit(write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY, output=output)) == 0
    columns = ["n", "custom_id", "label", "finish_reason", "prompt_tokens", "completion_tokens", "why"]
    assert [list(row) for row in output_rows(tmp_path)] == [columns] * len(ROWS)


def test_an_input_without_rows_is_a_valid_output_and_loads_no_model(
    tmp_path: Path, tiny_model: Path, decoded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(write_job(tmp_path, tiny_model, [])) == 0
    assert "job: there are no rows to run" in capsys.readouterr().err
    assert output_rows(tmp_path) == []
    (part,) = parts_of(tmp_path)
    assert "generated_text" in pq.read_schema(tmp_path / "out" / part).names
    assert decoded == []


# ---- stopping and going on


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_loses_nothing_and_repeats_nothing(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[Any, int]],
    decoded: list[int],
    whole: dict[str, bytes],
    number: int,
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG)
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(patch, 25, send(number))
        assert submit(job) == 75
    assert signal.getsignal(number) is handler
    begun = OutputView.at(str(tmp_path / "out")).partials()  # type: ignore[union-attr]
    assert begun
    stopped_at = len(asked)
    assert submit(job) == 0
    assert {(int(unit), row) for (unit, row), earlier in asked[stopped_at:] if earlier} == set(begun)
    assert sum(decoded) == sum(row["completion_tokens"] for row in output_rows(tmp_path))
    assert parts_of(tmp_path) == whole


def test_error_rows_of_earlier_runs_are_told_as_such(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row | {"text": None} if row["n"] % 2 else row for row in ROWS]
    job = write_job(tmp_path, tiny_model, rows, **LONG)
    for step in (20, 5):
        with monkeypatch.context() as patch:
            at_step(patch, step, send(signal.SIGTERM))
            assert submit(job) == 75
    assert "12: 0 ok, 6 errors (6 in other runs), 6 to do; 6 were done before" in capsys.readouterr().err


def test_a_run_says_what_drafts_brought(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG)
    for stats, lines in (
        (SpeculationStats(4, 10, [4, 4], [4, 2], 9.0, 3.0, 6.0), ["2.50 tokens per target forward", "100%, 50% by"]),
        (SpeculationStats(), ["drafts  not worth it here"]),
        (None, []),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "speculation_stats", lambda _, stats=stats: stats)
            assert submit(job, overwrite=True) == 0
        told = capsys.readouterr().err
        assert all(line in told for line in lines)
        assert bool(lines) == ("  drafts  " in told)


def test_a_second_ctrl_c_does_not_wait(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG)

    def twice() -> None:
        send(signal.SIGINT)()
        send(signal.SIGINT)()

    with monkeypatch.context() as patch:
        at_step(patch, 10, twice)
        with pytest.raises(KeyboardInterrupt):
            submit(job)
    assert read_status(str(job)).workers == []
    assert submit(job) == 0
    assert parts_of(tmp_path) == whole


def test_a_job_may_run_in_any_thread(tmp_path: Path, tiny_model: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(submit, write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY)).result() == 0


def test_engine_settings_may_change_in_between(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG)
    for step, overrides in ((20, []), (15, ["engine.max_num_seqs=2", "engine.block_size=16"])):
        with monkeypatch.context() as patch:
            at_step(patch, step, send(signal.SIGTERM))
            assert submit(job, *overrides) == 75
    last = ["engine.enable_prefix_caching=false", "engine.max_num_batched_tokens=16", "engine.max_num_seqs=16"]
    assert submit(job, *last, "output.checkpoint_seconds=0.01", "errors.error_threshold=0") == 0
    assert parts_of(tmp_path) == whole


def test_max_time_stops_and_goes_on(tmp_path: Path, tiny_model: Path, whole: dict[str, bytes]) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG)
    codes = [submit(job, max_time=0.0)]
    while codes[-1] == 75:
        codes.append(submit(job, max_time=0.5 + 0.5 * len(codes)))
    assert codes[-1] == 0
    assert parts_of(tmp_path) == whole


def test_a_signal_from_outside_exits_75(tmp_path: Path, tiny_model: Path) -> None:
    sections = LONG | {"sampling": LONG["sampling"] | {"max_tokens": 400}, "output": {"checkpoint_seconds": 0.1}}
    job = write_job(tmp_path, tiny_model, ROWS * 5, **sections)
    command = [sys.executable, "-m", "batchrun", "submit", str(job)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list((tmp_path / "out" / "_batchrun" / "partials").glob("*.parquet")):
            assert process.poll() is None
            time.sleep(0.05)
        feeds = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "stopping (SIGTERM)" in told
    assert "the same command goes on from here" in told
    wait_until_ended(feeds, 10)
    status = read_status(str(job))
    assert (status.state, status.workers) == ("stopped", [])


def test_a_limit_may_be_raised_and_dropped(tmp_path: Path, tiny_model: Path, asked: list[tuple[Any, int]]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_rows(folder / "a.jsonl", ROWS[:7])
    write_rows(folder / "b.jsonl", ROWS[7:])
    job = write_job(tmp_path, tiny_model, [], input={"path": str(folder), "split_rows": 4}, sampling=GREEDY)
    before: dict[str, bytes] = {}
    for limit, expected in ((2, 2), (1, 2), (5, 5), (5, 5), (None, 12)):
        assert submit(job, limit=limit) == 0
        assert [row["custom_id"] for row in output_rows(tmp_path)] == [f"r{i}" for i in range(expected)]
        assert before.items() <= parts_of(tmp_path).items()
        before = parts_of(tmp_path)
    keys = [key for key, _ in asked]
    assert len(keys) == len(set(keys)) == len(ROWS)


def test_a_limit_below_what_was_begun_and_is_not_finished_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY)
    assert submit(job, limit=9, max_time=0) == 75
    with pytest.raises(JobError, match=r"--limit 3: .*/out was begun with 9 rows, .* give --limit 9 or more"):
        submit(job, limit=3)


def test_a_limit_beyond_the_rows_is_no_limit(tmp_path: Path, tiny_model: Path) -> None:
    assert submit(write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY), limit=100) == 0
    assert len(output_rows(tmp_path)) == len(ROWS)


def test_a_finished_job_is_left_alone(
    tmp_path: Path,
    tiny_model: Path,
    decoded: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = write_job(tmp_path, tiny_model, [*ROWS, "broken"], sampling=GREEDY)
    assert submit(job) == 3
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.is_file()}
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.delattr(Source, "splits")  # its input is not scanned again
        assert submit(job) == 3
    assert "all 13 rows were done before" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(decoded) == 1

    code = "import sys; from batchrun.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "submit", str(job)]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout.strip()) == (3, "False")


def test_overwrite_starts_again(tmp_path: Path, tiny_model: Path, asked: list[tuple[Any, int]]) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY)
    assert submit(job) == 0
    assert submit(job, "sampling.max_tokens=2", overwrite=True) == 0
    assert {row["completion_tokens"] for row in output_rows(tmp_path)} <= {1, 2}
    assert len(asked) == 2 * len(ROWS)


# ---- who may work on an output


def test_overwriting_is_refused_while_others_work(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY)
    assert submit(job) == 0
    with Worker(Store(str(tmp_path / "out"))), pytest.raises(HeldError, match=f"process {os.getpid()} on "):
        submit(job, overwrite=True)
    assert submit(job, overwrite=True) == 0


def test_what_a_dead_run_held_is_taken_over_at_once(tmp_path: Path, tiny_model: Path) -> None:
    code = (
        "import os, sys; from batchrun.data.lease import Lease, take; from batchrun.data.store import Store\n"
        "from batchrun.data.workers import Worker\n"
        "store = Store(sys.argv[1]); Worker(store)\n"
        "for name in ('00000', 'input', 'output'): assert take(store, Lease(name, 1, store.writer))\n"
        "os.kill(os.getpid(), 9)"
    )
    dead = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert dead.returncode == -signal.SIGKILL
    began = time.monotonic()
    assert submit(write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY)) == 0
    assert time.monotonic() - began < 30  # a far holder would be waited for, for a minute


def test_a_unit_that_was_taken_over_is_left_to_the_taker(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG)
    out = Store(str(tmp_path / "out"))

    def take_over() -> None:
        with Worker(out):
            assert take(out, Lease("00000", 2, out.writer))
        time.sleep(1.5)  # until it has looked around

    with monkeypatch.context() as patch:
        at_step(patch, 5, take_over)
        assert submit(job) == 0
    assert parts_of(tmp_path) == whole


def test_another_configuration_is_refused_showing_the_fields(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY)
    assert submit(job, limit=3) == 0
    changes = ["sampling.temperature=0.5", "prompt.template=Tell {{ text }}", "model.quantization=int8"]
    changes.append("model.kv_cache_dtype=int8")
    with pytest.raises(JobError) as refused:
        submit(job, *changes)
    assert refused.value.exit_code == 2
    for line in (
        "sampling.temperature: was 0.0, is now 0.5",
        'prompt.template: was "Say {{ text }}", is now "Tell {{ text }}"',
        'model.quantization: was "none", is now "int8"',
        'model.kv_cache_dtype: was "auto", is now "int8"',
    ):
        assert line in str(refused.value)


@pytest.mark.parametrize("output", ["in/rows.jsonl", "in", "in/out"])
def test_an_output_that_would_harm_its_input_is_refused(tmp_path: Path, tiny_model: Path, output: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    rows = write_rows(folder / "rows.jsonl", ROWS)
    before = rows.read_bytes()
    path = str(folder if output == "in/out" else rows)
    job = write_job(tmp_path, tiny_model, [], input={"path": path}, output={"path": str(tmp_path / output)})
    with pytest.raises(JobError, match="must not lie within each other"):
        submit(job)
    assert rows.read_bytes() == before


# ---- what breaks on the way


def test_a_run_whose_feed_is_killed_keeps_what_is_finished_and_can_go_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Any, int]]
) -> None:
    rows = ROWS * 10
    few = {"max_num_seqs": 4}  # so that the feed still has splits to prepare
    job = write_job(tmp_path, tiny_model, rows, sampling={"max_tokens": 2}, input={"split_rows": 20}, engine=few)

    others = psutil.Process().children()  # servers of other tests

    def kill_feed() -> None:
        for child in psutil.Process().children():
            if child not in others:
                child.kill()

    with monkeypatch.context() as patch:
        at_step(patch, 3, kill_feed)
        result = CliRunner().invoke(main, ["submit", str(job)])
    assert result.exit_code == 75
    assert result.stderr.splitlines()[-1].startswith("Error: the process that prepares prompts (")
    assert "was killed by SIGKILL (out of memory?)" in result.stderr
    assert read_status(str(job)).workers == []
    finished = read_status(str(job)).done_rows
    assert finished > 0
    before = len(asked)
    assert submit(job) == 0
    assert len(output_rows(tmp_path)) == len(rows)
    assert len(asked) - before == len(rows) - finished


def test_a_run_whose_storage_fails_says_so_and_can_go_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG | {"output": {"checkpoint_seconds": 0.02}})

    def fail(*_: Any) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        at_step(patch, 20, lambda: patch.setattr(Output, "checkpoint", fail))
        with pytest.raises(StorageError, match="the disk is full"):
            submit(job)
    assert submit(job) == 0
    assert parts_of(tmp_path) == whole


def test_what_is_done_is_kept_where_the_engine_fails(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, **LONG)  # whose checkpoints are far apart

    def fail() -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        at_step(patch, 20, fail)
        with pytest.raises(RuntimeError, match="the device is lost"):
            submit(job)
    view = OutputView.at(str(tmp_path / "out"))
    assert view is not None
    assert view.partials() or any(view.done_rows().values())
    assert submit(job) == 0
    assert parts_of(tmp_path) == whole


# ---- which thread does what


def test_the_engines_thread_never_waits_for_storage(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []  # the thread that the loop runs in, while it does
    callers: dict[str, set[str]] = {}  # thread -> what it asked of the store meanwhile

    def noted(name: str) -> Any:
        call = getattr(Store, name)

        def noting(store: Store, *args: Any) -> Any:
            if running:
                callers.setdefault(threading.current_thread().name, set()).add(name)
            return call(store, *args)

        return noting

    def loop(self: Loop, *args: Any) -> None:
        running.append(threading.current_thread().name)
        original(self, *args)
        running.clear()

    original = Loop._loop
    monkeypatch.setattr(Loop, "_loop", loop)
    for name in ("read", "size", "names", "sizes", "put", "put_file", "create", "publish", "delete"):
        monkeypatch.setattr(Store, name, noted(name))
    job = write_job(tmp_path, tiny_model, ROWS, input={"split_rows": 5}, output={"checkpoint_seconds": 0.01})
    assert submit(job) == 0
    assert {"read", "names", "create"} <= callers.pop("claims")
    assert {"read", "names", "create", "put", "put_file", "publish", "delete"} <= callers.pop("writer_0")
    assert callers.keys() <= {"worker"}


# ---- per-row sampling, log-probabilities


def test_a_row_with_its_own_seed_gives_the_same_text_whatever_the_batch(
    tmp_path: Path, tiny_model: Path, engine: Engine
) -> None:
    own = {"text": "The capital of France is", "params": {"seed": 42, "temperature": 0.8, "max_tokens": 16}}
    others = [{"text": f"other {i}", "params": {"temperature": 0.8, "max_tokens": 4 + i}} for i in range(7)]
    expected = [r.text for r in engine.generate([f"Say {own['text']}"], SamplingParams(**own["params"]))]
    batches = [[own], [own, *others[:1]], [*others, own], [*others[:3], own, *others[3:]]]
    for index, rows in enumerate(batches):
        folder = tmp_path / str(index)
        folder.mkdir()
        rows = [row | {"id": i} for i, row in enumerate(rows)]
        sections = {"model": {"dtype": "float32"}, "sampling": {"from_column": "params", "seed": index}}
        assert submit(write_job(folder, tiny_model, rows, **sections)) == 0
        assert [row["generated_text"] for row in output_rows(folder) if row["text"] == own["text"]] == expected


def test_a_rows_randomness_is_its_own(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"id": i, "text": "the same", "n": i} for i in range(12)]
    sections = {"model": {"dtype": "float32"}, "sampling": {"temperature": 1.5, "ignore_eos": True}}
    job = write_job(tmp_path, tiny_model, rows, **sections)
    assert submit(job) == 0
    all_rows = texts(output_rows(tmp_path))
    assert len(set(all_rows)) == len(rows)  # equal prompts, noise of their own
    out = f"output.path={tmp_path}/some/out"
    assert submit(job, "input.where=[[n, '>=', 9]]", out, "engine.max_num_seqs=1") == 0
    assert texts(output_rows(tmp_path / "some")) == all_rows[9:]
    assert submit(job, "sampling.seed=1", f"output.path={tmp_path}/other/out") == 0
    assert not set(texts(output_rows(tmp_path / "other"))) & set(all_rows)


def test_a_job_without_a_seed_still_keeps_seeded_rows(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"id": i, "text": "x", "params": {"seed": 7} if i else {}} for i in range(3)]
    found = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        sampling = {"seed": None, "from_column": "params", "temperature": 1.5, "ignore_eos": True}
        assert submit(write_job(folder, tiny_model, rows, model={"dtype": "float32"}, sampling=sampling)) == 0
        found.append(texts(output_rows(folder)))
    assert found[0][1] == found[0][2] == found[1][1] == found[1][2]
    assert found[0][0] != found[1][0]


def test_row_parameters_override_the_jobs(tmp_path: Path, tiny_model: Path) -> None:
    rows = [
        {"id": "a", "text": "x", "params": {"max_tokens": 3}},
        {"id": "b", "text": "x"},
        {"id": "c", "text": "x", "params": None},
        {"id": "d", "text": "x", "params": '{"max_tokens": 2, "ignore_eos": true}'},
        {"id": "e", "text": "x", "params": {"max_tokns": 2}},
        {"id": "f", "text": "x", "params": {"n": 2}},
        {"id": "g", "text": "x", "params": {"temperature": -1}},
        {"id": "h", "text": "x", "params": [1]},
    ]
    sampling = {"from_column": "params", "max_tokens": 5, "ignore_eos": True}
    assert submit(write_job(tmp_path, tiny_model, rows, sampling=sampling)) == 3
    found = output_rows(tmp_path)
    assert [row["completion_tokens"] for row in found] == [3, 5, 5, 2, None, None, None, None]
    errors = [str(row["error"]) for row in found[4:]]
    assert all(error.startswith("bad_sampling: ") for error in errors)
    for error, part in zip(errors, ("max_tokns", "n must be 1", "temperature", "has to hold an object"), strict=True):
        assert part in error


def test_more_than_one_sample_is_refused_by_name(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, sampling={"n": 2})
    with pytest.raises(JobError, match=r"sampling\.n: more than one sample per row is not supported yet"):
        submit(job)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_log_probabilities_are_those_of_the_engine(tmp_path: Path, tiny_model: Path, engine: Engine, form: str) -> None:
    sampling = {"temperature": 1, "top_k": 1, "max_tokens": 4, "logprobs": 5, "prompt_logprobs": 2}
    sections: dict[str, Any] = {"model": {"dtype": "float32"}, "sampling": sampling, "output": {"format": form}}
    assert submit(write_job(tmp_path, tiny_model, ROWS[:3], **sections)) == 0
    rows = output_rows(tmp_path)
    expected = {r.index: r for r in engine.generate([f"Say row {i}" for i in range(3)], SamplingParams(**sampling))}
    for index, row in enumerate(rows):
        for column, count in (("logprobs", 5), ("prompt_logprobs", 2)):
            wanted = getattr(expected[index], column)
            assert [token["token_id"] for token in row[column]] == [token.token_id for token in wanted]
            for token, other in zip(row[column], wanted, strict=True):
                assert token["logprob"] == pytest.approx(other.logprob, abs=1e-3)
                assert len(token["top"]) == (count if token["logprob"] is not None else 0)
        assert row["prompt_logprobs"][0]["logprob"] is None
        assert len(row["prompt_logprobs"]) == row["prompt_tokens"]


def test_rows_may_ask_for_log_probabilities_themselves(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"id": 0, "text": "x", "params": {"logprobs": 0}}, {"id": 1, "text": "x"}]
    sampling = {"from_column": "params", "max_tokens": 2, "ignore_eos": True}
    assert submit(write_job(tmp_path, tiny_model, rows, sampling=sampling)) == 0
    first, second = output_rows(tmp_path)
    assert [token["top"] for token in first["logprobs"]] == [[], []]
    assert second["logprobs"] is None
    assert "prompt_logprobs" not in first


# ---- rows that fail, and how a job ends


def test_rows_fail_by_kind_and_the_rest_goes_on(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"id": "good", "text": "x", "n": 1},
        "{broken",
        {"id": "null", "text": None, "n": 1},
        {"id": "absent", "n": 1},
        {"id": "long", "text": "x" * 600, "n": 1},
        {"id": "params", "text": "x", "n": 1, "params": {"what": 1}},
        {"id": "filter", "text": "x", "n": "one"},
        {"id": "dropped", "text": "x", "n": 0},
        {"id": "last", "text": "x", "n": 1},
    ]
    job = write_job(tmp_path, tiny_model, rows, input={"where": [["n", ">", 0]]}, sampling={"from_column": "params"})
    assert submit(job) == 3
    found = output_rows(tmp_path)
    kinds = [(row["custom_id"], str(row["error"]).partition(":")[0]) for row in found]
    assert kinds == [
        ("good", "None"),
        ("rows.jsonl:2", "unreadable_row"),
        ("null", "missing_value"),
        ("absent", "missing_value"),
        ("long", "prompt_too_long"),
        ("params", "bad_sampling"),
        ("filter", "bad_filter"),
        ("last", "None"),
    ]
    for row in found:
        assert (row["generated_text"] is None) == (row["error"] is not None)
    told = capsys.readouterr().err
    assert "8: 2 ok, 6 errors" in told
    assert "2 missing_value" in told
    assert "finished with error rows" in told


def test_a_row_that_the_model_cannot_take_is_an_engine_error(tmp_path: Path) -> None:
    from tests.models import save_model

    model = save_model(tmp_path / "model", vocab_size=258)  # its tokenizer has 262 tokens
    rows = [{"id": 0, "text": "<|user|>"}, {"id": 1, "text": "fine"}]
    assert submit(write_job(tmp_path, model, rows, sampling=GREEDY)) == 3
    errors = [row["error"] for row in output_rows(tmp_path)]
    assert errors[0].startswith("engine_error: the prompt has token ids outside the vocabulary")
    assert errors[1] is None


def test_exit_codes_of_the_error_threshold(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, [*ROWS[:9], "broken"], sampling=GREEDY)
    for threshold, code in ((None, 3), (0.1, 3), (0.09, 4), (0, 4)):
        override = f"errors.error_threshold={'null' if threshold is None else threshold}"
        assert submit(job, override) == code
        assert len(output_rows(tmp_path)) == 10  # published all the same


@pytest.mark.parametrize(("threshold", "code"), [("null", 3), ("1", 3), ("0.5", 4)])
def test_a_job_of_which_all_rows_fail_is_never_done_quietly(
    tmp_path: Path, tiny_model: Path, threshold: str, code: int, decoded: list[int]
) -> None:
    job = write_job(tmp_path, tiny_model, [row | {"text": None} for row in ROWS])
    assert submit(job, f"errors.error_threshold={threshold}") == code
    assert submit(job, f"errors.error_threshold={threshold}") == code
    assert len(output_rows(tmp_path)) == len(ROWS)
    assert decoded == []  # and no model was loaded for that


def test_on_error_fail_ends_at_the_first_and_keeps_what_is_done(
    tmp_path: Path, tiny_model: Path, asked: list[tuple[Any, int]]
) -> None:
    rows = [*ROWS, "broken", *ROWS]
    job = write_job(tmp_path, tiny_model, rows, sampling=GREEDY, errors={"on_error": "fail"}, input={"split_rows": 4})
    for _ in range(2):
        with pytest.raises(ThresholdError, match=r"rows\.jsonl: row 13: unreadable_row: .* \(errors\.on_error is fail"):
            submit(job)
    result = CliRunner().invoke(main, ["submit", str(job)])
    assert result.exit_code == 4
    assert submit(job, "errors.on_error=record") == 3
    assert len(output_rows(tmp_path)) == len(rows)
    assert submit(job) == 4  # its error is still there


def test_on_error_fail_without_errors_is_done(tmp_path: Path, tiny_model: Path) -> None:
    assert submit(write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY, errors={"on_error": "fail"})) == 0


def test_the_readable_rows_of_a_truncated_file_are_published(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random.seed(0)
    text = "".join(json.dumps({"id": i, "text": f"{random.random()}"}) + "\n" for i in range(400))
    whole = gzip.compress(text.encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    job = write_job(
        tmp_path, tiny_model, [], input={"path": str(tmp_path / "cut.jsonl.gz")}, sampling={"max_tokens": 1}
    )
    assert submit(job) == 3
    told = capsys.readouterr().err
    assert "1 unreadable_file" in told
    assert "in earlier runs" not in told
    *good, last = output_rows(tmp_path)
    good = [row for row in good if row["error"] is None]  # the line that the cut goes through may be an error itself
    assert len(good) > 50
    assert [row["id"] for row in good] == list(range(len(good)))
    assert last["error"].startswith("unreadable_file: cut.jsonl.gz from row ")
    manifest = json.loads((tmp_path / "out" / MANIFEST_COPY).read_text())
    assert manifest["rows"] == len(output_rows(tmp_path))
    assert manifest["errors"] == manifest["rows"] - len(good)
    assert submit(job) == 3


def test_a_file_that_cannot_be_read_at_all_is_refused_before_anything_runs(
    tmp_path: Path, tiny_model: Path, decoded: list[int]
) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no footer")
    job = write_job(tmp_path, tiny_model, [], input={"path": str(tmp_path / "bad.parquet")})
    with pytest.raises(JobError, match=r"bad\.parquet"):
        submit(job)
    assert decoded == []
    assert not (tmp_path / "out").exists()


def test_nothing_secret_is_recorded(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    secret = {"storage_options": {"secret": "hunter2"}}
    job = write_job(tmp_path, tiny_model, ROWS, sampling=GREEDY, input=secret, output=secret)
    assert submit(job) == 0
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    run = json.loads((tmp_path / "out" / MANIFEST_COPY).read_text())["run"]
    steps = {"max_num_seqs", "max_num_batched_tokens"}
    assert set(run) == {"job", "limit", "model", "device", "machine", "versions"} | steps
