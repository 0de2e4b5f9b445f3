"""Tokens drawn from rows of logits in plain torch: the reference of `draw` on any device, each row's draw its own.

Sampling is Gumbel-max over counter-based noise. Noise is drawn only for tokens that can still win: no Gumbel value
exceeds :data:`noise.MAX_GUMBEL`, so a token whose logit is further than that below the best score so far is out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchrun.ops.noise import MAX_GUMBEL, gumbel
from batchrun.ops.tiles import tiled

_PROBE = 16  # most likely tokens whose noise is drawn first, for a score to beat
_HEAD = 1024  # most likely tokens in which top_p is looked for first


def draw(
    logits: Tensor,
    *,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    key: Tensor,
    position: Tensor,
) -> Tensor:
    """Draw a token for each row of ``logits`` [R, V] float32; returns [R] int64 ids, -1 where a row has NaN.

    ``temperature``, ``min_p`` (0: off) and ``top_p`` (1: off) are float32 [R]; ``top_k`` (0: off), ``key`` (the row's
    randomness, all 64 bits) and ``position`` (of the token, from the text's beginning) int64 [R]. Filters apply in the
    order ``min_p``, ``top_k``, ``top_p``.
    """
    scaled = logits / temperature[:, None]
    values, ids = scaled.topk(min(_PROBE, scaled.shape[1]), dim=-1)
    reached = (values + gumbel(key[:, None], position[:, None], ids)).amax(dim=-1)
    floor = reached - MAX_GUMBEL
    filtered = ((min_p > 0) | (top_k > 0) | (top_p < 1)).nonzero()[:, 0]
    if len(filtered):
        # What the probe reached may be filtered out, so the filter alone decides.
        floor[filtered] = _cutoffs(scaled[filtered], min_p[filtered], top_k[filtered], top_p[filtered])
    line, token = (scaled >= floor[:, None]).nonzero(as_tuple=True)
    score = scaled[line, token] + gumbel(key[line], position[line], token)
    best = torch.full_like(floor, -math.inf).scatter_reduce_(0, line, score, "amax")
    wins = score == best[line]
    # Of equal scores the smallest token wins.
    winner = torch.zeros_like(position).scatter_reduce_(0, line[wins], token[wins], "amin", include_self=False)
    return winner.masked_fill(logits.isnan().any(dim=-1), -1)


def _cutoffs(scaled: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit [R] of each row [R, V] that ``min_p``, ``top_k`` and ``top_p`` keep, in this order."""
    size = scaled.shape[1]
    largest = scaled.amax(dim=-1)
    cut = largest + min_p.log()
    limited = (top_k > 0) & (top_k < size)
    if limited.any():
        wanted = torch.where(limited, top_k, 1)
        least = scaled.topk(int(wanted.max()), dim=-1).values.gather(1, wanted[:, None] - 1)[:, 0]
        cut = torch.where(limited, torch.maximum(cut, least), cut)
    by_mass = (top_p < 1).nonzero()[:, 0]
    if len(by_mass):
        left = scaled[by_mass].masked_fill(scaled[by_mass] < cut[by_mass, None], -math.inf)
        cut[by_mass] = torch.maximum(cut[by_mass], _mass_cutoffs(left, largest[by_mass], top_p[by_mass]))
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
