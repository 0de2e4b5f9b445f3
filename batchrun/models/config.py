"""What the decoder needs to know of a model, in one shape for every family. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and, for extended contexts, how frequencies are scaled."""

    theta: float = 10_000.0
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the kind, under their names in config.json


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with rotary positions, grouped-query attention and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: positions a query sees, itself included; None: all
