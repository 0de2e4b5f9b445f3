"""Storage that fails: behind a proxy that breaks one request in three, and where the process dies at any call."""

from __future__ import annotations

import gzip
import itertools
import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from batchrun.data import store as store_module
from batchrun.data.records import HOME
from batchrun.data.source import Source
from batchrun.data.store import TEMPORARY, StorageError, Store
from batchrun.data.view import OutputView
from batchrun.errors import JobError, StoppedError
from batchrun.job import InputSpec, JobSpec
from batchrun.observe.status import read_status
from tests.outputs import make_job, parts_of, run_job, write_lines
from tests.processes import PROCESSES
from tests.services import CHAOS, S3, chaos, needs_chaos

SEEDS = range(10)
RECORDS: list[Any] = [{"id": f"r{i}", "text": f"text {i}", "n": i} for i in range(5)]
ALONE = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}  # botocore tries nothing again: batchrun has to


def opened(server: S3, url: str, **options: Any) -> Store:
    return Store(url, {**server.storage_options, **ALONE, **options})


@pytest.fixture(autouse=True)
def fresh_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that know what the environment says now, and nothing of the machine that they run on."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An input of two files, of which one is compressed, and the results of a local run over it."""
    write_lines(tmp_path / "in" / "a.jsonl", RECORDS)
    write_lines(tmp_path / "in" / "b.jsonl", [{"id": 7, "text": "seven", "n": "x", "new": [1]}, "{bad"])
    path = tmp_path / "in" / "b.jsonl"
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    run_job(make_job(tmp_path))
    return tmp_path


def remote_job(folder: Path, url: str, options: dict[str, Any]) -> JobSpec:
    """The job over ``folder``'s input, which it puts under ``url`` and where its results go, too."""
    job = make_job(folder)
    places = {"in": f"{url}/in", "out": f"{url}/out"}
    inputs = job.input.model_copy(update={"path": places["in"], "storage_options": options})
    output = job.output.model_copy(update={"path": places["out"], "storage_options": options})
    return job.model_copy(update={"input": inputs, "output": output})


def upload(server: S3, folder: Path, url: str) -> None:
    store = Store(url, server.storage_options)
    for path in (folder / "in").iterdir():
        store.put(f"in/{path.name}", path.read_bytes())


def remote_parts(server: S3, url: str) -> dict[str, bytes]:
    store = Store(f"{url}/out", server.storage_options)
    return {name: store.read(name) for name in store.names("") if name.startswith("part-")}


# ---- every operation behind the proxy


def use_everything(store: Store, folder: Path) -> None:
    """Each operation, whose effect the next ones look at."""
    assert store.read_if_any("a/absent") is None
    for index in range(5):
        store.put(f"a/{index}", f"content {index}".encode())
    store.put("a/0", b"new")
    assert store.names("a") == [f"a/{index}" for index in range(5)]
    assert store.sizes("a") == {"0": 3} | {str(index): 9 for index in range(1, 5)}
    assert [store.read(f"a/{index}") for index in range(2)] == [b"new", b"content 1"]
    assert (store.size("a/1"), store.exists("a/absent"), store.size("a")) == (9, False, None)
    store.probe_exclusive_create()
    assert store.create("c/x", b"mine")
    assert not store.create("c/x", b"theirs")
    assert store.create("c/x", b"mine")
    with store.scratch() as scratch:
        (scratch / "built").write_bytes(os.urandom(300_000))
        built = (scratch / "built").read_bytes()
        store.put_file(scratch / "built", "staged/p")
    store.publish("staged/p", "p")
    store.publish("staged/p", "p")
    assert store.names("staged") == []
    with store.local_copy("p") as copy:
        assert copy.read_bytes() == built
    store.delete(store.names("a"))
    assert store.names("a") == []
    assert {"c", "p"} <= set(store.entries())  # and directories that are empty now, on some servers
    store.put(f"{TEMPORARY}/{uuid.uuid4().hex}-x", b"left by the dead")
    store.sweep_temporary(list)
    assert store.names(TEMPORARY) == []


