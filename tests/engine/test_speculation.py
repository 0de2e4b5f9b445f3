"""Drafts move time and nothing else: answers, their distribution, keys and values are those of plain decoding."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun import Engine
from batchrun.engine import scheduler as scheduler_module
from batchrun.engine.request import Request, Step
from batchrun.engine.scheduler import Scheduler
from batchrun.engine.speculation import speculator
from batchrun.engine.speculation.speculator import Speculator
from batchrun.engine.transfer import layout_of, numbers_of, tensors_of
from batchrun.models.decoder import Decoder
from batchrun.ops import fixed_ops, torch_ops
from batchrun.sampling import SamplingParams
from tests.engine.drafting import Always, Run, answers_under_drafts
from tests.engine.driver import Driver, guesses, load_decoder, request
from tests.engine.test_sampler import draw, expected
from tests.models import VOCAB_SIZE, save_model

Outcome = list[tuple[list[int], list[object], str | None]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "flat", "llama", initializer_range=0.05, layers=2)


@pytest.fixture(scope="module")
def decoder(path: Path) -> Decoder:
    return load_decoder(path, reproducible=True)


def only(tokens: Sequence[int]) -> NDArray[np.int32]:
    """The mask that lets these tokens through."""
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def every_third(output: Sequence[int]) -> NDArray[np.int32]:
    """A grammar of a kind: which tokens may come depends on all that came before."""
    return only(range(first_of(output), VOCAB_SIZE, 3))


def first_of(output: Sequence[int]) -> int:
    return (sum(output) + len(output)) % 3


PARAMS = [
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=1, max_tokens=16, logprobs=2, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.5, max_tokens=16, min_tokens=9),
    SamplingParams(temperature=1.1, top_k=30, min_p=0.01, max_tokens=16, prompt_logprobs=1),
]


def make_requests(mask: Callable[[Sequence[int]], NDArray[np.int32]] | None = None) -> list[Request]:
    rng = random.Random(2)
    made = []
    for index in range(16):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        each = request(index, prompt, PARAMS[index % len(PARAMS)], stop_ids=range(0, 256, 5) if index > 8 else ())
        each.mask = mask if index % 2 else None
        made.append(each)
    return made


def outcome(requests: list[Request]) -> Outcome:
    return [(each.output_ids, [*each.logprobs, *each.prompt_logprobs], each.finish_reason) for each in requests]


@pytest.mark.parametrize("mask", [None, every_third], ids=["free", "masked"])
def test_no_setting_tells_drafts_from_plain_decoding(
    decoder: Decoder, mask: Callable[[Sequence[int]], NDArray[np.int32]] | None
) -> None:
    plain = make_requests(mask)
    with Driver(decoder) as driver:
        driver.run(plain)
    answers = {each.key: each.output_ids for each in plain}
    assert len(set(map(tuple, answers.values()))) == len(plain)
    assert any(each.finish_reason == "stop" for each in plain)
    for overlap in (True, False):
        drafted = make_requests(mask)
        with Driver(decoder, overlap=overlap) as fewer:
            fewer.run(drafted, guess=guesses(answers, random.Random(1)))
        assert outcome(drafted) == outcome(plain)
        assert overlap or fewer.scheduler.counters.steps < 0.7 * driver.scheduler.counters.steps
    if mask is not None:
        for each in plain:
            follows = [first_of(each.output_ids[:i]) == token % 3 for i, token in enumerate(each.output_ids)]
            assert all(follows) is (each.mask is not None)


def test_what_follows_a_stop_within_a_row_is_dropped(decoder: Decoder) -> None:
    prompt, params = [3, 1, 4], SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    whole = request(0, prompt, params)
    with Driver(decoder) as driver:
        driver.run([whole])
    for stop in range(2, 9):
        first = whole.output_ids.index(whole.output_ids[stop])
        each = request(0, prompt, params, stop_ids=[whole.output_ids[stop]])
        with Driver(decoder, overlap=False) as driver:
            driver.run([each], guess=lambda drafted: whole.output_ids[drafted.n_output :])
            assert driver.scheduler.counters.steps == 1  # all of it was sampled at once
            assert driver.scheduler.counters.output_tokens == first + 1
        assert each.output_ids == whole.output_ids[: first + 1]
        assert each.logprobs == whole.logprobs[: first + 1]


# ---- keys and values


def kept(driver: Driver, each: Request, length: int) -> list[Tensor]:
    """A request's keys and values of its first ``length`` tokens, of all layers."""
    blocks = torch.tensor(each.blocks[0])
    found = [cache[blocks] for layer in driver.executor.caches for cache in (layer.keys, layer.values)]
    return [cache.transpose(1, 2).flatten(0, 1)[:length] for cache in found]


