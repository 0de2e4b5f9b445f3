"""The engine's greedy answers are transformers' answers, whatever the pool, the budget and the disturbances."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun.engine.scheduler import Scheduler
from batchrun.sampling import SamplingParams
from tests.engine.driver import Driver, guesses, load_decoder, request
from tests.models import FAMILIES, greedy_with, save_model

NEW_TOKENS = 12


@functools.cache
def prompts(count: int = 24, seed: int = 0) -> list[list[int]]:
    """Prompts of which many share beginnings, with lengths around block multiples."""
    rng = random.Random(seed)
    stems = [[rng.randrange(256) for _ in range(length)] for length in (7, 8, 9, 16, 31, 33, 48)]
    made = [rng.choice(stems)[: rng.randrange(1, 49)] + [rng.randrange(256) for _ in range(rng.randrange(0, 9))]
            for _ in range(count)]  # fmt: skip
    return made + stems


class Model:
    """A tiny model, as transformers runs it and as the engine does."""

    def __init__(self, path: Path) -> None:
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.decoder = load_decoder(path)
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self.answers:
            self.answers[key] = greedy_with(self.reference, prompt, NEW_TOKENS)
        return self.answers[key]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(save_model(tmp_path_factory.mktemp("models") / request.param, request.param))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    mixed = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": Model(save_model(root / "llama", "llama")),
        "mistral": Model(save_model(root / "mistral", "mistral")),
        "qwen2 with both kinds of layers": Model(save_model(root / "mixed", "qwen2", **mixed)),
    }


GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_every_family_answers_as_transformers_does(model: Model, prefix_caching: bool) -> None:
    requests = [request(index, prompt, GREEDY) for index, prompt in enumerate(prompts())]
    with Driver(model.decoder, prefix_caching=prefix_caching) as driver:
        driver.run(requests)
    for each in requests:
        assert each.output_ids == model.answer(each.tokens[: each.n_prompt])
    assert (driver.scheduler.counters.cached_tokens > 0) is prefix_caching


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_shape_or_disturbance_changes_an_answer(models: dict[str, Model], data: st.DataObject) -> None:
    """Pool size, block size, budget, prefix cache, overlap, drafts right and wrong, and forced preemption.

    Over three kinds of KV groups.
    """
    model = models[data.draw(st.sampled_from(sorted(models)), "model")]
    block_size = data.draw(st.sampled_from([2, 4, 8, 16]), "block size")
    chosen = data.draw(st.lists(st.sampled_from(prompts()), min_size=1, max_size=12), "prompts")
    longest = max(map(len, chosen)) + NEW_TOKENS
    least = -(-longest // block_size) + 1
    driver = Driver(
        model.decoder,
        n_blocks=least + data.draw(st.integers(0, 3 * least), "spare blocks"),
        block_size=block_size,
        max_num_seqs=data.draw(st.integers(1, 8), "sequences"),
        budget=data.draw(st.integers(1, 80), "budget"),
        prefix_caching=data.draw(st.booleans(), "prefix cache"),
        overlap=data.draw(st.booleans(), "overlap"),
    )
    preempted = data.draw(st.sets(st.integers(0, 60), max_size=12), "steps that preempt")

    def disturb(number: int, scheduler: Scheduler) -> None:
        if number in preempted:
            scheduler.preempt_newest()

    requests = [request(index, prompt, GREEDY) for index, prompt in enumerate(chosen)]
    guess = None
    if data.draw(st.booleans(), "drafts"):
        guess = guesses(
            dict(enumerate(map(model.answer, chosen))), random.Random(data.draw(st.integers(0, 99), "seed"))
        )
    with driver:
        driver.run(requests, disturb, guess)
    for each in requests:
        assert each.output_ids == model.answer(each.tokens[: each.n_prompt])


def test_a_second_run_finds_the_prompts_of_the_first(models: dict[str, Model]) -> None:
    """Cached blocks are asked for again after others were evicted: no block is found by what it held before."""
    model = models["llama"]
    with Driver(model.decoder, n_blocks=24) as driver:
        for seed in (1, 2, 1, 3, 2, 1):
            requests = [request(index, prompt, GREEDY) for index, prompt in enumerate(prompts(6, seed)[:6])]
            driver.run(requests)
            for each in requests:
                assert each.output_ids == model.answer(each.tokens[: each.n_prompt])


def test_a_fully_cached_prompt_still_computes_its_last_token(models: dict[str, Model]) -> None:
    model = models["llama"]
    prompt = prompts()[-4]  # a whole number of blocks
    assert len(prompt) % 8 == 0
    with Driver(model.decoder) as driver:
        for _ in range(2):
            each = request(0, prompt, GREEDY)
            driver.run([each])
            assert each.output_ids == model.answer(prompt)
        assert each.cached == len(prompt) - 8


def test_a_shared_prefix_is_computed_once(models: dict[str, Model]) -> None:
    stem = prompts()[-1]
    requests = [request(index, [*stem, index], GREEDY) for index in range(12)]
    with Driver(models["llama"].decoder) as driver:
        driver.run(requests)
        counters = driver.scheduler.counters
    assert counters.computed_tokens == len(stem) + 12 + 12 * (NEW_TOKENS - 1)


def test_generated_tokens_of_an_earlier_run_are_gone_on_from(models: dict[str, Model]) -> None:
    model = models["mistral"]
    prompt = prompts()[3]
    whole = model.answer(prompt)
    resumed = [request(kept, prompt, GREEDY, whole[:kept]) for kept in range(NEW_TOKENS)]
    with Driver(model.decoder) as driver:
        driver.run(resumed)
    for each in resumed:
        assert each.output_ids == whole
