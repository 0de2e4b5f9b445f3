"""The draft model: found before anything loads, and refused unless its tokens are the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from batchrun.engine.speculation.draft_files import resolve_draft
from batchrun.errors import JobError
from batchrun.job import SpeculativeSpec, load_job
from batchrun.model_files import ModelFiles, resolve
from batchrun.plan import make_plan
from batchrun.preflight import preflight
from batchrun.tokenization.tokenizer import Tokenizer
from tests import gguf_files
from tests.jobs import write_job
from tests.models import SPECIAL, save_model


def draft_for(target: ModelFiles, draft: Path) -> ModelFiles | None:
    return resolve_draft(SpeculativeSpec(model=str(draft)), target, Tokenizer.load(target))


def refusal(target: Path, draft: Path) -> str:
    with pytest.raises(JobError) as caught:
        draft_for(resolve(str(target)), draft)
    field, _, message = str(caught.value).partition(": ")
    assert field == "engine.speculative_config.model"
    return message.replace(str(target), "TARGET").replace(str(draft), "DRAFT")


def gguf(path: Path, tokens: list[str], merges: list[str], end: str = "a") -> Path:
    """A byte-level tokenizer in a GGUF file, `end` and what follows it in ``tokens`` being control tokens."""
    controls = len(tokens) - tokens.index(end) if end in tokens else 0
    types = [1] * (len(tokens) - controls) + [3] * controls
    return gguf_files.write_tokenizer(
        path, model="gpt2", tokens=tokens, token_types=types, merges=merges, pre="smollm", special={"eos": 0}
    )


def swapped(folder: Path) -> Path:
    """The model in ``folder``, its tokens a and b under each other's ids."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokenizer))
    return folder


def extended(folder: Path) -> Path:
    """The model in ``folder`` with one more token."""
    path = folder / "tokenizer.json"
    tokenizer = Backend.from_file(str(path))
    tokenizer.add_tokens(["new"])
    tokenizer.save(str(path))
    return folder


def test_a_smaller_model_with_the_same_tokens_drafts(tmp_path: Path, tiny_model: Path) -> None:
    draft = save_model(tmp_path / "draft", layers=1, vocab_size=384, max_position_embeddings=64)  # rows, and no tokens
    files = draft_for(resolve(str(tiny_model)), draft)
    assert files is not None
    assert files.reference == str(draft)
    assert resolve_draft(SpeculativeSpec(), resolve(str(tiny_model)), Tokenizer.load(files)) is None


def test_a_token_under_another_id_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    number = min(Tokenizer.load(resolve(str(tiny_model))).encode("ab", add_special_tokens=False))
    message = refusal(tiny_model, swapped(save_model(tmp_path / "draft", layers=1)))
    assert message == f"DRAFT has other tokens than TARGET: token {number} is 'b', not 'a'"


def test_one_token_more_is_refused_on_either_side(tmp_path: Path, tiny_model: Path) -> None:
    more, number = extended(save_model(tmp_path / "more", layers=1)), 256 + len(SPECIAL)
    known = f"token {number} is 'new', which is none there"
    assert refusal(tiny_model, more) == f"DRAFT has other tokens than TARGET: {known}"
    assert refusal(more, tiny_model) == f"DRAFT has other tokens than TARGET: it lacks token {number}, 'new'"


def test_tokens_of_a_gguf_file_are_those_of_a_hugging_face_directory(tmp_path: Path) -> None:
    tokens, merges = gguf_files.train_bpe(300)
    target = save_model(tmp_path / "target", layers=1)
    saved = json.loads((target / "tokenizer.json").read_text())
    saved["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    saved["model"]["merges"] = [merge.split(" ") for merge in merges]
    for number, added in enumerate(saved["added_tokens"], len(tokens)):
        added["id"] = number
    (target / "tokenizer.json").write_text(json.dumps(saved))
    padding = [f"[PAD{number}]" for number in range(len(tokens) + len(SPECIAL), 320)]
    padded = gguf(tmp_path / "padded.gguf", [*tokens, *SPECIAL, *padding], merges, SPECIAL[0])
    assert draft_for(resolve(str(target)), padded) is not None
    assert draft_for(resolve(str(padded)), target) is not None
    cut = gguf(tmp_path / "cut.gguf", [*tokens, *SPECIAL[:-1]], merges, SPECIAL[0])
    number = len(tokens) + len(SPECIAL) - 1
    assert refusal(target, cut) == f"DRAFT has other tokens than TARGET: it lacks token {number}, {SPECIAL[-1]!r}"
    displaced = gguf(tmp_path / "displaced.gguf", [*tokens, "[PAD7]", *SPECIAL], merges, SPECIAL[0])
    assert f"token {len(tokens)} is '[PAD7]', not {SPECIAL[0]!r}" in refusal(target, displaced)


def test_what_is_no_model_or_no_decoder_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    assert refusal(tiny_model, tmp_path / "none").startswith("no model at 'DRAFT'")
    draft = save_model(tmp_path / "draft", layers=1)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert refusal(tiny_model, draft).startswith("model architecture GPT2LMHeadModel is not supported")


def test_a_job_is_checked_with_its_draft_model(tmp_path: Path, tiny_model: Path) -> None:
    draft = save_model(tmp_path / "draft", layers=1)
    speculation = {"speculative_config": {"model": str(draft)}}
    path = write_job(tmp_path, tiny_model, [{"id": 1, "text": "a"}], engine=speculation)
    checked = preflight(load_job(path))
    assert checked.draft is not None
    assert f"drafts   {draft} (blake2b:" in checked.describe()
    swapped(draft)
    with pytest.raises(JobError) as caught:
        preflight(load_job(path, [f"output.path={path}/out"]))
    faults = str(caught.value).splitlines()
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if str(draft) in text)
    assert len(faults) == 2
    assert "output.path" in faults[1]
    assert faults[0].startswith(f"{path}:{line}: engine.speculative_config.model: {draft} has other tokens than")


def test_a_plan_counts_the_draft_models_weights_and_its_keys_and_values(tmp_path: Path, tiny_model: Path) -> None:
    draft = save_model(tmp_path / "draft", layers=1)
    path = write_job(
        tmp_path,
        tiny_model,
        [{"id": 1, "text": "a"}],
        model={"dtype": "float32", "kv_cache_dtype": "int8"},
        engine={"device": "cpu", "block_size": 16, "kv_cache_memory": "1MiB"},
    )
    alone, both = (
        make_plan(load_job(path, overrides)) for overrides in ([], [f"engine.speculative_config.model={draft}"])
    )
    assert (alone.draft, alone.draft_weight_bytes, alone.draft_kv_bytes_per_token) == (None, 0, 0)
    assert "draft" not in alone.describe()
    layer = 2 * 2  # a key and a value of each KV head
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token == 3 * layer * (16 + 4)
    assert both.draft_kv_bytes_per_token == layer * 16 * 4
    assert both.kv_blocks == (1 << 20) // (16 * (both.kv_bytes_per_token + both.draft_kv_bytes_per_token))
    assert both.kv_needed == alone.kv_needed // alone.kv_bytes_per_token * (240 + 256)
    assert both.weight_bytes == alone.weight_bytes
    matrices, tables = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96, 2 * 320 * 64
    assert both.draft_weight_bytes == 4 * (matrices + tables)
    assert f"280.0 KiB of weights, and 256 B a token in the same blocks: {draft}" in both.describe()
    rounded = make_plan(
        load_job(path, [f"engine.speculative_config={{model: {draft}, quantization: int8}}"])
    ).draft_weight_bytes
    assert rounded == int(1.25 * matrices) + 4 * tables
