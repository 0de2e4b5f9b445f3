"""The engine's operations in plain torch: for devices without kernels of their own, and the reference for those.

Every backend is a module with these functions. Here speed comes from few, large library calls, whose results for one
row may differ in the last bits with the rows beside it; `fixed_ops` is the variant whose results may not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.ops import dense_torch
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.ops.attention_batch import no_plan as attention_plan
from batchrun.ops.by_weight import by_weight
from batchrun.ops.draw import draw
from batchrun.ops.kv_numbers import read, write
from batchrun.ops.logprobs import token_logprobs

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

_GATHER_BYTES = 64 << 20  # KV gathered at once for decode rows

pack, linear = by_weight(dense=dense_torch)


def argmax(logits: Tensor) -> Tensor:
    """The first place of the largest of each row of ``logits`` [N, V] float32: int64 [N]; -1 where a row has NaN."""
    # torch's own argmax picks among equals by the shape. No NaN equals the largest, which is NaN where there is one.
    line, token = (logits == logits.amax(dim=-1, keepdim=True)).nonzero(as_tuple=True)
    best = torch.full((len(logits),), logits.shape[1], device=logits.device).scatter_reduce_(0, line, token, "amin")
    return best.masked_fill(best == logits.shape[1], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich 2019); x's dtype.

    The weight is ``offset + weight``. With an offset (Gemma) the product is rounded once, without one the norm too.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (offset + weight.float())).to(x.dtype) if offset else wide.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Add ``x`` to ``residual`` in place, and return the norm of the sum."""
    residual += x
    return rms_norm(residual, weight, eps, offset=offset)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [T, 2I] whose halves are gate and up; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of [T, 2I], GELU (Hendrycks and Gimpel 2016) in its tanh form; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, write keys and values into the paged cache, return the queries [T, HQ, D].

    ``qkv`` [T, (HQ + 2 HKV) D]; ``cos_sin`` [P, D] float32, cosines then sines of D/2 frequencies (rotate-half form);
    ``slots`` [T] int64; caches [n_blocks, HKV, block_size, D], or as `kv_numbers` keeps D numbers, ``kv_scales``
    [n_blocks, HKV, block_size] being those of keys and of values. ``q_norm`` and ``k_norm`` [D] are applied per head
    before the rotation (Qwen3).
    """
    n_kv_heads, block_size, head_dim = k_cache.shape[1], k_cache.shape[2], cos_sin.shape[1]
    q, k, v = qkv.view(len(qkv), -1, head_dim).tensor_split([-2 * n_kv_heads, -n_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    blocks, offsets = slots // block_size, slots % block_size
    k_scales, v_scales = kv_scales or (None, None)
    write(rotate(k, cos, sin), k_cache, k_scales, blocks, offsets)
    write(v, v_cache, v_scales, blocks, offsets)
    return rotate(q, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, H, D] (Su et al. 2021) in float32; element i turns with element i + D/2."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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
    """Causal attention of ragged queries [T, HQ, D] over the paged cache [n_blocks, HKV, block_size, D]; like q.

    ``kv_scales`` as in `rope_kv_write`. A query at position p sees positions in (p - window, p]. Scores are
    ``softcap * tanh(scores / softcap)`` if given.
    """
    out = torch.empty_like(q)
    q_len = batch.cu_q.diff()
    decode = (q_len == 1).nonzero()[:, 0]
    attend = partial(_attend, caches=(k_cache, v_cache), kv_scales=kv_scales, scale=scale, softcap=softcap)
    head_bytes = q.shape[-1] * q.element_size()
    bytes_per_row = 2 * k_cache[0, ..., 0].numel() * head_bytes * batch.block_table.shape[1]
    for rows in decode.split(max(1, _GATHER_BYTES // bytes_per_row)) if len(decode) else ():
        tokens = batch.cu_q[rows].long()
        lengths = batch.kv_len[rows]
        table = batch.block_table[rows, : _n_blocks(int(lengths.max()), k_cache)]
        mask = visible(lengths[:, None] - 1, table.shape[1] * k_cache.shape[2], window)
        out[tokens] = attend(q[tokens][:, None], table, mask)[:, 0]
    for row in (q_len > 1).nonzero()[:, 0].tolist():
        begin, end = int(batch.cu_q[row]), int(batch.cu_q[row + 1])
        length = int(batch.kv_len[row])
        table = batch.block_table[row : row + 1, : _n_blocks(length, k_cache)]
        positions = torch.arange(length - (end - begin), length, device=q.device)[None]
        mask = visible(positions, table.shape[1] * k_cache.shape[2], window)
        out[begin:end] = attend(q[None, begin:end], table, mask)[0]
    return out


def visible(positions: Tensor, n_keys: int, window: int | None) -> Tensor:
    """Which of keys 0 to ``n_keys - 1`` queries at ``positions`` [...] see: bool [..., n_keys]."""
    keys = torch.arange(n_keys, device=positions.device)
    mask = keys <= positions[..., None]
    if window is not None:
        mask &= keys > positions[..., None] - window
    return mask


def _n_blocks(length: int, cache: Tensor) -> int:
    return -(-length // cache.shape[2])


def _attend(
    q: Tensor,
    table: Tensor,
    mask: Tensor,
    *,
    caches: tuple[Tensor, Tensor],
    kv_scales: tuple[Tensor, Tensor] | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Dense attention of [B, Q, HQ, D] over the blocks of ``table`` [B, P] under ``mask`` [B, Q, P * block_size]."""
    k, v = (
        read(cache, scales, table.long()).transpose(1, 2).flatten(2, 3)  # [B, HKV, K, D]
        for cache, scales in zip(caches, kv_scales or (None, None), strict=True)
    )
    # Not a number times the zero weight of a masked key would be one too; a row of its own shows by its scores.
    v = v.nan_to_num()
    heads = q.transpose(1, 2)
    if softcap is None:
        attended = functional.scaled_dot_product_attention(
            heads, k.to(q.dtype), v.to(q.dtype), attn_mask=mask[:, None], scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2)
    group = heads.shape[1] // k.shape[1]
    scores = heads.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask[:, None], float("-inf"))
    return (scores.softmax(-1) @ v.float().repeat_interleave(group, 1)).to(q.dtype).transpose(1, 2)
