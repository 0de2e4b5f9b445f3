"""One decoder for the Llama family, driven by `ModelConfig`; it knows nothing of storage formats, batching or devices.

The forward pass is packed: the tokens of all rows lie one after the other; only attention knows which belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchrun.models.config import ModelConfig
from batchrun.models.kv_cache import KVCache
from batchrun.models.rope import rope_table
from batchrun.ops.attention_batch import AttentionBatch, LastTokens
from batchrun.weights.formats import Weight
from batchrun.weights.load import Loader


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
    """A decoder-only transformer. ``ops`` is a module of `batchrun.ops`."""

    def __init__(self, config: ModelConfig, loader: Loader, ops: ModuleType, max_model_len: int) -> None:
        self.config = config
        self.ops = ops
        self.windows = sorted(set(config.windows), key=lambda window: (window is not None, window or 0))
        self.cos_sin = rope_table(config.rope, config.head_dim, max_model_len).to(loader.device)
        table = (config.vocab_size, config.hidden_size)
        self.embedding = loader.take_table("model.embed_tokens.weight", shape=table, keep_rows=True)
        self.layers = [self._layer(loader, index) for index in range(config.n_layers)]
        self.norm = loader.take("model.norm.weight")
        self.head = Linear(
            self.embedding if config.tie_embeddings else loader.take_table("lm_head.weight", shape=table)
        )
        loader.finish()

    def _layer(self, loader: Loader, index: int) -> Layer:
        config = self.config
        prefix = f"model.layers.{index}."

        def linear(bias: bool, *names: str) -> Linear:
            stems = [f"{prefix}{name}" for name in names]
            weight = loader.take_linear(*(f"{stem}.weight" for stem in stems))
            return Linear(weight, torch.cat([loader.take(f"{stem}.bias") for stem in stems]) if bias else None)

        attention, mlp = "self_attn.", "mlp."
        window = config.windows[index]
        return Layer(
            input_norm=loader.take(f"{prefix}input_layernorm.weight"),
            qkv=linear(config.qkv_bias, *(f"{attention}{name}_proj" for name in "qkv")),
            q_norm=loader.take(f"{prefix}{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=loader.take(f"{prefix}{attention}k_norm.weight") if config.qk_norm else None,
            output=linear(config.output_bias, f"{attention}o_proj"),
            mlp_norm=loader.take(f"{prefix}post_attention_layernorm.weight"),
            gate_up=linear(config.mlp_bias, f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=linear(config.mlp_bias, f"{mlp}down_proj"),
            window=window,
            group=self.windows.index(window),
        )

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
        keys, values = cache.keys, cache.values
        qkv = ops.linear(hidden, layer.qkv.weight, layer.qkv.bias)
        q = ops.rope_kv_write(
            qkv, self.cos_sin, positions, batch.slots, keys, values, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps
        )
        if wanted is not None:
            q, residual, batch = q[wanted.tokens], residual[wanted.tokens], wanted.batch
        attended = ops.attention(q, keys, values, batch, scale=self.config.head_dim**-0.5, window=layer.window)
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
