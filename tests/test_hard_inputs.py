"""Inputs that break other runners, from end to end with a tiny model: rows in = results + error records, an error
stands on its own line, values pass through, and the exit code says how it went.

The fixtures are made here, one per kind of trouble; what is read is keyed by (file, row number), never by position.
Where the repository has `../shared/data/hard` beside it, every entry of its manifest runs as well.
"""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchrun import load_job, run_job
from batchrun.data.parts import RESULT_COLUMNS
from batchrun.data.source import Source
from batchrun.data.view import OutputView
from batchrun.errors import JobError
from batchrun.job import JobSpec
from tests.jobs import output_rows, write_job
from tests.models import save_model, save_tokenizer

SHARED = Path(__file__).parents[2] / "shared" / "data"
CONTEXT = 8192

Records = dict[int, dict[str, Any]]  # row number -> output record


class Outcome(NamedTuple):
    """How a job ended: its exit code, and the records of each file."""

    code: int
    files: dict[str, Records]

    def errors(self, key: str) -> list[int]:
        return [row for row, record in self.files[key].items() if record["error"] is not None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "wide", layers=1, max_position_embeddings=CONTEXT)


def run(folder: Path, model: Path, path: Path | list[Path], **sections: Any) -> Outcome:
    """Run a job over ``path``, one token a row, results in ``folder/out``."""
    folder.mkdir(parents=True, exist_ok=True)
    where = [str(p) for p in path] if isinstance(path, list) else str(path)
    sections = {"prompt": {"template": "{{ prompt }}"}} | sections
    sections["input"] = {"path": where} | sections.get("input", {})
    sections["sampling"] = {"max_tokens": 1} | sections.get("sampling", {})
    job = load_job(write_job(folder, model, [], **sections))
    return Outcome(run_job(job), records_of(job, output_rows(folder)))


def records_of(job: JobSpec, records: list[dict[str, Any]]) -> dict[str, Records]:
    """Output records by file and row number; the rest of a damaged file counts as the row after its last."""
    view = OutputView.at(job.output.path)
    assert view is not None
    _, splits = view.recorded_input() or ([], [])
    places = []
    for split in splits:
        places += [(split.file.key, row) for batch in Source(job.input).batches(split) for row in batch.rows]
        places += [(split.file.key, split.first_row + split.n_rows)] if split.error else []
    files: dict[str, Records] = {file.key: {} for file in Source(job.input).files()}
    for (key, row), record in zip(places, records, strict=True):
        assert (record["generated_text"] is None) == (record["error"] is not None)
        files[key][row] = record
    return files


def lines(*rows: Any, end: str = "\n") -> bytes:
    """JSONL; text is taken as it stands."""
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    return "".join(text + end for text in texts).encode()


def row(number: int, **columns: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "prompt": f"Reply with {number}."} | columns


def deep(levels: int) -> str:
    return f'{{"id": "deep", "prompt": "x", "meta": {"[" * levels}{"]" * levels}}}'


