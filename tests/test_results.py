"""Results for people: what is shown and written is what the newest manifest names, whole or not at all."""

from __future__ import annotations

import csv
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from batchrun.cli import main
from batchrun.data import reader
from batchrun.data.records import HOME
from batchrun.data.rows import RowResult
from batchrun.job import JobSpec
from batchrun.observe.results import show_results
from batchrun.text import display_width, shorten
from tests import outputs
from tests.jobs import output_rows
from tests.outputs import hand, make_job, open_output, write_lines

ENDS = ["stop", "length", "error"]  # of row 1, 2, 3, 4, ...
FIRST = [{"id": f"r{i}", "text": f"text {i}", "n": i, "note": None} for i in range(1, 7)]
SECOND = [{"id": f"s{i}", "text": f"テキスト {i}", "n": "x", "note": "hm", "tags": ["a"]} for i in range(1, 4)]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def answer(split: Any, row: Any) -> RowResult:
    """Rows end as ENDS has it, by turns."""
    if row.error:
        return RowResult(split.number, row.row, error=row.error)
    end = ENDS[(row.row - 1) % 3]
    if end == "error":
        return RowResult(split.number, row.row, error="engine_error: \x1b[31mno\nway")
    return RowResult(split.number, row.row, f"answer to {row.data['text']}", end, 3, 2)


def run_job(job: JobSpec, **options: Any) -> Any:
    return outputs.run_job(job, answer=answer, **options)


@pytest.fixture(params=["parquet", "jsonl"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> JobSpec:
    """A job over two files of which columns differ, whose results have names of their own."""
    write_lines(tmp_path / "in" / "a.jsonl", FIRST)
    write_lines(tmp_path / "in" / "b.jsonl", SECOND)
    names = {"error": "failure", "finish_reason": "end", "generated_text": "label"}
    return make_job(tmp_path, format=request.param, columns=names)


def results(target: object, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["results", str(target), *map(str, arguments)])


def records(target: object, *arguments: object) -> list[dict[str, Any]]:
    result = results(target, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def custom_ids(target: object, *arguments: object) -> list[str]:
    return [record["custom_id"] for record in records(target, *arguments)]


# ---- what is shown


def test_every_row_with_the_values_of_the_input(job: JobSpec) -> None:
    run_job(job)
    found = records(job.output.path)
    assert [record["n"] for record in found] == [1, 2, 3, 4, 5, 6, "x", "x", "x"]
    assert found[6]["text"] == "テキスト 1"
    assert found[0]["label"] == "answer to text 1"
    assert found[8].get("tags") == ["a"]


def test_rows_by_how_they_ended_whatever_the_columns_are_called(job: JobSpec) -> None:
    run_job(job)
    assert custom_ids(job.output.path, "--where", "error") == ["r3", "r6", "s3"]
    assert custom_ids(job.output.path, "--where", "truncated") == ["r2", "r5", "s2"]
    assert custom_ids(job.output.path, "--where", "ok") == ["r1", "r2", "r4", "r5", "s1", "s2"]
    assert custom_ids(job.output.path, "--where", "ok", "--limit", 3) == ["r1", "r2", "r4"]


def test_columns_in_the_order_asked_for(job: JobSpec) -> None:
    run_job(job)
    found = records(job.output.path, "--columns", "label,n,tags", "--limit", 1)
    assert [list(record.items()) for record in found] == [[("label", "answer to text 1"), ("n", 1), ("tags", None)]]
    refused = results(job.output.path, "--columns", "labl")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "Error: --columns: labl: unknown column; did you mean label?\n"


def test_table_fits_the_terminal_and_leaves_its_state_alone(job: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    run_job(job)
    monkeypatch.setenv("COLUMNS", "60")
    lines = results(job.output.path).stdout.splitlines()
    assert lines[0].split() == ["custom_id", "label", "end", "failure"]
    assert len(lines) == 10
    assert all(display_width(line) <= 60 for line in lines)
    assert all(line.isprintable() for line in lines)
    assert "failure" not in results(job.output.path, "--where", "ok").stdout
    wide = results(job.output.path, "--columns", "text,n").stdout.splitlines()
    assert {display_width(line[: re.search(r"(\d+|n|x)$", line).start()]) for line in wide} == {12}  # type: ignore[union-attr]


def test_table_of_many_rows_shows_the_first(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [{"id": i, "text": "t"} for i in range(30)])
    job = make_job(tmp_path, split_rows=30)
    run_job(job)
    shown = results(job.output.path)
    assert len(shown.stdout.splitlines()) == 21
    assert shown.stderr.startswith("the first 20 rows; --limit N shows more")
    assert len(results(job.output.path, "--limit", 25).stdout.splitlines()) == 26
    assert results(job.output.path, "--limit", 25).stderr == ""


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("short", 8, "short"),
        ("a\n\tb \x1b[0m", 8, "a b [0m"),
        ("exactly8", 8, "exactly8"),
        ("nine char", 8, "nine ch…"),
        ("テキスト", 8, "テキスト"),
        ("テキスト!", 8, "テキス…"),
        ("x" * 10**6, 4, "xxx…"),
        (" " * 100 + "x", 4, "…"),
    ],
)
def test_shortened_text(text: str, width: int, expected: str) -> None:
    assert shorten(text, width) == expected
    assert display_width(shorten(text, width)) <= width


def test_output_by_its_job_file_and_what_is_none(job: JobSpec, tmp_path: Path) -> None:
    run_job(job)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job.model_dump(mode="json", exclude_unset=True)))
    assert custom_ids(path) == custom_ids(job.output.path)
    for nothing in (tmp_path / "in", tmp_path / "nowhere"):
        refused = results(nothing)
        assert refused.exit_code == 2
        assert "nothing was submitted yet" in refused.stderr


