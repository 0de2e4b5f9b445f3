"""Tokens from logits: the largest, or the largest after noise was added (Gumbel-max).

A row is cut into as many parts as keep the GPU busy, a program each; a second, small kernel picks among the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import cutoffs
from .launch import launch
from .noise import MAX_GUMBEL, gumbel

BLOCK = 512  # logits of a program at a time, 4 of a thread, three more on their way
WARPS = 4
_PROGRAMS = 1024  # enough for any GPU


def argmax(logits: Tensor) -> Tensor:
    """The first place of the largest of each row of ``logits`` [N, V] float32: int64 [N]; -1 where a row has NaN."""
    return _pick(logits, None, None, None, None)


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
    floor = cutoffs(logits, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    return _pick(logits, temperature, floor, key, position)


def _pick(
    logits: Tensor, temperature: Tensor | None, floor: Tensor | None, key: Tensor | None, position: Tensor | None
) -> Tensor:
    rows, size = logits.shape
    parts, length = split(rows, size)
    scores = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    launch(
        pick_kernel,
        (rows, parts),
        *(logits, temperature, floor, key, position, scores, tokens, logits.stride(0), size, length),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(merge_kernel, (rows,), scores, tokens, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return out


def split(rows: int, size: int) -> tuple[int, int]:
    """Parts of a row, and how many logits each of them has, a multiple of `BLOCK`."""
    parts = min(triton.cdiv(_PROGRAMS, max(rows, 1)), triton.cdiv(size, BLOCK))
    length = triton.cdiv(triton.cdiv(size, parts), BLOCK) * BLOCK
    return triton.cdiv(size, length), length


@triton.jit
def pick_kernel(logits, temperature, floor, key, position, scores, tokens, stride, size, length, BLOCK: tl.constexpr):
    """The best score of a part of a row and the first token that has it; token -1 where there is NaN.

    Scores are the logits, or with a ``temperature`` scaled logits plus noise, of those that reach the row's ``floor``.
    Blocks in which nothing can beat the best so far draw no noise.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = part * length, tl.minimum((part + 1) * length, size)
    token = begin + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    invalid = tl.zeros((BLOCK,), tl.int1)
    if temperature is not None:
        row_temperature, row_floor = tl.load(temperature + row), tl.load(floor + row)
        row_key, row_position = tl.load(key + row), tl.load(position + row)
        reached = float("-inf")
    for start in tl.range(begin, end, BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
        invalid |= values != values
        if temperature is None:
            token = tl.where(values > best, at, token)
            best = tl.maximum(best, values)
        else:
            if tl.div_rn(tl.max(values), row_temperature) >= tl.maximum(row_floor, reached - MAX_GUMBEL):
                scaled = tl.div_rn(values, row_temperature)
                score = tl.where(scaled >= row_floor, scaled + gumbel(row_key, row_position, at), float("-inf"))
                token = tl.where(score > best, at, token)
                best = tl.maximum(best, score)
                reached = tl.max(best)
    score = tl.max(best)
    first = tl.min(tl.where(best == score, token, size))
    out = row * tl.num_programs(1) + part
    tl.store(scores + out, score)
    tl.store(tokens + out, tl.where(tl.max(invalid.to(tl.int32)) > 0, -1, first))


@triton.jit
def merge_kernel(scores, tokens, out, parts, BLOCK: tl.constexpr):
    """The best of a row's parts, of equals the first."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    score = tl.load(scores + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    first = tl.min(tl.where(score == tl.max(score), token, 0x7FFFFFFF))
    tl.store(out + row, tl.where(tl.min(token) < 0, -1, first).to(tl.int64))
