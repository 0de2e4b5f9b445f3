"""The measuring scripts do what they say, on a tiny model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from batchrun import Engine
from batchrun.job import ModelSpec
from batchrun.model_files import resolve
from tests.bench import agreement, decode_attention, scale
from tests.marks import needs_kernels


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
    attend, read = decode_attention.attending((2, 1, 64), torch.float32, 1 << 20, 1)
    assert (1 << 20) * 0.8 < attend.size < read.size < (1 << 20) * 1.6
    assert torch.equal(attend.ways[0](), torch.ones(3, 2, 64))  # all values are 1
    assert [way() for way in read.ways] == [None, None]
    row = decode_attention.compare("SmolLM2 135M", torch.bfloat16, 1, 2 << 20, 1)
    assert len(row) == len(decode_attention.HEAD)
