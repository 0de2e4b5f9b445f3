"""OpenAI batch files: what is refused before the run, what a body may say, and what its answers look like."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from batchrun import Engine, SamplingParams, load_job, run_job
from batchrun.cli import main
from batchrun.data.jsonl import scan
from batchrun.data.openai_batch import CHAT_URL, COMPLETIONS_URL, Tokens, answer_line
from batchrun.data.prompt import PromptBuilder
from batchrun.data.records import MANIFEST_COPY, SEGMENTS, SPLITS
from batchrun.data.rows import PreparedRow, Row
from batchrun.data.source import Source
from batchrun.errors import EXIT_BAD_JOB, EXIT_OK, EXIT_ROW_ERRORS, JobError
from batchrun.job import InputSpec, PromptSpec, SamplingSpec
from batchrun.model_files import resolve
from batchrun.observe.status import read_status
from batchrun.preflight import preflight
from batchrun.tokenization.tokenizer import Tokenizer
from tests.jobs import output_rows, write_rows
from tests.models import save_tokenizer

SHARED = Path(__file__).parents[2] / "shared" / "data"
BAD_FILE = SHARED / "issues" / "d22_openai_batch_bad.jsonl"
LINE = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": {"messages": []}}


def chat(custom_id: str, content: Any = "hi", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return LINE | {"custom_id": custom_id, "body": {"messages": messages} | body}


def completion(custom_id: str, prompt: Any = "hi", **body: Any) -> dict[str, Any]:
    return LINE | {"custom_id": custom_id, "url": COMPLETIONS_URL, "body": {"prompt": prompt} | body}


def batch_job(folder: Path, reference: Path, lines: list[Any], **sections: Any) -> Path:
    """A job over an OpenAI batch file, in and out, with ``sections`` merged into its own."""
    job: dict[str, Any] = {
        "model": {"name_or_path": str(reference), "dtype": "float32"},
        "input": {"path": str(write_rows(folder / "batch.jsonl", lines)), "format": "openai-batch"},
        "sampling": {"max_tokens": 8, "temperature": 0},
        "output": {"path": str(folder / "out"), "format": "openai-batch"},
    }
    for name, fields in sections.items():
        job[name] = job.get(name, {}) | fields
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def with_tokenizer(folder: Path, model: Path, **options: Any) -> Path:
    """The model with another tokenizer."""
    path = shutil.copytree(model, folder / "model")
    save_tokenizer(path, **options)
    return path


def published(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every file of the result."""
    return {path.name: path.read_bytes() for path in sorted((folder / "out").glob("*.jsonl"))}


def answers(folder: Path, kind: str = "part") -> dict[str, Any]:
    """custom_id -> line, of the parts or of the error files."""
    lines = [json.loads(line) for path in sorted((folder / "out").glob(f"{kind}-*")) for line in path.open()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


# What is refused before the run


def refusal(folder: Path, *files: list[Any], split_rows: int = 50_000) -> list[str]:
    """The faults of batch files named 0.jsonl, 1.jsonl, ..., without their folder."""
    paths = tuple(str(write_rows(folder / f"{number}.jsonl", lines)) for number, lines in enumerate(files))
    source = Source(InputSpec(path=paths, format="openai-batch", split_rows=split_rows))
    with pytest.raises(JobError) as caught:
        source.check_batch(source.files())
    return str(caught.value).replace("input.path: ", "").replace(f"{folder}/", "").splitlines()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON: "),
        ("[1]", "is an array, not a JSON object"),
        ({}, "no custom_id; no method; no url; no body"),
        (LINE | {"custom_id": None}, "no custom_id"),
        (LINE | {"custom_id": 5}, "custom_id has to be text that is not empty"),
        (LINE | {"custom_id": ""}, "custom_id has to be text that is not empty"),
        (LINE | {"method": "GET"}, 'method has to be POST, not "GET"'),
        (LINE | {"url": "/v1/embeddings"}, f"url has to be {CHAT_URL} or {COMPLETIONS_URL}, not"),
        (LINE | {"url": "x" * 1000}, f'url has to be {CHAT_URL} or {COMPLETIONS_URL}, not "{"x" * 59}...'),
        (LINE | {"url": [CHAT_URL]}, f"url has to be {CHAT_URL} or {COMPLETIONS_URL}, not"),
        (LINE | {"body": "{}"}, "body has to be an object"),
        (LINE | {"body": {"stream": True}}, "body.stream must not be true"),
        (LINE | {"method": "PUT", "body": {"stream": True}}, 'method has to be POST, not "PUT"; body.stream must not'),
    ],
)
def test_a_malformed_line_is_refused_by_its_number(tmp_path: Path, line: Any, fault: str) -> None:
    [found] = refusal(tmp_path, [chat("1"), "", line, chat("2")])
    assert found.startswith(f"0.jsonl:3: {fault}")


