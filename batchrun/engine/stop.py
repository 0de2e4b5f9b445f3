"""When a request ends, and the text that its tokens make."""

from __future__ import annotations

from batchrun.engine.request import Request
from batchrun.tokenization.tokenizer import Tokenizer


def finish_reason(request: Request, tokenizer: Tokenizer) -> str | None:
    """Why the newest token ends the request: ``stop``, ``length``, or None. Sets ``request.text`` on a stop string."""
    params = request.params
    if request.n_output >= params.min_tokens:
        if request.tokens[-1] in request.stop_ids:
            return "stop"
        if params.stop and (text := _cut_at_stop(request, tokenizer)) is not None:
            request.text = text
            return "stop"
    return "length" if len(request.tokens) >= request.max_total else None


def output_text(request: Request, tokenizer: Tokenizer) -> str:
    """The generated text: all ids decoded at once, so a character split over tokens is whole.

    A stop token is not part of it, unless ``include_stop_str_in_output``.
    """
    if request.text is not None:
        return request.text
    ids = request.output_ids
    if (
        request.finish_reason == "stop"
        and ids[-1] in request.stop_ids
        and not request.params.include_stop_str_in_output
    ):
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=request.params.skip_special_tokens)


def _cut_at_stop(request: Request, tokenizer: Tokenizer) -> str | None:
    """The text up to the first stop string, or None while there is none.

    Stop strings that end within the first ``min_tokens`` tokens do not count.
    """
    params = request.params
    ids = request.output_ids

    def decode(part: list[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=params.skip_special_tokens)

    # The newest token completes any match. A character takes at most four tokens of one byte.
    recent = decode(ids[-(4 * max(map(len, params.stop)) + 4) :])
    if not any(stop in recent for stop in params.stop):
        return None
    text = decode(ids)
    before = len(decode(ids[: params.min_tokens])) if params.min_tokens else 0
    starts = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in params.stop]
    found = [(at, stop) for at, stop in starts if at >= 0]
    if not found:
        return None
    at, stop = min(found, key=lambda match: match[0])
    return text[: at + len(stop)] if params.include_stop_str_in_output else text[:at]
