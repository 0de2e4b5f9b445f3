"""Outputs: whatever is interrupted, raced or damaged, each row comes out once and the parts are the same bytes."""

import json
import os
import shutil
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.data.lease import LEASES, HeldError
from batchrun.data.parts import Layout
from batchrun.data.records import (
    HOME,
    JOB,
    KEPT,
    MANIFEST_COPY,
    MANIFESTS,
    PARTIALS,
    REMOVING,
    SEGMENTS,
    SPLITS,
    STAGED,
    decoded_schema,
)
from batchrun.data.rows import InputFile, PartialRow, RowResult, TokenLogprob
from batchrun.data.scope import splits_to_do
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.data.store import StorageError, Store, sha256_of
from batchrun.data.view import OutputView
from batchrun.data.work import Work
from batchrun.data.workers import WORKERS, Watch
from batchrun.errors import JobError, StoppedError
from batchrun.observe.status import read_status
from tests.outputs import (
    KILLED,
    answer,
    configuration,
    hand,
    in_child,
    killed_at,
    leftovers,
    make_job,
    open_output,
    operations,
    parts_of,
    race,
    run_job,
    write_lines,
)

RECORDS = [{"id": f"r{i}", "text": f"text {i}", "n": i} for i in range(5)]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Processes die here, machines do not: waiting for the disk would show nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path):
    """An input of two files whose column ``n`` changes its type and of which one line is bad."""
    write_lines(tmp_path / "in" / "a.jsonl", RECORDS)
    write_lines(tmp_path / "in" / "b.jsonl", [{"id": 7, "text": "seven", "n": "x", "new": [1]}, "{bad"])
    return tmp_path


@pytest.fixture
def job(folder):
    return make_job(folder)


@pytest.fixture
def output(job):
    """An open output whose input is recorded."""
    source = Source(job.input)
    files = source.files()
    with open_output(job, inputs=files) as output:
        splits_to_do(output, source, files, None)
        yield output


def rows_of(folder):
    return pa.concat_tables(pq.read_table(path) for path in sorted((folder / "out").glob("part-*"))).to_pylist()


def results(split, rows):
    return [RowResult(split, row, f"text {row}", "stop", 1, 1) for row in rows]


# --- a whole run -------------------------------------------------------------------------------------------------


def test_finished_output(folder, job):
    manifest, answered = run_job(job)
    assert len(answered) == 7
    rows = rows_of(folder)
    assert [row["custom_id"] for row in rows] == ["r0", "r1", "r2", "r3", "r4", "7", "b.jsonl:2"]
    assert [row["n"] for row in rows] == ["0", "1", "2", "3", "4", '"x"', None]
    assert [row["new"] for row in rows] == [None] * 5 + [[1], None]
    assert rows[6]["error"].startswith("unreadable_row: ")
    assert (manifest.rows, manifest.ok, manifest.errors, manifest.complete) == (7, 6, 1, True)
    assert (manifest.prompt_tokens, manifest.completion_tokens) == (18, 12)
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        *[HOME, MANIFEST_COPY],
        *[f"part-0000{i}.parquet" for i in range(3)],
    ]
    for part in manifest.parts:
        assert sha256_of(folder / "out" / part.name) == part.sha256
    assert leftovers(folder) == []
    assert json.loads((folder / "out" / MANIFEST_COPY).read_text()) == manifest.model_dump()
    assert manifest.run == {"device": "test"}
    assert manifest.columns["n"] == "string"


def test_parts_load_as_one_data_set(folder, job, tmp_path):
    run_job(job)
    datasets = pytest.importorskip("datasets")
    files = [str(path) for path in sorted((folder / "out").glob("part-*"))]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["custom_id"][:2] == ["r0", "r1"]


def test_finished_job_is_left_alone(folder, job):
    first, _ = run_job(job)
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.json")}
    again, answered = run_job(job)
    assert (again, answered) == (first, [])
    changed = [path for path, when in before.items() if path.exists() and path.stat().st_mtime_ns != when]
    assert changed == []


def test_stopped_job_goes_on(folder, job):
    clean = make_job(folder / "clean")
    shutil.copytree(folder / "in", folder / "clean" / "in")
    run_job(clean)
    partial, first = run_job(job, stop_after=0)
    assert (partial.complete, partial.rows, [part.name for part in partial.parts]) == (False, 4, ["part-00000.parquet"])
    manifest, second = run_job(job)
    assert (manifest.complete, manifest.generation, manifest.rows) == (True, 2, 7)
    assert len(first) + len(second) == 7
    assert parts_of(folder) == parts_of(folder / "clean")
    assert len(list((folder / "out" / MANIFESTS).iterdir())) == 2


