"""The one that users should never have to babysit: an array over an S3 server whose tasks are killed, requeued,
preempted, cancelled and run out of time, and after which each row is there once, as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from batchrun.cli import main
from batchrun.data.records import PARTIALS
from batchrun.data.source import to_records
from batchrun.data.store import Store
from tests.jobs import write_job
from tests.models import save_model
from tests.outputs import parts_of
from tests.services import S3, SlurmLab

TASKS = 6
N_ROWS = 160
KILLED, REQUEUED, CANCELLED, OUT_OF_TIME, PREEMPTED = (0, 1), 2, 3, 4, 5
CORES = sorted(os.sched_getaffinity(0))[:2]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def make_rows() -> list[dict[str, Any]]:
    lengths = random.Random(1)
    return [{"id": i, "text": f"row {i}", "params": {"max_tokens": lengths.randint(200, 600)}} for i in range(N_ROWS)]


def make_job(folder: Path, model: Path, source: str, output: str, **sections: Any) -> Path:
    """The same job wherever it runs: only what is no part of a result differs."""
    folder.mkdir(exist_ok=True)
    return write_job(
        folder,
        model,
        [],
        model={"reproducible": True, "dtype": "float32"},
        input={"path": source, "split_rows": 20},
        sampling={"temperature": 0.8, "ignore_eos": True, "logprobs": 1, "from_column": "params"},
        **{"output": {"path": output, "checkpoint_seconds": 1.0}} | sections,
    )


class Tasks:
    """What this test does to the tasks of its array."""

    def __init__(self, slurm: SlurmLab, array: str, logs: Path) -> None:
        self.slurm = slurm
        self.array = array
        self.logs = logs

    def log(self, task: int) -> str:
        path = self.logs / f"{self.array}_{task}.log"
        return path.read_text() if path.exists() else ""

    def worker(self, task: int) -> psutil.Process | None:
        """The process of batchrun that a task runs."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            try:
                if command[1:5] == ["-P", "-m", "batchrun", "submit"] and self._is_of(process.environ(), task):
                    return process
            except psutil.Error:
                continue
        return None

    def _is_of(self, environment: dict[str, str], task: int) -> bool:
        names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
        return [environment.get(name) for name in names] == [self.array, str(task)]

    def send(self, task: int, number: signal.Signals) -> None:
        worker = self.worker(task)
        assert worker is not None, f"task {task} runs no more"
        worker.send_signal(number)

    def has_pending(self, task: int, number: signal.Signals) -> bool:
        """Whether the signal waits for a stopped task to go on."""
        worker = self.worker(task)
        assert worker is not None, f"task {task} runs no more"
        status = Path(f"/proc/{worker.pid}/status").read_text()
        return bool(int(status.split("ShdPnd:")[1].split()[0], 16) >> number - 1 & 1)

    def restarts(self, task: int) -> int:
        return int(self.slurm.run("scontrol", "show", "job", f"{self.array}_{task}").split("Restarts=")[1].split()[0])


@pytest.mark.slow
def test_an_array_that_everything_happens_to(
    tmp_path: Path, s3: S3, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    model = save_model(tmp_path / "model", max_position_embeddings=1024)
    place = s3.fresh()
    rows = write_job(tmp_path, model, make_rows()).with_name("rows.jsonl")
    fsspec.filesystem("s3").put_file(str(rows), f"{place}/in/rows.jsonl")
    job = make_job(
        tmp_path / "array",
        model,
        f"{place}/in",
        f"{place}/out",
        engine={"device": "cpu", "max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_memory": "16MiB"},
        slurm={
            "partition": "low",
            "cpus": 1,
            "time": "30:00",
            "signal_seconds": 59,
            "array": TASKS,
            "logs": str(tmp_path / "logs"),
            "setup": f"taskset -pc {','.join(map(str, CORES))} $$ >/dev/null",  # as fast as anywhere
        },
    )

    result = run("submit", job, "--slurm")
    assert result.exit_code == 0, result.output
    array = result.stdout.split()[3]
    tasks = Tasks(slurm, array, tmp_path / "logs")
    store = Store(f"{place}/out")

    def at_work() -> int:
        """Workers that have begun rows."""
        return len({Path(name).name.partition("-")[0] for name in store.names(PARTIALS)})

    slurm.wait("all tasks at work", lambda: at_work() == TASKS, 120)
    slurm.run("scontrol", "update", f"jobid={array}_{OUT_OF_TIME}", "timelimit=1")
    for task in (OUT_OF_TIME, PREEMPTED):  # work is left to them, however long Slurm takes
        tasks.send(task, signal.SIGSTOP)
    for task in KILLED:
        tasks.send(task, signal.SIGKILL)
    slurm.run("scancel", f"{array}_{CANCELLED}")
    slurm.run("scontrol", "requeuehold", f"{array}_{REQUEUED}")
    slurm.wait("the signal", lambda: tasks.has_pending(OUT_OF_TIME, signal.SIGUSR1), 120)
    tasks.send(OUT_OF_TIME, signal.SIGCONT)
    slurm.wait("a requeue", lambda: "requeueing this task" in tasks.log(OUT_OF_TIME), 60)
    slurm.run("scontrol", "release", f"{array}_{REQUEUED}")
    before = tasks.restarts(PREEMPTED)
    slurm.sbatch("-p", "high", "-c", "8", "-o", "/dev/null", script="sleep 2")  # wants the whole node
    slurm.wait("a preemption", lambda: tasks.restarts(PREEMPTED) > before, 60)  # Slurm has it go on, to end
    slurm.wait_for_end(seconds=240)

    assert "SIGTERM" in tasks.log(CANCELLED)
    assert tasks.restarts(REQUEUED) >= 1
    assert [task for task in range(TASKS) if "requeueing this task" in tasks.log(task)] == [OUT_OF_TIME]
    for _ in range(5):
        if (result := run("submit", job, "--set", "engine.max_num_seqs=32")).exit_code == 0:
            break
    assert result.exit_code == 0, result.output

    whole = make_job(tmp_path / "whole", model, f"{place}/in", str(tmp_path / "whole" / "out"))
    assert run("submit", whole).exit_code == 0
    fsspec.filesystem("s3").get(f"{place}/out/", f"{tmp_path}/array/out/", recursive=True)
    assert parts_of(tmp_path / "array") == parts_of(tmp_path / "whole")
    parts = sorted((tmp_path / "whole" / "out").glob("part-*"))
    found = [row["id"] for part in parts for row in to_records(pq.read_table(part, partitioning=None))]
    assert found == list(range(N_ROWS))
    assert not any(s3.secret in path.read_text(errors="replace") for path in files_of(tmp_path))


def files_of(folder: Path) -> list[Path]:
    return [Path(root, name) for root, _, names in os.walk(folder) for name in names]
