"""Native CPU kernels over a packed, ragged batch: linear layers, paged attention, norms, SiLU * up, RoPE with KV write.

They are compiled on first use (see :mod:`batchrun.kernels.cpu.build`); where that is impossible :func:`available` is
False and the caller computes with torch. All tensors are on the CPU, contiguous (of caches: the blocks of a head),
float32 or bfloat16, and are neither copied nor kept; sums are fp32, those of int8 exact. **A token's result is bitwise
independent** of the other rows of the batch, of how its request was cut into chunks, of block size and placement, and
of the number of threads (``torch.get_num_threads()``); it does depend on the processor's vector width and on whether it
multiplies bfloat16, where it may take subnormal numbers for zero. Every function raises ValueError for a wrong dtype,
shape or layout, and for an index outside of the cache or table, before anything is written.
"""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from . import build

__all__ = [
    "AttentionBatch",
    "Int8Panels",
    "Panels",
    "add_rms_norm",
    "argmax",
    "attention",
    "available",
    "draw",
    "linear",
    "linear_int8",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "takes",
    "version",
]

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16)

_INDICES = (torch.int32, torch.int64)

_SIGNATURES = {
    "batchrun_rms_norm": [c_void_p] * 4 + [c_int64, c_int, c_float, c_bool, c_int],
    "batchrun_pack": [c_void_p] * 2 + [c_int, c_int, c_bool, c_int],
    "batchrun_linear": [c_void_p] * 4 + [c_int64, c_int, c_int, c_bool, c_bool, c_int],
    "batchrun_linear_int8": [c_void_p] * 5 + [c_int64, c_int, c_int, c_bool, c_bool, c_int],
    "batchrun_argmax": [c_void_p] * 2 + [c_int64, c_int, c_int],
    "batchrun_draw": [c_void_p] * 8 + [c_int64, c_int, c_int],
    "batchrun_silu_mul": [c_void_p] * 2 + [c_int64, c_int, c_bool, c_int],
    "batchrun_rope_kv_write": [c_void_p] * 3
    + [c_bool, c_void_p, c_bool]
    + [c_void_p] * 5
    + [c_int64] * 4
    + [c_int] * 4
    + [c_float, c_bool, c_bool, c_int],
    "batchrun_attention": [c_void_p] * 7 + [c_int64] * 3 + [c_int] * 7 + [c_float, c_float, c_bool, c_bool, c_int],
}


class AttentionBatch(Protocol):
    """What attention reads of a step: which query tokens belong to which row, and where that row's keys lie.

    Row i's queries are the last ``cu_q[i + 1] - cu_q[i]`` positions of its ``kv_len[i]`` tokens, whose keys and values
    are in the cache already: token p in block ``block_table[i, p // block_size]`` at offset ``p % block_size``.
    """

    @property
    def cu_q(self) -> Tensor:
        """int32 [B + 1]: running count of query tokens, from 0."""

    @property
    def kv_len(self) -> Tensor:
        """int32 [B]: tokens of each row up to and including its last query."""

    @property
    def block_table(self) -> Tensor:
        """int32 [B, P]: only blocks that some query of the row can see are read."""


