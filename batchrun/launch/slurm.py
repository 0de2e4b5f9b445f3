"""A job as a Slurm array: the script of its tasks, submitting it, and what became of it.

A task is `batchrun submit JOB` under a batch shell that passes signals on. It owns no rows: what is done, and by whom,
is decided in the output, so that tasks may start, end, be preempted and be requeued at any time and in any number.
Arrays are recorded in the output, ``_batchrun/slurm/<job id>.json``. No torch.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from batchrun.data.records import JOB, LOGS, SLURM, STOP, Record, encode, read_record
from batchrun.data.store import StorageError, Store
from batchrun.data.workers import Watch
from batchrun.errors import EXIT_STOPPED, JobError, StoppedError
from batchrun.job import JobSpec, output_of, secret_overrides

_PATIENCE_SECONDS = 60.0  # for a command of Slurm: a busy controller takes long
_FOLLOW_SECONDS = 0.5
_QUEUE_SECONDS = 10.0  # between two looks at the queue while a log is followed
_RECORD_NAME = re.compile(rf"{SLURM}/(\d+)\.json")
_PLAIN_VALUE = re.compile(r"[\w@%+:,./=-]+", re.ASCII)
_NOTHING_THERE = "nothing was submitted yet"

_SCRIPT = Template("""\
#!/bin/bash
$directives

# A task of this array runs rows of one job until none are left. No row belongs to any task, so that tasks may start, be
# requeued or fail in any number; `sbatch` takes this script again as it is. Written by batchrun.

python=$python  # slurm.setup may choose another
$setup
set +e  # whatever was set before: exit codes are looked at below
$cache
child= time_is_up= told_to_end=
pass_on() {
    if [ -n "$$child" ]; then kill -s "$$1" "$$child" 2>/dev/null; fi
}
trap 'time_is_up=1; pass_on USR1' USR1  # the time limit is near
trap 'told_to_end=1; pass_on TERM' TERM  # cancelled or preempted
$clock
"$$python" -P -m batchrun submit \\
    $arguments &
child=$$!
if [ -n "$$told_to_end" ]; then pass_on TERM; elif [ -n "$$time_is_up" ]; then pass_on USR1; fi

# Not by `wait`: a signal interrupts it, and bash may then have lost the code of a child that ended in that moment.
while kill -0 "$$child" 2>/dev/null; do { sleep 1; } 2>/dev/null; done
trap '' USR1 TERM
wait "$$child"
code=$$?
trap 'told_to_end=1' TERM
$requeue
exit "$$code"
""")

_CACHE = """
TRITON_CACHE_DIR=$(mktemp -d) && export TRITON_CACHE_DIR  # on this node: tasks must not share one over a network
trap 'rm -rf "$TRITON_CACHE_DIR"' EXIT
"""

# 138: USR1 came before the worker was ready for it. After TERM, Slurm itself knows whether the task is to come again.
_REQUEUE = Template("""
if [ "$$code" -eq $stopped ] || [ "$$code" -eq 138 ]; then
    if [ -z "$$told_to_end" ] && $due; then
        echo "batchrun: out of time with work left: requeueing this task" >&2
        scontrol requeue "$${SLURM_ARRAY_JOB_ID}_$${SLURM_ARRAY_TASK_ID}"
    fi
