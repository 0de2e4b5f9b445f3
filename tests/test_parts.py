"""Parts: which columns they have, how their types are found, and that nothing changes its value on the way."""

import datetime
import json
import math
import random
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.data.columns import JSON_TEXT, LossyColumnError, conform, natural_column, unify
from batchrun.data.json_text import parse_json
from batchrun.data.parts import (
    RESULT_COLUMNS,
    ROW_GROUP_ROWS,
    Layout,
    MissingResultError,
    check_columns,
    rewrite_part,
    write_part,
)
from batchrun.data.results import Results, partials_of, partials_table, results_table
from batchrun.data.rows import Batch, InputFile, PartialRow, RowResult, Split, TokenLogprob
from batchrun.errors import JobError
from tests.outputs import make_job

FILE = InputFile("in.jsonl", "/in.jsonl", 1, "1")
RESULTS = ["custom_id", "generated_text", "finish_reason", "prompt_tokens", "completion_tokens", "error"]


def layout(**changes):
    names = {name: name for name in RESULT_COLUMNS} | changes.pop("names", {})
    return Layout(**{"format": "parquet", "keep": True, "id_column": None, **changes, "names": names})


def split_of(rows, error=None):
    return Split(FILE, 0, 1, rows, error=error)


def answers(rows):
    return Results([results_table([RowResult(0, row, f"text {row}", "stop", 1, 2) for row in rows])])


def batch_of(records, first=1):
    return Batch([first + i for i in range(len(records))], [None] * len(records), records=records)


def write(folder, batches, *, results=None, form=None, error=None):
    """Writes a part and returns its path and content."""
    rows = [row for batch in batches for row in batch.rows]
    path = folder / "part"
    results = results or answers(rows)
    return path, write_part(path, batches, results, split_of(len(rows), error), form or layout())


def read(path):
    """The records of a Parquet part, JSON text decoded."""
    table = pq.read_table(path)
    texts = [field.name for field in table.schema if field.metadata == JSON_TEXT]
    return [
        {name: parse_json(v) if name in texts and v is not None else v for name, v in record.items()}
        for record in table.to_pylist()
    ]


def kept(path):
    return [{name: v for name, v in record.items() if name not in RESULT_COLUMNS} for record in read(path)]


def type_of(values):
    field, _ = natural_column("x", values)
    return "json" if field.metadata == JSON_TEXT else str(field.type)


# --- types of JSON values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 2], "int64"),
        ([1, 2.5], "double"),
        ([2**53 + 1, 2.5], "json"),
        ([True, False], "bool"),
        ([True, 1], "json"),
        ([True, 1.5], "json"),
        ([[1.5, True]], "json"),
        (["a", None], "string"),
        (["1", 1], "json"),
        ([None, None], "null"),
        ([2**63], "json"),
        ([Decimal("0.1234567890123456789")], "json"),
        ([[Decimal("0.1234567890123456789")]], "json"),
        ([[1], []], "list<item: int64>"),
        ([[], []], "list<item: null>"),
        ([[1], ["a"]], "json"),
        ([[1], 1], "json"),
        ([{"a": 1, "b": "x"}, None], "struct<a: int64, b: string>"),
        ([{"a": 1}, {"b": 1}], "json"),
        ([{}], "json"),
        ([[{}]], "json"),
        ([{"a": None}], "struct<a: null>"),
        ([[[[1]]]], "list<item: list<item: list<item: int64>>>"),
    ],
)
def test_json_values_get_a_type_that_holds_them_or_become_text(values, expected):
    assert type_of(values) == expected


def test_deep_nesting_becomes_text():
    value = 1
    for _ in range(500):
        value = [value]
    assert type_of([value]) == "json"


