"""Logits to tokens and log-probabilities, row by row: a row's result never depends on the rows beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from batchrun.data.rows import TokenLogprob
from batchrun.engine.batch import SampleRow


def sample(logits: Tensor, rows: Sequence[SampleRow], token_buffer: Tensor, ops: ModuleType) -> Tensor:
    """Choose a token for each row.

    ``logits`` [S, V] float32 is modified in place. ``token_buffer`` [slots, length] int64 holds each request's tokens
    up to its row's position. ``ops`` is a module of `batchrun.ops`. Returns [S] int64 ids on the logits' device,
    `NO_TOKEN` where logits are not numbers (which is how ``ops.argmax`` and ``ops.draw`` tell it).
    """
    _penalize(logits, rows, token_buffer)
    _forbid_stopping(logits, rows)
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if len(drawn) == len(rows):
        return _draw(logits, rows, ops)
    chosen: Tensor = ops.argmax(logits)
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        chosen[at] = _draw(logits[at], [rows[index] for index in drawn], ops)
    return chosen


def _penalize(logits: Tensor, rows: Sequence[SampleRow], token_buffer: Tensor) -> None:
    """Apply the penalties to the logits [S, V] of rows that have some, in place."""
    lines = [index for index, row in enumerate(rows) if row.params.has_penalties]
    if not lines:
        return
    device, size = logits.device, logits.shape[1]
    params = [row.params for row in rows]
    repetition = torch.tensor([each.repetition_penalty for each in params], device=device)
    presence = torch.tensor([each.presence_penalty for each in params], device=device)
    frequency = torch.tensor([each.frequency_penalty for each in params], device=device)

    known = [token_buffer[rows[index].slot, : rows[index].position] + index * size for index in lines]
    seen = torch.cat(known).unique()
    line, token = seen // size, seen % size
    values, penalty = logits[line, token], repetition[line]
    logits[line, token] = torch.where(values > 0, values / penalty, values * penalty)

    output = [tokens[rows[index].n_prompt :] for index, tokens in zip(lines, known, strict=True)]
    generated, counts = torch.cat(output).unique(return_counts=True)
    line, token = generated // size, generated % size
    logits[line, token] -= frequency[line] * counts + presence[line]


def _forbid_stopping(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Rule out, in place, the stop ids of rows that have fewer than ``min_tokens``."""
    young = [index for index, row in enumerate(rows) if row.position - row.n_prompt < row.params.min_tokens]
    pairs = [(index, token) for index in young for token in rows[index].stop_ids]
    if pairs:
        line, token = torch.tensor(pairs, device=logits.device).T
        logits[line, token] = -math.inf


def _draw(logits: Tensor, rows: Sequence[SampleRow], ops: ModuleType) -> Tensor:
    """Draw a token for each row of logits [R, V] under its parameters; returns [R] ids."""
    device = logits.device
    params = [row.params for row in rows]

    def floats(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=device)

    def integers(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    drawn: Tensor = ops.draw(
        logits,
        temperature=floats(each.temperature for each in params),
        min_p=floats(each.min_p for each in params),
        top_k=integers(max(0, each.top_k) for each in params),
        top_p=floats(each.top_p for each in params),
        key=integers(_signed(row.noise_key) for row in rows),
        position=integers(row.position for row in rows),
    )
    return drawn


def _signed(key: int) -> int:
    """The same 64 bits as a signed integer."""
    return key - (1 << 64) if key >= 1 << 63 else key


def logprobs(logits: Tensor, targets: Tensor, top: Sequence[int | None]) -> list[TokenLogprob | None]:
    """Log-probabilities of ``targets`` [N] under raw ``logits`` [N, V] float32, for rows whose ``top`` is not None.

    ``top`` says how many of the most likely tokens to list beside the target.
    """
    wanted = [index for index, count in enumerate(top) if count is not None]
    out: list[TokenLogprob | None] = [None] * len(top)
    if not wanted:
        return out
    index = torch.tensor(wanted, device=logits.device)
    table = torch.log_softmax(logits[index], dim=-1)
    of_target = table.gather(1, targets[index][:, None])[:, 0].tolist()
    target_ids = targets[index].tolist()
    for line, row in enumerate(wanted):
        out[row] = TokenLogprob(target_ids[line], _finite(of_target[line]), _most_likely(table[line], top[row] or 0))
    return out


def _most_likely(row: Tensor, count: int) -> list[tuple[int, float | None]]:
    """The ``count`` largest log-probabilities of a row [V] and their ids, of equals the smaller id first."""
    if count == 0:
        return []
    least = row.topk(min(count, len(row))).values[-1]
    ids = (row >= least).nonzero()[:, 0]
    values, order = row[ids].sort(descending=True, stable=True)
    return [(i, _finite(v)) for i, v in zip(ids[order][:count].tolist(), values[:count].tolist(), strict=True)]


def _finite(value: float) -> float | None:
    return None if value == -math.inf else value
