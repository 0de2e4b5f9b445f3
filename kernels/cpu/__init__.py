"""Native CPU kernels over a packed, ragged batch: linear layers, paged attention, norms, SiLU * up, RoPE with KV write.

They are compiled on first use (see :mod:`batchrun.kernels.cpu.build`); where that is impossible :func:`available` is
False and the caller computes with torch. All tensors are on the CPU, contiguous (of caches: the blocks of a head),
float32 or bfloat16, and are neither copied nor kept; sums are fp32, those of a group of integers exact. **A token's
result is bitwise independent** of the other rows of the batch, of how its request was cut into chunks, of block size
and placement, and of the number of threads (``torch.get_num_threads()``); it does depend on the processor's vector
width and on whether it multiplies bfloat16, where it may take subnormal numbers for zero. Every function raises
ValueError for a wrong dtype, shape or layout, and for an index outside of the cache or table, before anything is
written.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from . import build

__all__ = [
    "AttentionBatch",
    "GroupedPanels",
    "Panels",
    "add_rms_norm",
    "argmax",
    "attention",
    "available",
    "draw",
    "linear",
    "linear_grouped",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "takes",
    "version",
]

MAX_HEAD_DIM = 256
MAX_GROUP = 1 << 16  # columns of a group of integers: the activations' keep 8 bits
DTYPES = (torch.float32, torch.bfloat16)

_INDICES = (torch.int32, torch.int64)
_CACHES = (*DTYPES, torch.int8, torch.float8_e4m3fn, torch.uint8)  # in the order of `with_cache_type` in ``kv_cache.h``

_SIGNATURES = {
    "batchrun_rms_norm": [c_void_p] * 4 + [c_int64, c_int, c_float, c_bool, c_int],
    "batchrun_pack": [c_void_p] * 2 + [c_int] * 4,
    "batchrun_linear": [c_void_p] * 4 + [c_int64, c_int, c_int, c_bool, c_bool, c_int],
    "batchrun_linear_grouped": [c_void_p] * 6 + [c_int64] + [c_int] * 3 + [c_bool] * 3 + [c_int],
    "batchrun_argmax": [c_void_p] * 2 + [c_int64, c_int, c_int],
    "batchrun_draw": [c_void_p] * 8 + [c_int64, c_int, c_int],
    "batchrun_silu_mul": [c_void_p] * 2 + [c_int64, c_int, c_bool, c_int],
    "batchrun_rope_kv_write": [c_void_p] * 3
    + [c_bool, c_void_p, c_bool]
    + [c_void_p] * 7
    + [c_int64] * 5
    + [c_int] * 4
    + [c_float, c_bool, c_int, c_int],
    "batchrun_attention": [c_void_p] * 9 + [c_int64] * 4 + [c_int] * 7 + [c_float, c_float, c_bool, c_int, c_int],
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
        per_word = 4 // weight.element_size()
        if k % per_word:
            weight = functional.pad(weight, (0, per_word - k % per_word))
        self.data = _pack(weight, per_word)
        self.shape = (n, k)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.data.nbytes

    def to_dense(self) -> Tensor:
        """The weight [N, K] (a copy)."""
        return _unpack(self.data)[: self.shape[0], : self.shape[1]]

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` (integers [...]) of the weight, [..., K]."""
        return _rows(self.data, ids)[..., : self.shape[1]]


