"""Reruns: the chosen rows are run again and no others, whatever happens in between."""

import gzip
import json
import os
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batchrun.cli import main
from batchrun.data.reader import Result, Selection
from batchrun.data.records import HOME, KEPT, RERUNS, STAGED
from batchrun.data.rerun import open_again
from batchrun.data.rows import RowResult, TokenLogprob
from batchrun.data.sink import Output
from batchrun.data.store import Store
from batchrun.data.view import OutputView
from batchrun.errors import EXIT_BAD_JOB, JobError
from batchrun.job import JobSpec
from batchrun.observe.status import read_status
from tests.outputs import (
    KILLED,
    before_operation,
    hand,
    in_child,
    killed_at,
    leftovers,
    make_job,
    parts_of,
    run_job,
    write_lines,
)

ROWS = list(range(1, 11))
FAILED, TRUNCATED = {2, 7}, {3, 7, 8, 10}  # of 7 both: it was truncated before it failed


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Processes die here, machines do not: waiting for the disk would show nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path):
    """Ten rows in splits of 4. To be run again: of the first 2 and 3, of the second 7 and 8, of the third 10."""
    write_lines(tmp_path / "in" / "a.jsonl", [{"id": f"r{i}", "text": f"text {i}", "n": i} for i in ROWS])
    return tmp_path


@pytest.fixture(params=["parquet", "jsonl"])
def job(folder, request):
    return make_job(folder, format=request.param)


def first_answer(split, row):
    if row.error or row.row in FAILED:
        return RowResult(split.number, row.row, error=row.error or "engine_error: out of luck")
    finish = "length" if row.row in TRUNCATED else "stop"
    return RowResult(split.number, row.row, f"first of {row.row}", finish, 3, row.row)


def second_answer(split, row):
    if row.error:
        return RowResult(split.number, row.row, error=row.error)
    return RowResult(split.number, row.row, f"second of {row.row}", "stop", 3, 100 + row.row)


def mended_answer(split, row):
    return (second_answer if row.row in FAILED else first_answer)(split, row)


def run_first(job, **options):
    return run_job(job, answer=first_answer, **options)


def run_again(job, *kinds, **options):
    return run_job(job, rerun=kinds, answer=second_answer, **options)


def records(folder):
    """All result records by their custom_id."""
    rows = []
    for path in sorted((folder / "out").glob("part-*")):
        if path.suffix == ".jsonl":
            rows += map(json.loads, path.read_text().split("\n")[:-1])
        else:
            rows += pq.read_table(path).to_pylist()
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def open_rerun(job, *kinds, max_tokens=None):
    """Opens a rerun and leaves; returns how many rows are to be run again."""
    with hand(job) as worker:
        return open_again(worker.output, worker.source, worker.source.files(), kinds, max_tokens)


# --- which rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "again"),
    [
        (["failed"], FAILED),
        (["truncated"], TRUNCATED - FAILED),
        (["truncated", "failed"], FAILED | TRUNCATED),
        (["all"], set(ROWS)),
        (["all", "failed"], set(ROWS)),
    ],
)
def test_chosen_rows_are_run_again(folder, job, kinds, again):
    first, _ = run_first(job)
    before = records(folder)
    manifest, answered = run_again(job, *kinds)
    assert sorted(row for _, row in answered) == sorted(again)
    after = records(folder)
    assert list(after) == list(before)
    for row in ROWS:
        record = after[f"r{row}"]
        assert record["n"] == row
        if row in again:
            assert (record["generated_text"], record["error"]) == (f"second of {row}", None)
        else:
            assert record == before[f"r{row}"]
    assert (manifest.complete, manifest.generation, manifest.rows) == (True, first.generation + 1, 10)
    assert manifest.errors == len(FAILED - again)
    assert manifest.completion_tokens == sum(
        100 + row if row in again else row for row in ROWS if row in again or row not in FAILED
    )
    assert leftovers(folder) == []
    assert read_status(job.output.path).state == "done"
    assert run_job(job) == (manifest, [])


def test_rerun_of_a_rerun(folder, job):
    run_first(job)
    run_job(job, rerun=["failed"], answer=first_answer)
    assert records(folder)["r2"]["error"] == "engine_error: out of luck"
    manifest, answered = run_again(job, "failed")
    assert (sorted(row for _, row in answered), manifest.errors, manifest.generation) == (sorted(FAILED), 0, 3)
    assert len(list((folder / "out" / RERUNS).iterdir())) == 2
    assert leftovers(folder) == []


