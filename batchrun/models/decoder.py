"""One decoder for the Llama family, driven by `ModelConfig`; it knows nothing of storage formats, batching or devices.

The forward pass is packed: the tokens of all rows lie one after the other; only attention knows which belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchrun.job import KVCacheDType
from batchrun.models import input_sizes
from batchrun.models.config import ModelConfig
from batchrun.models.key_bias import check_key_bias
from batchrun.models.kv_cache import DTYPES, KVCache, is_quantized
from batchrun.models.rope import rope_table
from batchrun.ops.attention_batch import AttentionBatch, LastTokens
from batchrun.weights.formats import Weight
from batchrun.weights.load import Loader

Importance = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight ``[out, in]`` and an optional bias ``[out]``."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; q, k and v are one matrix, and so are gate and up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None
    group: int  # KV group: the place of its window among the decoder's


class Decoder:
    """A decoder-only transformer. ``ops`` is a module of `batchrun.ops`.

    Raises JobError where its keys cannot be kept as ``kv_cache_dtype``.
    """

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        ops: ModuleType,
        max_model_len: int,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> None:
        self.config = config
        self.ops = ops
        self.kv_cache_dtype = kv_cache_dtype
        self.windows = sorted(set(config.windows), key=lambda window: (window is not None, window or 0))
        self.cos_sin = rope_table(config.rope, config.head_dim, max_model_len).to(loader.device)
        table = (config.vocab_size, config.hidden_size)
        self.embedding = loader.take_table("model.embed_tokens.weight", shape=table, keep_rows=True)
        self.layers = [self._layer(loader, index) for index in range(config.n_layers)]
        self.norm = loader.take("model.norm.weight", shape=(config.hidden_size,))
        self.head = Linear(
            self.embedding if config.tie_embeddings else loader.take_table("lm_head.weight", shape=table)
        )
        loader.finish()

    def _layer(self, loader: Loader, index: int) -> Layer:
        config = self.config
        prefix = f"model.layers.{index}."
        hidden, wide, head = config.hidden_size, config.intermediate_size, config.head_dim

        def linear(out: int, into: int, bias: bool, *names: str, importance: Importance | None = None) -> Linear:
            stems = [f"{prefix}{name}" for name in names]
            weight = loader.take_linear(*(f"{stem}.weight" for stem in stems), shape=(out, into), importance=importance)
            return Linear(weight, loader.take(*(f"{stem}.bias" for stem in stems), shape=(out,)) if bias else None)

        def norm(name: str, width: int) -> Tensor:
            return loader.take(f"{prefix}{name}.weight", shape=(width,))

        attention, mlp = "self_attn.", "mlp."
        window = config.windows[index]
        input_norm = norm("input_layernorm", hidden)
        heads = (config.n_heads + 2 * config.n_kv_heads) * head
        qkv = linear(heads, hidden, config.qkv_bias, *(f"{attention}{name}_proj" for name in "qkv"))
        self._check_keys(qkv, input_norm, index)
        attended = partial(input_sizes.of_output, qkv.weight, input_norm, config.n_heads, config.n_kv_heads)
        mlp_norm = norm("post_attention_layernorm", hidden)
        gate_up = linear(2 * wide, hidden, config.mlp_bias, f"{mlp}gate_proj", f"{mlp}up_proj")
        gated = partial(input_sizes.of_down, gate_up.weight, mlp_norm)
        return Layer(
            input_norm=input_norm,
            qkv=qkv,
            q_norm=norm(f"{attention}q_norm", head) if config.qk_norm else None,
            k_norm=norm(f"{attention}k_norm", head) if config.qk_norm else None,
            output=linear(hidden, config.n_heads * head, config.output_bias, f"{attention}o_proj", importance=attended),
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=linear(hidden, wide, config.mlp_bias, f"{mlp}down_proj", importance=gated),
            window=window,
            group=self.windows.index(window),
        )

    def _check_keys(self, qkv: Linear, input_norm: Tensor, layer: int) -> None:
        """Raises JobError where the layer's keys cannot be kept as ``kv_cache_dtype``."""
        config = self.config
        if qkv.bias is not None and is_quantized(self.kv_cache_dtype):
            keys = torch.arange(config.n_kv_heads * config.head_dim, device=qkv.bias.device)
            keys += config.n_heads * config.head_dim
            check_key_bias(
                *(qkv.weight, qkv.bias, input_norm, keys, config.n_kv_heads), layer=layer, kept_as=self.kv_cache_dtype
            )

    def new_cache(self, n_blocks: int, block_size: int, device: torch.device) -> KVCache:
        """Memory for the keys and values of one layer."""
        config, dtype = self.config, DTYPES.get(self.kv_cache_dtype, self.norm.dtype)
        return KVCache.zeros(n_blocks, config.n_kv_heads, block_size, config.head_dim, dtype, device)

    def plan_attention(self, *batch: Any, **shape: Any) -> Any:
        """The backend's ``attention_plan`` for the heads of this model."""
        config = self.config
        group = config.n_heads // config.n_kv_heads
        return self.ops.attention_plan(*batch, **shape, group=group, head_dim=config.head_dim, dtype=self.norm.dtype)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionBatch],
        caches: Sequence[KVCache],
        wanted: LastTokens | None = None,
    ) -> Tensor:
        """Hidden states, after the final norm, of packed tokens ``ids`` [T] at ``positions`` [T]: [T, H].

        Writes the tokens' keys and values into ``caches``, one a layer; ``groups`` stand in the order of `windows`.
        With ``wanted``, returns the hidden states of those tokens alone, [S, H]: of the others the last layer computes
        keys and values, for nothing else of it is ever read.
        """
        residual = self.embedding.rows(ids)
        hidden: Tensor = self.ops.rms_norm(residual, self.layers[0].input_norm, self.config.norm_eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, next_norm, cache in zip(self.layers, following, caches, strict=True):
            kept = wanted if layer is self.layers[-1] else None
            hidden = self.run_layer(layer, next_norm, hidden, residual, positions, groups[layer.group], cache, kept)
        return hidden

    def run_layer(
        self,
        layer: Layer,
        next_norm: Tensor,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        wanted: LastTokens | None = None,
    ) -> Tensor:
        """One layer, from its normed input ``hidden`` [T, H] to that of the next, whose norm is ``next_norm``.

        Writes the layer's own ``cache``. Adds to ``residual`` [T, H] in place, or to a copy of the tokens ``wanted``.
        """
        ops, eps = self.ops, self.config.norm_eps
        keys, values, scales = cache.keys, cache.values, cache.scales
        norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "eps": eps}
        qkv = ops.linear(hidden, layer.qkv.weight, layer.qkv.bias)
        q = ops.rope_kv_write(qkv, self.cos_sin, positions, batch.slots, keys, values, kv_scales=scales, **norms)
        if wanted is not None:
            q, residual, batch = q[wanted.tokens], residual[wanted.tokens], wanted.batch
        scale = self.config.head_dim**-0.5
        attended = ops.attention(q, keys, values, batch, scale=scale, kv_scales=scales, window=layer.window)
        hidden = ops.linear(attended.flatten(1), layer.output.weight, layer.output.bias)
        hidden = ops.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
        gated = ops.silu_mul(ops.linear(hidden, layer.gate_up.weight, layer.gate_up.bias))
        hidden = ops.linear(gated, layer.down.weight, layer.down.bias)
        normed: Tensor = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return normed

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [N, V] float32 of hidden states [N, H]; ``out``: where to write them."""
        logits: Tensor = self.ops.linear(hidden, self.head.weight, self.head.bias, torch.float32, out)
        return logits
