"""The small JSON records under ``_batchrun/``: what is committed, and what the result consists of.

What lies in ``output.path``::

    part-00000.parquet ...            the results, one part per split
    errors-00000.jsonl ...            the failed rows of a split, where the format keeps them apart
    _manifest.json                    copy of the newest manifest, for people
    _batchrun/job.json                the configuration whose results these are
    _batchrun/input-<generation>.json the input's files and splits
    _batchrun/workers/                who is at work, and how far: see batchrun.data.workers
    _batchrun/leases/                 who may work on which split: see batchrun.data.lease
    _batchrun/shares/                 rows of a split that its holder left to others: see batchrun.data.work
    _batchrun/asks/                   workers that have nothing to do
    _batchrun/segments/               finished rows in order of completion, until their split is committed
    _batchrun/partials/               unfinished rows of each attempt
    _batchrun/staged/                 parts before they are published
    _batchrun/splits/<split>-<n>.json commit records; <split>-<n>.lost is there once that record counts no more
    _batchrun/manifests/              the chain of manifests
    _batchrun/reruns/                 which committed splits were opened again, to run some of their rows again
    _batchrun/kept/<split>-<n>.parquet the results of the others of its rows
    _batchrun/stop                    whose content changes to tell all workers to stop
    _batchrun/slurm/                  scripts and records of Slurm arrays
    _batchrun/logs/                   logs of their tasks, unless `slurm.logs` says otherwise
    _batchrun/removing                there while all of this is being removed, to begin anew
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from batchrun.data.rows import InputFile
from batchrun.data.store import Store
from batchrun.errors import JobError

FORMAT = 3  # of everything under _batchrun/

HOME = "_batchrun"
JOB = f"{HOME}/job.json"
REMOVING = f"{HOME}/removing"
SEGMENTS = f"{HOME}/segments"
PARTIALS = f"{HOME}/partials"
STAGED = f"{HOME}/staged"
SPLITS = f"{HOME}/splits"
MANIFESTS = f"{HOME}/manifests"
SHARES = f"{HOME}/shares"
ASKS = f"{HOME}/asks"
RERUNS = f"{HOME}/reruns"
KEPT = f"{HOME}/kept"
STOP = f"{HOME}/stop"
SLURM = f"{HOME}/slurm"
LOGS = f"{HOME}/logs"
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
    id: str = ""  # tells this output from those that others have begun anew in its place
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
    whole: list[int]  # indices of the files all of whose rows are in the splits
    next_split: int  # above the numbers of all splits that there ever were


class ShareRecord(Record):
    """Rows of a split that the holder of it, or of an earlier share of it, left to others."""

    attempt: str
    ranges: list[tuple[int, int]]  # first row and the one after the last


class RerunRecord(Record):
    """Which committed splits are opened again. The rows whose results are not in KEPT are run again."""

    attempt: str
    kinds: list[str]
    max_tokens: int | None  # in place of the job's, for these rows
    commits: dict[int, str]  # split -> name of the commit record that is to count no more


class StoredFile(Record):
    """A published file, and where it lies until it is published."""

    name: str
    bytes: int
    sha256: str
    staged: str | None = None


class SplitRecord(Record):
    """The commit record of one split, and what its part holds."""

    split: int
    attempt: str
    commit: str  # tells this record from all others, those too that one attempt makes of one split
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
    errors_file: StoredFile | None = None  # where failed rows have a file of their own: that file

    @property
    def files(self) -> list[StoredFile]:
        """Everything that is published with this record."""
        return _files(self.part, self)

    @property
    def schema_arrow(self) -> pa.Schema:
        """The schema that the part was committed with."""
        return decoded_schema(self.schema_ipc or "")


class PartEntry(Record):
    """A part as a manifest names it."""

    name: str
    split: int
    commit: str  # that of the split's commit record: tells a record made after a loss or a rerun from the one before
    rows: int
    ok: int
    errors: int
    bytes: int
    sha256: str
    staged: str | None = None  # where this manifest's own version of the part lies until it is published
    errors_file: StoredFile | None = None  # beside the part
    schema_ipc: str | None = None  # of a part that was written anew: the Arrow schema that it has since

    @property
    def files(self) -> list[StoredFile]:
        """The part, and what is beside it."""
        return _files(self.name, self)


def _files(name: str, record: SplitRecord | PartEntry) -> list[StoredFile]:
    part = StoredFile(name=name, bytes=record.bytes, sha256=record.sha256, staged=record.staged)
    return [part] if record.errors_file is None else [part, record.errors_file]


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


def unit_name(split: int, share: int = 0) -> str:
    """The name of what is leased: a split, or a share of it, from 1 on."""
    return f"{split:05d}.{share:03d}" if share else f"{split:05d}"


def unit_of(name: str) -> tuple[int, int] | None:
    """(split, share) of a unit's name; None if it is none."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?", name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def share_file(split: int, share: int) -> str:
    return f"{SHARES}/{unit_name(split, share)}.json"


def share_of(file: str) -> tuple[int, int] | None:
    """(split, share) of a share's record; None if it is none."""
    return unit_of(file.removeprefix(f"{SHARES}/").removesuffix(".json"))


def lost_mark(record: str) -> str:
    """The name of the mark that a commit record counts no more: its part was lost, or rows of it are run again."""
    return record.removesuffix(".json") + ".lost"


def kept_file(record: str) -> str:
    """Where the results lie that are kept when the split of that commit record is opened again."""
    return f"{KEPT}/{record.removeprefix(f'{SPLITS}/').removesuffix('.json')}.parquet"


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
    record = read_record_if_any(store, name, kind)
    if record is None:
        raise JobError(f"{store.path(name)} is missing: {_ADVICE.get(kind, PUT_BACK)}")
    return record


def read_record_if_any(store: Store, name: str, kind: type[R]) -> R | None:
    """A record, or None if it is gone. Raises JobError if it is damaged."""
    return next(iter(read_records(store, [name], kind).values()), None)


def read_records(store: Store, names: Iterable[str], kind: type[R]) -> dict[str, R]:
    """Name -> record, of those that are not gone. Raises JobError if one is damaged."""
    every = list(names)
    found = zip(every, store.read_each(every), strict=True)
    return {name: _parsed(store, name, data, kind) for name, data in found if data is not None}


def _parsed(store: Store, name: str, data: bytes, kind: type[R]) -> R:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        reason, advice = error.errors()[0]["msg"], _ADVICE.get(kind, PUT_BACK)
        raise JobError(f"{store.path(name)} is damaged ({reason}): {advice}") from error
