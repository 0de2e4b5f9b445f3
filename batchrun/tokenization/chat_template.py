"""Messages to prompt text through a model's Jinja chat template, as transformers' ``apply_chat_template`` renders it.

Templates come with models, so they are other people's code: they run in Jinja's sandbox and see plain data only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrun.errors import JobError

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "  # its trailing blank shows whether the template trims messages
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """The messages do not fit the template."""


def render(
    templates: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The prompt text of one conversation.

    ``templates`` maps names to sources: with ``tools`` among the variables ``tool_use`` is taken if there is one, else
    ``default``. Null fields of a message count as absent, for a Parquet column gives every message the same fields;
    only what is under ``arguments`` is kept as it is. With ``continue_final_message`` the text ends where the content
    of the final message does, and no generation prompt is added.

    Raises :class:`JobError` if there is no such template or it is malformed, :class:`ChatTemplateError` if it fails on
    these messages.
    """
    source = _choose(templates, variables)
    template = _compile(source)
    chat = [_with_reasoning(_without_nulls(message)) for message in _checked(messages)]
    final_text = _mark_end(chat) if continue_final_message else None
    try:
        text = template.render(
            messages=chat,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **{"tools": None, "documents": None, **variables},
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise ChatTemplateError(f"the chat template fails on these messages: {error}") from error
    return text if final_text is None else _cut_at_mark(text, final_text)


def compile_templates(templates: Mapping[str, str]) -> None:
    """Raise :class:`JobError` if one of ``templates`` is malformed."""
    for source in templates.values():
        _compile(source)


def _choose(templates: Mapping[str, str], variables: Mapping[str, Any]) -> str:
    if variables.get("tools") is not None and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    named = f" (it has only templates named {', '.join(sorted(templates))})" if templates else ""
    raise JobError(f"the model has no chat template{named}: prompt with plain text (prompt.template) instead")


def _checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not messages:
        raise ChatTemplateError("there are no messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"message {number} is a {type(message).__name__}, not an object")
    return messages


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: item if key == "arguments" else _without_nulls(item) for key, item in value.items() if item is not None
        }
    return [_without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning goes by several names; templates read the first, some the second."""
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Put the mark at the end of the final message's text, and return that text."""
    content = chat[-1].get("content")
    part, key = chat[-1], "content"
    if isinstance(content, list):
        texts = [item for item in content if isinstance(item, dict) and "text" in item]
        if texts:
            part, key = texts[-1], "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise ChatTemplateError("continue_final_message: the final message has no text to continue")
    part[key] = text + _CONTINUE_HERE
    return text


def _cut_at_mark(rendered: str, final_text: str) -> str:
    mark = _CONTINUE_HERE.strip()
    if mark not in rendered or final_text.strip() not in rendered:
        raise ChatTemplateError("continue_final_message: the chat template alters the final message")
    at = rendered.rindex(mark)
    trimmed = not rendered.startswith(_CONTINUE_HERE, at)
    return rendered[:at].rstrip() if trimmed else rendered[:at]


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise JobError(f"the model's chat template is malformed: line {error.lineno}: {error.message}") from error
    template.globals = dict(template.globals)  # Jinja's chain of maps is slow to copy for each conversation
    return template


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what an assistant said, for training. Here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names with a leading underscore, which could stand in for Python's own attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template must not set {name!r}")
        super().__setitem__(name, value)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is: Jinja's own filter would escape HTML."""
    allowed = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
