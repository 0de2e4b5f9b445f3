"""Log-probabilities of given tokens and of the most likely ones: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import BLOCK, PROGRAMS, WARPS, ordered, row_max, select
from .launch import launch


def token_logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under each row of ``logits`` [N, V] float32, of its target and its most likely tokens.

    ``targets`` [N] int64; ``count``, at most V, says how many tokens. Returns the targets' [N] float32, and ids
    [N, count] int64 with values [N, count] float32, the most likely first, of equals the smaller id. A row with NaN
    has NaN for values.
    """
    rows, size = logits.shape
    programs = min(rows, PROGRAMS)
    of_target = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    values = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    workspace = torch.empty((programs, size + 2 * count), dtype=torch.int32, device=logits.device)
    launch(
        logprob_kernel,
        (programs,),
        *(logits, targets, of_target, ids, values, workspace, rows, size, count),
        BLOCK=BLOCK,
        COUNT=triton.next_power_of_2(count) if count else 0,
        num_warps=WARPS,
    )
    return of_target, ids, values


@triton.jit
def logprob_kernel(
    logits, targets, of_target, ids, values, workspace, rows, size, count, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """Every so many-th row; ``COUNT`` is a power of two from ``count`` up."""
    program = tl.program_id(0).to(tl.int64)
    space = workspace + program * (size + 2 * count)
    for turn in range(tl.cdiv(rows - program, tl.num_programs(0))):
        row = program + turn * tl.num_programs(0)
        line = logits + row * size
        largest = row_max(line, size, BLOCK)
        total = tl.log(_sum_exp(line, size, largest, BLOCK))
        tl.store(of_target + row, tl.load(line + tl.load(targets + row)) - largest - total)
        if COUNT > 0:
            _most_likely(
                line, space, ids + row * count, values + row * count, size, count, largest, total, BLOCK, COUNT
            )


@triton.jit
def _sum_exp(line, size, largest, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(line + at, mask=at < size, other=float("-inf")) - largest)
    return tl.sum(total)


@triton.jit
def _most_likely(
    line, space, ids, values, size, count, largest, total, BLOCK: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Store ``count`` tokens and their log-probabilities: those above the last one's logit, then the first equal to it.

    Each one's place is the number of those that come before it.
    """
    lowest = tl.full((), float("-inf"), tl.float32)
    least = select(line, None, space, size, largest, lowest, count.to(tl.float32), False, BLOCK)
    n_above = _gather(line, space, size, count, ordered(least), BLOCK)
    at = tl.arange(0, COUNT)
    token = tl.load(space + tl.where(at < n_above, at, count + at - n_above), mask=at < count, other=0)
    logit = tl.load(line + token)
    rank = tl.where(at < count, (ordered(logit).to(tl.int64) << 32) - token, -(1 << 63))
    place = tl.sum((rank[None, :] > rank[:, None]).to(tl.int32), axis=1)
    tl.store(ids + place, token.to(tl.int64), mask=at < count)
    tl.store(values + place, logit - largest - total, mask=at < count)


@triton.jit
def _gather(line, space, size, count, least, BLOCK: tl.constexpr):
    """Write to the workspace the ids of logits above ``least``, and ``count`` further on the first of those equal to it.

    Returns how many are above: fewer than ``count``.
    """
    n_above, n_equal = 0, 0
    for start in tl.range(0, size, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        key = ordered(tl.load(line + at, mask=at < size, other=float("-inf")))
        above, equal = (key > least).to(tl.int32), ((key == least) & (at < size)).to(tl.int32)
        place = n_above + tl.cumsum(above) - above
        tl.store(space + place, at, mask=(above != 0) & (place < count))
        place = n_equal + tl.cumsum(equal) - equal
        tl.store(space + count + place, at, mask=(equal != 0) & (place < count))
        n_above += tl.sum(above)
        n_equal += tl.sum(equal)
    tl.debug_barrier()  # before other threads read what was written
    return n_above
