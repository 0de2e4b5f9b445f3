"""Random inputs of the operations, on any device: for what is checked and what is measured alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.transfer import Transfer
from batchrun.job import KVCacheDType
from batchrun.models.config import RopeConfig
from batchrun.models.kv_cache import DTYPES as KV_DTYPES
from batchrun.models.kv_cache import KVCache, is_quantized
from batchrun.models.rope import rope_table
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.ops.kv_numbers import quantize
from batchrun.weights.formats import Fp8, Int4, Int8, Weight

_STALE = 30.0  # how much larger than the others are numbers in the cache that no query may see
_TAIL = 3  # padding tokens of `Inputs.rope_kv_write`


class Heads(NamedTuple):
    """Query heads, KV heads, and elements of each."""

    query: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.query // self.kv


LLAMA_8B = Heads(32, 8, 128)


class Row(NamedTuple):
    """A sequence of a batch: its last ``queries`` tokens of ``length`` attend."""

    queries: int
    length: int


@dataclass(frozen=True)
class Call:
    """An operation with its arguments, and the memory among them that it writes in place.

    ``original``: of a weight among them, what it was before it was packed.
    """

    operation: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    written: tuple[Tensor, ...] = ()
    original: Weight | None = None

    def __call__(self, ops: ModuleType) -> Any:
        return getattr(ops, self.operation)(*self.arguments, **self.options)

    def outputs(self, ops: ModuleType) -> tuple[Tensor, ...]:
        """Its results, then what the written memory became; the memory itself is as it was before."""
        before = [memory.clone() for memory in self.written]
        result = self(ops)
        results = result if isinstance(result, tuple) else (result,)
        after = [memory.clone() for memory in self.written]
        for memory, old in zip(self.written, before, strict=True):
            memory.copy_(old)
        return (*results, *after)


class Inputs:
    """Makes calls for ``ops``. The same seed makes the same numbers on the same device."""

    def __init__(self, ops: ModuleType, device: torch.device, seed: int) -> None:
        self._ops = ops
        self.device = device
        self._random = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self.device).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self._random, device=self.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._random, device=self.device) * (high - low) + low

    def order(self, count: int) -> Tensor:
        """The numbers below ``count``, shuffled: int64."""
        return torch.randperm(count, generator=self._random, device=self.device)

    # ---- norms and activations

    def rms_norm(self, tokens: int, hidden: int, dtype: torch.dtype, **options: Any) -> Call:
        return Call("rms_norm", (self.normal(tokens, hidden, dtype=dtype), self._weight(hidden, dtype), 1e-5), options)

    def add_rms_norm(self, tokens: int, hidden: int, dtype: torch.dtype, **options: Any) -> Call:
        x, residual = (self.normal(tokens, hidden, dtype=dtype) for _ in range(2))
        return Call("add_rms_norm", (x, residual, self._weight(hidden, dtype), 1e-5), options, (residual,))

    def activation(self, operation: str, tokens: int, width: int, dtype: torch.dtype) -> Call:
        """``silu_mul`` or ``gelu_mul``."""
        return Call(operation, (3 * self.normal(tokens, 2 * width, dtype=dtype),))

    def _weight(self, size: int, dtype: torch.dtype) -> Tensor:
        return (1 + 0.2 * self.normal(size)).to(dtype)

    # ---- quantized linear layers

    def linear(self, kind: str, rows: int, out: int, inner: int, dtype: torch.dtype, *, bias: bool = False) -> Call:
        """With a weight [out, inner] that is one of `WEIGHTS`."""
        weight = WEIGHTS[kind](self, out, inner, dtype)
        original = weight.to(self.device)
        weight.pack(self._ops.pack)
        added = self.normal(out, dtype=dtype) if bias else None
        return Call("linear", (self.normal(rows, inner, dtype=dtype), weight, added), original=original)

    def int4(self, out: int, inner: int, dtype: torch.dtype, *, group: int) -> Int4:
        groups = max(1, inner // group)
        scales = self.uniform(1e-3, 1e-2, out, groups)
        return Int4.of(self.integers(16, out, inner), scales, self.uniform(-9, -6, out, groups) * scales, dtype)

    def int8(self, out: int, inner: int, dtype: torch.dtype, *, group: int | None = None) -> Int8:
        """``group`` None: one for each row."""
        scales = self.uniform(1e-4, 1e-3, out, 1 if group is None else max(1, inner // group))
        return Int8((self.integers(255, out, inner) - 127).to(torch.int8), scales, None, dtype)

    def fp8(self, out: int, inner: int, dtype: torch.dtype, *, blocks: bool = False) -> Fp8:
        shape = (-(-out // Fp8.BLOCK), -(-inner // Fp8.BLOCK)) if blocks else (out, 1)
        limits = torch.finfo(torch.float8_e4m3fn)
        codes = (100 * self.normal(out, inner)).clamp(limits.min, limits.max).to(torch.float8_e4m3fn)
        return Fp8(codes, self.uniform(1e-4, 1e-3, *shape), dtype)

    # ---- RoPE and attention

    def memory(self, n_blocks: int, heads: Heads, block_size: int, dtype: torch.dtype) -> Tensor:
        """Keys and values of a layer, those of a head and block side by side (see `cache_of`)."""
        return self.normal(n_blocks, heads.kv, 2, block_size, heads.dim, dtype=dtype)

    def rope_kv_write(
        self,
        tokens: int,
        heads: Heads,
        dtype: torch.dtype,
        *,
        block_size: int = 32,
        norms: bool,
        padding: bool,
        kept: KVCacheDType = "auto",
    ) -> Call:
        """``norms``: with the weights of queries' and keys' own norms; ``padding``: the last tokens go to block 0."""
        n_blocks = -(-tokens // block_size) + 2
        cache = cache_of(self.memory(n_blocks, heads, block_size, dtype), kept)
        slots = block_size + self.order((n_blocks - 1) * block_size)[:tokens]
        if padding:
            slots[-_TAIL:] = 0
        longest = 4096
        options: dict[str, Any] = {"eps": 1e-6}
        if norms:
            options |= {"q_norm": self._weight(heads.dim, dtype), "k_norm": self._weight(heads.dim, dtype)}
        arguments = (
            self.normal(tokens, (heads.query + 2 * heads.kv) * heads.dim, dtype=dtype),
            rope_table(RopeConfig(500_000.0), heads.dim, longest).to(self.device),
            self.integers(longest, tokens),
            slots,
            cache.keys,
            cache.values,
        )
        options["kv_scales"] = cache.scales
        return Call("rope_kv_write", arguments, options, (cache.keys, cache.values, *(cache.scales or ())))

    def attention(
        self,
        rows: Sequence[Row],
        heads: Heads,
        dtype: torch.dtype,
        *,
        block_size: int = 32,
        shared: int = 0,
        window: int | None = None,
        softcap: float | None = None,
        kept: KVCacheDType = "auto",
    ) -> Call:
        """``shared``: whole blocks at the beginning that all rows have in common."""
        table, n_blocks = self._block_table(rows, block_size, shared)
        memory = self.memory(n_blocks, heads, block_size, dtype)
        memory[0] *= _STALE
        for blocks, row in zip(table, rows, strict=True):
            if row.length % block_size:
                memory[blocks[row.length // block_size], :, :, row.length % block_size :] *= _STALE
        cu_q = np.concatenate(([0], np.cumsum([row.queries for row in rows]))).astype(np.int32)
        kv_len = np.array([row.length for row in rows], np.int32)
        shape = {
            "block_size": block_size,
            "window": window,
            "group": heads.group,
            "head_dim": heads.dim,
            "dtype": dtype,
        }
        batch = self._batch(cu_q, kv_len, table, **shape)
        queries = 2 * self.normal(int(cu_q[-1]), heads.query, heads.dim, dtype=dtype)
        cache = cache_of(memory, kept)
        options = {"scale": heads.dim**-0.5, "window": window, "softcap": softcap, "kv_scales": cache.scales}
        return Call("attention", (queries, cache.keys, cache.values, batch), options)

    def _block_table(self, rows: Sequence[Row], block_size: int, shared: int) -> tuple[np.ndarray, int]:
        """Block ids [B, P] int32 in no order, filled up with zeros, and how many blocks there have to be."""
        counts = [-(-row.length // block_size) for row in rows]
        n_blocks = 1 + shared + sum(count - shared for count in counts)
        ids = (1 + self.order(n_blocks - 1)).cpu().numpy().astype(np.int32)
        table = np.zeros((len(rows), max(counts)), np.int32)
        start = shared
        for blocks, count in zip(table, counts, strict=True):
            blocks[:shared] = ids[:shared]
            blocks[shared:count] = ids[start : start + count - shared]
            start += count - shared
        return table, n_blocks

    def _batch(self, cu_q: np.ndarray, kv_len: np.ndarray, table: np.ndarray, **shape: Any) -> AttentionBatch:
        """The batch, with the backend's plan of it. Attention writes no slots."""
        plan = self._ops.attention_plan(cu_q, kv_len, table, **shape)
        on_host = [torch.from_numpy(each) for each in (cu_q, kv_len, table, np.empty(0, np.int64))]
        return Transfer(self.device).send(AttentionBatch(on_host[0], on_host[1], on_host[2], on_host[3], plan))

    # ---- logits

    def logits(self, rows: int, vocabulary: int) -> Tensor:
        return 3 * self.normal(rows, vocabulary)

    def argmax(self, rows: int, vocabulary: int, *, hard: bool) -> Call:
        """``hard``: with equals, infinities and a row of NaN."""
        logits = self.logits(rows, vocabulary)
        if hard:
            logits = logits.round()  # many equals
            logits[0] = 0.0
            logits[1, vocabulary // 2] = torch.nan
            logits[2, vocabulary // 3 :] = torch.inf
            logits[3] = -torch.inf
        return Call("argmax", (logits,))

    def draw(self, rows: int, vocabulary: int, *, filtered: bool, nan: bool = False) -> Call:
        """``filtered``: by top_p in all rows, by top_k in most, by min_p in every third. ``nan``: in one row."""
        logits = self.logits(rows, vocabulary)
        if nan:
            logits[rows // 2, vocabulary - 1] = torch.nan
        line = torch.arange(rows, device=self.device)
        nothing = torch.zeros(rows, device=self.device)
        options = {
            "temperature": self.uniform(0.5, 1.5, rows),
            "min_p": torch.where(line % 3 == 1, 0.02, nothing) if filtered else nothing,
            "top_k": torch.where(line % 4 == 3, 0, 1 + self.integers(80, rows)) if filtered else torch.zeros_like(line),
            "top_p": self.uniform(0.5, 0.99, rows) if filtered else nothing + 1,
            "key": (self.integers(1 << 32, rows) << 32) | self.integers(1 << 32, rows),
            "position": self.integers(1 << 17, rows),
        }
        return Call("draw", (logits,), options)

    def token_logprobs(self, rows: int, vocabulary: int, count: int) -> Call:
        """Logits on a coarse grid: there are equals, and no two others that one float32 could stand for."""
        logits = (self.logits(rows, vocabulary) * 16).round() / 16
        return Call("token_logprobs", (logits, self.integers(vocabulary, rows), count))


def cache_of(vectors: Tensor, kept: KVCacheDType) -> KVCache:
    """Keys and values [n_blocks, HKV, 2, block_size, D] as they are kept."""
    n_blocks, kv_heads, _, block_size, dim = vectors.shape
    if not is_quantized(kept):
        return KVCache(vectors[:, :, 0], vectors[:, :, 1])
    cache = KVCache.zeros(n_blocks, kv_heads, block_size, dim, KV_DTYPES[kept], vectors.device)
    for x, numbers, scales in zip(vectors.unbind(2), (cache.keys, cache.values), cache.scales or (), strict=True):
        codes, found = quantize(x, numbers.dtype)
        numbers.copy_(codes)
        scales.copy_(found)
    return cache


WEIGHTS: Mapping[str, Callable[[Inputs, int, int, torch.dtype], Weight]] = {
    "W4": partial(Inputs.int4, group=128),
    "W4 in groups of 32": partial(Inputs.int4, group=32),
    "INT8": Inputs.int8,
    "INT8 in groups of 64": partial(Inputs.int8, group=64),
    "FP8": Inputs.fp8,
    "FP8 in blocks": partial(Inputs.fp8, blocks=True),
}