def test_parts_that_were_written_anew_are_not_read_for_their_schema(folder, job, monkeypatch):
    first, _ = run_job(job)
    written_anew = [part for part in first.parts if part.schema_ipc]
    assert written_anew
    for part in written_anew:
        described = pq.read_metadata(folder / "out" / part.name).metadata[b"ARROW:schema"]
        assert decoded_schema(described).equals(decoded_schema(part.schema_ipc), check_metadata=True)
    write_lines(folder / "in" / "c.jsonl", [{"id": "c", "text": "c", "n": "y", "new": [2]}])
    run_job(job, stop_after=0)  # a manifest that is not complete hands it on
    read, local_copy = [], Store.local_copy
    monkeypatch.setattr(Store, "local_copy", lambda store, name: read.append(name) or local_copy(store, name))
    write_lines(folder / "in" / "d.jsonl", [{"id": "d", "text": "d", "n": "z", "new": [3]}])
    manifest, _ = run_job(job)
    assert manifest.complete
    assert manifest.parts[: len(first.parts)] == [part.model_copy(update={"staged": None}) for part in first.parts]
    assert not {part.name for part in first.parts} & set(read)


def test_empty_input_gives_an_empty_part(folder, job):
    for path in (folder / "in").iterdir():
        path.write_text("")
    manifest, _ = run_job(job)
    assert (manifest.complete, manifest.rows, len(manifest.parts)) == (True, 0, 1)
    table = pq.read_table(folder / "out" / "part-00000.parquet")
    assert table.num_rows == 0
    assert table.schema.field("error").type == pa.string()
    assert run_job(job)[0] == manifest


def test_jsonl_output(folder):
    job = make_job(folder, format="jsonl")
    manifest, _ = run_job(job)
    lines = b"".join(parts_of(folder).values()).decode().splitlines()
    assert [json.loads(line).get("n") for line in lines] == [0, 1, 2, 3, 4, "x", None]
    assert manifest.columns == {}


# --- kills -------------------------------------------------------------------------------------------------------

STEPS = ("fsync", "link", "replace", "unlink")


def run_until(job, step):
    """Runs the job in a process that dies, as by kill -9, at that file system call; True if it got that far."""

    def run():
        calls = iter(range(step))

        def dying(call):
            def wrapper(*arguments, **options):
                if next(calls, None) is None:
                    os._exit(KILLED)
                return call(*arguments, **options)

            return wrapper

        for name in STEPS:
            setattr(os, name, dying(getattr(os, name)))
        run_job(job)

    code = in_child(run)
    assert code in (0, KILLED)
    return code == KILLED


def test_kill_at_every_step_and_resume(folder, tmp_path):
    """The output after a kill at any file system call and a resume is byte for byte that of an undisturbed run."""
    run_job(make_job(folder))
    expected, home = parts_of(folder), folder / "out"
    step, died = 0, True
    while died:
        shutil.rmtree(home)
        died = run_until(make_job(folder), step)
        manifest, _ = run_job(make_job(folder))
        assert parts_of(folder) == expected, f"killed at step {step}"
        assert leftovers(folder) == [], f"killed at step {step}"
        assert manifest.complete
        assert {part.name: part.sha256 for part in manifest.parts} == {
            name: sha256_of(home / name) for name in expected
        }, f"killed at step {step}"
        step += 7
    assert step > 100


def test_many_kills_in_a_row(folder):
    run_job(make_job(folder))
    expected = parts_of(folder)
    shutil.rmtree(folder / "out")
    kills = 0
    while run_until(make_job(folder), 25) and kills < 30:
        kills += 1
    assert kills > 3
    run_job(make_job(folder))
    assert parts_of(folder) == expected


def test_killed_removal_can_be_repeated(folder, job):
    run_job(job)
    expected = parts_of(folder)
    for calls in range(0, 24, 2):

        def remove(calls=calls):
            left = iter(range(calls))
            unlink = os.unlink

            def dying(*arguments, **options):
                if next(left, None) is None:
                    os._exit(KILLED)
                unlink(*arguments, **options)

            os.unlink = dying
            open_output(job, overwrite=True).close()

        in_child(remove)
        run_job(job)
        assert parts_of(folder) == expected


