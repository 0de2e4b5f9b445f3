"""Shows what a run costs beside its model: ``python -m tests.bench.overhead [--rows N] [--demo]``.

Runs a chat job over local Parquet, prompts of about 100 tokens, with an engine that answers at once, and prints how
many rows it does in a second, how many each thread could do if it had a core to itself, and the peak of memory over
time. A second run's tokenizer takes no time either: that is the rate of all stages beside it. ``--demo`` runs
``jobs/demo.yaml`` as it is instead, and prints how the engine's thread spends its time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun import runner
from batchrun.claims import Claims
from batchrun.data import feed
from batchrun.data.feed import Feed, Window
from batchrun.data.prompt import prefix_order
from batchrun.data.sink import Output
from batchrun.data.writer import Writer
from batchrun.engine.engine import Engine, EngineStats
from batchrun.engine.request import Request, State
from batchrun.engine.scheduler import Limits
from batchrun.job import JobSpec, load_job
from batchrun.loop import Loop
from batchrun.observe.progress import Progress
from batchrun.preflight import Preflight, preflight
from batchrun.text import format_bytes, table
from batchrun.tokenization.tokenizer import Tokenizer
from tests.bench.instant_feed import encode_at_once

DEMO = Path(__file__).parents[2] / "jobs" / "demo.yaml"
_WORDS = """
the of and to in is that for it was on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my
made over did down only way find use may water long little very after words called just where most know
"""
_TEXT_WORDS = 55  # they and the demo model's chat template make about 100 tokens
_FILE_ROWS = 500_000
_ANSWER_TOKENS = 16
_ANSWERS = 1000  # different ones
_CONCURRENT = 256
_SAMPLE_SECONDS = 0.2


def write_input(folder: Path, rows: int) -> Path:
    """Parquet files of that many rows in all, with columns ``id`` and ``text``."""
    folder.mkdir(parents=True)
    words, random = np.array(_WORDS.split(), object), np.random.default_rng(0)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    for start in range(0, rows, _FILE_ROWS):
        with pq.ParquetWriter(folder / f"{start // _FILE_ROWS:03d}.parquet", schema, compression="zstd") as file:
            for first in range(start, min(start + _FILE_ROWS, rows), 10_000):
                ids = range(first, min(first + 10_000, start + _FILE_ROWS, rows))
                texts = map(" ".join, words[random.integers(len(words), size=(len(ids), _TEXT_WORDS))])
                file.write_table(pa.table([pa.array(ids), pa.array(texts, pa.string())], schema=schema))
    return folder


def make_job(folder: Path, rows: Path, model: str, split_rows: int, output: str) -> Path:
    """A job that asks the model about each of the rows, in a file."""
    content = "Give this message a subject line.\n{{ text }}"
    job = {
        "name": output,
        "model": {"name_or_path": model},
        "input": {"path": str(rows), "id_column": "id", "split_rows": split_rows},
        "prompt": {"messages": [{"role": "user", "content": content}]},
        "sampling": {"temperature": 0, "max_tokens": _ANSWER_TOKENS},
        "output": {"path": str(folder / output)},
    }
    path = folder / f"{output}.yaml"
    path.write_text(json.dumps(job))
    return path


class InstantEngine(Engine):
    """Takes requests as the real engine does, and answers each in the step after. Texts are really decoded."""

    def __init__(self, ready: Preflight, *, decode: bool) -> None:
        self.tokenizer = ready.tokenizer
        self.max_model_len = ready.max_model_len
        self.step_times = self._speculator = None
        config = SimpleNamespace(vocab_size=self.tokenizer.vocab_size)
        self.executor = SimpleNamespace(model=SimpleNamespace(config=config))
        self.prompt_tokens = 0
        self._queue: deque[Request] = deque()
        self._finished = 0
        ids = self.tokenizer.encode(" ".join(_WORDS.split() * 10), add_special_tokens=False)
        starts = [start % (len(ids) - _ANSWER_TOKENS) for start in range(_ANSWERS)]
        self._answers = [ids[start : start + _ANSWER_TOKENS] for start in starts]
        self._texts = [None if decode else self.tokenizer.decode(answer) for answer in self._answers]

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def step(self) -> list[Request]:
        finished = [self._queue.popleft() for _ in range(min(_CONCURRENT, len(self._queue)))]
        for request in finished:
            self._finished += 1
            self.prompt_tokens += request.n_prompt
            request.tokens += self._answers[self._finished % _ANSWERS]
            request.text = self._texts[self._finished % _ANSWERS]
            request.state, request.finish_reason = State.FINISHED, "length"
        return finished

    def drain(self) -> list[Request]:
        return []

    def withdraw(self, requests: Sequence[Request]) -> None:
        gone = set(map(id, requests))
        self._queue = deque(request for request in self._queue if id(request) not in gone)

    @property
    def waiting(self) -> Sequence[Request]:
        return self._queue

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    @property
    def hungry(self) -> bool:
        return len(self._queue) < _CONCURRENT

    def unfinished(self) -> list[Request]:
        return list(self._queue)

    @property
    def limits(self) -> Limits:
        return Limits(_CONCURRENT, 64 * _CONCURRENT)

    def stats(self) -> EngineStats:
        tokens = self._finished * _ANSWER_TOKENS
        return EngineStats(0, len(self._queue), 0.0, 0, self.prompt_tokens, 0, self.prompt_tokens, tokens, 0)

    def close(self) -> None:
        pass


class _InstantLoop(Loop):
    """A worker's loop around an instant engine; it tells what the threads were busy with while that was there."""

    tokenize = True

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._before, self._began = busy_seconds(), time.monotonic()
            self._engine = InstantEngine(self.ready, decode=self.tokenize)
        return self._engine

    def _close_engine(self) -> None:
        assert isinstance(self._engine, InstantEngine)
        self.seconds = time.monotonic() - self._began
        self.busy = {name: seconds - self._before.get(name, 0.0) for name, seconds in busy_seconds().items()}
        super()._close_engine()


