"""Entries of a crontab, of Slurm's scrontab, or of a systemd timer that run `batchrun submit` at given times."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cronsim import CronSim, CronSimError

from batchrun.errors import JobError
from batchrun.job import JobSpec, load_job, secret_overrides
from batchrun.launch.slurm import quoted

_VALUE = r"(?:\d+|[A-Za-z]{3})"
_TERM = rf"(?:(?:\*|{_VALUE}-{_VALUE})(?:/\d+)?|{_VALUE})"
_FIELD = re.compile(rf"{_TERM}(?:,{_TERM})*")  # what cron, Slurm and systemd take, and take alike
_FIELDS = ("minute", "hour", "day of the month", "month", "day of the week")
_WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_SLURM = {  # key of the job's slurm section -> option of sbatch
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "cpus": "cpus-per-task",
    "gpus": "gpus",
    "mem": "mem",
    "time": "time",
}
_SHOWN_TIMES = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """A job and when to submit it. Paths are absolute; no text has a line break."""

    job: Path
    directory: Path  # where it runs
    log: Path
    command: tuple[str, ...]
    cron: str  # five fields
    directives: tuple[str, ...]  # options of sbatch, as scrontab reads them


class _Scheduler(Protocol):
    """Whose entries they are. Every method raises JobError where the scheduler is not there, or refuses."""

    def render(self, entry: Entry) -> str: ...
    def install(self, entry: Entry) -> str: ...  # where it is now
    def remove(self, job: Path) -> bool: ...  # whether there was one


def run_schedule(
    job: str,
    overrides: Sequence[str],
    arguments: Sequence[str],
    *,
    cron: str | None,
    kind: Literal["crontab", "scrontab", "systemd"],
    log: Path | None,
    install: bool,
    remove: bool,
) -> None:
    """Prints, installs or removes the entry that submits ``job`` with these ``arguments``, ``overrides`` among them.

    Raises JobError where the job or the expression is wrong, or the scheduler refuses.
    """
    scheduler, path = _SCHEDULERS[kind], Path(job).absolute()
    if remove:
        if cron is not None or install:
            raise JobError("--remove goes without --cron and --install")
        print(f"{path}: {'removed' if scheduler.remove(path) else 'has no entry'} ({kind})", file=sys.stderr)
        return
    if cron is None:
        raise JobError('--cron is missing; for every night at two, give --cron "0 2 * * *"')
    times = parse_cron(cron)
    if secret := secret_overrides(overrides):
        raise JobError(
            f"--set {secret[0]}: would be written into the entry, and may be secret; give it in a configuration file "
            "of fsspec (~/.config/fsspec)"
        )
    spec = load_job(job, overrides)
    if kind == "scrontab" and spec.slurm.setup and "--slurm" not in arguments:
        raise JobError("slurm.setup cannot be in an entry of one line; `-- --slurm` submits a script that has it")
    entry = _entry(spec, path, arguments, cron, log)
    if install:
        entry.log.parent.mkdir(parents=True, exist_ok=True)
        print(f"installed in {scheduler.install(entry)}", file=sys.stderr)
    else:
        print(scheduler.render(entry), end="")
    shown = ", ".join(f"{time:%a %Y-%m-%d %H:%M}" for time in itertools.islice(times, _SHOWN_TIMES))
    print(f"next: {shown} (this machine's time)", file=sys.stderr)


def parse_cron(expression: str) -> CronSim:
    """The times of a cron expression from now on, in local time. Raises JobError where it is none, or has no time.

    Only what all schedulers take alike is allowed, so no ``@daily``, ``L``, ``#``, or ``5/15``.
    """
    fields = expression.split()
    if len(fields) != len(_FIELDS):
        raise JobError(f"--cron: {expression!r} has {len(fields)} fields, not five: {', '.join(_FIELDS)}")
    for name, field in zip(_FIELDS, fields, strict=True):
        if not _FIELD.fullmatch(field):
            raise JobError(
                f"--cron: {name}: {field!r} is none of *, a number, a range (1-5), a step (*/15, 8-18/2), or a list of "
                "these, which is what every scheduler understands"
            )
    try:
        if next(CronSim(expression, datetime.datetime.now()), None) is None:
            raise JobError(f"--cron: {expression!r} never comes")
        return CronSim(expression, datetime.datetime.now())
    except CronSimError as error:
        raise JobError(f"--cron: {expression!r}: {str(error).lower()}") from None


def calendar_events(expression: str) -> list[str]:
    """The times of a cron expression as systemd's calendar events, which together stand for it."""
    times = parse_cron(expression)
    hours, minutes = _numbers(times.hours, 24), _numbers(times.minutes, 60)
    months, days = _numbers(times.months, 12), _numbers(times.days, 31)
    weekdays = {number % 7 for number in times.weekdays if isinstance(number, int)}
    week = "" if len(weekdays) == 7 else ",".join(_WEEKDAYS[number] for number in sorted(weekdays)) + " "
    if times.day_and or not week or days == "*":  # one of the two says nothing, or both have to hold
        dates = [f"{week}*-{months}-{days}"]
    else:
        dates = [f"*-{months}-{days}", f"{week}*-{months}-*"]
    return [f"{date} {hours}:{minutes}:00" for date in dates]


