"""The command line: one readable error and its exit code, and every fault found before a model loads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import batchrun
from batchrun.cli import main
from tests.jobs import write_job, write_rows

ROWS = [{"id": f"r{i}", "text": f"row {i}"} for i in range(5)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The error text of a command that is refused before anything runs."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    return result.stderr.removeprefix("Error: ").rstrip("\n")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Path:
    return write_job(tmp_path, tiny_model, ROWS)


def test_version_and_help() -> None:
    assert batchrun.__version__ in run("--version").output
    for command in ("validate", "plan", "submit", "status", "cancel", "logs", "results", "schedule", "bench"):
        assert run(command, "--help").exit_code == 0
        assert command in run("--help").output


def test_validate_says_what_it_understood(job: Path, tiny_model: Path) -> None:
    result = run("validate", job)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "job: valid" in result.stdout
    assert "1 files" in result.stdout
    assert "id, text" in result.stdout
    assert str(tiny_model) in result.stdout
    assert not (job.parent / "out").exists()


def test_faults_of_the_file_are_one_per_line(job: Path) -> None:
    text = refused("validate", job, "--set", "model.dtpye=a", "--set", "engine.block_size=0")
    assert text.splitlines() == [
        "--set model.dtpye: unknown key; did you mean dtype?",
        "--set engine.block_size: must be at least 2, not 0",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("input.path=nowhere.jsonl", "input.path: no input file at nowhere.jsonl"),
        ("input.where=[[a]]", "input.where"),
        ("prompt.template={{ txet }}", "prompt.template: column 'txet' is not in the input; did you mean text?"),
        ('prompt.template={{ row["odd name"] }}', "prompt.template: column 'odd name' is not in the input"),
        ("prompt={messages_column: m}", "prompt.messages_column: column 'm' is not in the input; it has id, text"),
        ("input.id_column=idd", "input.id_column: column 'idd' is not in the input; did you mean id?"),
        ("input.where=[[txt, '=', a]]", "--set input.where: column 'txt' is not in the input; did you mean text?"),
        ("output.keep_columns=[id, q]", "--set output.keep_columns: column 'q' is not in the input; it has id, text"),
        ("input.columns=[id]", "prompt.template: column 'text' is not among input.columns"),
        ("output.columns={generated_text: text}", "text would be both an input column and a result column"),
        ("output.columns={nothing: text}", "output.columns: nothing: no such result column"),
        ("model.name_or_path=./no/such/model", "no model at './no/such/model'"),
        ("model.max_model_len=513", "model.max_model_len: 513 is above the model's context of 512 tokens"),
        ("engine.kv_cache_memory=4KiB", "engine.kv_cache_memory: 4.0 KiB cannot hold one sequence"),
        ("engine.kv_cache_memory=100TiB", "engine.kv_cache_memory: 100.0 TiB is more than the memory there is"),
        ("engine={max_num_batched_tokens: 3, max_num_seqs: 4}", "max_num_batched_tokens: 3 is below max_num_seqs (4)"),
        ("output.path=/dev/null/out", "output.path: /dev/null/out cannot be written: /dev/null is no directory"),
        ("input.path=odd://me:SECRET@host/rows.jsonl", "--set input.path: odd://host/rows.jsonl: Protocol not known"),
        ("input.columns=[id, txet]", "input.columns: column 'txet' is not in the input; did you mean text?"),
    ],
)
def test_every_fault_is_found_before_a_model_loads(job: Path, override: str, expected: str) -> None:
    for command in ("validate", "plan", "submit"):
        assert expected in refused(command, job, "--set", override)
    assert not (job.parent / "out").exists()


def test_all_faults_of_a_job_are_told_at_once_with_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    prompt = {"messages": [{"role": "user", "content": "{{ id }}"}, {"role": "user", "content": "{{ txet }}"}]}
    job = write_job(
        tmp_path,
        tmp_path / "no-model",
        ROWS,
        prompt=prompt,
        engine={"device": "cuda"},
        output={"path": str(tmp_path / "job.yaml" / "out"), "columns": {"text": "x"}},
    )
    text = refused("submit", job, "--set", "input.where=[[txt, '=', a]]")
    lines = job.read_text().splitlines()

    def line(text: str) -> int:
        return next(number for number, line in enumerate(lines, 1) if text in line)

    assert re.findall(r"^(?:.*yaml:)?(\d+: [\w.]+|--set [\w.]+): ", text, re.MULTILINE) == [
        f"{line('name_or_path')}: model.name_or_path",
        f"{line('txet')}: prompt.messages.1.content",
        f"{line('job.yaml')}: output.path",
        f"{line('columns')}: output.columns",
        f"{line('cuda')}: engine.device",
        "--set input.where",
    ]
    assert len(text.splitlines()) == 6


def test_a_job_for_a_gpu_can_be_checked_where_there_is_none(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = [str(job), "--set", "engine.device=cuda"]
    found = run("validate", *arguments)
    assert found.exit_code == 0
    assert "warning: --set engine.device: cuda cannot be used: " in found.output
    assert run("plan", *arguments).exit_code == 0
    assert "--set engine.device: cuda cannot be used: " in refused("submit", *arguments)
    quantized = [*arguments, "--set", "model.kv_cache_dtype=int8"]
    assert run("validate", *quantized).exit_code == 0


def test_a_model_that_cannot_run_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    job = write_job(tmp_path, model, ROWS)
    config = json.loads((tiny_model / "config.json").read_text())
    (model / "config.json").unlink()
    for change, expected in [
        ({"architectures": ["OddForCausalLM"]}, "model architecture OddForCausalLM is not supported"),
        ({"num_hidden_layers": None}, "model config: not understood: "),
        ({"rope_parameters": {"rope_type": "llama3"}}, "model config: factor is missing"),
        ({"max_position_embeddings": "long"}, "model config: the context length is not understood: "),
    ]:
        (model / "config.json").write_text(json.dumps(config | change))
        assert f"{job}:3: model.name_or_path: {expected}" in refused("validate", job)
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    assert "no *.safetensors" in refused("validate", job)


def test_links_that_lead_nowhere_are_named(job: Path) -> None:
    folder = job.parent
    (folder / "in").mkdir()
    write_rows(folder / "in" / "a.jsonl", ROWS)
    (folder / "in" / "gone.jsonl").symlink_to("nothing")
    (folder / "in" / "loop.jsonl").symlink_to("loop.jsonl")
    expected = [
        f"--set input.path: {folder}/in/gone.jsonl: is a link that leads nowhere: No such file or directory",
        f"--set input.path: {folder}/in/loop.jsonl: is a link that leads nowhere: Too many levels of symbolic links",
    ]
    for path in ("in", "in/*.jsonl"):
        assert refused("validate", job, "--set", f"input.path={folder / path}").splitlines() == expected
    for path in ("in/loop.jsonl", "in/loop.jsonl/out", "in/gone.jsonl"):
        text = refused("validate", job, "--set", f"output.path={folder / path}")
        assert "is a link that leads nowhere" in text
        assert len(text.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_is_refused(job: Path) -> None:
    (job.parent / "kept").mkdir(mode=0o555)
    text = refused("validate", job, "--set", f"output.path={job.parent}/kept/a/b")
    assert f"cannot be written: {job.parent}/kept is read-only" in text


def test_validate_refuses_the_files_that_submit_refuses(job: Path) -> None:
    folder = job.parent
    (folder / "bad.jsonl.gz").write_bytes(b"plain text")
    (folder / "empty.jsonl.gz").write_bytes(b"")
    overrides = ("--set", f"input.path=[{folder}/bad.jsonl.gz, {folder}/empty.jsonl.gz, {folder}/rows.jsonl]")
    for command in ("validate", "submit"):
        bad, empty = refused(command, job, *overrides).splitlines()
        assert bad.startswith(f"--set input.path: {folder}/bad.jsonl.gz: invalid .gz data")
        assert empty == f"--set input.path: {folder}/empty.jsonl.gz: is empty"


def test_a_sampling_column_has_to_be_read(job: Path) -> None:
    overrides = ("--set", "input.columns=[id, text]", "--set", "sampling.from_column=params")
    assert "sampling.from_column: column 'params' is not among input.columns" in refused("validate", job, *overrides)


def test_a_schema_tells_that_a_column_is_missing_and_lines_warn(job: Path, tmp_path: Path) -> None:
    result = run("validate", job, "--set", "sampling.from_column=params")
    assert result.exit_code == 0
    warning = "sampling.from_column: column 'params' is in none of the first 100 lines of any file"
    assert f"warning: --set {warning}" in result.stdout
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), tmp_path / "rows.parquet")
    overrides = ("--set", f"input.path={tmp_path / 'rows.parquet'}", "--set", "sampling.from_column=params")
    assert "sampling.from_column: column 'params' is not in the input" in refused("validate", job, *overrides)
    pq.write_table(pa.table({"id": ["a"], "text": ["b"], "lang": ["c"]}), tmp_path / "more.parquet")
    overrides = ("--set", f"input.path={tmp_path}/*.parquet", "--set", "input.where=[[lang, '=', c]]")
    text = refused("validate", job, *overrides)
    assert text == f"--set input.path: {tmp_path / 'rows.parquet'}: has no column 'lang'; it has id, text"


@pytest.mark.parametrize(
    ("input_path", "output_path"), [("in", "in"), ("in", "in/out"), ("in/a.jsonl", "in"), ("in/**/*.jsonl", "in/out")]
)
def test_input_and_output_never_lie_within_each_other(job: Path, input_path: str, output_path: str) -> None:
    folder = job.parent
    (folder / "in").mkdir()
    write_rows(folder / "in" / "a.jsonl", ROWS)
    overrides = [f"input.path={folder / input_path}", f"output.path={folder / output_path}"]
    text = refused("validate", job, "--set", overrides[0], "--set", overrides[1])
    assert "must not lie within each other" in text


def test_an_input_beside_the_output_is_fine(job: Path) -> None:
    folder = job.parent
    assert run("validate", job, "--set", f"input.path={folder}/*.jsonl").exit_code == 0


def test_messages_need_a_chat_template(tmp_path: Path, tiny_model: Path) -> None:
    from tests.models import save_tokenizer

    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    save_tokenizer(model, chat_template=None)
    job = write_job(tmp_path, model, ROWS, prompt={"messages": [{"role": "user", "content": "{{ text }}"}]})
    assert "has no chat template" in refused("validate", job)


def test_dry_run_prints_the_prompt_and_its_ids(job: Path) -> None:
    result = run("submit", job, "--dry-run")
    assert result.exit_code == 0
    text, tokens = result.stdout.split("\n\n")
    assert text == "Say row 0"
    count, _, ids = tokens.partition(" tokens: ")
    assert int(count) == len(ids.split()) == len(b"Say row 0")
    assert not (job.parent / "out").exists()


def test_dry_run_says_why_a_first_row_has_no_prompt(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, ["{broken", *ROWS])
    assert "row 1: unreadable_row" in run("submit", job, "--dry-run").stdout
    job = write_job(tmp_path, tiny_model, [])
    assert "the input has no rows" in run("submit", job, "--dry-run").stdout


def test_plan_as_json(job: Path) -> None:
    result = run("plan", job, "--json", "--limit", "3")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows"] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "{job}", "--max-time", "soon"],
        ["submit", "{job}", "--limit", "0"],
        ["submit"],
        ["bench", "no-such-file"],
        ["nonsense"],
    ],
)
def test_a_wrong_command_line_exits_2(job: Path, arguments: list[str]) -> None:
    result = run(*(argument.format(job=job) for argument in arguments))
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{broken", "row 1: unreadable_row: "),
        ({"prompt": "x", "max_tokens": "y"}, "row 1: max_tokens: must be a whole"),
    ],
)
def test_bench_refuses_rows_that_it_cannot_measure(tmp_path: Path, tiny_model: Path, row: Any, expected: str) -> None:
    assert expected in refused("bench", write_rows(tmp_path / "rows.jsonl", [row]), "--model", tiny_model)


def test_bench_refuses_what_cannot_be_sampled(tmp_path: Path, tiny_model: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    assert "temperature: " in refused("bench", rows, "--model", tiny_model, "--temperature", "nan")


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused("plan", tmp_path / "none.yaml").endswith("none.yaml: No such file or directory")


def test_status_of_what_was_never_submitted(job: Path) -> None:
    for target in (job, job.parent / "out", job.parent):
        assert "nothing was submitted yet" in refused("status", target)


def status(target: Path) -> dict[str, Any]:
    result = run("status", target, "--json")
    assert result.exit_code == 0
    return dict(json.loads(result.stdout))


def test_a_job_from_submit_to_status(tmp_path: Path, tiny_model: Path) -> None:
    rows = [*ROWS, {"id": "none", "text": None}]
    job = write_job(tmp_path, tiny_model, rows, sampling={"max_tokens": 3, "temperature": 0})
    assert run("submit", job, "--limit", "2").exit_code == 0
    assert status(job)["done_rows"] == 2

    result = run("submit", job)
    assert result.exit_code == 3
    assert "6: 5 ok, 1 errors (1 missing_value); 2 were done before" in result.stderr
    found = status(tmp_path / "out")
    assert (found["state"], found["rows"], found["done_rows"], found["error_rows"]) == ("done", 6, 6, 1)
    assert found["workers"] == []
    assert "6 of 6 done (100%)" in run("status", job).stdout

    assert run("submit", job).exit_code == 3  # nothing to do; its error rows are still there
    assert "sampling.max_tokens: was 3, is now 4" in refused("submit", job, "--set", "sampling.max_tokens=4")


def test_a_run_that_is_out_of_time_exits_75_and_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"id": i, "text": "x" * 50} for i in range(50)]
    job = write_job(tmp_path, tiny_model, rows, sampling={"max_tokens": 100, "ignore_eos": True})
    assert run("submit", job, "--max-time", "0").exit_code == 75
    found = status(job)
    assert found["state"] == "stopped"
    assert found["done_rows"] < 50
    assert run("submit", job).exit_code == 0
    assert status(job)["done_rows"] == 50


def test_what_is_no_fault_of_the_job_keeps_its_traceback(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("batchrun.preflight.preflight", broken)
    result = run("validate", job)
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "jobs").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_jobs_that_come_with_the_project_are_well_formed(path: Path) -> None:
    assert batchrun.load_job(path).name == path.stem
