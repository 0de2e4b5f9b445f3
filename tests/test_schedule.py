"""Scheduled runs: what an entry means to cron, Slurm and systemd, and that installing one touches no other."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchrun.cli import main
from batchrun.job import JobSpec
from batchrun.launch.schedule import Entry, _Crontab, _Scrontab, calendar_events, parse_cron
from tests.jobs import write_job

NIGHTLY = ["--cron", "0 2 * * *"]
OTHERS = "MAILTO=me\n# 100% mine\n*/5 * * * * /bin/echo \\%H; true\n"

# What crontab and scrontab do with the user's table; TABLE is where they keep it.
FAKE_CRONTAB = """\
#!/bin/sh
if [ "$1" = -l ]; then
    if [ -e "$TABLE" ]; then exec cat "$TABLE"; fi
    echo "no crontab for me" >&2
    exit 1
fi
exec cp "$1" "$TABLE"
"""
FAKE_SYSTEMCTL = """\
#!/bin/sh
echo "$@" >> "$CALLS"
"""


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job in a directory whose name every syntax has to quote; it is the working directory."""
    folder = tmp_path / 'it\'s 100% $HOME "odd" place'
    folder.mkdir()
    monkeypatch.chdir(folder)
    return write_job(folder, tiny_model, [{"id": 1, "text": "x"}])


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs that comes first on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def add_program(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


@pytest.fixture(params=["crontab", "scrontab"])
def table(request: pytest.FixtureRequest, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the user's table of either kind; not there yet."""
    add_program(programs, request.param, FAKE_CRONTAB)
    path = tmp_path / f"{request.param}.table"
    monkeypatch.setenv("TABLE", str(path))
    return path


@pytest.fixture
def units(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's units; the calls of systemctl go to the file ``calls`` beside it."""
    add_program(programs, "systemctl", FAKE_SYSTEMCTL)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "systemd" / "user"


def schedule(job: object, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["schedule", str(job), *map(str, arguments)])


def installed(job: object, *arguments: object) -> str:
    result = schedule(job, *arguments)
    assert result.exit_code == 0, result.output
    return result.stderr


def refused(job: object, *arguments: object) -> str:
    result = schedule(job, *arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


# ---- expressions


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 2 * *", "has 4 fields, not five: minute, hour, day of the month, month, day of the week"),
        ("@daily", "has 1 fields"),
        ("0 24 * * *", "'0 24 * * *': bad hour"),
        ("0 2 30 2 *", "bad day-of-month"),
        ("0 2 L * *", "day of the month: 'L' is none of"),
        ("0 2 * * 1#2", "day of the week: '1#2' is none of"),
        ("5/15 * * * *", "minute: '5/15' is none of"),
        ("0 2 * * *; rm", "has 6 fields"),
        ("0 2 * * %", "day of the week: '%' is none of"),
        ("0 */0 * * *", "bad hour"),
    ],
)
def test_expressions_that_are_refused(job: Path, expression: str, expected: str) -> None:
    assert expected in refused(job, "--cron", expression)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 2 * * *", ["*-*-* 02:00:00"]),
        ("*/15 8-10 * * *", ["*-*-* 08,09,10:00,15,30,45:00"]),
        ("0 2 * * 1-5", ["Mon,Tue,Wed,Thu,Fri *-*-* 02:00:00"]),
        ("0 2 * * 0,7", ["Sun *-*-* 02:00:00"]),
        ("0 2 1,15 jan *", ["*-01-01,15 02:00:00"]),
        ("0 2 1 * mon", ["*-*-01 02:00:00", "Mon *-*-* 02:00:00"]),
        ("0 2 */2 * mon", ["Mon *-*-" + ",".join(f"{day:02d}" for day in range(1, 32, 2)) + " 02:00:00"]),
        ("0 2 1 * */2", ["Sun,Tue,Thu,Sat *-*-01 02:00:00"]),
    ],
)
def test_calendar_events_of_an_expression(expression: str, expected: list[str]) -> None:
    assert calendar_events(expression) == expected


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize(
    "expression", ["0 2 * * *", "*/20 8-10 * * 1-5", "30 4 1,15 * 5", "0 0 29 2 *", "5 6 */2 */3 0", "0 12 * JAN SUN"]
)
def test_systemd_and_cron_agree_on_the_next_times(expression: str) -> None:
    times = parse_cron(expression)
    expected = [next(times) for _ in range(5)]
    found = set()
    for event in calendar_events(expression):
        done = subprocess.run(
            ["systemd-analyze", "calendar", "--iterations=5", event], capture_output=True, text=True, check=True
        )
        times_of = re.findall(r"(?:Next elapse|Iter\. #\d): \w+ (\S+ \S+)", done.stdout)
        found |= {datetime.datetime.strptime(text, "%Y-%m-%d %H:%M:%S") for text in times_of}
    assert sorted(found)[:5] == expected


