"""The job file: what is accepted, and that every fault is named by file, line and field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun.engine import memory
from batchrun.errors import JobError
from batchrun.job import EngineSpec, JobSpec, ModelSpec, load_job
from batchrun.model_files import resolve

GOOD = """\
name: small
model:
  name_or_path: some/model
input:
  path: rows.jsonl
prompt:
  template: "Rate: {{ text }}"
output:
  path: out/small
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    return path


def faults(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load_job(path, overrides)
    return [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]


def test_a_small_job_has_the_defaults(job_file: Path) -> None:
    job = load_job(job_file)
    assert job.model.dtype == "auto"
    assert job.sampling.seed == 0
    assert job.output.keep_columns is True
    assert job.engine.kv_cache_memory == "auto"


def test_every_fault_is_reported_at_once_with_its_line(job_file: Path) -> None:
    job_file.write_text(
        GOOD.replace("  name_or_path: some/model", "  name_or_path: some/model\n  dtpye: float32")
        + "sampling: {temperature: -1}\nengine: {block_size: many, kv_cache_memory: 5 parsecs, dtype: float32}\n"
    )
    assert faults(job_file) == [
        "4: model.dtpye: unknown key; did you mean dtype?",
        "11: sampling.temperature: must be at least 0.0, not -1",
        "12: engine.block_size: must be a whole number, not 'many'",
        "12: engine.dtype: unknown key here; it belongs under model",
        "12: engine.kv_cache_memory: must be a size such as 512MiB or auto, not '5 parsecs'",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("engine: {tensor_parallel_size: 2}", "10: engine.tensor_parallel_size: not supported yet"),
        (
            "sampling: {n: 2}",
            "10: sampling.n: more than one sample per row is not supported yet; n must be 1",
        ),
        (
            "sampling: {response_format: {type: json_object}}",
            "10: sampling.response_format: structured output is not supported yet",
        ),
    ],
)
def test_what_is_not_supported_yet_is_refused_by_name(job_file: Path, line: str, expected: str) -> None:
    job_file.write_text(GOOD + line + "\n")
    assert faults(job_file) == [expected]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sampling: {max_tokens: true}", "sampling.max_tokens: must be a whole number, not true"),
        ("sampling: {temperature: false}", "sampling.temperature: must be a number, not false"),
        ("sampling: {stop_token_ids: [3, true]}", "sampling.stop_token_ids.1: must be a whole number, not true"),
        ("errors: {error_threshold: true}", "errors.error_threshold: must be a number, not true"),
        ("engine: {block_size: true}", "engine.block_size: must be a whole number, not true"),
        ("engine: {kv_cache_memory: true}", "engine.kv_cache_memory: must be a size such as 512MiB or auto, not true"),
    ],
)
def test_true_and_false_are_no_numbers(job_file: Path, line: str, expected: str) -> None:
    job_file.write_text(GOOD + line + "\n")
    assert faults(job_file) == [f"10: {expected}"]


