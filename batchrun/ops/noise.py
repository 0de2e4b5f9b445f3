"""Counter-based noise: a request's randomness depends on its key, the position and the vocabulary id alone.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in int64 arithmetic, which wraps
the same way on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchrun.ops.tiles import tiled

_MASK = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_BUMP = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

MAX_GUMBEL = 17.4  # -log(-log(u)) of the largest u that `uniform` draws is below this


def philox(key: Tensor, position: Tensor, word: Tensor) -> Tensor:
    """First output word of Philox4x32-10 (int64 holding 32 bits) at counter ``(word, position, 0, 0)``.

    ``key`` is int64 (all 64 bits used), the three broadcast against each other.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1 = torch.broadcast_tensors(word & _MASK, position & _MASK)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _BUMP[0]) & _MASK, (k1 + _BUMP[1]) & _MASK
    word0: Tensor = c0
    return word0


def uniform(key: Tensor, position: Tensor, word: Tensor) -> Tensor:
    """float64 in (0, 1), on a grid of 2^-24 (its middle points), so that float32 devices draw the same values."""
    return ((philox(key, position, word) >> 8).double() + 0.5) * 2.0**-24


def gumbel(key: Tensor, position: Tensor, word: Tensor) -> Tensor:
    """Standard Gumbel noise, float32: adding it to logits and taking the largest samples their softmax."""
    return tiled(lambda u: -torch.log(-torch.log(u)), uniform(key, position, word)).float()
