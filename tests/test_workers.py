"""Workers: who counts as gone, when, and what each says of itself."""

import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import psutil
import pytest

from batchrun.data import workers
from batchrun.data.store import StorageError, Store
from batchrun.data.workers import (
    WORKERS,
    Owner,
    Watch,
    Worker,
    WorkerFile,
    parse_worker,
    read_worker,
    worker_attempts,
    worker_file,
)
from tests.outputs import in_child

TTL = 0.4

HOLD = """
import sys, time
from batchrun.data.store import Store
from batchrun.data.workers import Worker
print(Worker(Store(sys.argv[1]), ttl=0.4).attempt, flush=True)
time.sleep(60)
"""


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "out"))


@pytest.fixture
def other(store):
    """A worker that is another process: the process, and its attempt."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, store.url], stdout=subprocess.PIPE, text=True)
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


def write_worker(store, attempt="far", *, beat=0, released=False, **changes):
    """The file of a worker on a machine that this one cannot look into."""
    owner = replace(Owner.current(attempt, TTL), **{"host": "elsewhere", "machine": "elsewhere/1"} | changes)
    record = WorkerFile(owner, beat, released, workers.timestamp(), {})
    store.put(worker_file(attempt), json.dumps(asdict(record)).encode())


def is_gone_within(watch, attempt, seconds):
    """Looks at the worker again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if watch.is_gone(attempt):
            return True
        time.sleep(0.02)
    return False


# --- on this machine ---------------------------------------------------------------------------------------------


def test_live_worker_is_named(store, other):
    process, attempt = other
    watch = Watch(store)
    assert not watch.is_gone(attempt)
    assert worker_attempts(store) == [attempt]
    assert watch.living()[attempt].owner.pid == process.pid
    (text,) = watch.others("somebody else")
    assert text.startswith(f"process {process.pid} on ")
    assert " since 20" in text
    assert watch.others(attempt) == []


def test_killed_worker_is_gone_at_once(store, other):
    process, attempt = other
    watch = Watch(store, ttl=60)
    assert not watch.is_gone(attempt)
    process.send_signal(signal.SIGKILL)
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert watch.is_gone(attempt)
    assert watch.living() == {}


def test_stopped_process_is_alive_however_long(store, other):
    process, attempt = other
    process.send_signal(signal.SIGSTOP)
    assert not is_gone_within(Watch(store, ttl=TTL), attempt, 3 * TTL)
    process.send_signal(signal.SIGCONT)


def test_reused_process_id_is_another_process(store):
    mine = Owner.current("old", TTL)
    write_worker(store, "old", machine=mine.machine, started=mine.started - 10_000)
    write_worker(store, "new", machine=mine.machine, started=mine.started - 1)  # the wall clock was set
    assert Watch(store).is_gone("old")
    assert not Watch(store).is_gone("new")


def test_worker_that_left_is_gone_though_its_process_lives(store):
    worker, watch = Worker(store, ttl=TTL), Watch(store)
    assert not watch.is_gone(worker.attempt)
    worker.leave()
    assert watch.is_gone(worker.attempt)
    left = read_worker(store, worker.attempt)
    assert left.released
    worker.leave()
    time.sleep(TTL)
    assert read_worker(store, worker.attempt) == left  # it beats no more


def test_worker_leaves_whatever_happens(store):
    with pytest.raises(RuntimeError), Worker(store) as worker:
        raise RuntimeError
    assert Watch(store).is_gone(worker.attempt)


def test_forked_child_is_a_worker_of_its_own(store):
    with Worker(store) as worker:
        assert in_child(lambda: Worker(Store(store.url))) == 0
        (child,) = set(worker_attempts(store)) - {worker.attempt}
        assert Watch(store).is_gone(child)
        assert not Watch(store).is_gone(worker.attempt)


def test_worker_without_a_file_is_gone(store):
    assert Watch(store).is_gone("nobody")


# --- elsewhere ---------------------------------------------------------------------------------------------------


