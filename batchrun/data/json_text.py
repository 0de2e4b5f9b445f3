"""JSON text in and out, strictly: RFC 8259 and nothing more, and no number changes its value on the way through.

Reading. ``NaN`` and ``Infinity`` are refused; the last of several equal keys wins. A number becomes an ``int`` of any
size or a ``float``, and a :class:`~decimal.Decimal` where a float would be another number (``1e400``, or more digits
than a double holds). An escaped surrogate without its partner stands for no character and becomes U+FFFD.

Writing. Whatever a row can hold, Parquet's types included, becomes strict JSON:

=======================  ================================
NaN, infinities          null
decimal                  number with all its digits
date, time, timestamp    ISO 8601 text
duration                 number of seconds
bytes                    base64 text
map                      list of [key, value] pairs
lone surrogate           U+FFFD
=======================  ================================
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import re
from decimal import Decimal, InvalidOperation
from json.encoder import encode_basestring as _quoted
from typing import Any, NoReturn

MAX_DEPTH = 512  # nested arrays and objects in one row; leaves Python's recursion limit to whoever writes it again

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
_LONG_INTEGER = 4000  # digits; Python's int() refuses more than 4300
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_MICROSECOND = datetime.timedelta(microseconds=1)


def parse_json(text: str) -> Any:
    """The value of a JSON text; raises ``ValueError`` with a readable reason."""
    try:
        value = _decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    return replace_surrogates(value) if _SURROGATE_ESCAPE.search(text) else value


def dump_json(value: Any) -> str:
    """One line of strict JSON, by the rules above; raises ``TypeError`` on an object that they do not name."""
    try:
        text = _FAST_ENCODER.encode(value)
    except (TypeError, ValueError):
        parts: list[str] = []
        _write(value, parts)
        text = "".join(parts)
    return _SURROGATE.sub("\ufffd", text)


def replace_surrogates(value: Any) -> Any:
    """``value`` with every lone surrogate in its strings, keys included, replaced by U+FFFD."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        replaced = {}
        for key, item in value.items():  # a comprehension would be a second frame for each level
            replaced[replace_surrogates(key)] = replace_surrogates(item)
        return replaced
    if isinstance(value, list):
        items = []
        for item in value:
            items.append(replace_surrogates(item))
        return items
    return value


def _float(literal: str) -> float | Decimal:
    value = float(literal)
    if len(literal) <= 16 and 1e-300 < abs(value) < 1e300:  # at most 15 digits: a double holds them
        return value
    try:
        exact = Decimal(literal)
    except InvalidOperation:
        raise ValueError(f"number out of range: {literal[:40]}") from None
    return value if math.isfinite(value) and Decimal(repr(value)) == exact else exact


def _long_integer(literal: str) -> int | Decimal:
    return int(literal) if len(literal) <= _LONG_INTEGER else Decimal(literal)


def _constant(literal: str) -> NoReturn:
    raise ValueError(f"not JSON: {literal} is no JSON number")


_DECODER = json.JSONDecoder(parse_float=_float, parse_constant=_constant)
_LONG_INTEGER_DECODER = json.JSONDecoder(parse_float=_float, parse_constant=_constant, parse_int=_long_integer)
_FAST_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        return _LONG_INTEGER_DECODER.decode(text)


def _depth(value: Any) -> int:
    """Levels of arrays and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _write(value: Any, parts: list[str]) -> None:
    """Append the JSON text of a value that the standard library's encoder has no strict text for."""
    separator = ""
    if isinstance(value, dict):
        parts.append("{")
        for key, item in value.items():
            parts.append(f"{separator}{_quoted(_key(key))}: ")
            _write(item, parts)
            separator = ", "
        parts.append("}")
    elif isinstance(value, list | tuple):
        parts.append("[")
        for item in value:
            parts.append(separator)
            _write(item, parts)
            separator = ", "
        parts.append("]")
    else:
        parts.append(_scalar(value))


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else "null"
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else "null"
    return _scalar(_plain(value))


def _plain(value: Any) -> Any:
    """A scalar of Parquet as the JSON scalar that stands for it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        nanoseconds = value // _MICROSECOND * 1000 + getattr(value, "nanoseconds", 0)  # pandas' Timedelta has them
        return Decimal(nanoseconds).scaleb(-9)
    if hasattr(value, "item"):  # a NumPy scalar, as half-precision floats are
        return value.item()
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _key(key: Any) -> str:
    return key if isinstance(key, str) else _scalar(key)
