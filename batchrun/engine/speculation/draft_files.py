"""The files of the draft model, and whether its tokens are the target's. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from batchrun.errors import JobError
from batchrun.job import SpeculativeSpec
from batchrun.model_files import ModelFiles, resolve
from batchrun.models.families import model_config
from batchrun.tokenization.tokenizer import Tokenizer

_FIELD = "engine.speculative_config.model"


def resolve_draft(
    spec: SpeculativeSpec, target: ModelFiles, tokenizer: Tokenizer, *, weights: bool = True
) -> ModelFiles | None:
    """The files of the draft model that drafts for ``target``, whose tokenizer is given; None where there is none.

    ``weights`` as of :func:`~batchrun.model_files.resolve`. The two vocabularies have the same tokens under the same
    ids, and differ in size by padding alone. The draft model's context may be the shorter one.

    Raises JobError, which names the field, where there is no such model or it cannot draft for this one.
    """
    if spec.drafter != "draft_model" or spec.model is None:
        return None
    try:
        files = resolve(spec.model, weights=weights)
        model_config(files.config)
        difference = _first_difference(tokenizer.tokens(), Tokenizer.load(files).tokens())
        if difference is not None:
            raise JobError(f"{files.reference} has other tokens than {target.reference}: {difference}")
    except JobError as error:
        raise JobError(f"{_FIELD}: {error}") from None
    return files


def _first_difference(target: Mapping[int, str], draft: Mapping[int, str]) -> str | None:
    """The lowest id, padding left out, that is not the same token in both."""
    differing = _without_padding(target) ^ _without_padding(draft)
    if not differing:
        return None
    number = min(differing)[0]
    if number not in draft:
        return f"it lacks token {number}, {target[number]!r}"
    there = f"not {target[number]!r}" if number in target else "which is none there"
    return f"token {number} is {draft[number]!r}, {there}"


def _without_padding(tokens: Mapping[int, str]) -> set[tuple[int, str]]:
    """The tokens, but those by which a GGUF file fills its vocabulary up to the rows of the embedding."""
    return {(number, token) for number, token in tokens.items() if token != f"[PAD{number}]"}