@pytest.mark.parametrize(
    ("config", "drafter"),
    [
        ("{}", "suffix"),
        ("{method: auto, model: some/draft}", "draft_model"),
        ("{method: off, model: some/draft}", None),
        ("off", None),
        ("null", None),
        ("{method: ngram}", "ngram"),
        ("{method: suffix, num_speculative_tokens: 3}", "suffix"),
        ("{method: draft_model, model: some/draft, quantization: int8}", "draft_model"),
        ("{method: off}", None),
        ("{method: false}", None),  # `off` as YAML 1.1 reads it
    ],
)
def test_who_drafts(job_file: Path, config: str, drafter: str | None) -> None:
    job_file.write_text(f"{GOOD}engine: {{speculative_config: {config}}}\n")
    assert load_job(job_file).engine.speculative_config.drafter == drafter


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{method: true}", ".method: must be auto, ngram, suffix, draft_model or off, not true"),
        ("{method: on}", ".method: must be auto, ngram, suffix, draft_model or off, not 'on'"),
        ("{metod: ngram}", ".metod: unknown key; did you mean method?"),
        ("{dtype: float32}", ".dtype: unknown key here; it belongs under model"),
        ("{num_speculative_tokens: 0}", ".num_speculative_tokens: must be at least 1 or auto, not 0"),
        ("{method: draft_model}", ": method draft_model needs model: a smaller one with the same tokenizer"),
        ("{method: ngram, model: a/b}", ".model: goes with method: draft_model or auto, not ngram; null takes it out"),
        ("{num_speculative_tokens: 65}", ".num_speculative_tokens: must be at most 64 or auto, not 65"),
        ("{quantization: int8}", ".quantization: is the draft model's, and no model is given"),
        ("{model: a/b, quantization: auto}", ".quantization: must be none, dequantize, int8, int4 or fp8, not 'auto'"),
        ("on", ": must be a mapping, not 'on'"),
    ],
)
def test_speculation_that_cannot_be_is_refused(job_file: Path, config: str, expected: str) -> None:
    job_file.write_text(f"{GOOD}engine: {{speculative_config: {config}}}\n")
    assert faults(job_file) == [f"10: engine.speculative_config{expected}"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("input.path=[]", "must be text or a list that is not empty, not an empty list"),
        (
            "output.columns={generated_text: ''}",
            "output.columns.generated_text: must be text that is not empty, not ''",
        ),
        ("input.dataset_options={name: en}", "--set input.dataset_options: goes with input.format: datasets alone"),
    ],
)
def test_what_is_empty_or_has_no_effect_is_refused(job_file: Path, override: str, expected: str) -> None:
    [fault] = faults(job_file, override)
    assert fault.endswith(expected)


def test_an_unsupported_format_names_those_that_are(job_file: Path) -> None:
    [fault] = faults(job_file, "input.format=csv")
    assert fault.endswith("input.format: must be auto, jsonl, parquet, datasets or openai-batch, not 'csv'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: a job file is a mapping with model, input, prompt and output"),
        ("- a\n- b\n", "1: a job file is a mapping with model, input, prompt and output"),
        ("name: [a\nmodel: x\n", "2: not YAML: expected ',' or ']', but got ':'"),
        ("name: a\nmodel: {}\nname: b\n", "3: name: given twice"),
        ("name: a\n1: b\n", "2: the job: a key has to be text; quote it"),
        ("name: &a [*a]\n", "1: name.0: contains itself"),
        pytest.param("[" * 3_000, "1: nested too deeply", id="deep"),
    ],
)
def test_a_file_that_is_no_job_is_refused(job_file: Path, text: str, expected: str) -> None:
    job_file.write_text(text)
    assert faults(job_file) == [expected]


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert faults(tmp_path / "none.yaml") == [" No such file or directory"]
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "not UTF-8" in faults(tmp_path / "latin.yaml")[0]


def test_a_missing_section_and_a_null_one(job_file: Path) -> None:
    job_file.write_text("model:\ninput: {path: a}\nprompt: {template: a}\n")
    assert faults(job_file) == ["1: model: must be a mapping, not null", "1: output: missing"]


def test_a_number_where_text_belongs_says_to_quote_it(job_file: Path) -> None:
    [fault] = faults(job_file, "model.revision=12345678")
    assert fault == "--set model.revision: must be text, not 12345678 (quote it)"


@pytest.mark.parametrize("prompt", ["{}", "{template: a, messages_column: b}"])
def test_exactly_one_prompt_form(job_file: Path, prompt: str) -> None:
    [fault] = faults(job_file, f"prompt={prompt}")
    assert "needs exactly one of template, messages, messages_column, token_ids_column" in fault


def test_template_syntax_is_checked_in_every_message(job_file: Path) -> None:
    text = GOOD.replace('  template: "Rate: {{ text }}"', '  messages:\n    - {role: user, content: "{{ text"}')
    job_file.write_text(text)
    [fault] = faults(job_file)
    assert fault.startswith("8: prompt.messages.0.content: template: line 1: ")


def test_an_unknown_filter_is_a_fault_of_the_template(job_file: Path) -> None:
    [fault] = faults(job_file, "prompt.template={{ text | uper }}")
    assert "No filter named 'uper'" in fault


