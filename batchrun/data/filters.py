"""The row filter ``input.where``: a condition in disjunctive normal form, as pyarrow writes it.

``[[column, op, value], ...]`` holds where all conditions hold; a list of such lists where one of them does. ``op`` is
one of ``= == != < <= > >= in``, ``not in``, ``is`` and ``is not``; the last two take null and nothing else. A null or
absent value satisfies ``is`` alone. A directory's ``column=value`` is a number where it is compared with one.
"""

from __future__ import annotations

import datetime
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from batchrun.errors import JobError

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MEMBER = ("in", "not in")
_NULL = ("is", "is not")
_OPERATORS = (*_COMPARE, *_MEMBER, *_NULL)


@dataclass(frozen=True)
class _Condition:
    column: str
    op: str
    value: Any

    def holds(self, row: dict[str, Any]) -> bool:
        value = row.get(self.column)
        if self.op in _NULL:
            return (value is None) == (self.op == "is")
        if value is None:
            return False
        if self.op in _MEMBER:
            peers = [item for item in self.value if _kind(item) == _kind(value)]
            if self.value and not peers:
                raise ValueError(self._clash(value, self.value[0]))
            return (value in peers) == (self.op == "in")
        if _kind(value) != _kind(self.value):
            raise ValueError(self._clash(value, self.value))
        return _COMPARE[self.op](value, self.value)

    def holds_of_directory(self, text: str | None) -> bool:
        """Whether it holds of what a directory's name says."""
        values = self.value if self.op in _MEMBER else [self.value]
        wants_number = bool(values) and all(_kind(value) == "a number" for value in values)
        return self.holds({self.column: _number(text) if wants_number and text is not None else text})

    def _clash(self, value: Any, other: Any) -> str:
        return f"input.where: column {self.column!r} holds {_kind(value)} and is compared with {_kind(other)}"


class Where:
    """A validated filter. Raises JobError naming ``input.where`` when ``filters`` is not one."""

    def __init__(self, filters: Any) -> None:
        self._any_of = [[_condition(item) for item in group] for group in _groups(filters)]
        self.columns = tuple(dict.fromkeys(c.column for group in self._any_of for c in group))

    def holds(self, row: dict[str, Any], directories: Mapping[str, str | None]) -> bool:
        """Whether the row passes, a column that it lacks being what ``directories`` say.

        Raises ValueError where a value's type does not compare with the filter's.
        """
        return any(
            all(
                condition.holds_of_directory(directories[condition.column])
                if condition.column in directories and condition.column not in row
                else condition.holds(row)
                for condition in group
            )
            for group in self._any_of
        )

    def check_directories(self, directories: Mapping[str, str | None]) -> None:
        """Raises ValueError where what they say does not compare with the filter."""
        for condition in itertools.chain.from_iterable(self._any_of):
            if condition.column in directories:
                condition.holds_of_directory(directories[condition.column])


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _groups(filters: Any) -> list[list[Any]]:
    if not isinstance(filters, list | tuple) or not filters or not all(isinstance(f, list | tuple) for f in filters):
        raise JobError("input.where: has to be a list of [column, operator, value], or a list of such lists")
    if all(f and isinstance(f[0], str) for f in filters):
        return [list(filters)]
    return [list(group) for group in filters]


def _condition(item: Any) -> _Condition:
    if not isinstance(item, list | tuple) or len(item) != 3 or not isinstance(item[0], str):
        raise JobError(f"input.where: {item!r} is not [column, operator, value]")
    column, op, value = item
    if op not in _OPERATORS:
        raise JobError(f"input.where: unknown operator {op!r}; known are {', '.join(_OPERATORS)}")
    if op in _MEMBER and not isinstance(value, list | tuple):
        raise JobError(f"input.where: {column!r} {op} needs a list")
    if op in _NULL and value is not None:
        raise JobError(f"input.where: {column!r} {op} takes null alone; use == or !=")
    values = value if op in _MEMBER else [] if op in _NULL else [value]
    if any(_kind(v) in ("null", "a list", "an object") for v in values):
        raise JobError(f"input.where: {column!r} {op} takes text, numbers, true, false or dates; for null use is")
    return _Condition(column, op, value)


def _kind(value: Any) -> str:
    """A word for values that compare with one another."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float | Decimal):
        return "a number"
    if isinstance(value, datetime.datetime):
        return "a time with a zone" if value.tzinfo else "a time without a zone"
    if isinstance(value, datetime.date):
        return "a date"
    names: dict[type, str] = {str: "text", bytes: "bytes", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
