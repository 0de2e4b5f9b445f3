"""From rows to token ids: the four prompt forms or a request in each row, per-row sampling parameters, and prompts
that are too long.

A plain-text prompt gets the special tokens that its tokenizer adds; messages get those that the chat template writes
and no others. Text that spells a special token is encoded as that token, as transformers and vLLM do. A fault of a row
becomes its ``error`` and never stops the rows beside it.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from batchrun.data.json_text import parse_json
from batchrun.data.openai_batch import LineRequest, line_request
from batchrun.data.rows import PreparedRow, Row
from batchrun.data.template import RowError, RowTemplate
from batchrun.errors import JobError, row_error
from batchrun.faults import describe_arguments
from batchrun.job import PromptSpec, SamplingSpec
from batchrun.sampling import SamplingParams
from batchrun.tokenization.tokenizer import Tokenizer

_GROUP_CHARACTERS = 1 << 20  # encoded at once: a token costs the library about 200 bytes
_SLICE_CHARACTERS = 1 << 16
_LONG_CHARACTERS = 16  # for each token of the context: a longer text is measured before it is encoded


class PromptBuilder:
    """Turns rows into prompts of at most ``max_model_len - 1`` tokens, so that one can be generated.

    A ``prompt`` without a form is for rows that are lines of an OpenAI batch file.

    Raises JobError for a template that does not parse, and for messages when the model has no chat template.
    """

    def __init__(self, prompt: PromptSpec, sampling: SamplingSpec, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._spec = prompt
        self._tokenizer = tokenizer
        self._limit = max_model_len - 1
        self._max_model_len = max_model_len
        self._sampling_column = sampling.from_column
        self._params = SamplingParams.model_validate(sampling.model_dump(exclude={"from_column"}))
        self._templates = _templates(prompt)
        self._holds_requests = not prompt.forms
        self._is_chat = prompt.messages is not None or prompt.messages_column is not None
        if self._is_chat and tokenizer.chat_template is None:
            raise JobError("prompt: the model has no chat template; use prompt.template")

    def build(self, rows: Sequence[Row]) -> list[PreparedRow]:
        """One prepared row for each of ``rows``, in their order."""
        prepared: list[PreparedRow] = []
        chats: list[tuple[PreparedRow, str]] = []
        plain: list[tuple[PreparedRow, str]] = []
        for row in rows:
            item = PreparedRow(row.row, error=row.error)
            prepared.append(item)
            if row.error is not None or row.data is None:
                continue
            try:
                content, is_chat = self._prepare(item, row.data)
            except RowError as fault:
                item.error = row_error(fault.kind, str(fault))
                continue
            if isinstance(content, str):
                (chats if is_chat else plain).append((item, content))
            else:
                item.token_ids = content
        self._encode(chats, add_special_tokens=False)
        self._encode(plain, add_special_tokens=True)
        bos = self._tokenizer.bos_token_id
        for item, _ in plain:
            if bos is not None and item.token_ids[:2] == [bos, bos]:
                del item.token_ids[0]  # the text spells it, and the tokenizer adds it
        for item in prepared:
            if item.error is None:
                self._fit(item)
        return prepared

    def _prepare(self, item: PreparedRow, data: dict[str, Any]) -> tuple[str | list[int], bool]:
        """Sets the parameters of ``item``; returns its text or token ids, and whether a chat template wrote it."""
        if self._holds_requests:
            request = line_request(data)
            item.params = self._overridden(request.sampling)
            item.own_seed = "seed" in request.sampling
            return self._requested(request), request.is_chat
        item.params, item.own_seed = self._sampling(data)
        return self._content(data), self._is_chat

    def _requested(self, request: LineRequest) -> str | list[int]:
        if not request.is_chat:
            if isinstance(request.prompt, str):
                return request.prompt
            return _token_ids(request.prompt, self._tokenizer.vocab_size)
        options = dict(request.options)
        if "chat_template_kwargs" in options:
            options["chat_template_kwargs"] = self._spec.chat_template_kwargs | options["chat_template_kwargs"]
        if options.get("add_generation_prompt"):
            options["continue_final_message"] = False
        return self._chat_text(chat_messages(request.prompt), self._spec.model_copy(update=options))

    def _content(self, data: dict[str, Any]) -> str | list[int]:
        spec = self._spec
        if spec.token_ids_column is not None:
            return _token_ids(_column(data, spec.token_ids_column), self._tokenizer.vocab_size)
        if spec.template is not None:
            return self._templates[0].render(data)
        if spec.messages_column is not None:
            messages = chat_messages(_column(data, spec.messages_column))
        else:
            messages = [
                {"role": message.role, "content": template.render(data)}
                for message, template in zip(spec.messages or (), self._templates, strict=True)
            ]
        return self._chat_text(messages, spec)

    def _chat_text(self, messages: list[dict[str, Any]], spec: PromptSpec) -> str:
        try:
            return self._tokenizer.render_chat(
                messages,
                add_generation_prompt=spec.add_generation_prompt and not spec.continue_final_message,
                continue_final_message=spec.continue_final_message,
                **spec.chat_template_kwargs,
            )
        except Exception as error:  # a template can raise anything, raise_exception first of all
            raise RowError("bad_prompt", f"the chat template refused the messages: {error}") from None

    def _sampling(self, data: dict[str, Any]) -> tuple[SamplingParams, bool]:
        value = None if self._sampling_column is None else data.get(self._sampling_column)
        if value is None:
            return self._params, False
        if isinstance(value, str):
            try:
                value = parse_json(value)
            except ValueError as error:
                raise RowError("bad_sampling", f"column {self._sampling_column!r}: {error}") from None
        if not isinstance(value, dict):
            raise RowError("bad_sampling", f"column {self._sampling_column!r} has to hold an object")
        given = {name: each for name, each in value.items() if each is not None}  # Parquet structs fill with nulls
        return self._overridden(given), "seed" in given

    def _overridden(self, changes: dict[str, Any]) -> SamplingParams:
        """The job's parameters with ``changes``."""
        try:
            return self._params.override(changes)
        except ValidationError as error:
            message = describe_arguments(error, changes, type(self._params).model_fields)
            raise RowError("bad_sampling", message) from None

    def _encode(self, texts: Sequence[tuple[PreparedRow, str]], *, add_special_tokens: bool) -> None:
        for group in _groups(texts):
            short = [(item, text) for item, text in group if len(text) <= self._long_text]
            encoded = self._tokenizer.encode_batch([text for _, text in short], add_special_tokens=add_special_tokens)
            for (item, _), token_ids in zip(short, encoded, strict=True):
                item.token_ids = token_ids
            for item, text in group:
                if len(text) > self._long_text:
                    self._encode_long(item, text, add_special_tokens)

    @property
    def _long_text(self) -> int:
        return _LONG_CHARACTERS * self._max_model_len + _SLICE_CHARACTERS

    def _encode_long(self, item: PreparedRow, text: str, add_special_tokens: bool) -> None:
        """Encode a text that hardly fits, holding no more tokens at once than a few contexts' worth."""
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        if self._spec.too_long == "error":
            if (count := self._hopeless(text, encode)) is not None:
                item.error = row_error("prompt_too_long", f"about {count} tokens; the limit is {self._limit}")
            else:
                item.token_ids = encode(text)
            return
        piece = text[: self._long_text] if self._spec.too_long == "truncate_right" else text[-self._long_text :]
        item.token_ids = encode(piece)
        if len(item.token_ids) <= self._limit:
            item.token_ids = encode(text)

    def _hopeless(self, text: str, encode: Callable[[str], list[int]]) -> int | None:
        """About how many tokens a text has when its beginning alone is far too long; else None."""
        count = 0
        for start in range(0, len(text), _SLICE_CHARACTERS):
            count += len(encode(text[start : start + _SLICE_CHARACTERS]))
            if count > 2 * self._limit + 64:
                return count * len(text) // min(len(text), start + _SLICE_CHARACTERS)
        return None

    def _fit(self, item: PreparedRow) -> None:
        count = len(item.token_ids)
        if count == 0:
            item.error = row_error("bad_prompt", "the prompt is empty: it has no tokens")
        elif count > self._limit and self._spec.too_long == "error":
            item.token_ids = []
            item.error = row_error("prompt_too_long", f"{count} tokens; the limit is {self._limit}")
        elif count > self._limit:
            item.token_ids = self._truncated(item)

    def _truncated(self, item: PreparedRow) -> list[int]:
        """Room is made for max_tokens, up to half of the context; a first token that begins the text stays."""
        max_tokens = item.params.max_tokens if item.params is not None else 1
        room = self._max_model_len - min(max_tokens, self._max_model_len // 2)
        token_ids = list(item.token_ids)
        if self._spec.too_long == "truncate_right":
            return token_ids[:room]
        head = token_ids[:1] if token_ids[0] == self._tokenizer.bos_token_id else []
        return head + token_ids[len(token_ids) - room + len(head) :]


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as a chat template takes them, from a list of objects or the JSON text of one.

    Null fields, which Parquet forces on every struct, are dropped at any depth; a list of text parts becomes its
    lines; null content beside tool calls becomes empty. Raises RowError.
    """
    if isinstance(value, str | bytes):
        try:
            value = parse_json(value if isinstance(value, str) else value.decode("utf-8"))
        except ValueError as error:
            raise RowError("bad_prompt", f"messages: {error}") from None
    if not isinstance(value, list) or not value:
        raise RowError("bad_prompt", "messages have to be a list of one or more objects with role and content")
    return [_message(item, index) for index, item in enumerate(value)]


def prefix_order(rows: Sequence[PreparedRow]) -> list[PreparedRow]:
    """Rows sorted by token ids, then row number: a depth-first walk of the tree of shared prefixes."""
    return sorted(rows, key=lambda row: (_big_endian(row.token_ids), row.row))


def _big_endian(token_ids: Sequence[int]) -> bytes:
    """Bytes that compare as the numbers do."""
    ids = array("I", token_ids)
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes()


def _templates(prompt: PromptSpec) -> list[RowTemplate]:
    if prompt.template is not None:
        return [RowTemplate(prompt.template, "prompt.template")]
    messages = enumerate(prompt.messages or ())
    return [RowTemplate(message.content, f"prompt.messages.{i}.content") for i, message in messages]


def _message(value: Any, index: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError("bad_prompt", f"message {index} is not an object")
    message: dict[str, Any] = _without_nulls(value)
    if not isinstance(message.get("role"), str):
        raise RowError("bad_prompt", f"message {index} has no role")
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        content = "\n".join(_text_part(part, index) for part in content)
    if not isinstance(content, str):
        raise RowError("bad_prompt", f"message {index}: content has to be text")
    return message | {"content": content}


def _text_part(part: Any, index: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise RowError("bad_prompt", f"message {index}: a content part has to be text, not {kind!r}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _column(data: dict[str, Any], name: str) -> Any:
    if data.get(name) is None:
        raise RowError("missing_value", f"{name!r} is {'null' if name in data else 'missing'}")
    return data[name]


def _token_ids(value: Any, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise RowError("bad_prompt", "token ids have to be a list of whole numbers")
    strange = next((token for token in value if not 0 <= token < vocab_size), None)
    if strange is not None:
        raise RowError("bad_prompt", f"token id {strange}: the tokenizer's go from 0 to {vocab_size - 1}")
    return value


def _groups(texts: Sequence[tuple[PreparedRow, str]]) -> Iterator[list[tuple[PreparedRow, str]]]:
    """Runs of ``texts`` of about a million characters: what is encoded at once."""
    group: list[tuple[PreparedRow, str]] = []
    size = 0
    for item in texts:
        group.append(item)
        size += len(item[1])
        if size >= _GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group
