"""Measurements: both sides do the same work, a peer that fails costs a note, and an interval that is one."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import click
import gguf
import psutil
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from batchrun.bench import run_bench
from batchrun.bench.breakdown import PARTS, Clock, measure_breakdown
from batchrun.bench.engine_side import EngineSide
from batchrun.bench.export import write_gguf
from batchrun.bench.peer_worker import batch_sizes
from batchrun.bench.peers import PEERS, PeerError, PeerSide
from batchrun.bench.report import median_interval
from batchrun.bench.workload import Workload, bench_job, read_workload
from batchrun.cli import bench, main
from batchrun.errors import JobError
from batchrun.job import EngineSpec, ModelSpec
from batchrun.model_files import resolve
from batchrun.weights.source import open_weights
from batchrun.weights.write import write_directory
from tests import gguf_files
from tests.jobs import write_rows
from tests.processes import wait_until_ended

ROWS = [{"prompt": "Hello there", "max_tokens": 6}, {"prompt": "Hello you"}, {"prompt": "A fox", "max_tokens": 600}]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("bench") / "rows.jsonl", [{**row, "max_tokens": 6} for row in ROWS])


@pytest.fixture(scope="module")
def side(tiny_model: Path) -> Iterator[EngineSide]:
    workload = Workload([[1, 2, 3], [1, 2, 4, 5], [9] * 40], [6, 3, 5], 512)
    model = ModelSpec(name_or_path=str(tiny_model), dtype="float32")
    made = EngineSide(resolve(str(tiny_model)), model, EngineSpec(kv_cache_memory="32MiB", num_threads=1), workload)
    yield made
    made.close()


def scripted_python(folder: Path, *lines: str) -> str:
    """A program that stands where a peer's Python would, and runs these lines of shell."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def eight_bits(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.F32 if "norm" in name else gguf.GGMLQuantizationType.Q8_0


# ---- the interval


