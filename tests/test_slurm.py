"""Slurm: the section of a job, the script of its tasks, what tasks do when they are signalled, and a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun import load_job
from batchrun.cli import main
from batchrun.data.records import SLURM, STOP, encode
from batchrun.data.store import Store
from batchrun.engine.executor import thread_count
from batchrun.engine.step_times import subject
from batchrun.job import EngineSpec, JobSpec, ModelSpec
from batchrun.launch.slurm import ArrayRecord, Submission, log_pattern, script
from batchrun.models.config import ModelConfig
from batchrun.models.families import model_config
from batchrun.text import parse_slurm_time
from tests.jobs import output_rows, write_job
from tests.models import save_model
from tests.services import SlurmLab

ROWS = [{"id": i, "text": f"row {i}"} for i in range(5)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def make_job(folder: Path, slurm: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A job that is well-formed; nothing of it has to be there."""
    return write_job(folder, folder / "no-model", ROWS, slurm=slurm or {}, **sections)


# ---- the section


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("partition=[a]", "must be text"),
        ('partition=""', "must be text that is not empty"),
        ('partition="a\\n#SBATCH --array=0-99"', "must be one line of printable characters"),
        ('logs="a\\nb"', "must be one line of printable characters"),
        ('directives=["--constraint=a\\nrm -rf x"]', "must be one line of printable characters"),
        ("array=0", "must be at least 1, not 0"),
        ("max_running=0", "must be at least 1, not 0"),
        ("gpus=0", "must be at least 1, not 0"),
        ("cpus=two", "must be a whole number"),
        ("mem=lots", "must be a size as Slurm writes it, such as 64G"),
        ("time=4h", "must be a time limit as Slurm writes it, such as 04:00:00"),
        ("time=0", "must be a time limit above zero"),
        ("time=2", "slurm: signal_seconds is 120, and time only 120 seconds"),
        ("signal_seconds=0", "must be at least 1, not 0"),
        ("directives=[constraint=a100]", "must be an option of sbatch such as --constraint=a100"),
        ("directives=[--array=0-99]", "--array is batchrun's to set; use slurm.array"),
        ("directives=[-a 0-99]", "-a is batchrun's to set; use slurm.array"),
        ("directives=[--output=x.log]", "use slurm.logs"),
        ("partitoin=a", "unknown key; did you mean partition?"),
    ],
)
def test_faults_of_the_section(tmp_path: Path, override: str, fault: str) -> None:
    text = refused("submit", make_job(tmp_path), "--slurm", "--dry-run", "--set", f"slurm.{override}")
    assert fault in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("04:00:00", 14400),
        ("2-12", 216_000),
        ("1-00:30", 88_200),
        ("1-01:01:01", 90_061),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_slurm_time(text) == seconds


def test_nothing_of_it_decides_what_results_mean(tmp_path: Path) -> None:
    def configuration(job: JobSpec) -> dict[str, Any]:
        return job.configuration(revision="1", dtype="float32", max_model_len=64, numerics="test")

    path = make_job(tmp_path)
    with_slurm = load_job(path, ["slurm={partition: a, array: 4, setup: 'module load x', directives: [-C a100]}"])
    assert configuration(with_slurm) == configuration(load_job(path))


# ---- the script


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_the_script_asks_for_what_the_section_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {
        "partition": "gpu",
        "account": "lab",
        "qos": "long",
        "gpus": 2,
        "cpus": 8,
        "mem": 64_000,
        "time": "04:00:00",
        "array": 64,
        "max_running": 16,
        "signal_seconds": 300,
        "setup": "module load cuda\nsource env/bin/activate\n",
        "directives": ["--constraint=a100", "--mail-type END"],
    }
    result = run("submit", make_job(tmp_path, asked), "--slurm", "--dry-run")
    assert result.exit_code == 0, result.output
    assert directives(result.stdout) == [
        "--job-name=job",
        "--array=0-63%16",
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=8",
        "--gpus=2",
        "--mem=64000",
        "--time=04:00:00",
        "--signal=B:USR1@300",
        "--open-mode=append",
        f"--output={tmp_path}/out/_batchrun/logs/%A_%a.log",
        f"--chdir={tmp_path}",
        "--requeue",
        "--constraint=a100",
        "--mail-type END",
    ]
    assert "\nmodule load cuda\nsource env/bin/activate\n" in result.stdout
    assert not (tmp_path / "out").exists()
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)


