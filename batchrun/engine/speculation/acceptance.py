"""How likely drafts are to be accepted: by the evidence they stand on and their position, and by request."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BUCKETS = 9  # of evidence: 0, 1, ..., 7, 8 and more
_DECAY = 1 - 1 / 100  # of a bucket's counts with every draft in it
_FADED = 1 / 16
_SHRINK = 4.0  # drafts that what is known in general counts as
_OWN_DECAY = 1 - 1 / 20  # of a request's counts with every draft of it
_OWN_SHRINK = 4.0  # tokens
_MOST = 0.98  # likely


class Record:
    """How much better a request's drafts do than others of their kind: tokens accepted, of as many expected."""

    __slots__ = ("accepted", "expected")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.expected = 0.0

    @property
    def factor(self) -> float:
        return (self.accepted + _OWN_SHRINK) / (self.expected + _OWN_SHRINK)


class Offer(NamedTuple):
    """Drafts that there are for a request: how many, and how good their ground is, from 0 to 8."""

    record: Record
    length: int
    evidence: int


class Acceptance:
    """Chances of the first ``most`` drafts of a request.

    A position's chance, given that the one before was accepted, is counted by bucket of evidence and decays; where
    there are few counts it tends to that of its bucket, this to that of all, and this to ``prior``.
    """

    def __init__(self, most: int, prior: float) -> None:
        self.most = most
        self.prior = prior
        self._tried = np.zeros((_BUCKETS, most))
        self._accepted = np.zeros((_BUCKETS, most))
        self._positions = np.arange(most)
        self._chances: Floats | None = None

    def observe(self, record: Record, evidence: int, drafted: int, accepted: int) -> None:
        """Of ``drafted`` tokens the first ``accepted`` were right."""
        bucket = _bucket(evidence)
        tried = min(drafted, accepted + 1)  # what follows a wrong one says nothing
        chances = self._by_bucket()[bucket, :tried]
        record.accepted = record.accepted * _OWN_DECAY + accepted
        record.expected = record.expected * _OWN_DECAY + float(chances.sum())
        self._tried[bucket] *= _DECAY
        self._tried[bucket, :tried] += 1
        self._accepted[bucket] *= _DECAY
        self._accepted[bucket, :accepted] += 1
        self._chances = None

    def chances(self, offers: Collection[Offer]) -> Floats:
        """Per offer and position the chance that the draft and all before it are accepted; 0 where there is none."""
        buckets = [_bucket(offer.evidence) for offer in offers]
        factors = np.array([offer.record.factor for offer in offers])
        lengths = np.array([offer.length for offer in offers])
        each = np.minimum(self._by_bucket()[buckets] * factors[:, None], _MOST)
        return np.asarray(each.cumprod(axis=1) * (self._positions < lengths[:, None]))

    def fade(self) -> None:
        """Let what was counted weigh little against what will be."""
        self._tried *= _FADED
        self._accepted *= _FADED
        self._chances = None

    def _by_bucket(self) -> Floats:
        """[bucket, position]: the chance of a draft after an accepted one."""
        if self._chances is None:
            tried, accepted = self._tried.sum(axis=1), self._accepted.sum(axis=1)
            chance = (accepted.sum() + _SHRINK * self.prior) / (tried.sum() + _SHRINK)
            of_bucket = (accepted + _SHRINK * chance) / (tried + _SHRINK)
            self._chances = (self._accepted + _SHRINK * of_bucket[:, None]) / (self._tried + _SHRINK)
        return self._chances


def _bucket(evidence: int) -> int:
    return min(evidence, _BUCKETS - 1)
