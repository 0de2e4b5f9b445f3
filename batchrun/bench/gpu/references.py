"""What the operations should return, in float64 and plain torch, written apart from the operations themselves.

Each reference takes the arguments of its operation and returns what `Call.outputs` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from batchrun.ops.attention_batch import AttentionBatch
from batchrun.ops.kv_numbers import dequantize
from batchrun.ops.noise import uniform
from batchrun.weights.formats import Weight
from batchrun.weights.quantize import LARGEST_INT8

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_LEAST_MAGNITUDE = 1e-30  # a row without a larger one is rounded as if it had it: no scale is zero
_SLACK = 1e-4  # of a probability or a logarithm of one


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> tuple[Tensor]:
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight.double()),)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = (x.double() + residual.double()).to(x.dtype)  # the residual's own rounding is part of what is asked for
    return (*rms_norm(total, weight, eps, offset=offset), total.double())


def silu_mul(gate_up: Tensor) -> tuple[Tensor]:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up,)


def gelu_mul(gate_up: Tensor) -> tuple[Tensor]:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up,)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and the vectors of both caches, whatever they are kept as."""
    kv_heads, block_size, dim = k_cache.shape[1], k_cache.shape[2], cos_sin.shape[1]
    states = qkv.double().view(len(qkv), -1, dim)
    q, k, v = states.split([states.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        (q,), (k,) = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = cos_sin.double()[positions][:, None].chunk(2, dim=-1)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos, sin)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    keys, values = vectors(k_cache, v_cache, *(kv_scales or ()))
    keys[slots // block_size, :, slots % block_size] = turned(k)
    values[slots // block_size, :, slots % block_size] = v
    return turned(q), keys, values


def vectors(k_cache: Tensor, v_cache: Tensor, *scales: Tensor) -> tuple[Tensor, Tensor]:
    """What caches hold, float64 [n_blocks, HKV, block_size, D]; ``scales``: of both, where they have some."""
    if not scales:
        return k_cache.double(), v_cache.double()
    k, v = (dequantize(*each).double() for each in zip((k_cache, v_cache), scales, strict=True))
    return k, v


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
) -> tuple[Tensor]:
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    ends = batch.cu_q.tolist()
    group = q.shape[1] // k_cache.shape[1]
    for begin, end, length, blocks in zip(ends, ends[1:], batch.kv_len.tolist(), batch.block_table, strict=False):
        held = blocks[: -(-length // k_cache.shape[2])].long()
        # [HKV, length, D]
        parts = (each[held] for each in (k_cache, v_cache, *(kv_scales or ())))
        k, v = (each.transpose(0, 1).flatten(1, 2)[:, :length] for each in vectors(*parts))
        queries = q[begin:end].double().transpose(0, 1).unflatten(0, (-1, group)).flatten(1, 2)  # [HKV, group * n, D]
        scores = queries @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(length - (end - begin), length, device=q.device).repeat(group)[:, None]
        key = torch.arange(length, device=q.device)
        hidden = (key > position) | (key <= position - (window or length + 1))
        attended = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        out[begin:end] = attended.unflatten(1, (group, -1)).flatten(0, 1).transpose(0, 1)
    return (out,)


def argmax(logits: Tensor) -> tuple[Tensor]:
    """Of equals the first, which a stable sort leaves in front."""
    first = logits.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    first = first.sort(dim=-1, descending=True, stable=True).indices[:, 0]
    return (first.masked_fill(logits.isnan().any(-1), -1),)


def token_logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    table = logits.double().log_softmax(-1)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return table.gather(1, targets[:, None])[:, 0], ids, table.gather(1, ids)


REFERENCES: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    each.__name__: each
    for each in (rms_norm, add_rms_norm, silu_mul, gelu_mul, rope_kv_write, attention, argmax, token_logprobs)
}


def round_rows(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Rows ``[..., K]`` of floats as integers times scales ``[...]``, all float32; a row's largest becomes ``largest``.

    A row with anything that is not finite becomes zeros times infinity or NaN, so that what is made of it is NaN.
    """
    wide = x.float()
    scales = wide.abs().amax(dim=-1).clamp(min=_LEAST_MAGNITUDE) / largest
    integers = (wide * scales.reciprocal()[..., None]).round().nan_to_num()
    return integers, scales


def linear_products(x: Tensor, weight: Weight, bias: Tensor | None) -> list[Tensor]:
    """What ``linear`` may return of a weight that is not packed: of ``x`` as it is, or rounded to INT8 or FP8 first."""
    wide = weight.rows(torch.arange(weight.shape[0], device=x.device)).double()
    integers, scales = round_rows(x, LARGEST_INT8)
    of_floats = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / _LARGEST_FP8
    floats = (x.float() / of_floats).to(torch.float8_e4m3fn)
    ways = (x.double(), integers.double() * scales.double()[:, None], floats.double() * of_floats.double())
    return [way @ wide.T + (0 if bias is None else bias.double()) for way in ways]


def draw_error(logits: Tensor, options: Mapping[str, Any], chosen: Tensor) -> float:
    """By how much the tokens ``chosen`` [R] by ``draw`` miss the best scores that the filters leave, at most.

    Infinite where a row has a token that the filters do not leave, or -1 without NaN. What lies within `_SLACK` of a
    filter's edge may be left or not: there the order of a sum decides.
    """
    broken = logits.isnan().any(-1)
    if not bool(((chosen == -1) == broken).all()) or not bool(((chosen >= -1) & (chosen < logits.shape[1])).all()):
        return math.inf
    rows = (~broken).nonzero()[:, 0]
    scaled = logits[rows].double() / options["temperature"][rows].double()[:, None]
    min_p, top_k, top_p = (options[name][rows] for name in ("min_p", "top_k", "top_p"))
    surely, perhaps = (_cutoffs(scaled, min_p, top_k, top_p, slack) for slack in (_SLACK, -_SLACK))
    words = torch.arange(logits.shape[1], device=logits.device)
    score = scaled + _gumbel(options["key"][rows, None], options["position"][rows, None], words)
    token = chosen[rows, None]
    if bool((scaled.gather(1, token)[:, 0] < perhaps).any()):
        return math.inf
    best = score.masked_fill(scaled < surely[:, None], -math.inf).amax(-1)
    return float((best - score.gather(1, token)[:, 0]).clamp(min=0).max())


def _gumbel(key: Tensor, position: Tensor, word: Tensor) -> Tensor:
    return -(-uniform(key, position, word).log()).log()


def _cutoffs(scaled: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, slack: float) -> Tensor:
    """The smallest logit [R] left of each row [R, V]; a positive ``slack`` leaves fewer, a negative one more."""
    ordered = scaled.sort(dim=-1, descending=True).values
    cut = ordered[:, 0] + min_p.double().log() + slack
    kept = torch.where(top_k > 0, top_k, scaled.shape[1]).clamp(max=scaled.shape[1])
    cut = torch.maximum(cut, ordered.gather(1, kept[:, None] - 1)[:, 0] - abs(slack) * 1e-2)
    shares = ordered.masked_fill(ordered < cut[:, None], -math.inf).softmax(-1)
    before = shares.cumsum(-1) - shares
    mass = torch.where(top_p < 1, top_p.double() - slack, 2.0)
    last = (before < mass[:, None]).sum(-1).clamp(min=1) - 1
    return torch.maximum(cut, ordered.gather(1, last[:, None])[:, 0] - 1e-6)