def test_ids_are_unique_within_all_files_of_a_job(tmp_path: Path) -> None:
    files = [[chat("a"), chat("b"), chat("a")], [completion("c"), completion("b"), completion("c"), chat("a")]]
    assert refusal(tmp_path, *files, split_rows=2) == [
        "0.jsonl:3: custom_id is that of line 1",
        "1.jsonl:2: custom_id is that of 0.jsonl line 2",
        "1.jsonl:3: custom_id is that of line 1",
        "1.jsonl:4: custom_id is that of 0.jsonl line 1",
    ]


def test_twenty_faults_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    repeated = [chat(str(number % 5)) for number in range(15)]
    faults = refusal(tmp_path, [*["{"] * 12, *repeated], ["{"] * 30)
    assert [fault.partition(":")[0] for fault in faults] == [*["0.jsonl"] * 20, "and 32 more"]
    assert [int(fault.split(":")[1]) for fault in faults[:20]] == [*range(1, 13), *range(18, 26)]


def test_a_file_that_breaks_off_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(chat(os.urandom(20).hex())) + "\n" for _ in range(100)).encode())
    (tmp_path / "batch.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    source = Source(InputSpec(path=str(tmp_path / "batch.jsonl.gz"), format="openai-batch"))
    with pytest.raises(JobError, match=r"batch.jsonl.gz: breaks off after line \d+: "):
        source.check_batch(source.files())


@pytest.mark.parametrize("end", ["", "\n", "\n\n \n"])
@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_the_check_finds_the_splits_that_a_scan_does(tmp_path: Path, count: int, end: str) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(json.dumps(chat(f"é{number}")) for number in range(count)) + end)
    source = Source(InputSpec(path=str(path), format="openai-batch", split_rows=2))
    [file] = source.files()
    expected = scan(file, {}, 2)
    source.check_batch([file])
    path.unlink()  # it is not read again
    assert source.splits([file]) == expected


@pytest.mark.skipif(not BAD_FILE.exists(), reason="needs ../shared/data/issues")
def test_the_shared_malformed_file_is_refused_and_nothing_is_written(tmp_path: Path, tiny_model: Path) -> None:
    job = batch_job(tmp_path, tiny_model, [], input={"path": str(BAD_FILE)})
    for command in (["validate", str(job)], ["plan", str(job)], ["submit", str(job)]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == EXIT_BAD_JOB
        lines = [line.partition(f"input.path: {BAD_FILE}:")[2] for line in result.stderr.splitlines()]
        assert [line.partition(":")[0] for line in lines] == ["2", "3", "4", "5"]
        assert all(f"{job}:" in line for line in result.stderr.splitlines())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ({"prompt": {"template": "x"}}, "prompt: lines of openai-batch hold their own prompts; leave template out"),
        ({"sampling": {"from_column": "x"}}, "sampling: lines of openai-batch hold their own parameters"),
        ({"input": {"id_column": "url"}}, "input.id_column: is custom_id with input.format: openai-batch"),
        ({"input": {"columns": ["body"]}}, "input.columns: lines of openai-batch are read whole; leave it out"),
        ({"input": {"format": "jsonl"}, "prompt": {"template": "x"}}, "output.format: openai-batch answers lines of"),
        ({"output": {"columns": {"error": "e"}}}, "output.columns: openai-batch has no columns; leave it out"),
        ({"output": {"keep_columns": False}}, "output.keep_columns: openai-batch keeps no columns but custom_id"),
        ({"sampling": {"prompt_logprobs": 1}}, "sampling.prompt_logprobs: openai-batch has no place for them"),
    ],
)
def test_what_does_not_go_with_the_format_is_refused(
    tmp_path: Path, tiny_model: Path, sections: dict[str, Any], fault: str
) -> None:
    job = batch_job(tmp_path, tiny_model, [chat("a")], **sections)
    with pytest.raises(JobError) as caught:
        preflight(load_job(job))
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{job}:1: {fault}")


def test_only_a_batch_job_goes_without_a_prompt(tmp_path: Path, tiny_model: Path) -> None:
    job = batch_job(tmp_path, tiny_model, [chat("a")], input={"format": "auto"}, output={"format": "jsonl"})
    with pytest.raises(JobError, match=r"job.yaml:1: prompt: missing$"):
        load_job(job)


