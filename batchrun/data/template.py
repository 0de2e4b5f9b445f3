"""Jinja over a row: sandboxed, and strict about values that are not there.

The columns are the template's variables and ``row`` is the whole row, so that ``{{ row["odd name"] }}`` reaches any
column. Null counts as undefined: ``default`` replaces it, ``if`` takes it for false, ``is none`` recognises it, and
any other use is an error of the row. Text and numbers render as they are; within a larger text, ``true``, ``false``,
lists and objects render as JSON, but a prompt that is nothing else has to be text. Bytes render as the UTF-8 they are.

A template that runs away is an error of the row: its text, what ``*``, ``+`` and ``~`` make, the size of ``**`` and the
numbers that ``range`` gives in all are bounded. Nothing is computed while a template is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, UndefinedError, meta, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing
from jinja2.visitor import NodeTransformer

from batchrun.data.json_text import dump_json
from batchrun.errors import JobError, RowErrorKind

_ROW = "row"
_MAX_CHARACTERS = 1 << 26  # of a text, items of a list, bits of a number
_MAX_STEPS = 1 << 20  # numbers that range gives one row


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


class _RunawayError(Exception):
    """A template would take more memory or time than any prompt needs."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _usable(argument, super().getitem(obj, argument))

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _usable(attribute, super().getattr(obj, attribute))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > _MAX_CHARACTERS:
            raise _RunawayError(f"{operator} makes too large a value")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """About how large the result of an operator is; 0 where it is small, or nothing that there is."""
    if isinstance(left, int) and isinstance(right, int):
        size, by = left.bit_length(), right.bit_length()
        return size * max(0, right) if operator == "**" else size + by
    if operator == "*" and isinstance(left, int):
        left, right = right, left
    if operator == "%" and isinstance(left, str | bytes):
        return _largest_width(left, right)
    if not isinstance(left, str | bytes | list | tuple):
        return 0
    if operator == "*":
        return len(left) * max(0, right) if isinstance(right, int) else 0
    return len(left) + len(right) if isinstance(right, type(left)) else 0


def _largest_width(pattern: str | bytes, values: Any) -> int:
    """The largest number in a ``%`` pattern or, where ``*`` stands for one, among its values."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    given = (values if isinstance(values, tuple) else (values,)) if "*" in text else ()
    return max([0, *map(int, re.findall(r"[0-9]+", text)), *(abs(value) for value in given if isinstance(value, int))])


def _range_for_one_row() -> Callable[..., range]:
    steps = 0

    def bounded_range(*arguments: int) -> range:
        nonlocal steps
        numbers = range(*arguments)
        steps += len(numbers)
        if steps > _MAX_STEPS:
            raise _RunawayError(f"range gives more than {_MAX_STEPS:,} numbers in all")
        return numbers

    return bounded_range


class _Concatenation(NodeTransformer):
    """Turns ``a ~ b`` into the ``+`` of texts, whose size is watched."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        texts: list[nodes.Expr] = [
            nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes
        ]
        return reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), texts)


