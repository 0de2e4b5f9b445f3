"""The cutoffs of ``min_p``, ``top_k`` and ``top_p``, by selection instead of a sort: one program a row.

Both ask for the largest number above which, itself included, lie ``top_k`` logits or ``top_p`` of the mass. Three
trial numbers at a time narrow it down to an interval. The first are distances from the largest logit, and meet the
whole row; what lies in the interval is then copied to a workspace, in order, where the search goes on and copies less
and less, and ends in registers, at one bit pattern. So a search reads the row twice, and every sum has a fixed order.

Numbers are compared as integers of the same order (see :func:`ordered`), so no step depends on rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

BLOCK = 2048  # logits at a time, 8 of a thread, and as many four times on their way
WARPS = 8
STAGES = tl.constexpr(5)
ROWS = 128  # of a launch: each has a workspace of its own, and more rows than this do not make a GPU faster

_NONE = tl.constexpr(-(1 << 31))  # below all that `ordered` gives


def cutoffs(logits: Tensor, *, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest scaled logit [R] that the filters of each row of ``logits`` [R, V] keep; float32.

    Filters apply in the order ``min_p``, ``top_k``, ``top_p`` to ``logits / temperature``; a row without any has
    minus infinity and costs nothing.
    """
    rows, size = logits.shape
    out, largest = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    workspace = torch.empty((min(rows, ROWS), size), dtype=torch.int32, device=logits.device)
    for begin in range(0, rows, ROWS):
        some = slice(begin, begin + ROWS)
        grid, fixed = (min(rows - begin, ROWS),), {"BLOCK": BLOCK, "num_warps": WARPS}
        each = [x[some] for x in (logits, temperature, top_p, out, largest)]
        launch(top_k_kernel, grid, *each, min_p[some], top_k[some], workspace, logits.stride(0), size, **fixed)
        launch(top_p_kernel, grid, *each, workspace, logits.stride(0), size, **fixed)
    return out


@triton.jit
def top_k_kernel(
    logits, temperature, top_p, out, largest, min_p, top_k, workspace, stride, size, BLOCK: tl.constexpr
):  # fmt: skip
    """A row's cutoff by ``min_p`` and ``top_k``, and its largest scaled logit where it has any filter."""
    row = tl.program_id(0).to(tl.int64)
    line, space = logits + row * stride, workspace + row * size
    scale, share, count = tl.load(temperature + row), tl.load(min_p + row), tl.load(top_k + row)
    limited = (count > 0) & (count < size)
    cut = float("-inf")
    if (share > 0) | limited | (tl.load(top_p + row) < 1):
        most = tl.div_rn(row_max(line, size, BLOCK), scale)
        tl.store(largest + row, most)
        cut = tl.where(share > 0, most + tl.log(share), float("-inf"))
        if limited & (tl.abs(most) < float("inf")):
            cut = select(line, scale, space, size, most, cut, count.to(tl.float32), False, BLOCK)
    tl.store(out + row, cut)


@triton.jit
def top_p_kernel(logits, temperature, top_p, out, largest, workspace, stride, size, BLOCK: tl.constexpr):
    """Raise a row's cutoff to that of ``top_p`` among what is left."""
    row = tl.program_id(0).to(tl.int64)
    mass = tl.load(top_p + row)
    if mass < 1:
        most = tl.load(largest + row)
        if tl.abs(most) < float("inf"):  # else there is nothing to choose from
            line, space = logits + row * stride, workspace + row * size
            scale, cut = tl.load(temperature + row), tl.load(out + row)
            tl.store(out + row, select(line, scale, space, size, most, cut, mass, True, BLOCK))