def test_a_model_without_a_chat_template_takes_completions_alone(tmp_path: Path, tiny_model: Path) -> None:
    model = with_tokenizer(tmp_path, tiny_model, chat_template=None)
    assert preflight(load_job(batch_job(tmp_path, model, [completion("a")]))).columns
    with pytest.raises(JobError, match=f"input.path: .* has no chat template, which lines for {CHAT_URL} need"):
        preflight(load_job(batch_job(tmp_path, model, [completion("a"), chat("b")])))


def test_another_models_name_is_one_warning(tmp_path: Path, tiny_model: Path) -> None:
    lines = [chat(f"{number}", model=name) for number, name in enumerate(["gpt-x", "gpt-y", str(tiny_model)] * 2)]
    assert [
        warning.partition("input.path: ")[2]
        for warning in preflight(load_job(batch_job(tmp_path, tiny_model, lines))).warnings
    ] == ['lines name "gpt-x", "gpt-y" as their model; model.name_or_path answers them all']
    assert preflight(load_job(batch_job(tmp_path, tiny_model, lines[2:3]))).warnings == []


def test_formats_are_told_apart(tmp_path: Path, tiny_model: Path) -> None:
    def configuration(**sections: Any) -> Any:
        job = load_job(batch_job(tmp_path, tiny_model, [], **sections))
        return job.configuration(revision="1", dtype="float32", max_model_len=64, numerics="test")

    batch = configuration(output={"format": "jsonl"})
    plain = configuration(output={"format": "jsonl"}, input={"format": "jsonl"}, prompt={"messages_column": "m"})
    assert configuration() != batch
    assert (batch["input"]["format"], plain["input"]["format"]) == ("openai-batch", "jsonl")


# What a body may say


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(resolve(str(tiny_model)))


def build(tokenizer: Tokenizer, *lines: dict[str, Any], prompt: Any = None, **sampling: Any) -> list[PreparedRow]:
    builder = PromptBuilder(PromptSpec(**(prompt or {})), SamplingSpec(**sampling), tokenizer, 512)
    return builder.build([Row(number, line) for number, line in enumerate(lines, 1)])


def text_of(tokenizer: Tokenizer, line: dict[str, Any], **prompt: Any) -> str:
    [row] = build(tokenizer, line, prompt=prompt)
    assert row.error is None, row.error
    return tokenizer.decode(row.token_ids, skip_special_tokens=False)


BOTH: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.25,
    "top_p": 0.5,
    "seed": 7,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
    "stop_token_ids": (9,),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "stop": ("x", "y"),
}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("name", BOTH)
def test_every_parameter_reaches_the_engine(tokenizer: Tokenizer, make: Any, name: str) -> None:
    defaults = SamplingSpec(max_tokens=20, top_k=30)
    plain, given = build(tokenizer, make("a"), make("b", **{name: BOTH[name]}), max_tokens=20, top_k=30)
    assert plain.params is not None
    assert given.params == plain.params.override({name: BOTH[name]}), given.error
    assert (plain.own_seed, given.own_seed) == (False, name == "seed")
    assert plain.params.model_dump() == defaults.model_dump(exclude={"from_column"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (chat("a", max_completion_tokens=5), {"max_tokens": 5}),
        (chat("a", max_completion_tokens=5, max_tokens=5), {"max_tokens": 5}),
        (chat("a", max_completion_tokens=5, max_tokens=None), {"max_tokens": 5}),
        (chat("a", logprobs=True), {"logprobs": 0}),
        (chat("a", logprobs=True, top_logprobs=3), {"logprobs": 3}),
        (chat("a", logprobs=False), {"logprobs": None}),
        (chat("a", logprobs=False, top_logprobs=0), {"logprobs": None}),
        (chat("a", logprobs=None), {"logprobs": 2}),
        (completion("a", logprobs=4), {"logprobs": 4}),
        (completion("a", logprobs=0), {"logprobs": 0}),
        (completion("a", logprobs=None), {"logprobs": 2}),
        (completion("a", stop="x"), {"stop": ("x",)}),
    ],
)
def test_names_of_openai_mean_those_of_the_job(
    tokenizer: Tokenizer, line: dict[str, Any], expected: dict[str, Any]
) -> None:
    [row] = build(tokenizer, line, logprobs=2)
    assert row.params is not None, row.error
    assert row.params.model_dump(include=expected.keys()) == expected