# ---- what counts


def test_unfinished_output_gives_what_is_committed_and_says_so(job: JobSpec) -> None:
    run_job(job, stop_after=1)
    result = results(job.output.path, "--json")
    assert [json.loads(line)["custom_id"] for line in result.stdout.splitlines()] == [f"r{i}" for i in range(1, 7)]
    assert result.stderr == f"{job.output.path}: not complete, 2 of 3 splits, 6 rows\n"


def test_output_without_a_manifest_gives_its_committed_splits(job: JobSpec) -> None:
    open_output(job).close()
    assert "0 of 0 splits" in results(job.output.path).stderr
    with hand(job) as worker:
        worker.claim_ahead()
        claim = worker.claimed[2]
        worker.run(claim, answer=answer)
        worker.commit(claim)
    assert custom_ids(job.output.path) == ["s1", "s2", "s3"]


def test_stray_files_are_no_results_and_staged_parts_are(job: JobSpec) -> None:
    run_job(job)
    expected = records(job.output.path)
    out = Path(job.output.path)
    (out / f"part-00009.{job.output.format}").write_text("not ours")
    manifest = next((out / HOME / "manifests").iterdir())
    named = json.loads(manifest.read_text())
    named["parts"][1]["staged"] = f"{HOME}/staged/one"
    manifest.write_text(json.dumps(named))
    (out / HOME / "staged").mkdir(exist_ok=True)
    (out / named["parts"][1]["name"]).rename(out / HOME / "staged" / "one")
    assert records(job.output.path) == expected


def test_a_part_that_is_not_as_published_is_refused_by_name(job: JobSpec) -> None:
    run_job(job)
    part = Path(job.output.path) / f"part-00001.{job.output.format}"
    size = part.stat().st_size
    part.write_bytes(b"x" * size)
    assert f"{part.name} cannot be read" in results(job.output.path, "--json").stderr
    part.write_bytes(b"short")
    refused = results(job.output.path, "--json")
    assert f"{part.name} has 5 bytes, not {size:,}" in refused.stderr
    part.unlink()
    refused = results(job.output.path, "--json")
    assert refused.exit_code == 2
    assert f"{part.name} is missing" in refused.stderr


