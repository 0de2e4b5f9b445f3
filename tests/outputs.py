"""A small job without a model: answers follow from the rows, so that tests of the output can run it at will."""

import json
import os
import traceback

from batchrun.data.lease import acquire
from batchrun.data.parts import Layout
from batchrun.data.rows import PartialRow, RowResult
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.data.store import Store
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


def open_as_worker(job):
    """An output opened beside others: each worker has a lease of its own."""
    store = Store(job.output.path)
    return Output(store, Layout.of(job), configuration(job), acquire(store, f"worker-{store.writer}"))


def answer(split, row):
    if row.error:
        return RowResult(split.number, row.row, error=row.error)
    return RowResult(split.number, row.row, f"answer to {row.data['text']}", "stop", 3, 2)


def run_job(job, *, stop_after=None):
    """Runs or resumes the job, two rows to a checkpoint; returns the manifest and the rows answered in this run."""
    source = Source(job.input)
    files = source.files()
    answered = []
    with open_output(job, inputs=files) as output:
        if output.recorded_input() is None:
            output.record_input(files, source.splits(files))
        for split in output.check_input(files):
            if split.number in output.committed():
                continue
            done = output.done_rows()[split.number]
            rows = [row for row in source.rows(split) if row.row not in done]
            for start in range(0, len(rows), 2):
                unfinished = [PartialRow(split.number, row.row, [1, 2]) for row in rows[start + 2 :]]
                output.checkpoint([answer(split, row) for row in rows[start : start + 2]], unfinished)
                answered += [(split.number, row.row) for row in rows[start : start + 2]]
            output.commit_split(split, source)
            if stop_after is not None and split.number >= stop_after:
                break
        return output.finish({"device": "test"}), answered


def parts_of(folder):
    """Name -> bytes of every part."""
    return {path.name: path.read_bytes() for path in sorted((folder / "out").glob("part-*"))}


def in_child(function, *arguments):
    """Runs the function in a forked process; returns its pid once it has ended and has been waited for."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return pid


def race(workers, function):
    """Runs ``function(index)`` in that many forked processes at once; returns what they returned, as JSON data."""
    start_read, start_write = os.pipe()
    pipes = []
    for index in range(workers):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                os.close(start_write)
                os.read(start_read, 1)  # ends when the parent closes the pipe: all begin together
                os.write(write, json.dumps(function(index)).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write)
        pipes.append(read)
    os.close(start_write)
    os.close(start_read)
    answers = []
    for read in pipes:
        with os.fdopen(read, "rb") as file:
            answers.append(json.loads(file.read() or b"null"))
        os.wait()
    return answers