def test_logs_lie_beside_a_local_output_and_in_the_working_directory_else(tmp_path: Path) -> None:
    path = make_job(tmp_path)
    assert log_pattern(load_job(path, [f"output.path=file://{tmp_path}/o"])) == f"{tmp_path}/o/_batchrun/logs/%A_%a.log"
    assert log_pattern(load_job(path, ["output.path=memory://o"])) == str(Path("slurm-logs/%A_%a.log").absolute())
    assert log_pattern(load_job(path, ["slurm.logs=/var/50%"])) == "/var/50%%/%A_%a.log"
    with pytest.raises(Exception, match="backslash"):
        log_pattern(load_job(path, [r"output.path=/a\b"]))


@pytest.mark.parametrize(
    "override",
    [
        "output.storage_options.key=hunter2",
        "output={path: out, storage_options: {secret: hunter2}}",
        "input={format: datasets, path: x, dataset_options: {token: hunter2}}",
        "input.path=https://me:hunter2@host/rows.jsonl",
        "input.path=['https://host/rows.jsonl?signature=hunter2']",
    ],
)
def test_secrets_are_never_written_into_a_script(tmp_path: Path, override: str) -> None:
    text = refused("submit", make_job(tmp_path), "--slurm", "--dry-run", "--set", override)
    assert f"--set {override.partition('=')[0]}: would be written into the script, and may be secret" in text
    assert "environment" in text
    assert "hunter2" not in text


def test_secrets_of_the_job_file_are_not_copied(tmp_path: Path) -> None:
    path = make_job(tmp_path, output={"storage_options": {"auto_mkdir": True, "password": "hunter2"}})
    assert "hunter2" not in script(Submission(load_job(path), str(path)))


