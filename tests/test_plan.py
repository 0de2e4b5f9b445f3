"""The plan: exact where it can be, stated where it is a sample, and true to what the prefix cache does."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.engine import step_times
from batchrun.engine.step_times import StepTimes
from batchrun.job import load_job
from batchrun.model_files import resolve
from batchrun.models.families import model_config
from batchrun.plan import TokenCounts, make_plan
from tests.jobs import write_job, write_rows


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_every_length_is_in_the_histogram_once(lengths: list[int]) -> None:
    counts = TokenCounts.of(lengths)
    assert sum(n for *_, n in counts.histogram) == len(lengths)
    assert all(sum(low <= length < high for length in lengths) == n for low, high, n in counts.histogram)
    assert counts.smallest <= counts.median <= counts.p95 <= counts.largest


@pytest.fixture
def shared_job(tmp_path: Path, tiny_model: Path) -> Path:
    rows: list[object] = [{"id": i, "text": f"row {i:03d}"} for i in range(100)]
    rows[7] = "{broken"
    rows[8] = {"id": 8, "text": None}
    instruction = "Answer in one word and in no more than that."  # 44 byte tokens
    return write_job(
        tmp_path,
        tiny_model,
        rows,
        prompt={"template": f"{instruction} {{{{ text }}}}"},
        sampling={"max_tokens": 8},
        engine={"block_size": 16, "kv_cache_memory": "512KiB"},
        model={"dtype": "float32"},
    )


def test_a_small_job_is_planned_exactly(shared_job: Path) -> None:
    plan = make_plan(load_job(shared_job, ["engine.device=cpu"]))
    length = 44 + len(" row 000")  # of which 48 fill three blocks: up to "row"
    assert plan.files == [("rows.jsonl", 100)]
    assert (plan.rows, plan.sampled_rows) == (100, 100)
    assert plan.sampled_errors == {"unreadable_row": 1, "missing_value": 1}
    assert plan.prompts is not None
    assert (plan.prompts.smallest, plan.prompts.largest) == (length, length)
    assert plan.prompt_tokens == 98 * length
    assert plan.output_tokens == 98 * 8
    assert plan.prefix_share == pytest.approx(97 * 48 / (98 * length))
    assert plan.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4 == 768
    assert plan.kv_budget == 42 * 16 * 768  # whole blocks
    assert (plan.kv_blocks, plan.kv_tokens) == (42, 41 * 16)
    assert plan.concurrent == pytest.approx(42 * 16 / (length - 48 + 8), rel=0.1)
    assert plan.steps >= 98 * 8 / plan.concurrent
    assert plan.seconds is not None
    assert plan.seconds > 0
    assert plan.notes == []
    assert json.loads(plan.to_json())["rows"] == 100
    text = plan.describe()
    assert "100 in 1 files" in text
    assert "2 errors (1 missing_value, 1 unreadable_row)" in text
    assert "32 to 63" in text


def test_quantized_weights_take_less_memory(shared_job: Path) -> None:
    plain, quantized = (make_plan(load_job(shared_job, [f"model.quantization={each}"])) for each in ("none", "int8"))
    matrices = 3 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)
    assert plain.weight_bytes - quantized.weight_bytes == matrices * (4 - 1.25)
    assert "(float32 on cpu)" in plain.describe()
    assert "(float32, linear layers int8, on cpu)" in quantized.describe()


def test_a_plan_says_what_the_kv_cache_holds(shared_job: Path) -> None:
    plans = {
        kept: make_plan(load_job(shared_job, ["model.dtype=bfloat16", f"model.kv_cache_dtype={kept}"]))
        for kept in ("auto", "bf16", "fp8", "int8", "int4")
    }
    vectors, elements = 2 * 3 * 2, 16
    sizes = {"auto": 2 * elements, "bf16": 2 * elements, "fp8": elements + 4, "int8": elements + 4, "int4": 8 + 4}
    for kept, plan in plans.items():
        assert plan.kv_bytes_per_token == vectors * sizes[kept]
        assert plan.kv_blocks == (512 << 10) // (16 * plan.kv_bytes_per_token)
        assert plan.kv_tokens == (plan.kv_blocks - 1) * 16
    assert f"for {plans['int8'].kv_tokens:,} tokens in {plans['int8'].kv_blocks:,} blocks" in plans["int8"].describe()
    assert "240 B a token (int8)" in plans["int8"].describe()


@pytest.fixture
def measured(shared_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    """As if an engine had measured the job's model on this processor: 1 ms a step and 10 us a token."""
    monkeypatch.setattr(step_times, "cache_dir", lambda: tmp_path / "cache")
    job = load_job(shared_job)
    config = model_config(resolve(job.model.name_or_path).config)
    times = StepTimes(
        subject=step_times.subject(job.model, job.engine, config, "float32"),
        operations="any",
        threads=1,
        measured_at=1.0,
        vocab_size=config.vocab_size,
        layers={size: 1e-3 + size * 1e-5 for size in (16, 64, 4096)},
        head={16: 2e-3, 1024: 2e-3},
        memory_rate=1e10,
    )
    times.save()
    return times