# ---- what is printed


def test_printed_entry_and_next_times(job: Path) -> None:
    result = schedule("job.yaml", *NIGHTLY)
    assert result.exit_code == 0
    begin, entry, end = result.stdout.splitlines()
    assert begin == f"# batchrun schedule {job}: begin"
    assert end == f"# batchrun schedule {job}: end"
    assert entry.startswith("0 2 * * * { date; cd ")
    assert len(re.findall(r"\w{3} \d{4}-\d\d-\d\d 02:00", result.stderr)) == 3


def test_options_of_submit_are_checked_and_passed_on(job: Path) -> None:
    entry = schedule(job, *NIGHTLY, "--set", "engine.num_threads=1", "--", "--max-time", "5h").stdout
    assert "job.yaml" in entry
    assert "--set engine.num_threads=1 --max-time 5h; code=$?" in entry
    assert "No such option" in refused(job, *NIGHTLY, "--", "--mxa-time", "5h")
    assert "no duration" in refused(job, *NIGHTLY, "--", "--max-time", "soon")
    assert "unknown key" in refused(job, *NIGHTLY, "--", "--set", "engine.num_thread=1")


def test_what_is_secret_does_not_get_into_an_entry(job: Path) -> None:
    result = schedule(job, *NIGHTLY, "--set", "output.storage_options={key: HUSH}")
    assert result.exit_code == 2
    assert "HUSH" not in result.output


def test_jobs_that_are_refused(job: Path, tmp_path: Path) -> None:
    assert "--cron is missing" in refused(job)
    assert "goes without" in refused(job, *NIGHTLY, "--remove")
    assert "No such file" in refused(tmp_path / "none.yaml", *NIGHTLY)
    assert "one line of printable" in refused(job, *NIGHTLY, "--log", "a\nb")
    assert "has a backslash" in refused(job, *NIGHTLY, "--kind", "scrontab", "--log", "a\\b")


# ---- what the entry does


def as_cron_reads_it(command: str, taken: str) -> str:
    """What sh gets from a daemon that takes the backslash before these characters away, and no other."""
    read, escaped = "", False
    for character in command:
        assert escaped or character != "%", "a line break"
        if escaped and character in taken:
            read = read[:-1]
        read += character
        escaped = character == "\\" and not escaped
    return read