@pytest.mark.slow
def test_kill_between_any_two_operations_of_a_removal(folder, job):
    """Whoever comes next finds the old result, or ends the removal; files of others stay."""
    run_job(job)
    (folder / "out" / "notes.txt").write_text("mine")
    shutil.copytree(folder / "out", folder / "whole")
    expected, operation = parts_of(folder), 0
    other = make_job(folder, sampling={"temperature": 0})

    def remove():
        open_output(other, overwrite=True).close()

    while killed_at(operation, remove):
        try:
            manifest, answered = run_job(job)
        except JobError:  # it was removed, and is the other job's, or nobody's yet beside the notes
            remove()
            manifest, answered = run_job(other)
        assert len(answered) in (0, 7), f"at operation {operation}"
        assert (manifest.complete, manifest.generation) == (True, 1)
        assert (parts_of(folder), leftovers(folder)) == (expected, []), f"at operation {operation}"
        assert (folder / "out" / "notes.txt").read_text() == "mine"
        assert not (folder / "out" / REMOVING).exists()
        shutil.rmtree(folder / "out")
        shutil.copytree(folder / "whole", folder / "out")
        operation += 1
    assert operation > 20


# --- races -------------------------------------------------------------------------------------------------------


def test_six_workers_commit_the_same_splits(folder, job):
    run_job(job)
    expected = parts_of(folder)
    shutil.rmtree(folder / "out")
    source = Source(job.input)
    files = source.files()
    splits = source.splits(files)
    with open_output(job) as output:
        splits_to_do(output, source, files, None)

    def work(index):
        source = Source(job.input)
        with open_output(job) as output:
            records = []
            for split in splits[index % 3 :] + splits[: index % 3]:
                rows = list(source.rows(split))[:: -1 if index % 2 else 1]
                output.checkpoint([answer(split, row) for row in rows], [PartialRow(split.number, 1, [1])])
                records.append((split.number, output.commit_split(split, source).attempt))
            return sorted(records), output.finish({"worker": index}).generation

    answers = race(6, work)
    assert all(records == answers[0][0] for records, _ in answers)
    assert {generation for _, generation in answers} == {1}
    assert parts_of(folder) == expected
    manifest, answered = run_job(job)
    assert (manifest.generation, answered, leftovers(folder)) == (1, [], [])


def test_loser_adopts_the_winners_part(folder, job, output):
    source = Source(job.input)
    (split, *_) = output.recorded_input()[1]
    with open_output(job) as other:
        output.checkpoint([RowResult(0, row, "first", "stop", 1, 1) for row in range(1, 5)], [])
        other.checkpoint([RowResult(0, row, "second", "stop", 1, 1) for row in range(1, 5)], [])
        record = other.commit_split(split, source)
        assert output.commit_split(split, source) == record
    assert record.attempt == other.attempt
    assert output.store.names(SEGMENTS) == output.store.names(STAGED) == []


def test_late_worker_leaves_a_finished_output_alone(folder, job):
    """It commits a split whose part the manifest has since had written anew for a schema of all."""
    run_job(job)
    expected = parts_of(folder)
    with open_output(job) as late:
        split = late.recorded_input()[1][0]
        late.checkpoint(results(0, range(1, 5)), [])
        late.commit_split(split, Source(job.input))
        assert late.finish({}).generation == 1
    assert parts_of(folder) == expected
    assert leftovers(folder) == []


def test_output_is_joined_and_left(folder, job):
    with open_output(job) as one, open_output(job) as two:
        view = OutputView.at(job.output.path)
        assert [worker.owner.attempt for worker in view.workers()] == [one.attempt, two.attempt]
        assert one.attempt != two.attempt
        two.close()
        assert [worker.owner.attempt for worker in view.workers()] == [one.attempt]
        assert view.last_word().owner.attempt == two.attempt
    assert view.workers() == []


def test_live_output_is_not_overwritten(folder, job, output):
    output.checkpoint(results(0, [1]), [])
    for other in (job, make_job(folder, sampling={"temperature": 0})):
        with pytest.raises(HeldError, match=f"is in use by process {os.getpid()} on ") as caught:
            open_output(other, overwrite=True)
        assert caught.value.exit_code == 75
    assert not output.store.exists(REMOVING)
    assert output.done_rows() == {0: {1: True}}
    output.close()
    with open_output(job, overwrite=True) as fresh:
        assert fresh.recorded_input() is None
        assert fresh.done_rows() == {}


