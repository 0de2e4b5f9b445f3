"""Log-probabilities in plain torch: the reference of `token_logprobs` on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ``targets`` [N] int64 and of the ``count`` most likely tokens of ``logits`` [N, V] float32.

    Returns those of the targets [N] float32, and the most likely tokens' ids [N, C] int64 and log-probabilities
    [N, C] float32, C the smaller of ``count`` and V, the most likely first and of equals the smaller id.
    """
    table = torch.log_softmax(logits, dim=-1)
    rows = [_most_likely(row, min(count, len(row))) for row in table]
    ids, values = (torch.stack(each) for each in zip(*rows, strict=True))
    return table.gather(1, targets[:, None])[:, 0], ids, values


def _most_likely(row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ids and values of the ``count`` largest of a row [V]."""
    if count == 0:
        return row.new_empty(0, dtype=torch.int64), row.new_empty(0)
    least = row.topk(count).values[-1]
    ids = (row >= least).nonzero()[:, 0]
    values, order = row[ids].sort(descending=True, stable=True)
    return ids[order][:count], values[:count]
