"""What a run covers: new, changed, gone and touched files, limits that rise and fall, and who records it."""

import gzip
import json
import os
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.data.records import HOME
from batchrun.data.scope import splits_to_do
from batchrun.data.source import Source
from batchrun.errors import JobError
from batchrun.observe.status import read_status
from tests.outputs import (
    before_operation,
    hand,
    killed_at,
    leftovers,
    make_job,
    open_output,
    parts_of,
    race,
    run_job,
    write_lines,
)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Processes die here, machines do not: waiting for the disk would show nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write_input(folder, name, texts):
    """A JSONL or Parquet file with these texts."""
    path = folder / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=3)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), mtime=0))
    else:
        write_lines(path, [{"text": text} for text in texts])
    return path


def texts(prefix, n):
    return [f"{prefix}{i}" for i in range(1, n + 1)]


@pytest.fixture
def folder(tmp_path):
    """Two files: a of 6 rows (splits 0 and 1), b of 3 rows (split 2)."""
    write_input(tmp_path, "a.jsonl", texts("a", 6))
    write_input(tmp_path, "b.jsonl", texts("b", 3))
    return tmp_path


@pytest.fixture
def job(folder):
    return make_job(folder)


class CountingSource(Source):
    """Knows which files it was asked to scan."""

    def __init__(self, spec):
        super().__init__(spec)
        self.scanned = []

    def splits(self, files, first_number=0):
        self.scanned += [file.key for file in files]
        return super().splits(files, first_number)


def result_texts(folder):
    """What the parts answer, sorted."""
    tables = [pq.read_table(path) for path in (folder / "out").glob("part-*")]
    return sorted(text.removeprefix("answer to ") for table in tables for text in table["generated_text"].to_pylist())


def run(job, **options):
    """The manifest, the rows answered, and the keys of the files that were scanned."""
    source = CountingSource(job.input)
    manifest, answered = run_job(job, source=source, **options)
    return manifest, answered, source.scanned


# --- new files ---------------------------------------------------------------------------------------------------


def test_new_file_adds_splits(folder, job):
    first, _, scanned = run(job)
    assert scanned == ["a.jsonl", "b.jsonl"]
    before = parts_of(folder)
    write_input(folder, "aa.jsonl", texts("new", 5))  # comes before b, and yet its splits are the last
    manifest, answered, scanned = run(job)
    assert scanned == ["aa.jsonl"]
    assert answered == [(3, 1), (3, 2), (3, 3), (3, 4), (4, 5)]
    assert (manifest.complete, manifest.generation, manifest.rows) == (True, 2, first.rows + 5)
    assert parts_of(folder).items() > before.items()
    assert leftovers(folder) == []
    assert run(job) == (manifest, [], [])


def test_new_file_of_an_unfinished_run(folder, job):
    run(job, stop_after=0)
    write_input(folder, "c.jsonl", texts("c", 2))
    manifest, answered, scanned = run(job)
    assert (scanned, len(answered)) == (["c.jsonl"], 7)
    assert (manifest.complete, result_texts(folder)) == (True, sorted(texts("a", 6) + texts("b", 3) + texts("c", 2)))


def test_new_file_while_others_are_at_work(folder, job):
    with hand(job) as one:
        claim = one.claim()
        write_input(folder, "c.jsonl", texts("c", 2))
        with hand(job, source=(source := CountingSource(job.input))) as two:
            assert source.scanned == ["c.jsonl"]
            assert [split.number for split in two.work.todo()] == [0, 1, 2, 3]
        one.run(claim)
        assert one.commit(claim).rows == 4
        assert [split.number for split in one.work.todo()] == [1, 2, 3]


def test_previous_result_stands_until_the_new_one_is_whole(folder, job):
    run(job)
    write_input(folder, "c.jsonl", texts("c", 6))
    manifest, _, _ = run(job, stop_after=3)
    assert (manifest.complete, manifest.rows) == (False, 13)
    assert read_status(job.output.path).state == "stopped"
    manifest, answered, _ = run(job)
    assert (manifest.complete, manifest.rows, answered) == (True, 15, [(4, 5), (4, 6)])


# --- changed files -----------------------------------------------------------------------------------------------


def test_changed_files_rows_are_run_again_and_replace_the_old(folder, job, caplog):
    run(job)
    before = parts_of(folder)
    write_input(folder, "a.jsonl", texts("new", 5))
    manifest, answered, scanned = run(job)
    assert "a.jsonl has changed: its rows (6 before) are run again" in caplog.text
    assert scanned == ["a.jsonl"]
    assert answered == [(3, 1), (3, 2), (3, 3), (3, 4), (4, 5)]
    assert (manifest.complete, manifest.generation, manifest.rows) == (True, 2, 8)
    assert [part.split for part in manifest.parts] == [2, 3, 4]
    assert sorted(parts_of(folder)) == [f"part-0000{n}.parquet" for n in (2, 3, 4)]
    assert parts_of(folder)["part-00002.parquet"] == before["part-00002.parquet"]
    assert result_texts(folder) == sorted(texts("new", 5) + texts("b", 3))
    assert leftovers(folder) == []
    status = read_status(job.output.path)
    assert (status.state, status.rows, status.done_rows, status.splits) == ("done", 8, 8, 3)
    assert run(job) == (manifest, [], [])


