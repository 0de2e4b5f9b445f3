"""`Engine` as Python users meet it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from batchrun import Engine, SamplingParams
from batchrun.engine import memory
from batchrun.errors import JobError
from batchrun.job import SpeculativeSpec
from tests.models import greedy_with, save_model


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(str(tiny_model), dtype="float32", max_model_len=128, max_num_seqs=8)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def test_prompts_are_text_ids_or_messages(engine: Engine, reference: transformers.PreTrainedModel) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompts = ["some text", [1, 2, 3], messages]
    results = {result.index: result for result in engine.generate(prompts, GREEDY)}
    chat = engine.tokenizer.encode(engine.tokenizer.render_chat(messages), add_special_tokens=False)
    for index, ids in enumerate([engine.tokenizer.encode("some text", add_special_tokens=True), [1, 2, 3], chat]):
        assert list(results[index].token_ids) == greedy_with(reference, ids, 10)
        assert list(results[index].prompt_token_ids) == ids
        assert results[index].text == engine.tokenizer.decode(results[index].token_ids)
        assert results[index].finish_reason == "length"


def test_a_prompt_that_cannot_run_does_not_stop_the_others(engine: Engine) -> None:
    prompts = [[1, 2], [], [5] * 500, [10_000], [3, 4]]
    results = {result.index: result for result in engine.generate(prompts, GREEDY)}
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert results[0].error is None
    assert results[4].error is None
    assert "no tokens" in (results[1].error or "")
    assert "500 tokens" in (results[2].error or "")
    assert "vocabulary" in (results[3].error or "")


def test_parameters_may_differ_by_prompt(engine: Engine) -> None:
    params = [GREEDY.override({"max_tokens": count}) for count in (1, 5, 9)]
    results = {result.index: result for result in engine.generate([[1], [2], [3]], params)}
    assert [len(results[index].token_ids) for index in range(3)] == [1, 5, 9]


def test_the_context_bounds_the_output(engine: Engine) -> None:
    (result,) = engine.generate([[7] * 120], GREEDY.override({"max_tokens": 100}))
    assert len(result.token_ids) == 8
    assert result.finish_reason == "length"


def test_stop_ids_and_eos_end_the_text(engine: Engine) -> None:
    (whole,) = engine.generate([[9, 8, 7]], GREEDY)
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    (stopped,) = engine.generate([[9, 8, 7]], GREEDY.override({"stop_token_ids": [stop]}))
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == engine.tokenizer.decode(whole.token_ids[:first])
    more = GREEDY.override({"stop_token_ids": [stop], "min_tokens": 8})
    (longer,) = engine.generate([[9, 8, 7]], more)
    assert len(longer.token_ids) >= 8


def test_stop_strings_cut_the_text(engine: Engine) -> None:
    (whole,) = engine.generate(["abc"], GREEDY.override({"max_tokens": 40}))
    for begin in range(2, 20, 3):
        stop = whole.text[begin : begin + 2]
        if "\ufffd" in stop or not stop:
            continue
        at = whole.text.index(stop)
        given = GREEDY.override({"max_tokens": 40, "stop": [stop]})
        (cut,) = engine.generate(["abc"], given)
        (kept,) = engine.generate(["abc"], given.override({"include_stop_str_in_output": True}))
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[:at]
        assert kept.text == whole.text[: at + len(stop)]


def test_logprobs_of_output_and_prompt(engine: Engine, reference: transformers.PreTrainedModel) -> None:
    prompt = [5, 50, 100, 200, 7]
    params = GREEDY.override({"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 4})
    (result,) = engine.generate([prompt], params)
    with torch.inference_mode():
        table = reference(torch.tensor([[*prompt, *result.token_ids]])).logits[0].double().log_softmax(-1)
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0].logprob is None
    entries = [*result.prompt_logprobs[1:], *result.logprobs]
    for position, entry in enumerate(entries):
        row = table[position]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
        best = row.topk(len(entry.top))
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert [entry.token_id for entry in entries] == [*prompt[1:], *result.token_ids]


def test_scored_prompts_are_whole_although_their_prefix_is_cached(engine: Engine) -> None:
    prompt = list(range(100))
    list(engine.generate([prompt], GREEDY))
    (result,) = engine.generate([prompt], GREEDY.override({"prompt_logprobs": 0}))
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 100
    assert all(entry.logprob is not None and math.isfinite(entry.logprob) for entry in result.prompt_logprobs[1:])


def test_a_seed_decides_and_no_seed_does_not(engine: Engine) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3]] * 6
    seeded = [hot.override({"seed": 42})] + [hot] * 5
    runs = [{r.index: r.token_ids for r in engine.generate(prompts, seeded)} for _ in range(3)]
    alone = next(engine.generate([[1, 2, 3]], hot.override({"seed": 42}))).token_ids
    assert {run[0] for run in runs} == {alone}
    assert len({ids for run in runs for index, ids in run.items() if index}) > 10


def test_stop_strings_within_min_tokens_do_not_count(engine: Engine) -> None:
    (whole,) = engine.generate(["abc"], GREEDY.override({"max_tokens": 40}))
    early = whole.text[1:3]
    again = whole.text.find(early, len(engine.tokenizer.decode(whole.token_ids[:20])) - 1)
    params = GREEDY.override({"max_tokens": 40, "min_tokens": 20, "stop": [early]})
    (result,) = engine.generate(["abc"], params)
    assert len(result.token_ids) >= 20
    assert result.text == (whole.text if again < 0 else whole.text[:again])


def test_a_row_whose_logits_are_no_numbers_fails_alone(tmp_path: Path) -> None:
    """One embedding row is not a number, so are the logits of the prompt that has it, and of no other."""
    path = save_model(tmp_path / "broken")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.nan
    model.save_pretrained(path)
    engine = Engine(str(path), max_model_len=64, max_num_seqs=4, kv_cache_memory="96KiB")
    allowed = GREEDY.override({"max_tokens": 3})
    results = {r.index: r for r in engine.generate([[1, 2], [3, 7], [4, 5], [6, 8]] * 3, allowed)}
    engine.close()
    for index, result in results.items():
        assert (result.error is not None) is (index % 4 == 1)
        assert "not numbers" in (result.error or "not numbers")


def test_one_call_at_a_time(engine: Engine) -> None:
    first = engine.generate([[1], [2], [3]], GREEDY)
    next(first)
    with pytest.raises(RuntimeError, match="at work"):
        next(engine.generate([[4]], GREEDY))
    first.close()


def test_results_left_untaken_do_not_return_later(engine: Engine) -> None:
    next(engine.generate([[index] for index in range(20)], GREEDY))
    assert not engine.has_work
    assert [result.index for result in engine.generate([[1]], GREEDY)] == [0]


def test_prompts_are_taken_in_as_they_are_needed(engine: Engine) -> None:
    taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal taken
        for index in range(10_000):
            taken = index + 1
            yield [index % 250]

    next(engine.generate(prompts(), GREEDY.override({"max_tokens": 1})))
    assert taken < 10_000


@pytest.mark.parametrize("prompts", ["text", {"role": "user"}, [1, 2, 3], [{"role": "user", "content": "hello"}]])
def test_one_prompt_is_not_taken_for_a_list_of_them(engine: Engine, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompts has to be a list of prompts"):
        list(engine.generate(prompts, GREEDY))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temprature": 1}, "temprature: unknown parameter; did you mean temperature?"),
        (
            {"top_p": 2, "max_tokens": "x"},
            "top_p: must be at most 1.0, not 2; max_tokens: must be a whole number, not 'x'",
        ),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens (9) is above max_tokens (3)"),
    ],
)
def test_bad_sampling_parameters_are_told_in_one_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**parameters)


def test_options_and_models_that_cannot_work_are_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match=r"^max_seqs: unknown option of the engine; did you mean max_num_seqs\?$"):
        Engine(str(tiny_model), max_seqs=3)
    with pytest.raises(ValueError, match=r"^dtype: must be auto, float32, .*, not 'int3'$"):
        Engine(str(tiny_model), dtype="int3")
    with pytest.raises(JobError, match=r"cannot be allocated; set it lower, or engine\.max_num_seqs"):
        Engine(str(tiny_model), max_num_seqs=10**12)
    with pytest.raises(JobError, match="no-such-model"):
        Engine(str(tmp_path / "no-such-model"))
    with pytest.raises(JobError, match="kv_cache_memory"):
        Engine(str(tiny_model), kv_cache_memory="4KiB")
    monkeypatch.setattr("batchrun.engine.memory._why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match=r"engine\.device: cuda cannot be used: PyTorch .* newer NVIDIA driver"):
        Engine(str(tiny_model), device="cuda")


def test_speculation_is_configured_by_a_mapping(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    engine.close()
    assert engine.spec.speculative_config == SpeculativeSpec(method="ngram", num_speculative_tokens=3)
    for config, message in (
        ({"metod": "ngram"}, "speculative_config.metod: unknown parameter; did you mean method?"),
        ({"method": "draft_model"}, "speculative_config: method draft_model needs model"),
        ({"num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens: must be at least 1 or auto, not 0"),
        ("ngram", "speculative_config: must be a mapping, not 'ngram'"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            Engine(str(tiny_model), speculative_config=config)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tmp_path: Path, family: str, dtype: str) -> None:
    path = save_model(tmp_path / family, family)
    engine = Engine(str(path), dtype=dtype, max_model_len=64)
    results = list(engine.generate([[1, 2, 3], [4, 5]], GREEDY))
    engine.close()
    assert [len(result.token_ids) for result in results] == [10, 10]


@pytest.mark.parametrize("prompt", [["1", "2"], [1.9, 2.2], b"bytes", [1, None], [["a"]], [True]])
def test_what_is_no_token_id_is_a_result_with_an_error(engine: Engine, prompt: Any) -> None:
    good, bad = sorted(engine.generate([[5, 6], prompt], GREEDY), key=lambda result: result.index)
    assert good.token_ids
    assert bad.error == "a prompt is text, whole numbers that are token ids, or messages"


def test_params_are_as_many_as_prompts(engine: Engine) -> None:
    with pytest.raises(ValueError, match="params has 1 entries, fewer than there are prompts"):
        list(engine.generate([[5], [6]], [GREEDY]))
    assert not engine.has_work


def test_a_closed_engine_says_so(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model))
    results = engine.generate([[5, 6]] * 20, SamplingParams(max_tokens=3, temperature=0))
    next(results)
    engine.close()
    with pytest.raises(RuntimeError, match="this engine was closed"):
        list(results)
    with pytest.raises(RuntimeError, match="this engine was closed"):
        list(engine.generate([[5]]))


class Driver:
    """A driver of NVIDIA's with one GPU of a compute capability."""

    def __init__(self, major: int) -> None:
        self._major = major

    def cuInit(self, _: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        assert (attribute, device) == (75, 0)
        value._obj.value = self._major
        return 0


@pytest.mark.parametrize(("major", "device"), [(7, "cpu"), (8, "cuda"), (12, "cuda")])
def test_a_gpu_that_is_too_old_is_not_chosen(major: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(memory, "find_spec", lambda name: None)  # else this PyTorch's build is asked first
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Driver(major))
    assert memory.resolve_device("auto") == device
    if device == "cpu":
        with pytest.raises(JobError, match=r"compute capability is 7\.x, and 8\.0 is needed"):
            memory.resolve_device("cuda")


def test_a_device_that_is_not_there_is_told_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("batchrun.engine.engine.resolve", lambda *_: pytest.fail("the model was looked for"))
    with pytest.raises(JobError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        Engine("pypi://no-such-model", device="cuda")