def test_keys_and_values_after_rejections_are_those_of_a_prefill(path: Path) -> None:
    decoder = load_decoder(path, ops=fixed_ops, packed=False)  # whose keys stand in the order of their tokens
    compared = []

    def compare(number: int, scheduler: Scheduler) -> None:
        for each in scheduler.running[number % 3 :: 3]:
            assert each.computed == len(each.tokens) - 1
            fresh = request(0, each.tokens[: each.computed], SamplingParams(max_tokens=1, temperature=0))
            with Driver(decoder) as other:
                other.scheduler.add(fresh)
                step = other.scheduler.schedule()
                assert step is not None
                output = other.executor.launch(step).result()
                pairs = zip(kept(driver, each, each.computed), kept(other, fresh, each.computed), strict=True)
                assert all(torch.equal(one, two) for one, two in pairs)
                for settled in other.scheduler.settle(step, output):
                    other.scheduler.finish(settled, "length")
            compared.append(each)

    requests = make_requests()
    wrong = {each.key: [7] * 16 for each in requests}
    with Driver(decoder, overlap=False) as driver:
        driver.run(requests, compare, guesses(wrong, random.Random(1)))
    assert len(compared) > 20


# ---- distributions

SAMPLING = [
    SamplingParams(max_tokens=3),
    SamplingParams(max_tokens=3, temperature=0.6),
    SamplingParams(max_tokens=3, temperature=1.4, top_p=0.7),
]
FEW = list(range(40, 46))  # tokens that a mask lets through


def few(output: Sequence[int]) -> NDArray[np.int32]:
    return only(FEW)


def distribution(decoder: Decoder, params: SamplingParams, prompt: list[int]) -> Tensor:
    """Of the next token among `FEW`: float64 [len(FEW)]."""
    logits = []
    each = request(0, prompt, params)
    with Driver(decoder) as driver:
        original = driver.executor._sample

        def listen(given: Tensor, *rest: object) -> object:
            logits.append(given[0].clone())
            return original(given, *rest)  # type: ignore[arg-type]

        driver.executor._sample = listen  # type: ignore[method-assign, assignment]
        driver.run([each])
    return expected(logits[0][FEW], params)


def chi_square(decoder: Decoder, params: SamplingParams, most: int, count: int = 1500) -> float:
    """How far outputs under drafts are from the model's distribution, in standard deviations of the statistic."""
    prompt, rng = [9, 8, 7], random.Random(most)
    requests = [request(index, prompt, params) for index in range(count)]
    for each in requests:
        each.mask = few

    def guess(drafted: Request) -> list[int]:
        return [rng.choice(FEW[:2]) for _ in range(most)]  # mostly the same ones, which an own draw would favour

    with Driver(decoder, overlap=False, n_blocks=1024) as driver:
        driver.run(requests, guess=guess)
    first = distribution(decoder, params, prompt)
    second = torch.stack([distribution(decoder, params, [*prompt, token]) for token in FEW])
    wanted = count * first[:, None] * second
    observed = torch.zeros_like(wanted)
    for each in requests:
        observed[FEW.index(each.output_ids[0]), FEW.index(each.output_ids[1])] += 1
    assert observed[wanted == 0].sum() == 0
    counted = wanted > 5
    freedom = int(counted.sum()) - 1
    statistic = ((observed - wanted)[counted] ** 2 / wanted[counted]).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("params", SAMPLING, ids=lambda params: str(params.model_dump(exclude_defaults=True)))
