"""The small JSON records under ``_batchrun/``: what is committed, and what the result consists of.

What lies in ``output.path``::

    part-00000.parquet ...            the results, one part per split
    _manifest.json                    copy of the newest manifest, for people
    _batchrun/job.json                the configuration whose results these are
    _batchrun/input-<generation>.json the input's files and splits
    _batchrun/segments/               finished rows in order of completion, until their split is committed
    _batchrun/partials/               unfinished rows of each attempt
    _batchrun/staged/                 parts before they are published
    _batchrun/splits/<split>-<n>.json commit records; <split>-<n>.lost is there once that record's part was lost
    _batchrun/manifests/              the chain of manifests
    _batchrun/leases/                 who is at work
    _batchrun/status-<attempt>.json   how far an attempt is
    _batchrun/removing                there while all of this is being removed, to begin anew
"""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from batchrun.data.rows import InputFile
from batchrun.data.store import Store
from batchrun.errors import JobError

FORMAT = 2  # of everything under _batchrun/

HOME = "_batchrun"
JOB = f"{HOME}/job.json"
REMOVING = f"{HOME}/removing"
SEGMENTS = f"{HOME}/segments"
PARTIALS = f"{HOME}/partials"
STAGED = f"{HOME}/staged"
SPLITS = f"{HOME}/splits"
MANIFESTS = f"{HOME}/manifests"
MANIFEST_COPY = "_manifest.json"

START_AGAIN = "use another output.path, or --overwrite to start again"
PUT_BACK = f"put the right file back, {START_AGAIN}"

EMPTY_PART = -1  # PartEntry.split of the part that an output without any split has


class Record(BaseModel):
    """Base of the records; unknown fields, of later versions, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class JobRecord(Record):
    """What the output belongs to."""

    format: int
    configuration: dict[str, Any]


class SplitEntry(Record):
    """A split (:class:`batchrun.data.rows.Split`) as the input's record names it."""

    file: int  # index into InputRecord.files
    number: int
    first_row: int
    n_rows: int
    offset: int
    error: str | None


class InputRecord(Record):
    """One generation of the input's files and splits."""

    format: int = FORMAT
    attempt: str
    files: list[InputFile]
    splits: list[SplitEntry]


class SplitRecord(Record):
    """The commit record of one split, and what its part holds."""

    split: int
    attempt: str
    part: str  # final name
    staged: str  # where the part lies until it is published
    rows: int
    ok: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    bytes: int
    sha256: str
    typed: bool  # see batchrun.data.parts.PartContent
    columns: dict[str, str]  # of a Parquet part: name -> Arrow type, for people
    schema_ipc: str | None  # of a Parquet part: its Arrow schema, see encoded_schema

    @property
    def schema_arrow(self) -> pa.Schema:
        """The schema that the part was committed with."""
        return decoded_schema(self.schema_ipc or "")


class PartEntry(Record):
    """A part as a manifest names it."""

    name: str
    split: int
    attempt: str  # that of the split's commit record: tells a record made after a loss from the one before
    rows: int
    ok: int
    errors: int
    bytes: int
    sha256: str
    staged: str | None = None  # where this manifest's own version of the part lies until it is published


class Manifest(Record):
    """One generation of the list of parts that make up the result."""

    format: int = FORMAT
    generation: int
    attempt: str
    created: str  # ISO 8601
    complete: bool  # every split of the input is there
    fingerprint: str  # SHA-256 of the configuration
    configuration: dict[str, Any]
    run: dict[str, Any]  # what the run that wrote it said of itself: model revision, versions, device
    columns: dict[str, str]  # of a complete Parquet output: name -> Arrow type
    rows: int
    ok: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    parts: list[PartEntry]


R = TypeVar("R", bound=Record)


def split_file(number: int, n: int = 1) -> str:
    """The name of a split's ``n``-th commit record; only the loss of the part that one names makes way for the next."""
    return f"{SPLITS}/{number:05d}-{n}.json"


def lost_mark(record: str) -> str:
    """The name of the mark that a commit record counts no more: its part was lost."""
    return record.removesuffix(".json") + ".lost"


def manifest_file(generation: int) -> str:
    return f"{MANIFESTS}/{generation:08d}.json"


def encode(data: Any) -> bytes:
    """JSON for a record; equal data gives equal bytes."""
    plain = data.model_dump(mode="json") if isinstance(data, Record) else data
    return json.dumps(plain, indent=1, sort_keys=not isinstance(data, Record)).encode()


def encoded_schema(schema: pa.Schema | None) -> str | None:
    """An Arrow schema as base64 text."""
    return None if schema is None else base64.b64encode(schema.serialize().to_pybytes()).decode()


def decoded_schema(text: str | bytes) -> pa.Schema:
    """The inverse of encoded_schema."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


_ADVICE: dict[type[Record], str] = {
    SplitRecord: "put the right file back, or delete this one, and its rows are run again",
    Manifest: f"put the right file back ({MANIFEST_COPY} is a copy of the newest), {START_AGAIN}",
}


def read_record(store: Store, name: str, kind: type[R]) -> R:
    """A record that must be there. Raises JobError if it is damaged or gone."""
    advice = _ADVICE.get(kind, PUT_BACK)
    data = store.read_if_any(name)
    if data is None:
        raise JobError(f"{store.path(name)} is missing: {advice}")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise JobError(f"{store.path(name)} is damaged ({error.errors()[0]['msg']}): {advice}") from error
