"""The operations in which a row's bits depend on that row alone: not on batch, chunk, cache or placement.

Library calls choose kernels, tails and thread shares by shape. So every call here has a shape that is fixed by the
model: matrix products in tiles of a fixed number of rows, elementwise functions in tiles of a fixed number of elements,
attention in fixed tiles of queries and keys folded in order of position. Padding fills the last tile.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.ops import dense_fixed, torch_ops
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.ops.attention_batch import no_plan as attention_plan
from batchrun.ops.by_weight import by_weight
from batchrun.ops.kv_numbers import read
from batchrun.ops.tiles import tiled
from batchrun.ops.torch_ops import add_rms_norm, argmax, draw, rms_norm, rope_kv_write, token_logprobs

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "attention_plan",
    "draw",
    "gelu_mul",
    "linear",
    "pack",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "token_logprobs",
]

_ITEMS = 16  # query tiles of one attention call
_QUERIES = 4  # consecutive queries of one sequence in a tile
_KEYS = 128  # consecutive keys in a tile

pack, linear = by_weight(dense=dense_fixed)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `torch_ops.silu_mul`, the exponential in tiles."""
    gate, up = gate_up.chunk(2, dim=-1)
    return tiled(functional.silu, gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As `torch_ops.gelu_mul`, the hyperbolic tangent in tiles."""
    gate, up = gate_up.chunk(2, dim=-1)
    return tiled(partial(functional.gelu, approximate="tanh"), gate) * up


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `torch_ops.attention`: online softmax (Milakov and Gimelshein 2018) over key tiles aligned to position 0.

    A tile that a query sees nothing of leaves its running maximum, sum and output as they are, bit for bit, so it does
    not matter how many tiles a neighbour makes it pass.
    """
    out = torch.empty_like(q)
    row, token, first = _query_tiles(batch)
    for begin in range(0, len(row), _ITEMS):
        pad = _ITEMS - len(row[begin : begin + _ITEMS])
        rows, tokens, firsts = (functional.pad(x[begin : begin + _ITEMS], (0, pad)) for x in (row, token, first))
        count = (batch.cu_q[rows + 1] - tokens).clamp(max=_QUERIES)
        lane = torch.arange(_QUERIES, device=q.device)
        index = (tokens[:, None] + lane).clamp(max=len(q) - 1)
        table, positions = batch.block_table[rows], firsts[:, None] + lane
        result = _attend_tiles(q[index], k_cache, v_cache, kv_scales, table, positions, scale, window, softcap)
        real = (lane < count[:, None]) & (torch.arange(_ITEMS, device=q.device) < _ITEMS - pad)[:, None]
        out[index[real]] = result[real]
    return out


def _query_tiles(batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Row, first token and first position of every tile of at most `_QUERIES` queries of one row; int64 each."""
    q_len = batch.cu_q.diff().long()
    tiles = -(-q_len // _QUERIES)
    row = torch.repeat_interleave(torch.arange(len(tiles), device=tiles.device), tiles)
    within = (torch.arange(len(row), device=row.device) - (tiles.cumsum(0) - tiles)[row]) * _QUERIES
    return row, batch.cu_q[:-1].long()[row] + within, (batch.kv_len.long() - q_len)[row] + within


def _attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None,
    table: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of query tiles [I, Q, HQ, D] at ``positions`` [I, Q] over the blocks of ``table`` [I, P]."""
    n_kv_heads, block_size = k_cache.shape[1:3]
    items, queries, n_heads, head_dim = q.shape
    grouped = (
        q.float()
        .view(items, queries, n_kv_heads, -1, head_dim)
        .transpose(1, 2)
        .reshape(items * n_kv_heads, -1, head_dim)
    )
    best = grouped.new_full((*grouped.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(best)
    acc = torch.zeros_like(grouped)
    for key in range(0, int(positions.max()) + 1, _KEYS):
        keys = torch.arange(key, key + _KEYS, device=q.device)
        blocks = table[:, (keys // block_size).clamp(max=table.shape[1] - 1)].long()
        k, v = (
            read(cache, scales, blocks, slice(None), keys % block_size)
            .transpose(1, 2)
            .reshape(-1, _KEYS, head_dim)
            .float()
            for cache, scales in zip((k_cache, v_cache), kv_scales or (None, None), strict=True)
        )
        scores = grouped @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * tiled(torch.tanh, scores / softcap)
        mask = torch_ops.visible(positions, key + _KEYS, window)[..., key:]
        hidden = ~mask[:, None, :, None].expand(-1, n_kv_heads, -1, n_heads // n_kv_heads, -1).reshape(scores.shape)
        scores = scores.masked_fill(hidden, float("-inf"))
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        base = higher.nan_to_num(neginf=0.0)
        v = v.nan_to_num()  # as in torch_ops
        weights = tiled(torch.exp, scores - base)
        shrink = tiled(torch.exp, best - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + weights @ v
        best = higher
    out = (acc / total).view(items, n_kv_heads, queries, -1, head_dim).transpose(1, 2)
    return out.reshape(q.shape).to(q.dtype)
