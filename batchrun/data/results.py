"""Results and unfinished rows as Arrow tables: what segments and partials hold between checkpoints and parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchrun.data.json_text import replace_surrogates
from batchrun.data.rows import PartialRow, RowResult, TokenLogprob

_TOP = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])


def _logprobs_type(list_of: Any) -> pa.DataType:
    token = [("token_id", pa.int32()), ("logprob", pa.float32()), ("top", list_of(_TOP))]
    return list_of(pa.struct(token))


LOGPROBS = _logprobs_type(pa.list_)
_STORED_LOGPROBS = _logprobs_type(pa.large_list)  # 64-bit offsets: one split may hold billions of entries

SEGMENT_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("sample_index", pa.int32()),
        ("generated_text", pa.large_string()),
        ("finish_reason", pa.large_string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("error", pa.large_string()),
        ("logprobs", _STORED_LOGPROBS),
        ("prompt_logprobs", _STORED_LOGPROBS),
        ("rerun_max_tokens", pa.int64()),
    ]
)
KEPT_SCHEMA = SEGMENT_SCHEMA.append(pa.field("answer", pa.large_string()))  # that line of OpenAI's format, as it was
PARTIALS_SCHEMA = pa.schema(
    [
        ("split", pa.int64()),
        ("row", pa.int64()),
        ("sample_index", pa.int32()),
        ("token_ids", pa.large_list(pa.int32())),
        ("logprobs", _STORED_LOGPROBS),
        ("prompt_logprobs", _STORED_LOGPROBS),
    ]
)


def results_table(results: Sequence[RowResult]) -> pa.Table:
    """Results of one split, in the given order, as SEGMENT_SCHEMA."""
    columns = [
        [result.row for result in results],
        [result.sample_index for result in results],
        [replace_surrogates(result.text) for result in results],
        [result.finish_reason for result in results],
        [result.prompt_tokens for result in results],
        [result.completion_tokens for result in results],
        [replace_surrogates(result.error) for result in results],
        _logprobs_array([result.logprobs for result in results]),
        _logprobs_array([result.prompt_logprobs for result in results]),
        [result.rerun_max_tokens for result in results],
    ]
    return _table(columns, SEGMENT_SCHEMA)


def partials_table(partials: Sequence[PartialRow]) -> pa.Table:
    """Unfinished rows as PARTIALS_SCHEMA."""
    columns = [
        [partial.split for partial in partials],
        [partial.row for partial in partials],
        [partial.sample_index for partial in partials],
        [partial.token_ids for partial in partials],
        _logprobs_array([partial.logprobs for partial in partials]),
        _logprobs_array([partial.prompt_logprobs for partial in partials]),
    ]
    return _table(columns, PARTIALS_SCHEMA)


def partials_of(table: pa.Table) -> list[PartialRow]:
    """The inverse of partials_table; a logprob of minus infinity comes back as None."""
    return [
        PartialRow(
            split=record["split"],
            row=record["row"],
            token_ids=record["token_ids"],
            logprobs=_token_logprobs(record["logprobs"]),
            prompt_logprobs=_token_logprobs(record["prompt_logprobs"]),
            sample_index=record["sample_index"],
        )
        for record in table.to_pylist()
    ]


def _table(columns: list[Any], schema: pa.Schema) -> pa.Table:
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _logprobs_array(rows: Sequence[list[TokenLogprob] | None]) -> pa.Array:
    """Flat buffers rather than a dictionary per token: a checkpoint may hold millions."""
    tokens = [token for row in rows if row for token in row]
    top = [entry for token in tokens for entry in token.top]
    top_values = pa.StructArray.from_arrays(
        [pa.array([token_id for token_id, _ in top], pa.int32()), _finite([logprob for _, logprob in top])],
        fields=list(_TOP),
    )
    token_values = pa.StructArray.from_arrays(
        [
            pa.array([token.token_id for token in tokens], pa.int32()),
            _finite([token.logprob for token in tokens]),
            pa.LargeListArray.from_arrays(_offsets([len(token.top) for token in tokens]), top_values),
        ],
        fields=list(_STORED_LOGPROBS.value_type),
    )
    absent = pa.array([row is None for row in rows], pa.bool_())
    return pa.LargeListArray.from_arrays(_offsets([len(row or ()) for row in rows]), token_values, mask=absent)


def _finite(values: Sequence[float | None]) -> pa.Array:
    """float32, what is not finite (a logprob of minus infinity) being null."""
    array = np.array([np.nan if value is None else value for value in values], np.float32)
    return pa.array(array, mask=~np.isfinite(array))


def _offsets(lengths: list[int]) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def _token_logprobs(value: list[dict[str, Any]] | None) -> list[TokenLogprob] | None:
    if value is None:
        return None
    return [
        TokenLogprob(token["token_id"], token["logprob"], [(top["token_id"], top["logprob"]) for top in token["top"]])
        for token in value
    ]


class Results:
    """All results of one split, found by row, as KEPT_SCHEMA; ``segments`` may be without its last column.

    Of several results of one row a good one wins over an error, then the first in the order of ``segments``; give
    those in the order of their names, so that everyone chooses alike.
    """

    def __init__(self, segments: Sequence[pa.Table]) -> None:
        table = pa.concat_tables([KEPT_SCHEMA.empty_table(), *segments], promote_options="default").combine_chunks()
        rows = table["row"].to_numpy()
        failed = table["error"].is_valid().to_numpy()
        order = np.lexsort((np.arange(len(rows)), failed, rows))
        first = np.diff(rows[order], prepend=-1) != 0
        self._table = table.take(pa.array(order[first]))
        self._rows = rows[order][first]

    def take(self, rows: Sequence[int]) -> pa.Table:
        """The results of these rows in this order; a row without a result is all null, its ``row`` too."""
        wanted = np.asarray(rows, np.int64)
        places = np.searchsorted(self._rows, wanted)
        found = places < len(self._rows)
        found[found] = self._rows[places[found]] == wanted[found]
        return self._table.take(pa.array(places, mask=~found))

    def has(self, column: str) -> bool:
        """Whether any row has a value there."""
        return bool(self._table[column].null_count < len(self._table))