GOOD: dict[str, bytes] = {
    "clean": lines(*map(row, range(5))),
    "byte-order-mark": b"\xef\xbb\xbf" + lines(*map(row, range(3))),
    "carriage-returns": lines(*map(row, range(3)), end="\r\n"),
    "blank-lines": lines("", row(1), "  \t", row(2), "", ""),
    "no-final-newline": lines(*map(row, range(3))).rstrip(b"\n"),
    "repeated-ids": lines(row(1), row(2), row(2), row(3), row(1, prompt="Another prompt under a used id."), row(4)),
    "no-id": lines(row(1), {"prompt": "no id"}, {"id": None, "prompt": "null id"}),
    "ids-of-any-type": lines(row(1, id=2), row(2, id="2"), row(3, id=1.5), row(4, id=["x"]), row(5, id={"a": None})),
    "emoji": lines(
        row(1, id="caf\u00e9"), row(2, id="cafe\u0301"), row(3, prompt="\U0001f468\u200d\U0001f469\u200d\U0001f467"),
    ),
    "nul": lines(row(1, prompt="a\0b"), row(2, id="i\0d"), '{"id": "r3", "prompt": "\\u0000"}'),
    "line-separators": lines(
        row(1, prompt="a\u2028b"), row(2, prompt="c\u2029d\u0085e"), row(3, prompt="\x0b\x0c\x1c".join("abcd")),
    ),
    "ragged": lines(
        row(1, x=1), row(2, x="one", y=[1, 2]), row(3, x={"a": 1}), row(4, y={}), row(5, x=None), row(6, z=True),
    ),
    "special-tokens": lines(
        row(1, prompt="<|user|>obey<|end|>"), row(2, prompt="<|eos|>"), row(3, prompt="</s>[INST] x"),
    ),
    "numbers": lines(row(1, prompt=42), row(2, prompt=1.5), row(3, big=2**70, small=1e-300, exact=9007199254740993)),
    "whitespace": lines(row(1, prompt=" "), row(2, prompt="\n")),
    "nested": lines(row(1), deep(400), row(3)),
    "repeated-keys": lines('{"id": "r1", "prompt": "first", "prompt": "last"}'),
    "late-types": lines(*(row(i, n=i) for i in range(500)), *(row(i, n=f"t{i}", new=[i]) for i in range(500, 520))),
    "identical": lines(*(row(i, prompt="The same.") for i in range(300))),
    "skewed": lines(*(row(i, prompt="x" * (1500 if i % 20 == 0 else 1)) for i in range(60))),
    "empty": b"",
    "only-blank": b"\n\n \n",
}  # fmt: skip

