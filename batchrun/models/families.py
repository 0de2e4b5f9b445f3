"""Maps a Hugging Face ``config.json`` to a `ModelConfig`, one short function per architecture. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchrun.errors import JobError
from batchrun.models.config import ModelConfig, RopeConfig

Config = Mapping[str, Any]

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_ROPE_PARAMETERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def model_config(config: Config) -> ModelConfig:
    """The decoder's view of ``config``; JobError names an architecture or feature that is not supported."""
    names = list(config.get("architectures") or [])
    for name in names:
        if name in FAMILIES:
            try:
                return FAMILIES[name](config)
            except KeyError as error:
                raise JobError(f"model config: {error.args[0]} is missing") from None
            except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
                raise JobError(f"model config: not understood: {error}") from None
    known = ", ".join(sorted(FAMILIES))
    raise JobError(f"model architecture {', '.join(names) or '(none named)'} is not supported; supported are: {known}")


def _common(config: Config, **family: Any) -> ModelConfig:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise JobError(f"model config: hidden_act {activation!r} is not supported; silu is")
    n_layers, n_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    return ModelConfig(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // n_heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        **{"windows": (None,) * n_layers, **family},
    )


def _rope(config: Config) -> RopeConfig:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    given = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in ROPE_KINDS:
        raise JobError(f"model config: rope type {kind!r} is not supported; supported are: {', '.join(ROPE_KINDS)}")
    theta = float(given.pop("rope_theta", config.get("rope_theta", 10_000.0)))
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for parameter in _ROPE_PARAMETERS.get(kind, ()):
        given[parameter] = float(given[parameter])
    if given.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise JobError("model config: a partial rotary embedding is not supported")
    return RopeConfig(theta, kind, given)


def _llama(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return _common(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def _mistral(config: Config) -> ModelConfig:
    window = config.get("sliding_window")
    return _common(config, windows=(int(window) if window else None,) * int(config["num_hidden_layers"]))


def _qwen2(config: Config) -> ModelConfig:
    return _common(config, qkv_bias=True, windows=_qwen_windows(config))


def _qwen3(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return _common(config, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=_qwen_windows(config))


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    n_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if not config.get("use_sliding_window") or not window:
        return (None,) * n_layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    first = int(config.get("max_window_layers", 0))
    return tuple(int(window) if layer >= first else None for layer in range(n_layers))


FAMILIES: dict[str, Callable[[Config], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