def as_cron_runs_it(entry: str, taken: str = "%") -> subprocess.CompletedProcess[bytes]:
    """Runs the command of an entry as cron does: by sh, from home, in an environment of next to nothing."""
    command = as_cron_reads_it(entry.split(maxsplit=5)[5], taken)
    environment = {"HOME": "/", "PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(["/bin/sh", "-c", command], cwd="/", env=environment, capture_output=True, check=False)


def test_crontab_entry_runs_submit_and_logs_its_exit_code(job: Path) -> None:
    rows = job.parent / "rows.jsonl"
    rows.rename(job.parent / "away.jsonl")
    entry = schedule(job, *NIGHTLY).stdout.splitlines()[1]
    done = as_cron_runs_it(entry)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")
    log = (job.parent / "job.log").read_text()
    assert "input.path: no input file" in log
    assert log.endswith("exit code 2\n")
    as_cron_runs_it(entry)
    assert len((job.parent / "job.log").read_text()) == 2 * len(log)


def entry_of(command: tuple[str, ...], folder: Path) -> Entry:
    log = folder / "100% of it.log"
    return Entry(folder / "job.yaml", folder, log, command, "0 2 * * *", ("--partition=p",))


def test_arguments_reach_the_command_as_they_are(job: Path) -> None:
    odd = ["%Y", "\\%", "\\\\%\\", "%%", "it's", '"', "$HOME", "a  b", "\\", "*", "ü", ""]
    echo = (sys.executable, "-c", "import sys; print(sys.argv[1:])", *odd)
    entry = entry_of(echo, job.parent)
    line = _Crontab("crontab").lines(entry)[0]
    for taken in ("", "%", "%\\"):  # there are daemons of each kind
        entry.log.unlink(missing_ok=True)
        assert as_cron_runs_it(line, taken).returncode == 0
        assert str(odd) in entry.log.read_text()
    script = _Scrontab("scrontab").lines(entry)[-1].split(maxsplit=5)[5]
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert str(odd) in done.stdout
    assert done.stdout.endswith("exit code 0\n")


def test_scrontab_command_outlives_the_signal_that_batchrun_heeds(job: Path) -> None:
    """Slurm sends SIGTERM to all processes of a job, and ends the job once its shell has ended."""
    child = (
        "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); "
        "os.killpg(0, signal.SIGTERM); time.sleep(9)"
    )
    script = _Scrontab("scrontab").lines(entry_of((sys.executable, "-c", child), job.parent))[-1].split(maxsplit=5)[5]
    done = subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, text=True, check=False, start_new_session=True
    )
    assert done.returncode == 75
    assert done.stdout.endswith("exit code 75\n")


def test_scrontab_entry_has_its_directives_before_it(job: Path) -> None:
    _, *directives, entry, _ = schedule(job, *NIGHTLY, "--kind", "scrontab").stdout.splitlines()
    assert directives[0] == "#SCRON --job-name=job"
    log = str(job.parent / "job.log").replace('"', '\\"').replace("%", "%%")
    assert f'#SCRON --output="{log}"' in directives
    assert "#SCRON --open-mode=append" in directives
    assert entry.startswith("0 2 * * * trap : TERM; date; ")


@pytest.mark.skipif("slurm" not in JobSpec.model_fields, reason="jobs have no slurm section yet")
def test_scrontab_entry_asks_for_what_the_slurm_section_does(tmp_path: Path, tiny_model: Path) -> None:
    slurm = {"partition": "gpu", "cpus": 4, "array": 8, "directives": ["--constraint=a100"]}
    job = write_job(tmp_path, tiny_model, [{"id": 1, "text": "x"}], slurm=slurm)
    entry = schedule(job, *NIGHTLY, "--kind", "scrontab").stdout
    assert {"#SCRON --partition=gpu", "#SCRON --cpus-per-task=4", "#SCRON --constraint=a100"} <= set(entry.splitlines())
    assert "array" not in entry
    array = schedule(job, *NIGHTLY, "--kind", "scrontab", "--", "--slurm")  # a run that submits one asks for little
    assert array.exit_code == 0
    assert "partition" not in array.stdout
    setup = ["--kind", "scrontab", "--set", "slurm.setup=module load x"]
    assert "slurm.setup cannot be" in refused(job, *NIGHTLY, *setup)
    assert schedule(job, *NIGHTLY, *setup, "--", "--slurm").exit_code == 0


# ---- installing


def test_entry_is_installed_replaced_and_removed_and_others_stay(job: Path, table: Path) -> None:
    kind = ["--kind", table.stem]
    table.write_text(OTHERS)
    installed(job, *NIGHTLY, *kind, "--install")
    first = table.read_text()
    assert first == OTHERS + schedule(job, *NIGHTLY, *kind).stdout
    table.write_text(first + OTHERS)
    installed(job, *NIGHTLY, *kind, "--install")
    assert table.read_text() == first + OTHERS
    installed(job, "--cron", "5 4 * * *", *kind, "--install")
    assert table.read_text() == first.replace("\n0 2 * * * ", "\n5 4 * * * ") + OTHERS
    assert "removed" in installed(job, *kind, "--remove")
    assert table.read_text() == OTHERS + OTHERS
    assert "has no entry" in installed(job, *kind, "--remove")


