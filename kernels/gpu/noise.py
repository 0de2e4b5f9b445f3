"""Counter-based noise, the same bits as `batchrun.ops.noise`: of a key, a position and a vocabulary id alone."""

from __future__ import annotations

import triton
import triton.language as tl

_MULTIPLY_0 = tl.constexpr(0xD2511F53)
_MULTIPLY_1 = tl.constexpr(0xCD9E8D57)
_BUMP_0 = tl.constexpr(0x9E3779B9)
_BUMP_1 = tl.constexpr(0xBB67AE85)

MAX_GUMBEL = tl.constexpr(17.4)  # above all that `gumbel` draws


@triton.jit
def philox(key, position, word):
    """First output word, uint32, of Philox4x32-10 (Salmon et al. 2011) at counter ``(word, position, 0, 0)``.

    ``key`` and ``position`` are int64 scalars, ``word`` a tensor of integers.
    """
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0 = word.to(tl.uint32)
    c1 = position.to(tl.uint32) + c0 * 0
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * _MULTIPLY_0, c2.to(tl.uint64) * _MULTIPLY_1
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 += _BUMP_0
        k1 += _BUMP_1
    return c0


@triton.jit
def gumbel(key, position, word):
    """Standard Gumbel noise ``-log(-log(u))``, float32, of ``u = (n + 1/2) / 2^24``, n the upper bits of `philox`.

    Above 1/2 that is no float32, but ``1 - u`` is one. Below, u is ``(1 - gap) 2^exponent``.
    """
    n = (philox(key, position, word) >> 8).to(tl.int32)
    low = n < (1 << 23)
    bits = ((n.to(tl.float32) + 0.5) * (1.0 / (1 << 24))).to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # in [1/2, 1)
    gap = tl.where(low, 1 - mantissa, ((0xFFFFFF - n).to(tl.float32) + 0.5) * (1.0 / (1 << 24)))
    # -log(1 - gap) / gap on [0, 1/2], to 2^-23
    series = 1.2050138856440524 + gap * (-1.6302116771114763 + gap * 1.4079566962016543)
    series = 0.2645475827432413 + gap * (-0.18157164316274294 + gap * series)
    series = 0.33366199174681693 + gap * (0.24343744024297032 + gap * series)
    series = 1.0000000193555436 + gap * (0.4999937467732567 + gap * series)
    exponent = tl.where(low, (bits >> 23) - 126, 0).to(tl.float32)
    return -tl.log(gap * series - exponent * 0.6931471805599453)