def test_old_parts_stand_until_what_replaces_them_is_whole(folder, job):
    first, _, _ = run(job)
    before = parts_of(folder)
    write_input(folder, "a.jsonl", texts("new", 6))
    manifest, answered, _ = run(job, stop_after=3)
    assert len(answered) == 4
    assert manifest == first
    assert parts_of(folder).items() >= before.items()
    assert read_status(job.output.path).state == "stopped"
    manifest, answered, _ = run(job)
    assert answered == [(4, 5), (4, 6)]
    assert result_texts(folder) == sorted(texts("new", 6) + texts("b", 3))
    assert leftovers(folder) == []


def test_file_that_changes_again_before_it_was_done(folder, job):
    run(job, stop_after=0)
    for name in ("second", "third"):
        write_input(folder, "a.jsonl", texts(name, 6))
        manifest, _, scanned = run(job, stop_after=3 if name == "second" else None)
        assert scanned == ["a.jsonl"]
    assert manifest.complete
    assert result_texts(folder) == sorted(texts("third", 6) + texts("b", 3))
    assert len(parts_of(folder)) == 3
    assert leftovers(folder) == []


def test_numbers_of_replaced_splits_are_not_used_again(folder, job):
    run(job)
    write_input(folder, "b.jsonl", texts("new", 3))
    assert [part.split for part in run(job)[0].parts] == [0, 1, 3]
    write_input(folder, "b.jsonl", texts("newer", 3))
    assert [part.split for part in run(job)[0].parts] == [0, 1, 4]


def test_touched_file_is_run_again_with_the_same_results(folder, job):
    run(job)
    before = [*parts_of(folder).values()]
    os.utime(folder / "in" / "a.jsonl", (1.8e9, 1.8e9))
    manifest, answered, scanned = run(job)
    assert (manifest.complete, len(answered), scanned) == (True, 6, ["a.jsonl"])
    assert sorted(parts_of(folder).values()) == sorted(before)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_file_that_was_empty(folder, job, suffix):
    write_input(folder, f"c.{suffix}", [])
    assert run(job)[0].rows == 9
    write_input(folder, f"c.{suffix}", texts("c", 2))
    manifest, answered, scanned = run(job)
    assert (scanned, len(answered), manifest.rows) == ([f"c.{suffix}"], 2, 11)


def test_file_that_is_empty_now(folder, job):
    run(job)
    write_input(folder, "a.jsonl", [])
    manifest, answered, _ = run(job)
    assert (manifest.complete, manifest.rows, answered) == (True, 3, [])
    assert list(parts_of(folder)) == ["part-00002.parquet"]
    write_input(folder, "b.jsonl", [])
    manifest, answered, _ = run(job)
    assert (manifest.complete, manifest.rows, len(manifest.parts)) == (True, 0, 1)
    assert [pq.read_table(path).num_rows for path in (folder / "out").glob("part-*")] == [0]
    assert run(job) == (manifest, [], [])
    write_input(folder, "a.jsonl", texts("a", 2))
    assert run(job)[0].rows == 2
    assert result_texts(folder) == texts("a", 2)


def test_moved_input_is_the_same_input(folder, job):
    run(job, stop_after=0)
    (folder / "in").rename(folder / "moved")
    moved = job.model_copy(update={"input": job.input.model_copy(update={"path": str(folder / "moved")})})
    manifest, answered, scanned = run(moved)
    assert (manifest.complete, len(answered), scanned) == (True, 5, [])


def test_worker_whose_file_was_replaced_commits_nothing_in_its_name(folder, job):
    """It has read the old file to its end, and does not know yet."""
    with hand(job) as slow:
        claim = slow.claim()
        slow.run(claim)
        rows = list(slow.source.batches(claim.split))
        write_input(folder, "a.jsonl", texts("new", 6))
        run(job)
        expected = parts_of(folder)

        class Remembered:
            def batches(self, split):
                return iter(rows)

        slow.output.commit_split(claim.split, Remembered())
        assert slow.finish().complete
    manifest, answered, _ = run(job)
    assert (manifest.complete, answered) == (True, [])
    assert result_texts(folder) == sorted(texts("new", 6) + texts("b", 3))
    assert parts_of(folder) == expected