fi
""")


class ArrayRecord(Record):
    """An array that was submitted."""

    job_id: str
    cluster: str
    tasks: int
    submitted: str  # ISO 8601, UTC
    script: str  # name in the output
    logs: str  # Slurm's pattern of the log files' paths


@dataclass(frozen=True)
class Submission:
    """A job and what else of the command line its tasks are to have. ``max_time`` is in seconds."""

    job: JobSpec
    path: str
    overrides: Sequence[str] = ()
    limit: int | None = None
    workers: int | None = None
    max_time: float | None = None

    def arguments(self) -> list[str]:
        """Of `batchrun submit`. Raises JobError where an override is secret."""
        if secret := secret_overrides(self.overrides):
            raise JobError(
                f"--set {secret[0]}: would be written into the script, and may be secret; give it in the environment "
                "or in a configuration file of fsspec (~/.config/fsspec), which the tasks read as well"
            )
        found = [str(Path(self.path).absolute())]
        for override in self.overrides:
            found += ["--set", override]
        if self.limit is not None:
            found += ["--limit", str(self.limit)]
        if self.workers is not None:
            found += ["--workers", str(self.workers)]
        if self.max_time is not None:
            found += ["--max-time", str(math.ceil(self.max_time))]
        return found


# ---- the script


def script(submission: Submission, *, tasks: int | None = None) -> str:
    """The sbatch script of an array of ``tasks``, or of `slurm.array`. Raises JobError for what cannot be in one."""
    job = submission.job
    arguments = [shlex.quote(argument) for argument in submission.arguments()]
    due, clock = '[ -n "$time_is_up" ]', ""
    if submission.max_time is not None:
        clock = "SECONDS=0  # from here on, of which --max-time allows so many\n"
        due = f'{{ {due} || [ "$SECONDS" -ge {math.ceil(submission.max_time)} ]; }}'
    return _SCRIPT.substitute(
        directives="\n".join(f"#SBATCH {text}" for text in _directives(job, tasks or job.slurm.array)),
        python=shlex.quote(sys.executable),
        setup=f"\n{job.slurm.setup.strip()}\n" if job.slurm.setup.strip() else "",
        cache="" if job.engine.device == "cpu" else _CACHE,
        clock=clock,
        arguments=" \\\n    ".join(_pairs(arguments)),
        requeue=_REQUEUE.substitute(stopped=EXIT_STOPPED, due=due) if job.slurm.requeue else "",
    )


def _pairs(arguments: Sequence[str]) -> Iterator[str]:
    """One text for each option with its value, the first argument having none."""
    yield arguments[0]
    for option, value in zip(arguments[1::2], arguments[2::2], strict=True):
        yield f"{option} {value}"


def _directives(job: JobSpec, tasks: int) -> list[str]:
    spec = job.slurm
    if not job.name.isprintable():
        raise JobError("\n".join(job.located(["name: must be one line of printable characters"])))
    running = "" if spec.max_running is None else f"%{spec.max_running}"
    options: dict[str, str | int | None] = {
        "job-name": job.name,
        "array": f"0-{tasks - 1}{running}",
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": spec.cpus,
        "gpus": spec.gpus,
        "mem": spec.mem,
        "time": spec.time,
        "signal": f"B:USR1@{spec.signal_seconds}",
        "open-mode": "append",
        "output": log_pattern(job),
        "chdir": str(Path.cwd()),
    }
    given = [f"--{name}={quoted(str(value))}" for name, value in options.items() if value is not None]
    return [*given, "--requeue" if spec.requeue else "--no-requeue", *spec.directives]


def quoted(value: str) -> str:
    """A value as sbatch reads it in a script: what is within double quotes, with backslashes before special ones."""
    if not value.isprintable():
        raise JobError(f"{value!r} cannot be in a script for sbatch")
    if _PLAIN_VALUE.fullmatch(value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def log_pattern(job: JobSpec) -> str:
    """Where tasks log, as Slurm writes it. Raises JobError where Slurm cannot write there."""
    directory = _log_directory(job)
    if "\\" in directory:
        raise JobError(f"{directory}: Slurm cannot write logs to a path with a backslash; set slurm.logs")
    return directory.replace("%", "%%") + "/%A_%a.log"


def _log_directory(job: JobSpec) -> str:
    if job.slurm.logs is not None:
        return str(Path(job.slurm.logs).absolute())
    store = _store(job.output.path, job.output.storage_options)
    return str(Path(store.root, LOGS) if store.local else Path("slurm-logs").absolute())


def _log_file(array: ArrayRecord, task: int) -> Path:
    """The log of a task: Slurm's pattern filled in."""
    values = {"%A": array.job_id, "%a": str(task), "%%": "%"}
    return Path(re.sub("%.", lambda match: values[match[0]], array.logs))


