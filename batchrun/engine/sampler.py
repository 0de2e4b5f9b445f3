"""Logits to tokens and log-probabilities, row by row: a row's result never depends on the rows beside it.

Sampling is Gumbel-max over counter-based noise. Noise is drawn only for tokens that can still win: no Gumbel value
exceeds :data:`noise.MAX_GUMBEL`, so a token whose logit is further than that below the best score so far is out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchrun.data.rows import TokenLogprob
from batchrun.engine.batch import SampleRow
from batchrun.engine.noise import MAX_GUMBEL, gumbel
from batchrun.engine.request import NO_TOKEN
from batchrun.ops.tiles import tiled
from batchrun.sampling import SamplingParams

_PROBE = 16  # most likely tokens whose noise is drawn first, for a score to beat
_HEAD = 1024  # most likely tokens in which top_p is looked for first


def sample(
    logits: Tensor, rows: Sequence[SampleRow], token_buffer: Tensor, argmax: Callable[[Tensor], Tensor]
) -> Tensor:
    """Choose a token for each row.

    ``logits`` [S, V] float32 is modified in place. ``token_buffer`` [slots, length] int64 holds each request's tokens
    up to its row's position. ``argmax`` is the device's. Returns [S] int64 ids on the logits' device, `NO_TOKEN` where
    logits are not numbers (which is how ``argmax`` tells it).
    """
    _penalize(logits, rows, token_buffer)
    _forbid_stopping(logits, rows)
    best = argmax(logits)
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        sound = best[at] != NO_TOKEN
        best[at] = torch.where(sound, _draw(logits[at], [rows[i] for i in drawn]), best[at])
    return best


def _smallest(line: Tensor, token: Tensor, n_lines: int, above: int) -> Tensor:
    """The smallest token of each line [n_lines]; every line has one, and all are below ``above``."""
    return torch.full((n_lines,), above, device=token.device).scatter_reduce_(0, line, token, "amin")


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


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Sample each row of logits [R, V] under its temperature and filters; returns [R] ids."""
    device = logits.device
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device)
    scaled = logits / temperature[:, None]
    key = torch.tensor([_signed(row.noise_key) for row in rows], dtype=torch.int64, device=device)
    position = torch.tensor([row.position for row in rows], dtype=torch.int64, device=device)

    values, ids = scaled.topk(min(_PROBE, scaled.shape[1]), dim=-1)
    reached = (values + gumbel(key[:, None], position[:, None], ids)).amax(dim=-1)
    floor = reached - MAX_GUMBEL
    filtered = [index for index, row in enumerate(rows) if _filters(row.params)]
    if filtered:
        # What the probe reached may be filtered out, so the filter alone decides.
        at = torch.tensor(filtered, device=device)
        floor[at] = _cutoffs(scaled[at], [rows[index].params for index in filtered])
    line, token = (scaled >= floor[:, None]).nonzero(as_tuple=True)
    score = scaled[line, token] + gumbel(key[line], position[line], token)
    best = torch.full_like(floor, -math.inf).scatter_reduce_(0, line, score, "amax")
    wins = score == best[line]
    return _smallest(line[wins], token[wins], len(rows), scaled.shape[1])


def _filters(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _cutoffs(scaled: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit [R] of each row [R, V] that ``min_p``, ``top_k`` and ``top_p`` keep, in this order."""
    size = scaled.shape[1]
    largest = scaled.amax(dim=-1)
    ratios = [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows]
    cut = largest + torch.tensor(ratios, dtype=scaled.dtype, device=scaled.device)
    counts = [min(row.top_k, size) if row.top_k > 0 else size for row in rows]
    if any(count < size for count in counts):
        most = max(count for count in counts if count < size)
        wanted = torch.tensor([min(count, most) - 1 for count in counts], device=scaled.device)
        least = scaled.topk(most, dim=-1).values.gather(1, wanted[:, None])[:, 0]
        limited = torch.tensor([count < size for count in counts], device=scaled.device)
        cut = torch.where(limited, torch.maximum(cut, least), cut)
    by_mass = [index for index, row in enumerate(rows) if row.top_p < 1]
    if by_mass:
        at = torch.tensor(by_mass, device=scaled.device)
        mass = torch.tensor([rows[index].top_p for index in by_mass], dtype=scaled.dtype, device=scaled.device)
        left = scaled[at].masked_fill(scaled[at] < cut[at, None], -math.inf)
        cut[at] = torch.maximum(cut[at], _mass_cutoffs(left, largest[at], mass))
    return cut


def _mass_cutoffs(logits: Tensor, largest: Tensor, mass: Tensor) -> Tensor:
    """The smallest logit of each row [R, V] in its smallest set of largest ones that holds ``mass`` [R]; [R].

    Tokens are looked for among the `_HEAD` most likely, and where these hold too little among all.
    """
    total = largest - torch.log_softmax(logits, dim=-1).amax(dim=-1)
    size = logits.shape[1]
    cut = torch.full_like(largest, -math.inf)
    open_rows = torch.arange(len(logits), device=logits.device)
    for count in (min(_HEAD, size), size):
        head = logits[open_rows].topk(count, dim=-1).values
        shares = tiled(torch.exp, head - total[open_rows, None])
        kept = (shares.cumsum(-1) - shares < mass[open_rows, None]).sum(-1)  # those preceded by less than the mass
        cut[open_rows] = head.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
        open_rows = open_rows[kept == count]
        if count == size or len(open_rows) == 0:
            break
    return cut


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