def test_output_of_dead_workers_is_overwritten(folder, job):
    def die():
        with hand(job) as worker:
            worker.output.checkpoint(results(0, [1]), [PartialRow(0, 2, [1])])
            worker.work.cede(worker.claim(), [4])
            worker.work.ask()
            os._exit(KILLED)

    assert in_child(die) == KILLED
    with open_output(job, overwrite=True) as output:
        files = [str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*") if path.is_file()]
        assert {name for name in files if not name.startswith((LEASES, WORKERS))} == {JOB}
        assert all(name.startswith(f"{LEASES}/output-") for name in files if name.startswith(LEASES))
        assert output.recorded_input() is None
    assert len(run_job(job)[1]) == 7


def test_worker_whose_output_others_begin_anew(folder, job, monkeypatch):
    """It was silent for so long that they took it for gone. Nothing of it gets into theirs."""
    with hand(job) as late:
        claim = late.claim()
        late.run(claim)
        with monkeypatch.context() as patch:
            patch.setattr(Watch, "is_gone", lambda *_: True)
            other = make_job(folder, sampling={"max_tokens": 7})
            open_output(other, overwrite=True).close()
        for action in (lambda: late.run(claim), lambda: late.commit(claim), late.finish):
            with pytest.raises(StoppedError, match="begun anew by others"):
                action()
        manifest, answered = run_job(other)
        assert (manifest.complete, len(answered)) == (True, manifest.rows)


def test_workers_that_overwrite_and_join_at_once(folder, job):
    """Each begins anew or is refused; whoever got in does its work undisturbed."""
    run_job(job)
    expected = parts_of(folder)

    def work(index):
        try:
            with open_output(job, overwrite=index < 3) as output:
                source = Source(job.input)
                files = source.files()
                splits_to_do(output, source, files, None)
                output.checkpoint(results(0, [1 + index]), [])
                time.sleep(0.1)
                assert output.done_rows().get(0, {}).get(1 + index) or 0 in output.commits()
        except HeldError:
            return "refused"
        return "done"

    for _ in range(4):
        answers = race(6, work)
        assert set(answers) <= {"refused", "done"}
        assert answers[3:] == ["done"] * 3
        manifest, _ = run_job(job)
        assert (manifest.complete, leftovers(folder)) == (True, [])
    with open_output(job, overwrite=True):
        pass
    run_job(job)
    assert parts_of(folder) == expected


def test_workers_come_while_others_sweep(folder, job):
    """The last worker removes what killed ones left: not the first files of one that begins at that moment."""
    run_job(job)

    def work(index):
        for _ in range(60):
            with open_output(job) as output:
                if index < 2:
                    output.finish({})
        return "done"

    assert race(6, work) == ["done"] * 6
    assert leftovers(folder) == []


def test_last_worker_sweeps_what_dead_ones_left_and_nothing_of_the_living(folder, job):
    def die():
        with hand(job) as worker:
            worker.output.checkpoint(results(1, [5]), [PartialRow(0, 2, [1])])
            worker.output.store.put(f"{STAGED}/00009-{worker.output.attempt}", b"1")
            worker.work.ask()
            os._exit(KILLED)

    assert in_child(die) == KILLED
    with hand(job) as living:
        living.output.checkpoint([], [PartialRow(0, 2, [1])])
        living.output.store.put(f"{STAGED}/00009-{living.output.attempt}", b"1")
        living.work.ask()
        manifest, _ = run_job(job)
        assert manifest.complete
        home = folder / "out" / HOME
        left = [path.name for name in ("partials", "staged", "asks") for path in (home / name).iterdir()]
        assert len(left) == 3
        assert all(living.output.attempt in name for name in left)
        assert len(list((home / "workers").iterdir())) == 2
    run_job(job)
    assert leftovers(folder) == []
    assert len(list((home / "workers").iterdir())) == 1


def test_requests_of_a_finish_do_not_grow_with_the_splits(tmp_path):
    """And a worker of a job that another has finished asks for little, and waits for nobody."""
    counts = []
    for n_splits in (2, 12):
        write_lines(tmp_path / "in" / "a.jsonl", [{"id": row, "text": "x"} for row in range(n_splits)])
        job = make_job(tmp_path, split_rows=1, path=f"memory://{tmp_path.name}-{time.time_ns()}/out")
        with hand(job) as first, hand(job) as second:
            while claim := first.claim():
                first.run(claim)
                first.commit(claim)
            with operations(first.output.store) as by_first:
                manifest = first.finish()
            second.output.committed()
            with operations(second.output.store) as by_second:
                assert second.finish() == manifest
        assert {verb for verb, _ in by_second} == {"list", "read"}
        counts.append((len(by_first), len(by_second)))
    assert counts[0] == counts[1]
    assert counts[0][1] < 20


def test_requests_of_a_commit(tmp_path):
    write_lines(tmp_path / "in" / "a.jsonl", [{"id": row, "text": "x"} for row in range(4)])
    job = make_job(tmp_path, path=f"memory://{tmp_path.name}-{time.time_ns()}/out")
    with hand(job) as worker:
        claim = worker.claim()
        worker.run(claim)
        with operations(worker.output.store) as done:
            record = worker.commit(claim)
        segments = 2
        assert len([name for verb, name in done if verb == "list"]) == 5
        # The last six stage, ask whose output it is, create, look, publish and end the lease.
        assert len(done) == 5 + 2 * segments + 6
        with open_output(job) as other:
            assert other.committed() == {0: record}


def test_files_of_workers_do_not_grow_without_end(folder, job):
    run_job(job)
    workers = folder / "out" / WORKERS
    (written,) = workers.iterdir()
    for number in range(100):
        shutil.copy(written, workers / f"{number:032x}.json")
    run_job(job)
    assert len(list(workers.iterdir())) == 1


def test_files_of_others_among_the_records_are_left_alone(folder, job):
    """As NFS leaves them in place of a file that was removed while somebody read it."""
    strange = [f"{directory}/.nfs0000000{number}" for number, directory in enumerate((SPLITS, KEPT, SEGMENTS))]
    with open_output(job) as output:
        for name in strange:
            output.store.put(name, b"1")
    manifest, _ = run_job(job)
    assert manifest.complete
    assert set(strange) <= {str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*")}
    assert read_status(job.output.path).state == "done"


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_done_rows_and_partials(job, output):
    assert (output.done_rows(), output.partials()) == ({}, {})
    finished = [*results(0, [3, 1]), RowResult(1, 5, error="bad_prompt: x")]
    output.checkpoint(finished, [PartialRow(0, 2, [7]), PartialRow(0, 4, [8])])
    assert output.done_rows() == {0: {1: True, 3: True}, 1: {5: False}}
    assert {key: row.token_ids for key, row in output.partials().items()} == {(0, 2): [7], (0, 4): [8]}
    output.checkpoint(results(0, [4]), [PartialRow(0, 2, [7, 8])])
    assert {key: row.token_ids for key, row in output.partials().items()} == {(0, 2): [7, 8]}
    assert len(output.store.names(PARTIALS)) == 1
    with open_output(job) as other:
        other.checkpoint([], [PartialRow(0, 2, [9]), PartialRow(1, 5, [1], [TokenLogprob(1, -0.5)])])
        partials = other.partials()
    assert {key: row.token_ids for key, row in partials.items()} == {(0, 2): [7, 8], (1, 5): [1]}
    assert partials[1, 5].logprobs == [TokenLogprob(1, -0.5)]
    output.checkpoint(results(0, [2]), [])
    output.commit_split(output.recorded_input()[1][0], Source(job.input))
    assert output.partials().keys() == {(1, 5)}
    output.checkpoint(results(1, [5]), [])
    output.commit_split(output.recorded_input()[1][1], Source(job.input))
    assert output.partials() == {}
    assert [other.attempt in name for name in output.store.names(PARTIALS)] == [True]  # it goes with the last sweep


def test_results_are_durable_before_a_partial_row_goes(job, output, monkeypatch):
    output.checkpoint([], [PartialRow(0, 1, [1])])

    def fail(name, data):
        if name.startswith(PARTIALS):
            raise StorageError("away")

    monkeypatch.setattr(output.store, "put", fail)
    with pytest.raises(StorageError):
        output.checkpoint(results(0, [1]), [PartialRow(0, 2, [1])])
    assert output.partials().keys() == {(0, 1)}


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-9] + b"x" * 9]
)
def test_damaged_files_cost_work_but_nothing_else(folder, job, output, damage):
    output.checkpoint(results(0, [1, 2]), [PartialRow(0, 3, [1, 2])])
    output.checkpoint(results(0, [3]), [PartialRow(0, 4, [1])])
    for name in [output.store.names(SEGMENTS)[0], output.store.names(PARTIALS)[0]]:
        path = folder / "out" / name
        path.write_bytes(damage(path.read_bytes()))
    assert set(output.done_rows()[0]) == {3}
    assert output.partials() == {}
    output.checkpoint(results(0, [4]), [])
    split, source = output.recorded_input()[1][0], Source(job.input)
    assert output.commit_split(split, source) is None  # rows 1 and 2 can be claimed again
    with pytest.raises(StorageError, match=r"row 1 has no result; run the same command again"):
        output.commit_split(split, source)
    output.checkpoint(results(0, [1, 2]), [])
    assert output.commit_split(split, source).ok == 4


