"""Log-probabilities of tokens in plain torch: the reference of `token_logprobs` on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 16  # at a time: each logit takes 24 bytes meanwhile


def token_logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under each row of ``logits`` [N, V] float32, of its target and its most likely tokens.

    ``targets`` [N] int64; ``count``, at most V, says how many tokens. Returns the targets' [N] float32, and ids
    [N, count] int64 with values [N, count] float32, the most likely first, of equals the smaller id. A row with NaN
    has NaN for values.
    """
    parts = zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
    found = [_token_logprobs(*part, count) for part in parts]
    return tuple(torch.cat(each) for each in zip(*found, strict=True))  # type: ignore[return-value]


def _token_logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits, dim=-1)
    places = _ordered(logits) << 32
    places -= torch.arange(logits.shape[1], device=logits.device)  # no two are equal
    ids = places.topk(count, dim=-1).indices
    return logprobs.gather(1, targets[:, None])[:, 0], ids, logprobs.gather(1, ids)


def _ordered(logits: Tensor) -> Tensor:
    """int64 in the order of ``logits``; zeros are equal, and NaN counts as minus infinity."""
    bits = (logits.nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