# ---- submitting


def submit_array(submission: Submission, echo: Callable[[str], object]) -> ArrayRecord:
    """Check a job, submit one array that runs it, record that in the output, and say how to watch it.

    It has fewer tasks than `slurm.array` where the cluster allows no more. Raises JobError where the job is wrong,
    where Slurm is not here or refuses, and where the output cannot be written.
    """
    from batchrun.preflight import preflight  # takes a second to import

    job = submission.job
    script(submission)  # what cannot be submitted is found before anything is written
    preflight(_on_nodes(job))
    cluster = _cluster()
    tasks = min(job.slurm.array, cluster.most_tasks)
    if tasks < job.slurm.array:
        echo(f"{job.name}: this cluster allows {tasks} tasks in an array, not {job.slurm.array}: these share the work")
    text = script(submission, tasks=tasks)
    store = _store(job.output.path, job.output.storage_options)
    submitted = datetime.datetime.now(datetime.UTC)
    name = f"{SLURM}/{submitted:%Y%m%dT%H%M%S}-{store.writer[:8]}.sh"
    try:
        Path(_log_directory(job)).mkdir(parents=True, exist_ok=True)
        store.put(name, text.encode())
    except (OSError, StorageError) as error:
        raise JobError(f"the script and logs of the array cannot be written: {error}") from error
    job_id, _, elsewhere = _run("sbatch", "--parsable", stdin=text).strip().partition(";")
    array = ArrayRecord(
        job_id=job_id,
        cluster=elsewhere or cluster.name,
        tasks=tasks,
        submitted=submitted.isoformat(timespec="seconds"),
        script=name,
        logs=log_pattern(job),
    )
    echo(f"{job.name}: submitted array {job_id} of {tasks} tasks to {array.cluster}")
    try:
        store.put(f"{SLURM}/{job_id}.json", encode(array))
    except StorageError as error:
        raise StorageError(f"array {job_id} was submitted and could not be recorded in its output: {error}") from error
    target = shlex.join([submission.path, *(text for override in submission.overrides for text in ("--set", override))])
    echo(f"  batchrun status {target}\n  batchrun logs {target} --follow\n  batchrun cancel {target}")
    return array


def _on_nodes(job: JobSpec) -> JobSpec:
    """The job as its tasks will have it: where they get GPUs, ``auto`` is one, whatever this machine has."""
    if job.slurm.gpus is None or job.engine.device != "auto":
        return job
    return job.model_copy(update={"engine": job.engine.model_copy(update={"device": "cuda"})})


def _store(path: str, options: dict[str, object]) -> Store:
    try:
        return Store(path, options)
    except (StorageError, OSError, ValueError, ImportError) as error:
        raise JobError(f"{path}: {error}") from error


# ---- Slurm's commands


@dataclass(frozen=True)
class _Cluster:
    name: str
    most_tasks: int  # of one array


def _cluster() -> _Cluster:
    text = _run("scontrol", "show", "config")
    found = dict(re.findall(r"^(\w+)\s*=\s*(\S+)", text, re.MULTILINE))
    return _Cluster(found.get("ClusterName", "unknown"), int(found.get("MaxArraySize", 1001)))


