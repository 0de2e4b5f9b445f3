"""Small jobs on disk, for tests of everything that takes a job file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchrun.data.source import to_records


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """A JSONL file; text among ``rows`` is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_job(folder: Path, reference: Path, rows: Sequence[Any], **sections: Any) -> Path:
    """A job over ``rows`` (columns ``id`` and ``text``) in ``folder``, with ``sections`` merged into its own."""
    job: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": str(reference)},
        "input": {"path": str(write_rows(folder / "rows.jsonl", rows)), "id_column": "id"},
        "prompt": {"template": "Say {{ text }}"},
        "output": {"path": str(folder / "out")},
    }
    for name, fields in sections.items():
        job[name] = fields if name == "prompt" else job.get(name, {}) | fields
    path = folder / "job.yaml"
    path.write_text(json.dumps(job, indent=1), encoding="utf-8")  # JSON is YAML
    return path


def output_rows(folder: Path) -> list[dict[str, Any]]:
    """The records of the parts in ``folder/out``, in order; JSON has to be strict."""
    records: list[dict[str, Any]] = []
    for part in sorted((folder / "out").glob("part-*")):
        if part.suffix == ".parquet":
            records += to_records(pq.read_table(part, partitioning=None))
        else:
            records += [json.loads(line, parse_constant=_not_json) for line in part.open(encoding="utf-8")]
    return records


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