@triton.jit
def ordered(x):
    """int32 in the order of float32; zeros are equal, and NaN counts as minus infinity."""
    bits = (tl.where(x == x, x, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(key):
    """The float32 that has this place in the order."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def keys(source, scale, at, size):
    """Places in the order of scaled logits, or of a workspace's, at ``at``; from ``size`` on below all others."""
    if source.dtype.element_ty == tl.int32:
        return tl.load(source + at, mask=at < size, other=_NONE)
    logit = tl.load(source + at, mask=at < size, other=0.0)
    if scale is not None:
        logit = tl.div_rn(logit, scale)
    return tl.where(at < size, ordered(logit), _NONE)


@triton.jit
def row_max(line, size, BLOCK: tl.constexpr):
    """The largest of a row, NaN aside."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(line + at, mask=at < size, other=float("-inf")))
    return tl.max(best)


@triton.jit
def select(line, scale, space, size, largest, lowest, goal, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number with ``goal`` of a row's scaled logits from it up; ``lowest`` where there are fewer.

    ``goal`` is how many, or with ``MASS`` the share of the mass that lies from ``lowest`` up.
    """
    low, high, above = ordered(lowest), ordered(largest) + 1, 0.0
    first, second, third = ordered(largest - 16), ordered(largest - 6), ordered(largest - 2)
    low, high, above, goal = _narrow(
        line, scale, size, largest, low, high, above, first, second, third, goal, MASS, MASS, BLOCK, STAGES
    )
    size = _copy(line, scale, size, space, low, high, BLOCK, STAGES)
    while (size > BLOCK) & (high > low + 1):
        step = (high >> 2) - (low >> 2)  # the difference may not fit
        low, high, above, goal = _narrow(
            space, None, size, largest, low, high, above, low + step, low + 2 * step, low + 3 * step, goal,
            MASS, False, BLOCK, 1,
        )  # fmt: skip
        size = _copy(space, None, size, space, low, high, BLOCK, 1)
    key = keys(space, None, tl.arange(0, BLOCK), size)
    weight = _weights(key, largest, MASS)
    while high > low + 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = above + tl.sum(tl.where(key >= middle, weight, 0.0)) >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return number(low)


@triton.jit
def _narrow(
    source, scale, size, largest, low, high, above, first, second, third, goal,
    MASS: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The part of the interval [low, high) in which the goal is reached, with the tally above it, and the goal.

    The goal is reached at ``low`` and not at ``high``, whose tally is ``above``. Trial numbers rise. With ``SHARE`` the
    goal is one of the whole tally.
    """
    # Inside of the interval, or the search would not end.
    first = tl.minimum(tl.maximum(first, low + 1), high)
    second = tl.minimum(tl.maximum(second, low + 1), high)
    third = tl.minimum(tl.maximum(third, low + 1), high)
    whole = tl.zeros((BLOCK,), tl.float32)
    from_first, from_second, from_third = whole, whole, whole
    for start in tl.range(0, size, BLOCK, num_stages=DEPTH):
        key = keys(source, scale, start + tl.arange(0, BLOCK), size)
        weight = tl.where((key >= low) & (key < high), _weights(key, largest, MASS), 0.0)
        if SHARE:
            whole += weight
        from_first += tl.where(key >= first, weight, 0.0)
        from_second += tl.where(key >= second, weight, 0.0)
        from_third += tl.where(key >= third, weight, 0.0)
    if SHARE:
        goal *= tl.sum(whole)
    at_first, at_second = above + tl.sum(from_first), above + tl.sum(from_second)
    at_third = above + tl.sum(from_third)
    if at_third >= goal:
        low = third
    elif at_second >= goal:
        low, high, above = second, third, at_third
    elif at_first >= goal:
        low, high, above = first, second, at_second
    else:
        high, above = first, at_first
    return low, high, above, goal


@triton.jit
def _weights(key, largest, MASS: tl.constexpr):
    """What each logit counts for."""
    return tl.exp(number(key) - largest) if MASS else tl.full(key.shape, 1.0, tl.float32)


@triton.jit
def _copy(source, scale, size, space, low, high, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Copy keys inside of [low, high) to the workspace, in order, and return how many there are.

    The source may be the workspace: what is written lies before what is still to be read.
    """
    copied = 0
    for start in tl.range(0, size, BLOCK, num_stages=DEPTH):
        key = keys(source, scale, start + tl.arange(0, BLOCK), size)
        kept = ((key >= low) & (key < high)).to(tl.int32)
        place = copied + tl.cumsum(kept) - kept
        tl.store(space + place, key, mask=kept != 0)
        copied += tl.sum(kept)
    tl.debug_barrier()  # before other threads read what was written
    return copied
