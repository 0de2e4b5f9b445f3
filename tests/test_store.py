"""The store: whole files, one winner, repeatable steps, and failures told without secrets."""

import errno
import os
import threading
import uuid

import pytest

from batchrun.data.store import TEMPORARY, StorageError, Store
from batchrun.errors import JobError, without_credentials
from tests.outputs import race


@pytest.fixture(params=["path", "file", "memory"])
def store(request, tmp_path):
    return {
        "path": lambda: Store(str(tmp_path / "out")),
        "file": lambda: Store(f"file://{tmp_path}/out"),
        "memory": lambda: Store(f"memory://{uuid.uuid4().hex}/out"),
    }[request.param]()


def test_files_come_and_go(store, tmp_path):
    assert store.read_if_any("a/b") is None
    assert not store.exists("a/b")
    assert store.names("a") == []
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    store.put("a/c/d", b"")
    assert (store.read("a/b"), store.size("a/b"), store.size("a")) == (b"two", 3, None) or store.local
    assert store.names("a") == ["a/b"]
    assert [name for name in store.entries() if name != "_batchrun"] == ["a"]
    with store.scratch() as directory:
        (directory / "built").write_bytes(b"built")
        store.put_file(directory / "built", "a/b")
        with store.local_copy("a/b") as copy:
            assert copy.read_bytes() == b"built"
    store.delete(["a/b", "a/b", "absent"])
    with pytest.raises(FileNotFoundError):
        store.read("a/b")


def test_many_files_are_read_in_order(store):
    names = [f"a/{number}" for number in range(20)]
    for name in names[::2]:
        store.put(name, name.encode())
    assert store.read_each(names) == [name.encode() if name in names[::2] else None for name in names]
    assert store.read_each([]) == []


def test_several_far_files_are_read_at_once(monkeypatch):
    store = Store(f"memory://{uuid.uuid4().hex}/out")
    together = threading.Barrier(8)
    monkeypatch.setattr(store._backend, "read", lambda name: name.encode() if together.wait(10) >= 0 else b"")
    assert store.read_each(map(str, range(16))) == [str(number).encode() for number in range(16)]


def test_create_has_one_winner_and_knows_its_own_write(store):
    assert store.create("k", b"mine")
    assert not store.create("k", b"theirs")
    assert store.create("k", b"mine")
    assert store.read("k") == b"mine"
    with pytest.raises(ValueError, match="content"):
        store.create("empty", b"")


def test_publish_can_be_repeated(store):
    store.put("staged/x", b"part")
    store.publish("staged/x", "x")
    store.publish("staged/x", "x")
    assert (store.read("x"), store.exists("staged/x")) == (b"part", False)
    with pytest.raises(StorageError):
        store.publish("staged/y", "y")


def test_probe_finds_stores_that_ignore_the_condition(store, monkeypatch):
    store.probe_exclusive_create()
    assert store.names(TEMPORARY) == []
    monkeypatch.setattr(store._backend, "create", store._backend.write)
    with pytest.raises(JobError, match="exactly once"):
        store.probe_exclusive_create()


@pytest.mark.parametrize("error", [FileExistsError(), OSError(errno.EINVAL, "invalid"), ConnectionResetError()])
def test_create_whose_reply_was_lost_counts_as_won(store, monkeypatch, error):
    create = store._backend.create

    def landed_but_failed(name, data):
        create(name, data)
        raise error

    monkeypatch.setattr(store._backend, "create", landed_but_failed)
    assert store.create("k", b"mine")


def test_passing_failures_are_tried_again(store, monkeypatch):
    failures = iter([ConnectionResetError(), OSError(errno.EIO, "again")])
    write = store._backend.write

    def flaky(name, data):
        for failure in failures:
            raise failure
        write(name, data)

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(store._backend, "write", flaky)
    store.put("k", b"data")
    assert store.read("k") == b"data"


def test_lasting_failures_end_at_once_and_tell_no_secret(monkeypatch, caplog):
    store = Store("memory://x", {"secret": "hunter22", "client_kwargs": {"aws_session_token": "hunter33"}}, patience=0)

    def refuse(name, data):
        raise PermissionError("hunter22 and hunter33 may not write")

    monkeypatch.setattr(store._backend, "write", refuse)
    with pytest.raises(StorageError, match=r"cannot write .*/k: PermissionError: \*\*\* and \*\*\* may not") as caught:
        store.put("k", b"data")
    assert "hunter" not in f"{caught.value}{store!r}{caplog.text}"


def test_url_is_shown_without_credentials():
    store = Store("memory://user:hunter22@host/out")
    assert "hunter22" not in f"{store.url}{store!r}{store.path('x')}"
    shown = without_credentials(
        "https://me:hunter22@host/a.jsonl?se=10:00&sig=hunter22 not there; s3://me:hunter22@b/x?.gz"
    )
    assert shown == "https://host/a.jsonl not there; s3://b/x?.gz"


def test_full_disk_is_not_tried_again(tmp_path, monkeypatch):
    store = Store(str(tmp_path))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        store.put("k", b"data")


def test_file_system_without_hard_links_is_refused(tmp_path, monkeypatch):
    def no_links(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StorageError, match="no hard links"):
        Store(str(tmp_path)).probe_exclusive_create()


def test_sweep_removes_what_dead_writers_left(store):
    dead, other = Store(store.url), Store(store.url)
    for writer in (dead, other, store):
        store.put(f"{TEMPORARY}/{writer.writer}-x", b"x")
    store.sweep_temporary(lambda: [other.writer])
    assert store.names(TEMPORARY) == sorted(f"{TEMPORARY}/{writer.writer}-x" for writer in (other, store))


def test_sweep_spares_the_scratch_of_the_living(tmp_path):
    store, dead, other = (Store(str(tmp_path)) for _ in range(3))
    with dead.scratch() as gone, other.scratch() as spared:
        (gone / "built").touch()
        store.sweep_temporary(lambda: [other.writer])
        assert (gone.exists(), spared.exists()) == (False, True)


def test_nothing_half_built_stays_when_a_write_fails(tmp_path, monkeypatch):
    store = Store(str(tmp_path), patience=0)

    def broken(descriptor):
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError):
        store.put("k", b"data")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_six_processes_create_one_file(tmp_path):
    store = Store(str(tmp_path / "out"))
    for attempt in range(5):
        won = race(6, lambda index, name=f"races/{attempt}": store.create(name, f"writer {index}".encode()))
        assert won.count(True) == 1
        assert store.read(f"races/{attempt}") == f"writer {won.index(True)}".encode()


def test_readers_see_old_or_new_content_only(tmp_path):
    store = Store(str(tmp_path))
    contents = [bytes([65 + i]) * 50_000 for i in range(2)]
    store.put("k", contents[0])
    stop = threading.Event()
    seen = set()

    def read():
        while not stop.is_set():
            seen.add(store.read("k"))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(60):
        store.put("k", contents[i % 2])
    stop.set()
    reader.join()
    assert seen <= set(contents)