def _numbers(numbers: set[int], count: int) -> str:
    return "*" if len(numbers) == count else ",".join(f"{number:02d}" for number in sorted(numbers))


def _entry(spec: JobSpec, job: Path, arguments: Sequence[str], cron: str, log: Path | None) -> Entry:
    directory = Path.cwd()
    log = (log or Path(f"{job.stem}.log")).absolute()
    command = (sys.executable, "-P", "-m", "batchrun", "submit", str(job), *arguments)
    for text in (str(directory), str(log), *command):
        if not text.isprintable():
            raise JobError(f"{text!r} cannot be in an entry: it has to be one line of printable characters")
    directives = _directives(spec, directory, log, resources="--slurm" not in arguments)
    return Entry(job, directory, log, command, " ".join(cron.split()), directives)


def _directives(spec: JobSpec, directory: Path, log: Path, *, resources: bool) -> tuple[str, ...]:
    """The options of the Slurm job, with those ``resources`` that a run needs unless it only submits an array."""
    options = {
        "job-name": spec.name,
        "chdir": str(directory),
        "output": str(log).replace("%", "%%"),
        "open-mode": "append",
    }
    further: tuple[str, ...] = ()
    if resources:
        given = ((option, getattr(spec.slurm, key)) for key, option in _SLURM.items())
        options |= {option: str(value) for option, value in given if value is not None}
        further = spec.slurm.directives
    return (*(f"--{name}={quoted(value)}" for name, value in options.items()), *further)


class _Table:
    """The user's table of one of the two cron daemons."""

    def __init__(self, program: str) -> None:
        self.program = program

    def render(self, entry: Entry) -> str:
        begin, end = _marks(entry.job)
        return "\n".join([begin, *self.lines(entry), end, ""])

    def lines(self, entry: Entry) -> list[str]:
        raise NotImplementedError

    def install(self, entry: Entry) -> str:
        before = self._read()
        after = _with_block(before, entry.job, self.render(entry))
        if after != before:
            self._write(after)
        return f"the user's {self.program}"

    def remove(self, job: Path) -> bool:
        before = self._read()
        after = _with_block(before, job, "")
        if after == before:
            return False
        self._write(after)
        return True

    def _read(self) -> str:
        """The table; bytes that are no text pass through."""
        found = _run([self.program, "-l"])
        if found.returncode == 0:
            return os.fsdecode(found.stdout)
        if b"no crontab for" in found.stdout + found.stderr:
            return ""
        raise _refused(found)

    def _write(self, text: str) -> None:
        with tempfile.NamedTemporaryFile(prefix="batchrun-") as file:
            file.write(os.fsencode(text))
            file.flush()
            found = _run([self.program, file.name])
        if found.returncode:
            raise _refused(found)


class _Crontab(_Table):
    """In a crontab ``%`` is a line break unless a backslash stands before it, within quotes too."""

    def lines(self, entry: Entry) -> list[str]:
        directory, log = (_quoted_for_cron(str(path)) for path in (entry.directory, entry.log))
        run = _with_exit_code(" ".join(map(_quoted_for_cron, entry.command)))
        return [f"{entry.cron} {{ date; cd {directory} && {run}; }} >> {log} 2>&1"]


class _Scrontab(_Table):
    """The command is a line of a batch script. Its trap lets batchrun, which gets SIGTERM too, end in order."""

    def lines(self, entry: Entry) -> list[str]:
        if "\\" in str(entry.log):
            raise JobError(f"--log: {entry.log} has a backslash, by which Slurm would name another file")
        directives = [f"#SCRON {directive}" for directive in entry.directives]
        return [*directives, f"{entry.cron} trap : TERM; date; {_with_exit_code(shlex.join(entry.command))}"]