def _run(*command: str, stdin: str = "") -> str:
    """What a command of Slurm prints. Raises JobError where it is not here or refuses, and StoppedError for silence."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    except FileNotFoundError:
        raise JobError(f"{command[0]}: no such command: this machine submits no jobs to Slurm") from None
    except subprocess.TimeoutExpired:
        raise StoppedError(f"{command[0]} has not answered for {_PATIENCE_SECONDS:.0f} seconds") from None
    if done.returncode:
        raise JobError(f"{command[0]} refused: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


# ---- arrays that were submitted


@dataclass(frozen=True)
class Task:
    """A task that is in the queue."""

    index: int
    state: str  # as Slurm names it: PENDING, RUNNING, ...
    reason: str  # why it waits; "None" where it does not


@dataclass(frozen=True)
class ArrayStatus:
    """An array and which of its tasks are in the queue; ``fault``: why nobody can tell."""

    job_id: str
    cluster: str
    tasks: int
    submitted: str
    logs: str
    queued: list[Task]
    fault: str | None = None

    def describe(self) -> str:
        """One line."""
        if self.fault is not None:
            return f"array {self.job_id}: {self.fault}"
        states = Counter(
            f"{task.state.lower()} ({task.reason})" if task.state == "PENDING" else task.state.lower()
            for task in self.queued
        )
        found = [f"{count} {state}" for state, count in states.items()]
        if ended := self.tasks - len(self.queued):
            found.append(f"{ended} ended")
        return f"array {self.job_id}: {', '.join(found)}"


def array_status(store: Store) -> list[ArrayStatus]:
    """The arrays of an output that have tasks in the queue, and its newest one; none where Slurm is not here."""
    arrays = _arrays(store)
    if not arrays or not _is_here():
        return []
    every = _look_up(arrays)
    return [found for found in every if found.queued or found is every[-1]]


def _arrays(store: Store) -> list[ArrayRecord]:
    """Every array that was submitted for the output, the newest last."""
    names = [name for name in store.names(SLURM) if _RECORD_NAME.fullmatch(name)]
    arrays = [read_record(store, name, ArrayRecord) for name in names]
    return sorted(arrays, key=lambda array: (array.submitted, int(array.job_id)))


def _is_here() -> bool:
    return shutil.which("squeue") is not None


def _look_up(arrays: Sequence[ArrayRecord]) -> list[ArrayStatus]:
    """What Slurm knows of each array, or why it does not tell."""
    queues: dict[str, dict[str, list[Task]]] = {}  # cluster -> array -> tasks
    faults: dict[str, str] = {}
    for cluster in dict.fromkeys(array.cluster for array in arrays):
        try:
            queues[cluster] = _queue(cluster, [array.job_id for array in arrays if array.cluster == cluster])
        except (JobError, StoppedError) as error:
            faults[cluster] = str(error)
    return [
        ArrayStatus(
            job_id=array.job_id,
            cluster=array.cluster,
            tasks=array.tasks,
            submitted=array.submitted,
            logs=array.logs,
            queued=queues.get(array.cluster, {}).get(array.job_id, []),
            fault=faults.get(array.cluster),
        )
        for array in arrays
    ]


def _queue(cluster: str, job_ids: Sequence[str]) -> dict[str, list[Task]]:
    """The tasks of each array that Slurm has in its queue."""
    try:
        text = _run("squeue", *_at(cluster), "-h", "-r", "-j", ",".join(job_ids), "-o", "%F|%K|%T|%r")
    except JobError as error:
        if "Invalid job id" in str(error):  # what it says of a single one that ended some time ago
            return {}
        raise
    found: dict[str, list[Task]] = {}
    for line in text.splitlines():
        job_id, index, state, reason = line.split("|", 3)
        found.setdefault(job_id, []).append(Task(int(index), state, reason))
    return {job_id: sorted(tasks, key=lambda task: task.index) for job_id, tasks in found.items()}


def _at(cluster: str) -> list[str]:
    """Options that have Slurm look in that cluster alone: ids are a cluster's own."""
    return [] if cluster == _cluster().name else ["-M", cluster]


