"""The measuring scripts do what they say, on a tiny model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from batchrun import Engine
from batchrun.job import ModelSpec, SpeculativeSpec, load_job
from batchrun.model_files import resolve
from batchrun.tokenization.tokenizer import Tokenizer
from tests.bench import agreement, decode_attention, forms, instant_feed, overhead, scale, speculation
from tests.jobs import write_job
from tests.marks import needs_kernels
from tests.models import save_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "length"), [(1, 100), (3, 7), (10, 100)])
def test_prompts_cut_from_one_text_share_no_block(rows: int, length: int) -> None:
    text = [*range(300), *range(300)]  # the second half begins as the first
    prompts = list(scale.unshared_prompts(text, rows, length))
    assert [len(prompt) for prompt in prompts] == [length] * rows
    assert len({tuple(prompt[:32]) for prompt in prompts}) == rows


@pytest.mark.parametrize(("text", "length"), [([1, 2] * 200, 40), (list(range(30)), 40)])
def test_a_text_that_is_too_little_is_refused(text: list[int], length: int) -> None:
    with pytest.raises(ValueError, match="too few for"):
        list(scale.unshared_prompts(text, 3, length))


def test_a_cell_of_the_table(tiny_model: Path) -> None:
    model = ModelSpec(name_or_path=str(tiny_model), dtype="float32")
    args = argparse.Namespace(threads=1, pairs=None, against=None, peer_python=sys.executable)
    report, pairs = scale.run_cell(scale.Cell(300, 20, 2), list(range(310)), resolve(str(tiny_model)), model, args)
    (ours,) = report.measured
    assert ours.side.settings["max_num_seqs"] == 300
    assert ours.passes[-1].details["cached_prompt_tokens"] == 0
    assert ours.passes[-1].details["preemptions"] == 0
    assert len(ours.passes) == pairs == 5
    assert len(scale.line(scale.Cell(300, 20, 2), report)) == len(scale.HEAD) - 1


def test_float32_agrees_with_itself_and_with_transformers(tiny_model: Path) -> None:
    files = resolve(str(tiny_model))
    with closing(Engine(files, device="cpu", dtype="float32", num_threads=1)) as engine:
        texts = agreement.continued(engine, [[1, 2, 3], [4] * 40], 8)
        exact = agreement.read_with_engine(engine, texts)
    assert exact.most_likely == [i for text in texts for i in text.ids[text.n_prompt :]]
    theirs = agreement.read_with_transformers(files, "float32", texts)
    assert theirs.most_likely == exact.most_likely
    assert theirs.logprobs == pytest.approx(exact.logprobs, abs=1e-4)


@pytest.mark.usefixtures("one_thread")
@needs_kernels
def test_attention_is_compared_with_reading_as_many_bytes_and_the_same_blocks() -> None:
    attend, read = decode_attention.attending((2, 1, 64), ("float32", "auto"), 1 << 20, 1)
    assert (1 << 20) * 0.8 < attend.size < read.size < (1 << 20) * 1.6
    assert torch.equal(attend.ways[0](), torch.ones(3, 2, 64))  # all values are 1
    assert [way() for way in read.ways] == [None, None]
    for kept in ("auto", "int8", "int4"):
        row = decode_attention.compare("SmolLM2 135M", ("bfloat16", kept), 1, 2 << 20, 1)
        assert len(row) == len(decode_attention.HEAD)


def test_the_overhead_of_a_run_without_its_model(tiny_model: Path, tmp_path: Path) -> None:
    rows = overhead.write_input(tmp_path / "rows", 300)
    job = overhead.make_job(tmp_path, rows, str(tiny_model), 100, "out")
    usage, memory = overhead.measure(job, tokenize=False)
    assert usage.rows == 300
    assert usage.prompt_tokens == 300 * instant_feed.TOKENS
    assert {"MainThread", "writer_0", "claims", "feed"} <= usage.busy.keys()
    assert min(usage.writer["Output.checkpoint"], usage.writer["Output.commit_split"]) > 0
    assert max(each.feed for each in memory) > 0
    rates = overhead.stages(job)
    assert list(rates) == ["read", "template", "tokenize", "order", "pack", "unpack"]
    assert min(rates.values()) > 0


def test_the_time_of_the_engines_thread(tiny_model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, tiny_model, [{"id": n, "text": f"row {n}"} for n in range(20)])
    spent = overhead.time_of_engine_thread(load_job(job))
    assert 0 < spent["steps"] < spent["running"]
    assert 0 < spent["io"] < spent["running"]


def test_forms_of_weights_are_measured_by_turns(tiny_model: Path, tmp_path: Path) -> None:
    model = ModelSpec(name_or_path=str(tiny_model), dtype="float32", max_model_len=128)
    text = [(7 * place + place * place // 5) % 256 for place in range(2000)]
    chosen, rates = forms.measure_cell(2, text, resolve(str(tiny_model)), model, pairs=2)
    assert list(rates) == ["dequantize", "int8", "none"]
    assert all(len(passes) == 2 and min(passes) > 0 for passes in rates.values())
    assert forms.ratio(rates, "int8", "int8") == "1.00"
    assert chosen in ("none", "int8", "int4")


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "long", layers=1, max_position_embeddings=2048)


def test_the_templated_rows_are_the_same_every_time_and_hold_their_answers(long_model: Path) -> None:
    tokenizer = Tokenizer.load(resolve(str(long_model)))
    rows = speculation.templated(tokenizer, 2048, 30)
    assert rows == speculation.templated(tokenizer, 2048, 30)
    assert len({tuple(prompt) for prompt in rows.workload.prompts}) == 30
    assert rows.answers is not None
    for prompt, answer in zip(rows.workload.prompts, rows.answers, strict=True):
        text = tokenizer.decode(prompt).rpartition("Text: ")[2]
        assert all(value in text for value in json.loads(tokenizer.decode(answer)).values())
    assert speculation.copied(rows, rows.answers) == 1
    half = [[*answer[: len(answer) // 2], *[0] * (len(answer) - len(answer) // 2)] for answer in rows.answers]
    assert speculation.copied(rows, half) == pytest.approx(0.5, abs=0.01)


def test_drafts_are_measured_by_turns_in_fresh_engines(long_model: Path, tmp_path: Path) -> None:
    files = resolve(str(long_model))
    model = ModelSpec(name_or_path=str(long_model), dtype="float32", reproducible=True)
    rows = speculation.templated(Tokenizer.load(files), 2048, 3)
    off, ngram = speculation.measure_cell(
        2, rows.first(2), files, model, [SpeculativeSpec(method="ngram")], pairs=2, threads=1
    )
    assert len(off) == len(ngram) == 2
    assert min(trial.cpu_seconds for trial in off + ngram) > 0
    row = speculation.line(2, "ngram", ngram, off)
    assert len(row) == len(speculation.HEAD)
    assert row[-1] == "2 of 2"
    speculation.save_plot(tmp_path / "plot.svg", {"templated": {"ngram": {2: speculation.ratios(ngram, off)}}})
    assert "templated" in (tmp_path / "plot.svg").read_text()