def test_nothing_to_run_again(folder, job):
    manifest, _ = run_first(job)
    run_again(job, "failed")
    before, generations = parts_of(folder), len(list((folder / "out" / RERUNS).iterdir()))
    manifest, answered = run_again(job, "failed")
    assert (answered, parts_of(folder), manifest.generation) == ([], before, 2)
    assert len(list((folder / "out" / RERUNS).iterdir())) == generations


def test_rerun_of_nothing(job):
    manifest, answered = run_again(job, "all")
    assert (len(answered), manifest.generation) == (10, 1)


def test_result_of_a_rerun_counts_even_if_it_is_worse(folder, job):
    run_first(job)
    run_job(job, rerun=["truncated"], answer=lambda split, row: RowResult(split.number, row.row, error="bad: luck"))
    assert records(folder)["r3"]["error"] == "bad: luck"


def test_splits_without_such_rows_stay_as_they_are(folder, job):
    run_first(job)
    before = (folder / "out").glob("part-00002*").__next__().stat().st_ino
    assert open_rerun(job, "failed") == 2
    with hand(job) as worker:
        assert [split.number for split in worker.work.todo()] == [0, 1]
    run_again(job, "failed")
    assert next((folder / "out").glob("part-00002*")).stat().st_ino == before


def test_only_committed_splits_are_opened(folder, job):
    run_first(job, stop_after=0)
    assert open_rerun(job, "failed") == 1
    manifest, answered = run_job(job, answer=second_answer)
    assert (manifest.complete, len(answered)) == (True, 7)


def test_blank_lines_and_dropped_rows_keep_their_numbers(folder, job):
    lines = [
        '{"id": "r1", "text": "a"}',
        "",
        '{"id": "r3", "text": "b"}',
        "{bad",
        "",
        "",
        "",
        "",
        '{"id": 9, "text": "c"}',
    ]
    (folder / "in" / "a.jsonl").write_text("\n".join([*lines, ""]))
    run_first(job)
    before = records(folder)
    manifest, answered = run_again(job, "truncated")
    assert answered == [(0, 3)]
    assert records(folder) == before | {"r3": records(folder)["r3"]}
    assert records(folder)["r3"]["generated_text"] == "second of 3"
    manifest, answered = run_again(job, "failed")
    assert (answered, manifest.errors) == ([(0, 4)], 1)
    manifest, answered = run_again(job, "all")  # one split has no row at all
    assert answered == [(0, 1), (0, 3), (0, 4), (2, 9)]
    assert (manifest.complete, manifest.rows, leftovers(folder)) == (True, 4, [])


def test_rows_that_where_drops_are_none(folder):
    job = make_job(folder)
    job = job.model_copy(update={"input": job.input.model_copy(update={"where": [["n", ">", 6]]})})
    run_first(job)
    _, answered = run_again(job, "truncated")
    assert [row for _, row in answered] == [8, 10]


def test_parquet_input(folder, job):
    (folder / "in" / "a.jsonl").unlink()
    table = pa.table({"id": [f"r{i}" for i in ROWS], "text": [f"text {i}" for i in ROWS], "n": ROWS})
    pq.write_table(table, folder / "in" / "a.parquet", row_group_size=3)
    run_first(job)
    manifest, answered = run_again(job, "failed")
    assert (sorted(row for _, row in answered), manifest.errors) == ([2, 7], 0)
    assert records(folder)["r2"]["generated_text"] == "second of 2"
    assert records(folder)["r9"]["generated_text"] == "first of 9"


def test_file_that_breaks_off_has_one_error_still(folder, job):
    (folder / "in" / "a.jsonl").unlink()
    rng = random.Random(1)
    lines = [json.dumps({"id": f"r{i}", "text": rng.randbytes(2000).hex()}) for i in range(1, 31)]
    (folder / "in" / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-15_000])
    first, _ = run_first(job)
    assert first.errors == 4  # two failed, one line is cut, and the rest is told of in one more
    for kinds, answered in ((["failed"], 3), (["failed"], 1), (["all"], first.rows - 1)):
        manifest, again = run_again(job, *kinds)
        assert (manifest.errors, manifest.rows, len(again)) == (2, first.rows, answered)