def cancel(target: str, overrides: Sequence[str], echo: Callable[[str], object]) -> None:
    """End every worker of a job: its arrays in Slurm's queue, and others by a request in the output.

    What they had done is kept. Raises JobError where nothing was submitted, and for arrays that Slurm does not cancel.
    """
    store, arrays = _submitted(target, overrides)
    requested = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    store.put(STOP, json.dumps({"id": uuid.uuid4().hex, "requested": requested}).encode())
    living = len(Watch(store).living())
    echo(f"{store.url}: {living} workers were asked to stop" if living else f"{store.url}: nobody works on it")
    if not _is_here():
        return
    faults = []
    for found in _look_up(arrays):
        try:
            if found.queued:
                _run("scancel", *_at(found.cluster), found.job_id)
                echo(f"cancelled array {found.job_id}, {len(found.queued)} tasks")
        except (JobError, StoppedError) as error:
            faults.append(f"array {found.job_id}: {error}")
        if found.fault is not None:
            faults.append(found.describe())
    if faults:
        raise JobError("\n".join(faults))


def _submitted(target: str, overrides: Sequence[str]) -> tuple[Store, list[ArrayRecord]]:
    """Where a job's results go, and its arrays, the newest last. Raises JobError where nothing was submitted."""
    path, options = output_of(target, overrides)
    store = _store(path, options)
    try:
        arrays = _arrays(store)
        if not arrays and not store.exists(JOB):
            raise JobError(f"{path}: {_NOTHING_THERE}")
    except (StorageError, OSError) as error:
        raise JobError(f"{path}: {error}") from error
    return store, arrays


# ---- logs


def show_logs(
    target: str,
    overrides: Sequence[str],
    task: int | None,
    *,
    lines: int,
    follow: bool,
    echo: Callable[[str], object],
) -> None:
    """Print the last ``lines`` of the log of a task of the newest array, or of every task.

    With ``follow``, goes on printing what they write until the array has left the queue. Raises JobError where there
    is no array, or no log of it.
    """
    _, arrays = _submitted(target, overrides)
    if not arrays:
        raise JobError(f"{target}: no array was submitted for it with --slurm")
    array = arrays[-1]
    if task is not None and task >= array.tasks:
        raise JobError(f"array {array.job_id} has tasks 0 to {array.tasks - 1}")
    tails = _Tails(array, range(array.tasks) if task is None else [task], echo)
    if not tails.begin(lines) and not follow:
        which = "" if task is None else f" of task {task}"
        raise JobError(f"array {array.job_id} has no log{which} yet in {_log_file(array, 0).parent}")
    while follow:
        ended = _is_here() and not (found := _look_up([array])[0]).queued and found.fault is None
        tails.go_on()
        if ended:
            return
        deadline = time.monotonic() + _QUEUE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_FOLLOW_SECONDS)
            tails.go_on()


class _Tails:
    """The ends of some tasks' logs, and what is written there later."""

    def __init__(self, array: ArrayRecord, tasks: Sequence[int], echo: Callable[[str], object]) -> None:
        self._files = {task: _log_file(array, task) for task in tasks}
        self._echo = echo
        self._read: dict[int, int] = {}  # task -> bytes of its log that were printed
        self._last: int | None = None  # the task that was printed last

    def begin(self, lines: int) -> bool:
        """Print the last lines of each; False where there is no log."""
        for task, path in self._files.items():
            if path.exists():
                with path.open("rb") as file:
                    self._print(task, b"".join(deque(file, maxlen=lines)))
                    self._read[task] = file.tell()
        return bool(self._read)

    def go_on(self) -> None:
        """Print the whole lines that were written since."""
        for task, path in self._files.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(task, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[task] = self._read.get(task, 0) + len(whole)
            self._print(task, whole)

    def _print(self, task: int, text: bytes) -> None:
        if not text:
            return
        if len(self._files) > 1 and task != self._last:
            self._echo(f"==> task {task}: {self._files[task]} <==")
        self._last = task
        self._echo(text.decode(errors="replace").rstrip("\n"))
