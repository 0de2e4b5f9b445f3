"""What a model says of a few prompts, by batchrun and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from batchrun import Engine, SamplingParams

PROMPTS = [[(7 * index + place * place) % 256 for place in range(30)] for index in range(4)]
READ = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def reference_logprobs(folder: Path) -> Tensor:
    """Log-probability of each prompt token but the first, [prompts, tokens - 1], by transformers."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = torch.tensor(PROMPTS)
        return model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


def engine_logprobs(folder: Path, **options: Any) -> Tensor:
    engine = Engine(str(folder), dtype="float32", max_model_len=64, max_num_seqs=4, **options)
    results = sorted(engine.generate(PROMPTS, READ), key=lambda result: result.index)
    engine.close()
    return torch.tensor([[entry.logprob for entry in (each.prompt_logprobs or ())[1:]] for each in results])
