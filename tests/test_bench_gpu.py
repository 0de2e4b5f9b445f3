"""The GPU benchmark as far as it goes without a GPU: all but the clock on the device and the kernels themselves."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend

from batchrun.bench.gpu import checks, floors, roofline, steps, stress, timing
from batchrun.bench.gpu import engine as ends
from batchrun.bench.gpu.answers import NAMES, compare_answers
from batchrun.bench.gpu.budget import PARTS, Budget, Line, Unit, turns
from batchrun.bench.gpu.floors import Ceilings, Work
from batchrun.bench.gpu.inputs import Inputs
from batchrun.bench.gpu.random_model import SHAPES, llama, random_engine, random_weights
from batchrun.bench.gpu.results import Results
from batchrun.bench.gpu.supervisor import supervise, worker_command
from batchrun.bench.gpu.worker import run_units
from batchrun.cli import main
from batchrun.engine.memory import parameter_count
from batchrun.errors import JobError
from batchrun.job import KVCacheDType
from batchrun.models.families import model_config
from batchrun.ops import torch_ops

CPU = torch.device("cpu")
SMALL = checks.Scale(divisor=16, hidden=64, intermediate=96, vocabulary=1000)
TINIEST = checks.Scale(divisor=256, hidden=64, intermediate=96, vocabulary=300)
H200 = Ceilings(4.3e12, 790e12)
TINY = llama(64, 96, 2, 4, 2, vocab_size=300)
FEW = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "kv_cache_memory": "8MiB", "num_threads": 1}


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- floors


@pytest.mark.parametrize(
    ("name", "microseconds"),
    [
        ("prefill B8 S4096 causal", 1392),
        ("chunk 2048 at 8k context, B1", 305),
        ("decode B1 32k", 31),
        ("decode B64 4k", 250),
        ("decode B256 1k", 251),
        ("decode B256 1k, FP8 KV", 126),
        ("verify q=8, B64 4k", 252),
        ("28672x8192 at M=16, W4", 29),
        ("28672x8192 at M=16, FP8", 55),
        ("28672x8192 at M=16, bfloat16 (torch.mm)", 110),
        ("28672x8192 at M=256, W4", 152),
        ("28672x8192 at M=256, FP8", 86),
        ("28672x8192 at M=256, bfloat16 (torch.mm)", 152),
        ("RMSNorm + residual T8192 H4096", 62),
        ("SiLU*mul T8192 I14336", 164),
        ("RoPE + KV write T8192", 47),
        ("sampling B256 V128256", 31),
    ],
)
def test_floors_are_those_of_the_design(name: str, microseconds: float) -> None:
    (entry,) = (each for each in roofline.entries() if each.name == name)
    assert entry.work.seconds(H200) * 1e6 == pytest.approx(microseconds, rel=0.03)


def test_a_floor_is_that_of_the_scarcer_resource() -> None:
    assert Work(10, 10).seconds(Ceilings(5, 10)) == 2
    assert Work(10, 40).seconds(Ceilings(5, 10)) == 4
    assert Work(1, 2) + Work(3, 4) == Work(4, 6)


def test_causal_pairs_are_counted_one_by_one() -> None:
    rows = [(3, 3), (2, 7), (1, 5)]
    pairs = sum(length - count + 1 + i for count, length in rows for i in range(count))
    assert floors.attention(rows, 4, 2, 8).flops == 4 * pairs * 4 * 8
    # Of 15 keys, the 3 that all rows share are read once.
    assert floors.attention(rows, 4, 2, 8).bytes - floors.attention(rows, 4, 2, 8, shared=3).bytes == 2 * 6 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (roofline.Target("share", 0.5), True),
        (roofline.Target("share", 0.6), False),
        (roofline.Target("us", 2), True),
        (roofline.Target("us", 1.9), False),
        (roofline.Target("TFLOP/s", 0.5), True),
        (roofline.Target("TFLOP/s", 0.6), False),
        (roofline.Target("x", 1.15, "other"), True),
        (roofline.Target("x", 0.9, "other"), False),
        (roofline.Target("x", 0.9, "absent"), None),
    ],
)
def test_a_target_is_judged(target: roofline.Target, met: bool | None) -> None:
    assert target.met(2e-6, 1e-6, 1e6, {"other": 2e-6}) is met


# ---- time


def test_parts_share_the_time_and_leave_the_rest_to_the_next() -> None:
    clock = FakeClock()
    budget = Budget(48.0, list(PARTS), clock)
    assert budget.left("checks") == pytest.approx(13)
    clock.now += 5
    assert budget.left("stress") == pytest.approx(11)
    clock.now += 20
    assert budget.left("stress") < 0 < budget.left("roofline")
    assert budget.left("engine") == budget.patience("engine") == pytest.approx(23)
    assert budget.patience("roofline") == pytest.approx(21)  # no longer than the end of all
    assert Budget(48.0, ["stress"], clock).left("stress") == pytest.approx(48)


def test_units_share_what_is_left_by_weight() -> None:
    clock = FakeClock()
    units = [
        Unit("a", lambda _: (), weight=2),
        Unit("b", lambda _: (), weight=1),
        Unit("c", lambda _: (), least=7),
        Unit("d", lambda _: ()),
    ]
    shares = []
    for unit, share in turns(units, 40, clock):
        shares.append((unit.name, share))
        clock.now += {"a": 22, "b": 6, "c": 0, "d": 0}[unit.name]
    assert shares == [("a", 16), ("b", 6), ("c", None), ("d", 12)]
    assert [share for _, share in turns(units[:2], 0, clock)] == [None, None]


def test_a_unit_that_fails_is_a_result_and_the_rest_goes_on() -> None:
    def broken(_: float) -> Iterator[Line]:
        yield Line("first", "passed", {"error": math.inf})
        raise ValueError("out of luck")

    said: list[dict[str, Any]] = []
    units = [Unit("a", broken), Unit("b", lambda _: [Line("b", "passed")]), Unit("c", lambda _: (), least=1e9)]
    run_units(units, 0, 1000.0, said.append, lambda: None)
    assert json.loads(json.dumps(said, allow_nan=False))[0] == {"units": ["a", "b", "c"]}
    lines = [each["line"] for each in said if "line" in each]
    assert [(line["name"], line["status"]) for line in lines] == [
        ("first", "passed"), ("a", "failed"), ("b", "passed"), ("c", "left out"),
    ]  # fmt: skip
    assert lines[1]["figures"] == {"why": "ValueError: out of luck"}
    assert said[-1] == {"done": None}

    def dead() -> None:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        run_units(units, 0, 1000.0, said.append, dead)


# ---- results and workers

_FAKE_WORKER = """
import json, sys, time
part, first = sys.argv[1], int(sys.argv[2])
def say(**message): print(json.dumps(message), flush=True)
say(environment={"card": "none", "seed": 3})
say(units=["a", "b", "c", "d"])
for index, name in list(enumerate("abcd"))[first:]:
    say(unit=index, patience=0.5 if part == "stress" else 30)
    BODY
    say(line={"name": name, "status": "passed", "figures": {"error": 0.5}})