LABELS = [
    {"model": "gpt-x"},
    {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"},
    {"stream": False, "n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "tools": []},
    {"response_format": {"type": "text"}},
    dict.fromkeys(["tools", "n", "anything", "logit_bias", "temperature", "top_logprobs", "stream_options"]),
]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("body", LABELS)
def test_what_changes_no_result_is_accepted(tokenizer: Tokenizer, make: Any, body: dict[str, Any]) -> None:
    plain, labelled = build(tokenizer, make("a"), make("b", **body))
    assert (labelled.error, labelled.params, labelled.token_ids) == (None, plain.params, plain.token_ids)


UNSUPPORTED = [
    (chat("a", tools=[{"type": "function"}]), "tools other than []"),
    (chat("a", response_format={"type": "json_object"}), 'response_format other than {"type": "text"}'),
    (chat("a", n=2), "n other than 1"),
    (chat("a", n=True), "n other than 1"),
    (chat("a", stream="yes"), "stream other than false"),
    (completion("a", logit_bias={"50": 1}), "logit_bias other than {}"),
    (completion("a", best_of=3, echo=True), "best_of other than 1, echo other than false"),
    (completion("a", suffix="end"), 'suffix other than ""'),
    (completion("a", max_completion_tokens=5), "max_completion_tokens"),
    (completion("a", messages=[]), "messages"),
    (completion("a", chat_template_kwargs={}), "chat_template_kwargs"),
    (completion("a", prompt_logprobs=1), "prompt_logprobs"),
    (chat("a", temprature=1), "temprature (did you mean temperature?)"),
    (chat("a", audio={}, modalities=["audio"], tool_choice="auto"), "audio, modalities, tool_choice"),
]
FAULTS = [
    *((line, f"bad_sampling: unsupported: {names}") for line, names in UNSUPPORTED),
    (chat("a", max_tokens=0), "bad_sampling: max_tokens: must be at least 1, not 0"),
    (chat("a", temperature="hot"), "bad_sampling: temperature: must be a number, not 'hot'"),
    (chat("a", max_tokens=5, max_completion_tokens=6), "bad_sampling: max_tokens and max_completion_tokens differ"),
    (chat("a", top_logprobs=2), "bad_sampling: top_logprobs needs logprobs: true"),
    (chat("a", logprobs=2), "bad_sampling: logprobs has to be true or false"),
    (chat("a", logprobs=True, top_logprobs=101), "bad_sampling: logprobs: must be at most 100, not 101"),
    (completion("a", logprobs=True), "bad_sampling: logprobs: must be a whole number, not true"),
    (completion("a", stop=["x", ""]), "bad_sampling: stop: a stop string must not be empty"),
    (chat("a", min_tokens=100), "bad_sampling: min_tokens (100) is above max_tokens (16)"),
    (chat("a", add_generation_prompt="no"), "bad_prompt: add_generation_prompt has to be true or false"),
    (chat("a", chat_template_kwargs=[]), "bad_prompt: chat_template_kwargs has to be an object"),
    (
        chat("a", add_generation_prompt=True, continue_final_message=True),
        "bad_prompt: add_generation_prompt and continue_final_message exclude each other",
    ),
    (LINE, "bad_prompt: messages have to be a list of one or more objects with role and content"),
    (LINE | {"body": {}}, "missing_value: body has no messages"),
    (completion("a", None), "missing_value: body has no prompt"),
    (chat("a", [{"type": "image_url", "image_url": {"url": "x"}}]), "bad_prompt: message 0: a content part has to be"),
    (completion("a", ["x", "y"]), "bad_prompt: unsupported: 2 prompts in one line"),
    (completion("a", [[1], [2]]), "bad_prompt: unsupported: 2 prompts in one line"),
    (completion("a", 5), "bad_prompt: token ids have to be a list of whole numbers"),
    (completion("a", [1, 100_000]), "bad_prompt: token id 100000: the tokenizer's go from 0 to"),
    (completion("a", ""), "bad_prompt: the prompt is empty"),
    (completion("a", []), "bad_prompt: the prompt is empty"),
    (completion("a", "x" * 600), "prompt_too_long: 600 tokens; the limit is 511"),
]


@pytest.mark.parametrize(("line", "error"), FAULTS)
def test_a_fault_of_a_body_is_an_error_of_its_line(tokenizer: Tokenizer, line: dict[str, Any], error: str) -> None:
    before, row, after = build(tokenizer, chat("b"), line, completion("c"))
    assert (row.error or "").startswith(error)
    assert (before.error, after.error, row.token_ids) == (None, None, [])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (chat("a", "é"), "<|user|>é<|end|><|assistant|>"),
        (chat("a", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]), "<|user|>x\ny<|end|><|assistant|>"),
        (chat("a", "x", add_generation_prompt=False), "<|user|>x<|end|>"),
        (chat("a", "x", continue_final_message=True), "<|user|>x"),
        (completion("a", "x <|eos|>"), "x <|eos|>"),
        (completion("a", ["x"]), "x"),
        (completion("a", [64, 65]), "ab"),
        (completion("a", [[64, 65]]), "ab"),
    ],
)
def test_prompts(tokenizer: Tokenizer, line: dict[str, Any], text: str) -> None:
    assert text_of(tokenizer, line) == text