def test_time_is_that_of_the_steps_that_were_measured(shared_job: Path, measured: StepTimes) -> None:
    plan = make_plan(load_job(shared_job))
    assert "as they were measured here" in plan.basis
    assert plan.seconds is not None
    prompts = round(plan.prompt_tokens * (1 - plan.prefix_share))
    decode_steps = math.ceil(plan.output_tokens / plan.concurrent)
    linear = 1e-3 + prompts * 1e-5 + decode_steps * 3e-3 + plan.output_tokens * 1e-5
    assert linear < plan.seconds < linear + 0.1  # attention over 50 tokens
    slower = measured.model_copy(update={"layers": {size: 100 * t for size, t in measured.layers.items()}})
    slower.save()
    slow = make_plan(load_job(shared_job)).seconds
    assert slow is not None
    assert slow > 50 * linear
    for other in ("engine.num_threads=1", "model.dtype=bfloat16", "model.reproducible=true"):
        assert "as they were measured here" not in make_plan(load_job(shared_job, [other])).basis


def test_a_plan_is_of_the_steps_that_an_engine_will_choose(shared_job: Path, measured: StepTimes) -> None:
    measured.model_copy(update={"layers": {16: 1e-3, 256: 1e-1, 512: 1e-1}}).save()
    job = load_job(shared_job, ["engine.kv_cache_memory=64MiB", "input.split_rows=1000"])
    write_rows(shared_job.parent / "rows.jsonl", [{"id": i, "text": f"row {i:03d}"} for i in range(300)])
    assert make_plan(job).concurrent == 300
    assert make_plan(load_job(shared_job, ["engine.max_num_seqs=7"])).concurrent == 7


def test_a_plan_goes_by_the_latest_measurement(shared_job: Path, measured: StepTimes) -> None:
    slower = {size: 100 * seconds for size, seconds in measured.layers.items()}
    before = make_plan(load_job(shared_job)).seconds
    measured.model_copy(update={"threads": 2, "measured_at": 0.0, "layers": slower}).save()
    assert make_plan(load_job(shared_job)).seconds == before
    measured.model_copy(update={"threads": 2, "measured_at": 2.0, "layers": slower}).save()
    after = make_plan(load_job(shared_job)).seconds
    assert before is not None
    assert after is not None
    assert after > 20 * before


def test_without_prefix_caching_nothing_is_shared(shared_job: Path) -> None:
    assert make_plan(load_job(shared_job, ["engine.enable_prefix_caching=false"])).prefix_share == 0


def test_a_limit_plans_the_first_rows(shared_job: Path) -> None:
    plan = make_plan(load_job(shared_job), limit=5)
    assert (plan.rows, plan.sampled_rows, plan.sampled_errors) == (5, 5, {})


def test_a_sample_is_scaled_up_and_said_to_be_one(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, [{"id": i, "text": "x" * 20} for i in range(2000)])
    plan = make_plan(load_job(job), sample_seconds=0)
    assert plan.rows == 2000
    assert 0 < plan.sampled_rows < 2000
    assert plan.prompt_tokens == 2000 * 24
    assert any("not in the sample" in note for note in plan.notes)


def test_a_sample_takes_from_every_part_of_the_input(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, [{"id": i, "text": "x"} for i in range(300)])
    write_rows(tmp_path / "more.jsonl", [{"id": i, "text": "x" * 100} for i in range(300)])
    spec = load_job(job, [f"input.path={tmp_path}/*.jsonl"])
    plan = make_plan(spec, sample_rows=512)
    assert (plan.rows, plan.sampled_rows) == (600, 512)
    assert plan.prompts is not None
    assert (plan.prompts.smallest, plan.prompts.largest) == (5, 104)
    first = make_plan(spec, limit=300)
    assert first.files == [("more.jsonl", 300), ("rows.jsonl", 0)]
    assert first.prompts is not None
    assert first.prompts.smallest == 104


def test_an_empty_job_and_one_without_a_good_row(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, [])
    plan = make_plan(load_job(job))
    assert (plan.rows, plan.prompts, plan.steps) == (0, None, 0)
    assert "0 in 1 files" in plan.describe()
    job = write_job(tmp_path, tiny_model, ["{", "{"])
    plan = make_plan(load_job(job))
    assert plan.sampled_errors == {"unreadable_row": 2}
    assert plan.prompts is None


def test_a_file_that_breaks_off_is_noted(tmp_path: Path, tiny_model: Path) -> None:
    import gzip

    job = write_job(tmp_path, tiny_model, [])
    rows = [json.dumps({"id": i, "text": os.urandom(40).hex()}) for i in range(2000)]
    whole = gzip.compress("\n".join(rows).encode())
    (tmp_path / "broken.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    plan = make_plan(load_job(job, [f"input.path={tmp_path / 'broken.jsonl.gz'}"]))
    assert 0 < plan.rows < 2000
    assert any("rows can be read" in note for note in plan.notes)
