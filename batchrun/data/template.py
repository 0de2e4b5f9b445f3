"""Jinja over a row: sandboxed, and strict about values that are not there.

The columns are the template's variables and ``row`` is the whole row, so that ``{{ row["odd name"] }}`` reaches any
column. Null counts as undefined: ``default`` replaces it, ``if`` takes it for false, ``is none`` recognises it, and
any other use is an error of the row. Text and numbers render as they are; within a larger text, ``true``, ``false``,
lists and objects render as JSON, but a prompt that is nothing else has to be text. Bytes render as the UTF-8 they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from batchrun.data.json_text import dump_json
from batchrun.errors import JobError, RowErrorKind

_ROW = "row"


class RowError(Exception):
    """A row that cannot become a prompt; ``kind`` and the message make its ``error``."""

    def __init__(self, kind: RowErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _NotTextError(UndefinedError):
    """Bytes that are not UTF-8, or another value that cannot stand in a prompt."""


class _Missing(StrictUndefined):
    __slots__ = ()

    def __init__(
        self, hint: str | None = None, obj: Any = missing, name: str | None = None, exc: Any = UndefinedError
    ) -> None:
        if hint is None and (obj is missing or isinstance(obj, dict)):
            hint = f"{name!r} is missing"
        super().__init__(hint, obj, name, exc)


class _Null(StrictUndefined):
    """Stands for null, knowing its name: false, equal to none, and an error when used in any other way."""

    __slots__ = ()

    def __bool__(self) -> bool:  # type: ignore[override]
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return other is None or isinstance(other, _Null)

    __hash__ = Undefined.__hash__  # type: ignore[assignment]


class _Environment(ImmutableSandboxedEnvironment):
    def getitem(self, obj: Any, argument: Any) -> Any:
        return _usable(argument, super().getitem(obj, argument))

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _usable(attribute, super().getattr(obj, attribute))


class RowTemplate:
    """The template in ``field`` of the job. Raises JobError on a syntax error.

    ``columns`` are the names of columns that it mentions.
    """

    def __init__(self, source: str, field: str) -> None:
        self._field = field
        try:
            tree = _environment(whole=False).parse(source)
            environment = _environment(whole=_is_one_expression(tree))
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise JobError(f"{field}: line {error.lineno}: {error.message}") from None
        mentioned = meta.find_undeclared_variables(tree) - {_ROW}
        self._names = mentioned | set(environment.globals)  # a column comes before a function of Jinja's
        self.columns = frozenset(mentioned | _subscripts_of_row(tree))

    def render(self, data: dict[str, Any]) -> str:
        """The text for one row; raises RowError."""
        variables = {name: _usable(name, data[name]) for name in self._names if name in data}
        try:
            return self._template.render(variables | {_ROW: data})
        except _NotTextError as error:
            raise RowError("bad_prompt", f"{self._field}: {error.message}") from None
        except UndefinedError as error:
            raise RowError("missing_value", f"{self._field}: {error.message}") from None
        except Exception as error:  # a filter or an expression can raise anything
            reason = str(error) or type(error).__name__
            raise RowError("bad_prompt", f"{self._field}: {reason}") from None


def _environment(*, whole: bool) -> _Environment:
    environment = _Environment(
        undefined=_Missing, keep_trailing_newline=True, finalize=_whole_prompt if whole else _part_of_text
    )
    environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)
    environment.filters["tojson"] = _tojson
    return environment


def _usable(name: Any, value: Any) -> Any:
    """A column's value, or what stands for it where null and bytes would pass for text."""
    if value is None:
        return _Null(hint=f"{name!r} is null")
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            return _Missing(hint=f"{name!r} is not UTF-8 at byte {error.start + 1}: {error.reason}", exc=_NotTextError)
    return value


def _part_of_text(value: Any) -> Any:
    if value is None:
        raise UndefinedError("an expression gives null")
    if isinstance(value, Iterator) or (callable(value) and not isinstance(value, Undefined)):
        raise _NotTextError(f"an expression gives a {type(value).__name__}, not text")
    return dump_json(value) if isinstance(value, bool | list | tuple | dict) else value


def _whole_prompt(value: Any) -> Any:
    kind = {bool: "a boolean", list: "a list", tuple: "a list", dict: "an object"}.get(type(value))
    if kind is not None:
        raise _NotTextError(f"the prompt is {kind}, not text")
    return _part_of_text(value)


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as it is; Jinja's own escapes it for HTML."""
    text = dump_json(None if isinstance(value, _Null) else value)
    return text if indent is None else json.dumps(json.loads(text), indent=indent, ensure_ascii=False)


def _is_one_expression(tree: nodes.Template) -> bool:
    """Whether a template is ``{{ expression }}`` and nothing but space around it."""
    parts = [part for node in tree.body for part in (node.nodes if isinstance(node, nodes.Output) else [node])]
    solid = [part for part in parts if not (isinstance(part, nodes.TemplateData) and not part.data.strip())]
    return len(solid) == 1 and isinstance(solid[0], nodes.Expr) and not isinstance(solid[0], nodes.TemplateData)


def _subscripts_of_row(tree: nodes.Template) -> set[str]:
    """The constant names in ``row["name"]`` and ``row.name``."""
    names: set[str] = set()
    for node in tree.find_all((nodes.Getitem, nodes.Getattr)):
        if not isinstance(node, nodes.Getitem | nodes.Getattr) or node.node != nodes.Name(_ROW, "load"):
            continue
        if isinstance(node, nodes.Getattr):
            names.add(node.attr)
        elif isinstance(node.arg, nodes.Const):
            names.add(str(node.arg.value))
    return names
