"""How a command meets signals before its run has begun, and readers that leave."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchrun.cli import main
from batchrun.errors import StoppedError
from batchrun.signals import interruptible
from batchrun.streams import outlive_readers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_before_the_run_stops_at_once(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_job(*_: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    before = signal.getsignal(number)
    monkeypatch.setattr("batchrun.job.load_job", load_job)
    result = CliRunner().invoke(main, ["submit", str(tmp_path / "job.yaml")])
    assert result.exit_code == 75
    assert result.stderr == f"Error: interrupted ({number.name}); run the same command again to go on\n"
    assert signal.getsignal(number) is before


def test_only_ctrl_c_interrupts_twice() -> None:
    reached = []

    @interruptible()
    def stop() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            reached.append("after SIGTERM")
            signal.raise_signal(signal.SIGINT)
            reached.append("after SIGINT")

    with pytest.raises(StoppedError, match="SIGTERM"):
        stop()
    assert reached == ["after SIGTERM"]


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_streams_outlive_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    with io.TextIOWrapper(io.FileIO(writable, "wb"), encoding="latin-1", line_buffering=True) as stream:
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", stream)
        outlive_readers()
        assert (sys.stderr.encoding, sys.stderr.fileno()) == ("latin-1", writable)
        print("naïve", file=sys.stderr)
        assert os.read(readable, 100) == b"na\xefve\n"
        os.close(readable)
        print("nobody reads this", file=sys.stderr)
        print("nor this")
        sys.stdout.close()


def test_a_closed_pipe_is_no_error() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    command = [sys.executable, "-m", "batchrun", "--help"]
    done = subprocess.run(command, stdout=writable, stderr=subprocess.PIPE, check=False)
    os.close(writable)
    assert (done.returncode, done.stderr) == (0, b"")
