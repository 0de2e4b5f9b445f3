"""As `onednn_ops`, with the `linear` in which a row's bits depend on that row alone."""

from batchrun.kernels.cpu import argmax, attention, draw, rope_kv_write, silu_mul
from batchrun.ops import dense_fixed, grouped_native
from batchrun.ops.attention_batch import no_plan as attention_plan
from batchrun.ops.by_weight import by_weight
from batchrun.ops.fixed_ops import gelu_mul
from batchrun.ops.logprobs import token_logprobs
from batchrun.ops.norm_native import add_rms_norm, rms_norm

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "attention_plan",
    "draw",
    "gelu_mul",
    "linear",
    "pack",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "token_logprobs",
]

pack, linear = by_weight(dense=dense_fixed, grouped=grouped_native)
