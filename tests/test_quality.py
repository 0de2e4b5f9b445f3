"""`batchrun quality`: its figures are those of transformers, whatever the steps and windows that a text is read in."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from torch import Tensor

from batchrun.cli import main
from batchrun.model_files import resolve
from batchrun.quality import configurations, cut, reading, tokenize
from batchrun.quality.report import Configuration, Reading, estimate
from tests.models import round_layers, save_model, save_tokenizer

TEXT = "A café, at 7 in the morning: “two cups”, she said, and neither of us had slept. " * 5
CONTEXT = 150  # tokens, which are bytes: more than a step takes, and no multiple of a block


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def soft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is less sure than others of what follows: it can say the same though its weights lose bits."""
    return save_model(tmp_path_factory.mktemp("models") / "soft", initializer_range=0.1)


def perturbed(model: Path, to: Path, *, scale: float = 0.004) -> Path:
    """A copy of a model with noise on its weights."""
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += scale * torch.randn_like(parameter)
    made.save_pretrained(to)
    save_tokenizer(to)
    return to


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["quality", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def measured(json_path: Path, *arguments: object) -> list[dict[str, Any]]:
    """The configurations of a report."""
    result = run(*arguments, "--json", json_path)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(json_path.read_text())["configurations"]
    return found


def log_probabilities(model: Path | torch.nn.Module, windows: Sequence[Sequence[int]]) -> Tensor:
    """What transformers predicts for each token of all windows but their first, [P, V]."""
    if isinstance(model, Path):
        model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([window])).logits[0, :-1] for window in windows]
    return torch.cat(logits).double().log_softmax(-1)


def windows_of(text: str, model: Path) -> list[list[int]]:
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return [ids[start : start + CONTEXT] for start in range(0, len(ids), CONTEXT)]


def check_figures(found: dict[str, Any], exact: Tensor, other: Tensor, windows: Sequence[Sequence[int]]) -> None:
    """That a report's figures are those of two tables of log-probabilities."""
    targets = torch.tensor([token for window in windows for token in window[1:]])[:, None]
    loss, exact_loss = (-each.gather(1, targets)[:, 0] for each in (other, exact))
    divergence = torch.nn.functional.kl_div(other, exact, log_target=True, reduction="none").sum(-1)
    same = (other.argmax(-1) == exact.argmax(-1)).double()
    assert 0.001 < divergence.mean() < 10  # there is something to find
    assert 0.2 < same.mean() < 1
    assert found["perplexity"] == pytest.approx(loss.mean().exp().item(), rel=1e-4)
    assert found["change"]["value"] == pytest.approx((loss - exact_loss).mean().exp().item() - 1, rel=1e-3, abs=1e-4)
    assert found["divergence"]["value"] == pytest.approx(divergence.mean().item(), rel=1e-3)
    assert found["divergence_tail"] == pytest.approx(divergence.quantile(0.99).item(), rel=1e-3)
    assert found["same_top"]["value"] == pytest.approx(same.mean().item(), abs=1.5 / len(same))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_figures_of_a_perturbed_model_are_those_of_transformers(family: str, tmp_path: Path, text: Path) -> None:
    model = save_model(tmp_path / "model", family, initializer_range=0.1)
    other = perturbed(model, tmp_path / "other")
    arguments = [other, "--against", model, "--text", text, "--context", CONTEXT, "--dtype", "float32"]
    exact, found = measured(tmp_path / "q.json", *arguments, "--weights", "none")
    windows = windows_of(TEXT, model)
    wanted = log_probabilities(model, windows)
    check_figures(found, wanted, log_probabilities(other, windows), windows)
    targets = torch.tensor([token for window in windows for token in window[1:]])[:, None]
    assert exact["perplexity"] == pytest.approx((-wanted.gather(1, targets)).mean().exp().item(), rel=1e-4)
    assert (exact["model"], found["model"]) == (str(model), str(other))


def test_quantized_weights_cost_what_rounding_them_does(soft_model: Path, tmp_path: Path, text: Path) -> None:
    arguments = [soft_model, "--text", text, "--context", CONTEXT, "--dtype", "float32", "--weights", "int4"]
    _, found = measured(tmp_path / "q.json", *arguments)
    rounded: Any = transformers.AutoModelForCausalLM.from_pretrained(soft_model, dtype=torch.float32).eval()
    round_layers(rounded, "int4")
    windows = windows_of(TEXT, soft_model)
    # The native product rounds activations to 16 bits, which moves the figures in their fourth digit.
    check_figures(found, log_probabilities(soft_model, windows), log_probabilities(rounded, windows), windows)