def test_parts_without_failed_rows_are_not_read(folder, job):
    run_first(job)
    part = next((folder / "out").glob("part-00002*"))  # rows 9 and 10
    other = bytes(part.stat().st_size)
    part.write_bytes(other)
    _, answered = run_again(job, "failed")
    assert sorted(row for _, row in answered) == sorted(FAILED)
    assert part.read_bytes() == other
    with pytest.raises(JobError, match=rf"{part.name} cannot be read"):
        open_rerun(job, "truncated")


@pytest.mark.parametrize("options", [["--workers", "2"], []])
def test_rerun_does_not_go_with_overwrite(folder, job, options):
    run_first(job)
    before = parts_of(folder)
    (folder / "job.yaml").write_text(json.dumps(job.model_dump(mode="json", exclude_none=True)))
    arguments = ["submit", str(folder / "job.yaml"), "--rerun", "failed", "--overwrite", *options]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == EXIT_BAD_JOB
    assert "--rerun keeps what --overwrite discards: give one of them" in outcome.output
    assert parts_of(folder) == before


# --- what is kept of the others ----------------------------------------------------------------------------------


def test_renamed_columns_and_kept_inputs_of_like_names(folder, job):
    columns = {"generated_text": "answer", "error": "problem", "finish_reason": "why"}
    output = job.output.model_copy(update={"columns": columns})
    job = job.model_copy(update={"output": output})
    write_lines(folder / "in" / "a.jsonl", [{"id": f"r{i}", "text": "t", "error": "mine"} for i in ROWS])
    run_first(job)
    before = records(folder)
    _, answered = run_again(job, "failed", "truncated")
    assert sorted(row for _, row in answered) == sorted(FAILED | TRUNCATED)
    after = records(folder)
    assert after["r1"] == before["r1"]
    assert (after["r2"]["answer"], after["r2"]["problem"], after["r2"]["error"]) == ("second of 2", None, "mine")


def test_logprobs_are_kept(folder, job):
    job = job.model_copy(update={"sampling": job.sampling.model_copy(update={"logprobs": 1, "prompt_logprobs": 0})})

    def answer(split, row):
        result = first_answer(split, row)
        if result.error is None:
            result.logprobs = [TokenLogprob(7, -0.5, [(7, -0.5), (8, None)]), TokenLogprob(9, None, [])]
            result.prompt_logprobs = [TokenLogprob(1, None), TokenLogprob(2, -1.25)]
        return result

    run_job(job, answer=answer)
    before = records(folder)
    assert before["r1"]["logprobs"][0]["top"][0] == {"token_id": 7, "logprob": -0.5}
    run_again(job, "failed")
    after = records(folder)
    assert after["r2"]["generated_text"] == "second of 2"
    for row in set(ROWS) - FAILED:
        assert after[f"r{row}"] == before[f"r{row}"]


def test_odd_text_is_kept(folder, job):
    odd = 'a "b"\n\u2028\u0000é\U0001f600'
    text = {1: "", 4: odd, 5: "x" * 100_000}

    def answer(split, row):
        result = first_answer(split, row)
        if row.row in text:
            result.text = text[row.row]
        return result

    run_job(job, answer=answer)
    run_again(job, "failed")
    after = records(folder)
    assert {row: after[f"r{row}"]["generated_text"] for row in text} == text


def test_parts_that_a_manifest_had_written_anew(folder):
    """Their schemas grew with those of other parts."""
    write_lines(folder / "in" / "b.jsonl", [{"id": "other", "text": "t", "n": "x", "more": [1]}])
    job = make_job(folder)
    run_first(job)
    before = records(folder)
    assert (before["r1"]["n"], before["r1"]["more"]) == ("1", None)
    manifest, answered = run_again(job, "failed")
    after = records(folder)
    assert len(answered) == 2
    assert {key: row for key, row in after.items() if key not in ("r2", "r7")} == {
        key: row for key, row in before.items() if key not in ("r2", "r7")
    }
    assert (after["r2"]["n"], manifest.errors) == ("2", 0)