# --- files that are gone -----------------------------------------------------------------------------------------


def test_committed_parts_of_a_file_that_is_gone_stay(folder, job):
    first, _, _ = run(job)
    (folder / "in" / "a.jsonl").unlink()
    assert run(job) == (first, [], [])
    write_input(folder, "c.jsonl", texts("c", 1))
    manifest, answered, scanned = run(job)
    assert (manifest.rows, len(answered), scanned) == (10, 1, ["c.jsonl"])
    assert result_texts(folder) == sorted(texts("a", 6) + texts("b", 3) + texts("c", 1))


def test_unfinished_rows_of_a_file_that_is_gone_are_left_out(folder, job, caplog):
    run(job, stop_after=0)
    path = folder / "in" / "a.jsonl"
    path.rename(folder / "kept")
    manifest, answered, _ = run(job)
    assert "a.jsonl is gone: 2 rows of it were not finished, and are left out" in caplog.text
    assert (manifest.complete, manifest.rows) == (True, 7)
    assert [split for split, _ in answered] == [2, 2, 2]
    assert result_texts(folder) == sorted(texts("a", 4) + texts("b", 3))
    (folder / "kept").rename(path)
    manifest, answered, _ = run(job)
    assert answered == [(3, 5), (3, 6)]
    assert result_texts(folder) == sorted(texts("a", 6) + texts("b", 3))


def test_file_that_comes_back_has_no_holes(folder, job):
    """Its second split was committed when it went, and its first was not."""
    with hand(job) as worker:
        worker.claim()
        claim = worker.claim()
        worker.run(claim)
        worker.commit(claim)
    path = folder / "in" / "a.jsonl"
    path.rename(folder / "kept")
    assert run(job)[0].rows == 5
    (folder / "kept").rename(path)
    manifest, answered, scanned = run(job)
    assert (answered, scanned) == ([(3, row) for row in (1, 2, 3, 4)], ["a.jsonl"])
    assert (manifest.complete, result_texts(folder)) == (True, sorted(texts("a", 6) + texts("b", 3)))
    assert run(job) == (manifest, [], [])


def test_file_that_comes_back_changed(folder, job):
    run(job)
    (folder / "in" / "a.jsonl").unlink()
    run(job)
    write_input(folder, "a.jsonl", texts("new", 2))
    manifest, answered, _ = run(job)
    assert (manifest.rows, len(answered)) == (5, 2)
    assert result_texts(folder) == sorted(texts("new", 2) + texts("b", 3))


def test_lost_part_of_a_file_that_is_gone(folder, job, caplog):
    run(job)
    (folder / "in" / "a.jsonl").unlink()
    (folder / "out" / "part-00000.parquet").unlink()
    manifest, answered, _ = run(job)
    assert "a.jsonl is gone: 4 rows of it were not finished, and are left out" in caplog.text
    assert (manifest.complete, manifest.rows, answered) == (True, 5, [])
    assert result_texts(folder) == sorted(texts("a", 6)[4:] + texts("b", 3))
    assert read_status(job.output.path).state == "done"


def test_renamed_file_is_another_file(folder, job):
    run(job)
    (folder / "in" / "a.jsonl").rename(folder / "in" / "z.jsonl")
    manifest, answered, _ = run(job)
    assert (manifest.rows, len(answered)) == (15, 6)


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "jsonl.gz"])
@pytest.mark.parametrize("limits", [[2, 3, None], [4, 5, 6, 7, 9, None], [1, 8, 100], [3, None]])
def test_raised_limit_runs_only_the_rows_after(tmp_path, suffix, limits):
    write_input(tmp_path, f"a.{suffix}", texts("a", 6))
    write_input(tmp_path, f"b.{suffix}", texts("b", 3))
    job = make_job(tmp_path)
    every = texts("a", 6) + texts("b", 3)
    done = 0
    for limit in limits:
        manifest, answered, _ = run(job, limit=limit)
        wanted = min(limit or 9, 9)
        assert (manifest.rows, len(answered), manifest.complete) == (wanted, wanted - done, True)
        assert result_texts(tmp_path) == sorted(every[:wanted])
        done = wanted
    assert leftovers(tmp_path) == []
    assert run(job, limit=limits[-1]) == (manifest, [], [])


def test_files_that_are_whole_are_not_scanned_again(folder, job):
    assert run(job, limit=6)[2] == ["a.jsonl", "b.jsonl"]
    assert run(job, limit=7)[2] == ["b.jsonl"]
    assert run(job, limit=9)[2] == ["b.jsonl"]
    assert run(job)[2] == []


def test_lowered_limit_of_finished_rows(folder, job):
    manifest, _, _ = run(job)
    assert run(job, limit=2) == (manifest, [], [])
    write_input(folder, "c.jsonl", texts("c", 2))
    assert run(job, limit=2) == (manifest, [], [])
    assert run(job, limit=10)[0].rows == 10


