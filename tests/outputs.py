"""A small job without a model: answers follow from the rows, so that tests of the output can run it at will."""

import json
import os
import threading
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field

from batchrun.data.parts import Layout
from batchrun.data.records import HOME
from batchrun.data.rerun import open_again
from batchrun.data.rows import PartialRow, RowResult
from batchrun.data.scope import splits_to_do
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.data.store import Store
from batchrun.data.work import Work
from batchrun.job import JobSpec


def make_job(folder, *, split_rows=4, sampling=None, **output):
    """A job over ``folder/in``, whose results go to ``folder/out``."""
    return JobSpec.model_validate(
        {
            "model": {"name_or_path": "none"},
            "input": {"path": str(folder / "in"), "split_rows": split_rows, "id_column": "id"},
            "prompt": {"template": "{{ text }}"},
            "sampling": sampling or {},
            "output": {"path": str(folder / "out"), **output},
        }
    )


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def configuration(job):
    return job.configuration(revision="1", dtype="float32", max_model_len=64, numerics="test")


def open_output(job, **options):
    return Output.open(job.output, configuration(job), Layout.of(job), **options)


def answer(split, row):
    if row.error:
        return RowResult(split.number, row.row, error=row.error)
    return RowResult(split.number, row.row, f"answer to {row.data['text']}", "stop", 3, 2)


@dataclass
class Hand:
    """A worker of an output, whose every step a test decides."""

    output: Output
    source: Source
    work: Work
    claimed: list = field(default_factory=list)  # and not given out yet

    def claim(self):
        """The next unit; None if there is none."""
        self.claimed = self.claimed or self.work.claim(1)
        return self.claimed.pop(0) if self.claimed else None

    def claim_ahead(self):
        """Claims all that there is; :meth:`claim` gives it out."""
        self.claimed += self.work.claim(1_000_000)

    def run(self, claim, rows=None, *, answer=answer):
        """Answers what is left of a claim, or these rows of it, two to a checkpoint; returns (split, row) of each."""
        todo = [row for row in self.source.rows(claim.split) if row.row in rows_left(claim)]
        todo = [row for row in todo if rows is None or row.row in rows]
        for start in range(0, len(todo), 2):
            results = [answer(claim.split, row) for row in todo[start : start + 2]]
            for result in results:
                result.rerun_max_tokens = claim.max_tokens
            unfinished = [PartialRow(claim.split.number, row.row, [1, 2]) for row in todo[start + 2 :]]
            self.output.checkpoint(results, unfinished)
        return [(claim.split.number, row.row) for row in todo]

    def commit(self, claim):
        return self.output.commit_split(claim.split, self.source)

    def finish(self):
        return self.output.finish({"device": "test"})


@contextmanager
def hand(job, *, limit=None, source=None, ttl=60.0):
    """A worker of the job's output, once the input is recorded."""
    source = source or Source(job.input)
    files = source.files()
    with open_output(job, inputs=files, ttl=ttl) as output:
        splits = splits_to_do(output, source, files, limit)
        scope = None if limit is None else {split.number for split in splits}
        yield Hand(output, source, Work(output, files, scope))


def rows_left(claim):
    """The row numbers that a claim's worker has to run, blank ones included."""
    split = claim.split
    rows = range(split.first_row, split.first_row + split.n_rows) if claim.only is None else claim.only
    return set(rows) - claim.skip


def run_job(job, *, stop_after=None, limit=None, source=None, rerun=(), max_tokens=None, answer=answer):
    """Runs or resumes the job as one worker; returns the manifest and the rows answered in this run.

    ``stop_after``: no further once a split of that number, or above, is committed.
    """
    answered = []
    with hand(job, limit=limit, source=source) as worker:
        if rerun:
            open_again(worker.output, worker.source, worker.source.files(), rerun, max_tokens)
        while claim := worker.claim():
            answered += worker.run(claim, answer=answer)
            worker.commit(claim)
            if stop_after is not None and claim.split.number >= stop_after:
                break
        return worker.finish(), answered


def parts_of(folder):
    """Name -> bytes of every part."""
    return {path.name: path.read_bytes() for path in sorted((folder / "out").glob("part-*"))}


def leftovers(folder):
    """Files that a finished output should not have."""
    home = folder / "out" / HOME
    kept = ["job.json", "input-*.json", "splits/*", "manifests/*", "workers/*", "reruns/*"]
    kept += ["leases/output-*", "leases/input-*"]
    found = {path.relative_to(home) for path in home.rglob("*") if path.is_file()}
    return sorted(str(path) for path in found if not any(path.match(pattern) for pattern in kept))


def in_child(function, *arguments):
    """Runs the function in a forked process; returns the exit code once it has ended: 1 where it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


KILLED = 9  # exit code of a process that `killed_at` ended


def killed_at(operation, function, *arguments):
    """Runs the function in a process that dies just before its storage operation of that number (from 0).

    Returns whether it got that far. Operations of its other threads, the worker's beats, do not count.
    """

    def run():
        with before_operation(Store, operation, os._exit, KILLED):
            function(*arguments)

    code = in_child(run)
    assert code in (0, KILLED)
    return code == KILLED


@contextmanager
def before_operation(store, number, action, *arguments):
    """Runs ``action(*arguments)`` just before the store's operation of that number (from 0) in the calling thread.

    ``store`` is one or the class, for all. Yields a list that is empty until then.
    """
    persist, thread, left, came = store._persist, threading.current_thread(), iter(range(number)), []

    def counting(*call, **options):
        if threading.current_thread() is thread and not came and next(left, None) is None:
            came.append(number)
            action(*arguments)
        return persist(*call, **options)

    store._persist = counting
    try:
        yield came
    finally:
        store._persist = persist


@contextmanager
def operations(store):
    """Yields a list of (verb, name), to which comes what is done on the store, a worker's beats apart."""
    persist, done = store._persist, []

    def noting(verb, name, *call, **options):
        if threading.current_thread().name != "worker":
            done.append((verb, name))
        return persist(verb, name, *call, **options)

    store._persist = noting
    try:
        yield done
    finally:
        store._persist = persist


def race(workers, function):
    """Runs ``function(index)`` in that many forked processes at once; returns what they returned, as JSON data."""
    start_read, start_write = os.pipe()
    pipes = []
    for index in range(workers):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(start_write)
                os.read(start_read, 1)  # ends when the parent closes the pipe: all begin together
                os.write(write, json.dumps(function(index)).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write)
        pipes.append((pid, read))
    os.close(start_write)
    os.close(start_read)
    answers = []
    for pid, read in pipes:
        with os.fdopen(read, "rb") as file:
            answers.append(json.loads(file.read() or b"null"))
        os.waitpid(pid, 0)  # and no other child: that may be somebody else's to wait for
    return answers