def test_output_without_rows(job: JobSpec, tmp_path: Path) -> None:
    for path in (tmp_path / "in").iterdir():
        path.write_text("")
    run_job(job)
    assert results(job.output.path, "--columns", "text").output == ""
    for kind in ("parquet", "csv", "jsonl"):
        assert results(job.output.path, "--to", tmp_path / f"empty.{kind}").exit_code == 0
    assert pq.read_table(tmp_path / "empty.parquet").num_rows == 0
    assert (tmp_path / "empty.csv").read_text().startswith("custom_id,label,end,")


def test_reading_is_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [{"id": i, "text": "t" * 20_000} for i in range(1000)])
    job = make_job(tmp_path, split_rows=500, format="jsonl")
    run_job(job)
    monkeypatch.setattr(reader, "BATCH_ROWS", 50)
    tracemalloc.start()
    try:
        show_results(job.output.path, (), reader.Selection(), to=str(tmp_path / "one.jsonl"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "one.jsonl").stat().st_size > 20_000_000
    assert peak < 8_000_000


# ---- one file


def test_parquet_file(job: JobSpec, tmp_path: Path) -> None:
    run_job(job)
    result = results(job.output.path, "--to", tmp_path / "new" / "all.parquet")
    assert result.stderr == f"9 rows written to {tmp_path / 'new' / 'all.parquet'}\n"
    table = pq.read_table(tmp_path / "new" / "all.parquet")
    assert table["custom_id"].to_pylist() == custom_ids(job.output.path)
    assert table.schema.field("failure").type == pa.string()
    assert table["n"].to_pylist() == ["1", "2", "3", "4", "5", "6", '"x"', '"x"', '"x"']  # JSON text: no common type
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["all.parquet"]
    results(job.output.path, "--to", tmp_path / "bad.parquet", "--where", "error", "--columns", "failure,text")
    bad = pq.read_table(tmp_path / "bad.parquet")
    assert bad.column_names == ["failure", "text"]
    assert bad["text"].to_pylist() == ["text 3", "text 6", "テキスト 3"]


def test_parquet_file_of_an_unfinished_output(job: JobSpec, tmp_path: Path) -> None:
    run_job(job, stop_after=0)
    results(job.output.path, "--to", tmp_path / "some.parquet")
    assert pq.read_table(tmp_path / "some.parquet")["n"].to_pylist() == [1, 2, 3, 4]


def test_json_lines_file(job: JobSpec, tmp_path: Path) -> None:
    run_job(job)
    assert results(job.output.path, "--to", tmp_path / "all.jsonl", "--where", "ok").exit_code == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records(job.output.path, "--where", "ok")


def test_csv_file(job: JobSpec, tmp_path: Path) -> None:
    run_job(job)
    results(job.output.path, "--to", tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["custom_id"] for row in rows] == custom_ids(job.output.path)
    assert rows[8]["failure"] == "engine_error: \x1b[31mno\nway"
    assert (rows[0]["failure"], rows[0]["note"], rows[8]["tags"], rows[0]["n"]) == ("", "", '["a"]', "1")


def test_file_at_a_url(job: JobSpec) -> None:
    run_job(job)
    fsspec = pytest.importorskip("fsspec")
    assert results(job.output.path, "--to", "memory://results/all.jsonl").exit_code == 0
    assert len(fsspec.filesystem("memory").cat_file("/results/all.jsonl").splitlines()) == 9


def test_nothing_half_written_is_left(job: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_job(job)
    target = tmp_path / "to" / "all.jsonl"
    target.parent.mkdir()
    target.write_text("before")
    part = Path(job.output.path) / f"part-00002.{job.output.format}"
    part.unlink()
    assert results(job.output.path, "--to", target).exit_code == 2
    assert [path.read_text() for path in target.parent.iterdir()] == ["before"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--to", "x.txt"], "x.txt: its name has to end in .parquet, .jsonl, .csv"),
        (["--to", "OUT/part-00000.parquet"], "is within the output itself"),
        (["--to", "OUT/more/x.csv"], "is within the output itself"),
        (["--to", "x.csv", "--json"], "give one of them"),
    ],
)
def test_files_that_are_refused(job: JobSpec, arguments: list[str], expected: str) -> None:
    run_job(job)
    before = outputs.parts_of(Path(job.output.path).parent)
    refused = results(job.output.path, *(argument.replace("OUT", job.output.path) for argument in arguments))
    assert refused.exit_code == 2
    assert expected in refused.stderr
    assert outputs.parts_of(Path(job.output.path).parent) == before


# ---- other readers of the parts


@pytest.fixture
def plain(tmp_path: Path) -> JobSpec:
    """Parts of which the first has no error and no note, the second no results at all."""
    write_lines(tmp_path / "in" / "a.jsonl", [{"id": f"r{i}", "text": f"t{i}", "note": None} for i in (1, 2)])
    write_lines(tmp_path / "in" / "b.jsonl", ["{bad", "{bad"])
    write_lines(tmp_path / "in" / "c.jsonl", [{"id": f"s{i}", "text": f"t{i}", "note": "hm"} for i in (1, 2, 3)])
    return make_job(tmp_path)


def test_parts_load_with_datasets(plain: JobSpec, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    run_job(plain)
    glob = f"{plain.output.path}/part-*.parquet"
    loaded = datasets.load_dataset("parquet", data_files=glob, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == output_rows(tmp_path)
    assert loaded.features["error"] == loaded.features["note"] == datasets.Value("string")
    streamed = datasets.load_dataset("parquet", data_files=glob, split="train", streaming=True)
    assert list(streamed) == output_rows(tmp_path)


def test_json_parts_load_with_datasets(plain: JobSpec, tmp_path: Path) -> None:
    """A column that is null in all of the first part has no type there that `datasets` could see: it has to be told."""
    datasets = pytest.importorskip("datasets")
    job = make_job(tmp_path, format="jsonl")
    run_job(job)
    kinds = {"prompt_tokens": "int64", "completion_tokens": "int64"}
    features = datasets.Features({name: datasets.Value(kinds.get(name, "string")) for name in output_rows(tmp_path)[0]})
    options = {"data_files": f"{job.output.path}/part-*.jsonl", "split": "train", "cache_dir": str(tmp_path / "cache")}
    loaded = datasets.load_dataset("json", features=features, **options)
    expected = [{name: row.get(name) for name in features} for row in output_rows(tmp_path)]
    assert loaded.to_list() == expected


def test_json_parts_of_equal_types_load_with_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for name in "ab":
        write_lines(tmp_path / "in" / f"{name}.jsonl", [{"id": i, "text": "t"} for i in range(4)])
    job = make_job(tmp_path, format="jsonl")
    run_job(job)
    glob = f"{job.output.path}/part-*.jsonl"
    loaded = datasets.load_dataset("json", data_files=glob, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == output_rows(tmp_path)


def test_parts_load_with_pyarrow_and_pandas(plain: JobSpec, tmp_path: Path) -> None:
    run_job(plain)
    rows = output_rows(tmp_path)
    assert pyarrow.dataset.dataset(plain.output.path, format="parquet").to_table().to_pylist() == rows
    frame = pd.read_parquet(plain.output.path)
    assert frame["custom_id"].tolist() == [row["custom_id"] for row in rows]
    assert frame["error"].isna().tolist() == [row["error"] is None for row in rows]
    schemas = [pq.read_schema(path) for path in sorted(Path(plain.output.path).glob("part-*"))]
    assert len(schemas) == 3
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
