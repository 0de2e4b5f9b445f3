"""One step as flat arrays, built on the host from the scheduler's rows; token ids stay on the device.

All that the device reads is a CPU tensor in here, and `Transfer` moves them all at once. Nothing in a step is decided
by what the device holds, so that nobody waits for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun.engine.request import Request, Step, StepRow
from batchrun.models.decoder import Decoder
from batchrun.ops.attention_batch import AttentionBatch, LastTokens
from batchrun.sampling import SamplingParams


class SampleRow(NamedTuple):
    """A row of logits that becomes a token."""

    slot: int  # row of the token buffer
    position: int  # where the sampled token goes: the number of tokens before it
    n_prompt: int
    params: SamplingParams
    noise_key: int
    stop_ids: frozenset[int]
    mask: NDArray[np.int32] | None = None  # of the tokens that may come, as a `TokenMask` has it


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows of logits that are drawn from, and how: see `ops.draw`. All [R]."""

    lines: Tensor | None  # int64; None: all rows
    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    key: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows of logits with penalties [Q], and how many tokens are known of all of them."""

    lines: Tensor  # int64
    slots: Tensor  # int64, rows of the token buffer
    known: Tensor  # int64, tokens in there
    n_prompt: Tensor  # int64
    repetition: Tensor  # float32, as the next two
    presence: Tensor
    frequency: Tensor
    total: int


@dataclass(frozen=True, slots=True)
class Masks:
    """Rows of logits of which not every token may come, and which may: as a `TokenMask` has it."""

    lines: Tensor  # int64 [R]
    words: Tensor  # int32 [R, ceil(V / 32)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How rows of logits [S] become tokens."""

    rows: Tensor  # int64 [S], of the token buffer
    positions: Tensor  # int64 [S], where the tokens go
    draws: Draws | None  # None: all rows take their largest logit
    penalties: Penalties | None
    masks: Masks | None
    forbidden: Tensor | None  # int64 [2, F]: rows of logits and tokens that may not come yet
    reported: Tensor | None  # int64 [N]: rows whose log-probabilities are wanted
    tops: list[int]  # of each of them: how many most likely tokens beside the one that came


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A run of prompt tokens whose log-probabilities are wanted."""

    first: int  # index into the step's tokens
    targets: Tensor  # int64, the token after each of them
    top: int  # how many most likely tokens beside it


@dataclass(frozen=True, slots=True)
class Uploads:
    """Tokens of requests that are new on the device, and where they go in the token buffer: int64 [U] each."""

    rows: Tensor
    positions: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """Where a step's drafts are in the token buffer: int64 [D] each."""

    rows: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step on its way to the device."""

    uploads: Uploads | None
    token_rows: Tensor  # [T] int64: row of the token buffer
    positions: Tensor  # [T] int64
    groups: list[AttentionBatch]
    wanted: LastTokens | None  # tokens whose hidden states are needed after the last layer; None: all
    sampled: Tensor | None  # int64 [S]: of the hidden states that come out, those sampled from; None: all
    sampling: Sampling | None
    drafted: Drafted | None
    scored: list[ScoredRow | None]  # one per row of the step


class Groups(NamedTuple):
    """The KV groups of a model: their windows, which one its last layer has, and its backend's ``attention_plan``."""

    windows: Sequence[int | None]
    last: int
    plan: Callable[..., Any]
    tables: Sequence[int]  # of a request's block tables, that of each group

    @classmethod
    def of(cls, model: Decoder, tables: Sequence[int] | None = None) -> Groups:
        """Those of a model; ``tables``: where its groups are not those that requests hold blocks for."""
        own = range(len(model.windows))
        return cls(model.windows, model.layers[-1].group, model.plan_attention, own if tables is None else tables)