def test_flipped_bits_in_a_segment_are_noticed(folder, output):
    output.checkpoint(results(0, range(1, 5)), [])
    path = folder / "out" / output.store.names(SEGMENTS)[0]
    data = bytearray(path.read_bytes())
    data[40] ^= 0x40
    path.write_bytes(bytes(data))
    assert output.done_rows() == {0: {}}


# --- what an output belongs to -----------------------------------------------------------------------------------


def test_other_settings_are_refused_showing_each(folder, job):
    run_job(job)
    other = make_job(folder, sampling={"temperature": 0, "stop": ["x"]}, format="jsonl")
    with pytest.raises(JobError) as caught:
        run_job(other)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("holds results of other settings:")
    assert sorted(lines[1:-1]) == [
        '  output.format: was "parquet", is now "jsonl"',
        '  sampling.stop: was [], is now ["x"]',
        "  sampling.temperature: was 1.0, is now 0.0",
    ]
    assert "--overwrite" in lines[-1]
    assert caught.value.exit_code == 2


def test_settings_that_came_or_went_are_shown(job):
    layout = Layout.of(job)
    Output.open(job.output, {"model": {"a": 1}, "gone": {}}, layout).close()
    with pytest.raises(JobError, match=r"(?s)gone: was \{\}, is now not set\n.*model\.b: was not set, is now \[1\]"):
        Output.open(job.output, {"model": {"a": 1, "b": (1,)}}, layout)