def test_lowered_limit_of_unfinished_rows_is_refused(folder, job):
    run(job, stop_after=0)
    assert run(job, limit=4)[1] == []
    with pytest.raises(JobError, match=r"--limit 5: .* was begun with 9 rows, and its first 5 are not finished; give "):
        run(job, limit=5)
    assert run(job, limit=9)[0].complete


def test_raised_limit_after_a_change(folder, job):
    run(job, limit=5)
    write_input(folder, "a.jsonl", texts("new", 6))
    manifest, answered, _ = run(job, limit=7)
    assert (manifest.complete, manifest.rows, len(answered)) == (True, 7, 7)
    assert result_texts(folder) == sorted(texts("new", 6) + texts("b", 1))


def test_file_that_breaks_off_ends_in_one_error_whatever_the_limits(tmp_path):
    rng = random.Random(1)
    path = write_input(tmp_path, "a.jsonl.gz", [rng.randbytes(2000).hex() for _ in range(30)])
    path.write_bytes(path.read_bytes()[:-15_000])
    whole, _, _ = run(make_job(tmp_path, path=str(tmp_path / "clean")))
    assert (whole.errors, whole.rows > 20) == (2, True)  # one line is cut, and the rest is told of in one more
    job = make_job(tmp_path)
    for limit in (1, 10, whole.rows - 2):
        assert run(job, limit=limit)[0].errors == 0
    for _ in range(2):
        manifest, _, _ = run(job)
        assert (manifest.errors, manifest.rows) == (whole.errors, whole.rows)


# --- who records -------------------------------------------------------------------------------------------------


def recorded_rows(output):
    """(file, row) of every row in the recorded splits, in their order."""
    return [
        (split.file.key, row)
        for split in output.recorded_input()[1]
        for row in range(split.first_row, split.first_row + split.n_rows)
    ]


@pytest.mark.parametrize("limits", [[None] * 6, [1, 2, 5, 7, 9, None], [4, 4, 8, 8, 3, 3]])
def test_six_workers_record_at_once(folder, job, limits):
    def work(index):
        source = Source(job.input)
        files = source.files()
        with open_output(job, inputs=files) as output:
            try:
                return [split.number for split in splits_to_do(output, source, files, limits[index])]
            except JobError:
                return None  # another has recorded more rows than its limit

    answers = race(6, work)
    with open_output(job) as output:
        rows = recorded_rows(output)
        numbers = [split.number for split in output.recorded_input()[1]]
    assert len(rows) == len(set(rows)) == max(limit or 9 for limit in limits)
    assert numbers == list(range(len(numbers)))
    assert all(numbers[: len(found)] == found for found in answers if found)
    assert any(answers)
    assert leftovers(folder) == []


def test_record_is_written_only_where_something_is_new(folder, job):
    for _ in range(3):
        run(job)
    assert [path.name for path in (folder / "out" / HOME).glob("input-*")] == ["input-00001.json"]


@pytest.mark.slow
def test_kill_between_any_two_operations_of_recording(folder, job):
    run(job, stop_after=0)
    shutil.copytree(folder / "out", folder / "begun")
    write_input(folder, "a.jsonl", texts("new", 6))
    write_input(folder, "c.jsonl", texts("c", 2))
    operation = 0

    def record():
        with hand(job):
            pass

    while killed_at(operation, record):
        manifest, answered, _ = run(job)
        assert (manifest.complete, len(answered)) == (True, 11), f"at operation {operation}"
        assert result_texts(folder) == sorted(texts("new", 6) + texts("b", 3) + texts("c", 2))
        assert leftovers(folder) == []
        shutil.rmtree(folder / "out")
        shutil.copytree(folder / "begun", folder / "out")
        operation += 1
    assert operation > 10


def test_change_recorded_between_any_two_operations_of_another_worker(folder, job):
    """A worker commits one file's split while another finds that the other file has changed, and runs it."""
    operation, came = 0, True
    while came:
        write_input(folder, "a.jsonl", texts("a", 6))
        with hand(job) as slow:
            *_, claim = slow.claim(), slow.claim(), slow.claim()
            slow.run(claim)

            def change():
                write_input(folder, "a.jsonl", texts("new", 5))
                run(job)

            with before_operation(slow.output.store, operation, change) as came:
                slow.commit(claim)
        manifest, _, _ = run(job)
        assert manifest.complete
        assert result_texts(folder) == sorted(texts("new" if came else "a", 5 + (not came)) + texts("b", 3))
        assert leftovers(folder) == [], f"at operation {operation}"
        shutil.rmtree(folder / "out")
        operation += 1
    assert operation > 5
