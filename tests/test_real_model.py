"""The demo's model: its answers are those of transformers, and the reproducible mode keeps its bits on it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from batchrun import Engine, SamplingParams
from batchrun.bench.workload import DEMO_MODEL
from batchrun.engine.engine import Result
from batchrun.errors import JobError
from batchrun.model_files import ModelFiles, resolve
from batchrun.tokenization.tokenizer import Tokenizer
from batchrun.weights.write import write_directory
from tests.engine.drafting import Run, answers_under_drafts
from tests.models import greedy_with

pytestmark = pytest.mark.slow

ROWS = Path(__file__).parents[1] / "examples" / "data" / "messages.jsonl"
NEW_TOKENS = 16
NEAR_TIE = 1e-3  # logits closer than this may swap between two correct float32 programs,
PACKED_NEAR_TIE = 1e-2  # or where activations are rounded to 15 bits before they meet integers


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve(DEMO_MODEL)
    except JobError as error:
        pytest.skip(f"the demo's model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    tokenizer = Tokenizer.load(files)
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()[:16]]
    system = {"role": "system", "content": "Sum up the customer's message in one sentence."}
    chats = [tokenizer.render_chat([system, {"role": "user", "content": row["text"]}]) for row in rows]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


def greedy(files: ModelFiles, prompts: list[list[int]], **options: object) -> list[list[int]]:
    engine = Engine(files, dtype="float32", max_model_len=512, kv_cache_memory="128MiB", **options)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers = {result.index: list(result.token_ids) for result in engine.generate(prompts, params)}
    engine.close()
    return [answers[index] for index in range(len(prompts))]


Reference = tuple[Any, list[list[int]]]


@pytest.fixture(scope="module")
def reference(files: ModelFiles, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """transformers' model, and its answers to the first six prompts."""
    folder = tmp_path_factory.mktemp("reference") / "model"
    write_directory(files, "float32", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, [greedy_with(model, prompt, NEW_TOKENS) for prompt in prompts[:6]]


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "dequantize"},
        {
            "quantization": "dequantize",
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 48,
            "max_num_seqs": 16,
        },
        {"quantization": "dequantize", "reproducible": True},
        {},  # as they are stored: packed
        {"reproducible": True},
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_transformers(
    files: ModelFiles, prompts: list[list[int]], reference: Reference, options: dict[str, object]
) -> None:
    answers = greedy(files, prompts, **options)
    tie = NEAR_TIE if "quantization" in options else PACKED_NEAR_TIE
    model, answered = reference
    for index, wanted in enumerate(answered):
        if answers[index] == wanted:
            continue
        at = next(i for i, (ours, theirs) in enumerate(zip(answers[index], wanted, strict=True)) if ours != theirs)
        with torch.inference_mode():
            first, second = model(torch.tensor([prompts[index] + wanted[:at]])).logits[0, -1].topk(2).values.tolist()
        print(f"row {index} differs at token {at}, where the two best logits are {first - second:.2g} apart")
        assert first - second < tie


@pytest.fixture(scope="module")
def reproducible(files: ModelFiles) -> Iterator[Engine]:
    options = {"reproducible": True, "quantization": "dequantize"}
    engine = Engine(files, dtype="float32", max_model_len=512, kv_cache_memory="128MiB", **options)
    yield engine
    engine.close()


def test_reproducible_bits_alone_and_in_company(reproducible: Engine, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=7, ignore_eos=True, logprobs=1)

    def run(chosen: list[int]) -> dict[int, tuple[tuple[int, ...], list[object]]]:
        reproducible.reset_prefix_cache()
        results: list[Result] = list(reproducible.generate([prompts[index] for index in chosen], params))
        return {
            chosen[result.index]: (result.token_ids, [(e.logprob, e.top) for e in result.logprobs or ()])
            for result in results
        }

    everything = list(range(len(prompts)))
    whole = run(everything)
    random.Random(3).shuffle(everything)
    assert run(everything) == whole
    assert {index: outcome for index in (0, 5, 11) for outcome in run([index]).values()} == {
        index: whole[index] for index in (0, 5, 11)
    }


# ---- speculation


@pytest.fixture(scope="module")
def chats(files: ModelFiles) -> list[list[int]]:
    """128 prompts: each message of the example, and again with an instruction to repeat it."""
    tokenizer = Tokenizer.load(files)
    rows = [json.loads(line)["text"] for line in ROWS.read_text(encoding="utf-8").splitlines()[:64]]
    asked = [*rows, *(f"Repeat this message word for word: {text}" for text in rows)]
    return [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in asked
    ]


SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.95, "logprobs": 1},
    {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "min_tokens": 9},
]


@pytest.fixture(scope="module")
def draft(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model in four bits and with its first 20 layers alone, which are a model of their own."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    write_directory(files, "float32", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers = model.model.layers[:20]
    model.config.num_hidden_layers = 20
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answered(files: ModelFiles, chats: list[list[int]]) -> Callable[[dict[str, Any]], Run]:
    """The answers to ``chats`` under a ``speculative_config``."""
    params = [SamplingParams(**SETTINGS[index % 4], seed=index, max_tokens=20) for index in range(len(chats))]
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": "dequantize", "reproducible": True}
    options |= {"max_num_seqs": 32, "max_model_len": 1024, "kv_cache_memory": "160MiB"}
    return lambda config: answers_under_drafts(files, chats, params, config, **options)


@pytest.fixture(scope="module")
def undrafted(answered: Callable[[dict[str, Any]], Run]) -> list[tuple[object, ...]]:
    return answered({"method": "off"})[0]


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_no_drafter_moves_a_bit_of_a_real_model(
    answered: Callable[[dict[str, Any]], Run], undrafted: list[tuple[object, ...]], draft: Path, method: str
) -> None:
    config = {"method": method, **({"model": str(draft), "quantization": "int4"} if method == "draft_model" else {})}
    drafted, stats = answered(config)
    assert drafted == undrafted
    assert stats is not None
    print(f"{method}: {stats.tokens_per_forward} tokens of a forward pass, accepted {stats.acceptance}")
    assert stats.forwards > 500
    assert sum(stats.accepted) > 100
