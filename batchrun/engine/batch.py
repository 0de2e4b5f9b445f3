"""The flat arrays of one step, built on the host from the scheduler's rows; token ids stay on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.request import Request, Step, StepRow
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


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A run of prompt tokens whose log-probabilities are wanted."""

    first: int  # index into the step's tokens
    count: int
    targets: list[int]  # the token after each of them
    top: int  # how many most likely tokens beside it


@dataclass(frozen=True, slots=True)
class Batch:
    """One step on its way to the device."""

    uploads: list[tuple[int, np.ndarray]]  # (slot, token ids): requests that are new on the device
    token_rows: Tensor  # [T] int64: row of the token buffer
    positions: Tensor  # [T] int64
    groups: list[AttentionBatch]
    sampled: LastTokens  # whose logits are sampled from, S of them
    samples: list[SampleRow]  # S
    scored: list[ScoredRow | None]  # one per row of the step


def build_batch(step: Step, block_size: int, n_groups: int) -> Batch:
    """Lay out a step. Cost is linear in tokens and in the blocks of its rows; nothing here touches the device."""
    rows = step.rows
    starts = np.array([row.start for row in rows])
    counts = np.array([row.n for row in rows])
    ends = counts.cumsum()
    firsts = ends - counts
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(ends[-1])) - (firsts - starts)[row_of_token]
    buffer_rows = np.array([row.request.slot for row in rows])
    samples = np.array([row.samples for row in rows])
    cu_q = _from_zero(ends)
    kv_len = torch.from_numpy((starts + counts).astype(np.int32))
    groups = []
    for group in range(n_groups):
        table = _block_table([row.request.blocks[group] for row in rows])
        slots = table[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
        groups.append(AttentionBatch(cu_q, kv_len, torch.from_numpy(table), torch.from_numpy(slots)))
    return Batch(
        uploads=[(request.slot, np.asarray(request.tokens, np.int64)) for request in step.admitted],
        token_rows=torch.from_numpy(buffer_rows[row_of_token]),
        positions=torch.from_numpy(positions),
        groups=groups,
        sampled=LastTokens(torch.from_numpy(ends[samples] - 1), _from_zero(samples.cumsum())),
        samples=[_sample_row(row.request, row.start + row.n) for row in rows if row.samples],
        scored=[_scored_row(row, first) for row, first in zip(rows, firsts.tolist(), strict=True)],
    )


def _from_zero(sums: np.ndarray) -> Tensor:
    """Running sums [B] with the empty one before them: int32 [B + 1]."""
    return torch.from_numpy(np.concatenate(([0], sums)).astype(np.int32))


def _block_table(held: Sequence[array[int]]) -> np.ndarray:
    """Rows of block ids [B, P] int32, filled up with zeros."""
    lengths = np.array([len(blocks) for blocks in held])
    width = int(lengths.max())
    table = np.zeros((len(held), width), np.int32)
    table[np.arange(width) < lengths[:, None]] = np.frombuffer(b"".join(held), np.int32)
    return table


def _sample_row(request: Request, position: int) -> SampleRow:
    return SampleRow(request.slot, position, request.n_prompt, request.params, request.noise_key, request.stop_ids)


def _scored_row(row: StepRow, first: int) -> ScoredRow | None:
    request = row.request
    if request.params.prompt_logprobs is None:
        return None
    targets = request.tokens[row.start + 1 : min(row.start + row.n + 1, request.n_prompt)]
    if not targets:
        return None
    return ScoredRow(first, len(targets), targets, request.params.prompt_logprobs)