def test_how_a_text_is_cut_into_steps_changes_nothing(
    soft_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [soft_model, "--text", text, "--context", CONTEXT, "--dtype", "float32", "--weights", "int8"]
    _, whole = measured(tmp_path / "whole.json", *arguments)
    monkeypatch.setattr(reading, "_STEP", 7)
    _, stepped = measured(tmp_path / "stepped.json", *arguments)
    assert stepped["divergence"]["value"] == pytest.approx(whole["divergence"]["value"], rel=1e-2)
    assert stepped["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-5)


def test_the_dtype_has_a_row_of_its_own_and_no_configuration_has_two(
    soft_model: Path, tmp_path: Path, text: Path
) -> None:
    arguments = [soft_model, "--text", text, "--context", CONTEXT, "--dtype", "bfloat16"]
    found = measured(tmp_path / "q.json", *arguments, "--weights", "dequantize,int8,int4,int8")
    assert [each["name"] for each in found] == ["reference float32", "reference bfloat16", "int8", "int4"]
    assert [each["dtype"] for each in found] == ["float32"] + ["bfloat16"] * 3
    assert 0 < found[1]["divergence"]["value"] < found[2]["divergence"]["value"] < found[3]["divergence"]["value"]
    sizes = [each["weight_bytes"] for each in found]
    assert sizes[0] == 2 * sizes[1]
    assert sizes[1] > sizes[2] > sizes[3] > 0


def test_a_reference_is_no_configuration_of_itself(soft_model: Path) -> None:
    files = resolve(str(soft_model))
    exact = Configuration("other name", files, "float32", "dequantize", "auto")
    assert configurations(files, files, "float32", ["dequantize"], ["auto"]) == [exact]


def test_table_and_plots(soft_model: Path, tmp_path: Path, text: Path) -> None:
    arguments = [soft_model, "--text", text, "--context", 64, "--limit", 200, "--dtype", "float32", "--weights", "int4"]
    result = run(*arguments, "--plot", tmp_path / "q.svg")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split("  ")[1] == "configuration"
    assert [line.split()[0] for line in lines[1:3]] == ["reference", "int4"]
    assert "±" in lines[2]
    assert "196 tokens of" in lines[-1]
    assert "in 4 windows of up to 64" in lines[-1]
    assert result.stderr.splitlines() == ["reading with reference float32", "reading with int4"]
    drawn = ElementTree.parse(tmp_path / "q.svg").getroot()
    assert drawn.tag.endswith("svg")
    assert "int4" in (tmp_path / "q.svg").read_text()
    assert run(*arguments, "--plot", tmp_path / "q.png").exit_code == 0
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_logits_that_are_no_numbers_are_told(soft_model: Path, tmp_path: Path, text: Path) -> None:
    broken = perturbed(soft_model, tmp_path / "broken", scale=math.nan)
    arguments = [broken, "--against", soft_model, "--text", text, "--context", CONTEXT, "--dtype", "float32"]
    _, found = measured(tmp_path / "q.json", *arguments, "--weights", "none", "--plot", tmp_path / "q.svg")
    assert found["perplexity"] is None
    assert found["divergence"] == {"value": None, "standard_error": None}


def test_windows_begin_as_a_text_does(tmp_path: Path, soft_model: Path) -> None:
    save_tokenizer(tmp_path, add_bos=True)
    for file in soft_model.iterdir():
        if not (tmp_path / file.name).exists():
            (tmp_path / file.name).symlink_to(file)
    files = resolve(str(tmp_path))
    begin, ids = tokenize("abcdef", files, files)
    a, b, c, d, e, f = ids
    assert begin == [256]
    assert cut(begin, ids, 4) == [[256, a, b, c], [256, d, e, f]]
    assert cut([], ids, 5) == [[a, b, c, d, e]]  # the last token has nothing before it
    assert tokenize("<|bos|>ab", files, files, 2) == ([256], [256, a])
    assert tokenize("ab", resolve(str(soft_model)), files) == ([256], [a, b])  # as the reference begins it


@pytest.mark.parametrize("size", [1, 10, 40])
def test_the_standard_error_is_that_of_means_of_windows(size: int) -> None:
    random = np.random.default_rng(0)
    values = random.normal(3, 1, (50, 1)) + random.normal(0, 0.1, (50, size))  # what a window shares is the most of it
    found = estimate(values.flatten(), np.repeat(np.arange(50), size))
    means = values.mean(axis=1)
    assert found.value == pytest.approx(means.mean())
    assert found.standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(50))
    assert estimate(values[0], np.zeros(size, np.int64)).standard_error is None


def test_a_change_of_perplexity_is_that_of_the_mean_loss(soft_model: Path) -> None:
    from batchrun.quality.report import Measured

    rng = np.random.default_rng(1)
    exact = rng.exponential(2.0, 400)
    window = np.repeat(np.arange(20), 20)
    told = Reading(window, exact + 0.1, exact, np.full(400, 0.25), np.ones(400))
    configuration = Configuration("x", resolve(str(soft_model)), "float32", "int8", "auto")
    found = Measured.of(configuration, told, weight_bytes=1, seconds=1.0)
    assert found.change is not None
    assert found.change.value == pytest.approx(math.exp(0.1) - 1)
    assert found.change.standard_error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds no text"),
        (b" \n\n", "holds no text"),
        (b"caf\xe9 and so on", "is not UTF-8: byte 3 is 0xe9"),
        (b"a", "has too little text: no token follows another"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(content: bytes, expected: str, soft_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    assert refused(soft_model, "--text", path) == f"--text: {path} {expected}"


def test_what_cannot_be_measured_is_refused(
    soft_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (soft_model, "--text", text)
    assert "No such file" in refused(soft_model, "--text", tmp_path / "none.txt")
    assert "'int3': choose from none, auto, dequantize" in refused(*given, "--weights", "int8,int3")
    assert "'int3': choose from auto" in refused(*given, "--kv-cache", "int3")
    assert "--context: 513 is above the 512 tokens that" in refused(*given, "--context", 513)
    assert "q.pdf has to end in .svg or .png" in refused(*given, "--plot", tmp_path / "q.pdf")
    assert "q.json cannot be written" in refused(*given, "--json", tmp_path / "none" / "q.json")
    larger = save_model(tmp_path / "larger", layers=1, vocab_size=400)
    assert f"--against: {larger} has another vocabulary than" in refused(*given, "--against", larger)
    monkeypatch.setattr("batchrun.quality.plot.find_spec", lambda _: None)
    assert "pip install 'batchrun-llm[plot]'" in refused(*given, "--plot", tmp_path / "q.svg")