def test_recorded_input(folder, job, output):
    files, splits = output.recorded_input()
    assert [file.key for file in files] == ["a.jsonl", "b.jsonl"]
    assert [(split.number, split.file.key, split.first_row, split.n_rows) for split in splits] == [
        *[(0, "a.jsonl", 1, 4), (1, "a.jsonl", 5, 1), (2, "b.jsonl", 1, 2)]
    ]
    whole = {file.key for file in files}
    output.record_input(files, splits, whole, 3)
    assert not output.store.exists(f"{HOME}/input-00002.json")
    output.record_input(files, splits[1:], whole, 3)
    assert output.recorded_input() == (files, splits[1:])
    assert output.input_record().next_split == 3
    assert output.store.exists(f"{HOME}/input-00002.json")


def test_recorded_input_tells_no_credentials(job, output):
    file = InputFile("a.jsonl", "s3://me:secret@bucket/a.jsonl", 1, "1")
    output.record_input([file], [], [], 0)
    assert b"secret" not in output.store.read(f"{HOME}/input-00002.json")


def test_lost_record_of_the_input_is_named(folder, job):
    run_job(job)
    write_lines(folder / "in" / "c.jsonl", [{"id": 1, "text": "c"}])
    run_job(job)
    (folder / "out" / HOME / "input-00002.json").unlink()
    for look in (run_job, lambda job: read_status(job.output.path)):
        with pytest.raises(JobError, match=r"_batchrun: the input-\*\.json that has split 3 is gone"):
            look(job)


def test_directory_of_something_else_is_refused(folder, job):
    out = folder / "out"
    out.mkdir()
    (out / ".hidden").touch()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(JobError, match=r"not empty and no output of batchrun: notes\.txt.*--overwrite"):
        run_job(job)
    assert sorted(path.name for path in out.iterdir()) == [".hidden", "notes.txt"]
    open_output(job, overwrite=True).close()
    assert (out / "notes.txt").read_text() == "mine"
    manifest, _ = run_job(job)
    assert manifest.complete


