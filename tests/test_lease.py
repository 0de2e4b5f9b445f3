"""Leases: one holder, takeover of the dead at once and of the silent in time, and a holder that notices its loss."""

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

from batchrun.data import lease as leases
from batchrun.data.lease import LEASES, HeldError, Owner, acquire, holder
from batchrun.data.store import StorageError, Store
from tests.outputs import in_child, race

HOLD = """
import sys, time
from batchrun.data.lease import acquire
from batchrun.data.store import Store
acquire(Store(sys.argv[1]), "job", ttl=5)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "out"))


@pytest.fixture
def other_process(store):
    """A process that holds the lease."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, store.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def far_owner(**changes):
    """An owner on a machine that this one cannot look into."""
    return replace(Owner.current("far", 0.4), host="elsewhere", machine="elsewhere/1", **changes)


def hold_from_afar(store, epoch=1):
    store.create(f"{LEASES}/job-{epoch:08d}.json", json.dumps(asdict(far_owner())).encode())


def epochs(store):
    return [name for name in store.names(LEASES) if name.endswith(".json")]


def test_live_process_keeps_its_lease_and_is_named(store, other_process):
    with pytest.raises(HeldError, match=f"held by process {other_process.pid} on .* since 20") as caught:
        acquire(store, "job")
    assert caught.value.exit_code == 75
    assert holder(store, "job").pid == other_process.pid
    acquire(store, "another").release()


def test_killed_process_is_taken_over_at_once(store, other_process):
    other_process.send_signal(signal.SIGKILL)
    while psutil.Process(other_process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert holder(store, "job") is None
    began = time.monotonic()
    with acquire(store, "job") as lease:
        assert time.monotonic() - began < 2
        assert lease.epoch == 2
        assert epochs(store) == [f"{LEASES}/job-00000002.json"]


def test_stopped_process_is_alive(store, other_process):
    other_process.send_signal(signal.SIGSTOP)
    with pytest.raises(HeldError):
        acquire(store, "job")
    other_process.send_signal(signal.SIGCONT)


def test_reused_process_id_is_no_holder(store):
    owner = replace(Owner.current("old", 60), started=time.time() - 10_000)
    store.create(f"{LEASES}/job-00000001.json", json.dumps(asdict(owner)).encode())
    assert acquire(store, "job").epoch == 2


def test_released_lease_is_free_and_its_epoch_stays(store):
    acquire(store, "job").release()
    assert epochs(store) == [f"{LEASES}/job-00000001.json"]
    with acquire(store, "job") as lease:
        assert lease.epoch == 2
        assert holder(store, "job") == lease.owner
        with pytest.raises(HeldError):
            acquire(store, "job")
    lease.release()
    assert holder(store, "job") is None


def test_silent_far_holder_is_taken_over_after_its_time_to_live(store):
    hold_from_afar(store)
    began = time.monotonic()
    with acquire(store, "job", ttl=30) as lease:
        assert time.monotonic() - began >= 0.4
        assert lease.epoch == 2


def test_beating_far_holder_keeps_its_lease(store):
    hold_from_afar(store)
    stop = threading.Event()

    def beat():
        for count in range(100):
            store.put(f"{LEASES}/job-00000001.beat", json.dumps({"beat": count, "released": False}).encode())
            if stop.wait(0.1):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(HeldError, match="on elsewhere"):
        acquire(store, "job")
    stop.set()
    thread.join()


@pytest.mark.parametrize("record", [b"{", b"{}", b"[]"])
def test_unreadable_record_is_waited_for_like_a_far_holder(store, record):
    store.create(f"{LEASES}/job-00000001.json", record)
    assert acquire(store, "job", ttl=0.2).epoch == 2


def test_epoch_that_came_and_went_is_not_taken_again(store):
    """A taker that listed epoch 1 was slow: others took 2 and 3 and removed 1 and 2. Creating 2 must not count."""
    hold_from_afar(store, epoch=3)
    assert leases._take(store, "job", 2, Owner.current("me", 0.2)) is None
    assert epochs(store) == [f"{LEASES}/job-00000003.json"]


def test_holder_notices_that_it_was_superseded_and_writes_no_more(store):
    lease = acquire(store, "job", ttl=0.4)
    assert not lease.lost
    hold_from_afar(store, epoch=2)
    time.sleep(0.3)
    assert lease.lost
    before = store.read_if_any(f"{LEASES}/job-00000001.beat")
    lease.release()
    assert store.read_if_any(f"{LEASES}/job-00000001.beat") == before


def test_holder_that_cannot_renew_counts_itself_lost_until_it_can(store, monkeypatch):
    lease = acquire(store, "job", ttl=0.4)
    put = store.put

    def away(name, data):
        raise StorageError("away")

    monkeypatch.setattr(store, "put", away)
    time.sleep(0.6)
    assert lease.lost
    monkeypatch.setattr(store, "put", put)
    time.sleep(0.3)
    assert not lease.lost
    lease.release()


def test_beats_keep_a_lease_from_far_takers(store, monkeypatch):
    lease = acquire(store, "job", ttl=0.4)
    monkeypatch.setattr(leases, "_machine", lambda: "elsewhere/2")
    with pytest.raises(HeldError):
        acquire(store, "job")
    lease.release()
    assert acquire(store, "job").epoch == 2


def test_one_of_six_processes_takes_the_lease_of_a_dead_one(store):
    in_child(acquire, store, "job")

    def take(index):
        try:
            lease = acquire(Store(store.url), "job")
        except HeldError:
            return None
        time.sleep(0.5)  # alive until the others have tried
        return lease.epoch

    assert sorted(epoch for epoch in race(6, take) if epoch) == [2]


def test_forked_children_are_other_processes(store):
    with acquire(store, "job"):
        pid = in_child(lambda: os._exit(0))
        assert pid != holder(store, "job").pid