def for_each_seed(check: Callable[[int], None]) -> None:
    """All at once: they mostly wait."""
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        for seed, done in [(seed, pool.submit(check, seed)) for seed in SEEDS]:
            try:
                done.result()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise


@needs_chaos
def test_every_operation_survives_faults(s3: S3, tmp_path: Path) -> None:
    def check(seed: int) -> None:
        with chaos(s3, seed) as faulty:
            use_everything(opened(faulty, s3.fresh()), tmp_path)

    for_each_seed(check)


def create_ten(server: S3, url: str, writer: int, ready: Any) -> list[bool]:
    store = opened(server, url)
    store.exists("x")
    ready.wait()
    return [store.create(f"races/{name}", f"writer {writer}".encode()) for name in range(10)]


@needs_chaos
def test_exclusive_creates_have_one_winner_behind_faults(s3: S3) -> None:
    url = s3.fresh()
    with chaos(s3, 1) as faulty, PROCESSES.Manager() as manager, PROCESSES.Pool(4) as pool:
        ready = manager.Barrier(4)
        answers = pool.starmap(create_ten, [(faulty, url, writer, ready) for writer in range(4)], chunksize=1)
    store = Store(url, s3.storage_options)
    for name, won in enumerate(zip(*answers, strict=True)):
        assert won.count(True) == 1
        assert store.read(f"races/{name}") == f"writer {won.index(True)}".encode()


@needs_chaos
@pytest.mark.parametrize("faults", [{"s500": 0.3}, {"slow503": 0.3}, {"reset": 0.3}, {"cut": 0.5}])
def test_large_files_arrive_whole(s3: S3, tmp_path: Path, faults: dict[str, float]) -> None:
    content = os.urandom(1 << 20) * 21  # two parts
    url = s3.fresh()
    with chaos(s3, 5, **faults) as faulty:
        store = opened(faulty, url)
        name = f"large-{store.writer}"
        (tmp_path / "large").write_bytes(content)
        store.put_file(tmp_path / "large", name)
        with store.local_copy(name) as copy:
            assert copy.read_bytes() == content
    sweeper = Store(url, s3.storage_options)
    sweeper.sweep_temporary(list)
    assert uploads_of(sweeper) == []