def test_jobs_have_entries_of_their_own(job: Path, table: Path) -> None:
    other = shutil.copy(job, job.parent / "other.yaml")
    kind = ["--kind", table.stem]
    for path in (job, other, job):
        installed(path, *NIGHTLY, *kind, "--install")
    assert table.read_text() == schedule(job, *NIGHTLY, *kind).stdout + schedule(other, *NIGHTLY, *kind).stdout
    installed(job, *kind, "--remove")
    assert table.read_text() == schedule(other, *NIGHTLY, *kind).stdout


def test_tables_pass_through_whatever_bytes_they_hold(job: Path, table: Path) -> None:
    table.write_bytes(b"# caf\xe9\r\n0 1 * * * true")
    installed(job, *NIGHTLY, "--kind", table.stem, "--install")
    installed(job, "--kind", table.stem, "--remove")
    assert table.read_bytes() == b"# caf\xe9\r\n0 1 * * * true\n"


def test_a_table_that_cannot_be_read_is_left_alone(job: Path, programs: Path, tmp_path: Path) -> None:
    wrote = tmp_path / "wrote"
    add_program(programs, "crontab", f'#!/bin/sh\n[ "$1" = -l ] || touch {wrote}\necho "you may not" >&2\nexit 1\n')
    assert "crontab -l: you may not" in refused(job, *NIGHTLY, "--install")
    table = f"# batchrun schedule {job}: begin\n0 1 * * * true\n"
    (tmp_path / "half").write_text(table)
    add_program(programs, "crontab", f'#!/bin/sh\n[ "$1" = -l ] || touch {wrote}\ncat {tmp_path}/half\n')
    assert "remove the entry by hand" in refused(job, *NIGHTLY, "--install")
    assert not wrote.exists()


def test_a_scheduler_that_is_not_there(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for kind in ("crontab", "scrontab", "systemd"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(job.parent))
        assert "is not installed here" in refused(job, *NIGHTLY, "--kind", kind, "--install")


def test_systemd_timer_is_installed_replaced_and_removed(job: Path, units: Path, tmp_path: Path) -> None:
    other = units / "mine.timer"
    units.mkdir(parents=True)
    other.write_text("mine")
    kind = ["--kind", "systemd"]
    assert "enable-linger" in installed(job, *NIGHTLY, *kind, "--install")
    service, timer = sorted(path for path in units.iterdir() if path != other)
    assert re.fullmatch(r"batchrun-job-[0-9a-f]{8}\.service", service.name)
    assert (timer.stem, timer.suffix) == (service.stem, ".timer")
    before = timer.read_text()
    installed(job, "--cron", "5 4 1 * 1", *kind, "--install")
    assert timer.read_text() == before.replace(
        "OnCalendar=*-*-* 02:00:00", "OnCalendar=*-*-01 04:05:00\nOnCalendar=Mon *-*-* 04:05:00"
    )
    enable = f"--user enable --now {timer.name}"
    assert (tmp_path / "calls").read_text().splitlines() == ["--user daemon-reload", enable] * 2
    assert "removed" in installed(job, *kind, "--remove")
    assert list(units.iterdir()) == [other]
    assert f"--user disable --now {timer.name}" in (tmp_path / "calls").read_text()
    assert "has no entry" in installed(job, *kind, "--remove")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_units(job: Path, units: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    installed(job, *NIGHTLY, "--kind", "systemd", "--install")

    def verify() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["systemd-analyze", "verify", "--user", *map(str, units.iterdir())],
            capture_output=True,
            text=True,
            check=False,
        )

    done = verify()
    assert (done.returncode, done.stderr) == (0, "")
    timer = next(units.glob("*.timer"))
    timer.write_text(timer.read_text().replace("02:00:00", "nonsense"))
    assert "nonsense" in verify().stderr  # that it looked


def test_systemd_service_quotes_what_it_runs(job: Path, units: Path) -> None:
    installed(job, *NIGHTLY, "--kind", "systemd", "--install", "--set", "name='50% $x'")
    text = next(units.glob("*.service")).read_text()
    assert 'it\'s 100%% $$HOME \\"odd\\" place/job.yaml"' in text
    assert "\"name='50%% $$x'\"" in text
    assert f"WorkingDirectory={str(job.parent).replace('%', '%%')}\n" in text
    assert f"StandardOutput=append:{str(job.parent).replace('%', '%%')}/job.log\n" in text
