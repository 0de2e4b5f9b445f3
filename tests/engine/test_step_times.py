"""How long steps take: measured once, kept, and what is chosen by it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from batchrun import Engine, SamplingParams
from batchrun.engine import calibrate, limits, step_times
from batchrun.engine.limits import resolve_limits
from batchrun.engine.scheduler import Limits
from batchrun.engine.step_times import StepTimes, find, subject
from batchrun.errors import JobError
from batchrun.job import EngineSpec, ModelSpec
from batchrun.model_files import resolve
from batchrun.models.families import model_config
from tests.engine.driver import load_decoder

SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(step_times, "cache_dir", lambda: tmp_path)  # the kernels stay where they were compiled
    return tmp_path / "calibration"


def times(layers: Mapping[int, float], head: Mapping[int, float] | None = None, **fields: Any) -> StepTimes:
    values: dict[str, Any] = {
        "subject": {"of": "a test"},
        "operations": "none",
        "threads": 1,
        "measured_at": 0.0,
        "vocab_size": 320,
        "memory_rate": 1e10,
    }
    return StepTimes(layers=dict(layers), head=dict(head or {16: 1e-9}), **(values | fields))


def per_token(costs: Mapping[int, float]) -> StepTimes:
    """Steps in which a token of each size costs so many microseconds."""
    return times({size: size * cost * 1e-6 for size, cost in costs.items()})


def chosen(measured: StepTimes | None, **options: Any) -> tuple[int, int]:
    bounds = resolve_limits(EngineSpec(**options), "cpu", measured)
    return bounds.max_num_seqs, bounds.max_num_batched_tokens


# ---- what is chosen


def test_without_a_measure_the_defaults_hold() -> None:
    assert chosen(None) == (256, 3072)
    assert resolve_limits(EngineSpec(), "cuda") == Limits(1024, 16384)


def test_equal_costs_and_noise_leave_the_defaults() -> None:
    assert chosen(per_token(dict.fromkeys(SIZES, 100.0))) == (256, 3072)
    noise = (130, 110, 103, 104, 99.5, 102, 103, 105)
    assert chosen(per_token(dict(zip(SIZES, noise, strict=True)))) == (256, 3072)


def test_the_smallest_of_the_clearly_faster_is_taken() -> None:
    falling = (400, 250, 200, 150, 120, 104, 102, 100)
    assert chosen(per_token(dict(zip(SIZES, falling, strict=True)))) == (1024, 3072)
    one_best = (400, 250, 200, 150, 100, 110, 120, 125)
    assert chosen(per_token(dict(zip(SIZES, one_best, strict=True)))) == (512, 1024)
    caches = (100, 100, 100, 110, 120, 120, 130, 140)  # small steps fit the processor's cache
    assert chosen(per_token(dict(zip(SIZES, caches, strict=True)))) == (256, 1024)


def test_many_sequences_keep_room_for_prompts() -> None:
    costs = (400, 250, 200, 150, 120, 100, 110, 120)
    assert chosen(per_token(dict(zip(SIZES, costs, strict=True)))) == (1024, 2048)


def test_the_output_projection_counts_for_sequences_alone() -> None:
    layers = {size: size * 1e-4 for size in SIZES}
    head = {16: 0.1, 1024: 0.1}  # the fewer steps the better
    assert chosen(times(layers, head)) == (1024, 3072)


def test_sequences_are_no_more_than_leave_logits_small() -> None:
    falling = per_token(dict(zip(SIZES, (400, 250, 200, 150, 120, 104, 102, 100), strict=True)))
    most = {
        vocab: chosen(falling.model_copy(update={"vocab_size": vocab}))[0]
        for vocab in (65_536, 65_537, 131_072, 131_073, 1_000_000)
    }
    assert most == {65_536: 1024, 65_537: 512, 131_072: 512, 131_073: 256, 1_000_000: 256}


def test_sizes_that_were_not_measured_promise_nothing() -> None:
    assert chosen(per_token({16: 1000.0, 64: 300.0, 128: 200.0})) == (256, 3072)
    assert chosen(per_token({16: 1000.0})) == (256, 3072)
    assert chosen(per_token({16: 400.0, 64: 250.0, 128: 200.0, 256: 150.0, 512: 120.0})) == (512, 3072)


def test_what_is_set_wins() -> None:
    falling = per_token(dict(zip(SIZES, (400, 250, 200, 150, 120, 100, 90, 70), strict=True)))
    assert chosen(falling) == (1024, 4096)
    assert chosen(falling, max_num_seqs=7, max_num_batched_tokens=70) == (7, 70)
    assert chosen(falling, max_num_seqs=7) == (7, 4096)
    assert chosen(falling, max_num_seqs=4000) == (4000, 8000)
    assert chosen(falling, max_num_batched_tokens=700) == (350, 700)
    assert chosen(falling, max_num_batched_tokens=1) == (1, 1)
    with pytest.raises(JobError, match=r"max_num_batched_tokens: 3 is below max_num_seqs \(4\)"):
        chosen(None, max_num_seqs=4, max_num_batched_tokens=3)


def test_seconds_between_and_beyond_what_was_measured() -> None:
    measured = times({16: 1.0, 64: 2.0, 128: 4.0}, {16: 0.5, 32: 1.0})
    assert measured.seconds(64, 0) == 2
    assert measured.seconds(96, 0) == 3
    assert measured.seconds(1, 0) == 1
    assert measured.seconds(256, 0) == 8
    assert measured.seconds(128, 64) == 6
    assert measured.seconds(0, 0) == 0


# ---- what is kept


def test_what_was_kept_is_found_again_and_nothing_else(own_cache: Path) -> None:
    kept = times({16: 0.25, 64: 1.5})
    assert find(kept.subject) == []
    kept.save()
    assert find(kept.subject) == [kept]
    assert find({"of": "another"}) == []
    assert [path.suffix for path in own_cache.iterdir()] == [".json"]


def test_engines_that_compute_differently_keep_what_each_measured() -> None:
    one = times({16: 0.25})
    others = [
        times({16: 0.5}, threads=2, measured_at=2.0),
        times({16: 0.5}, operations="others", measured_at=1.0),
        times({16: 0.5}, threads=2, operations="others", measured_at=-1.0),
    ]
    for each in (one, *others):
        each.save()
    assert find(one.subject) == [others[0], others[1], one, others[2]]
    again = one.model_copy(update={"layers": {16: 0.125}})
    again.save()
    assert find(one.subject) == [others[0], others[1], again, others[2]]


def test_of_two_measurements_the_faster_of_each_size_holds() -> None:
    early = times({16: 1.0, 64: 2.0, 128: 9.0}, {16: 0.5}, memory_rate=3.0)
    late = times({16: 0.5, 64: 3.0}, {16: 0.75, 64: 1.0}, memory_rate=2.0, measured_at=7.0)
    assert late.merged(early) == times(
        {16: 0.5, 64: 2.0, 128: 9.0}, {16: 0.5, 64: 1.0}, memory_rate=3.0, measured_at=7.0
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: text.replace("a test", "something else"),
        lambda text: text.replace("0.25", "-0.25"),
        lambda text: text.replace("0.25", "NaN"),
        lambda text: json.dumps(json.loads(text) | {"layers": {}}),
        lambda text: json.dumps(json.loads(text) | {"more": 1}),
        lambda text: "\0" * 100,
    ],
)
def test_a_damaged_or_foreign_file_is_passed_over(own_cache: Path, damage: Any) -> None:
    kept = times({16: 0.25, 64: 1.5})
    kept.save()
    (path,) = own_cache.iterdir()
    path.write_text(damage(path.read_text()))
    assert find(kept.subject) == []
    kept.save()
    assert find(kept.subject) == [kept]


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, own_cache: Path) -> None:
    own_cache.write_text("no directory")
    times({16: 0.25}).save()
    assert find({"of": "a test"}) == []


def test_times_are_of_a_processor_a_shape_numbers_and_threads(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(resolve(str(tiny_model)).config)

    def key(engine: dict[str, Any] | None = None, dtype: str = "float32", **model: Any) -> str:
        spec = ModelSpec(name_or_path="m", **model)
        return json.dumps(subject(spec, EngineSpec(**(engine or {})), config, dtype))

    plain = key()
    assert key({"max_num_seqs": 3, "kv_cache_memory": "1MiB"}, max_model_len=7) == plain
    others = [key({"num_threads": 1}), key({"num_threads": 2}), key(dtype="bfloat16"), key(reproducible=True)]
    others.append(key(kv_cache_dtype="int8"))
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    others.append(key())
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(step_times, "describe_cpu", lambda: "another")
        others.append(key())
    with monkeypatch.context() as patch:
        quota = tmp_path / "cpu.max"
        patch.setattr(step_times, "_PROCESSOR_QUOTA", quota)
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
        others.append(key())
        quota.write_text("max 100000\n")
        assert key() == others[-1]
        quota.write_text("150000 100000\n")
        others.append(key())
    assert len({plain, *others}) == len(others) + 1


# ---- what is measured


def options(**changes: Any) -> dict[str, Any]:
    return {"max_model_len": 64, "device": "cpu", "kv_cache_memory": "1MiB", "num_threads": 1} | changes


def test_an_engine_measures_once_and_goes_by_it(
    tiny_model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    measure = calibrate.measure
    monkeypatch.setattr(calibrate, "measure", lambda decoder: measured.append(decoder) or measure(decoder))
    Engine(str(tiny_model), **options()).close()
    (path,) = own_cache.iterdir()
    kept = StepTimes.model_validate_json(path.read_text())
    assert list(kept.layers) == list(calibrate.SIZES)
    assert list(kept.head) == list(calibrate.HEAD_SIZES)
    assert kept.threads == 1
    fast_at_512 = {size: size * (1e-6 if size == 512 else 2e-6) for size in SIZES}
    kept.model_copy(update={"layers": fast_at_512, "head": {16: 1e-9}}).save()
    engine = Engine(str(tiny_model), **options())
    engine.close()
    assert engine.limits == Limits(512, 3072)
    assert len(measured) == 1
    Engine(str(tiny_model), **options(num_threads=2)).close()
    assert len(measured) == 2
    path.unlink()
    kept.model_copy(update={"operations": "of another release"}).save()
    Engine(str(tiny_model), **options()).close()
    assert len(measured) == 3


def test_after_a_week_an_engine_measures_once_more(tiny_model: Path, own_cache: Path) -> None:
    Engine(str(tiny_model), **options()).close()
    (path,) = own_cache.iterdir()
    first = StepTimes.model_validate_json(path.read_text())
    old = first.model_copy(
        update={"measured_at": time.time() - 8 * 86400, "layers": {16: 1e-12, 64: 1e9}, "memory_rate": 1.0}
    )
    old.save()
    Engine(str(tiny_model), **options()).close()
    (again,) = find(first.subject)
    assert again.measured_at >= first.measured_at
    assert again.layers[16] == 1e-12
    assert again.layers[64] < 1
    assert again.memory_rate > 1
    Engine(str(tiny_model), **options()).close()
    assert find(first.subject) == [again]


def test_nothing_is_measured_where_all_is_set(tiny_model: Path, own_cache: Path) -> None:
    def engine_times(**bounds: int) -> StepTimes | None:
        engine = Engine(str(tiny_model), **options(**bounds))
        engine.close()
        return engine.step_times

    assert engine_times(max_num_seqs=2, max_num_batched_tokens=9) is None
    assert not own_cache.exists()
    measured = engine_times()
    assert measured is not None
    assert engine_times(max_num_seqs=2, max_num_batched_tokens=9) == measured


def test_an_engine_knows_its_times_where_they_cannot_be_kept(tiny_model: Path, own_cache: Path) -> None:
    own_cache.write_text("no directory")
    engine = Engine(str(tiny_model), **options())
    engine.close()
    assert engine.step_times is not None


def test_heads_are_measured_as_far_as_their_logits_are_small(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_LOGITS_BYTES", 128 * 320 * 4)
    _, head = calibrate.measure(load_decoder(tiny_model))
    assert list(head) == [16, 64, 128]


def test_measuring_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        return now

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(calibrate.time, "perf_counter", clock)
    works = {size: lambda size=size: work(size / 1024) for size in SIZES}  # as of a large model
    least = calibrate._least_seconds(works, 2.0)
    assert now <= 2.0
    assert least == pytest.approx({16: 1 / 64, 64: 1 / 16, 128: 1 / 8, 256: 1 / 4})
    now = 0.0
    assert calibrate._least_seconds({16: lambda: work(9), 64: lambda: work(36)}, 2.0) == {16: 9}


def test_measuring_moves_no_result(tiny_model: Path) -> None:
    """The model's weights, the random state of the process, and so every token, are what they were."""
    decoder = load_decoder(tiny_model)
    before = [(layer.input_norm.clone(), layer.qkv.weight.dequantize().clone()) for layer in decoder.layers]
    state = torch.get_rng_state()
    calibrate.measure(decoder)
    assert torch.equal(torch.get_rng_state(), state)
    for layer, (norm, weight) in zip(decoder.layers, before, strict=True):
        assert torch.equal(layer.input_norm, norm)
        assert torch.equal(layer.qkv.weight.dequantize(), weight)
    params = SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, logprobs=1, seed=3)
    outcomes = []
    for bounds in ({}, {"max_num_seqs": 2, "max_num_batched_tokens": 9}):
        engine = Engine(str(tiny_model), **options(reproducible=True, **bounds))
        prompts = [[n, n + 1, n + 2] * 5 for n in range(20)]
        results = sorted(engine.generate(prompts, params), key=lambda result: result.index)
        outcomes.append([(result.token_ids, result.logprobs) for result in results])
        engine.close()
    assert outcomes[0] == outcomes[1]