def test_overrides_are_yaml_applied_in_order(job_file: Path) -> None:
    job = load_job(
        job_file,
        [
            "sampling.stop=[a, b]",
            "sampling.max_tokens=4",
            "sampling.max_tokens=8",
            "engine.kv_cache_memory=512MiB",
            "prompt.template={{ text }}",
            "model.revision=",
            "output.path=s3://bucket/a=b",
        ],
    )
    assert job.sampling.stop == ("a", "b")
    assert job.sampling.max_tokens == 8
    assert job.engine.kv_cache_memory == 512 << 20
    assert job.prompt.template == "{{ text }}"
    assert job.model.revision is None
    assert job.output.path == "s3://bucket/a=b"


def test_an_override_reaches_into_a_list(job_file: Path) -> None:
    job = load_job(job_file, ["prompt={messages: [{role: user, content: a}]}", "prompt.messages.0.content=b"])
    assert job.prompt.messages is not None
    assert job.prompt.messages[0].content == "b"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model", "--set model: has to read section.key=value"),
        ("=SECRET", "--set : has to read section.key=value"),
        ("model..dtype=SECRET", "--set model..dtype: has to read section.key=value"),
        ("input.storage_options.key:SECRET", "--set input.storage_options.key: has to read section.key=value"),
        ("model.dtype=[SECRET", "--set model.dtype: not YAML: "),
        ("name.x.y=SECRET", "--set name.x.y: is not within a mapping or a list of the job"),
        ("input.storage_options=SECRET", "--set input.storage_options: must be a mapping"),
        (
            "inptu.storage_options.key=SECRET",
            "--set inptu.storage_options.key: inptu: unknown key; did you mean input?",
        ),
        ("input.path=$NONE/s3://me:SECRET@host", "--set input.path: environment variable NONE is not set"),
        (
            "output.format=s3://me:SECRET@host",
            "--set output.format: must be parquet, jsonl or openai-batch, not 's3://host'",
        ),
    ],
)
def test_faults_of_overrides_name_them_and_tell_no_secret(job_file: Path, override: str, expected: str) -> None:
    [fault] = faults(job_file, override)
    assert fault.startswith(expected)
    assert "SECRET" not in fault


def test_faults_of_overrides_name_the_override(job_file: Path) -> None:
    assert faults(job_file, "model.dtpye=a", "sampling.top_p=7") == [
        "--set model.dtpye: unknown key; did you mean dtype?",
        "--set sampling.top_p: must be at most 1.0, not 7",
    ]


def test_paths_expand_variables_and_home(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "/data")
    monkeypatch.setenv("HOME", "/home/me")
    job = load_job(
        job_file, ["input.path=[$ROWS/a, '${ROWS}/b$$c']", "output.path=~/out", "prompt.template=costs $ROWS"]
    )
    assert job.input.path == ("/data/a", "/data/b$c")
    assert job.output.path == "/home/me/out"
    assert job.prompt.template == "costs $ROWS"


