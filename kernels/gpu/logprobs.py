"""Log-probabilities of given tokens and of the most likely ones: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import BLOCK, ROWS, STAGES, WARPS, number, ordered, row_max, select
from .launch import launch


def token_logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under each row of ``logits`` [N, V] float32, of its target and its most likely tokens.

    ``targets`` [N] int64; ``count``, at most V, says how many tokens. Returns the targets' [N] float32, and ids
    [N, count] int64 with values [N, count] float32, the most likely first, of equals the smaller id. A row with NaN
    has NaN for values.
    """
    rows, size = logits.shape
    of_target = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    values = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    workspace = torch.empty((min(rows, ROWS), size + 2 * count), dtype=torch.int32, device=logits.device)
    for begin in range(0, rows, ROWS):
        some = slice(begin, begin + ROWS)
        launch(
            logprob_kernel,
            (min(rows - begin, ROWS),),
            *(x[some] for x in (logits, targets, of_target, ids, values)),
            *(workspace, logits.stride(0), size, count),
            BLOCK=BLOCK,
            COUNT=triton.next_power_of_2(count) if count else 0,
            num_warps=WARPS,
        )
    return of_target, ids, values


@triton.jit
def logprob_kernel(
    logits, targets, of_target, ids, values, workspace, stride, size, count, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """A row's target and most likely tokens; ``COUNT`` is a power of two from ``count`` up."""
    row = tl.program_id(0).to(tl.int64)
    line, space = logits + row * stride, workspace + row * (size + 2 * count)
    largest = row_max(line, size, BLOCK)
    total = tl.log(_sum_exp(line, size, largest, BLOCK))
    tl.store(of_target + row, tl.load(line + tl.load(targets + row)) - largest - total)
    if COUNT > 0:
        _most_likely(line, space, ids + row * count, values + row * count, size, count, largest, total, BLOCK, COUNT)


@triton.jit
def _sum_exp(line, size, largest, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(line + at, mask=at < size, other=float("-inf")) - largest)
    return tl.sum(total)


@triton.jit
def _most_likely(
    line, space, ids, values, size, count, largest, total, BLOCK: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Store ``count`` tokens and their log-probabilities: those above the last one's logit, then the first equal to it.

    They are sorted by one integer each, the logit's place in the order above the id.
    """
    lowest = tl.full((), float("-inf"), tl.float32)
    least = select(line, None, space, size, largest, lowest, count * 1.0, False, BLOCK)
    n_above = _gather(line, space, size, count, ordered(least), BLOCK)
    at = tl.arange(0, COUNT)
    token = tl.load(space + tl.where(at < n_above, at, count + at - n_above), mask=at < count, other=0)
    key = ordered(tl.load(line + token)).to(tl.int64)
    sorted_keys = tl.sort(tl.where(at < count, (key << 32) - token, -(1 << 63)), descending=True)
    token = -sorted_keys & 0xFFFFFFFF
    logit = number(((sorted_keys + token) >> 32).to(tl.int32))
    tl.store(ids + at, token, mask=at < count)
    tl.store(values + at, logit - largest - total, mask=at < count)


@triton.jit
def _gather(line, space, size, count, least, BLOCK: tl.constexpr):
    """Write to the workspace the ids of the logits above ``least``, and ``count`` further on those equal to it.

    At most ``count`` of each. Returns how many are above: fewer than ``count``.
    """
    n_above, n_equal = 0, 0
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
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
