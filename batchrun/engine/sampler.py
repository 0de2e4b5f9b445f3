"""Logits to tokens and log-probabilities, row by row: a row's result never depends on the rows beside it.

Nothing here waits for the device: shapes are known on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from batchrun.data.rows import TokenLogprob
from batchrun.engine.batch import Draws, Masks, Penalties, Sampling


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of ``targets`` [N], float32, and of the most likely tokens [N, C] in their order."""

    targets: Tensor
    of_target: Tensor
    ids: Tensor
    values: Tensor


def sample(logits: Tensor, sampling: Sampling, token_buffer: Tensor, ops: ModuleType) -> Tensor:
    """Choose a token for each row.

    ``logits`` [S, V] float32 is modified in place. ``token_buffer`` [slots, length] int64 holds each request's tokens
    up to its row's position. ``ops`` is a module of `batchrun.ops`. Returns [S] int64 ids on the logits' device,
    `NO_TOKEN` where logits are not numbers (which is how ``ops.argmax`` and ``ops.draw`` tell it).
    """
    if sampling.penalties is not None:
        _penalize(logits, sampling.penalties, token_buffer)
    if sampling.masks is not None:
        _mask(logits, sampling.masks)
    if sampling.forbidden is not None:
        lines, tokens = sampling.forbidden
        logits[lines, tokens] = logits.new_full((), -math.inf)  # a number of Python's would be waited for
    draws = sampling.draws
    if draws is not None and draws.lines is None:
        return _draw(logits, draws, ops)
    chosen: Tensor = ops.argmax(logits)
    if draws is not None:
        chosen[draws.lines] = _draw(logits[draws.lines], draws, ops)
    return chosen


def _penalize(logits: Tensor, rows: Penalties, token_buffer: Tensor) -> None:
    """Apply the penalties to the logits [S, V] of ``rows``, in place."""
    size, device = logits.shape[1], logits.device
    # Of each known token, one row's after another's: its row, and its place there.
    row = torch.arange(len(rows.lines), device=device).repeat_interleave(rows.known, output_size=rows.total)
    places = torch.arange(rows.total, device=device) - (rows.known.cumsum(0) - rows.known)[row]
    lines, tokens = rows.lines[row], token_buffer[rows.slots[row], places]
    # A token that comes twice is written twice, with the same value.
    values, penalty = logits[lines, tokens], rows.repetition[row]
    values = torch.where(values > 0, values / penalty, values * penalty)

    of_row = row * (size + 1)
    generated = (of_row + tokens.masked_fill(places < rows.n_prompt[row], size)).sort().values
    keys = of_row + tokens
    counts = torch.searchsorted(generated, keys, right=True) - torch.searchsorted(generated, keys)
    logits[lines, tokens] = values - (rows.frequency[row] * counts + rows.presence[row] * (counts > 0))


def _mask(logits: Tensor, masks: Masks) -> None:
    """Leave the logits [S, V] of tokens that may come alone, and make the others minus infinity, in place."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks.words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0
    logits[masks.lines] = logits[masks.lines].masked_fill(~allowed, -math.inf)


def _draw(logits: Tensor, draws: Draws, ops: ModuleType) -> Tensor:
    """Draw a token for each row of logits [R, V] under its parameters; returns [R] ids."""
    drawn: Tensor = ops.draw(
        logits,
        temperature=draws.temperature,
        min_p=draws.min_p,
        top_k=draws.top_k,
        top_p=draws.top_p,
        key=draws.key,
        position=draws.position,
    )
    return drawn


def logprobs(logits: Tensor, targets: Tensor, top: int, ops: ModuleType) -> Logprobs:
    """Log-probabilities of ``targets`` [N] int64 and of the ``top`` most likely under raw ``logits`` [N, V] float32."""
    return Logprobs(targets, *ops.token_logprobs(logits, targets, min(top, logits.shape[1])))


def token_logprobs(found: Logprobs, tops: Sequence[int]) -> list[TokenLogprob]:
    """What was found, on the host: a list of ``tops[i]`` most likely tokens beside target ``i``."""
    ids, values = found.ids.tolist(), found.values.tolist()
    return [
        TokenLogprob(target, _finite(logprob), [(i, _finite(v)) for i, v in zip(ids[n][:top], values[n], strict=False)])
        for n, (target, logprob, top) in enumerate(
            zip(found.targets.tolist(), found.of_target.tolist(), tops, strict=True)
        )
    ]


def _finite(value: float) -> float | None:
    return None if value == -math.inf else value
