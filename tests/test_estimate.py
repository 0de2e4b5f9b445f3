"""What rows ask of an engine and how long that takes: by hand, from given measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun import probe
from batchrun.data.rows import PreparedRow
from batchrun.engine.limits import resolve_limits
from batchrun.engine.step_times import StepTimes
from batchrun.estimate import duration, expect, shared_tokens, work_of
from batchrun.job import load_job
from batchrun.preflight import Preflight, preflight
from batchrun.sampling import SamplingParams
from tests.jobs import write_job

MATRICES = 3 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)  # parameters of the tiny model
EMBEDDING = 320 * 64
PAIR = 2 * 2 * 3 * 4 * 16  # FLOP: a query's product with a key and a value's with its weight, of 3 layers and 4 heads
PARAMS = SamplingParams(max_tokens=8)
ROWS = [PreparedRow(i, [1] * 32 + [i] * 8, PARAMS) for i in range(50)]
TIMES = StepTimes(
    subject={},
    operations="any",
    threads=1,
    measured_at=0.0,
    vocab_size=320,
    layers={16: 1e-3, 1024: 1e-1},
    head={16: 2e-3, 1024: 2e-3},
    memory_rate=1e30,
)


@pytest.fixture
def checked(tmp_path: Path, tiny_model: Path) -> Preflight:
    engine = {"device": "cpu", "block_size": 16, "kv_cache_memory": "64MiB"}
    rows = [{"id": 1, "text": "x"}]
    return preflight(load_job(write_job(tmp_path, tiny_model, rows, model={"dtype": "float32"}, engine=engine)))


def test_whole_blocks_are_shared_and_the_last_token_is_computed() -> None:
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    assert shared_tokens([a + b + [9], a + b + [10]], 4) == 8
    assert shared_tokens([a + b + [9], [*a, 0, *b]], 4) == 4
    assert shared_tokens([a + b, a + b], 4) == 4  # the second's last block holds its last token
    assert shared_tokens([a, b + a + [1]], 4) == 0  # equal blocks after different ones are different
    assert shared_tokens([a[:3], a[:3]], 4) == 0


def brute_force(prompts: Sequence[list[int]], block: int) -> int:
    hits, seen = 0, set()
    for ids in prompts:
        starts = [tuple(ids[:end]) for end in range(block, len(ids) + 1, block)]
        hits += block * sum(start in seen and len(start) < len(ids) for start in starts)
        seen |= set(starts)
    return hits


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=8), st.integers(1, 3))
def test_shared_tokens_agree_with_brute_force(prompts: list[list[int]], block: int) -> None:
    assert shared_tokens(prompts, block) == brute_force(prompts, block)


def test_work_counts_shared_prompts_once_and_every_output(checked: Preflight) -> None:
    work = work_of(checked, ROWS, 2.0, resolve_limits(checked.job.engine, "cpu"))
    assert (work.prompt, work.output) == (100 * 40, 100 * 8)
    assert work.computed == 2 * (32 + 50 * 8)
    assert work.concurrent == 100
    assert work.steps == work.decode_steps == 8


def test_rows_whose_prompts_are_scored_share_nothing(checked: Preflight) -> None:
    scored = [replace(row, params=PARAMS.override({"prompt_logprobs": 0})) for row in ROWS[:20]]
    work = work_of(checked, [*scored, *ROWS[20:]], 1.0, resolve_limits(checked.job.engine, "cpu"))
    assert work.computed == 20 * 40 + 32 + 30 * 8


def test_time_is_that_of_the_steps_and_of_attention(checked: Preflight) -> None:
    limits = resolve_limits(checked.job.engine, "cpu")
    work = work_of(checked, [PreparedRow(0, [1] * 40, PARAMS)], 1.0, limits)
    pairs = 40 * 40 / 2 + 8 * (40 + 8 / 2)
    attention = pairs * PAIR / (2 * MATRICES * 1024 / 1e-1 / 2)
    steps = TIMES.seconds(40, 0) + 8 * TIMES.seconds(1, 1)
    assert duration(checked, work, limits, TIMES).seconds == pytest.approx(steps + attention)


def test_what_is_read_from_memory_counts_where_it_takes_longer(checked: Preflight) -> None:
    limits = resolve_limits(checked.job.engine, "cpu")
    work = work_of(checked, [PreparedRow(0, [1] * 40, PARAMS)], 1.0, limits)

    def seconds(memory_rate: float) -> float:
        found = duration(checked, work, limits, TIMES.model_copy(update={"memory_rate": memory_rate})).seconds
        assert found is not None
        return found

    assert seconds(1e15) == seconds(1e14)
    read = 8 * (40 + 8 / 2) * 2 * 3 * 2 * 16 * 4
    assert seconds(1e3) - seconds(1e4) == pytest.approx(read / 1e3 - read / 1e4)


def test_without_a_measurement_time_is_a_roofline(checked: Preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resolve_limits(checked.job.engine, "cpu")
    work = work_of(checked, [PreparedRow(0, [1] * 40, PARAMS)], 1.0, limits)
    monkeypatch.setattr(probe, "matmul_rate", lambda: 1.0)
    monkeypatch.setattr(probe, "memory_rate", lambda: 1e30)
    pairs = 40 * 40 / 2 + 8 * (40 + 8 / 2)
    flops = 2 * (48 * MATRICES + 8 * EMBEDDING) + pairs * PAIR
    assert duration(checked, work, limits, None).seconds == pytest.approx(flops)
    monkeypatch.setattr(probe, "memory_rate", lambda: 1e-3)
    tables = 1 if checked.model.config.get("tie_word_embeddings") else 2
    weights = 4 * (MATRICES + tables * EMBEDDING)
    assert duration(checked, work, limits, None).seconds == pytest.approx(8 * weights / 1e-3)


def test_what_a_run_expects_is_what_its_plan_says(checked: Preflight) -> None:
    limits = resolve_limits(checked.job.engine, "cpu", TIMES)
    expected = expect(checked, [*ROWS, PreparedRow(50, error="missing_value: x")], 51, limits, TIMES)
    assert expected is not None
    tokens, rate = expected
    assert tokens == pytest.approx((32 + 50 * 8 + 50 * 8) / 51)
    work = work_of(checked, ROWS, 1.0, limits)
    assert 51 * tokens / rate == pytest.approx(duration(checked, work, limits, TIMES).seconds)
    assert expect(checked, [PreparedRow(0, error="missing_value: x")], 1, limits, TIMES) is None
    assert expect(checked, [], 0, limits, TIMES) is None
    assert expect(checked, ROWS, 50, limits, None) is None


def test_a_probe_tells_a_rate() -> None:
    assert probe.matmul_rate() > 1e8
    assert probe.memory_rate() > 1e8