class Sandbox:
    """Runs scripts as a batch shell of Slurm would, with commands in place of Python and scontrol, and in less time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "its python"
        self.requeues = folder / "requeued"
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "3",
        }
        self.setup = f"python={shlex.quote(str(self.python))}"
        (folder / "bin").mkdir()
        self._write(folder / "bin" / "scontrol", f'#!/bin/bash\necho "$*" >> {shlex.quote(str(self.requeues))}')

        self._write(
            folder / "bin" / "sleep",
            f'#!/bin/bash\nif [ "$1" = 1 ]; then set 0.05; fi\nexec {shutil.which("sleep")} "$@"',
        )

    def _write(self, path: Path, text: str) -> None:
        path.write_text(f"{text}\n")
        path.chmod(0o755)

    def start(self, program: str, slurm: dict[str, Any] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """A task whose worker is a shell ``program``; it has begun once that has written a file named ready."""
        self._write(self.python, f"#!/bin/bash\ncd {shlex.quote(str(self.folder))}\n{program}")
        section = {"setup": self.setup, **(slurm or {})}
        path = make_job(self.folder, section)
        text = script(Submission(load_job(path), str(path), **options))
        return subprocess.Popen(["bash", "-c", text], env=self.environment, cwd=self.folder)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def requeued(self) -> list[str]:
        return self.requeues.read_text().splitlines() if self.requeues.exists() else []


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


STOPS_IN_ORDER = """
trap 'echo USR1 >> got; sleep 0.2; exit 75' USR1
trap 'echo TERM >> got; sleep 0.2; exit 75' TERM
touch ready
while true; do sleep 0.02; done
"""


@pytest.mark.parametrize(
    ("signals", "slurm", "requeued"),
    [
        (["USR1"], {}, ["requeue 7_3"]),
        (["TERM"], {}, []),  # cancelled, or preempted, which Slurm requeues by itself
        (["USR1"], {"requeue": False}, []),
        (["USR1", "TERM"], {}, []),  # cancelled while it stops because of its time limit
        (["TERM", "USR1"], {}, []),
        (["USR1", "USR1", "USR1"], {}, ["requeue 7_3"]),
    ],
)
def test_a_task_passes_signals_on_and_requeues_itself_when_out_of_time(
    sandbox: Sandbox, signals: Sequence[str], slurm: dict[str, Any], requeued: list[str]
) -> None:
    with sandbox.start(STOPS_IN_ORDER, slurm) as shell:
        sandbox.wait_for("ready")
        for name in signals:
            shell.send_signal(getattr(signal, f"SIG{name}"))
            time.sleep(0.05)
        assert shell.wait(20) == 75
    got = (sandbox.folder / "got").read_text().split()
    assert got[0] in signals
    assert set(got) <= set(signals)
    assert sandbox.requeued() == requeued


@pytest.mark.parametrize("code", [0, 2, 3, 4, 75])
def test_a_task_that_ends_by_itself_is_over(sandbox: Sandbox, code: int) -> None:
    with sandbox.start(f"exit {code}", max_time=3600) as shell:
        assert shell.wait(20) == code
    assert sandbox.requeued() == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_task_that_finished_is_not_requeued(sandbox: Sandbox, code: int) -> None:
    with sandbox.start(f"trap 'exit {code}' USR1; touch ready; while true; do sleep 0.02; done") as shell:
        sandbox.wait_for("ready")
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(20) == code
    assert sandbox.requeued() == []


def test_a_task_that_was_killed_says_so(sandbox: Sandbox) -> None:
    with sandbox.start("kill -KILL $$") as shell:
        assert shell.wait(20) == 128 + signal.SIGKILL
    assert sandbox.requeued() == []


def test_max_time_requeues(sandbox: Sandbox) -> None:
    with sandbox.start("sleep 1.5; exit 75", max_time=1.0) as shell:
        assert shell.wait(20) == 75
    assert sandbox.requeued() == ["requeue 7_3"]


def test_a_worker_that_cannot_be_told_yet_is_requeued(sandbox: Sandbox) -> None:
    with sandbox.start("touch ready; exec sleep 60") as shell:
        sandbox.wait_for("ready")
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(20) == 128 + signal.SIGUSR1
    assert sandbox.requeued() == ["requeue 7_3"]


def test_signals_in_the_moment_of_the_end_do_not_change_its_code(sandbox: Sandbox) -> None:
    for _ in range(20):
        with sandbox.start("trap '' USR1; touch ready; sleep 0.05; exit 3") as shell:
            sandbox.wait_for("ready")
            for _ in range(100):
                shell.send_signal(signal.SIGUSR1)
                time.sleep(0.001)
            assert shell.wait(20) == 3
        (sandbox.folder / "ready").unlink()


@pytest.mark.parametrize("setup", ["set -euo pipefail", "set -u", "trap 'exit 9' USR1", "true  # a comment"])
def test_setup_may_change_the_shell(sandbox: Sandbox, setup: str) -> None:
    with sandbox.start(STOPS_IN_ORDER, {"setup": f"{sandbox.setup}\n{setup}"}) as shell:
        sandbox.wait_for("ready")
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(20) == 75
    assert sandbox.requeued() == ["requeue 7_3"]


def test_the_cache_of_kernels_is_a_tasks_own_and_goes_with_it(sandbox: Sandbox) -> None:
    with sandbox.start('echo "$TRITON_CACHE_DIR" > cache; touch "$TRITON_CACHE_DIR/kernel"; exit 3') as shell:
        assert shell.wait(20) == 3
    cache = Path((sandbox.folder / "cache").read_text().strip())
    assert cache.is_absolute()
    assert not cache.exists()


awkward = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
attacks = st.sampled_from(["$(touch pwned)", "'; touch pwned; '", "`touch pwned`", "a\n#SBATCH -a 0-9\ntouch pwned"])


@settings(max_examples=20, deadline=None)
@given(text=awkward | attacks)
def test_whatever_an_override_says_reaches_the_worker_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("it's $(touch pwned)")
    sandbox = Sandbox(folder)
    override = f"prompt={json.dumps({'template': text.replace('{', '(')})}"
    show = "import json, os, sys; json.dump(sys.argv[1:], open('argv', 'w'))"
    program = f'exec {shlex.quote(sys.executable)} -c {shlex.quote(show)} "$@"'
    with sandbox.start(program, overrides=[override], limit=7, workers=2, max_time=60) as shell:
        assert shell.wait(20) == 0
    expected = ["-P", "-m", "batchrun", "submit", str(folder / "job.yaml"), "--set", override]
    expected += ["--limit", "7", "--workers", "2", "--max-time", "60"]
    assert json.loads((folder / "argv").read_text()) == expected
    assert not list(folder.rglob("*pwned*"))


# ---- processors


def test_threads_are_at_most_what_slurm_gave(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    def processors() -> float:
        config: ModelConfig = model_config(json.loads((tiny_model / "config.json").read_text()))
        return float(subject(ModelSpec(name_or_path="x"), EngineSpec(), config, "float32")["processors"])

    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert thread_count("auto") is None
    everywhere = processors()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for share, threads in (("1", 1), ("2", 2), ("64", 3)):
            monkeypatch.setenv("SLURM_CPUS_PER_TASK", share)
            assert thread_count("auto") == threads
            assert processors() == min(everywhere, int(share))
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", "")
        assert thread_count("auto") is None
    finally:
        torch.set_num_threads(before)
    assert thread_count(1) == 1
    assert thread_count(10_000) == os.cpu_count()


# ---- without Slurm


def record_array(folder: Path, job_id: int, tasks: int, logs: Path) -> None:
    array = ArrayRecord(
        job_id=str(job_id),
        cluster="far",
        tasks=tasks,
        submitted=f"2026-01-01T00:00:{job_id:02d}+00:00",
        script="x.sh",
        logs=f"{logs}/%A_%a.log".replace("50%", "50%%"),
    )
    Store(str(folder / "out")).put(f"{SLURM}/{job_id}.json", encode(array))


def test_without_slurm_only_submitting_fails(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path, tiny_model, ROWS, sampling={"max_tokens": 2}, slurm={"array": 2})
    assert "nothing was submitted yet" in refused("cancel", job)
    assert "nothing was submitted yet" in refused("logs", job)
    monkeypatch.setenv("PATH", "")
    assert "scontrol: no such command: this machine submits no jobs to Slurm" in refused("submit", job, "--slurm")
    assert "does not go with --slurm" in refused("submit", job, "--slurm", "--overwrite")
    assert run("submit", job).exit_code == 0
    record_array(tmp_path, 1, 2, tmp_path)
    assert json.loads(run("status", job, "--json").stdout)["slurm"] == []

    assert run("cancel", job).exit_code == 0
    first = json.loads((tmp_path / "out" / STOP).read_text())
    assert run("cancel", tmp_path / "out").exit_code == 0
    assert first.keys() == {"id", "requested"}
    assert json.loads((tmp_path / "out" / STOP).read_text())["id"] != first["id"]
    assert run("status", job).exit_code == 0


def test_a_job_is_checked_before_it_is_submitted(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, ROWS)
    assert "did you mean text?" in refused("submit", job, "--slurm", "--set", "prompt.template={{ txet }}")
    assert not (tmp_path / "out").exists()


def test_logs_are_the_ends_of_the_newest_arrays(tmp_path: Path) -> None:
    job, logs = make_job(tmp_path), tmp_path / "logs 50%"
    logs.mkdir()
    for array, tasks in ((8, 1), (9, 3)):
        record_array(tmp_path, array, tasks, logs)
    (logs / "8_0.log").write_text("old\n")
    assert f"array 9 has no log yet in {logs}" in refused("logs", job)
    (logs / "9_0.log").write_text("".join(f"line {i}\n" for i in range(30)))
    (logs / "9_2.log").write_text("only\n")

    text = run("logs", job, "--lines", 2).stdout
    assert text.splitlines() == [
        f"==> task 0: {logs}/9_0.log <==",
        "line 28",
        "line 29",
        f"==> task 2: {logs}/9_2.log <==",
        "only",
    ]
    assert run("logs", tmp_path / "out", 0).stdout.splitlines() == [f"line {i}" for i in range(20, 30)]
    assert "array 9 has no log of task 1 yet" in refused("logs", job, 1)
    assert "array 9 has tasks 0 to 2" in refused("logs", job, 3)


# ---- a real Slurm


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=8192)


def slow_job(folder: Path, model: Path, slurm: dict[str, Any], *, rows: int = 12, tokens: int = 4000) -> Path:
    """A job that takes about a minute, its rows one after another, and whose work is durable within half a second."""
    return write_job(
        folder,
        model,
        [{"id": i, "text": f"row {i}"} for i in range(rows)],
        input={"split_rows": 4},
        sampling={"max_tokens": tokens, "ignore_eos": True},
        output={"checkpoint_seconds": 0.5},
        engine={"device": "cpu", "max_num_seqs": 1, "max_num_batched_tokens": 64, "kv_cache_memory": "16MiB"},
        slurm=slurm,
    )


def submitted(job: Path, *options: object) -> str:
    """The id of the array of `submit --slurm`."""
    result = run("submit", job, "--slurm", *options)
    assert result.exit_code == 0, result.output
    found = re.search(r"submitted array (\d+) of", result.stdout)
    assert found, result.stdout
    return found[1]


def status(job: Path) -> dict[str, Any]:
    result = run("status", job, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def log_of(job: Path, array: str, task: int = 0) -> str:
    path = job.parent / "out" / "_batchrun" / "logs" / f"{array}_{task}.log"
    return path.read_text() if path.exists() else ""


def runs_again(log: str) -> bool:
    """Whether a task has stopped, and told of its progress since."""
    return "rows (" in log.partition("exit    75: stopped early")[2]


def has_durable_tokens(job: Path) -> bool:
    return any((job.parent / "out" / "_batchrun" / "partials").glob("*.parquet"))


@pytest.mark.slow
def test_an_array_from_submit_to_its_logs(tmp_path: Path, tiny_model: Path, slurm: SlurmLab) -> None:
    job = write_job(
        tmp_path,
        tiny_model,
        ROWS,
        sampling={"max_tokens": 3, "temperature": 0},
        slurm={"array": 2, "max_running": 1, "partition": "debug", "cpus": 1},
    )
    held = submitted(job, "--set", "slurm.directives=[--hold]")
    found = status(job)
    assert found["state"] == "queued"
    assert [(task["index"], task["state"]) for task in found["slurm"][0]["queued"]] == [(0, "PENDING"), (1, "PENDING")]
    assert f"array {held}: 2 pending (JobHeldUser)" in run("status", job).stdout
    assert run("cancel", job).exit_code == 0
    slurm.wait_for_end(held)
    assert f"array {held}: 2 ended" in run("status", tmp_path / "out").stdout

    array = submitted(job)
    slurm.wait_for_end(array)
    assert [row["id"] for row in output_rows(tmp_path)] == list(range(5))
    assert status(job)["state"] == "done"
    assert [one["job_id"] for one in status(job)["slurm"]] == [array]
    text = run("logs", job, "--follow").stdout  # which ends, since the array has
    assert "5 ok" in text
    assert "all 5 rows were done before" in text
    record = json.loads((tmp_path / "out" / SLURM / f"{array}.json").read_text())
    assert (record["cluster"], record["tasks"]) == ("lab", 2)
    assert directives((tmp_path / "out" / record["script"]).read_text())[1] == "--array=0-1%1"


@pytest.mark.slow
def test_what_slurm_refuses_and_what_it_allows(
    tmp_path: Path, tiny_model: Path, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "x\"; touch pwned; $(touch pwned) `touch pwned` \\ # it's"
    folder = tmp_path / "a folder with spaces; touch pwned"
    folder.mkdir()
    job = write_job(folder, tiny_model, ROWS, sampling={"max_tokens": 2})
    job.write_text(json.dumps(json.loads(job.read_text()) | {"name": name}))

    text = refused("submit", job, "--slurm", "--set", "slurm.partition=nowhere")
    assert "sbatch refused" in text
    assert "partition" in text
    result = run("submit", job, "--slurm", "--set", "slurm.array=20000", "--set", "slurm.directives=[--hold]")
    assert result.exit_code == 0, result.output
    assert "this cluster allows 10001 tasks in an array, not 20000" in result.stdout
    many = status(job)["slurm"][0]
    assert (many["tasks"], len(many["queued"])) == (10001, 10001)
    assert run("cancel", job).exit_code == 0

    array = submitted(job)
    assert slurm.run("squeue", "-h", "-j", array, "-o", "%j").splitlines()[:1] == [name]
    slurm.wait_for_end(array)
    assert log_of(job, array).count("5 ok") == 1
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.slow
def test_cancelling_keeps_what_is_done(tmp_path: Path, long_model: Path, slurm: SlurmLab) -> None:
    job = slow_job(tmp_path, long_model, {"array": 2, "partition": "debug", "cpus": 1})
    array = submitted(job)
    slurm.wait("durable tokens", lambda: has_durable_tokens(job))
    result = run("cancel", job)
    assert (result.exit_code, f"cancelled array {array}" in result.stdout) == (0, True)
    slurm.wait_for_end(array)
    assert status(job)["state"] == "stopped"
    assert "requeueing" not in log_of(job, array) + log_of(job, array, 1)
    assert "stopping (" in log_of(job, array) + log_of(job, array, 1)
    assert has_durable_tokens(job)
    assert run("submit", job, "--max-time", "1s").exit_code == 75


@pytest.mark.slow
def test_a_task_near_its_time_limit_requeues_itself_and_goes_on(
    tmp_path: Path, long_model: Path, slurm: SlurmLab
) -> None:
    limits = {"time": "1:00", "signal_seconds": 59, "partition": "debug", "cpus": 1}
    job = slow_job(tmp_path, long_model, limits, tokens=8000)
    array = submitted(job)
    slurm.wait("a requeue", lambda: "requeueing this task" in log_of(job, array), 120)
    assert "stopping (SIGUSR1)" in log_of(job, array)
    slurm.wait("the second run", lambda: runs_again(log_of(job, array)), 120)
    assert run("cancel", job).exit_code == 0


@pytest.mark.slow
def test_a_preempted_task_is_requeued_by_slurm_and_goes_on(tmp_path: Path, long_model: Path, slurm: SlurmLab) -> None:
    job = slow_job(tmp_path, long_model, {"partition": "low", "cpus": 5})
    array = submitted(job)
    slurm.wait("durable tokens", lambda: has_durable_tokens(job))
    slurm.sbatch("-p", "high", "-c", "5", "-o", "/dev/null", script="sleep 3")
    slurm.wait("the second run", lambda: runs_again(log_of(job, array)), 120)
    text = log_of(job, array)
    assert "stopping (SIGTERM)" in text
    assert "requeueing this task" not in text
    assert run("cancel", job).exit_code == 0


@pytest.mark.slow
def test_a_script_of_ones_own(tmp_path: Path, long_model: Path, slurm: SlurmLab) -> None:
    """`exec` has the signals of Slurm reach batchrun itself."""
    job = slow_job(tmp_path, long_model, {})
    own = f"exec {sys.executable} -m batchrun submit {job}"
    log = tmp_path / "own-%a.log"
    options = ["-p", "debug", "-c", "2", "-a", "0-1%1", "-t", "1", "--signal=B:USR1@59", "-o", str(log)]
    array = slurm.sbatch(*options, script=own)
    first = tmp_path / "own-0.log"
    slurm.wait("the signal", lambda: first.exists() and "stopping (SIGUSR1)" in first.read_text(), 120)
    second = tmp_path / "own-1.log"  # of the same array, takes the rest over at once
    slurm.wait("the next task", lambda: second.exists() and "rows (" in second.read_text(), 60)
    assert status(job)["slurm"] == []  # it is not batchrun's array
    slurm.run("scancel", array)
    slurm.wait_for_end(array)
    assert status(job)["state"] == "stopped"
