"""Llamas of the usual shapes with random weights, made where they are used, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch

from batchrun.engine.engine import Engine
from batchrun.model_files import ModelFiles
from batchrun.models.config import ModelConfig
from batchrun.models.families import model_config
from batchrun.tokenization.tokenizer import Tokenizer
from batchrun.weights.source import WeightSource

_STD = 0.02

Config = Mapping[str, Any]


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other: Any) -> dict[str, Any]:
    """The ``config.json`` of a Llama 3."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **other,
    }


SHAPES: Mapping[str, Config] = {
    "8B": llama(4096, 14336, 32, 32, 8),
    "1B": llama(2048, 8192, 16, 32, 8, tie_word_embeddings=True),
}


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor of no file: normal numbers, or ones where it is the weight of a norm."""

    shape: tuple[int, ...]
    path: Path = Path("random weights")
    dtype: torch.dtype = torch.float32

    def quantized(self, dtype: torch.dtype) -> None:
        return None

    def copy_into(self, out: torch.Tensor) -> None:
        if len(self.shape) == 1:
            out.fill_(1)
        else:
            out.normal_(std=_STD)


def random_weights(config: ModelConfig) -> WeightSource:
    """All tensors of a Llama without biases."""
    hidden, width = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.n_layers):
        tensors |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return WeightSource({name: RandomTensor(shape) for name, shape in tensors.items()})


def random_engine(config: Config, seed: int, **options: Any) -> Engine:
    """An engine for a model of this configuration; ``options`` are the engine's."""
    files = ModelFiles(
        reference="random weights",
        revision="random",
        format="safetensors",
        config=dict(config),
        generation={},
        tokenizer=Path("tokenizer.json"),
        tokenizer_config={},
        chat_templates={},
        weights=(),
    )
    torch.manual_seed(seed)
    weights = random_weights(model_config(config))
    return Engine(files, tokenizer=_tokenizer(int(config["vocab_size"])), weights=weights, **options)


def _tokenizer(size: int) -> Tokenizer:
    """One whose tokens are numbered words."""
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0")  # noqa: S106
    return Tokenizer(tokenizers.Tokenizer(words), special_tokens={}, chat_templates={})
