"""Native kernels, with oneDNN's `linear` where the processor multiplies bfloat16: its rows may differ with M."""

from batchrun.kernels.cpu import add_rms_norm, argmax, attention, rms_norm, rope_kv_write, silu_mul
from batchrun.ops.torch_ops import linear, pack

__all__ = ["add_rms_norm", "argmax", "attention", "linear", "pack", "rms_norm", "rope_kv_write", "silu_mul"]
