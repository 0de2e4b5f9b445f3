"""Faults of values that a user gave: pydantic's errors in plain words, for job files and the Python API alike."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from datetime import date
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

FieldPath = tuple[str | int, ...]

_EXPECTED = {  # pydantic's error types in a user's words
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "byte_size": "a size such as 512MiB",
    "byte_size_unit": "a size such as 512MiB",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "text that is not empty",
    "too_short": "a list that is not empty",
}


def describe_arguments(error: ValidationError, arguments: dict[str, Any], known: Collection[str]) -> str:
    """The faults of a call's keyword arguments in one line; ``known`` are the names that there are."""
    faults = describe(error, arguments, lambda field: unknown_name("parameter", str(field[-1]), known))
    return "; ".join(f"{dotted(field)}: {message}" if field else message for field, message in faults.items())


def unknown_name(kind: str, name: str, known: Collection[str]) -> str:
    """What to say of a name that is none of ``known``."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind}; did you mean {close[0]}?" if close else f"unknown {kind}; known are {', '.join(known)}"


def describe(error: ValidationError, data: Any, unknown: Callable[[FieldPath], str]) -> dict[FieldPath, str]:
    """One message for each field of ``data``; ``unknown`` words that of one that does not exist.

    What the members of a union expect is joined by "or".
    """
    expected: dict[FieldPath, list[str]] = {}
    messages: dict[FieldPath, str] = {}
    inputs: dict[FieldPath, Any] = {}
    for details in error.errors(include_url=False):
        field = _real_field(details, data)
        kind, context = details["type"], details.get("ctx", {})
        inputs[field] = details["input"]
        if kind == "extra_forbidden":
            messages[field] = unknown(field)
        elif kind == "missing":
            messages[field] = "missing"
        elif kind in _EXPECTED:
            expected.setdefault(field, []).append(_EXPECTED[kind].format(**context).replace("'", ""))
        else:
            messages[field] = str(context.get("error") or details["msg"])
    for field, wanted in expected.items():
        if field not in messages:
            messages[field] = _wrong_value(list(dict.fromkeys(wanted)), field, inputs[field])
    inner = {field[:length] for field in messages for length in range(len(field))}
    return {field: message for field, message in messages.items() if field not in inner}


def _real_field(error: ErrorDetails, data: Any) -> FieldPath:
    """Where in the job an error lies: pydantic's location without its names of union members."""
    field: list[str | int] = []
    for part in error["loc"]:
        known = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if known:
            field.append(part)
            data = data[part]
    if error["type"] == "missing":
        field.append(error["loc"][-1])
    return tuple(field)


def _wrong_value(wanted: list[str], field: FieldPath, value: Any) -> str:
    choices = " or ".join(wanted)
    if str(field[-1]).endswith("_options"):  # may hold secrets
        return f"must be {choices}"
    hint = " (quote it)" if wanted == ["text"] and isinstance(value, bool | int | float | date) else ""
    return f"must be {choices}, not {_shown(value)}{hint}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return {dict: "a mapping", type(None): "null"}.get(type(value), repr(value))


def dotted(field: FieldPath) -> str:
    """The field's name as a job file's user writes it."""
    return ".".join(map(str, field)) or "the job"