@pytest.mark.parametrize(
    ("count", "ranks"),
    [(1, None), (5, None), (6, (1, 6)), (7, (1, 7)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (20, (6, 15))],
)
def test_the_interval_is_that_of_the_sign_test(count: int, ranks: tuple[int, int] | None) -> None:
    values = [float(rank) for rank in range(1, count + 1)]
    random.Random(count).shuffle(values)
    assert median_interval(values) == ranks


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        interval = median_interval([draw.expovariate(1.0) for _ in range(9)])
        assert interval is not None
        held += interval[0] <= 0.6931 <= interval[1]
    assert held / 2000 == pytest.approx(1 - 2 * 10 / 512, abs=0.01)


# ---- batchrun's side


def test_a_pass_generates_every_token_from_an_empty_cache(side: EngineSide) -> None:
    first, second = side.run(), side.run()
    assert [len(ids) for ids in first.outputs] == [6, 3, 5]
    assert first.outputs == second.outputs
    assert first.details == second.details
    assert first.peak_bytes > 50 << 20
    assert side.load_seconds > 0


def test_the_breakdown_adds_up_and_leaves_the_engine_as_it_was(side: EngineSide) -> None:
    ops = side.engine.executor.model.ops
    before = side.run().outputs
    shares = measure_breakdown(side)
    assert tuple(shares) == PARTS
    assert all(share > 0 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1)
    assert side.engine.executor.model.ops is ops
    assert side.run().outputs == before


def test_what_runs_within_a_part_belongs_to_it() -> None:
    clock = Clock()
    linear = clock.timed("linear", lambda: 1)
    assert clock.timed("head", lambda: linear() + linear())() == 2
    assert list(clock.seconds) == ["head"]
    linear()
    assert list(clock.seconds) == ["head", "linear"]


def test_batchrun_alone(rows: Path, tiny_model: Path) -> None:
    arguments = [
        "bench",
        str(rows),
        "--model",
        str(tiny_model),
        "--limit",
        "2",
        "--temperature",
        "0.8",
        "--top-p",
        "0.9",
    ]
    result = CliRunner().invoke(main, [*arguments, "--json", "--breakdown", "--pairs", "2"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["workload"] == {
        "rows": 2, "prompt_tokens": 20, "output_tokens": 12, "temperature": 0.8, "top_p": 0.9,
    }  # fmt: skip
    assert figures["ratio"] is None
    (ours,) = figures["sides"]
    assert [each["output_tokens"] for each in ours["passes"]] == [12, 12]
    assert ours["output_rate"] == pytest.approx(median(each["output_rate"] for each in ours["passes"]))
    assert ours["total_rate"] == pytest.approx(ours["output_rate"] * 32 / 12)
    assert ours["output_rate_with_load"] < ours["output_rate"]
    assert set(figures["breakdown"]) == set(PARTS)


def test_batchrun_quantized(rows: Path, tiny_model: Path) -> None:
    arguments = ["bench", str(rows), "--model", str(tiny_model), "--limit", "1", "--json"]
    for options, expected in (([], "dequantize"), (["--quantization", "int8"], "int8")):
        result = CliRunner().invoke(main, [*arguments, *options])
        assert result.exit_code == 0, result.output
        (ours,) = json.loads(result.stdout)["sides"]
        assert ours["settings"]["quantization"] == expected


def test_no_row_is_asked_for_more_than_the_model_can_hold(tmp_path: Path, tiny_model: Path) -> None:
    job = bench_job(write_rows(tmp_path / "rows.jsonl", ROWS[2:]), (), str(tiny_model))
    workload = read_workload(job, resolve(str(tiny_model)), 512, limit=None, temperature=0, top_p=1)
    assert workload.max_tokens == [512 - len("A fox")]


# ---- peers


def test_the_command_offers_every_peer() -> None:
    (option,) = (each for each in bench.params if each.name == "against")
    assert isinstance(option.type, click.Choice)
    assert set(option.type.choices) == set(PEERS)


def test_transformers_does_the_same_work(rows: Path, tiny_model: Path) -> None:
    report = run_bench(rows, model=str(tiny_model), dtype="float32", threads=1, against="transformers", pairs=2)
    assert report.notes == []
    ours, theirs = report.measured
    assert [each.outputs for each in ours.passes] == [[tuple(ids) for ids in each.outputs] for each in theirs.passes]
    assert theirs.side.load_seconds > 0
    assert theirs.side.settings["static_batch"] in (1, 3)
    figures = json.loads(report.to_json())["ratio"]
    assert figures["median"] == pytest.approx(median(figures["pairs"]))
    assert figures["interval"] is None
    assert figures["same_beginnings"] == 1
    assert "median of 2, too few for a 95% interval" in report.describe()


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        (1, 90, [1]),
        (3, 90, [1, 3]),
        (16, 90, [1, 4, 16]),
        (100, 90, [1, 4, 16, 64, 100]),
        (1000, 90, [1, 4, 16, 64, 100]),
        (16, 2490, [1, 4]),
        (2, 20_000, [1]),
    ],
)
def test_static_batches_are_tried_as_far_as_rows_and_tokens_go(rows: int, length: int, expected: list[int]) -> None:
    settings = {"static_batches": [1, 4, 16, 64, 256], "batch_tokens": 10_000}
    workload = Workload([[1] * length] * rows, [10] * rows, 512)
    assert batch_sizes(settings, workload.as_request()) == expected


def test_a_peer_that_is_not_there_is_skipped(rows: Path, tiny_model: Path) -> None:
    report = run_bench(rows, model=str(tiny_model), against="vllm", pairs=1)
    (note,) = report.notes
    assert note == f"vllm is skipped: {sys.executable} has no package vllm ({PEERS['vllm'].install})"
    assert len(report.measured) == 1
    assert note in report.describe()


def test_a_peer_that_dies_leaves_the_pairs_before_it(
    rows: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answers = [
        """echo '{"version": "9"}'; read order; echo '{"load_seconds": 2, "settings": {}}'""",
        """read order; echo '{"seconds": 1.5, "outputs": [[1], [2], [3]], "peak_bytes": 10}'""",
        "read order; echo some trace >&2; echo 'Error: out of luck' >&2; exit 3",
    ]
    python = scripted_python(tmp_path, *answers)
    report = run_bench(rows, model=str(tiny_model), against="vllm", peer_python=python, pairs=3)
    (note,) = report.notes
    assert note.startswith("vllm failed with exit code 3: Error: out of luck (all of it: ")
    ours, theirs = report.measured
    assert (len(ours.passes), len(theirs.passes)) == (3, 1)
    assert theirs.side.name == "vllm 9"
    assert len(json.loads(report.to_json())["ratio"]["pairs"]) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("exit 4", "failed with exit code 4: it printed nothing"),
        ("""echo '{"version": "9"}'; exec <&-; exit 4""", "failed with exit code 4: it printed nothing"),
        ("echo $2; cat", "failed: 'vllm' is not what its worker answers"),
    ],
)
def test_a_peer_that_does_not_answer(
    tmp_path: Path, tiny_model: Path, line: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(PeerError, match=f"^vllm {expected}"):  # noqa: SIM117
        with PeerSide("vllm", scripted_python(tmp_path, line), 1) as peer:
            peer.load(resolve(str(tiny_model)), "float32", Workload([[1]], [1], 512))
    assert bool(list(tmp_path.glob("*.log"))) == ("exit code" in expected)


def test_a_peer_ends_with_the_processes_that_it_started(tmp_path: Path) -> None:
    python = scripted_python(tmp_path, """sleep 100 & echo '{"version": "'$!'"}'; wait""")
    with PeerSide("vllm", python, 1) as peer:
        child = psutil.Process(int(peer.name.removeprefix("vllm ")))
        assert child.status() != psutil.STATUS_ZOMBIE
    wait_until_ended([child], 5)


def test_a_peer_python_that_is_no_program(rows: Path, tiny_model: Path) -> None:
    with pytest.raises(JobError, match="--peer-python: /no/python cannot be run"):
        run_bench(rows, model=str(tiny_model), against="vllm", peer_python="/no/python")


def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    both = write_rows(tmp_path / "both.jsonl", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}])
    with pytest.raises(JobError, match="--model is for JSONL files"):
        run_bench(tmp_path / "job.yaml", model="any")
    with pytest.raises(JobError, match="both `messages` and `prompt`"):
        run_bench(both)
    with pytest.raises(JobError, match="--top-p takes effect with a --temperature only"):
        run_bench(both, top_p=0.5)


def test_openvino_wants_a_gguf_model(rows: Path, tiny_model: Path, tmp_path: Path) -> None:
    python = scripted_python(tmp_path, """echo '{"version": "9"}'; read order""")
    report = run_bench(rows, model=str(tiny_model), against="openvino", peer_python=python)
    assert report.notes == [f"openvino is skipped: {tiny_model} is not a GGUF file"]


# ---- exported models


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_model_has_the_numbers_of_its_gguf_file(tmp_path: Path, tiny_model: Path, dtype: str) -> None:
    path = gguf_files.convert(tiny_model, tmp_path / "model.gguf", eight_bits)
    files = resolve(str(path))
    write_directory(files, dtype, tmp_path / "exported")
    source, made = open_weights(files), load_file(tmp_path / "exported" / "model.safetensors")
    assert set(made) == source.names()
    for name, tensor in made.items():
        assert tensor.equal(source.get(name).to(tensor.dtype)), name
        assert str(tensor.dtype) == f"torch.{dtype}"
    write_gguf(files, tmp_path / "exported.gguf")
    again = resolve(str(tmp_path / "exported.gguf"))
    assert again.config == files.config
    for name in source.names():
        assert open_weights(again).get(name).half().equal(source.get(name).half()), name