@pytest.mark.parametrize("most", [1, 2])
def test_outputs_are_drawn_from_the_models_distribution(decoder: Decoder, params: SamplingParams, most: int) -> None:
    assert chi_square(decoder, params, most) < 5


def test_drafts_accepted_by_a_draw_of_their_own_show(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: if neither statistic nor equality finds it, the tests above show nothing."""
    rng = random.Random(0)

    def verified(sampled: list[object], drafts: list[int]) -> list[object]:
        accepted: list[object] = []
        for draft in drafts:
            if rng.random() > 0.5:
                break
            accepted.append((draft, None))
        return [*accepted, sampled[len(accepted)]]

    plain = make_requests()
    with Driver(decoder) as driver:
        driver.run(plain)
    monkeypatch.setattr(scheduler_module, "_verified", verified)
    drafted = make_requests()
    with Driver(decoder, overlap=False) as driver:
        driver.run(drafted, guess=guesses({each.key: each.output_ids for each in plain}, random.Random(1)))
    assert outcome(drafted) != outcome(plain)
    assert chi_square(decoder, SAMPLING[0], 2) > 10


@pytest.mark.parametrize("params", SAMPLING, ids=lambda params: str(params.model_dump(exclude_defaults=True)))
@pytest.mark.parametrize("apart", [0.3, 1.0, 3.0])
def test_a_coupled_draft_agrees_as_often_as_theory_has_it(params: SamplingParams, apart: float) -> None:
    """Daliri, Musco and Suresh 2024: under shared Gumbel noise at least (1 - TV) / (1 + TV) of the time."""
    torch.manual_seed(3)
    target = 2 * torch.randn(12)
    draft = target + apart * torch.randn(12)
    count = 20_000
    agreed = draw(target, params, count, torch_ops) == draw(draft, params, count, torch_ops)
    rate = agreed.double().mean().item()
    distance = (expected(target, params) - expected(draft, params)).abs().sum().item() / 2
    bound = (1 - distance) / (1 + distance)
    assert rate > bound - 4 * math.sqrt(bound * (1 - bound) / count)
    assert rate <= 1 - distance + 4 * math.sqrt(distance * (1 - distance) / count)  # no coupling does better


# ---- the engine


def prompts() -> list[list[int]]:
    """128 prompts that repeat phrases, which many have in common."""
    rng = random.Random(4)
    phrases = [[rng.randrange(256) for _ in range(rng.randrange(2, 12))] for _ in range(6)]
    return [[token for _ in range(rng.randrange(1, 9)) for token in rng.choice(phrases)] for _ in range(128)]


def run(model: Path, config: dict[str, Any], **options: Any) -> Run:
    params = [PARAMS[index % 4].override({"seed": index, "max_tokens": 24}) for index in range(128)]
    shape: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 24, "max_num_batched_tokens": 96, "block_size": 8}
    shape |= {"kv_cache_memory": "400KiB"}
    return answers_under_drafts(str(model), prompts(), params, config, **shape | options)


CONFIGS = [{"method": "ngram"}, {"method": "suffix"}, {"method": "draft_model", "num_speculative_tokens": 4}]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["method"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_drafter_moves_a_bit(path: Path, tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    if config["method"] == "draft_model":
        config = {**config, "model": str(save_model(tmp_path / "draft", initializer_range=0.05, layers=1))}
    plain, nothing = run(path, {"method": "off"}, dtype=dtype, reproducible=True)
    drafted, stats = run(path, config, dtype=dtype, reproducible=True)
    assert drafted == plain
    assert nothing is None
    assert stats is not None
    assert stats.forwards > 100


def test_a_model_that_drafts_for_itself_is_always_right(path: Path) -> None:
    """The draft model samples with the target's noise, penalties and positions, from keys and values that hold."""
    config = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 5}
    _, stats = run(path, config, dtype="float32")
    assert stats is not None
    assert sum(stats.drafted) > 1000
    assert sum(stats.accepted) > 0.99 * sum(stats.drafted)  # but where rounding decides