def test_an_unset_variable_is_a_fault(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    [fault] = faults(job_file, "input.path=$NOT_SET_ANYWHERE/a")
    assert "environment variable NOT_SET_ANYWHERE is not set" in fault


def configuration(job: JobSpec) -> dict[str, object]:
    return job.configuration(revision="abc", dtype="float32", max_model_len=128, numerics="n1")


def test_the_configuration_holds_what_results_depend_on(job_file: Path) -> None:
    base = configuration(load_job(job_file))
    assert json.loads(json.dumps(base)) == base
    same = [
        "engine.max_num_seqs=3",
        "engine.speculative_config={method: draft_model, model: some/draft}",
        "errors.on_error=fail",
        "output.path=elsewhere",
        "output.checkpoint_seconds=1",
        "input.path=elsewhere",
        "name=other",
        "model.name_or_path=the/same/elsewhere",
        "input.storage_options={key: SECRET}",
        "output.storage_options={secret: SECRET}",
    ]
    for override in same:
        assert configuration(load_job(job_file, [override])) == base, override
    different = [
        "sampling.seed=1",
        "sampling.temperature=0",
        "prompt.template=x",
        "model.reproducible=true",
        "model.quantization=int8",
        "model.kv_cache_dtype=int8",
        "input.where=[[a, '=', 1]]",
        "input.id_column=a",
        "output.columns={generated_text: label}",
        "output.keep_columns=false",
    ]
    for override in different:
        assert configuration(load_job(job_file, [override])) != base, override


@given(st.text(max_size=40))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_text_is_a_job_or_a_readable_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(JobError):
        load_job(path)


LLAMA = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def test_kv_bytes_and_parameters_of_a_small_llama() -> None:
    vectors = 2 * 30 * 3
    for dtype, kv_cache_dtype, size in [
        ("float32", "auto", 64 * 4),
        ("bfloat16", "auto", 64 * 2),
        ("float32", "bf16", 64 * 2),
        ("float32", "fp8", 64 + 4),
        ("bfloat16", "int8", 64 + 4),
        ("bfloat16", "int4", 32 + 4),
    ]:
        assert memory.kv_bytes_per_token(LLAMA, dtype, kv_cache_dtype) == vectors * size
    assert sum(memory.parameter_count(LLAMA)) == pytest.approx(134.5e6, rel=0.001)


def test_bytes_of_weights(tiny_model: Path) -> None:
    plain = replace(resolve(str(tiny_model)), config=LLAMA)
    gptq = replace(plain, config=LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}})
    fp8 = replace(plain, config=LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    linear, embedding = memory.parameter_count(LLAMA)
    for files, form, device, size in (
        (plain, "none", "cpu", 2.0),
        (plain, "int8", "cpu", 1.25),
        (plain, "int4", "cpu", 0.625),
        (plain, "auto", "cpu", 0.625),
        (plain, "fp8", "cpu", 2.0),
        (plain, "fp8", "cuda", 1.0),
        (gptq, "none", "cpu", 0.625),
        (gptq, "dequantize", "cpu", 2.0),
        (gptq, "auto", "cpu", 0.625),
        (fp8, "none", "cpu", 2.0),
        (fp8, "none", "cuda", 1.0),
    ):
        assert memory.weight_bytes(files, 2, form, device) == int(linear * size) + embedding * 2


def test_the_context_is_the_models_unless_the_job_asks_for_less() -> None:
    spec = ModelSpec(name_or_path="m")
    assert memory.resolve_max_model_len(LLAMA, spec) == 8192
    assert memory.resolve_max_model_len(LLAMA, spec.model_copy(update={"max_model_len": 100})) == 100
    with pytest.raises(JobError, match="9000 is above the model's context of 8192"):
        memory.resolve_max_model_len(LLAMA, spec.model_copy(update={"max_model_len": 9000}))
    yarn = LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}
    assert memory.resolve_max_model_len(yarn, spec) == 16384
    llama3 = LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert memory.resolve_max_model_len(llama3, spec) == 8192


def test_the_kv_budget_holds_one_sequence_or_names_both_numbers() -> None:
    def budget(free: int, **engine: object) -> int:
        spec = EngineSpec.model_validate({"block_size": 16} | engine)
        return memory.kv_budget(spec, "cpu", bytes_per_token=1024, max_model_len=1000, free=free)

    mib, gib = 1 << 20, 1 << 30
    assert budget(100 * gib) == 4 * gib
    assert budget(2 * gib) == gib // 2
    assert budget(2 * mib) == memory.sequence_bytes(1000, bytes_per_token=1024, block_size=16) == 64 * 16 * 1024
    assert budget(mib, kv_cache_memory="2MiB") == 2 * mib
    assert budget(mib, kv_cache_memory=2 * mib + 5) == 2 * mib
    with pytest.raises(JobError, match=r"512\.0 KiB cannot hold one sequence of .* 1000 tokens, which takes 1\.0 MiB"):
        budget(gib, kv_cache_memory="512KiB")
    with pytest.raises(JobError, match="cannot hold one sequence"):
        budget(mib // 2)
    with pytest.raises(JobError, match=r"engine.kv_cache_memory: 100\.0 TiB is more than the memory there is: "):
        budget(gib, kv_cache_memory="100TiB")


def test_device_and_dtype_are_resolved_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert memory.resolve_device("auto") == "cpu"
    with pytest.raises(JobError, match=r"engine\.device: cuda cannot be used: CUDA_VISIBLE_DEVICES hides every GPU"):
        memory.resolve_device("cuda")
    assert memory.resolve_dtype("auto", "cuda") == "bfloat16"
    assert memory.resolve_dtype("float16", "cpu") == "float16"
    assert memory.resolve_dtype("auto", "cpu") in {"bfloat16", "float32"}
