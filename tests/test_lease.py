"""Leases: one holder of each epoch, epochs that never go down, and what needs an output alone."""

import json
import logging
import os
import threading
import time

import pytest

from batchrun.data import workers
from batchrun.data.lease import (
    LEASES,
    Lease,
    LeaseListing,
    alone,
    give_back,
    lease_file,
    read_lease,
    read_suspects,
    remove_leases,
    take,
    write_suspects,
)
from batchrun.data.store import Store
from batchrun.data.workers import Worker
from tests.outputs import in_child, race

TTL = 0.4


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "out"))


@pytest.fixture
def worker(store):
    with Worker(store, ttl=TTL) as worker:
        yield worker


def files(store):
    return [name.removeprefix(f"{LEASES}/") for name in store.names(LEASES)]


def hold_and_die(store, name="job"):
    """Takes the lease in a process that dies with it."""

    def hold():
        mine = Store(store.url)
        epoch = LeaseListing.of(mine).epochs.get(name, 0) + 1
        assert take(mine, Lease(name, epoch, Worker(mine, ttl=TTL).attempt))

    assert in_child(hold) == 0


# --- taking ------------------------------------------------------------------------------------------------------


def test_lease_is_taken_once(store):
    lease = Lease("job", 1, "me", deaths=2, done=(5, 7), suspects=(3, 4))
    assert take(store, lease)
    assert not take(store, Lease("job", 1, "you"))
    assert read_lease(store, "job", 1) == lease
    assert take(store, Lease("another", 1, "you"))
    assert LeaseListing.of(store) == LeaseListing({"job": 1, "another": 1}, frozenset())


def test_next_epoch_removes_what_was_before(store):
    first = Lease("job", 1, "me")
    take(store, first)
    take(store, Lease("job.001", 1, "me"))
    write_suspects(store, first, [1])
    give_back(store, first)
    assert take(store, Lease("job", 2, "you"))
    assert files(store) == ["job-00000002.json", "job.001-00000001.json"]


def test_epoch_that_came_and_went_is_not_taken_again(store):
    """A taker that listed epoch 1 was slow: others took 2 and 3 and removed 1 and 2. Creating 2 must not count."""
    for epoch in (1, 2, 3):
        assert take(store, Lease("job", epoch, "you"))
    assert not take(store, Lease("job", 2, "me"))
    assert files(store) == ["job-00000003.json"]


def test_given_back_lease_is_free_and_its_epoch_stays(store):
    lease = Lease("job", 1, "me")
    take(store, lease)
    give_back(store, lease)
    assert LeaseListing.of(store) == LeaseListing({"job": 1}, frozenset({"job"}))
    assert not take(store, Lease("job", 1, "you"))
    assert take(store, Lease("job", 2, "you"))
    give_back(store, lease)  # late: it counts for its own epoch alone
    assert LeaseListing.of(store).free == frozenset()


@pytest.mark.parametrize("record", [b"{", b"{}", b"[]", b'{"name": "job"}'])
def test_unreadable_record_has_no_holder(store, record):
    store.create(lease_file("job", 1), record)
    assert read_lease(store, "job", 1) == Lease("job", 1, "")
    assert read_lease(store, "job", 2) == Lease("job", 2, "")  # one that is gone
    assert LeaseListing.of(store).epochs == {"job": 1}


def test_lost_record_is_no_step_back(store, worker):
    """What lies beside it tells of its epoch."""
    for suffix in ("free", "suspects"):
        store.delete(store.names(LEASES))
        store.put(lease_file("job", 3, suffix), b"1")
        assert LeaseListing.of(store).epochs == {"job": 3}
        with alone(store, worker, "job"):
            assert LeaseListing.of(store).epochs == {"job": 4}


def test_foreign_files_are_no_leases(store):
    for name in ("notes.txt", "job-1.json", "job-00000001.other"):
        store.put(f"{LEASES}/{name}", b"mine")
    assert LeaseListing.of(store) == LeaseListing({}, frozenset())
    remove_leases(store, ["job"])
    assert len(files(store)) == 3