def test_foreign_parts_are_never_replaced(folder, job):
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.parquet").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(JobError, match=r"no output of batchrun: part-00000\.parquet"):
            open_output(job, overwrite=overwrite)
    assert (folder / "out" / "part-00000.parquet").read_text() == "mine"


def test_overwrite_removes_only_what_is_ours(folder, job):
    run_job(job)
    (folder / "out" / "notes.txt").write_text("mine")
    (folder / "out" / "sub").mkdir()
    other = make_job(folder, sampling={"temperature": 0})
    with open_output(other, overwrite=True):
        pass
    assert sorted(path.name for path in (folder / "out").iterdir()) == [HOME, "notes.txt", "sub"]
    assert OutputView.at(job.output.path).committed() == {}
    run_job(other)
    assert len(parts_of(folder)) == 3


def test_input_within_the_output_is_refused(folder, job):
    run_job(job)
    before = parts_of(folder)
    chained = InputFile("part-00000.parquet", str(folder / "out" / "part-00000.parquet"), 1, "1")
    link = folder / "link"
    link.symlink_to(folder / "out")
    linked = InputFile("part-00000.parquet", str(link / "part-00000.parquet"), 1, "1")
    for file in (chained, linked, InputFile("out", f"file://{folder}/out", 1, "1")):
        with pytest.raises(JobError, match="holds the input file"):
            open_output(job, inputs=[file], overwrite=True)
    assert parts_of(folder) == before


@pytest.mark.parametrize("path", ["file", "file/below", "unknown://x", "loop", "loop/below", "nowhere"])
def test_impossible_output_is_one_readable_error(folder, path):
    (folder / "file").write_text("not a directory")
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("absent")
    job = make_job(folder, path=path if "://" in path else str(folder / path))
    with pytest.raises(JobError, match=r"^output\.path: .*"):
        open_output(job)
    with pytest.raises(JobError):
        read_status(job.output.path)
    assert (folder / "file").read_text() == "not a directory"


# --- damage ------------------------------------------------------------------------------------------------------


def test_rows_of_a_lost_part_are_run_again(folder, job, caplog):
    first, _ = run_job(job)
    expected = parts_of(folder)
    for generation in (2, 3):
        (folder / "out" / "part-00001.parquet").unlink()
        status = read_status(job.output.path)
        assert (status.state, status.faults) == ("damaged", ["part-00001.parquet is missing"])
        assert "part-00001.parquet is missing" in status.describe()
        manifest, answered = run_job(job)
        assert [split for split, _ in answered] == [1]
        assert "part-00001.parquet is missing: its 1 rows are run again" in caplog.text
        assert (manifest.complete, manifest.generation, manifest.rows) == (True, generation, first.rows)
        assert parts_of(folder) == expected
        assert leftovers(folder) == []
        assert read_status(job.output.path).state == "done"
    assert run_job(job) == (manifest, [])


@pytest.mark.parametrize("steps", [3, 30])
def test_kills_while_a_lost_part_is_made_again(folder, job, steps):
    run_job(job)
    expected = parts_of(folder)
    (folder / "out" / "part-00001.parquet").unlink()
    kills = 0
    while kills < 3 and run_until(job, steps):
        kills += 1
    assert kills
    manifest, _ = run_job(job)
    assert (manifest.complete, parts_of(folder), leftovers(folder)) == (True, expected, [])


def test_part_of_an_unpublished_manifest_is_not_lost(folder, job):
    """Parts lie staged after a manifest is created; one that was published may be lost before the rest are."""
    run_job(job)
    expected = parts_of(folder)
    shutil.rmtree(folder / "out")
    publish, left = Store.publish, iter(range(4))  # three commits, and the first of the manifest's own parts

    def dying(store, staged, final):
        if next(left, None) is None:
            raise StorageError("away")
        publish(store, staged, final)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "publish", dying)
        with pytest.raises(StorageError, match="away"):
            run_job(job)
    assert len(list((folder / "out" / STAGED).iterdir())) == 2
    assert read_status(job.output.path).faults == []
    (folder / "out" / "part-00000.parquet").unlink()
    manifest, answered = run_job(job)
    assert {split for split, _ in answered} == {0}
    assert (manifest.complete, manifest.generation, parts_of(folder)) == (True, 2, expected)


def test_lost_empty_part_is_made_again(folder, job):
    for path in (folder / "in").iterdir():
        path.write_text("")
    run_job(job)
    expected = parts_of(folder)
    (folder / "out" / "part-00000.parquet").unlink()
    assert run_job(job)[0].generation == 2
    assert parts_of(folder) == expected