class _Systemd:
    """A service and a timer among the user's own units."""

    def render(self, entry: Entry) -> str:
        return "\n".join(f"# {path}\n{text}" for path, text in self._units(entry).items())

    def install(self, entry: Entry) -> str:
        for path, text in self._units(entry).items():
            _write_whole(path, text)
        self._control("daemon-reload")
        self._control("enable", "--now", _timer(entry.job).name)
        return f"{_timer(entry.job)}; it runs while the user is logged in, or always after `loginctl enable-linger`"

    def remove(self, job: Path) -> bool:
        timer = _timer(job)
        if not timer.exists():
            return False
        self._control("disable", "--now", timer.name)
        for path in (timer, timer.with_suffix(".service")):
            path.unlink(missing_ok=True)
        self._control("daemon-reload")
        return True

    def _control(self, *arguments: str) -> None:
        found = _run(["systemctl", "--user", *arguments])
        if found.returncode:
            raise _refused(found)

    def _units(self, entry: Entry) -> dict[Path, str]:
        timer = _timer(entry.job)
        description = f"Description=batchrun submit {_specifiers(str(entry.job))}"
        service = [
            *["[Unit]", description, "", "[Service]", "Type=oneshot"],
            f"WorkingDirectory={_specifiers(str(entry.directory))}",
            f"StandardOutput=append:{_specifiers(str(entry.log))}",
            *["StandardError=inherit", "ExecStartPre=/bin/sh -c date"],
            f"ExecStart={' '.join(map(_quoted_for_systemd, entry.command))}",
            f"ExecStopPost=/bin/sh -c {_quoted_for_systemd('echo exit code $EXIT_STATUS')}",
        ]
        events = [f"OnCalendar={event}" for event in calendar_events(entry.cron)]
        times = ["[Unit]", description, "", "[Timer]", *events, "Persistent=true"]
        target = ["", "[Install]", "WantedBy=timers.target"]
        return {timer.with_suffix(".service"): _text(service), timer: _text([*times, *target])}


def _with_exit_code(command: str) -> str:
    return f'{command}; code=$?; echo "exit code $code"; exit $code'


def _quoted_for_cron(text: str) -> str:
    """A word of a crontab's command.

    Some daemons take the backslash before ``%`` away, or one of two, and others leave that to the shell. So ``%``
    stands outside of the quotes, where the shell takes its backslash too, and no backslash before another one.
    """
    pieces = (shlex.quote(piece).replace("\\", "\\''") if piece else "" for piece in text.split("%"))
    return "\\%".join(pieces) or "''"


def _marks(job: Path) -> tuple[str, str]:
    """The comments around a job's entry in a table: what lies between them is batchrun's, and nothing else."""
    return f"# batchrun schedule {job}: begin", f"# batchrun schedule {job}: end"


def _with_block(text: str, job: Path, block: str) -> str:
    """The table with ``block`` in place of the job's entry, or at its end if it has none."""
    begin, end = _marks(job)
    if text and not text.endswith("\n"):
        text += "\n"
    head, found, rest = text.partition(f"{begin}\n")
    if not found:
        return text + block
    _, ended, tail = rest.partition(f"{end}\n")
    if not ended:
        raise JobError(f"the table has the line {begin!r} and no line {end!r}: remove the entry by hand")
    return head + block + tail


def _timer(job: Path) -> Path:
    """The file of a job's timer."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", job.stem)
    return home / "systemd" / "user" / f"batchrun-{stem}-{hashlib.sha256(os.fsencode(job)).hexdigest()[:8]}.timer"


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    built = path.with_suffix(".new")
    built.write_text(text, encoding="utf-8")
    built.replace(path)


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _quoted_for_systemd(text: str) -> str:
    escaped = re.sub(r'(["\\])', r"\\\1", text).replace("$", "$$")
    return f'"{_specifiers(escaped)}"'


def _text(lines: Sequence[str]) -> str:
    return "\n".join([*lines, ""])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "LC_ALL": "C"}  # what it says is looked at
    try:
        return subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL, env=environment)
    except FileNotFoundError:
        raise JobError(f"{command[0]} is not installed here; another --kind may be") from None


def _refused(found: subprocess.CompletedProcess[bytes]) -> JobError:
    said = os.fsdecode(found.stderr or found.stdout).strip()
    return JobError(f"{' '.join(found.args[:2])}: {said or f'exit code {found.returncode}'}")


_SCHEDULERS: dict[str, _Scheduler] = {
    "crontab": _Crontab("crontab"),
    "scrontab": _Scrontab("scrontab"),
    "systemd": _Systemd(),
}
