"""`model.kv_cache_dtype`: what an engine answers from keys and values of fewer bits, and how many it holds."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchrun import Engine, SamplingParams
from batchrun.bench.workload import DEMO_MODEL
from batchrun.engine.memory import kv_bytes_per_token
from batchrun.errors import JobError
from batchrun.job import KVCacheDType
from batchrun.model_files import resolve
from batchrun.models.kv_cache import DTYPES, KVCache
from batchrun.ops import fixed_ops, native_ops, torch_ops
from batchrun.tokenization.tokenizer import Tokenizer
from tests.engine.driver import Driver, load_decoder, request
from tests.kernels.test_kv_cache import rounded
from tests.marks import needs_kernels
from tests.models import save_model

PROMPTS = [[(7 * index + place * place) % 256 for place in range(30)] for index in range(4)]
NEAR_TIE = 2e-3  # logits closer than this may swap, which reach 10
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class RoundedCache(transformers.DynamicCache):
    """A cache of transformers that keeps what ``kept_as`` leaves of keys and values."""

    def __init__(self, kept_as: KVCacheDType) -> None:
        super().__init__()
        self.kept_as = kept_as

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.kept_as != "auto":
            key_states, value_states = (self._rounded(x) for x in (key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)

    def _rounded(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() if self.kept_as == "bf16" else rounded(x, self.kept_as)


def logits(path: Path, texts: list[list[int]], kept_as: KVCacheDType) -> Tensor:
    """Of every token of texts of one length, by transformers: [texts, tokens, V]."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: Tensor = model(torch.tensor(texts), past_key_values=RoundedCache(kept_as), use_cache=True).logits
    return found


@pytest.mark.parametrize("kept_as", DTYPES)
@pytest.mark.parametrize("ops", [torch_ops, fixed_ops, pytest.param(native_ops, marks=needs_kernels)])
def test_greedy_answers_are_those_of_transformers_with_rounded_keys_and_values(
    tiny_model: Path, ops: ModuleType, kept_as: KVCacheDType
) -> None:
    decoder = load_decoder(tiny_model, ops=ops, packed=ops is native_ops, kv_cache_dtype=kept_as)
    requests = [request(i, ids, GREEDY) for i, ids in enumerate(PROMPTS)]
    with Driver(decoder) as driver:
        driver.run(requests)
    texts = [each.tokens for each in requests]
    answers = torch.tensor([each.output_ids for each in requests])
    wanted, plain = (logits(tiny_model, texts, each)[:, -25:-1] for each in (kept_as, "auto"))
    chosen = wanted.gather(2, answers[..., None])[..., 0]
    assert (chosen >= wanted.amax(-1) - (0.1 if kept_as == "bf16" else NEAR_TIE)).all()
    if kept_as != "bf16":  # there is something to find: others are chosen, or nearly
        assert (wanted - plain).abs().max() > 20 * NEAR_TIE


@pytest.mark.slow
def test_perplexity_of_the_demos_model() -> None:
    """Of text that is given; by what is lost: half a percent at most with int8."""
    try:
        files = resolve(DEMO_MODEL)
    except JobError as error:
        pytest.skip(f"the demo's model cannot be fetched: {error}")
    ids = Tokenizer.load(files).encode("".join(topics.values())[:12_000], add_special_tokens=False)[:2000]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    perplexity = {}
    for kept_as in ("auto", "int8", "fp8", "int4"):
        options = {"quantization": "dequantize", "kv_cache_dtype": kept_as, "max_model_len": 512, "max_num_seqs": 4}
        with closing(Engine(files, dtype="bfloat16", max_num_batched_tokens=2048, device="cpu", **options)) as engine:
            results = list(engine.generate([ids[start : start + 500] for start in range(0, 2000, 500)], params))
        found = [entry.logprob for result in results for entry in (result.prompt_logprobs or ())[1:]]
        perplexity[kept_as] = math.exp(-sum(found) / len(found))
    print(perplexity)
    assert perplexity["int8"] < 1.005 * perplexity["auto"]
    assert perplexity["fp8"] < 1.02 * perplexity["auto"]
    assert perplexity["int8"] < perplexity["fp8"] < perplexity["int4"] < 1.5 * perplexity["auto"]


def test_as_much_memory_holds_more_tokens(tiny_model: Path) -> None:
    held = {}
    for kept_as in ("auto", "bf16", "int8", "int4"):
        engine = Engine(
            str(tiny_model), dtype="bfloat16", kv_cache_dtype=kept_as, device="cpu", max_num_seqs=2,
            max_num_batched_tokens=64, kv_cache_memory="1MiB", block_size=16,
        )  # fmt: skip
        cache = engine.executor.caches[0]
        held[kept_as] = engine.scheduler.pools[0].n_usable
        numbers = cache.keys.numel() * cache.keys.element_size() + 4 * (cache.scales[0].numel() if cache.scales else 0)
        assert 0.99 * (1 << 20) < 2 * numbers * len(engine.executor.caches) <= 1 << 20
        engine.close()
    assert held["auto"] == held["bf16"]
    assert held["int8"] == pytest.approx(held["bf16"] * 32 / 20, rel=0.01)  # heads of 16 elements, and 4 bytes of scale
    assert held["int4"] == pytest.approx(held["bf16"] * 32 / 12, rel=0.01)


def plant(path: Path, layer: int, bias: float) -> None:
    """Make one element of the bias of a layer's keys large."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.{layer}.self_attn.k_proj.bias"][3] = bias
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_keys_with_an_outlier_for_a_bias_are_refused(tmp_path: Path, quantization: str) -> None:
    path = save_model(tmp_path / "qwen2", "qwen2", layers=2)

    def load(kept_as: KVCacheDType) -> None:
        options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_memory": "1MiB"}
        Engine(str(path), dtype="float32", quantization=quantization, kv_cache_dtype=kept_as, **options).close()

    for kept_as in ("fp8", "int8", "int4"):
        load(kept_as)
    plant(path, 1, -50.0)  # of elements that are about 2.4: 64 inputs, and weights of 0.3
    for kept_as in ("fp8", "int8", "int4"):
        with pytest.raises(JobError, match=rf"kv_cache_dtype: {kept_as} .* layer 1: .* 50, 2\d times .*: bf16$"):
            load(kept_as)
    for kept_as in ("auto", "bf16"):
        load(kept_as)
    plant(path, 1, 5.0)
    load("int8")


@pytest.mark.parametrize("kept_as", ["auto", *DTYPES])
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 32), (80, 16), (64, 2)])
def test_a_pool_takes_the_bytes_that_are_planned_on_any_device(
    kept_as: KVCacheDType, head_dim: int, block_size: int
) -> None:
    dtype = DTYPES.get(kept_as, torch.float16)
    cache = KVCache.zeros(
        7, 3, block_size, head_dim, dtype, torch.device("meta")
    )  # as on a GPU: memory as torch has it
    config = {"head_dim": head_dim, "num_key_value_heads": 3, "num_hidden_layers": 1}
    planned = 7 * block_size * kv_bytes_per_token(config, "float16", kept_as)
    assert cache.keys.untyped_storage().nbytes() == planned
    parts = [cache.keys, cache.values, *(cache.scales or ())]
    assert {part.untyped_storage()._cdata for part in parts} == {cache.keys.untyped_storage()._cdata}
    assert sum(part.numel() * part.element_size() for part in parts) == planned
