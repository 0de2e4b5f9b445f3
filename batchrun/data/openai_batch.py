"""OpenAI batch files: lines that each hold a request, and the lines that answer them.

A malformed line (:class:`BatchCheck`) refuses the job, as a hosted batch service refuses the file. A fault of a body's
own parameters is an error of that line alone: whatever a body holds is honoured, changes nothing, or is named there.

Answers hold no time and no random id: equal results give equal bytes.
"""

from __future__ import annotations

import codecs
import difflib
import functools
import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchrun.data.json_text import dump_json, replace_surrogates
from batchrun.data.jsonl import parse_line
from batchrun.data.rows import InputFile
from batchrun.data.template import RowError
from batchrun.errors import without_credentials
from batchrun.tokenization.tokenizer import Tokenizer

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_LABELS = ("model", "user", "metadata", "store", "service_tier")  # change no result
_NEUTRAL: dict[str, Any] = {  # the only value, beside null, that there is support for; it changes no result
    "stream": False,
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logit_bias": {},
    "tools": [],
    "response_format": {"type": "text"},
}
_SAMPLING = (  # the names that SamplingParams has, too
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_OPTIONS = {"add_generation_prompt": bool, "continue_final_message": bool, "chat_template_kwargs": dict}
_CHAT_ONLY = ("messages", "max_completion_tokens", "top_logprobs", *_OPTIONS)

SHOWN_MODELS = 3
_SHOWN_FAULTS = 20
_DIGEST_BYTES = 16
_UNLIKELY = -9999.0  # stands for minus infinity, as OpenAI has it


# ---- lines in


class BatchCheck:
    """Checks the lines of one file, and keeps 24 bytes of each, for repeated ids, and the first faults."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, str]] = []  # (line, what is wrong), the first ones
        self.n_faults = 0
        self.models: dict[str, None] = {}  # names that bodies give, the first ones
        self.has_chats = False
        self.digests = bytearray()  # of the ids, and
        self.lines = array("q")  # the lines that these stand in

    def add(self, number: int, text: bytes) -> None:
        """Check one line."""
        try:
            line = parse_line(number, text)
        except ValueError as error:
            self._fault(number, str(error))
            return
        if faults := _line_faults(line):
            self._fault(number, "; ".join(faults))
        if isinstance(custom_id := line.get("custom_id"), str):
            self.digests += hashlib.blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
            self.lines.append(number)
        self.has_chats |= line.get("url") == CHAT_URL
        body = line.get("body")
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and len(self.models) <= SHOWN_MODELS:
            self.models[model] = None

    def _fault(self, number: int, text: str) -> None:
        self.n_faults += 1
        if len(self.faults) < _SHOWN_FAULTS:
            self.faults.append((number, text))


def batch_faults(checks: Mapping[InputFile, BatchCheck]) -> list[str]:
    """What is wrong with all the lines of a job, ``PATH:LINE: what``, in order; beyond 20 faults a count."""
    files, paths = list(checks), [without_credentials(file.path) for file in checks]
    found = [(place, line, text) for place, file in enumerate(files) for line, text in checks[file].faults]
    repeats, n_repeats = _repeated_ids(list(checks.values()))
    for (place, line), (first, first_line) in repeats:
        where = "" if first == place else f"{paths[first]} "
        found.append((place, line, f"custom_id is that of {where}line {first_line}"))
    found = sorted(found, key=lambda fault: fault[:2])[:_SHOWN_FAULTS]
    lines = [f"{paths[place]}:{line}: {text}" for place, line, text in found]
    more = sum(check.n_faults for check in checks.values()) + n_repeats - len(found)
    return [*lines, f"and {more:,} more"] if more else lines


def _repeated_ids(checks: list[BatchCheck]) -> tuple[list[tuple[tuple[int, int], tuple[int, int]]], int]:
    """The first ids that were there before, as places ((file, line), (file, line of the first one)), and their number.

    Ids are compared by hashes that do not collide.
    """
    halves = np.frombuffer(b"".join(check.digests for check in checks), "<u8").reshape(-1, 2)
    lines = np.concatenate([np.asarray(check.lines, np.int64) for check in checks])
    files = np.repeat(np.arange(len(checks)), [len(check.lines) for check in checks])
    order = np.lexsort((np.arange(len(lines)), halves[:, 1], halves[:, 0]))
    repeats = np.zeros(len(lines), np.bool_)
    repeats[1:] = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
    firsts = order[np.maximum.accumulate(np.where(repeats, 0, np.arange(len(lines))))]
    pairs = sorted(zip(order[repeats].tolist(), firsts[repeats].tolist(), strict=True))

    def place(index: int) -> tuple[int, int]:
        return int(files[index]), int(lines[index])

    return [(place(index), place(first)) for index, first in pairs[:_SHOWN_FAULTS]], len(pairs)


def _line_faults(line: dict[str, Any]) -> list[str]:
    """What a line lacks to be a request."""
    faults = [f"no {name}" for name in ("custom_id", "method", "url", "body") if line.get(name) is None]
    custom_id, method, url, body = (line.get(name) for name in ("custom_id", "method", "url", "body"))
    if custom_id is not None and (not isinstance(custom_id, str) or not custom_id):
        faults.append("custom_id has to be text that is not empty")
    if method is not None and method != "POST":
        faults.append(f"method has to be POST, not {shown(method)}")
    if url is not None and url not in (CHAT_URL, COMPLETIONS_URL):
        faults.append(f"url has to be {CHAT_URL} or {COMPLETIONS_URL}, not {shown(url)}")
    if body is not None and not isinstance(body, dict):
        faults.append("body has to be an object")
    elif body is not None and body.get("stream") is True:
        faults.append("body.stream must not be true: answers are written to files")
    return faults


def shown(value: Any) -> str:
    """A value of a line, for a message."""
    text = dump_json(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks for."""

    is_chat: bool
    prompt: Any  # as it stands in the body: messages of a chat, else text or token ids
    sampling: dict[str, Any]  # the parameters that the line gives, by SamplingParams' names; logprobs: None turns off
    options: dict[str, Any]  # the keys of PromptSpec that the line gives


def line_request(line: dict[str, Any]) -> LineRequest:
    """The request of a line. Raises RowError naming every parameter that there is no support for."""
    if faults := _line_faults(line):
        raise RowError("unreadable_row", "; ".join(faults))
    is_chat = line["url"] == CHAT_URL
    given = {name: value for name, value in line["body"].items() if value is not None}
    prompt_name = "messages" if is_chat else "prompt"
    known = {prompt_name, "logprobs", *_LABELS, *_SAMPLING, *_NEUTRAL} | set(_CHAT_ONLY if is_chat else ())
    unsupported = [_unknown(name, known) for name in given if name not in known]
    unsupported += [
        f"{name} other than {dump_json(neutral)}"
        for name, neutral in _NEUTRAL.items()
        if name in given and (type(given[name]) is not type(neutral) or given[name] != neutral)
    ]
    if unsupported:
        raise RowError("bad_sampling", f"unsupported: {', '.join(unsupported)}")
    if prompt_name not in given:
        raise RowError("missing_value", f"body has no {prompt_name}")
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    if is_chat:
        sampling |= _chat_sampling(given)
    elif "logprobs" in given:
        sampling["logprobs"] = given["logprobs"]
    return LineRequest(is_chat, _one_prompt(given[prompt_name], is_chat), sampling, _options(given))


def _unknown(name: str, known: set[str]) -> str:
    close = [] if name in _CHAT_ONLY else difflib.get_close_matches(name, sorted(known), n=1)
    return f"{name} (did you mean {close[0]}?)" if close else name


def _chat_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that chats have names of their own for."""
    sampling: dict[str, Any] = {}
    if "max_completion_tokens" in given:
        sampling["max_tokens"] = given["max_completion_tokens"]
        if given.get("max_tokens", sampling["max_tokens"]) != sampling["max_tokens"]:
            raise RowError("bad_sampling", "max_tokens and max_completion_tokens differ")
    logprobs = given.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, bool):
        raise RowError("bad_sampling", "logprobs has to be true or false")
    if given.get("top_logprobs") and not logprobs:
        raise RowError("bad_sampling", "top_logprobs needs logprobs: true")
    if logprobs is not None:
        sampling["logprobs"] = given.get("top_logprobs", 0) if logprobs else None
    return sampling


def _options(given: dict[str, Any]) -> dict[str, Any]:
    options = {name: given[name] for name in _OPTIONS if name in given}
    for name, value in options.items():
        if not isinstance(value, _OPTIONS[name]):
            kind = "true or false" if _OPTIONS[name] is bool else "an object"
            raise RowError("bad_prompt", f"{name} has to be {kind}")
    if options.get("add_generation_prompt") and options.get("continue_final_message"):
        raise RowError("bad_prompt", "add_generation_prompt and continue_final_message exclude each other")
    return options


def _one_prompt(value: Any, is_chat: bool) -> Any:
    """The prompt of a completion out of the list that it may stand in."""
    if is_chat or not isinstance(value, list) or not value or not all(isinstance(each, str | list) for each in value):
        return value
    if len(value) > 1:
        raise RowError("bad_prompt", f"unsupported: {len(value)} prompts in one line")
    return value[0]


# ---- lines out


class Tokens:
    """The bytes of single tokens, kept once they are known. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes_of = functools.lru_cache(maxsize=1 << 18)(tokenizer.token_bytes)

    def text_of(self, token_id: int) -> str:
        """The token's text, or its bytes where they are part of a character: ``bytes:\\xe3\\x81``."""
        own = self.bytes_of(token_id)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def answer_id(key: str, row: int) -> str:
    """The id of the line that answers row ``row`` of the file with that key."""
    return f"batch_req_{_digest(key, row)}"


def _digest(key: str, row: int) -> str:
    return hashlib.sha256(f"{replace_surrogates(key)}\n{row}".encode()).hexdigest()[:32]


def answer_line(
    line: Mapping[str, Any] | None, result: Mapping[str, Any], key: str, row: int, vocabulary: Tokens | None
) -> str:
    """The line that answers row ``row`` of the file with that key.

    ``result`` has the row's result columns by their own names; ``vocabulary`` is needed where it has log-probabilities.
    """
    name = _digest(key, row)
    answer: dict[str, Any] = {"id": answer_id(key, row), "custom_id": result["custom_id"]}
    if result["error"] is not None:
        code, _, message = result["error"].partition(": ")
        return dump_json(answer | {"response": None, "error": {"code": code, "message": message}})
    assert line is not None  # a row that has text was read
    body = _body(line, result, name, vocabulary)
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return dump_json(answer | {"response": response, "error": None})


def result_of_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The result columns that a line of :func:`answer_line` tells of, by their own names; no log-probabilities."""
    result: dict[str, Any] = dict.fromkeys(("generated_text", "finish_reason", "prompt_tokens", "completion_tokens"))
    if answer["response"] is None:
        error = f"{answer['error']['code']}: {answer['error']['message']}"
        return {"custom_id": answer["custom_id"], **result, "error": error}
    body = answer["response"]["body"]
    choice = body["choices"][0]
    result["generated_text"] = choice["message"]["content"] if "message" in choice else choice["text"]
    result["finish_reason"] = choice["finish_reason"]
    result |= {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"custom_id": answer["custom_id"], **result, "error": None}


def _body(line: Mapping[str, Any], result: Mapping[str, Any], name: str, vocabulary: Tokens | None) -> dict[str, Any]:
    is_chat = line["url"] == CHAT_URL
    model, logprobs = line["body"].get("model"), result.get("logprobs")
    if is_chat:
        message = {"role": "assistant", "content": result["generated_text"], "refusal": None}
        choice = {"index": 0, "message": message}
    else:
        choice = {"index": 0, "text": result["generated_text"]}
    if logprobs is not None:
        assert vocabulary is not None
        logprobs = _chat_logprobs(logprobs, vocabulary) if is_chat else _text_logprobs(logprobs, vocabulary)
    prompt_tokens, completion_tokens = result["prompt_tokens"], result["completion_tokens"]
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": model if isinstance(model, str) else "",
        "choices": [choice | {"logprobs": logprobs, "finish_reason": result["finish_reason"]}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _chat_logprobs(tokens: list[dict[str, Any]], vocabulary: Tokens) -> dict[str, Any]:
    def entry(token: dict[str, Any]) -> dict[str, Any]:
        own = vocabulary.bytes_of(token["token_id"])
        text = vocabulary.text_of(token["token_id"])
        return {"token": text, "bytes": list(own), "logprob": _finite(token["logprob"])}

    content = [entry(token) | {"top_logprobs": [entry(top) for top in token["top"]]} for token in tokens]
    return {"content": content, "refusal": None}


def _text_logprobs(tokens: list[dict[str, Any]], vocabulary: Tokens) -> dict[str, Any]:
    tops, offsets, decoder, position = [], [], codecs.getincrementaldecoder("utf-8")("replace"), 0
    for token in tokens:
        offsets.append(position)
        position += len(decoder.decode(vocabulary.bytes_of(token["token_id"])))
        top: dict[str, float] = {}
        for each in [*token["top"], token]:  # of several tokens with one text the likeliest
            top.setdefault(vocabulary.text_of(each["token_id"]), _finite(each["logprob"]))
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(token["logprob"]) for token in tokens],
        "tokens": [vocabulary.text_of(token["token_id"]) for token in tokens],
        "top_logprobs": tops,
    }


def _finite(logprob: float | None) -> float:
    return _UNLIKELY if logprob is None else logprob