BAD: dict[str, tuple[bytes, list[int]]] = {
    "malformed": (lines(row(1), '{"id": "r2", "prompt": "cut', row(3), "{'id': 'r4'}", row(5)), [2, 4]),
    "partial-last-line": (lines(row(1), row(2)) + b'{"id": "r3", "pro', [3]),
    "missing-field": (lines(row(1), {"id": "r2"}, row(3), {}), [2, 4]),
    "null-prompt": (lines(row(1), row(2, prompt=None), row(3)), [2]),
    "empty-prompt": (lines(row(1, prompt=""), row(2)), [1]),
    "long-line": (lines(row(1), row(2, prompt="word " * 2_000_000), row(3)), [2]),
    "over-context": (lines(row(1), row(2, prompt="x" * CONTEXT), row(3, prompt="x" * (CONTEXT - 1)), row(4)), [2]),
    "too-deep": (lines(row(1), deep(100_000), '{"a":' * 100_000, row(4)), [2, 3]),
    "mixed-types": (
        lines(
            row(1), row(2, prompt=["a"]), row(3, prompt={"text": "x"}), row(4, prompt=True),
            [1], '"text"', "null", "17",
        ),
        [2, 3, 4, 5, 6, 7, 8],
    ),
    "not-utf8": (
        lines(row(1)) + b'{"id": "r2", "prompt": "\xff"}\n{"id": "r3", "prompt": "\x95\\\x5c"}\n'
        b'{"id": "r4", "prompt": "\xc3"}\n' + lines(row(5)),
        [2, 3, 4],
    ),
    "not-json": (
        lines(
            '{"id": "r1", "prompt": "x",}', row(2), '{"id": NaN, "prompt": "x"}', '{"prompt": "x", "n": -Infinity}',
            '{"prompt": "x", "n": 01}', '{"prompt": "tab\t"}', '{"prompt": "x"} {}', '{prompt: "x"}', row(9),
            "\ufeff{}",
        ),
        [1, 3, 4, 5, 6, 7, 8, 10],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_every_row_of_odd_but_good_files_gets_a_result(tmp_path: Path, model: Path, form: str) -> None:
    given = tmp_path / "in"
    given.mkdir()
    for name, content in GOOD.items():
        (given / f"{name}.jsonl").write_bytes(content)
    outcome = run(tmp_path, model, given, output={"format": form})
    assert outcome.code == 0
    for name, content in GOOD.items():
        expected = {
            number: json.loads(line)
            for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
            if line.strip()
        }
        found = outcome.files[f"{name}.jsonl"]
        assert list(found) == list(expected), name
        if form == "jsonl":
            assert kept(found) == expected
        for number, record in found.items():
            assert record["prompt_tokens"] > 0
            value = expected[number].get("id")
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            wanted = f"{name}.jsonl:{number}" if value is None else text
            assert record["custom_id"].replace(" ", "") == wanted.replace(" ", "")


def kept(records: Records) -> Records:
    """Without result columns."""
    return {
        number: {name: value for name, value in record.items() if name not in RESULT_COLUMNS}
        for number, record in records.items()
    }


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_bad_rows_are_errors_on_their_lines_and_the_rest_goes_on(tmp_path: Path, model: Path, form: str) -> None:
    given = tmp_path / "in"
    given.mkdir()
    for name, (content, _) in BAD.items():
        (given / f"{name}.jsonl").write_bytes(content)
    outcome = run(tmp_path, model, given, output={"format": form})
    assert outcome.code == 3
    for name, (content, bad) in BAD.items():
        key = f"{name}.jsonl"
        assert list(outcome.files[key]) == list(range(1, len(content.strip().split(b"\n")) + 1)), name
        assert outcome.errors(key) == bad, name
        for number in bad:
            error = outcome.files[key][number]["error"]
            assert ": " in error
            if error.startswith("unreadable_row"):
                assert f"{key} line {number}: " in error
    reasons = {name: outcome.files[f"{name}.jsonl"][bad[0]]["error"] for name, (_, bad) in BAD.items()}
    assert "'prompt' is missing" in reasons["missing-field"]
    assert "'prompt' is null" in reasons["null-prompt"]
    assert f"{CONTEXT} tokens; the limit is {CONTEXT - 1}" in reasons["over-context"]
    assert "nested deeper than" in reasons["too-deep"]
    assert "not UTF-8 at byte 25" in reasons["not-utf8"]


def test_lone_surrogates_are_replaced(tmp_path: Path, model: Path) -> None:
    escaped = [r"high \ud800 alone", r"low \udc00 alone", r"swapped \ude00\ud83d", r"paired \ud83d\ude00"]
    content = lines(*(f'{{"id": "r{i}", "prompt": "{text}"}}' for i, text in enumerate(escaped)), row(5))
    (tmp_path / "a.jsonl").write_bytes(content + b'{"id": "r\\ud8006", "prompt": "in the id"}\n')
    for form in ("jsonl", "parquet"):
        outcome = run(tmp_path / form, model, tmp_path / "a.jsonl", output={"format": form})
        assert outcome.code == 0
        prompts = [record["prompt"] for record in outcome.files["a.jsonl"].values()]
        replaced = ["high \ufffd alone", "low \ufffd alone", "swapped \ufffd\ufffd", "paired \U0001f600"]
        assert prompts == [*replaced, "Reply with 5.", "in the id"]
        assert outcome.files["a.jsonl"][6]["custom_id"] == "r\ufffd6"


def test_a_text_cut_within_a_character_is_still_text(tmp_path: Path, model: Path) -> None:
    rows = [row(i, params={"max_tokens": i, "temperature": 2, "ignore_eos": True}) for i in range(1, 9)]
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    outcome = run(tmp_path, model, tmp_path / "a.jsonl", sampling={"from_column": "params"}, output={"format": "jsonl"})
    assert outcome.code == 0
    for number, record in outcome.files["a.jsonl"].items():
        assert (record["finish_reason"], record["completion_tokens"]) == ("length", number)
    assert any("\ufffd" in record["generated_text"] for record in outcome.files["a.jsonl"].values())


# ---- files


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


def test_compressed_and_strangely_named_files_are_read(tmp_path: Path, model: Path) -> None:
    given = tmp_path / "in"
    (given / "sub").mkdir(parents=True)
    for suffix, compress in COMPRESSORS.items():
        (given / f"one.jsonl.{suffix}").write_bytes(compress(lines(*map(row, range(5)))))
        (given / f"two.jsonl.{suffix}").write_bytes(compress(lines(*map(row, range(4)))) + compress(lines(row(4))))
    (given / "sub" / "d.jsonl").write_bytes(lines(row(1)))
    for name in ("README.md", "_SUCCESS", ".hidden.jsonl", "c.json.tmp", "_metadata_tmp"):
        (given / name).write_bytes(lines(row(9)))
    strange = tmp_path / "日本語 ファイル #1 [x].jsonl"
    strange.write_bytes(lines(*map(row, range(3))))
    outcome = run(tmp_path, model, [given, strange])
    assert outcome.code == 0
    counts = {key: len(records) for key, records in outcome.files.items()}
    archives = {f"{name}.jsonl.{suffix}": 5 for name in ("one", "two") for suffix in COMPRESSORS}
    assert counts == archives | {"sub/d.jsonl": 1, strange.name: 3}


def truncated(suffix: str, n_rows: int) -> bytes:
    whole = COMPRESSORS[suffix](lines(*(row(i, noise=random.Random(i).random()) for i in range(n_rows))))
    return whole[: len(whole) * 9 // 10]


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst"])
def test_a_truncated_file_is_an_error_and_its_rows_are_not_lost(tmp_path: Path, model: Path, suffix: str) -> None:
    given, key = tmp_path / "in", f"cut.jsonl.{suffix}"
    given.mkdir()
    (given / key).write_bytes(truncated(suffix, 2000))
    (given / "good.jsonl").write_bytes(lines(row(1)))
    outcome = run(tmp_path, model, given)
    assert outcome.code == 3
    assert outcome.errors("good.jsonl") == []
    last = max(outcome.files[key])
    assert list(outcome.files[key]) == list(range(1, last + 1))
    assert outcome.files[key][last]["error"].startswith(f"unreadable_file: {key} from row {last} on: truncated")
    assert set(outcome.errors(key)) <= {last - 1, last}  # the cut may go through a line


def test_a_truncated_file_without_a_readable_row_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "cut.jsonl.bz2").write_bytes(truncated("bz2", 200))  # one block, and no end
    with pytest.raises(JobError, match=r"cut\.jsonl\.bz2: truncated") as refused:
        run(tmp_path, model, tmp_path / "cut.jsonl.bz2")
    assert refused.value.exit_code == 2


# ---- messages


def with_tokenizer(folder: Path, model: Path, chat_template: str, *, add_bos: bool = False) -> Path:
    """``model`` with another tokenizer."""
    folder.mkdir()
    for file in model.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file)
    save_tokenizer(folder, chat_template=chat_template, add_bos=add_bos)
    return folder


def say(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_messages_of_every_shape(tmp_path: Path, model: Path) -> None:
    parts = [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    shapes: list[tuple[Any, str | None]] = [
        ([say("Say hi.")], None),
        ([], "a list of one or more objects"),
        ([{"role": "user"}], "content has to be text"),
        ([{"content": "no role"}], "message 0 has no role"),
        ([say(None)], "content has to be text"),
        ([say(parts)], None),
        ([say([{"type": "image_url", "image_url": {"url": "x"}}])], "not 'image_url'"),
        ([say("A", "system"), say("x")], "System role not supported"),
        ([say("x"), say("y")], "roles must alternate"),
        ([say("x"), call, {"role": "tool", "content": "{}"}], None),
        ("not a list", "not JSON"),
        (json.dumps([say("as JSON text")]), None),
        ([say(7)], "content has to be text"),
        (["hi"], "message 0 is not an object"),
        (None, "'messages' is null"),
        ([say("Say hi.")], None),
    ]
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{% if loop.index0 % 2 == 1 and message.role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    (tmp_path / "a.jsonl").write_bytes(lines(*({"id": i, "messages": m} for i, (m, _) in enumerate(shapes))))
    strict = with_tokenizer(tmp_path / "strict", model, template)
    outcome = run(tmp_path, strict, tmp_path / "a.jsonl", prompt={"messages_column": "messages"})
    assert outcome.code == 3
    for (_, reason), record in zip(shapes, outcome.files["a.jsonl"].values(), strict=True):
        assert (record["error"] is None) if reason is None else (reason in record["error"])


def test_a_chat_prompt_begins_with_one_special_token(tmp_path: Path, model: Path) -> None:
    chat = with_tokenizer(tmp_path / "chat", model, "<|bos|>{{ messages[0].content }}", add_bos=True)
    (tmp_path / "a.jsonl").write_bytes(lines(row(1, prompt="abc", messages=[say("abc")])))
    for index, prompt in enumerate(({"messages_column": "messages"}, {"template": "{{ prompt }}"})):
        outcome = run(tmp_path / str(index), chat, tmp_path / "a.jsonl", prompt=prompt)
        assert outcome.files["a.jsonl"][1]["prompt_tokens"] == 4


def test_null_fields_that_parquet_forces_on_messages_stay_out_of_the_prompt(tmp_path: Path, model: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.name is defined %}NAME{% endif %}"
        "{% if m.tool_calls is defined %}CALLS{% endif %}{% endfor %}"
    )
    conversations = [[say("abc")], [say("abc") | {"name": "n"}], [say("abc", "assistant") | {"tool_calls": ["f"]}]]
    pq.write_table(pa.table({"messages": conversations}), tmp_path / "a.parquet")
    picky = with_tokenizer(tmp_path / "picky", model, template)
    sections = {"prompt": {"messages_column": "messages"}, "input": {"id_column": None}}
    outcome = run(tmp_path, picky, tmp_path / "a.parquet", **sections)
    assert outcome.code == 0
    assert [record["prompt_tokens"] for record in outcome.files["a.parquet"].values()] == [3, 7, 8]
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table.schema.field("messages") == pq.read_schema(tmp_path / "a.parquet").field("messages")
    assert table["messages"].to_pylist() == pq.read_table(tmp_path / "a.parquet")["messages"].to_pylist()


# ---- Parquet


def test_parquet_files_of_every_kind(tmp_path: Path, model: Path) -> None:
    given = tmp_path / "in"
    given.mkdir()
    texts = [f"Reply with {i}." for i in range(5)]
    ids = [f"r{i}" for i in range(5)]
    tables = {
        "large_string": pa.table({"id": ids, "prompt": pa.array(texts, pa.large_string())}),
        "dictionary": pa.table({"id": ids, "prompt": pa.array(texts).dictionary_encode()}),
        "nulls": pa.table({"id": ids, "prompt": [texts[0], None, " ", "", texts[4]]}),
        "binary": pa.table({"id": ids, "prompt": pa.array([b"a", "é".encode(), b"\xff", b"", b"\xe3\x81"])}),
        "drift": pa.table({"extra": [[1]] * 5, "prompt": texts, "id": pa.array(range(5), pa.int32())}),
        "row_groups": pa.table({"id": [str(i) for i in range(300)], "prompt": ["x"] * 300}),
        "none": pa.table({"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())}),
    }
    for name, table in tables.items():
        pq.write_table(table, given / f"{name}.parquet", row_group_size=1 if name == "row_groups" else None)
    for lang in ("en", "zh%2FHans", "__HIVE_DEFAULT_PARTITION__"):
        (given / f"lang={lang}").mkdir()
        pq.write_table(pa.table({"id": ids, "prompt": texts}), given / f"lang={lang}" / "part-0.parquet")
    outcome = run(tmp_path, model, given)
    assert outcome.code == 3
    assert {key: outcome.errors(key) for key in outcome.files if outcome.errors(key)} == {
        "nulls.parquet": [2, 4],
        "binary.parquet": [3, 4, 5],
    }
    for name, table in tables.items():
        assert list(outcome.files[f"{name}.parquet"]) == list(range(1, len(table) + 1))
    assert "not UTF-8 at byte 1" in outcome.files["binary.parquet"][3]["error"]
    langs = {key: records[1]["lang"] for key, records in outcome.files.items() if key.startswith("lang=")}
    assert set(langs.values()) == {"en", "zh/Hans", None}


def test_a_parquet_file_without_rows_is_a_valid_output(tmp_path: Path, model: Path) -> None:
    empty = pa.table({"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "a.parquet")
    assert run(tmp_path, model, tmp_path / "a.parquet") == Outcome(0, {"a.parquet": {}})
    assert set(pq.read_schema(tmp_path / "out" / "part-00000.parquet").names) >= {"generated_text", "error"}


def test_a_damaged_parquet_file_is_named_before_anything_runs(tmp_path: Path, model: Path) -> None:
    given = tmp_path / "in"
    given.mkdir()
    pq.write_table(pa.table({"id": ["a"], "prompt": ["b"]}), given / "good.parquet")
    (given / "cut.parquet").write_bytes((given / "good.parquet").read_bytes()[:-20])
    with pytest.raises(JobError, match=r"cut\.parquet: ") as refused:
        run(tmp_path, model, given)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_types_of_every_kind_pass_through(tmp_path: Path, model: Path) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 1, 250000)
    table = pa.table(
        {
            "prompt": ["x", "y"],
            "u64": pa.array([2**64 - 1, 0], pa.uint64()),
            "f32": pa.array([float("nan"), float("inf")], pa.float32()),
            "decimal": pa.array([Decimal("1.10"), None], pa.decimal128(20, 2)),
            "time": pa.array([moment, None], pa.timestamp("ns", "Asia/Tokyo")),
            "day": pa.array([moment.date(), None], pa.date32()),
            "bytes": pa.array([b"\xff\x00", b""], pa.binary()),
            "list": pa.array([[1, None], []], pa.list_(pa.int8())),
            "struct": pa.array([{"a": 1, "b": None}, None], pa.struct([("a", pa.int16()), ("b", pa.string())])),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
            "category": pa.array(["a", "b"]).dictionary_encode(),
            "nothing": pa.nulls(2),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    given = pq.read_table(tmp_path / "a.parquet")
    plain = {"id_column": None}
    assert run(tmp_path, model, tmp_path / "a.parquet", input=plain).code == 0
    out = pq.read_table(tmp_path / "out" / "part-00000.parquet").select(table.column_names)
    assert out.schema.equals(given.schema)
    assert out.drop(["f32"]).equals(given.drop(["f32"]))
    assert str(out["f32"].to_pylist()) == "[nan, inf]"

    outcome = run(tmp_path / "json", model, tmp_path / "a.parquet", input=plain, output={"format": "jsonl"})
    first = outcome.files["a.parquet"][1]
    assert (first["u64"], first["f32"], first["decimal"]) == (2**64 - 1, None, 1.1)
    assert (first["list"], first["struct"], first["map"]) == ([1, None], {"a": 1, "b": None}, [["k", 1]])


# ---- public failure reports (data/issues), with fixtures of our own


def test_one_overlong_row_among_a_hundred(tmp_path: Path, model: Path) -> None:
    rows = [row(i, prompt="word " * 5000) if i == 50 else row(i) for i in range(101)]
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    outcome = run(tmp_path, model, tmp_path / "a.jsonl")
    assert outcome.code == 3
    assert outcome.errors("a.jsonl") == [51]
    assert "25000 tokens" in outcome.files["a.jsonl"][51]["error"]
    assert [record["custom_id"] for record in outcome.files["a.jsonl"].values()] == [r["id"] for r in rows]


def test_an_overlong_row_may_be_truncated_instead(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(row(1), row(2, prompt="word " * 5000)))
    prompt = {"template": "{{ prompt }}", "too_long": "truncate_left"}
    outcome = run(tmp_path, model, tmp_path / "a.jsonl", prompt=prompt)
    assert outcome.code == 0
    assert outcome.files["a.jsonl"][2]["prompt_tokens"] == CONTEXT - 1


# ---- the shared collection, where it is there


EITHER: dict[str, set[int]] = {  # rows whose outcome the manifest leaves open (its `policy`, and numbers as prompts)
    "jsonl/09_missing_field.jsonl": {4},
    "jsonl/11_empty_prompt.jsonl": {1},
    "jsonl/14_lone_surrogates.jsonl": {2, 3, 4, 6},
    "jsonl/19_deep_nesting.jsonl": {3},
    "jsonl/22_mixed_types.jsonl": {4, 5, 12, 13, 14},
    "jsonl/25_messages_shapes.jsonl": {5, 6, *range(8, 14), 15, 16, 18},
    "parquet/p04_nulls.parquet": {4},
    "parquet/p08_binary_prompt.parquet": {4},
    "dirs/d01_mixed/": {8},
}


def manifest() -> list[dict[str, Any]]:
    path = SHARED / "hard" / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else []


@pytest.mark.slow
@pytest.mark.skipif(not manifest(), reason="needs ../shared/data/hard")
@pytest.mark.parametrize("entry", manifest(), ids=lambda entry: str(entry["file"]))
def test_the_shared_collection(tmp_path: Path, model: Path, entry: dict[str, Any]) -> None:
    path = SHARED / "hard" / entry["file"]
    if "parquet_testing" in entry["file"]:
        files = [
            file for file in sorted(path.glob("*.parquet*")) if "large_string_map" not in file.name
        ]  # 2 GB: minutes
        outcomes = [run_any_parquet(tmp_path / file.name, model, file) for file in files]
        assert sum(outcome is not None for outcome in outcomes) > len(outcomes) // 2
        return
    sections: dict[str, Any] = {"input": {"split_rows": 1000}}
    if "messages" in entry["file"]:
        sections["prompt"] = {"messages_column": "messages"}
    if entry["file"].startswith("jsonl/"):
        sections["sampling"] = {"from_column": "params"}
    try:
        outcome = run(tmp_path, model, path, **sections)
    except JobError as refused:
        if not entry["file_error"] or path.name not in str(refused):
            raise
        return
    # In a directory rows are counted through all files.
    numbered = [(number, records[number]) for records in outcome.files.values() for number in records]
    if path.is_dir():
        numbered = [(place, record) for place, (_, record) in enumerate(numbered, 1)]
    failed = {number for number, record in numbered if record["error"] is not None}
    assert outcome.code == (3 if failed else 0)
    if entry["file_error"]:
        assert failed
        return
    either = EITHER.get(entry["file"], set())
    assert failed - either == set(entry["error_lines"]) - either
    certain = {number for number, _ in numbered} - failed - either
    assert len(certain) <= entry["ok_rows"] <= len(certain) + len(either)


def run_any_parquet(folder: Path, model: Path, file: Path) -> Outcome | None:
    """Run a file with one of its columns, of text if there is one, as the prompt: every row has a record.

    None where the file is refused, which has to name it.
    """
    try:
        schema = pq.read_schema(file)
        names = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_binary(f.type)] + schema.names
    except (pa.ArrowException, OSError):
        names = ["unknown"]
    prompt = {"template": f"{{{{ row[{json.dumps(names[0])}] }}}}"}
    try:
        outcome = run(folder, model, file, input={"format": "parquet", "id_column": None}, prompt=prompt)
    except JobError as refused:
        if file.name not in str(refused):
            raise
        return None
    records = outcome.files[file.name]
    assert list(records) == list(range(1, len(records) + 1))
    assert outcome.code == (3 if outcome.errors(file.name) else 0)
    return outcome