def test_silent_far_worker_is_gone_after_its_own_time_to_live(store):
    write_worker(store)
    watch, began = Watch(store, ttl=60), time.monotonic()
    assert not watch.is_gone("far")
    assert is_gone_within(watch, "far", 10)
    assert time.monotonic() - began >= TTL
    assert not Watch(store).is_gone("far")  # who comes later has to watch as long
    write_worker(store, beat=1)
    assert not watch.is_gone("far")  # it was only slow


def test_beating_far_worker_stays(store):
    stop = threading.Event()

    def beat():
        for count in range(1000):
            write_worker(store, beat=count)
            if stop.wait(TTL / 4):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        while not worker_attempts(store):
            time.sleep(0.01)
        assert not is_gone_within(Watch(store), "far", 3 * TTL)
    finally:
        stop.set()
        thread.join()
    assert is_gone_within(Watch(store), "far", 10)


def test_far_worker_that_left_is_gone_at_once(store):
    write_worker(store, released=True)
    assert Watch(store).is_gone("far")


def test_real_worker_is_kept_by_its_beats_and_lost_without(store, other, monkeypatch):
    process, attempt = other
    monkeypatch.setattr(workers, "_machine", lambda: "elsewhere/2")
    watch = Watch(store, ttl=60)
    assert not is_gone_within(watch, attempt, 3 * TTL)
    process.send_signal(signal.SIGSTOP)
    assert is_gone_within(watch, attempt, 10)
    process.send_signal(signal.SIGCONT)
    time.sleep(TTL)
    assert not watch.is_gone(attempt)


@pytest.mark.parametrize("record", [b"{", b"{}", b"[]", b'{"owner": 1}', b'{"owner": {}}'])
def test_unreadable_file_is_waited_for_like_a_far_worker(store, record):
    store.put(f"{WORKERS}/odd.json", record)
    watch, began = Watch(store, ttl=TTL), time.monotonic()
    assert watch.living() == {"odd": None}
    assert watch.others("") == ["another worker (odd)"]
    assert is_gone_within(watch, "odd", 10)
    assert time.monotonic() - began >= TTL


# --- what it says ------------------------------------------------------------------------------------------------


def test_progress_is_told_with_the_next_beat(store):
    with Worker(store, ttl=TTL) as worker:
        assert read_worker(store, worker.attempt).progress == {}
        worker.progress = {"rows": 3}
        time.sleep(TTL)
        told = read_worker(store, worker.attempt)
        assert told.progress == {"rows": 3}
        assert told.beat > 1
        assert told.owner == worker.owner
        worker.progress = {"rows": 4}
    assert read_worker(store, worker.attempt).progress == {"rows": 4}


def test_worker_goes_on_when_its_file_can_be_renewed_again(store, monkeypatch):
    with Worker(store, ttl=TTL) as worker:
        put = store.put

        def away(name, data):
            raise StorageError("away")

        monkeypatch.setattr(store, "put", away)
        time.sleep(1.5 * TTL)
        silent = read_worker(store, worker.attempt).beat
        monkeypatch.setattr(store, "put", put)
        time.sleep(TTL)
        assert read_worker(store, worker.attempt).beat > silent
        monkeypatch.setattr(store, "put", away)
    assert not read_worker(store, worker.attempt).released  # what a run gave is not spoilt by a last word that failed


def test_a_file_that_is_old_tells_even_those_who_look_once(store):
    write_worker(store)
    name = worker_file("far")
    record = json.loads(store.read(name))
    assert not Watch(store).is_gone("far")
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=11 * record["owner"]["ttl"])
    store.put(name, json.dumps(record | {"written": old.isoformat()}).encode())
    assert Watch(store).is_gone("far")


def test_fields_of_later_versions_are_ignored(store):
    write_worker(store)
    record = json.loads(store.read(worker_file("far")))
    record["owner"]["color"] = "red"
    assert parse_worker(json.dumps(record).encode()) == read_worker(store, "far")


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2"),
    ],
)
def test_slurm_task_is_named(monkeypatch, environment, task):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    owner = Owner.current("me", 1)
    assert (owner.task, owner.pid) == (task, os.getpid())
    assert (f"(Slurm task {task})" in str(owner)) == (task is not None)