say(done=None)
"""


def fake_worker(folder: Path, body: str = "pass") -> Callable[[str, int, float], list[str]]:
    path = folder / "worker.py"
    path.write_text(_FAKE_WORKER.replace("BODY", body), encoding="utf-8")
    return lambda part, first, seconds: [sys.executable, "-S", str(path), part, str(first), str(seconds)]


def supervised(parts: list[str], command: Callable[[str, int, float], list[str]], seconds: float = 100.0) -> Results:
    results = Results(None, None, lambda _: None)
    supervise(parts, Budget(seconds, parts), results, command)
    return results


def statuses(results: Results, part: str) -> list[tuple[str, str]]:
    return [(line.name, line.status) for line in results.lines[part]]


def test_parts_run_in_order(tmp_path: Path) -> None:
    results = supervised(["roofline", "checks"], fake_worker(tmp_path))
    assert list(results.lines) == ["roofline", "checks"]
    assert statuses(results, "checks") == [(name, "passed") for name in "abcd"]
    assert results.environment == {"card": "none", "seed": 3}
    assert results.failed == 0


def test_a_worker_that_dies_costs_one_unit(tmp_path: Path) -> None:
    results = supervised(["checks"], fake_worker(tmp_path, "if name == 'b': sys.exit(9)"))
    assert statuses(results, "checks") == [("a", "passed"), ("b", "failed"), ("c", "passed"), ("d", "passed")]
    assert results.lines["checks"][1].figures == {"why": "its process ended with exit code 9"}
    assert results.failed == 1


def test_a_worker_that_hangs_is_stopped(tmp_path: Path) -> None:
    results = supervised(["stress"], fake_worker(tmp_path, "if name == 'd': time.sleep(100)"))
    assert statuses(results, "stress")[-1] == ("d", "failed")
    assert results.lines["stress"][-1].figures == {"why": "took too long and was stopped"}


def test_a_worker_that_does_not_start_ends_its_part_alone(tmp_path: Path) -> None:
    good = fake_worker(tmp_path)
    results = supervised(["checks", "stress"], lambda part, *rest: ["false"] if part == "checks" else good(part, *rest))
    assert statuses(results, "checks") == [("worker", "failed")]
    assert len(results.lines["stress"]) == 4


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    results = supervised(["checks"], fake_worker(tmp_path, "time.sleep(0.3); name == 'b' and sys.exit(1)"), 0.5)
    assert statuses(results, "checks") == [("a", "passed"), ("b", "failed"), ("unit 3 and all after it", "left out")]


def test_a_real_worker_without_a_gpu_is_a_failure() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    results = supervised(["roofline"], partial(worker_command, 1))
    assert statuses(results, "roofline") == [("worker", "failed")]
    assert re.search("CUDA|NVIDIA", results.lines["roofline"][0].figures["why"])


def test_files_are_whole_at_every_moment(tmp_path: Path) -> None:
    paths = tmp_path / "out.json", tmp_path / "out.md"
    results = Results(*paths, lambda _: None)
    assert json.loads(paths[0].read_text()) == {"complete": False, "environment": {}, "lines": []}
    results.describe_environment({"card": "none", "seed": 3})
    results.add("checks", Line("a | b", "passed", {"error": 0.5, "tolerance": 1}))
    results.add("checks", Line("c", "failed", {"why": "no\nluck"}))
    results.add("roofline", Line("d", "measured", {"us": 12345.6, "share": 0.75, "met": True, "x": None}))
    results.finish()
    read = json.loads(paths[0].read_text())
    assert read["complete"]
    assert read["lines"][0] == {
        "part": "checks", "name": "a | b", "status": "passed", "figures": {"error": 0.5, "tolerance": 1},
    }  # fmt: skip
    text = paths[1].read_text().splitlines()
    assert "card none, seed 3" in text
    assert "| a \\| b | passed | 0.5 | 1 |" in text
    assert "| c | failed | no luck |" in text
    assert "| d | measured | 12,346 | 0.75 | yes |  |" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md"]


def test_a_killed_run_leaves_valid_files(tmp_path: Path) -> None:
    """Killed again and again at no particular moment, while its fake part gives results as fast as they can be kept."""
    script = tmp_path / "run.py"
    body = "[say(line={'name': f'{name}{i}', 'status': 'passed', 'figures': {'i': i}}) for i in range(500)]"
    fake_worker(tmp_path, body)
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from batchrun.bench.gpu.budget import Budget
        from batchrun.bench.gpu.results import Results
        from batchrun.bench.gpu.supervisor import supervise
        results = Results(Path("out.json"), Path("out.md"), print)
        work = lambda part, first, seconds: [sys.executable, {str(tmp_path / "worker.py")!r}, part, str(first), "9"]
        supervise(["checks"], Budget(100, ["checks"]), results, work)
        """)
    )
    for extra in (1, 37, 150):
        with subprocess.Popen(
            [sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(extra + 1):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        read = json.loads((tmp_path / "out.json").read_text())
        assert not read["complete"]
        names = [line["name"] for line in read["lines"]]
        assert names == [f"a{i}" for i in range(len(names))]
        assert len(names) >= extra
        rows = [line for line in (tmp_path / "out.md").read_text().splitlines() if line.startswith("| a")]
        assert abs(len(rows) - len(names)) <= 1
        assert rows == [f"| a{i} | passed | {i} |" for i in range(len(rows))]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be written: No such file or directory"):
        Results(tmp_path / "no" / "out.json", None, lambda _: None)


# ---- checks


def complete_ops(**replaced: Callable[..., Any]) -> Any:
    """The reference operations, some of them replaced."""
    return SimpleNamespace(**{name: getattr(torch_ops, name) for name in torch_ops.__all__} | replaced)


def run_checks(ops: Any, wanted: str = "") -> dict[str, Line]:
    chosen = [check for check in checks.all_checks(SMALL) if check.name.startswith(wanted)]
    lines = [line for check in chosen for line in checks.check_unit(check, ops, CPU, 11).run(60)]
    assert [line.name for line in lines] == [check.name for check in chosen]
    return {line.name: line for line in lines}


def test_the_reference_operations_pass_every_check() -> None:
    lines = run_checks(complete_ops())
    assert {line.status for line in lines.values()} == {"passed"}, lines
    assert len(lines) > 60
    assert len({check.name for check in checks.all_checks(checks.FULL)}) == len(lines)


def nearly(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """An operation with its result changed."""
    right = getattr(complete_ops(), name)
    return lambda *arguments, **options: change(right(*arguments, **options))


def at_one_place(change: float) -> Callable[[Any], Any]:
    def changed(result: torch.Tensor) -> torch.Tensor:
        result = result.clone()
        result.view(-1)[result.numel() // 2] += change
        return result

    return changed


def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any, **options: Any) -> Any:
    """Attention with a mask that is off by one: every row seems one position longer."""
    shifted = SimpleNamespace(cu_q=batch.cu_q, kv_len=batch.kv_len + 1, block_table=batch.block_table)
    longer = torch.nn.functional.pad(batch.block_table, (0, 1))
    shifted.block_table = longer
    return torch_ops.attention(q, k, v, shifted, **options)  # type: ignore[arg-type]


def without_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, **options: Any) -> Any:
    return complete_ops().add_rms_norm(x, residual.clone(), weight, eps, **options)


def unwritten_kv(*arguments: Any, **options: Any) -> Any:
    q, cos_sin, positions, slots, k_cache, v_cache = arguments
    slots = slots.clone()
    slots[0] = 0  # one token's KV is lost
    return torch_ops.rope_kv_write(q, cos_sin, positions, slots, k_cache, v_cache, **options)


def swapped_nibbles(*arguments: Any, **options: Any) -> Any:
    *others, k_cache, v_cache = arguments
    q = torch_ops.rope_kv_write(*others, k_cache, v_cache, **options)
    if k_cache.dtype == torch.uint8:
        v_cache.copy_(v_cache << 4 | v_cache >> 4)
    return q


def swapped_scales(*arguments: Any, kv_scales: Any, **options: Any) -> Any:
    """A token's scales are those of another head."""
    turned = tuple(each.roll(1, 1) for each in kv_scales) if kv_scales else None
    return torch_ops.attention(*arguments, kv_scales=turned, **options)


def unscaled_values(*arguments: Any, kv_scales: Any, **options: Any) -> Any:
    k_scales, v_scales = kv_scales
    return torch_ops.attention(*arguments, kv_scales=(k_scales, torch.ones_like(v_scales)), **options)


@pytest.mark.parametrize(
    ("operation", "wrong", "caught"),
    [
        ("rms_norm", nearly("rms_norm", at_one_place(0.5)), "rms_norm, bfloat16"),
        ("rms_norm", nearly("rms_norm", at_one_place(math.nan)), "rms_norm, bfloat16"),
        ("add_rms_norm", without_residual, "add_rms_norm, bfloat16"),
        ("silu_mul", nearly("silu_mul", at_one_place(0.5)), "silu_mul, bfloat16"),
        ("gelu_mul", nearly("silu_mul", lambda result: result), "gelu_mul, bfloat16"),
        ("rope_kv_write", unwritten_kv, "rope_kv_write, bfloat16"),
        ("rope_kv_write", nearly("rope_kv_write", lambda q: -q), "rope_kv_write with norms, bfloat16"),
        ("rope_kv_write", unwritten_kv, "rope_kv_write, int8 KV"),
        ("rope_kv_write", swapped_nibbles, "rope_kv_write, int4 KV"),
        ("attention", swapped_scales, "attention, int8 KV"),
        ("attention", swapped_scales, "attention, int4 KV"),
        ("attention", unscaled_values, "attention, fp8 KV"),
        ("attention", unmasked, "attention, mixed, bfloat16"),
        ("attention", nearly("attention", at_one_place(0.3)), "attention, prefill, bfloat16"),
        ("linear", nearly("linear", at_one_place(0.5)), "linear, W4, 17 rows, bfloat16"),
        ("linear", lambda x, weight, bias: torch_ops.linear(x, weight), "linear, FP8, 17 rows, bfloat16"),
        ("argmax", lambda logits: logits.shape[1] - 1 - logits.flip(1).argmax(-1), "argmax of equals, infinities and"),
        ("argmax", nearly("argmax", lambda chosen: chosen.int()), "argmax"),
        ("token_logprobs", nearly("token_logprobs", lambda r: (r[0], r[1].flip(1), r[2])), "token_logprobs, 20 beside"),
        ("token_logprobs", nearly("token_logprobs", lambda r: (r[0] + 1e-3, *r[1:])), "token_logprobs, 0 beside"),
    ],
)
def test_a_wrong_operation_is_reported(operation: str, wrong: Callable[..., Any], caught: str) -> None:
    lines = run_checks(complete_ops(**{operation: wrong}), caught)
    assert lines
    assert {line.status for line in lines.values()} == {"failed"}, lines


@pytest.mark.parametrize(
    "change",
    [
        lambda options: {"top_k": 0 * options["top_k"], "top_p": 0 * options["top_p"] + 1},  # filters nothing
        lambda options: {"position": options["position"] + 1},  # another token's noise
        lambda options: {"key": options["key"] & 0xFFFFFFFF},  # half of the key
        lambda options: {"temperature": options["temperature"] * 1.5},
    ],
)
def test_a_wrong_draw_is_reported(change: Callable[[Any], Any]) -> None:
    def draw(logits: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch_ops.draw(logits, **(options | change(options)))

    assert run_checks(complete_ops(draw=draw), "draw, filtered")["draw, filtered"].status == "failed"


def test_a_row_that_is_not_numbers_has_to_be_told() -> None:
    lines = run_checks(complete_ops(draw=nearly("draw", lambda chosen: chosen.clamp(min=0))), "draw")
    assert {line.status for line in lines.values()} == {"failed"}


def test_the_seed_makes_the_inputs() -> None:
    def numbers(seed: int) -> torch.Tensor:
        call = Inputs(complete_ops(), CPU, seed).attention(
            SMALL.rows((1, 500), (20, 40)), checks.LLAMA_8B, torch.float32
        )
        return torch.cat([call.arguments[0].flatten(), call.arguments[3].block_table.flatten()])

    assert numbers(1).equal(numbers(1))
    assert not numbers(1).equal(numbers(2))


# ---- stress


def test_calls_that_agree_pass_and_others_do_not() -> None:
    for name, make in stress.stressed(TINIEST).items():
        (line,) = stress.stress_unit(name, make, complete_ops(), CPU, 5).run(0)
        assert (line.name, line.status) == (name, "passed")
        assert line.figures == {"calls": 25, "calls that differ": 0}
    count = iter(range(10**6))

    def racing(*arguments: Any, **options: Any) -> torch.Tensor:
        return torch_ops.silu_mul(*arguments, **options) + (2.0**-9 if next(count) == 13 else 0)

    make = stress.stressed(TINIEST)["silu_mul"]
    (line,) = stress.stress_unit("silu_mul", make, complete_ops(silu_mul=racing), CPU, 5).run(0)
    assert (line.status, line.figures["calls that differ"]) == ("failed", 1)


def test_a_call_leaves_its_memory_as_it_was() -> None:
    call = Inputs(complete_ops(), CPU, 1).add_rms_norm(3, 8, torch.float32)
    before = call.written[0].clone()
    _, after = call.outputs(complete_ops())
    assert call.written[0].equal(before)
    assert after.allclose(before + call.arguments[0])


# ---- roofline


def wall_clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_every_line_of_the_table_on_a_cpu() -> None:
    table = roofline.Table(complete_ops(), CPU, 3, wall_clock, shrink=64)
    lines = {line.name: line for unit in table.units() for line in unit.run(60)}
    assert {line.status for line in lines.values()} == {"measured"}
    for entry in roofline.entries(64):
        line = lines[entry.name]
        assert line.figures["floor us"] == entry.work.seconds(table.ceilings) * 1e6
        assert ("H200 target" in line.figures) == bool(entry.targets)
    prefill = lines["prefill B8 S4096 causal"].figures
    assert isinstance(prefill["flash us"], float)  # torch's own on this device takes the same inputs
    assert prefill["met"] == "not known" or isinstance(prefill["cuDNN us"], float)
    assert "us" in lines["28672x8192 at M=16, bfloat16 (torch.mm)"].figures


def test_torchs_attention_computes_the_same() -> None:
    """What is timed beside a kernel is the same work: a row of one block has its keys and values in order."""
    rows = [checks.Row(6, 6)] * 2
    call = Inputs(complete_ops(), CPU, 1).attention(rows, checks.LLAMA_8B, torch.float32, block_size=6)
    beside = roofline._dense_attention(rows, SDPBackend.MATH, call)
    assert isinstance(beside, partial)
    _, k_cache, v_cache, batch = call.arguments
    held = batch.block_table[:, 0].long()
    (theirs,) = (beside.func(k_cache[held], v_cache[held]).transpose(1, 2).flatten(0, 1),)
    assert theirs.allclose(call(torch_ops), atol=1e-5)


def test_ceilings_are_bytes_and_products_by_time() -> None:
    found = timing.measure_ceilings(CPU, lambda call: (call(), 0.5)[1], copied=1000, size=16)
    assert found == Ceilings(2 * 1000 / 0.5, 2 * 16**3 / 0.5)


# ---- the engine


@pytest.mark.parametrize(("shape", "billions"), [("8B", 8.03), ("1B", 1.236)])
def test_the_shapes_are_those_of_the_models(shape: str, billions: float) -> None:
    config = SHAPES[shape]
    source = random_weights(model_config(config))
    total = sum(math.prod(source[name].shape) for name in source.names())
    assert total / 1e9 == pytest.approx(billions, rel=1e-3)
    norms = (2 * config["num_hidden_layers"] + 1) * config["hidden_size"]
    assert total == sum(parameter_count(config)) + norms


def test_a_random_engine_generates() -> None:
    engine = random_engine(TINY, 4, device="cpu", dtype="float32", max_model_len=64, **FEW)
    try:
        weight = engine.executor.model.layers[0].gate_up.weight.dequantize()
        assert weight.std() == pytest.approx(0.02, rel=0.05)
        results = list(engine.generate([[1, 2, 3], [5] * 20]))
        assert all(result.error is None and result.token_ids for result in results)
    finally:
        engine.close()


def setting(**changed: Any) -> ends.Setting:
    fields: dict[str, Any] = {
        "device": CPU,
        "seed": 5,
        "ceilings": Ceilings(1e10, 1e10),
        "profiler": lambda run: (run(), [steps.Kernel("gemm", 0, 10), steps.Kernel("_attend", 15, 20)])[1],
        "shapes": {"8B": TINY, "tied": llama(64, 96, 2, 4, 2, vocab_size=300, tie_word_embeddings=True)},
        "loads": (ends.Load(12, 12, 6, 3), ends.Load(40, 3, 4, 2)),
        "steps": ends.Load(20, 30, 5, 1),
        "dtype": "float32",
        "options": FEW,
    }
    return ends.Setting(**(fields | changed))


def test_the_engine_end_to_end_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ends.PUBLISHED, ("8B", "12/12"), 27_911)
    plain, kept, *units = ends.Ends(setting()).units()
    assert (plain.name, kept.name) == ("answers of a small model", "answers of a small model, FP8 KV")
    lines = [line for unit in units for line in unit.run(60)]
    assert {line.status for line in lines} == {"measured"}
    assert [unit.name for unit in units][:5] == [
        "8B shape, 12/12", "8B shape, 40/3", "8B shape, steps", "8B shape, 12/12, transformers", "tied shape, 12/12",
    ]  # fmt: skip
    first = lines[0].figures
    assert (first["rows"], first["finished"], first["preemptions"]) == (6, 6, 0)
    assert first["output tok/s"] * first["seconds"] == pytest.approx(72)
    assert first["prompt and output tok/s"] * first["seconds"] == pytest.approx(6 * 24 - 6)  # the last is not computed
    assert first["TensorRT-LLM FP8, published, tok/s"] == 27_911
    (peer,) = (line.figures for line in lines if line.name == "8B shape, 12/12, transformers")
    assert peer["batchrun / transformers"] == pytest.approx(first["output tok/s"] / peer["output tok/s"])
    prompts, decoding = (line.figures for line in lines if line.name.startswith("8B shape, 5 rows"))
    assert decoding["tokens a step"] == 5
    assert prompts["tokens a step"] > 5
    assert (prompts["steps"], decoding["steps"]) == (4, 16)


@pytest.mark.parametrize("kept", NAMES)
def test_answers_are_compared(kept: KVCacheDType, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = compare_answers(CPU, 3, kept)
    assert line.name == NAMES[kept]
    assert (line.status, line.figures["like torch's"] >= 46, line.figures["rows"]) == ("passed", True, 48)
    draw = torch_ops.draw
    monkeypatch.setattr(torch_ops, "draw", lambda logits, **how: draw(logits, **how | {"position": how["key"]}))
    (line,) = compare_answers(CPU, 3, kept)
    assert (line.status, line.figures["like the run before"]) == ("failed", 48)


def test_a_run_that_is_too_slow_is_cut() -> None:
    clock = FakeClock()

    def slow() -> float:
        clock.now += 1
        return clock.now

    part = ends.Ends(setting(clock=slow))
    _, _, unit, *_ = part.units()
    (line,) = unit.run(5.0)
    assert line.status == "cut"
    assert line.figures["finished"] < 6
    assert line.figures["output tok/s"] > 0
    (line,) = unit.run(1e9)  # and leaves nothing behind
    assert (line.status, line.figures["finished"]) == ("measured", 6)


def test_the_published_figures_stand_beside_the_8b_shape() -> None:
    assert {name: ends.PUBLISHED.get(("8B", name)) for name in (load.name for load in ends.LOADS)} == {
        "128/128": 27_911, "1000/1000": 17_744, "2048/128": None,
    }  # fmt: skip


def test_figures_of_steps() -> None:
    kernels = [
        steps.Kernel("void nvjet_gemm_x", 0, 400),
        steps.Kernel("_attend", 300, 500),
        steps.Kernel("Memcpy", 800, 1000),
    ]
    work = {"linear": [Work(100, 0), Work(0, 300)], "attention": [Work(50, 0)]}
    shown = steps.figures(kernels, [work, work], Ceilings(1e6, 1e6))
    assert shown["ms a step"] == pytest.approx(0.5)
    assert shown["idle"] == pytest.approx(0.3)
    assert shown["floor ms"] == pytest.approx(0.45)
    assert shown["share"] == pytest.approx(0.9)
    assert (shown["linear ms"], shown["attention ms"], shown["other ms"]) == pytest.approx((0.2, 0.1, 0.1))
    assert (shown["linear floor ms"], shown["attention floor ms"]) == pytest.approx((0.4, 0.05))
    assert "other floor ms" not in shown
    assert steps.figures([], [work], Ceilings(1, 1)) == {}


def test_every_kernel_of_ours_is_of_some_kind() -> None:
    pytest.importorskip("triton")
    folder = Path(import_module("batchrun.kernels.gpu").__file__ or "").parent
    sources = "\n".join(path.read_text() for path in folder.glob("*.py"))
    launched = set(re.findall(r"^ +launch\(\s*(\w+),", sources, re.MULTILINE)) - {"kernel"}
    assert len(launched) >= 10
    linear = {name for name in launched if steps.kind_of(name) == "linear"}
    assert linear == {
        "plane_product_kernel",
        "byte_product_kernel",
        "sum_parts_kernel",
        "quantize_kernel",
        "unpack_kernel",
    }
    assert {name for name in launched if steps.kind_of(name) == "other"} == set()
    assert [steps.kind_of(name) for name in ("merge_kernel", "_merge", "Memcpy", "nvjet_tst")] == [
        "sampling", "attention", "other", "linear",
    ]  # fmt: skip


def test_the_floor_of_a_step_is_that_of_its_operations() -> None:
    config = model_config(SHAPES["8B"])
    decode = steps.step_work(config, [(1, 1024, True)] * 256)
    seconds = {kind: sum(work.seconds(H200) for work in operations) for kind, operations in decode.items()}
    assert seconds["attention"] == pytest.approx(32 * 251e-6, rel=0.01)
    matrix, _ = parameter_count(SHAPES["8B"])
    head = 128_256 * 4096
    assert sum(work.flops for work in decode["linear"]) == 2 * 256 * (matrix + head)
    prompts = steps.step_work(config, [(8192, 8192, False)])
    assert sum(work.bytes for work in prompts["sampling"]) == 0
    assert prompts["elementwise"][0] == floors.add_rms_norm(8192, 4096)


def test_kernels_are_read_from_a_profile() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    found = steps.kernels_of(profile.events() or (), "CPU")
    assert any(kernel.name == "aten::mm" and kernel.end > kernel.start for kernel in found)
    assert steps.kernels_of(profile.events() or (), "CUDA") == []


# ---- the command


def test_without_a_gpu_the_command_says_so_before_anything_else(tmp_path: Path) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import batchrun.cli as cli; "
    arguments = ["bench", "gpu", "--json", "out.json"]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}cli.main({arguments})"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "Error: bench gpu measures a GPU, and there is none to use "
        "(engine.device: cuda cannot be used: CUDA_VISIBLE_DEVICES hides every GPU)\n"
    )
    assert done.stdout == "False\n"  # no torch
    assert not list(tmp_path.iterdir())


def test_the_command_reports_and_counts_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun.engine.memory._why_no_cuda", lambda: None)
    for body, code in (("pass", 0), ("if name == 'b': sys.exit(9)", 1)):
        work = fake_worker(tmp_path, body)
        monkeypatch.setattr("batchrun.bench.gpu.worker_command", lambda seed, *rest, work=work: work(*rest))
        arguments = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md"), "--seconds", "60"]
        result = CliRunner().invoke(main, ["bench", "gpu", *arguments])
        assert result.exit_code == code, result.output
        assert "checks: a: passed  error 0.5" in result.output
        read = json.loads((tmp_path / "out.json").read_text())
        assert read["complete"]
        assert {line["part"] for line in read["lines"]} == set(PARTS)
        assert "## engine" in (tmp_path / "out.md").read_text()
    result = CliRunner().invoke(main, ["bench", "gpu", "--only", "stress"])
    assert {line.partition(":")[0] for line in result.output.splitlines()} == {"card none, seed 3", "stress"}


def test_help_of_both_commands() -> None:
    files, gpu = (CliRunner().invoke(main, ["bench", *more, "--help"]).output for more in ([], ["gpu"]))
    assert "bench [OPTIONS] FILE|JOB" in files
    assert "batchrun bench gpu" in files
    assert "bench gpu [OPTIONS]" in gpu
    assert all(part in gpu for part in PARTS)