def test_max_tokens_is_recorded_for_each_row(folder, job):
    run_first(job)
    assert all("rerun_max_tokens" not in record for record in records(folder).values())
    run_again(job, "truncated", max_tokens=50)
    again = TRUNCATED - FAILED
    after = records(folder)
    assert {row: after[f"r{row}"].get("rerun_max_tokens") for row in ROWS} == {
        row: 50 if row in again else None for row in ROWS
    }
    run_again(job, "failed", max_tokens=60)
    after = records(folder)
    assert {row: after[f"r{row}"].get("rerun_max_tokens") for row in ROWS} == {
        row: 50 if row in again else 60 if row in FAILED else None for row in ROWS
    }


def test_max_tokens_holds_for_whoever_goes_on(job):
    run_first(job)
    open_rerun(job, "failed", max_tokens=50)
    with hand(job) as worker:
        claim = worker.claim()
        assert (claim.max_tokens, claim.n_rows) == (50, 1)


# --- interrupted, joined, refused --------------------------------------------------------------------------------


def test_previous_result_stands_until_the_rerun_is_done(folder, job):
    first, _ = run_first(job)
    before = parts_of(folder)
    assert open_rerun(job, "failed") == 2
    status = read_status(job.output.path)
    assert (status.state, status.faults, status.done_rows) == ("stopped", [], 8)
    with hand(job) as worker:
        assert worker.finish() == first
    assert parts_of(folder) == before
    manifest, answered = run_job(job, answer=second_answer)
    assert (sorted(row for _, row in answered), manifest.complete, manifest.errors) == ([2, 7], True, 0)


def test_stopped_rerun_goes_on(folder, job):
    run_first(job)
    _, answered = run_again(job, "failed", stop_after=0)
    assert answered == [(0, 2)]
    for kinds in (["failed"], []):
        shutil.copytree(folder / "out", folder / "copy", dirs_exist_ok=True)
        manifest, answered = run_again(job, *kinds)
        assert (answered, manifest.errors, manifest.generation) == ([(1, 7)], 0, 2)
        assert leftovers(folder) == []
        shutil.rmtree(folder / "out")
        shutil.copytree(folder / "copy", folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "first"), [(["failed"], 0), (["failed", "truncated"], 1)])
def test_kill_between_any_two_operations(folder, kinds, first):
    """Killed anywhere and asked for again, a rerun gives the very bytes that it gives undisturbed."""
    job = make_job(folder)
    run_first(job)
    shutil.copytree(folder / "out", folder / "first")
    run_again(job, *kinds)
    expected, operation = parts_of(folder), first

    def begin():
        shutil.rmtree(folder / "out")
        shutil.copytree(folder / "first", folder / "out")

    begin()
    while killed_at(operation, run_again, job, *kinds):
        manifest, _ = run_again(job, *kinds)
        assert (manifest.complete, parts_of(folder)) == (True, expected), f"at operation {operation}"
        assert leftovers(folder) == [], f"at operation {operation}"
        begin()
        operation += 2
    assert operation > 80


def test_kill_between_any_two_operations_of_opening_and_no_rerun_after(folder, job):
    """Who does not ask for it finds the first result, or goes on with the rerun: never anything between."""
    run_first(job)
    first = parts_of(folder)
    shutil.copytree(folder / "out", folder / "first")
    run_again(job, "failed")
    second, operation, seen = parts_of(folder), 0, []

    def begin():
        shutil.rmtree(folder / "out")
        shutil.copytree(folder / "first", folder / "out")

    begin()
    while killed_at(operation, open_rerun, job, "failed"):
        manifest, _ = run_job(job, answer=second_answer)
        assert manifest.complete
        seen.append(parts_of(folder))
        assert seen[-1] in (first, second), f"at operation {operation}"
        assert leftovers(folder) == [], f"at operation {operation}"
        begin()
        operation += 1
    assert first in seen
    assert second in seen
    assert seen == sorted(seen, key=lambda parts: parts == second)


def test_rerun_is_joined(folder, job):
    run_first(job)
    with hand(job) as one, hand(job) as two:
        files = one.source.files()
        assert open_again(one.output, one.source, files, ["truncated", "failed"], 50) == 5
        assert open_again(two.output, two.source, files, ["failed", "truncated"], 50) == 0
        claims = [one.claim(), two.claim(), one.claim()]
        assert [claim.unit for claim in claims] == ["00000", "00001", "00002"]
        for worker, claim in zip((one, two, one), claims, strict=True):
            worker.run(claim, answer=second_answer)
            assert worker.commit(claim).rows == claim.split.n_rows
        assert one.finish().errors == 0
        assert two.finish().generation == 2
    assert leftovers(folder) == []