@needs_chaos
def test_upload_whose_completion_got_no_reply_is_whole(s3: S3, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 21  # two parts
    with chaos(s3, 2, **{"after-put-reset": 0.25}) as faulty:
        for attempt in range(3):
            store = opened(faulty, s3.fresh())
            (tmp_path / "large").write_bytes(content)
            store.put_file(tmp_path / "large", f"large{attempt}")
            assert Store(store.url, s3.storage_options).read(f"large{attempt}") == content


# ---- a job behind the proxy


@needs_chaos
def test_job_behind_faults_gives_the_same_bytes(s3: S3, folder: Path) -> None:
    def check(seed: int) -> None:
        url = s3.fresh()
        upload(s3, folder, url)
        with chaos(s3, seed) as faulty:
            manifest, answered = run_job(remote_job(folder, url, {**faulty.storage_options, **ALONE}))
        assert sorted(answered) == sorted(set(answered))
        assert (manifest.complete, manifest.rows, manifest.ok) == (True, 7, 6)
        assert remote_parts(s3, url) == parts_of(folder)

    for_each_seed(check)


@pytest.mark.slow
@needs_chaos
def test_job_with_the_clients_own_retries(s3: S3, folder: Path) -> None:
    url = s3.fresh()
    upload(s3, folder, url)
    fewer = {name: share / 2 for name, share in CHAOS.items()}  # a client waits long after each
    with chaos(s3, 11, **fewer) as faulty:
        run_job(remote_job(folder, url, faulty.storage_options))
    assert remote_parts(s3, url) == parts_of(folder)


# ---- reading


def write_inputs(folder: Path, n_rows: int) -> dict[str, bytes]:
    """One content as JSONL, plain and compressed, and as Parquet of many row groups; several megabytes each."""
    noise = [uuid.UUID(int=(i * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128).hex * 8 for i in range(n_rows)]
    plain = b"".join(b'{"n": %d, "text": "%s"}\n' % (i, text.encode()) for i, text in enumerate(noise))
    pq.write_table(pa.table({"n": range(n_rows), "text": noise}), folder / "x.parquet", row_group_size=n_rows // 8)
    return {
        "x.jsonl": plain,
        "x.jsonl.gz": gzip.compress(plain, 1),
        "x.jsonl.zst": zstandard.compress(plain, 1),
        "x.parquet": (folder / "x.parquet").read_bytes(),
    }


def numbers(spec: InputSpec) -> Iterator[int]:
    source = Source(spec)
    for split in source.splits(source.files()):
        for row in source.rows(split):
            assert row.error is None
            assert row.data is not None
            yield row.data["n"]


@needs_chaos
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_reading_goes_on_where_it_broke_off(s3: S3, tmp_path: Path, name: str) -> None:
    url = s3.fresh()
    Store(url, s3.storage_options).put(f"in/{name}", write_inputs(tmp_path, 40_000)[name])
    with chaos(s3, 3, cut=0.5, reset=0.1, s500=0.1, slow503=0.1) as faulty:
        options = {**faulty.storage_options, **ALONE}
        spec = InputSpec(path=[f"{url}/in/*", url], split_rows=15_000, storage_options=options)
        assert list(numbers(spec)) == list(range(40_000))


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.zst", "x.parquet"])
def test_a_file_that_changes_is_never_mixed(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("batchrun.data.jsonl._BUFFER_BYTES", 1 << 16)
    store = Store(s3.fresh(), s3.storage_options)
    content = write_inputs(tmp_path, 40_000)[name]
    store.put(name, content)
    source = Source(InputSpec(path=store.path(name), storage_options=s3.storage_options))
    rows = source.rows(source.splits(source.files())[0])
    assert next(rows).data is not None
    store.put(name, content[:-1] + b" ")
    with pytest.raises(StoppedError, match="changed while the job ran"):
        list(rows)


@needs_chaos
def test_storage_that_stays_away_ends_reading(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun.data.patience.PATIENCE", 0.5)
    url = s3.fresh()
    Store(url, s3.storage_options).put("x.jsonl", write_inputs(tmp_path, 100_000)["x.jsonl"])
    with chaos(s3, 0, cut=0) as proxy:
        source = Source(InputSpec(path=f"{url}/x.jsonl", storage_options={**proxy.storage_options, **ALONE}))
        rows = source.rows(source.splits(source.files())[0])
        assert next(rows).data is not None
    with pytest.raises(StorageError, match=r"cannot read s3://.*/x\.jsonl: .*connect"):
        list(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.zst", "x.parquet"])
def test_reading_holds_little(s3: S3, tmp_path: Path, name: str) -> None:
    """Of a file of 90 MB, which is one split, and in the case of Parquet one row group of eight."""
    store = Store(s3.fresh(), s3.storage_options)
    (tmp_path / "file").write_bytes(write_inputs(tmp_path, 300_000)[name])
    store.put_file(tmp_path / "file", name)
    program = f"""
import resource
from tests.test_storage_faults import InputSpec, numbers
rows = numbers(InputSpec(path={store.path(name)!r}))
next(rows)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(rows) == sum(range(300_000))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    environment = {**os.environ, **s3.environment}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=Path(__file__).parents[1], capture_output=True, check=True
    )
    assert float(done.stdout) < 48  # MB


# ---- uploads that nobody finishes


def uploads_of(store: Store) -> list[str]:
    prefix = store.fs.split_path(store.root)[1]
    reply = store.fs.call_s3("list_multipart_uploads", Bucket=store.fs.split_path(store.root)[0], Prefix=prefix)
    return [upload["Key"].removeprefix(f"{prefix}/") for upload in reply.get("Uploads", [])]


def test_abandoned_uploads_are_swept(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    store, dead, living, other = (Store(s3.fresh(), s3.storage_options) for _ in range(4))
    bucket, prefix, _ = store.fs.split_path(store.root)
    dead_name, living_name = (f"staged/00001-{writer.writer}" for writer in (dead, living))
    for name in (dead_name, living_name, "part-00001.parquet"):
        store.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{name}")
    other_bucket, other_prefix, _ = other.fs.split_path(other.root)
    other.fs.call_s3("create_multipart_upload", Bucket=other_bucket, Key=f"{other_prefix}/{dead_name}")

    store.sweep_temporary(lambda: [living.writer])
    assert sorted(uploads_of(store)) == ["part-00001.parquet", living_name]
    monkeypatch.setattr(store_module, "_UPLOAD_AGE", timedelta(seconds=-60))
    store.sweep_temporary(lambda: [living.writer])
    assert uploads_of(store) == [living_name]
    assert uploads_of(other) == [dead_name]


def test_who_may_not_list_uploads_can_still_finish(s3: S3, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    store = Store(s3.fresh(), s3.storage_options)
    call = store.fs.call_s3

    def refuse(method: str, *arguments: Any, **options: Any) -> Any:
        if method == "list_multipart_uploads":
            raise PermissionError("Access Denied")
        return call(method, *arguments, **options)

    monkeypatch.setattr(store.fs, "call_s3", refuse)
    store.sweep_temporary(list)
    assert "unfinished uploads may be left" in caplog.text


# ---- refusals


class CarelessFileSystem(MemoryFileSystem):
    """Storage that takes the condition of an exclusive create for granted."""

    protocol = "careless"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("careless://", "memory://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode="overwrite", **options)


def test_storage_that_ignores_the_condition_is_refused(folder: Path) -> None:
    fsspec.register_implementation("careless", CarelessFileSystem, clobber=True)
    job = make_job(folder, path=f"careless://{uuid.uuid4().hex}")
    with pytest.raises(JobError, match="does not refuse to create a file that exists, so results could not be"):
        run_job(job)


def test_permanent_errors_end_at_once(s3: S3) -> None:
    absent = Store(f"s3://no-such-bucket-{uuid.uuid4().hex}/out", s3.storage_options)
    started = datetime.now(UTC)
    assert not absent.exists("x")
    with pytest.raises(StorageError, match=r"cannot read s3://no-such-bucket-.*/x: it is gone"), absent.local_copy("x"):
        pass
    for options in ({"secret": "wrong"}, {"key": "wrong"}):
        forbidden = Store(s3.fresh(), {**s3.storage_options, **options})
        for action in (
            lambda store: store.put("x", b"x"),
            lambda store: store.create("x", b"x"),
            lambda store: store.names(""),
            lambda store: store.size("x"),
            lambda store: store.read("x"),
        ):
            with pytest.raises(StorageError, match=r"cannot \w+.* s3://.*: PermissionError: ") as caught:
                action(forbidden)
            assert s3.secret not in str(caught.value)
    assert datetime.now(UTC) - started < timedelta(seconds=15)


# ---- secrets


@pytest.mark.parametrize("told_by", ["options", "environment"])
def test_no_secret_is_ever_written(
    s3: S3, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, capfd: Any, told_by: str
) -> None:
    url = s3.fresh()
    upload(s3, folder, url)
    with caplog.at_level(logging.DEBUG, "batchrun"):
        if told_by == "options":
            job = remote_job(folder, url, s3.storage_options)
        else:
            for name, value in s3.environment.items():
                monkeypatch.setenv(name, value)
            job = remote_job(folder, url, {})
        manifest, _ = run_job(job)
        shown = [str(read_status(job.output.path, ())) if told_by == "environment" else "", str(manifest)]
    assert remote_parts(s3, url) == parts_of(folder)
    store = Store(url, s3.storage_options)
    everything = {path: store.fs.cat_file(path) for path in store.fs.find(store.root)}
    assert any(HOME in path for path in everything)
    shown += [record.getMessage() for record in caplog.records if record.name.startswith("batchrun")]
    shown += [*capfd.readouterr(), repr(store)]
    for secret in (s3.key, s3.secret):
        assert not [path for path, content in everything.items() if secret.encode() in content]
        assert not [text for text in shown if secret in text]


@pytest.mark.parametrize(
    ("url", "options", "variables"),
    [
        ("{out}", {"key": "hunter22", "secret": "hunter23", "token": "hunter24"}, {}),
        ("{out}", {"client_kwargs": {"aws_secret_access_key": "hunter22", "aws_access_key_id": "hunter23"}}, {}),
        ("{out}", {}, {"AWS_ACCESS_KEY_ID": "hunter22", "AWS_SECRET_ACCESS_KEY": "hunter23"}),
        ("s3://hunter22:hunter23@bucket/out", {}, {}),
        ("http://hunter22:hunter23@127.0.0.1:9/x.jsonl?sig=hunter24", {}, {}),
        ("http://127.0.0.1:9/x.jsonl", {"headers": {"Authorization": "Bearer hunter22"}}, {}),
    ],
)
def test_no_error_tells_a_secret(
    s3: S3,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    url: str,
    options: dict[str, Any],
    variables: dict[str, str],
) -> None:
    monkeypatch.setattr("batchrun.data.patience.PATIENCE", 0.3)
    for name, value in {"AWS_ENDPOINT_URL": s3.endpoint, **variables}.items():
        monkeypatch.setenv(name, value)
    address = url.format(out=s3.fresh())
    errors = []
    for action in (
        lambda: Source(InputSpec(path=address, storage_options=options)).files(),
        lambda: run_job(make_job(folder, path=address, storage_options=options)),
        lambda: OutputView.at(address, options),
    ):
        with pytest.raises(JobError) as caught:
            action()
        errors.append(str(caught.value))
    assert "hunter" not in "\n".join(errors) + caplog.text


# ---- kills at every storage call


def ends_at(job: JobSpec, patch: Callable[[Iterator[int]], None], call: int) -> bool:
    """Runs the job in a process that ends at that storage call; whether it did.

    The call has no effect then; that it has one and the process ends is what ending at the next call is.
    """
    process = PROCESSES.Process(target=run_patched, args=(job, patch, call))
    process.start()
    process.join()
    return process.exitcode == 9


def run_patched(job: JobSpec, patch: Callable[[Iterator[int]], None], call: int) -> None:
    patch(iter(range(call)))
    run_job(job)


def end_disk_calls(calls: Iterator[int]) -> None:
    os.fsync = lambda descriptor: None  # processes die here, machines do not

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) is None:
                os._exit(9)
            return function(*arguments, **options)

        return wrapper

    for name in ("link", "mkdir", "open", "replace", "unlink"):
        setattr(os, name, deadly(getattr(os, name)))


def end_s3_requests(calls: Iterator[int]) -> None:
    request = s3fs.S3FileSystem._call_s3

    async def deadly(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            os._exit(9)
        return await request(*arguments, **options)

    s3fs.S3FileSystem._call_s3 = deadly


@pytest.mark.slow
def test_kill_at_every_call_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    write_lines(tmp_path / "in" / "a.jsonl", RECORDS[:3])
    job = make_job(tmp_path, split_rows=2)
    run_job(job)
    expected = parts_of(tmp_path)
    for call in itertools.count():
        shutil.rmtree(tmp_path / "out")
        ended = ends_at(job, end_disk_calls, call)
        manifest, _ = run_job(job)
        assert (manifest.complete, parts_of(tmp_path)) == (True, expected), f"ended at call {call}"
        if not ended:
            break
    assert call > 50


@pytest.mark.slow
def test_kill_at_requests_of_s3(s3: S3, folder: Path) -> None:
    for call in itertools.count(0, 12):
        url = s3.fresh()
        upload(s3, folder, url)
        job = remote_job(folder, url, s3.storage_options)
        ended = ends_at(job, end_s3_requests, call)
        manifest, _ = run_job(job)
        assert (manifest.complete, remote_parts(s3, url)) == (True, parts_of(folder)), f"ended at request {call}"
        if not ended:
            break
    assert call > 100