class Panels:
    """A linear layer's weight [N, K], float32 or bfloat16, in the layout that :func:`linear` multiplies (a copy)."""

    __slots__ = ("data", "shape")

    def __init__(self, weight: Tensor) -> None:
        n, k = _floats("weight", weight, 2)
        _require(k > 0, "the weight has no columns")
        self.data = _pack(weight, 4 // weight.element_size())
        self.shape = (n, k)

    def to_dense(self) -> Tensor:
        """The weight [N, K] (a copy)."""
        return _unpack(self.data, self.shape)


class Int8Panels:
    """A linear layer's weight in 8 bits, in the layout that :func:`linear_int8` multiplies (a copy).

    ``values`` int8 [N, K], from -127 to 127, times ``scales`` float32 [N].
    """

    __slots__ = ("data", "scales", "shape")

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        _require(values.dim() == 2, f"values must be [N, K], not {tuple(values.shape)}")
        _like("values", values, values.shape, torch.int8)
        n, k = values.shape
        _like("scales", scales, (n,), torch.float32)
        most = _library().batchrun_max_int8_depth()
        _require(0 < k <= most, f"the weight has {k} columns; 1 to {most} can be summed exactly")
        self.data = _pack(values, 2)
        self.scales = scales
        self.shape = (n, k)

    def to_dense(self) -> Tensor:
        """The weight [N, K] float32."""
        return _unpack(self.data, self.shape) * self.scales[:, None]


def _pack(weight: Tensor, per_word: int) -> Tensor:
    """A weight [N, K] in panels [N / columns, words, columns, per_word], padded with zeros (see ``linear.h``)."""
    n, k = weight.shape
    words, columns = -(-k // per_word), _library().batchrun_panel_columns()
    data = torch.empty(-(-n // columns), words, columns, per_word, dtype=weight.dtype)
    padded = functional.pad(weight, (0, words * per_word - k)) if k % per_word else weight
    _call("batchrun_pack", padded, data, n, words, weight.dtype is torch.int8)
    return data


def _unpack(panels: Tensor, shape: tuple[int, int]) -> Tensor:
    n, k = shape
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:n, :k]


def available() -> bool:
    """Whether the kernels can run here; the first call compiles them (seconds) if the cache has none."""
    return build.library() is not None


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels are made for a model of ``dtype`` whose heads have ``head_dim`` elements."""
    return dtype in DTYPES and head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM


@cache
def version() -> str:
    """Names what the kernels compute: equal where results are equal to the bit, on one kind of processor."""
    products = "bf16" if _library().batchrun_multiplies_bf16() else "fp32"  # of bfloat16
    return f"{hashlib.blake2b(build.sources(), digest_size=6).hexdigest()}-{products}"


def linear(
    x: Tensor, weight: Panels, bias: Tensor | None = None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N], rounded once to ``dtype`` (x's) -> [T, N].

    ``x``, ``weight`` and ``bias`` have one dtype.
    """
    _require(weight.data.dtype is x.dtype, f"x is {x.dtype}, the weight {weight.data.dtype}")
    return _multiply("batchrun_linear", x, weight.shape, (weight.data,), bias, dtype, out)


def linear_int8(
    x: Tensor,
    weight: Int8Panels,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As :func:`linear`: each row of ``x`` is rounded to integers times a scale, and their products are summed exactly.

    The largest magnitude of a row becomes the largest integer up to 32767 with which no sum of K products can overflow
    int32. ``bias`` has x's dtype. A row with anything that is not finite gives NaN.
    """
    return _multiply("batchrun_linear_int8", x, weight.shape, (weight.data, weight.scales), bias, dtype, out)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of ragged queries over a paged KV cache, heads grouped (GQA).

    Args:
        q: [T, HQ, D]; D a multiple of 8 up to 256. Tokens past ``cu_q[B]`` are padding: their result is zero.
        k_cache, v_cache: [n_blocks, HKV, block_size, D], HKV dividing HQ; the dtype may differ from q's: queries and
            probabilities are rounded to it. Within a block and head lie, as :func:`rope_kv_write` leaves them, keys as
            [D / P, block_size, P] and values as [block_size / P, D, P], P elements being 32 bits, which divides
            block_size. Only the two last dimensions need be contiguous: both may be views of one tensor in which they
            alternate.
        batch: see :class:`AttentionBatch`.
        scale: factor of the dot products.
        window: a query at position p sees the keys after p - window; None: all up to p.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        [T, HQ, D] of q's dtype.
    """
    tokens, q_heads, dim = _floats("q", q, 3)
    n_blocks, kv_heads, block_size, cache_dim = _caches(k_cache, v_cache)
    _check_heads(q_heads, kv_heads, dim)
    _require(cache_dim == dim, f"q has head_dim {dim}, the cache {cache_dim}")
    _require(window is None or window > 0, f"window must be positive, not {window}")
    _require(softcap is None or softcap > 0, f"softcap must be positive, not {softcap}")
    rows = batch.kv_len.numel()
    table = batch.block_table
    _require(table.dim() == 2 and table.shape[0] == rows, f"block_table must be [{rows}, P], not {tuple(table.shape)}")
    _like("cu_q", batch.cu_q, (rows + 1,), torch.int32)
    _like("kv_len", batch.kv_len, (rows,), torch.int32)
    _like("block_table", table, table.shape, torch.int32)
    out = torch.empty_like(q)
    _call(
        "batchrun_attention",
        *(q, k_cache, v_cache, out, batch.cu_q, batch.kv_len, table, tokens, n_blocks, k_cache.stride(1)),
        *(rows, table.shape[1], q_heads, kv_heads, dim, block_size, window or 0, scale, softcap or 0.0),
        *(q.dtype is torch.bfloat16, k_cache.dtype is torch.bfloat16),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, rounded once.

    x: [..., H]; weight: [H] of x's dtype.
    """
    return _rms_norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, then the RMS norm of the (rounded) sum; tensors as in :func:`rms_norm`."""
    _like("residual", residual, x.shape, x.dtype)
    return _rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of gate_up [T, 2I], the gates first -> [T, I], rounded once."""
    tokens, width = _floats("gate_up", gate_up, 2)
    _require(width % 2 == 0, f"gate_up must be [T, 2I], not {tuple(gate_up.shape)}")
    out = gate_up.new_empty(tokens, width // 2)
    _call("batchrun_silu_mul", gate_up, out, tokens, width // 2, gate_up.dtype is torch.bfloat16)
    return out


def argmax(logits: Tensor) -> Tensor:
    """The first place of the largest of each row of ``logits`` [N, V] float32 -> [N] int64; -1 where a row has NaN."""
    _like("logits", logits, logits.shape, torch.float32)
    _require(logits.dim() == 2 and logits.shape[1] > 0, f"logits must be [N, V], not {tuple(logits.shape)}")
    out = torch.empty(len(logits), dtype=torch.int64)
    _call("batchrun_argmax", logits, out, *logits.shape)
    return out


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
    """Draw a token for each row of ``logits`` [R, V] float32 -> [R] int64; -1 where a row has NaN.

    Args:
        temperature, min_p, top_p: float32 [R]; ``min_p`` 0 and ``top_p`` 1 are off.
        top_k: int64 [R]; 0 is off. Filters apply in the order ``min_p``, ``top_k``, ``top_p``.
        key, position: int64 [R]: what the noise of a token is made from, by Philox4x32-10.
    """
    _like("logits", logits, logits.shape, torch.float32)
    _require(logits.dim() == 2 and logits.shape[1] > 0, f"logits must be [R, V], not {tuple(logits.shape)}")
    rows, vocabulary = logits.shape
    for name, each in (("temperature", temperature), ("min_p", min_p), ("top_p", top_p)):
        _like(name, each, (rows,), torch.float32)
    for name, each in (("top_k", top_k), ("key", key), ("position", position)):
        _like(name, each, (rows,), torch.int64)
    out = torch.empty(rows, dtype=torch.int64)
    limit = top_k.where(top_k > 0, vocabulary)
    _call("batchrun_draw", logits, temperature, min_p.log(), top_p, limit, key, position, out, rows, vocabulary)
    return out


def rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys (each head RMS-normed first where there is a weight) and store keys and values.

    Args:
        qkv: [T, (HQ + 2 HKV) * D]: query heads, key heads, value heads.
        cos_sin: [max_position, D] float32: cosines of the D / 2 angles, then their sines. The rotation pairs element i
            with i + D / 2 (``rotate_half`` of Hugging Face).
        positions: int32 or int64 [T].
        slots: int32 or int64 [T]: ``block * block_size + offset`` in the cache.
        k_cache, v_cache: as :func:`attention` reads them, written in place; the dtype may differ from qkv's.
        q_norm, k_norm: [D] of qkv's dtype, or None; eps belongs to them.

    Returns:
        The rotated queries, [T, HQ, D] of qkv's dtype.
    """
    tokens, width = _floats("qkv", qkv, 2)
    n_blocks, kv_heads, block_size, dim = _caches(k_cache, v_cache)
    q_heads, rest = divmod(width - 2 * kv_heads * dim, dim)
    _require(rest == 0, f"qkv of width {width} does not fit {kv_heads} KV heads of {dim}")
    _check_heads(q_heads, kv_heads, dim)
    _like("cos_sin", cos_sin, (cos_sin.shape[0], dim), torch.float32)
    for name, indices in (("positions", positions), ("slots", slots)):
        _require(indices.dtype in _INDICES, f"{name} must be int32 or int64, not {indices.dtype}")
        _like(name, indices, (tokens,), indices.dtype)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            _like(name, weight, (dim,), qkv.dtype)
    q = torch.empty((tokens, q_heads, dim), dtype=qkv.dtype)
    _call(
        "batchrun_rope_kv_write",
        *(qkv, cos_sin, positions, positions.dtype is torch.int64, slots, slots.dtype is torch.int64),
        *(k_cache, v_cache, q_norm, k_norm, q, tokens, cos_sin.shape[0], n_blocks, k_cache.stride(1)),
        *(q_heads, kv_heads, dim, block_size, eps, qkv.dtype is torch.bfloat16, k_cache.dtype is torch.bfloat16),
    )
    return q


def _multiply(
    function: str,
    x: Tensor,
    shape: tuple[int, int],
    weight: tuple[Tensor, ...],
    bias: Tensor | None,
    dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """Call the C function that multiplies by a weight of ``shape`` [N, K] laid out as ``weight``."""
    n, k = shape
    tokens, width = _floats("x", x, 2)
    _require(width == k, f"x is {tuple(x.shape)}, the weight {n, k}")
    if bias is not None:
        _like("bias", bias, (n,), x.dtype)
    dtype = dtype or x.dtype
    _require(dtype in DTYPES, f"the result must be float32 or bfloat16, not {dtype}")
    if out is None:
        out = x.new_empty(tokens, n, dtype=dtype)
    else:
        _like("out", out, (tokens, n), dtype)
    _call(function, x, *weight, bias, out, tokens, n, k, *(each is torch.bfloat16 for each in (x.dtype, dtype)))
    return out


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    width = _floats("x", x, None)[-1]
    _like("weight", weight, (width,), x.dtype)
    out = torch.empty_like(x)
    rows = x.numel() // width if width else 0
    _call("batchrun_rms_norm", x, residual, weight, out, rows, width, eps, x.dtype is torch.bfloat16)
    return out


def _library() -> ctypes.CDLL:
    loaded = build.library()
    if loaded is None:
        raise RuntimeError("the native CPU kernels are not available here: ask available() first")
    return loaded


@cache
def _functions() -> dict[str, ctypes._NamedFuncPointer]:
    functions = {name: getattr(_library(), name) for name in _SIGNATURES}
    for name, function in functions.items():
        function.argtypes, function.restype = _SIGNATURES[name], c_char_p
    return functions


def _call(name: str, *arguments: Tensor | float | None) -> None:
    """Call a C function with tensors as addresses and the number of threads last; it returns None or what is wrong."""
    addresses = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    message = _functions()[name](*addresses, torch.get_num_threads())
    if message is not None:
        raise ValueError(message.decode())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _floats(name: str, tensor: Tensor, dims: int | None) -> torch.Size:
    """The shape of a tensor that must be float32 or bfloat16 of so many dimensions."""
    if tensor.dtype not in DTYPES or (tensor.dim() != dims if dims else tensor.dim() == 0):
        raise ValueError(
            f"{name} must be float32 or bfloat16 of {dims or 'some'} dimensions, "
            f"not {tensor.dtype} {tuple(tensor.shape)}"
        )
    _like(name, tensor, tensor.shape, tensor.dtype)
    return tensor.shape


def _like(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} must be a contiguous CPU tensor of {dtype} {tuple(shape)}, not "
            f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )


def _caches(k_cache: Tensor, v_cache: Tensor) -> torch.Size:
    """The shape [n_blocks, HKV, block_size, D] of a pair of caches whose blocks and heads lie equally far apart."""
    _require(
        k_cache.dim() == 4 and k_cache.dtype in DTYPES, f"k_cache must be 4-dimensional floats, not {k_cache.dtype}"
    )
    _, kv_heads, block_size, dim = k_cache.shape
    page = k_cache.stride(1)
    _require(block_size * k_cache.element_size() % 4 == 0, f"block_size must be even, not {block_size}")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if (
            tensor.shape != k_cache.shape
            or tensor.dtype is not k_cache.dtype
            or not tensor.is_cpu
            or page < block_size * dim
            or tensor.stride() != (kv_heads * page, page, dim, 1)
        ):
            raise ValueError(
                f"{name} must be a CPU tensor of {k_cache.dtype} {tuple(k_cache.shape)} with contiguous blocks of a "
                f"head, not {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
    return k_cache.shape


def _check_heads(q_heads: int, kv_heads: int, dim: int) -> None:
    _require(kv_heads > 0 and q_heads > 0 and q_heads % kv_heads == 0, f"{q_heads} query over {kv_heads} KV heads")
    _require(dim % 8 == 0 and 0 < dim <= MAX_HEAD_DIM, f"head_dim must be a multiple of 8 up to 256, not {dim}")