def busy_seconds() -> dict[str, float]:
    """CPU seconds so far of each thread of this process by name, and of its child, the feed."""
    this, names = psutil.Process(), {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: Counter[str] = Counter()
    for thread in this.threads():
        seconds[names.get(thread.id, "others")] += thread.user_time + thread.system_time
    for child in this.children():
        seconds["feed"] += sum(child.cpu_times()[:2])
    return dict(seconds)


@contextmanager
def timed(clock: Callable[[], float], *calls: tuple[type, str]) -> Iterator[Counter[str]]:
    """Has methods of classes timed; gives seconds by ``CLASS.METHOD``. Of a method that calls another, both count."""
    seconds: Counter[str] = Counter()

    def wrapped(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timing(*args: Any, **options: Any) -> Any:
            began = clock()
            try:
                return call(*args, **options)
            finally:
                seconds[name] += clock() - began

        return timing

    with ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(patch.object(owner, name, wrapped(getattr(owner, name), f"{owner.__name__}.{name}")))
        yield seconds


@dataclass(frozen=True)
class Usage:
    """What a run took between its first prepared row and its last commit."""

    rows: int
    prompt_tokens: int
    seconds: float
    busy: dict[str, float]  # CPU seconds of each thread, and of the feed's process
    writer: dict[str, float]  # those of the writer's thread, by what it did


def run_worker(job: Path, tokenize: bool, tell: Connection) -> None:
    """Run the job with an instant engine, and with an instant tokenizer if it is not to ``tokenize``."""
    loops: list[_InstantLoop] = []

    def make(*args: Any) -> _InstantLoop:
        loops.append(_InstantLoop(*args))
        loops[0].tokenize = tokenize
        return loops[0]

    child = feed._CHILD if tokenize else feed._CHILD.replace("batchrun.data.feed_worker", "tests.bench.instant_feed")
    parts = ((Output, "checkpoint"), (Output, "commit_split"))
    with patch.object(runner, "Loop", make), patch.object(feed, "_CHILD", child), timed(time.thread_time, *parts) as by:
        code = runner.run_job(load_job(job))
    loop, report = loops[0], loops[0].report(0.0)
    assert code == 0
    tell.send(Usage(report.total_rows, report.prompt_tokens, loop.seconds, loop.busy, dict(by)))


@dataclass(frozen=True)
class Memory:
    """Resident bytes at a moment."""

    worker: int
    feed: int


def measure(job: Path, *, tokenize: bool) -> tuple[Usage, list[Memory]]:
    """Run a job by a worker of its own; with what it took, its memory over time."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe(duplex=False)
    worker = processes.Process(target=run_worker, args=(job, tokenize, theirs))
    worker.start()
    theirs.close()
    watched, memory = psutil.Process(worker.pid), []
    while not ours.poll(_SAMPLE_SECONDS):
        with suppress(psutil.NoSuchProcess):
            children = [child.memory_info().rss for child in watched.children()]
            memory.append(Memory(watched.memory_info().rss, sum(children)))
    usage: Usage = ours.recv()
    worker.join()
    return usage, memory


def stages(job: Path) -> dict[str, float]:
    """Rows in a CPU second of each thing that the feed does, alone on one core."""
    ready = preflight(load_job(job))
    builder, texts = ready.prompts(), list[str]()
    rates: dict[str, float] = {}

    def rate(stage: str, work: Callable[[], Any], rows: int) -> Any:
        began = time.process_time()
        done = work()
        rates[stage] = rows / (time.process_time() - began)
        return done

    def encode(tokenizer: Tokenizer, some: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        texts.extend(some)
        return encode_at_once(tokenizer, some, add_special_tokens=add_special_tokens)

    (split,) = ready.source.splits(ready.inputs)[:1]
    n = split.n_rows
    groups = rate("read", lambda: list(ready.source.row_groups(split)), n)
    with patch.object(Tokenizer, "encode_batch", encode):
        prepared = rate("template", lambda: [row for group in groups for row in builder.build(group)], n)
    some = range(0, n, 1024)
    encode_batch = ready.tokenizer.encode_batch
    rate("tokenize", lambda: [encode_batch(texts[i : i + 1024], add_special_tokens=False) for i in some], n)
    for row in prepared:
        row.token_ids = array("I", row.token_ids)
    window = Window("", rate("order", lambda: prefix_order(prepared), n), last=True)
    pickled = rate("pack", lambda: pickle.dumps(window), n)
    rate("unpack", lambda: pickle.loads(pickled), n)
    return rates


def time_of_engine_thread(job: JobSpec) -> dict[str, float]:
    """Run a job as it is; how many seconds the engine's thread then spent: in all, in steps, in all I/O, and in each.

    They begin when the model is loaded, and end when all is committed.
    """
    calls = [(Feed, "request"), (Feed, "poll"), (Writer, "_submit"), (Writer, "settle"), (Claims, "idle")]
    with timed(time.monotonic, *calls, (Progress, "update"), (Engine, "step")) as seconds:
        moments: list[float] = []

        def loaded(engine: Engine, *args: Any, **options: Any) -> None:
            load(engine, *args, **options)
            seconds.clear()
            moments.append(time.monotonic())

        def close(engine: Engine) -> None:
            moments.append(time.monotonic())
            spent.update(seconds)
            end(engine)

        load, end, spent = Engine.__init__, Engine.close, dict[str, float]()
        with patch.object(Engine, "__init__", loaded), patch.object(Engine, "close", close):
            assert runner.run_job(job) == 0
    steps = spent.pop("Engine.step")
    return {"running": moments[1] - moments[0], "steps": steps, "io": sum(spent.values()), **spent}


def report_run(name: str, usage: Usage, memory: Sequence[Memory]) -> None:
    """Print what a run has shown."""
    print(f"{name}: {usage.rows:,} rows of {usage.prompt_tokens / usage.rows:.0f} tokens in {usage.seconds:,.1f} s:")
    seconds = {"all": usage.seconds, "all, if on one core": sum(usage.busy.values())}
    seconds |= {f"{thread} alone": spent for thread, spent in (usage.busy | usage.writer).items() if spent}
    print(table([(part, f"{usage.rows / spent:>12,.0f} rows/s") for part, spent in seconds.items()]))
    quarters = [memory[len(memory) * i // 4 : len(memory) * (i + 1) // 4] for i in range(4)]
    for process in ("worker", "feed"):
        peaks = [max((getattr(each, process) for each in some), default=0) for some in quarters]
        growth = f"from the second to the last {peaks[3] / max(1, peaks[1]) - 1:+.1%}"
        print(f"  peak memory of the {process} in each quarter: {', '.join(map(format_bytes, peaks))}; {growth}")


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder = Path(name)
        if args.demo:
            report_demo(time_of_engine_thread(load_job(DEMO, [f"output.path={folder / 'demo'}"])))
            return
        rows = write_input(folder / "rows", args.rows)
        model = load_job(DEMO).model.name_or_path
        for title, tokenize in (("with tokenization", True), ("without", False)):
            job = make_job(folder, rows, model, args.split_rows, f"run-{tokenize}")
            report_run(title, *measure(job, tokenize=tokenize))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        print("stages of the feed, each alone on one core:")
        print(table([(stage, f"{rate:>12,.0f} rows/s") for stage, rate in stages(job).items()]))


def report_demo(spent: dict[str, float]) -> None:
    """Print how the engine's thread has spent its time."""
    running = spent["running"]
    print(f"the demo ran for {running:.1f} s after its model was loaded:")
    print(table([(what, f"{seconds:8.3f} s", f"{seconds / running:7.2%}") for what, seconds in spent.items()]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--split-rows", type=int, default=50_000, help="of the job")
    parser.add_argument("--directory", type=Path, help="where to put input and output, which are removed after")
    parser.add_argument("--demo", action="store_true", help="run the demo instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