def test_while_drafts_do_not_pay_steps_are_those_of_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing repeats in these answers, and steps take as long as they have tokens: the same ones are laid out."""
    settled = Speculator.settled

    def settle(self: Speculator, step: Step, finished: Sequence[Request], seconds: float, *, overlapped: bool) -> None:
        settled(self, step, finished, 1e-3 * step.n_tokens, overlapped=overlapped)

    monkeypatch.setattr(Speculator, "settled", settle)
    prompts = [[index, 3 * index % 256, 7] for index in range(64)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=index) for index in range(64)]
    layouts: dict[str, list[object]] = {}
    for method in ("off", "suffix"):
        engine = Engine(
            str(path), device="cpu", dtype="float32", max_num_seqs=32, speculative_config={"method": method}
        )
        executor, seen = engine.executor, layouts.setdefault(method, [])
        lay_out = executor._laid_out

        def listen(step: Step, lay_out: Any = lay_out, seen: list[object] = seen) -> object:
            laid_out = lay_out(step)
            seen.append(
                (layout_of(list(tensors_of(laid_out.batch))), list(numbers_of(laid_out.batch)), laid_out.rounds)
            )
            return laid_out

        monkeypatch.setattr(executor, "_laid_out", listen)
        assert len(list(engine.generate(prompts, params))) == 64
        stats = engine.speculation_stats()
        engine.close()
    assert stats is not None
    assert stats.forwards == 0
    assert len(layouts["off"]) > 70
    assert layouts["suffix"] == layouts["off"]


def test_a_draft_model_of_another_vocabulary_and_a_shorter_context(path: Path, tmp_path: Path) -> None:
    """Padding of the vocabulary may differ, in both directions; prompts may be longer than a step or its context."""
    for size in (262, VOCAB_SIZE + 40):
        draft = save_model(tmp_path / str(size), initializer_range=0.05, layers=1, vocab_size=size)
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        options = {"dtype": "float32", "reproducible": True, "max_num_batched_tokens": 32}
        plain, _ = run(path, {"method": "off"}, **options)
        drafted, stats = run(path, config, **options)
        assert drafted == plain
        assert stats is not None
        assert stats.forwards > 100


def test_nothing_is_drafted_beyond_the_draft_models_context(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = save_model(tmp_path / "draft", initializer_range=0.05, layers=1, max_position_embeddings=20)
    monkeypatch.setattr(speculator, "Controller", Always)
    config = {"model": str(draft)}
    engine = Engine(str(path), device="cpu", dtype="float32", max_model_len=128, speculative_config=config)
    rounds = []
    lay_out = engine.executor._laid_out

    def listen(step: Step) -> object:
        rounds.extend(each for round_ in step.rounds for each in round_.rows)
        return lay_out(step)

    monkeypatch.setattr(engine.executor, "_laid_out", listen)
    list(engine.generate([[1] * length for length in range(5, 60, 5)], SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.close()
    assert max(each.end for each in rounds) in (18, 19)  # a token after it is sampled, at most the twentieth


def test_a_prompt_longer_than_a_step_is_drafted_for_in_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator, "Controller", Always)
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "speculative_config": {"model": str(path)}}
    engine = Engine(str(path), device="cpu", dtype="float32", max_model_len=256, **options)
    prompts = [[seed * token % 251 for token in range(100)] for seed in (1, 2, 3)]
    list(engine.generate(prompts, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)))
    stats = engine.speculation_stats()
    engine.close()
    assert stats is not None
    assert sum(stats.accepted) > 0.99 * sum(stats.drafted) > 40


@pytest.mark.parametrize("aborted", [False, True])
def test_what_finished_before_a_step_failed_is_returned_once(
    path: Path, aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "Controller", Always)
    engine = Engine(str(path), device="cpu", dtype="float32", max_model_len=64)
    for key, count in enumerate((1, 9)):
        engine.add(engine.request(key, [5, 6, 7], SamplingParams(max_tokens=count, ignore_eos=True), key))
    assert engine.step() == []
    monkeypatch.setattr(engine.executor, "launch", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    if aborted:
        engine.abort()
    assert [each.key for each in engine.drain()] == ([] if aborted else [0])
    assert engine.drain() == []
    engine.close()
