"""`model.quantization`: what a quantized model answers, and what of it is quantized."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from batchrun import Engine, SamplingParams
from batchrun.job import Quantization
from batchrun.ops import fixed_onednn_ops, fixed_ops, native_ops, onednn_ops, torch_ops
from batchrun.weights.formats import Dense, Fp8, Int4, Int8
from batchrun.weights.quantize import QUANTIZERS
from tests.engine.driver import Driver, load_decoder, request
from tests.marks import needs_kernels
from tests.models import round_layers

PROMPTS = [[(7 * index + place * place) % 256 for place in range(30)] for index in range(4)]
READ = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def reference_logprobs(path: Path, quantization: str) -> Tensor:
    """Log-probability of each prompt token but the first, [prompts, tokens - 1], by transformers."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    round_layers(model, quantization)
    with torch.inference_mode():
        ids = torch.tensor(PROMPTS)
        return model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


def engine_logprobs(path: Path, **options: Any) -> Tensor:
    engine = Engine(str(path), dtype="float32", max_model_len=128, max_num_seqs=4, **options)
    results = sorted(engine.generate(PROMPTS, READ), key=lambda result: result.index)
    engine.close()
    return torch.tensor([[entry.logprob for entry in (each.prompt_logprobs or ())[1:]] for each in results])


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_a_quantized_model_is_transformers_with_rounded_weights(
    tiny_model: Path, quantization: Quantization, reproducible: bool
) -> None:
    found = engine_logprobs(tiny_model, quantization=quantization, reproducible=reproducible)
    wanted, plain = (reference_logprobs(tiny_model, each) for each in (quantization, "none"))
    assert (plain - wanted).abs().mean() > 1e-3  # there is something to find
    assert (found - wanted).abs().max() < 0.01 * (plain - wanted).abs().max()


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


@pytest.mark.parametrize(("quantization", "kind"), [("int8", Int8), ("int4", Int4), ("fp8", Fp8), ("none", Dense)])
def test_linear_layers_are_quantized_and_tables_are_not(
    tiny_model: Path, quantization: Quantization, kind: type
) -> None:
    decoder = load_decoder(tiny_model, quantization=quantization)
    for layer in decoder.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert type(linear.weight) is kind
    assert isinstance(decoder.embedding, Dense)
    assert isinstance(decoder.head.weight, Dense)