def test_the_jobs_prompt_options_are_defaults(tokenizer: Tokenizer) -> None:
    continued = {"continue_final_message": True}
    assert text_of(tokenizer, chat("a", "x"), **continued) == "<|user|>x"
    assert (
        text_of(tokenizer, chat("a", "x", continue_final_message=False), **continued) == "<|user|>x<|end|><|assistant|>"
    )
    assert (
        text_of(tokenizer, chat("a", "x", add_generation_prompt=True), **continued) == "<|user|>x<|end|><|assistant|>"
    )
    assert text_of(tokenizer, completion("a", "x" * 600), too_long="truncate_left") == "x" * 496


def test_chat_template_variables_of_the_line_go_before_the_jobs(tmp_path: Path, tiny_model: Path) -> None:
    model = with_tokenizer(tmp_path, tiny_model, chat_template="{{ one }} {{ two }}: {{ messages[0].content }}")
    variables = {"chat_template_kwargs": {"one": 1, "two": 2}}
    tokenizer = Tokenizer.load(resolve(str(model)))
    assert text_of(tokenizer, chat("a", "x", chat_template_kwargs={"two": "own"}), **variables) == "1 own: x"
    assert text_of(tokenizer, chat("a", "x"), **variables) == "1 2: x"


def test_only_plain_text_gets_the_tokenizers_special_tokens(tmp_path: Path, tiny_model: Path) -> None:
    model = with_tokenizer(tmp_path, tiny_model, add_bos=True)
    tokenizer = Tokenizer.load(resolve(str(model)))
    rows = build(tokenizer, chat("a", "x"), completion("b", "x"), completion("c", [64]), completion("d", "<|bos|>x"))
    texts = [tokenizer.decode(row.token_ids, skip_special_tokens=False) for row in rows]
    assert texts == ["<|user|>x<|end|><|assistant|>", "<|bos|>x", "a", "<|bos|>x"]


# What comes out