class RowTemplate:
    """The template in ``field`` of the job. Raises JobError on a syntax error.

    ``required`` are the names of the columns that every row has to have: all that it mentions but those that it tests
    (``is defined``, ``in row``), gives a ``default``, or asks for by ``row.get``.
    """

    def __init__(self, source: str, field: str) -> None:
        self._field = field
        try:
            tree = _environment(whole=False).parse(source)
            environment = _environment(whole=_is_one_expression(tree))
            self._template = environment.from_string(_Concatenation().visit(environment.parse(source)))
            self._template.globals = dict(self._template.globals)  # Jinja's chain of maps is slow to copy for each row
        except TemplateSyntaxError as error:
            raise JobError(f"{field}: line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise JobError(f"{field}: nested too deeply") from None
        variables = _undeclared_variables(tree)
        self._names = (variables - {_ROW}) | set(environment.globals)  # a column comes before a function of Jinja's
        self.required = frozenset(_columns(tree, variables) - _optional_columns(tree))

    def render(self, data: dict[str, Any]) -> str:
        """The text for one row; raises RowError."""
        variables: dict[str, Any] = {"range": _range_for_one_row()}
        variables |= {name: _usable(name, data[name]) for name in self._names if name in data}
        try:
            return _joined(self._template.generate(variables | {_ROW: data}))
        except _NotTextError as error:
            raise RowError("bad_prompt", f"{self._field}: {error.message}") from None
        except UndefinedError as error:
            raise RowError("missing_value", f"{self._field}: {error.message}") from None
        except Exception as error:  # a filter or an expression can raise anything
            reason = str(error) or type(error).__name__
            raise RowError("bad_prompt", f"{self._field}: {reason}") from None


def _joined(pieces: Iterator[str]) -> str:
    text: list[str] = []
    size = 0
    for piece in pieces:
        text.append(piece)
        size += len(piece)
        if size > _MAX_CHARACTERS:
            raise _RunawayError(f"gives more than {_MAX_CHARACTERS:,} characters")
    return "".join(text)


def _environment(*, whole: bool) -> _Environment:
    # Neither the optimizer nor a finalize that asks for the context: those compute constants when compiling.
    environment = _Environment(
        undefined=_Missing,
        keep_trailing_newline=True,
        finalize=_whole_prompt if whole else _part_of_text,
        optimized=False,
    )
    del environment.globals["lipsum"]  # random, and of any length
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


@pass_context
def _part_of_text(context: Context, value: Any) -> Any:
    if value is None:
        raise UndefinedError("an expression gives null")
    if isinstance(value, Iterator) or (callable(value) and not isinstance(value, Undefined)):
        raise _NotTextError(f"an expression gives a {type(value).__name__}, not text")
    return dump_json(value) if isinstance(value, bool | list | tuple | dict) else value


@pass_context
def _whole_prompt(context: Context, value: Any) -> Any:
    kind = {bool: "a boolean", list: "a list", tuple: "a list", dict: "an object"}.get(type(value))
    if kind is not None:
        raise _NotTextError(f"the prompt is {kind}, not text")
    return _part_of_text(context, value)


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as it is; Jinja's own escapes it for HTML."""
    text = dump_json(None if isinstance(value, _Null) else value)
    return text if indent is None else json.dumps(json.loads(text), indent=indent, ensure_ascii=False)


def _is_one_expression(tree: nodes.Template) -> bool:
    """Whether a template is ``{{ expression }}`` and nothing but space around it."""
    parts = [part for node in tree.body for part in (node.nodes if isinstance(node, nodes.Output) else [node])]
    solid = [part for part in parts if not (isinstance(part, nodes.TemplateData) and not part.data.strip())]
    return len(solid) == 1 and isinstance(solid[0], nodes.Expr) and not isinstance(solid[0], nodes.TemplateData)


def _undeclared_variables(tree: nodes.Template) -> set[str]:
    """As :func:`jinja2.meta.find_undeclared_variables`, which computes constants on the way."""
    generator = meta.TrackingCodeGenerator(tree.environment)  # type: ignore[arg-type]
    generator.optimizer = None
    generator.visit(tree)
    return generator.undeclared_identifiers


def _columns(tree: nodes.Template, variables: set[str]) -> set[str]:
    """The columns that a template mentions: its variables, and the constant names in ``row["name"]``, ``row.name``."""
    names = variables - {_ROW}
    if _ROW in variables:  # else it is a name of the template's own
        names |= {name for node in tree.find_all((nodes.Getitem, nodes.Getattr)) if (name := _column(node))}
    return names


def _optional_columns(tree: nodes.Template) -> set[str]:
    """The columns that a template looks for before it uses them."""
    names: set[str | None] = set()
    for use in tree.find_all((nodes.Test, nodes.Filter)):
        if isinstance(use, nodes.Test | nodes.Filter) and use.name in ("defined", "undefined", "default", "d"):
            names.add(_column(use.node))
    for comparison in tree.find_all(nodes.Compare):
        if isinstance(comparison.expr, nodes.Const) and any(_looks_into_row(other) for other in comparison.ops):
            names.add(str(comparison.expr.value))
    return {name for name in names if name is not None}


def _looks_into_row(operand: nodes.Operand) -> bool:
    return operand.op in ("in", "notin") and operand.expr == nodes.Name(_ROW, "load")


def _column(node: nodes.Node | None) -> str | None:
    """The column that an expression names, if it is one; ``row.get`` and the like are methods."""
    if isinstance(node, nodes.Name):
        return node.name
    if not isinstance(node, nodes.Getitem | nodes.Getattr) or node.node != nodes.Name(_ROW, "load"):
        return None
    if isinstance(node, nodes.Getattr):
        return None if hasattr(dict, node.attr) else node.attr
    return str(node.arg.value) if isinstance(node.arg, nodes.Const) else None