def test_only_named_leases_are_removed(store):
    for name in ("00001", "00001.001", "00011", "input"):
        lease = Lease(name, 1, "me")
        take(store, lease)
        write_suspects(store, lease, [1])
    remove_leases(store, ["00001", "absent"])
    assert set(LeaseListing.of(store).epochs) == {"00001.001", "00011", "input"}
    assert len(files(store)) == 6


def test_suspects(store):
    lease = Lease("job", 1, "me")
    take(store, lease)
    assert read_suspects(store, lease) is None
    write_suspects(store, lease, {9, 4})
    assert read_suspects(store, lease) == (4, 9)
    write_suspects(store, lease, [])
    assert read_suspects(store, lease) == ()
    for damaged in (b"[4", b"7"):
        store.put(lease_file("job", 1, "suspects"), damaged)
        assert read_suspects(store, lease) is None


def test_one_of_six_processes_takes_each_epoch(store):
    def work(index):
        mine = Store(store.url)
        return [take(mine, Lease("job", epoch, mine.writer)) for epoch in range(1, 21)]

    won = race(6, work)
    won = [sum(column) for column in zip(*won, strict=True)]
    assert max(won[:-1]) == won[-1] == 1  # of one that has come and gone there may be no winner
    assert files(store) == ["job-00000020.json"]


# --- alone -------------------------------------------------------------------------------------------------------


def test_alone_excludes_others(store):
    counter = os.path.join(store.root, "counter")  # noqa: PTH118

    def work(index):
        mine = Store(store.url)
        with Worker(mine) as worker:
            for _ in range(4):
                with alone(mine, worker, "job"):
                    count = int((mine.read_if_any("counter") or b"0").decode())
                    time.sleep(0.005)
                    with open(counter, "w") as file:  # noqa: PTH123
                        file.write(str(count + 1))
        return True

    assert race(6, work) == [True] * 6
    assert store.read("counter") == b"24"


def test_alone_waits_for_who_holds_it_and_says_for_whom(store, worker, caplog):
    caplog.set_level(logging.INFO)
    events = []
    inside = threading.Event()

    def hold():
        mine = Store(store.url)
        with Worker(mine, ttl=TTL) as other, alone(mine, other, "job"):
            inside.set()
            time.sleep(0.5)  # longer than it may be silent: it beats
            events.append("done")

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with alone(store, worker, "job"):
        events.append("mine")
    thread.join()
    assert events == ["done", "mine"]
    assert f"waiting for process {os.getpid()} on " in caplog.text


def test_alone_is_over_whatever_happens(store, worker):
    with pytest.raises(RuntimeError), alone(store, worker, "job"):
        raise RuntimeError
    with alone(store, worker, "job"), alone(store, worker, "another"):
        assert LeaseListing.of(store).epochs["job"] == 2


def test_alone_of_a_dead_holder_is_taken_at_once(store, worker):
    hold_and_die(store)
    began = time.monotonic()
    with alone(store, worker, "job"):
        assert LeaseListing.of(store).epochs == {"job": 2}
    assert time.monotonic() - began < TTL


def test_alone_of_a_silent_far_holder_is_taken_in_time(store, worker, monkeypatch):
    hold_and_die(store)
    monkeypatch.setattr(workers, "_machine", lambda: "elsewhere/2")
    began = time.monotonic()
    with alone(store, worker, "job"):
        assert LeaseListing.of(store).epochs == {"job": 2}
    assert time.monotonic() - began >= TTL


def test_alone_is_not_held_up_by_an_unreadable_record(store, worker):
    store.create(lease_file("job", 1), json.dumps({"name": "job"}).encode())
    with alone(store, worker, "job"):
        assert LeaseListing.of(store).epochs == {"job": 2}


def test_alone_after_six_processes_found_a_dead_holder(store):
    hold_and_die(store)

    def work(index):
        mine = Store(store.url)
        with Worker(mine) as worker, alone(mine, worker, "job"):
            return LeaseListing.of(mine).epochs["job"]

    assert sorted(race(6, work)) == [2, 3, 4, 5, 6, 7]