def test_changed_part_is_refused(folder, job):
    """It may be the user's own: it is replaced only once it is gone."""
    run_job(job)
    part = folder / "out" / "part-00001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:100])
    with pytest.raises(JobError, match=r"part-00001\.parquet has 100 bytes, not [\d,]+\n.*delete these"):
        run_job(job)
    assert read_status(job.output.path).state == "damaged"
    part.unlink()
    run_job(job)
    assert part.read_bytes() == whole


def test_every_damage_is_survived_or_named(folder, job):
    """Each file deleted, cut in half or overwritten, of an output at work and of a finished one."""

    def submit():
        """What `submit` asks before the model loads."""
        with open_output(job) as output:
            source = Source(job.input)
            files = source.files()
            splits_to_do(output, source, files, None)
            output.committed(), output.done_rows(), output.partials()
            work = Work(output, files)
            work.claim(100), work.is_asked(), work.survey()

    def fault(look):
        try:
            look()
        except JobError as error:
            return str(error)
        return None

    def begin():
        run_job(job, stop_after=0)
        with hand(job) as worker:
            worker.output.checkpoint(results(1, [5]), [PartialRow(2, 1, [7])])
            claim = worker.claim()
            worker.work.cede(claim, [5])
            worker.work.suspect(claim, [5])
            worker.work.ask()
            os._exit(KILLED)

    in_child(begin)
    begun, finished = folder / "begun", folder / "finished"
    shutil.copytree(folder / "out", begun)
    in_child(run_job, job)
    (folder / "out").rename(finished)
    refused, survived = set(), set()
    for whole, pattern in ((begun, "**/*"), (finished, "part-*"), (finished, f"{MANIFESTS}/*")):
        for path in sorted(path.relative_to(whole) for path in whole.glob(pattern) if path.is_file()):
            half = (whole / path).read_bytes()[: (whole / path).stat().st_size // 2]
            for damaged in (None, half, *([b"{", b"[]", b"{}"] if path.suffix == ".json" else [])):
                shutil.rmtree(folder / "out", ignore_errors=True)
                shutil.copytree(whole, folder / "out")
                target = folder / "out" / path
                target.unlink() if damaged is None else target.write_bytes(damaged)
                told = [fault(lambda: read_status(job.output.path)), fault(submit)]
                assert all(text is None or path.name in text or "input-*.json" in text for text in told)
                (refused if any(told) else survived).add(path.name)
    assert refused >= {
        "job.json",
        "input-00001.json",
        "00000-1.json",
        "00001.001.json",
        "00000002.json",
        "part-00000.parquet",
    }
    assert survived >= {"_manifest.json", "00000-1.json", "part-00000.parquet"}


def test_output_without_its_job_can_be_overwritten(folder, job):
    run_job(job)
    (folder / "out" / "notes.txt").write_text("mine")
    (folder / "out" / HOME / "job.json").unlink()
    for look in (run_job, lambda job: read_status(job.output.path)):
        with pytest.raises(JobError, match=r"_batchrun/job\.json is missing: put .* back, .*--overwrite"):
            look(job)
    open_output(job, overwrite=True).close()
    assert sorted(path.name for path in (folder / "out").iterdir()) == [HOME, "notes.txt"]
    assert run_job(job)[0].complete


def test_view_of_no_output(tmp_path):
    assert OutputView.at(str(tmp_path / "absent")) is None
    with pytest.raises(JobError, match="unknown"):
        OutputView.at("unknown://x")


def test_view_of_an_output(folder, job):
    run_job(job)
    view = OutputView.at(str(folder / "out"))
    assert view.recorded_configuration() == json.loads(json.dumps(configuration(job)))
    assert view.workers() == []
    assert sorted(view.committed()) == [0, 1, 2]
    assert view.manifest().complete
    assert (folder / "out" / SPLITS).is_dir()


def test_output_in_memory_store(folder):
    """The object-store path of the protocol, as far as a store without failures can show it."""
    job = make_job(folder, path=f"memory://{folder.name}-{time.time_ns()}/out")
    manifest, _ = run_job(job)
    run_job(make_job(folder))
    assert {part.name: part.sha256 for part in manifest.parts} == {
        path.name: sha256_of(path) for path in (folder / "out").glob("part-*")
    }
    assert run_job(job)[0] == manifest
