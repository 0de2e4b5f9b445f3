"""Tables of rotary position embeddings, scaled for extended contexts as each model was trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchrun.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> Tensor:
    """``[length, head_dim]`` float32: cosines, then sines, of head_dim / 2 frequencies at every position."""
    frequencies, magnitude = _frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1)


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each frequency, and the factor on cosines and sines."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return plain / float(rope.parameters["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    p = rope.parameters
    factor, low, high = float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"])
    turns = float(p["original_max_position_embeddings"]) * plain / (2 * math.pi)  # over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023), with transformers' names and defaults."""
    p = rope.parameters
    factor, original = float(p["factor"]), float(p["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(float(p.get("beta_fast") or 32))), 0)
    high = min(math.ceil(dimension(float(p.get("beta_slow") or 1))), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    scaled = plain / factor * ramp + plain * (1 - ramp)
    return scaled, float(p.get("attention_factor") or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0))
