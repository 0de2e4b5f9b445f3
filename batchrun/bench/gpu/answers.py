"""The first unit of part 4: a small engine's tokens with the kernels are those with plain torch, and no step waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from batchrun.bench.gpu.budget import FAILED, Line
from batchrun.bench.gpu.random_model import llama, random_engine
from batchrun.engine.engine import Engine
from batchrun.job import KVCacheDType
from batchrun.ops import torch_ops
from batchrun.sampling import SamplingParams

NAMES: Mapping[KVCacheDType, str] = {"auto": "answers of a small model", "fp8": "answers of a small model, FP8 KV"}

_MODEL = llama(512, 1024, 4, 8, 2, vocab_size=4096, max_position_embeddings=1024)
_ROWS, _LONGEST, _OUTPUT = 48, 300, 24
_EQUAL = 0.95  # of rows: float32 sums of another order move what is nearly equally likely
_KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
)


def compare_answers(device: torch.device, seed: int, kept: KVCacheDType) -> Iterator[Line]:
    """Rows with all that sampling can do, some of whose beginnings are shared, with the kernels and without."""
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "kv_cache_memory": "256MiB", "max_model_len": 512}
    options["kv_cache_dtype"] = kept
    engine = random_engine(_MODEL, seed, dtype="float32", device=device.type, **options)
    try:
        own = _answers(engine, seed)
        with _waiting_forbidden(device):
            again = _answers(engine, seed)
        engine.executor.model.ops = torch_ops
        engine.executor.allocate(engine.scheduler.pools[0].n_blocks)
        plain = _answers(engine, seed)
    finally:
        engine.close()
    equal, repeated = (sum(a == b for a, b in zip(own, other, strict=True)) for other in (plain, again))
    figures = {"rows": len(own), "like torch's": equal, "like the run before": repeated}
    yield Line(NAMES[kept], "passed" if min(equal, repeated) >= _EQUAL * len(own) else FAILED, figures)


def _answers(engine: Engine, seed: int) -> list[tuple[int, ...]]:
    engine.reset_prefix_cache()
    random = np.random.default_rng(seed)
    common = random.integers(0, _MODEL["vocab_size"], _LONGEST)
    prompts = [
        [*common[: _LONGEST * (index % 3) // 3].tolist(), *random.integers(0, _MODEL["vocab_size"], 1 + index).tolist()]
        for index in range(_ROWS)
    ]
    params = [
        SamplingParams(max_tokens=_OUTPUT, ignore_eos=True, seed=index, **_KINDS[index % len(_KINDS)])
        for index in range(_ROWS)
    ]
    results = sorted(engine.generate(prompts, params), key=lambda result: result.index)
    return [result.token_ids for result in results]


@contextmanager
def _waiting_forbidden(device: torch.device) -> Iterator[None]:
    """An operation that waits for a GPU raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