def build_batch(step: Step, block_size: int, groups: Groups) -> Batch:
    """Lay out a step. Cost is linear in tokens and in the blocks of its rows."""
    rows = step.rows
    starts = np.array([row.start for row in rows])
    counts = np.array([row.n for row in rows])
    ends = counts.cumsum()
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(ends[-1])) - (ends - counts - starts)[row_of_token]
    n_sampled = np.array([row.n_sampled for row in rows])
    scored = [_scored_row(row, first) for row, first in zip(rows, (ends - counts).tolist(), strict=True)]
    needs_all = any(scored) or n_sampled.sum() == ends[-1]
    kv_len = (starts + counts).astype(np.int32)
    attending = []
    for held, window in zip(groups.tables, groups.windows, strict=True):
        cu_q, table = _from_zero(ends), _block_table([row.request.blocks[held] for row in rows])
        slots = table[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
        plan = groups.plan(cu_q, kv_len, table, block_size=block_size, window=window)
        on_host = [torch.from_numpy(each) for each in (cu_q, kv_len, table, slots)]
        attending.append(AttentionBatch(on_host[0], on_host[1], on_host[2], on_host[3], plan))

    def last_alone() -> AttentionBatch:
        """What the last layer attends to if the tokens that are sampled from are its only queries."""
        batch, cu_q = attending[groups.last], _from_zero(n_sampled.cumsum())
        shape = {"block_size": block_size, "window": groups.windows[groups.last]}
        plan = groups.plan(cu_q, kv_len, batch.block_table.numpy(), **shape)
        return replace(batch, cu_q=torch.from_numpy(cu_q), plan=plan)

    # A row is sampled from at its last tokens.
    last = torch.from_numpy(np.arange(n_sampled.sum()) + np.repeat(ends - n_sampled.cumsum(), n_sampled))
    sampled_rows = [sample for row in rows if row.samples for sample in _sample_rows(row)]
    drafted = [row for row in rows if row.n_drafts]
    return Batch(
        uploads=_uploads(step.admitted, drafted),
        token_rows=torch.from_numpy(np.array([row.request.slot for row in rows])[row_of_token]),
        positions=torch.from_numpy(positions),
        groups=attending,
        wanted=None if needs_all else LastTokens(last, last_alone()),
        sampled=last if needs_all and len(last) < ends[-1] else None,
        sampling=sampling(sampled_rows) if sampled_rows else None,
        drafted=_drafted(drafted) if drafted else None,
        scored=scored,
    )


def sampling(rows: Sequence[SampleRow]) -> Sampling:
    """How rows of logits, in this order, become tokens."""
    reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    young = [index for index, row in enumerate(rows) if row.position - row.n_prompt < row.params.min_tokens]
    forbidden = [(index, token) for index in young for token in rows[index].stop_ids]
    return Sampling(
        rows=_integers(row.slot for row in rows),
        positions=_integers(row.position for row in rows),
        draws=_draws(rows),
        penalties=_penalties(rows),
        masks=_masks(rows),
        forbidden=torch.tensor(forbidden).T.contiguous() if forbidden else None,
        reported=_integers(reported) if reported else None,
        tops=[rows[index].params.logprobs or 0 for index in reported],
    )


def _draws(rows: Sequence[SampleRow]) -> Draws | None:
    lines = [index for index, row in enumerate(rows) if not row.params.greedy]
    if not lines:
        return None
    drawn = [rows[index] for index in lines]
    return Draws(
        lines=None if len(lines) == len(rows) else _integers(lines),
        temperature=_floats(row.params.temperature for row in drawn),
        min_p=_floats(row.params.min_p for row in drawn),
        top_k=_integers(max(0, row.params.top_k) for row in drawn),
        top_p=_floats(row.params.top_p for row in drawn),
        key=_integers(_signed(row.noise_key) for row in drawn),
        position=_integers(row.position for row in drawn),
    )


def _penalties(rows: Sequence[SampleRow]) -> Penalties | None:
    lines = [index for index, row in enumerate(rows) if row.params.has_penalties and row.position]
    if not lines:
        return None
    penalized = [rows[index] for index in lines]
    return Penalties(
        lines=_integers(lines),
        slots=_integers(row.slot for row in penalized),
        known=_integers(row.position for row in penalized),
        n_prompt=_integers(row.n_prompt for row in penalized),
        repetition=_floats(row.params.repetition_penalty for row in penalized),
        presence=_floats(row.params.presence_penalty for row in penalized),
        frequency=_floats(row.params.frequency_penalty for row in penalized),
        total=sum(row.position for row in penalized),
    )


def _masks(rows: Sequence[SampleRow]) -> Masks | None:
    lines = [index for index, row in enumerate(rows) if row.mask is not None]
    if not lines:
        return None
    words = np.stack([row.mask for row in rows if row.mask is not None])
    return Masks(_integers(lines), torch.from_numpy(words))


def _uploads(admitted: Sequence[Request], drafted: Sequence[StepRow]) -> Uploads | None:
    """All tokens of requests that are new on the device, and drafts of the host."""
    runs: list[tuple[int, int, Sequence[int]]] = [(request.slot, 0, request.tokens) for request in admitted]
    runs += [(row.request.slot, row.n_known, row.drafts) for row in drafted if row.drafts]
    if not runs:
        return None
    slots, starts, tokens = zip(*runs, strict=True)
    lengths = np.array([*map(len, tokens)])
    return Uploads(
        rows=torch.from_numpy(np.repeat(np.array(slots), lengths)),
        positions=_runs(np.array(starts), lengths),
        tokens=torch.from_numpy(np.concatenate([np.asarray(each, np.int64) for each in tokens])),
    )


def _drafted(rows: Sequence[StepRow]) -> Drafted:
    lengths = np.array([row.n_drafts for row in rows])
    slots = np.repeat(np.array([row.request.slot for row in rows]), lengths)
    return Drafted(torch.from_numpy(slots), _runs(np.array([row.n_known for row in rows]), lengths))


def _runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
    """``lengths[i]`` whole numbers from ``starts[i]`` on, of one i after those of another: int64."""
    ends = lengths.cumsum()
    return torch.from_numpy(np.arange(int(ends[-1])) - np.repeat(ends - lengths - starts, lengths))


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _floats(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


def _signed(key: int) -> int:
    """The same 64 bits as a signed integer."""
    return key - (1 << 64) if key >= 1 << 63 else key


def _from_zero(sums: np.ndarray) -> np.ndarray:
    """Running sums [B] with the empty one before them: int32 [B + 1]."""
    return np.concatenate(([0], sums)).astype(np.int32)


def _block_table(held: Sequence[array[int]]) -> np.ndarray:
    """Rows of block ids [B, P] int32, filled up with zeros."""
    lengths = np.array([len(blocks) for blocks in held])
    width = int(lengths.max())
    table = np.zeros((len(held), width), np.int32)
    table[np.arange(width) < lengths[:, None]] = np.frombuffer(b"".join(held), np.int32)
    return table


def _sample_rows(row: StepRow) -> Iterator[SampleRow]:
    """The places of a row that tokens are sampled for: after its newest known token, and after each draft."""
    request, known = row.request, row.n_known
    of_request = request.n_prompt, request.params, request.noise_key, request.stop_ids
    for position in range(known, row.end + 1):
        mask = request.mask and request.mask([*request.output_ids, *row.drafts[: position - known]])
        yield SampleRow(request.slot, position, *of_request, mask)


def _scored_row(row: StepRow, first: int) -> ScoredRow | None:
    request = row.request
    if request.params.prompt_logprobs is None:
        return None
    targets = request.tokens[row.start + 1 : min(row.start + row.n + 1, request.n_prompt)]
    if not targets:
        return None
    return ScoredRow(first, torch.tensor(targets), request.params.prompt_logprobs)