class GroupedPanels:
    """A linear layer's weight of small integers, in the layout that :func:`linear_grouped` multiplies (a copy).

    Args:
        stored: int8 [N, K] for 8 bits, uint8 [N, K / 2] for 4, the low half of a byte being the first of two columns.
        scales, minimums: float32 [N, G], for each of G groups of neighbouring columns; an element is
            ``scale * integer + minimum``. None: no minimums.
        order: int64 [K], the input that each column multiplies; None: its own.
    """

    __slots__ = ("bits", "data", "minimums", "order", "scales", "shape")

    def __init__(
        self, stored: Tensor, scales: Tensor, minimums: Tensor | None, order: Tensor | None = None, *, bits: int
    ) -> None:
        _require(bits in (4, 8), f"integers have 4 or 8 bits, not {bits}")
        _require(stored.dim() == 2, f"the weight must be a matrix, not {tuple(stored.shape)}")
        _like("stored", stored, stored.shape, torch.int8 if bits == 8 else torch.uint8)
        n, k = stored.shape[0], stored.shape[1] * 8 // bits
        groups = scales.shape[-1]
        _require(groups > 0 and 0 < k <= MAX_GROUP * groups and k % groups == 0, f"{k} columns make no {groups} groups")
        _require(groups == 1 or k // groups % 2 == 0, f"groups of {k // groups} columns are odd")
        for name, each in (("scales", scales), ("minimums", minimums)):
            if each is not None:
                _like(name, each, (n, groups), torch.float32)
        if order is not None:
            _like("order", order, (k,), torch.int64)
        if bits == 8 and k % 2:
            stored = functional.pad(stored, (0, 1))
        self.data = _pack(stored, 2 if bits == 8 else 1)
        self.scales, self.minimums = _by_panel(scales), None if minimums is None else _by_panel(minimums)
        self.order, self.bits, self.shape = order, bits, (n, k)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        parts = (self.data, self.scales, self.minimums, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.scales.shape[1]

    def to_dense(self) -> Tensor:
        """The weight [N, K] float32."""
        return self.rows(torch.arange(self.shape[0]))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` (integers [...]) of the weight, [..., K] float32."""
        integers = _rows(self.data, ids)
        if self.bits == 4:
            integers = torch.stack((integers & 15, integers >> 4), dim=-1).flatten(-2)
        scales = _rows(self.scales[..., None], ids)
        numbers = integers[..., : self.shape[1]].unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
        if self.minimums is not None:
            numbers += _rows(self.minimums[..., None], ids)[..., None]
        numbers = numbers.flatten(-2)
        return numbers if self.order is None else torch.empty_like(numbers).index_copy_(-1, self.order, numbers)


def _pack(weight: Tensor, per_word: int) -> Tensor:
    """A weight [N, K] in panels [N / columns, words, columns, per_word], padded with zeros (see ``linear.h``)."""
    n, words = weight.shape[0], weight.shape[1] // per_word
    columns = _library().batchrun_panel_columns()
    data = torch.empty(-(-n // columns), words, columns, per_word, dtype=weight.dtype)
    _call("batchrun_pack", weight, data, n, words, per_word * weight.element_size())
    return data


def _by_panel(scales: Tensor) -> Tensor:
    """[N, G] as [N / columns, G, columns], padded with zeros."""
    columns = _library().batchrun_panel_columns()
    padded = functional.pad(scales, (0, 0, 0, -len(scales) % columns))
    by_panel: Tensor = padded.unflatten(0, (-1, columns)).transpose(1, 2).contiguous()
    return by_panel


def _unpack(panels: Tensor) -> Tensor:
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)


def _rows(panels: Tensor, ids: Tensor) -> Tensor:
    """Rows ``ids`` [...] of what lies in panels [N / columns, words, columns, per_word]: [..., words * per_word]."""
    columns = panels.shape[2]
    return panels[ids // columns, :, ids % columns].flatten(-2)


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


def linear_grouped(
    x: Tensor,
    weight: GroupedPanels,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As :func:`linear`: each group of a row of ``x`` is rounded to integers times a scale, whose products are exact.

    The largest magnitude of a group becomes the largest integer up to 32767 with which no sum of its products can
    overflow int32. ``bias`` has x's dtype. A row with anything that is not finite gives NaN.
    """
    if weight.order is not None:
        x = x[:, weight.order]
    parts = (weight.data, weight.scales, weight.minimums)
    return _multiply(
        "batchrun_linear_grouped", x, weight.shape, parts, bias, dtype, out, weight.group, weight.bits == 4
    )


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
    """Causal attention of ragged queries over a paged KV cache, heads grouped (GQA).

    Args:
        q: [T, HQ, D]; D a multiple of 8 up to 256. Tokens past ``cu_q[B]`` are padding: their result is zero.
        k_cache, v_cache: [n_blocks, HKV, block_size, D], HKV dividing HQ; the dtype may differ from q's: queries and
            probabilities are rounded to it. Within a block and head lie, as :func:`rope_kv_write` leaves them, keys as
            [D / P, block_size, P] and values as [block_size / P, D, P], P elements being 32 bits, which divides
            block_size. Only the two last dimensions need be contiguous: both may be views of one tensor in which they
            alternate. Or, with ``kv_scales``, int8, float8_e4m3fn or uint8 (of two integers of 4 bits, D being twice
            the last dimension) in the order of ``kv_cache.h``: an element is a number times its key's or value's scale.
            Integers are multiplied by queries and probabilities of 16 bits, 8-bit floats by those of q's dtype.
        batch: see :class:`AttentionBatch`.
        scale: factor of the dot products.
        kv_scales: float32 [n_blocks, HKV, block_size] of the keys and of the values, the blocks of a head contiguous.
        window: a query at position p sees the keys after p - window; None: all up to p.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        [T, HQ, D] of q's dtype.
    """
    tokens, q_heads, dim = _floats("q", q, 3)
    n_blocks, kv_heads, block_size, cache_dim, pages = _caches(k_cache, v_cache, kv_scales)
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
        *(q, k_cache, v_cache, *(kv_scales or (None, None)), out, batch.cu_q, batch.kv_len, table),
        *(tokens, n_blocks, *pages, rows, table.shape[1], q_heads, kv_heads, dim, block_size, window or 0),
        *(scale, softcap or 0.0, q.dtype is torch.bfloat16, _CACHES.index(k_cache.dtype)),
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
    kv_scales: tuple[Tensor, Tensor] | None = None,
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
        k_cache, v_cache, kv_scales: as :func:`attention` reads them, written in place; the dtype may differ from
            qkv's. Small numbers are the nearest, the largest magnitude of a key or value becoming the largest number.
        q_norm, k_norm: [D] of qkv's dtype, or None; eps belongs to them.

    Returns:
        The rotated queries, [T, HQ, D] of qkv's dtype.
    """
    tokens, width = _floats("qkv", qkv, 2)
    n_blocks, kv_heads, block_size, dim, pages = _caches(k_cache, v_cache, kv_scales)
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
        *(k_cache, v_cache, *(kv_scales or (None, None)), q_norm, k_norm, q),
        *(tokens, cos_sin.shape[0], n_blocks, *pages),
        *(q_heads, kv_heads, dim, block_size, eps, qkv.dtype is torch.bfloat16, _CACHES.index(k_cache.dtype)),
    )
    return q


def _multiply(
    function: str,
    x: Tensor,
    shape: tuple[int, int],
    weight: tuple[Tensor | None, ...],
    bias: Tensor | None,
    dtype: torch.dtype | None,
    out: Tensor | None,
    *layout: int,
) -> Tensor:
    """Call the C function that multiplies by a weight of ``shape`` [N, K] laid out as ``weight`` and ``layout`` say."""
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
    _call(
        function, x, *weight, bias, out, tokens, n, k, *layout, *(each is torch.bfloat16 for each in (x.dtype, dtype))
    )
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


def _caches(
    k_cache: Tensor, v_cache: Tensor, kv_scales: tuple[Tensor, Tensor] | None
) -> tuple[int, int, int, int, tuple[int, int]]:
    """n_blocks, HKV, block_size and D of a pair of caches; the bytes from a block's head to the next, and of scales."""
    dtype = k_cache.dtype
    _require(k_cache.dim() == 4 and dtype in _CACHES, f"k_cache must be 4-dimensional numbers, not {dtype}")
    n_blocks, kv_heads, block_size, width = k_cache.shape
    _require(block_size % 2 == 0 or dtype is torch.float32, f"block_size must be even, not {block_size}")
    _require((dtype in DTYPES) == (kv_scales is None), f"a cache of {dtype} must have scales if it is no floats")
    page, scale_page = _heads_apart(k_cache.shape, dtype, k_cache=k_cache, v_cache=v_cache), 0
    if kv_scales is not None:
        k_scales, v_scales = kv_scales
        scale_page = _heads_apart(k_cache.shape[:3], torch.float32, k_scales=k_scales, v_scales=v_scales)
    dim = 2 * width if dtype is torch.uint8 else width
    return n_blocks, kv_heads, block_size, dim, (page, scale_page)


def _heads_apart(shape: torch.Size, dtype: torch.dtype, **tensors: Tensor) -> int:
    """Bytes from a block's head to the next, of tensors [n_blocks, HKV, ...] that lie alike, the rest contiguous."""
    page = next(iter(tensors.values())).stride(1)
    inner = torch.empty(shape[2:], device="meta").stride()
    for name, tensor in tensors.items():
        if (
            tensor.shape != shape
            or tensor.dtype is not dtype
            or not tensor.is_cpu
            or page < math.prod(shape[2:])
            or tensor.stride() != (shape[1] * page, page, *inner)
        ):
            raise ValueError(
                f"{name} must be a CPU tensor of {dtype} {tuple(shape)} with contiguous blocks of a head, not "
                f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
    return page * dtype.itemsize


def _check_heads(q_heads: int, kv_heads: int, dim: int) -> None:
    _require(kv_heads > 0 and q_heads > 0 and q_heads % kv_heads == 0, f"{q_heads} query over {kv_heads} KV heads")
    _require(dim % 8 == 0 and 0 < dim <= MAX_HEAD_DIM, f"head_dim must be a multiple of 8 up to 256, not {dim}")