def test_other_rerun_is_refused_until_the_first_is_done(folder, job):
    run_first(job)
    open_rerun(job, "failed", max_tokens=50)
    for kinds, max_tokens in ((["truncated"], 50), (["failed"], None), (["all"], 50)):
        with pytest.raises(JobError, match=r"--rerun failed has begun: finish it first, by submit alone"):
            open_rerun(job, *kinds, max_tokens=max_tokens)
    run_job(job, answer=second_answer)
    assert open_rerun(job, "all") == 10


def test_worker_at_work_sees_splits_that_another_opens(job):
    run_first(job)
    with hand(job) as worker:
        assert worker.claim() is None
        open_rerun(job, "failed")
        claim = worker.claim()
        assert claim.unit == "00000"
        assert worker.run(claim, answer=second_answer) == [(0, 2)]
        assert worker.commit(claim).errors == 0


def test_worker_runs_rows_again_that_it_had_committed_itself(folder, job):
    with hand(job) as worker:
        for answer in (first_answer, second_answer):
            while claim := worker.claim():
                worker.run(claim, answer=answer)
                worker.commit(claim)
            manifest = worker.finish()
            open_rerun(job, "failed")
        assert (manifest.generation, manifest.errors) == (2, 0)
    assert records(folder)["r2"]["generated_text"] == "second of 2"
    assert run_job(job) == (manifest, [])


def test_readers_see_the_result_before_until_all_of_the_rerun_is_there(folder, job):
    def shown():
        return {row["custom_id"]: row for row in Result(OutputView.at(job.output.path)).records(Selection())}

    run_first(job)
    before = shown()
    open_rerun(job, "failed", "truncated")
    with hand(job) as worker:
        while claim := worker.claim():
            worker.run(claim, answer=second_answer)
            worker.commit(claim)
            assert shown() == before
        worker.finish()
    assert shown() == records(folder) != before


def test_opener_dies_before_its_rerun_counts(folder, job, monkeypatch):
    """Who is at work, and finds all committed, does not take it back."""
    run_first(job)
    with hand(job) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(Output, "take_back_commits", interrupted)
            with pytest.raises(KeyboardInterrupt):
                open_rerun(job, "failed")
        assert worker.claim() is None
        assert worker.finish().errors == 2
    manifest, answered = run_job(job, answer=second_answer)
    assert (answered, manifest.errors, leftovers(folder)) == ([(0, 2), (1, 7)], 0, [])


def interrupted(output):
    raise KeyboardInterrupt


def test_opened_between_any_two_operations_of_a_joining_worker(folder, job):
    run_first(job)
    shutil.copytree(folder / "out", folder / "first")
    run_again(job, "failed")
    expected, operation, came = parts_of(folder), 0, True
    while came:
        shutil.rmtree(folder / "out")
        shutil.copytree(folder / "first", folder / "out")
        with hand(job) as worker:
            files = worker.source.files()
            with before_operation(worker.output.store, operation, open_rerun, job, "failed") as came:
                while claim := worker.claim():
                    worker.run(claim, answer=second_answer)
                    worker.commit(claim)
                if not came:
                    break
            open_again(worker.output, worker.source, files, ["failed"], None)
        manifest, _ = run_job(job, answer=second_answer)
        assert (manifest.complete, parts_of(folder)) == (True, expected), f"at operation {operation}"
        assert leftovers(folder) == [], f"at operation {operation}"
        operation += 1
    assert operation > 2


def dies_at_publish(number, function, *arguments, **options):
    """Runs the function in a process that dies as it publishes that file (from 0)."""
    publish, left = Store.publish, iter(range(number))

    def publishing(self, *names):
        if next(left, None) is None:
            os._exit(KILLED)
        publish(self, *names)

    def run():
        Store.publish = publishing
        function(*arguments, **options)

    assert in_child(run) == KILLED