SEEDED = {"temperature": 0.9, "seed": 11, "ignore_eos": True}
MIXED: list[Any] = [
    chat("chat", "Say é", max_tokens=6, model="gpt-x"),
    completion("text", "abc", **SEEDED),
    chat("tools", tools=[{"type": "function"}]),
    chat("logprobs", logprobs=True, top_logprobs=2, ignore_eos=True, max_tokens=4),
    completion("text-logprobs", [64, 65], logprobs=2, ignore_eos=True, max_tokens=4),
    completion("chosen-alone", "x", logprobs=0, ignore_eos=True, max_tokens=2),
    chat("long", "x" * 600),
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with the job over MIXED, and its output."""
    folder = tmp_path_factory.mktemp("mixed")
    assert run_job(load_job(batch_job(folder, tiny_model, MIXED))) == EXIT_ROW_ERRORS
    return folder


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(str(tiny_model), dtype="float32")
    yield engine
    engine.close()


def test_good_and_failed_lines_lie_apart_in_input_order(mixed: Path) -> None:
    assert list(published(mixed)) == ["errors-00000.jsonl", "part-00000.jsonl"]
    assert list(answers(mixed)) == ["chat", "text", "logprobs", "text-logprobs", "chosen-alone"]
    failed = answers(mixed, "errors")
    assert list(failed) == ["tools", "long"]
    assert all(line["response"] is None for line in failed.values())
    assert failed["tools"]["error"] == {"code": "bad_sampling", "message": "unsupported: tools other than []"}
    assert failed["long"]["error"]["code"] == "prompt_too_long"
    assert failed["long"]["error"]["message"].endswith(" tokens; the limit is 511")
    lines = answers(mixed) | failed
    assert all(list(line) == ["id", "custom_id", "response", "error"] for line in lines.values())
    assert len({line["id"] for line in lines.values()}) == len(MIXED)
    assert read_status(str(mixed / "out")).describe().count("2 rows in final parts")


def test_answers_have_the_documented_shape(mixed: Path, tiny_model: Path) -> None:
    lines = answers(mixed)
    for line in lines.values():
        response = line["response"]
        assert (list(response), response["status_code"], line["error"]) == (
            ["status_code", "request_id", "body"],
            200,
            None,
        )
        body, usage = response["body"], response["body"]["usage"]
        assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
        assert (body["created"], usage["total_tokens"]) == (0, usage["prompt_tokens"] + usage["completion_tokens"])
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
    spoken, text = lines["chat"]["response"]["body"], lines["text"]["response"]["body"]
    assert (spoken["object"], text["object"]) == ("chat.completion", "text_completion")
    assert (spoken["model"], text["model"]) == ("gpt-x", "")
    assert list(spoken["choices"][0]) == ["index", "message", "logprobs", "finish_reason"]
    assert spoken["choices"][0]["message"].keys() == {"role", "content", "refusal"}
    assert list(text["choices"][0]) == ["index", "text", "logprobs", "finish_reason"]
    assert spoken["choices"][0]["logprobs"] is None
    assert spoken["usage"] == {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    written = b"".join(published(mixed).values()).decode()
    assert str(mixed) not in written
    assert str(tiny_model) not in written


def test_logprobs_are_those_of_the_engine(mixed: Path, engine: Engine) -> None:
    lines = answers(mixed)
    vocabulary = Tokens(engine.tokenizer)
    sampling = load_job(mixed / "job.yaml").sampling.model_dump(exclude={"from_column", "seed"})
    for name, prompt, tops in (("logprobs", [{"role": "user", "content": "hi"}], 2), ("text-logprobs", [64, 65], 2)):
        params = SamplingParams(**sampling | {"max_tokens": 4, "ignore_eos": True, "logprobs": tops})
        [expected] = engine.generate([prompt], params)
        tokens = [vocabulary.text_of(token.token_id) for token in expected.logprobs]
        chosen = pytest.approx([token.logprob for token in expected.logprobs], abs=1e-5)
        best = [[vocabulary.text_of(token_id) for token_id, _ in token.top] for token in expected.logprobs]
        found = lines[name]["response"]["body"]["choices"][0]["logprobs"]
        if name == "logprobs":
            assert ([each["token"] for each in found["content"]], found["refusal"]) == (tokens, None)
            assert [each["logprob"] for each in found["content"]] == chosen
            assert [[top["token"] for top in each["top_logprobs"]] for each in found["content"]] == best
            assert [bytes(each["bytes"]) for each in found["content"]] == [
                vocabulary.bytes_of(token.token_id) for token in expected.logprobs
            ]
        else:
            assert (found["tokens"], found["token_logprobs"]) == (tokens, chosen)
            both = zip(best, tokens, strict=True)
            assert [list(top) for top in found["top_logprobs"]] == [list(dict.fromkeys([*top, t])) for top, t in both]
    alone = lines["chosen-alone"]["response"]["body"]["choices"][0]["logprobs"]
    assert [list(top) for top in alone["top_logprobs"]] == [[token] for token in alone["tokens"]]


def test_tokens_are_spelled_by_their_bytes(tokenizer: Tokenizer) -> None:
    """The tokenizer's tokens are bytes: those of one character lie in several."""
    ids = tokenizer.encode("aé€<|end|>", add_special_tokens=False)
    vocabulary = Tokens(tokenizer)
    assert b"".join(map(vocabulary.bytes_of, ids)).decode() == "aé€<|end|>"
    assert [vocabulary.text_of(token) for token in ids[:3]] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    result = {"custom_id": "x", "generated_text": "aé€", "finish_reason": "stop", "error": None}
    result |= {"prompt_tokens": 1, "completion_tokens": len(ids)}
    result["logprobs"] = [{"token_id": token, "logprob": -1.5 if token else None, "top": []} for token in [*ids, 0]]
    line = json.loads(answer_line(completion("x"), result, "k", 1, vocabulary))
    found = line["response"]["body"]["choices"][0]["logprobs"]
    assert found["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 10]
    assert found["token_logprobs"] == [-1.5] * 7 + [-9999.0]


def test_tokens_of_other_vocabularies_are_spelled_too() -> None:
    """Blanks before words are those of the text, and a byte token is its byte."""
    vocabulary = {"<0xE2>": 0, "a": 1, "\u2581": 2, "\u2581b": 3, "é": 4}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = Tokens(Tokenizer(backend, special_tokens={}, chat_templates={}))
    assert [tokens.bytes_of(number) for number in range(5)] == [b"\xe2", b"a", b" ", b" b", "é".encode()]


def test_the_openai_package_reads_the_answers(mixed: Path) -> None:
    types = pytest.importorskip("openai.types")
    for line in answers(mixed).values():
        body = line["response"]["body"]
        kind = types.chat.ChatCompletion if body["object"] == "chat.completion" else types.Completion
        assert kind.model_validate(body, strict=True).model_dump(exclude_unset=True) == body


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_answers_are_those_of_a_plain_job(tmp_path: Path, mixed: Path, tiny_model: Path, form: str) -> None:
    """The same prompts through a template and from_column, and the batch file with an output of columns."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "columns").mkdir()
    rows = [
        {"id": "chat", "messages": [{"role": "user", "content": "Say é"}], "params": {"max_tokens": 6}},
        {
            "id": "logprobs",
            "messages": [{"role": "user", "content": "hi"}],
            "params": {"max_tokens": 4, "ignore_eos": True},
        },
    ]
    sections = {"input": {"format": "jsonl", "id_column": "id"}, "prompt": {"messages_column": "messages"}}
    plain = batch_job(
        tmp_path / "plain", tiny_model, rows, **sections, output={"format": form}, sampling={"from_column": "params"}
    )
    assert run_job(load_job(plain)) == EXIT_OK
    columns = batch_job(tmp_path / "columns", tiny_model, MIXED, output={"format": form})
    assert run_job(load_job(columns)) == EXIT_ROW_ERRORS
    batch = {name: line["response"]["body"]["choices"][0] for name, line in answers(mixed).items()}
    for row in output_rows(tmp_path / "plain"):
        assert row["generated_text"] == batch[row["custom_id"]]["message"]["content"]
    by_id = {row["custom_id"]: row for row in output_rows(tmp_path / "columns")}
    assert list(by_id) == [line["custom_id"] for line in MIXED]
    for name, choice in batch.items():
        assert by_id[name]["generated_text"] == (
            choice["message"]["content"] if "message" in choice else choice["text"]
        )
        assert by_id[name]["url"] in (CHAT_URL, COMPLETIONS_URL)
    assert by_id["tools"]["error"] == "bad_sampling: unsupported: tools other than []"


def test_a_lines_own_seed_decides_wherever_the_line_stands(tmp_path: Path, mixed: Path, tiny_model: Path) -> None:
    line = completion("moved", "abc", **SEEDED)
    assert run_job(load_job(batch_job(tmp_path, tiny_model, [completion("first"), line]))) == EXIT_OK
    moved, before = answers(tmp_path)["moved"], answers(mixed)["text"]
    assert moved["response"]["body"]["choices"] == before["response"]["body"]["choices"]


def test_no_errors_file_where_nothing_failed_and_an_empty_part_where_all_did(tmp_path: Path, tiny_model: Path) -> None:
    lines = [chat("a"), completion("b"), chat("c", n=2), chat("d", n=2)]
    job = load_job(batch_job(tmp_path, tiny_model, lines, input={"split_rows": 2}))
    assert run_job(job) == EXIT_ROW_ERRORS
    files = published(tmp_path)
    assert list(files) == ["errors-00001.jsonl", "part-00000.jsonl", "part-00001.jsonl"]
    assert files["part-00001.jsonl"] == b""
    first, second = json.loads((tmp_path / "out" / MANIFEST_COPY).read_text())["parts"]
    assert (first["rows"], first["errors_file"]) == (2, None)
    assert (second["rows"], second["ok"], second["errors"]) == (2, 0, 2)
    errors_file = files["errors-00001.jsonl"]
    assert second["errors_file"] == {
        "name": "errors-00001.jsonl",
        "bytes": len(errors_file),
        "sha256": hashlib.sha256(errors_file).hexdigest(),
        "staged": None,
    }


def test_an_errors_file_is_kept_as_a_part_is(tmp_path: Path, mixed: Path) -> None:
    shutil.copytree(mixed, tmp_path / "copy")
    job = json.loads((tmp_path / "copy" / "job.yaml").read_text())
    job["output"]["path"] = str(tmp_path / "copy" / "out")
    (tmp_path / "copy" / "job.yaml").write_text(json.dumps(job))
    before, file = published(mixed), tmp_path / "copy" / "out" / "errors-00000.jsonl"
    file.write_bytes(file.read_bytes() + b"\n")
    assert read_status(str(tmp_path / "copy" / "out")).faults == [
        f"errors-00000.jsonl has {len(before[file.name]) + 1:,} bytes, not {len(before[file.name]):,}"
    ]
    with pytest.raises(JobError, match=r"errors-00000\.jsonl has"):
        run_job(load_job(tmp_path / "copy" / "job.yaml"))
    file.unlink()
    assert read_status(str(tmp_path / "copy" / "out")).faults == ["errors-00000.jsonl is missing"]
    assert run_job(load_job(tmp_path / "copy" / "job.yaml")) == EXIT_ROW_ERRORS
    assert published(tmp_path / "copy") == before


def test_an_errors_file_goes_when_its_rows_are_run_again_and_are_good(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Engine, key: Any, *arguments: Any) -> Any:
        if key[1] == 2:
            raise ValueError("a passing fault")
        return request(self, key, *arguments)

    request = Engine.request
    job = load_job(batch_job(tmp_path, tiny_model, [chat("a"), chat("b")]))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "request", refuse)
        assert run_job(job) == EXIT_ROW_ERRORS
    assert list(answers(tmp_path, "errors")) == ["b"]
    (tmp_path / "out" / "part-00000.jsonl").unlink()
    assert run_job(job) == EXIT_OK
    assert list(published(tmp_path)) == ["part-00000.jsonl"]
    assert list(answers(tmp_path)) == ["a", "b"]


def test_a_rerun_keeps_the_other_answers_to_the_byte(
    tmp_path: Path, mixed: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities too, in which token ids cannot be told from texts."""

    def refuse(self: Engine, key: Any, *arguments: Any) -> Any:
        if key[1] in (2, 4):
            raise ValueError("a passing fault")
        return request(self, key, *arguments)

    request = Engine.request
    job = load_job(batch_job(tmp_path, tiny_model, MIXED))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "request", refuse)
        assert run_job(job) == EXIT_ROW_ERRORS
    assert {"text", "logprobs"} < answers(tmp_path, "errors").keys()
    assert run_job(job, rerun=["failed"]) == EXIT_ROW_ERRORS
    assert published(tmp_path) == published(mixed)
    assert run_job(job, rerun=["truncated"]) == EXIT_ROW_ERRORS
    assert published(tmp_path) == published(mixed)


def test_overwrite_removes_errors_files_too(tmp_path: Path, tiny_model: Path) -> None:
    assert run_job(load_job(batch_job(tmp_path, tiny_model, [chat("a", n=2)]))) == EXIT_ROW_ERRORS
    job = load_job(batch_job(tmp_path, tiny_model, [chat("a")]))
    assert run_job(job, overwrite=True) == EXIT_OK
    assert list(published(tmp_path)) == ["part-00000.jsonl"]


# Killed, and run again

LONG: list[Any] = [
    chat(f"r{number}", f"row {number}", **({"n": 2} if number % 4 == 1 else {"logprobs": True, "top_logprobs": 1}))
    for number in range(20)
]
LONG_JOB: dict[str, Any] = {
    "model": {"reproducible": True},
    "input": {"split_rows": 5},
    "sampling": {"temperature": 0.8, "max_tokens": 150, "ignore_eos": True},
    "output": {"checkpoint_seconds": 0.3},
    "engine": {"max_num_seqs": 4, "num_threads": 1},
}
DIES_AT_PUBLISH = """
import os, sys
from batchrun.cli import main
from batchrun.data.store import Store

def publish(self, *arguments):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    real(self, *arguments)

real, left = Store.publish, int(sys.argv[2])
Store.publish = publish
main(["submit", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, bytes]:
    """What the job over LONG publishes when nothing stops it."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_job(load_job(batch_job(folder, tiny_model, LONG, **LONG_JOB))) == EXIT_ROW_ERRORS
    return published(folder)


@pytest.mark.slow
def test_a_killed_job_gives_the_same_bytes_when_it_is_run_again(
    tmp_path: Path, tiny_model: Path, whole: dict[str, bytes]
) -> None:
    job = batch_job(tmp_path, tiny_model, LONG, **LONG_JOB)
    run = subprocess.Popen([sys.executable, "-m", "batchrun", "submit", str(job)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out" / SPLITS).glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    assert 0 < len(list((tmp_path / "out" / SPLITS).glob("*.json"))) < 4
    assert run_job(load_job(job)) == EXIT_ROW_ERRORS
    assert published(tmp_path) == whole


@pytest.mark.slow
def test_dying_between_the_two_files_of_a_split_loses_neither(
    tmp_path: Path, tiny_model: Path, whole: dict[str, bytes]
) -> None:
    job = batch_job(tmp_path, tiny_model, LONG, **LONG_JOB)
    for published_before in (0, 1):  # the first part; then, of the next split, its errors file
        run = subprocess.run([sys.executable, "-c", DIES_AT_PUBLISH, str(job), str(published_before)], check=False)
        assert run.returncode == 9
    assert run_job(load_job(job)) == EXIT_ROW_ERRORS
    assert published(tmp_path) == whole
    assert not list((tmp_path / "out" / SEGMENTS).glob("*"))
