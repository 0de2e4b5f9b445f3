"""`model.quantization`: what a quantized model answers, and what of it is quantized."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from batchrun import Engine, SamplingParams
from batchrun.errors import JobError
from batchrun.job import Quantization
from batchrun.ops import fixed_onednn_ops, fixed_ops, int8_torch, native_ops, onednn_ops, torch_ops
from batchrun.weights.formats import QUANTIZERS, Dense, Int8, round_rows
from tests.engine.driver import Driver, load_decoder, request
from tests.marks import needs_kernels

PROMPTS = [[(7 * index + place * place) % 256 for place in range(30)] for index in range(4)]
READ = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


class RoundedLinear(nn.Module):
    """A linear layer of transformers whose weight and activations are what int8 leaves of them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = rounded(layer.weight.detach(), 127)

    def forward(self, x: Tensor) -> Tensor:
        rows = rounded(x.flatten(0, 1), int8_torch.largest_integer(x.shape[-1]))
        return (rows @ self.weight.T).float().unflatten(0, x.shape[:2])


def rounded(x: Tensor, largest: int) -> Tensor:
    integers, scales = round_rows(x, largest)
    return integers.double() * scales.double()[:, None]


def reference_logprobs(path: Path, *, quantized: bool) -> Tensor:
    """Log-probability of each prompt token but the first, [prompts, tokens - 1], by transformers."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for name, layer in list(model.model.named_modules()):
        if quantized and isinstance(layer, nn.Linear):
            model.model.set_submodule(name, RoundedLinear(layer))
    with torch.inference_mode():
        ids = torch.tensor(PROMPTS)
        return model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


def engine_logprobs(path: Path, **options: Any) -> Tensor:
    engine = Engine(str(path), dtype="float32", max_model_len=128, max_num_seqs=4, **options)
    results = sorted(engine.generate(PROMPTS, READ), key=lambda result: result.index)
    engine.close()
    return torch.tensor([[entry.logprob for entry in (each.prompt_logprobs or ())[1:]] for each in results])


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_quantized_model_is_transformers_with_rounded_linear_layers(tiny_model: Path, reproducible: bool) -> None:
    found = engine_logprobs(tiny_model, quantization="int8", reproducible=reproducible)
    wanted, plain = (reference_logprobs(tiny_model, quantized=quantized) for quantized in (True, False))
    assert (plain - wanted).abs().mean() > 0.01  # there is something to find
    # A number in the middle of two integers may fall to either: few do, and each moves the rest a little.
    assert (found - wanted).abs().mean() < 0.1 * (plain - wanted).abs().mean()


@needs_kernels
@pytest.mark.parametrize("ops", [torch_ops, fixed_ops, onednn_ops, fixed_onednn_ops])
@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_every_backend_answers_alike(tiny_model: Path, ops: ModuleType, quantization: Quantization) -> None:
    answers = []
    for each in (ops, native_ops):
        decoder = load_decoder(tiny_model, ops=each, quantization=quantization)
        requests = [request(i, ids, SamplingParams(temperature=0, max_tokens=8)) for i, ids in enumerate(PROMPTS)]
        with Driver(decoder) as driver:
            driver.run(requests)
        answers.append([each.output_ids for each in requests])
    same = sum(a == b for ours, theirs in zip(*answers, strict=True) for a, b in zip(ours, theirs, strict=True))
    assert same >= 0.9 * 8 * len(PROMPTS)


def test_linear_layers_are_quantized_and_tables_are_not(tiny_model: Path) -> None:
    decoder = load_decoder(tiny_model, quantization="int8")
    for layer in decoder.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(linear.weight, Int8)
    assert isinstance(decoder.embedding, Dense)
    assert isinstance(decoder.head.weight, Dense)
    assert set(QUANTIZERS) == {"none", "int8"}


def test_a_device_that_cannot_is_refused_before_the_model_loads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.engine.memory.resolve_device", lambda _: "cuda")
    with pytest.raises(JobError, match=r"model\.quantization: int8 is not supported on cuda yet"):
        Engine(str(tiny_model), quantization="int8")