keys = st.sampled_from(["a", "b", "", "é", "x y"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3).filter(lambda text: text.isprintable())
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
records = st.dictionaries(st.sampled_from(["a", "b", "n", "error"]), values, max_size=4)


def same(one, other):
    """Equal as JSON: numbers by value, booleans no numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


@settings(deadline=None, max_examples=60)
@given(batches=st.lists(st.lists(records, min_size=1, max_size=3), min_size=1, max_size=4))
def test_every_json_value_can_be_had_back(tmp_path_factory, batches):
    folder = tmp_path_factory.mktemp("part")
    originals = [record for batch in batches for record in batch]
    starts = [1 + sum(len(batch) for batch in batches[:i]) for i in range(len(batches))]
    path, content = write(folder, [batch_of(b, start) for b, start in zip(batches, starts, strict=True)])
    assert content.rows == len(originals)
    for record, original in zip(kept(path), originals, strict=True):
        original = {"input.error" if name == "error" else name: value for name, value in original.items()}
        assert original.keys() <= record.keys()
        assert same(record, {name: original.get(name) for name in record})


def test_late_type_change_and_new_column_reach_back(tmp_path):
    first = [{"n": i} for i in range(3)]
    path, _ = write(tmp_path, [batch_of(first), batch_of([{"n": "x", "new": 1}, {"n": None}], 4)])
    assert pq.read_table(path)["n"].to_pylist() == ["0", "1", "2", '"x"', None]
    assert kept(path)[3:] == [{"n": "x", "new": 1}, {"n": None, "new": None}]


def test_integers_become_floats_only_where_all_are_exact(tmp_path):
    path, _ = write(tmp_path, [batch_of([{"n": 1}]), batch_of([{"n": 0.5}], 2)])
    assert pq.read_schema(path).field("n").type == pa.float64()
    path, _ = write(tmp_path, [batch_of([{"n": 2**53 + 1}]), batch_of([{"n": 0.5}], 2)])
    assert kept(path) == [{"n": 2**53 + 1}, {"n": 0.5}]


# --- Parquet inputs ----------------------------------------------------------------------------------------------


def typed_table():
    when = datetime.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=datetime.UTC)
    fields = {"a": pa.int32(), "b": pa.list_(pa.string())}
    columns = {
        "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
        "decimal": pa.array([Decimal("1.10"), None, Decimal("-2.25")], pa.decimal128(9, 2)),
        "ns": pa.array([1, None, 2], pa.timestamp("ns", "Asia/Tokyo")),
        "us": pa.array([when, None, when], pa.timestamp("us", "UTC")),
        "date": pa.array([datetime.date(2024, 2, 29), None, None], pa.date32()),
        "time": pa.array([1, None, 2], pa.time64("ns")),
        "duration": pa.array([1500, None, 2], pa.duration("ms")),
        "uint64": pa.array([2**64 - 1, None, 0], pa.uint64()),
        "int8": pa.array([-128, None, 127], pa.int8()),
        "float": pa.array([0.1, None, math.nan], pa.float32()),
        "binary": pa.array([b"\xff\x00", None, b""], pa.binary()),
        "large": pa.array(["x", None, ""], pa.large_string()),
        "nested": pa.array([[{"a": 1, "b": ["x"]}], None, []], pa.list_(pa.struct(fields))),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        "null": pa.nulls(3),
    }  # fmt: skip
    return pa.table(columns)


def typed_batches():
    table = typed_table()
    return [Batch([1, 2], [None, None], table=table.slice(0, 2)), Batch([3], [None], table=table.slice(2))]


def test_parquet_types_pass_through(tmp_path):
    path, content = write(tmp_path, typed_batches())
    table = typed_table()
    assert content.typed
    written = pq.read_table(path)
    for name in table.column_names:
        assert written.schema.field(name).type == table.schema.field(name).type, name
    for name in set(table.column_names) - {"float"}:
        assert written[name].to_pylist() == table[name].to_pylist(), name
    assert written.schema.metadata is None


def test_unreadable_rows_have_nulls_and_their_error(tmp_path):
    required = pa.table({"n": [1, 2]}, schema=pa.schema([pa.field("n", pa.int32(), nullable=False)]))
    batches = [Batch([1, 2], [None, None], table=required), Batch([3], ["unreadable_file: bad"], records=[None])]
    path, content = write(tmp_path, batches, results=answers([1, 2]), error="cut off")
    assert [(r["n"], r["custom_id"], r["error"]) for r in read(path)] == [
        (1, "in.jsonl:1", None),
        (2, "in.jsonl:2", None),
        (None, "in.jsonl:3", "unreadable_file: bad"),
        (None, "in.jsonl:4", "unreadable_file: in.jsonl from row 4 on: cut off"),
    ]
    assert (content.rows, content.errors, content.completion_tokens) == (4, 2, 4)


def test_types_that_parquet_lacks_become_text(tmp_path):
    table = pa.table({"x": pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "empty": pa.array([{}], pa.struct([]))})
    path, _ = write(tmp_path, [Batch([1], [None], table=table)])
    assert kept(path) == [{"x": [1, 2, 3], "empty": {}}]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.null(), pa.date32(), pa.date32()),
        (pa.int64(), pa.float64(), pa.float64()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.dictionary(pa.int32(), pa.string()), pa.string(), pa.string()),
        (pa.decimal128(5, 2), pa.decimal128(8, 1), pa.decimal128(9, 2)),
        (pa.decimal128(5, 2), pa.float64(), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.string(), pa.int64(), None),
        (pa.bool_(), pa.int64(), None),
        (pa.list_(pa.null()), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.large_list(pa.int64())),
        (pa.struct({"a": pa.int8()}), pa.struct({"b": pa.int8()}), pa.struct({"a": pa.int8(), "b": pa.int8()})),
        (pa.struct({"a": pa.int8()}), pa.struct({"a": pa.string()}), None),
    ],
)
def test_types_of_two_parts_unite(one, other, expected):
    schemas = [pa.schema([("x", one)]), pa.schema([("x", other)])]
    field = unify(schemas, [], structs_grow=True).field("x")
    assert field.type == expected if expected else field.metadata == JSON_TEXT


def test_objects_of_json_do_not_gain_keys():
    schemas = [pa.schema([("x", pa.struct({name: pa.int64()}))]) for name in "ab"]
    assert unify(schemas, [], structs_grow=False).field("x").metadata == JSON_TEXT


def test_uniting_that_would_change_a_value_is_noticed():
    schema = unify([pa.schema([("x", pa.int64())]), pa.schema([("x", pa.uint64())])], [], structs_grow=True)
    with pytest.raises(LossyColumnError, match="'x'"):
        conform(pa.table({"x": pa.array([2**64 - 1], pa.uint64())}), schema)


def test_rewriting_changes_the_schema_alone(tmp_path):
    path, content = write(tmp_path, [batch_of([{"n": 1}, {"n": None}])])
    other = pa.schema([("n", pa.string())])
    schema = unify([content.schema, other, pa.schema([("z", pa.int8())])], RESULTS, structs_grow=False)
    rewrite_part(path, tmp_path / "new", schema)
    assert [(r["n"], r["z"], r["generated_text"]) for r in read(tmp_path / "new")] == [
        (1, None, "text 1"),
        (None, None, "text 2"),
    ]
    assert pq.read_schema(tmp_path / "new").equals(schema, check_metadata=True)


# --- layout ------------------------------------------------------------------------------------------------------


def test_columns_come_in_order_and_under_their_names(tmp_path):
    form = layout(names={"generated_text": "label"}, keep=("b", "absent", "a"))
    path, _ = write(tmp_path, [batch_of([{"a": 1, "b": 2, "c": 3}])], form=form)
    assert pq.read_schema(path).names == ["b", "absent", "a", "custom_id", "label", *RESULTS[2:]]
    path, _ = write(tmp_path, [batch_of([{"a": 1}])], form=layout(keep=False))
    assert pq.read_schema(path).names == RESULTS


def test_result_columns_have_their_types_without_any_value(tmp_path):
    path, content = write(tmp_path, [], form=layout(logprobs=True))
    assert content.rows == 0
    assert pq.read_table(path).num_rows == 0
    for name in [*RESULTS, "logprobs"]:
        assert content.schema.field(name).type == RESULT_COLUMNS[name]
        assert pq.read_schema(path).field(name).type == RESULT_COLUMNS[name]
    errors = Results([results_table([RowResult(0, 1, error="bad_prompt: no")])])
    path, content = write(tmp_path, [batch_of([{"a": 1}])], results=errors)
    assert pq.read_schema(path).field("generated_text").type == pa.string()


def test_custom_ids(tmp_path):
    ids = ["x", 2, "2", None, True, {"a": 1}, 1.5, ""]
    batches = [batch_of([{"id": value} for value in ids]), batch_of([{}, None], 9)]
    for form in (layout(id_column="id"), layout(id_column="id", names={"custom_id": "id"})):
        path, _ = write(tmp_path, batches, form=form)
        expected = ["x", "2", "2", "in.jsonl:4", "true", '{"a": 1}', "1.5", "", "in.jsonl:9", "in.jsonl:10"]
        assert [record[form.names["custom_id"]] for record in read(path)] == expected
    path, _ = write(tmp_path, typed_batches(), form=layout(id_column="decimal"))
    assert [record["custom_id"] for record in read(path)] == ["1.10", "in.jsonl:2", "-2.25"]


def test_check_columns():
    check_columns(layout(), ["a", "b"])
    with pytest.raises(JobError, match=r"error would be both .*output\.columns: \{error: NAME\}"):
        check_columns(layout(), ["a", "error"])
    with pytest.raises(JobError, match=r"label would be both .*output\.columns: \{generated_text: NAME\}"):
        check_columns(layout(names={"generated_text": "label"}), ["label"])
    check_columns(layout(names={"error": "problem"}), ["a", "error"])
    check_columns(layout(keep=("a",)), ["a", "error"])
    check_columns(layout(), ["logprobs"])
    with pytest.raises(JobError, match="logprobs"):
        check_columns(layout(logprobs=True), ["logprobs"])
    check_columns(layout(id_column="custom_id"), ["custom_id"])
    with pytest.raises(JobError, match="more than one column is named a"):
        check_columns(layout(), ["a", "a"])


def test_layout_of_a_job(tmp_path):
    form = Layout.of(make_job(tmp_path, columns={"generated_text": "label"}, sampling={"logprobs": 3}))
    assert (form.names["generated_text"], form.logprobs, form.prompt_logprobs) == ("label", True, False)
    assert form.part_name(3) == "part-00003.parquet"
    assert form.part_name(123456) == "part-123456.parquet"
    with pytest.raises(JobError, match="generated: no such result column; there are custom_id, generated_text"):
        Layout.of(make_job(tmp_path, columns={"generated": "x"}))
    with pytest.raises(JobError, match="two result columns would be named error"):
        Layout.of(make_job(tmp_path, columns={"generated_text": "error"}))


# --- joining -----------------------------------------------------------------------------------------------------


def test_row_without_result_stops_the_part(tmp_path):
    with pytest.raises(MissingResultError, match=r"in\.jsonl: row 2 has no result"):
        write(tmp_path, [batch_of([{"a": 1}, {"a": 2}])], results=answers([1]))


def test_of_several_results_a_good_one_wins_and_then_the_first():
    def one(text, error=None):
        return results_table([RowResult(0, 1, None if error else text, error=error)])

    assert Results([one("a"), one("b")]).take([1])["generated_text"].to_pylist() == ["a"]
    assert Results([one("a", "engine_error: x"), one("b")]).take([1])["generated_text"].to_pylist() == ["b"]
    assert Results([one("a", "engine_error: x"), one("b", "y")]).take([1])["error"].to_pylist() == ["engine_error: x"]
    assert Results([]).take([1])["row"].to_pylist() == [None]


def test_bytes_follow_from_rows_and_results_alone(tmp_path):
    rows = 2 * ROW_GROUP_ROWS + 17
    records = [{"id": row, "text": f"row {row}", "tags": ["x"] * (row % 3)} for row in range(1, rows + 1)]
    results = [RowResult(0, row, f"text {row % 7}", "stop", row % 5, 2) for row in range(1, rows + 1)]
    contents = set()
    for seed, size in ((1, 1000), (2, 333), (3, rows)):
        order = results[:]
        random.Random(seed).shuffle(order)
        segments = [results_table(order[i : i + size]) for i in range(0, rows, size)]
        path, _ = write(tmp_path, [batch_of(records)], results=Results(segments))
        contents.add(path.read_bytes())
    assert len(contents) == 1
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [ROW_GROUP_ROWS, ROW_GROUP_ROWS, 17]


def test_batch_sizes_leave_no_trace(tmp_path):
    records = [{"text": f"row {row}", "n": row} for row in range(60)]
    contents = set()
    for size in (60, 7, 1):
        batches = [batch_of(records[i : i + size], i + 1) for i in range(0, 60, size)]
        contents.add(write(tmp_path, batches)[0].read_bytes())
    assert len(contents) == 1


def logprobs(*values):
    tops = [[(i, -1.0 if value is None else value), (9, -math.inf)] for i, value in enumerate(values)]
    return [TokenLogprob(i, value, top) for i, (value, top) in enumerate(zip(values, tops, strict=True))]


def test_logprobs_round_trip_and_infinity_is_null(tmp_path):
    results = [
        RowResult(0, 1, "a", logprobs=logprobs(-0.5, -math.inf), prompt_logprobs=logprobs(None, -0.25)),
        RowResult(0, 2, "b", logprobs=[]),
        RowResult(0, 3, error="bad_prompt: x"),
    ]
    path, _ = write(tmp_path, [batch_of([{}, {}, {}])], results=Results([results_table(results)]))
    first, second, third = read(path)
    assert first["logprobs"] == [
        {"token_id": 0, "logprob": -0.5, "top": [{"token_id": 0, "logprob": -0.5}, {"token_id": 9, "logprob": None}]},
        {"token_id": 1, "logprob": None, "top": [{"token_id": 1, "logprob": None}, {"token_id": 9, "logprob": None}]},
    ]
    assert first["prompt_logprobs"][0]["logprob"] is None
    assert (second["logprobs"], second["prompt_logprobs"], third["logprobs"]) == ([], None, None)


def test_partials_round_trip():
    partials = [
        PartialRow(1, 2, [3, 4, 5], logprobs(-0.5, -0.25, -4.0), logprobs(None)),
        PartialRow(1, 3, [], None, None),
    ]
    back = partials_of(partials_table(partials))
    assert [(p.split, p.row, p.token_ids) for p in back] == [(1, 2, [3, 4, 5]), (1, 3, [])]
    assert [token.logprob for token in back[0].logprobs] == [-0.5, -0.25, -4.0]
    assert back[0].logprobs[0].top == [(0, -0.5), (9, None)]
    assert back[1].logprobs is None


def test_text_with_lone_surrogates_can_be_written(tmp_path):
    results = Results([results_table([RowResult(0, 1, "a\ud800b"), RowResult(0, 2, error="bad_prompt: \udfff")])])
    path, _ = write(tmp_path, [batch_of([{}, {}])], results=results)
    assert [(r["generated_text"], r["error"]) for r in read(path)] == [("a\ufffdb", None), (None, "bad_prompt: \ufffd")]


# --- JSONL parts -------------------------------------------------------------------------------------------------


def lines(path):
    return [parse_json(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_jsonl_values_are_unchanged(tmp_path):
    originals = [{"a": 1, "e": "é\u2028\x00", "big": 2**70, "n": Decimal("1e400")}, {"a": "1", "x": {"y": [None]}}, {}]
    path, content = write(tmp_path, [batch_of(originals), batch_of([None], 4)], form=layout(format="jsonl"))
    written = lines(path)
    assert content.schema is None
    for line, original in zip(written, [*originals, {}], strict=True):
        assert {name: value for name, value in line.items() if name not in RESULTS} == original
    assert [list(line)[-6:] for line in written] == [RESULTS] * 4
    assert written[0]["generated_text"] == "text 1"


def test_parquet_values_in_jsonl(tmp_path):
    path, _ = write(tmp_path, typed_batches(), form=layout(format="jsonl"))
    first, second, third = lines(path)
    assert first["uint64"] == 2**64 - 1
    assert first["decimal"] == 1.1
    assert first["binary"] == "/wA="
    assert first["us"] == "2024-02-29T12:30:01.000005+00:00"
    assert first["ns"] == "1970-01-01T09:00:00.000000001+09:00"
    assert first["map"] == [["k", 1]]
    assert first["nested"] == [{"a": 1, "b": ["x"]}]
    assert third["float"] is None
    assert second["dictionary"] is None


def test_error_rows_of_jsonl_parts(tmp_path):
    batches = [Batch([1], ["unreadable_row: not JSON"], records=[None])]
    path, content = write(tmp_path, batches, results=Results([]), form=layout(format="jsonl"), error="cut off")
    assert [json.loads(line)["error"] for line in path.read_text().splitlines()] == [
        "unreadable_row: not JSON",
        "unreadable_file: in.jsonl from row 2 on: cut off",
    ]
    assert content.errors == 2