def test_part_that_was_committed_and_not_published(folder, job):
    dies_at_publish(0, run_first, job)
    assert parts_of(folder) == {}
    manifest, answered = run_again(job, "failed")
    assert sorted(row for _, row in answered) == [2, 5, 6, 7, 8, 9, 10]
    assert (manifest.complete, manifest.rows, manifest.errors, leftovers(folder)) == (True, 10, 0, [])
    after = records(folder)
    texts = [after[f"r{row}"]["generated_text"] for row in range(1, 5)]
    assert texts == ["first of 1", "second of 2", "first of 3", "first of 4"]


def test_part_of_a_rerun_that_was_committed_and_not_published(folder, job):
    """The part before it lies in its place, with rows that have other results since."""
    run_first(job)
    dies_at_publish(1, run_again, job, "failed")  # of two parts
    assert records(folder)["r7"]["error"] is not None
    manifest, answered = run_again(job, "truncated")
    assert sorted(row for _, row in answered) == [3, 8, 10]
    assert (manifest.complete, manifest.errors) == (True, 0)
    assert leftovers(folder) == []
    for row in ROWS:
        order = "second" if row in FAILED | TRUNCATED else "first"
        assert records(folder)[f"r{row}"]["generated_text"] == f"{order} of {row}"


def test_rerun_after_one_whose_manifest_was_not_written(folder, job):
    """What the one before kept of a split counts no more."""
    run_first(job)
    open_rerun(job, "failed")
    with hand(job) as worker:
        while claim := worker.claim():
            worker.run(claim, answer=second_answer)
            worker.commit(claim)
    manifest, answered = run_again(job, "truncated")
    assert sorted(row for _, row in answered) == [3, 8, 10]
    assert {records(folder)[f"r{row}"]["finish_reason"] for row in ROWS} == {"stop"}
    assert (manifest.complete, manifest.errors, leftovers(folder)) == (True, 0, [])


@pytest.mark.parametrize("published", range(7))
def test_parts_that_a_manifest_had_written_anew_and_not_published(folder, published):
    write_lines(folder / "in" / "b.jsonl", [{"id": "other", "text": "t", "n": "x", "more": [1]}])
    job = make_job(folder)
    run_first(job)
    run_again(job, "failed")
    expected = parts_of(folder)
    shutil.rmtree(folder / "out")
    dies_at_publish(published, run_first, job)  # four parts, then three of them anew
    manifest, _ = run_job(job, rerun=["failed"], answer=mended_answer)
    assert (manifest.complete, parts_of(folder), leftovers(folder)) == (True, expected, [])


# --- OpenAI's format ---------------------------------------------------------------------------------------------


@pytest.fixture
def batch(folder):
    """The ten rows as an OpenAI batch file, answered in its format."""
    (folder / "in" / "a.jsonl").unlink()
    body = {"messages": [{"role": "user", "content": "\u2028 \r"}], "model": "m"}
    fields = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    write_lines(folder / "in" / "batch.jsonl", [{"custom_id": f"r{i}"} | fields for i in ROWS])
    job = make_job(folder, format="openai-batch")
    section = {"path": job.input.path, "format": "openai-batch", "split_rows": 4}
    return JobSpec.model_validate(job.model_dump(exclude_none=True, exclude={"prompt"}) | {"input": section})


def answer_lines(folder):
    """custom_id -> the line that answers it, and the name of the file that it is in."""
    files = [path for kind in ("part", "errors") for path in sorted((folder / "out").glob(f"{kind}-*"))]
    lines = [(line, path.name) for path in files for line in path.read_bytes().splitlines(keepends=True)]
    found = {json.loads(line)["custom_id"]: (line, name) for line, name in lines}
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize(
    ("kinds", "again"),
    [
        (["failed"], FAILED),
        (["truncated"], TRUNCATED - FAILED),
        (["truncated", "failed"], FAILED | TRUNCATED),
        (["all"], set(ROWS)),
    ],
)
def test_answers_of_other_rows_are_kept_to_the_byte(folder, batch, kinds, again):
    run_first(batch)
    before = answer_lines(folder)
    manifest, answered = run_again(batch, *kinds)
    after = answer_lines(folder)
    assert sorted(row for _, row in answered) == sorted(again)
    assert after.keys() == before.keys() == {f"r{row}" for row in ROWS}
    for row in ROWS:
        line, name = after[f"r{row}"]
        if row in again:
            content = json.loads(line)["response"]["body"]["choices"][0]["message"]["content"]
            assert (content, name) == (f"second of {row}", f"part-{(row - 1) // 4:05d}.jsonl")
        else:
            assert (line, name) == before[f"r{row}"]
    left = len(FAILED - again)
    assert (manifest.complete, manifest.rows, manifest.errors, leftovers(folder)) == (True, 10, left, [])
    assert manifest.completion_tokens == sum(
        100 + row if row in again else row for row in ROWS if row in again or row not in FAILED
    )
    assert sorted(path.name for path in (folder / "out").glob("errors-*")) == (
        ["errors-00000.jsonl", "errors-00001.jsonl"] if left else []
    )
    assert run_job(batch) == (manifest, [])
    _, answered = run_again(batch, "failed")
    assert sorted(row for _, row in answered) == sorted(FAILED - again)


