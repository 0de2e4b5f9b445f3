"""The records that pass between reading, prompting, running and writing. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchrun.sampling import SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file, or one Hugging Face dataset split, as it was when the run began."""

    key: str  # path relative to the input's root: part of every row's identity, the same on disk and on S3
    path: str  # what to open
    size: int
    version: str  # etag, or mtime in nanoseconds


@dataclass(frozen=True, slots=True)
class Split:
    """A run of at most ``input.split_rows`` consecutive rows of one file: the unit of work and of commit."""

    file: InputFile
    number: int  # position among all splits of the input: names the part file
    first_row: int  # row number of its first row
    n_rows: int  # rows it spans, blank lines and rows that `where` drops included
    offset: int = 0  # plain JSONL: byte offset of the first row. Parquet: first row group
    error: str | None = None  # the file cannot be read past the end of this split: why


@dataclass(frozen=True, slots=True)
class Row:
    """One input row. ``row`` is its identity within the file: physical line (from 1) or Parquet row (from 1)."""

    row: int
    data: dict[str, Any] | None  # None: the row could not be read
    error: str | None = None


@dataclass(slots=True)
class Batch:
    """Some consecutive input rows in columnar form, where the format has one.

    Exactly one of ``table`` (Parquet, datasets: original types, one table row for each of ``rows``) and ``records``
    (JSONL; None where the row could not be read) is set. ``errors`` has an entry for each of ``rows`` too.
    """

    rows: list[int]
    errors: list[str | None]
    table: pa.Table | None = None
    records: list[dict[str, Any] | None] | None = None


@dataclass(slots=True)
class PreparedRow:
    """A row ready for the engine: token ids and parameters, or the error that it ends as."""

    row: int
    token_ids: MutableSequence[int] = field(default_factory=list)
    params: SamplingParams | None = None
    own_seed: bool = False  # params.seed was given by the row itself
    error: str | None = None


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability (natural, of the raw distribution) of one token, and of the most likely ones beside it."""

    token_id: int
    logprob: float | None  # None: minus infinity, or the first prompt token
    top: list[tuple[int, float | None]] = field(default_factory=list)  # (token id, logprob), best first


@dataclass(slots=True)
class RowResult:
    """What a row ended as. Exactly one of ``text`` and ``error`` is set."""

    split: int
    row: int
    text: str | None = None
    finish_reason: str | None = None  # "stop" | "length"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    sample_index: int = 0
    rerun_max_tokens: int | None = None  # sampling.max_tokens, where a rerun has changed it for this row


@dataclass(slots=True)
class PartialRow:
    """Tokens that an unfinished row had generated at a checkpoint; resume prefills them instead of decoding again."""

    split: int
    row: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    sample_index: int = 0
