"""The least time that work can take: its bytes at the rate of a copy, or its products at that of a large one. No torch.

Bytes count what has to be read and written once, in numbers of two bytes unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_BYTES = 2
_BYTES32 = 4


class Ceilings(NamedTuple):
    """What a device reaches: bytes a second of a copy (read and written), and FLOP a second of a bfloat16 product."""

    bandwidth: float
    flops: float


class Work(NamedTuple):
    """What has to be moved and multiplied."""

    bytes: float
    flops: float = 0.0

    def __add__(self, other: object) -> Work:
        assert isinstance(other, Work)
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor."""
        return max(self.bytes / ceilings.bandwidth, self.flops / ceilings.flops)


def attention(
    rows: Iterable[tuple[int, int]], query_heads: int, kv_heads: int, dim: int, *, shared: int = 0, kv_bytes: float = 2
) -> Work:
    """Causal attention of rows of (queries, length); ``shared`` positions at the beginning all have in common."""
    rows = list(rows)
    queries = sum(count for count, _ in rows)
    pairs = sum(count * length - count * (count - 1) / 2 for count, length in rows)
    keys = shared + sum(length - shared for _, length in rows)
    return Work(
        bytes=2 * keys * kv_heads * dim * kv_bytes + 2 * queries * query_heads * dim * _BYTES,
        flops=4 * pairs * query_heads * dim,
    )


def linear(rows: int, out: int, inner: int, *, weight_bytes: float = _BYTES) -> Work:
    """A product of ``rows`` with a weight [out, inner]."""
    return Work(out * inner * weight_bytes + rows * (out + inner) * _BYTES, 2.0 * rows * out * inner)


def add_rms_norm(tokens: int, hidden: int) -> Work:
    """Two tensors read and two written."""
    return Work(4 * tokens * hidden * _BYTES)


def rms_norm(tokens: int, hidden: int) -> Work:
    return Work(2 * tokens * hidden * _BYTES)


def silu_mul(tokens: int, width: int) -> Work:
    return Work(3 * tokens * width * _BYTES)


def rope_kv_write(tokens: int, query_heads: int, kv_heads: int, dim: int, *, kv_bytes: float = _BYTES) -> Work:
    """All of q, k and v read and written; the table of angles stays in the cache."""
    read = query_heads + 2 * kv_heads
    return Work(tokens * dim * ((read + query_heads) * _BYTES + 2 * kv_heads * kv_bytes))


def one_pass(rows: int, vocabulary: int) -> Work:
    """Logits of four bytes read once."""
    return Work(rows * vocabulary * _BYTES32)