@pytest.mark.parametrize("published", range(5))
def test_answers_that_were_committed_and_not_published(folder, batch, published):
    run_first(batch)
    run_again(batch, "failed")
    expected = answer_lines(folder)
    shutil.rmtree(folder / "out")
    dies_at_publish(published, run_first, batch)  # two files of two splits, and one
    assert list((folder / "out" / STAGED).iterdir())
    manifest, _ = run_job(batch, rerun=["failed"], answer=mended_answer)
    assert manifest.complete
    assert (answer_lines(folder), leftovers(folder)) == (expected, [])


# --- what was lost or changed ------------------------------------------------------------------------------------


def test_vanished_file_is_left_alone(folder, job, caplog):
    write_lines(folder / "in" / "b.jsonl", [{"id": f"b{i}", "text": "t"} for i in (1, 2)])
    run_first(job)
    before = records(folder)
    (folder / "in" / "a.jsonl").unlink()
    _, answered = run_again(job, "failed")
    assert "a.jsonl is gone: none of its rows is run again" in caplog.text
    assert answered == [(3, 2)]
    after = records(folder)
    assert {key: row for key, row in after.items() if key != "b2"} == {k: r for k, r in before.items() if k != "b2"}
    assert after["b2"]["generated_text"] == "second of 2"


def test_changed_file_is_run_whole(folder, job):
    run_first(job)
    write_lines(folder / "in" / "a.jsonl", [{"id": "new", "text": "t"}])
    manifest, answered = run_again(job, "failed")
    assert (answered, manifest.rows, len(parts_of(folder))) == ([(3, 1)], 1, 1)


def test_file_that_changes_while_it_is_run_again(folder, job):
    run_first(job)
    open_rerun(job, "failed")
    write_lines(folder / "in" / "a.jsonl", [{"id": "new", "text": "t"}])
    manifest, answered = run_job(job, answer=second_answer)
    assert (answered, manifest.complete, len(parts_of(folder)), leftovers(folder)) == ([(3, 1)], True, 1, [])
    assert open_rerun(job, "all") == 1


def test_part_lost_while_its_split_is_open(folder, job):
    """What is kept of it lies beside it by then."""
    run_first(job)
    open_rerun(job, "failed")
    next((folder / "out").glob("part-00000*")).unlink()
    manifest, answered = run_job(job, answer=second_answer)
    assert (sorted(row for _, row in answered), manifest.errors) == ([2, 7], 0)
    assert records(folder)["r1"]["generated_text"] == "first of 1"


def test_part_lost_after_a_rerun(folder, job):
    run_first(job)
    run_again(job, "failed", max_tokens=50)
    next((folder / "out").glob("part-00000*")).unlink()
    manifest, answered = run_job(job, answer=first_answer)
    assert (answered, manifest.errors) == ([(0, row) for row in (1, 2, 3, 4)], 1)


def test_damaged_record_of_what_is_kept_costs_work_only(folder, job):
    run_first(job)
    open_rerun(job, "failed")
    for path in (folder / "out" / KEPT).iterdir():
        path.write_bytes(b"damaged")
    manifest, answered = run_job(job, answer=second_answer)
    assert (manifest.complete, manifest.rows, len(answered)) == (True, 10, 8)
    assert leftovers(folder) == []


def test_damaged_rerun_is_named(folder, job):
    run_first(job)
    open_rerun(job, "failed")
    (path,) = (folder / "out" / RERUNS).iterdir()
    path.write_bytes(b"{")
    with pytest.raises(JobError, match=rf"{HOME}/reruns/00001\.json is damaged"):
        run_job(job)
