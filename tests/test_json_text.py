"""JSON in and out: strictness, exact numbers, surrogates, depth, and the text of Parquet's types."""

import base64
import datetime
import json
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.data.json_text import MAX_DEPTH, dump_json, parse_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(scalars | text, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=20)


@given(values)
def test_every_value_survives_a_round_trip(value):
    assert parse_json(dump_json(value)) == value
    assert json.loads(dump_json(value)) == value


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_numbers_of_any_precision_are_exact(number):
    literal = str(number)
    assert Decimal(dump_json(parse_json(literal))) == number


@pytest.mark.parametrize(
    "literal", ["1e400", "-1e-400", "0.1234567890123456789012", "9" * 6000, "12345678901234567890"]
)
def test_numbers_beyond_a_double_keep_their_value(literal):
    assert Decimal(dump_json({"n": parse_json(literal)})[6:-1]) == Decimal(literal)


@pytest.mark.parametrize("literal", ["1E22", "20e1", "-0.1", "0e+1", "1e-5", "123.456e78"])
def test_ordinary_numbers_are_floats(literal):
    assert isinstance(parse_json(literal), float)
    assert parse_json(literal) == float(literal)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("NaN", "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": 1,}', "at character"),
        ('{"a": "\t"}', "Invalid control character"),
        ("[1e99999999999999999999999]", "out of range"),
        ("[" * 100_000, "nested deeper"),
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested deeper"),
    ],
)
def test_what_is_not_json_is_refused(line, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(line)


def test_the_deepest_value_allowed_is_read_and_written():
    line = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert dump_json(parse_json(line)) == line
    assert dump_json([parse_json(line), float("nan")]) == f"[{line}, null]"


def test_many_brackets_are_not_depth():
    assert len(parse_json("[" + ",".join(["[]"] * 5000) + "]")) == 5000


def test_the_last_of_equal_keys_wins():
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}


def test_lone_surrogates_become_replacement_characters():
    assert parse_json(r'{"\ud800": ["\udc00 x", "\ude00\ud83d"]}') == {"\ufffd": ["\ufffd x", "\ufffd\ufffd"]}
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert parse_json(r'"\\ud800"') == r"\ud800"
    assert dump_json({"a": "\ud800"}) == '{"a": "\ufffd"}'


def test_the_types_of_parquet_have_json_forms():
    day = datetime.date(2024, 2, 29)
    row = {
        "nan": float("nan"),
        "inf": float("inf"),
        "decimal": Decimal("12345678901234567890.123456789"),
        "date": day,
        "time": datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC),
        "nanoseconds": pd.Timestamp("2024-02-29T00:00:00.123456789"),
        "duration": datetime.timedelta(microseconds=1500000),
        "short": pd.Timedelta(7, "ns"),
        "bytes": b"\x00\xff",
        "map": [("k", 1), ("l", None)],
        "half": np.float16(1.5),
    }
    assert json.loads(dump_json(row), parse_float=Decimal) == {
        "nan": None,
        "inf": None,
        "decimal": Decimal("12345678901234567890.123456789"),
        "date": "2024-02-29",
        "time": "2024-02-29T01:02:03+00:00",
        "nanoseconds": "2024-02-29T00:00:00.123456789",
        "duration": Decimal("1.5"),
        "short": Decimal("7e-9"),
        "bytes": base64.b64encode(b"\x00\xff").decode(),
        "map": [["k", 1], ["l", None]],
        "half": Decimal("1.5"),
    }


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="no JSON form for object"):
        dump_json({"a": object()})
