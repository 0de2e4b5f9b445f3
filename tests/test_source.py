"""Reading input: which files, which rows, and what becomes of those that cannot be read."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun.data.rows import Row, Split
from batchrun.data.source import Source, to_records
from batchrun.errors import JobError, StoppedError
from batchrun.job import InputSpec

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": lambda data: bz2.compress(data, 1),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(source: Source) -> list[Row]:
    return [row for split in source.splits(source.files()) for row in source.rows(split)]


def rows_of(path: Path | str, **options: Any) -> list[Row]:
    return read(Source(InputSpec(path=str(path), **options)))


def splits_of(path: Path | str, **options: Any) -> list[Split]:
    source = Source(InputSpec(path=str(path), **options))
    return source.splits(source.files())


def write_lines(path: Path, count: int, first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(b'{"n": %d}\n' % n for n in range(first, first + count))
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](data))
    return path


def numbers(rows: list[Row]) -> list[Any]:
    return [row.data and row.data["n"] for row in rows]


# Which files


def test_a_directory_gives_its_files_in_order_and_says_what_it_passed_over(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.ndjson", ".hidden.jsonl", "_tmp/d.jsonl", "e.jsonl.tmp", "README.md"):
        write_lines(tmp_path / name, 1)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "p.parquet")
    source = Source(InputSpec(path=str(tmp_path)))
    files = source.files()
    assert [file.key for file in files] == ["a.jsonl.gz", "b.jsonl", "p.parquet", "sub/c.ndjson"]
    assert all(Path(file.path).is_absolute() and file.size == Path(file.path).stat().st_size for file in files)
    assert sorted(Path(path).name for path in source.skipped) == [
        ".hidden.jsonl",
        "README.md",
        "d.jsonl",
        "e.jsonl.tmp",
    ]


def test_a_glob_has_keys_from_its_first_special_character_on(tmp_path: Path) -> None:
    for name in ("x/1/a.jsonl", "x/2/a.jsonl", "x/2/b.jsonl"):
        write_lines(tmp_path / name, 1)
    assert [f.key for f in Source(InputSpec(path=f"{tmp_path}/x/*/a.jsonl")).files()] == ["1/a.jsonl", "2/a.jsonl"]
    assert [f.key for f in Source(InputSpec(path=f"{tmp_path}/x/*")).files()] == ["1/a.jsonl", "2/a.jsonl", "2/b.jsonl"]


@pytest.mark.parametrize("name", ["a b #1 [x].jsonl", "日本語 ファイル.jsonl", "*?.jsonl", "100%20.jsonl"])
def test_a_name_that_exists_is_taken_literally(tmp_path: Path, name: str) -> None:
    write_lines(tmp_path / name, 2)
    write_lines(tmp_path / "decoy x.jsonl", 1)
    assert [row.row for row in rows_of(tmp_path / name)] == [1, 2]


def test_keys_of_several_paths_are_unique_and_a_file_is_taken_once(tmp_path: Path) -> None:
    a, b = write_lines(tmp_path / "a/x.jsonl", 1), write_lines(tmp_path / "b/x.jsonl", 1, first=5)
    source = Source(InputSpec(path=(str(a), str(b), str(tmp_path / "a"))))
    assert [file.key for file in source.files()] == ["x.jsonl", "x.jsonl#2"]
    assert numbers(read(source)) == [0, 5]


@pytest.mark.parametrize("name", ["missing.jsonl", "*.jsonl", "empty", "notes.txt"])
def test_a_path_without_input_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("{}")
    with pytest.raises(JobError, match=r"input\.path") as caught:
        Source(InputSpec(path=f"{tmp_path}/{name}")).files()
    assert name in str(caught.value)


def test_a_given_format_reads_any_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.txt", 3)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "other.parquet")
    for path in ("rows.txt", "*.txt", "*"):
        assert len(rows_of(tmp_path / path, format="jsonl")) == 3
    with pytest.raises(JobError, match=r"passed over .*rows\.txt"):
        rows_of(tmp_path, format="jsonl")


def test_urls_of_any_file_system(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/in/a.jsonl", b'{"n": 1}\n{"n": 2}\n')
    memory.pipe("/bucket/in/b.jsonl.gz", gzip.compress(b'{"n": 3}\n'))
    assert [file.key for file in Source(InputSpec(path="memory://bucket/in")).files()] == ["a.jsonl", "b.jsonl.gz"]
    assert numbers(rows_of("memory://bucket/in/*.jsonl*", split_rows=1)) == [1, 2, 3]
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("x/a.jsonl", '{"n": 4}\n')
    assert numbers(rows_of(f"zip://x/*.jsonl::{tmp_path}/in.zip")) == [4]
    with pytest.raises(JobError, match=r"input\.path: nosuch://x"):
        rows_of("nosuch://x")


def test_partition_directories_are_columns(tmp_path: Path) -> None:
    for part in ("lang=en/y=1", "lang=__HIVE_DEFAULT_PARTITION__/y=1", "lang=zh%2FHans/y=2"):
        (tmp_path / part).mkdir(parents=True)
        pq.write_table(pa.table({"n": [1]}), tmp_path / part / "p.parquet")
    write_lines(tmp_path / "lang=ja/n=7/a.jsonl", 1)
    rows = rows_of(tmp_path)
    assert [row.data for row in rows] == [
        {"n": 1, "lang": None, "y": "1"},
        {"n": 1, "lang": "en", "y": "1"},
        {"n": 0, "lang": "ja"},
        {"n": 1, "lang": "zh/Hans", "y": "2"},
    ]
    assert numbers(rows_of(tmp_path, columns=["n", "lang"], where=[["lang", "=", "en"]])) == [1]
    assert len(rows_of(tmp_path, where=[["y", ">=", 2]])) == 1
    assert len(rows_of(tmp_path, where=[[["y", "=", 1], ["n", "=", 1], ["lang", "is", None]], [["y", "=", "2"]]])) == 2
    (tmp_path / "lang=ja" / "own.jsonl").write_text('{"n": 9, "lang": "de"}\n')
    assert numbers(rows_of(tmp_path, where=[["lang", "=", "de"]])) == [9]
    assert numbers(rows_of(tmp_path, where=[["lang", "=", "ja"]])) == [0]
    source = Source(InputSpec(path=str(tmp_path), where=[["lang", ">", 3]]))
    with pytest.raises(JobError, match=r"a\.jsonl: .*column 'lang' holds text and is compared with a number"):
        source.check_columns(source.files())


# JSON Lines


def test_lines_keep_their_physical_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n \t\n{"n": "\xe2\x80\xa8\\u0000\xc2\x85"}\r\n{"n": 3}')
    assert [(row.row, row.data) for row in rows_of(path)] == [
        (1, {"n": 1}),
        (4, {"n": "\u2028\0\x85"}),
        (5, {"n": 3}),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"n": 1', "not JSON"),
        (b'{"n": NaN}', "NaN"),
        (b'{"n": "caf\xe9"}', "not UTF-8 at byte 11 of the line"),
        (b"[1]", "is an array, not a JSON object"),
        (b"null", "is null"),
        (b"17", "is a number"),
        (b"[" * 100_000, "nested deeper"),
    ],
)
def test_a_bad_line_is_an_error_and_the_next_is_read(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line + b'\n{"n": 3}\n')
    first, bad, last = rows_of(path)
    assert (first.data, last.data) == ({"n": 1}, {"n": 3})
    assert bad.data is None
    assert bad.error is not None
    assert bad.error.startswith("unreadable_row: a.jsonl line 2: ")
    assert reason in bad.error


def test_a_long_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"n": 1}}\n{{"n": "{"x" * 10_000_000}"}}\n{{"n": 3}}\n')
    rows = rows_of(path)
    assert [row.row for row in rows] == [1, 2, 3]
    assert len((rows[1].data or {})["n"]) == 10_000_000


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.sampled_from([b'{"n": 1}', b"", b"bad", b'{"n": "' + b"y" * 400_000 + b'"}']), max_size=12),
    end=st.sampled_from([b"", b"\n"]),
    split_rows=st.integers(1, 5),
    suffix=st.sampled_from(sorted(COMPRESS)),
    order=st.randoms(),
)
def test_splits_hold_every_line_once(
    tmp_path: Path, lines: list[bytes], end: bytes, split_rows: int, suffix: str, order: Any
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](b"\n".join(lines) + end))
    source = Source(InputSpec(path=str(path), split_rows=split_rows))
    splits = source.splits(source.files())
    assert [split.number for split in splits] == list(range(len(splits)))
    assert all(1 <= split.n_rows <= split_rows for split in splits)
    shuffled = splits.copy()
    order.shuffle(shuffled)
    found = {split.number: list(source.rows(split)) for split in shuffled}
    for split in splits:
        assert all(split.first_row <= row.row < split.first_row + split.n_rows for row in found[split.number])
    rows = [row for split in splits for row in found[split.number]]
    assert [row.row for row in rows] == [i for i, line in enumerate(lines, 1) if line]
    assert [row.error is None for row in rows] == [line != b"bad" for line in lines if line]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_split_can_be_cut_anywhere(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"n": list(range(9))}), path, row_group_size=4)
    else:
        write_lines(path, 9)
    source = Source(InputSpec(path=str(path), split_rows=5))
    for split in source.splits(source.files()):
        whole = list(source.rows(split))
        for n_rows in range(split.n_rows + 1):
            head, rest = source.cut(split, n_rows)
            assert list(source.rows(head)) == whole[:n_rows]
            assert list(source.rows(rest)) == whole[n_rows:]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_every_member_of_a_compressed_file_is_read(tmp_path: Path, suffix: str) -> None:
    parts = [b'{"n": 1}\n{"n"', b": 2}\n", b"", b'{"n": 3}\n']
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], parts)) + b"\0" * 100_000)
    assert numbers(rows_of(path, split_rows=2)) == [1, 2, 3]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_file_gives_its_readable_rows_and_says_so(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    text = b"".join(b'{"n": "%s"}\n' % os.urandom(100).hex().encode() for _ in range(5000))
    whole = COMPRESS[suffix](text)
    path.write_bytes(whole[: len(whole) * 2 // 3])
    splits = splits_of(path, split_rows=1000)
    assert all(split.error is None for split in splits[:-1])
    assert "truncated" in str(splits[-1].error)
    rows = rows_of(path, split_rows=1000)
    assert 1000 < len(rows) < 5000
    assert sum(row.error is None for row in rows) >= len(rows) - 1
    assert [row.row for row in rows] == list(range(1, len(rows) + 1))


def test_corrupt_data_ends_a_file_where_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n') + b"this is no gzip member")
    (split,) = splits_of(path)
    assert split.error is not None
    assert "invalid .gz data" in split.error
    assert numbers(rows_of(path)) == [1]


def test_all_files_that_cannot_be_read_at_all_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "good.jsonl", 1)
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "b.jsonl.zst").write_bytes(b"")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no footer")
    source = Source(InputSpec(path=str(tmp_path)))
    files = source.files()
    (tmp_path / "good.jsonl").unlink()
    with pytest.raises(JobError) as caught:
        source.splits(files)
    lines = str(caught.value).splitlines()
    for line, (name, reason) in zip(
        lines,
        [("a.jsonl.gz", "invalid"), ("b.jsonl.zst", "empty"), ("c.parquet", ""), ("good.jsonl", "No such file")],
        strict=True,
    ):
        assert name in line
        assert reason in line


def test_an_empty_file_has_no_splits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert splits_of(tmp_path) == []


def test_a_file_that_changed_since_the_scan_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", 3)
    source = Source(InputSpec(path=str(path)))
    (split,) = source.splits(source.files())
    write_lines(path, 2)
    with pytest.raises(StoppedError, match="changed while the job ran"):
        list(source.rows(split))


def test_numbers_pass_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": [1e400, 12345678901234567890123, 1E-2]}\n')
    assert numbers(rows_of(tmp_path)) == [[Decimal("1e400"), 12345678901234567890123, 0.01]]


# Parquet


def test_row_groups_are_merged_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema({"n": pa.int64()})) as writer:
        start = 0
        for size in (3, 0, 4, 25, 2, 10):
            writer.write_table(pa.table({"n": pa.array(range(start, start + size), pa.int64())}), row_group_size=100)
            start += size
    splits = splits_of(path, split_rows=10)
    assert [(s.first_row, s.n_rows) for s in splits] == [(1, 7), (8, 10), (18, 10), (28, 5), (33, 2), (35, 10)]
    source = Source(InputSpec(path=str(path), split_rows=10))
    for split in reversed(splits):
        rows = list(source.rows(split))
        assert [row.row for row in rows] == list(range(split.first_row, split.first_row + split.n_rows))
        assert numbers(rows) == [row.row - 1 for row in rows]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(groups=st.lists(st.integers(0, 9), max_size=8), split_rows=st.integers(1, 12))
def test_parquet_splits_hold_every_row_once(tmp_path: Path, groups: list[int], split_rows: int) -> None:
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema({"n": pa.int64()})) as writer:
        for index, size in enumerate(groups):
            start = sum(groups[:index])
            writer.write_table(pa.table({"n": pa.array(range(start, start + size), pa.int64())}))
    rows = rows_of(path, split_rows=split_rows)
    assert [row.row for row in rows] == list(range(1, sum(groups) + 1))
    assert numbers(rows) == list(range(sum(groups)))
    assert all(1 <= split.n_rows <= split_rows for split in splits_of(path, split_rows=split_rows))


def test_batches_keep_types_and_rows_give_python_values(tmp_path: Path) -> None:
    day = datetime.date(2024, 1, 1)
    table = pa.table(
        {
            "large": pa.array(["a", None], pa.large_string()),
            "dictionary": pa.array(["x", "y"]).dictionary_encode(),
            "binary": pa.array([b"\xff", b"ok"]),
            "unsigned": pa.array([2**64 - 1, 0], pa.uint64()),
            "struct": pa.array([{"role": "user", "name": None}, None]),
            "date": pa.array([day, None]),
            "a.b": pa.array([1, 2], pa.int8()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = Source(InputSpec(path=str(tmp_path)))
    (split,) = source.splits(source.files())
    (batch,) = source.batches(split)
    assert batch.rows == [1, 2]
    assert batch.table is not None
    assert batch.table.schema.equals(table.schema)
    assert batch.table.equals(table)
    first, _ = source.rows(split)
    assert first.data == {
        "large": "a",
        "dictionary": "x",
        "binary": b"\xff",
        "unsigned": 2**64 - 1,
        "struct": {"role": "user", "name": None},
        "date": day,
        "a.b": 1,
    }
    only = Source(InputSpec(path=str(tmp_path), columns=("a.b", "large")))
    assert [row.data for row in read(only)] == [{"a.b": 1, "large": "a"}, {"a.b": 2, "large": None}]


def test_files_with_different_schemas_are_read_each_on_its_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int32()), "prompt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "id": ["x"], "extra": [0.5]}), tmp_path / "b.parquet")
    assert [row.data for row in rows_of(tmp_path)] == [
        {"id": 1, "prompt": "a"},
        {"prompt": "b", "id": "x", "extra": 0.5},
    ]
    with pytest.raises(JobError, match=r"a\.parquet: has no column 'extra'; it has id, prompt"):
        rows_of(tmp_path, columns=["extra"])
    with pytest.raises(JobError, match=r"a\.parquet: has no column 'extra'"):
        rows_of(tmp_path, where=[["extra", ">", 0]])


def test_a_repeated_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(JobError, match="more than one column 'a'"):
        rows_of(tmp_path)


def test_an_empty_parquet_file_has_no_splits_but_a_schema(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([], pa.string())}), tmp_path / "a.parquet")
    source = Source(InputSpec(path=str(tmp_path)))
    assert source.splits(source.files()) == []
    assert source.schema_names(source.files()) == ["id"]


def corrupt(path: Path, group: int) -> None:
    """Overwrite the data page of the first column of a row group."""
    column = pq.ParquetFile(path).metadata.row_group(group).column(0)
    data = bytearray(path.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    data[end - 40 : end] = os.urandom(40)
    path.write_bytes(data)


def test_a_damaged_row_group_is_found_before_or_costs_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = [os.urandom(50).hex() for _ in range(90)]
    pq.write_table(pa.table({"n": text}), path, row_group_size=30, use_dictionary=False, write_page_checksum=True)
    corrupt(path, 1)
    rows = rows_of(path)
    assert [row.row for row in rows] == list(range(1, 91))
    assert numbers(rows[:30]) == text[:30]
    assert all(row.data is None for row in rows[30:])
    assert str(rows[30].error).startswith("unreadable_file: a.parquet from row 31 on: ")
    corrupt(path, 0)
    with pytest.raises(JobError, match=r"a\.parquet"):
        rows_of(path)


def test_text_that_is_not_utf8_is_a_row_error(tmp_path: Path) -> None:
    binary = pa.array([b"good", b"\xff\xfe", None, b"\xe6\x97\xa5"])
    lying = pa.Array.from_buffers(pa.string(), 4, binary.buffers())
    pq.write_table(pa.table({"n": lying}), tmp_path / "a.parquet")
    rows = rows_of(tmp_path)
    assert numbers(rows) == ["good", None, None, "日"]
    assert [row.error is not None for row in rows] == [False, True, False, False]
    assert str(rows[1].error).startswith("unreadable_row: a.parquet row 2: ")


def test_times_beyond_the_calendar_of_python_become_text() -> None:
    table = pa.table({"t": pa.array([0, 2**58], pa.timestamp("us")), "d": pa.array([0, 10**9], pa.date32())})
    first, second = to_records(table)
    assert first == {"t": datetime.datetime(1970, 1, 1), "d": datetime.date(1970, 1, 1)}
    assert second["t"].startswith("11103-08-29")
    assert isinstance(second["d"], str)


# Columns and filters


def both_formats(tmp_path: Path, records: list[dict[str, Any]]) -> list[Path]:
    jsonl, parquet = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    jsonl.write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records), parquet)
    return [jsonl, parquet]


RECORDS = [
    {"n": 1, "lang": "en", "ok": True},
    {"n": 2, "lang": "ja", "ok": False},
    {"n": None, "lang": "en", "ok": None},
    {"n": 4, "lang": None, "ok": True},
]


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ([["n", "=", 1]], [1]),
        ([["n", "!=", 1]], [2, 4]),
        ([["n", ">=", 2], ["lang", "==", "ja"]], [2]),
        ([[["n", "<", 2]], [["n", ">", 3]]], [1, 4]),
        ([["lang", "in", ["en", "fr"]]], [1, 3]),
        ([["lang", "not in", ["en"]]], [2]),
        ([["lang", "is", None]], [4]),
        ([["n", "is not", None], ["ok", "==", True]], [1, 4]),
        ([["n", "in", []]], []),
        ([["n", "<=", 2.5]], [1, 2]),
    ],
)
def test_filters_keep_the_same_rows_in_every_format(tmp_path: Path, where: Any, kept: list[int]) -> None:
    for path in both_formats(tmp_path, RECORDS):
        source = Source(InputSpec(path=str(path), where=where))
        assert [row.row for row in read(source)] == kept
        batches = [batch for split in source.splits(source.files()) for batch in source.batches(split)]
        assert [row for batch in batches for row in batch.rows] == kept
        projected = rows_of(path, where=where, columns=["lang"])
        assert [row.data for row in projected] == [{"lang": RECORDS[row - 1]["lang"]} for row in kept]


def test_a_value_that_does_not_compare_is_a_row_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": "1"}\n{"n": true}\n{"n": [1]}\n{}\n{"n": 3}\n')
    rows = rows_of(tmp_path, where=[["n", ">", 2]])
    assert [row.row for row in rows] == [2, 3, 4, 6]
    assert [row.error for row in rows] == [
        "bad_filter: input.where: column 'n' holds text and is compared with a number",
        "bad_filter: input.where: column 'n' holds a boolean and is compared with a number",
        "bad_filter: input.where: column 'n' holds a list and is compared with a number",
        None,
    ]
    for path in both_formats(tmp_path / "..", [{"n": "1"}]):
        assert [row.error is not None for row in rows_of(path, where=[["n", "in", [1, 2]]])] == [True]


@pytest.mark.parametrize(
    "where",
    ["n > 1", [], [["n", ">"]], ["n", ">", 1], [["n", "~", 1]], [["n", "in", 1]], [["n", "=", None]], [[["n"]]], [{}]],
)
def test_a_filter_that_is_none_is_refused(where: Any) -> None:
    with pytest.raises(JobError, match=r"input\.where"):
        Source(InputSpec(path="x", where=where))


def test_columns_of_jsonl_may_be_missing_in_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2}\n{"b": 3}\n')
    assert [row.data for row in rows_of(tmp_path, columns=["a"])] == [{"a": 1}, {}]


def test_column_names_are_known_before_all_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nbad\n{"b": 2, "a": 1}\n' + "\n" * 200 + '{"late": 1}\n')
    (tmp_path / "k=v").mkdir()
    pq.write_table(pa.table({"c": [1]}), tmp_path / "k=v" / "p.parquet")
    source = Source(InputSpec(path=str(tmp_path)))
    assert source.schema_names(source.files()) == ["a", "b", "c", "k"]
    (tmp_path / "empty.jsonl").write_text("")
    source = Source(InputSpec(path=str(tmp_path / "empty.jsonl")))
    assert source.schema_names(source.files()) is None


# Datasets


@pytest.fixture
def dataset_options(tmp_path: Path) -> dict[str, Any]:
    files = {name: str(write_lines(tmp_path / f"{name}.jsonl", count)) for name, count in (("train", 7), ("test", 2))}
    return {"data_files": files, "cache_dir": str(tmp_path / "cache")}


def test_datasets_are_read_by_name(dataset_options: dict[str, Any]) -> None:
    spec = InputSpec(path="json", format="datasets", dataset_options=dataset_options, split_rows=3)
    source = Source(spec)
    files = source.files()
    assert [file.key for file in files] == ["hf:json:default:train", "hf:json:default:test"]
    splits = source.splits(files)
    assert [(s.file.key[-4:], s.first_row, s.n_rows) for s in splits] == [
        ("rain", 1, 3),
        ("rain", 4, 3),
        ("rain", 7, 1),
        ("test", 1, 2),
    ]
    again = Source(spec)  # another process, later
    assert again.files() == files
    assert [numbers(list(again.rows(split))) for split in splits] == [[0, 1, 2], [3, 4, 5], [6], [0, 1]]
    assert source.schema_names(files) == ["n"]


def test_one_split_of_a_dataset_can_be_filtered(dataset_options: dict[str, Any]) -> None:
    options = {"format": "datasets", "dataset_options": dataset_options | {"split": "train"}}
    assert numbers(rows_of("json", where=[["n", ">", 4]], **options)) == [5, 6]
    with pytest.raises(JobError, match="has no column 'nope'"):
        rows_of("json", columns=["nope"], **options)


def test_a_dataset_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"input\.path: dataset .*nothing"):
        rows_of(tmp_path / "nothing", format="datasets")
    with pytest.raises(JobError, match="streaming"):
        rows_of("json", format="datasets", dataset_options={"streaming": True})


def test_reading_needs_no_torch(tmp_path: Path, dataset_options: dict[str, Any]) -> None:
    code = """
import sys
from batchrun.data.source import Source
from batchrun.job import InputSpec
source = Source(InputSpec.model_validate_json(sys.argv[1]))
rows = [row for split in source.splits(source.files()) for row in source.rows(split)]
sys.exit("torch" in sys.modules or len(rows) != 9)
"""
    spec = InputSpec(path="json", format="datasets", dataset_options=dataset_options)
    subprocess.run([sys.executable, "-c", code, spec.model_dump_json()], check=True)
