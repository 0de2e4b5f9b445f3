"""As `onednn_ops`, with the `linear` in which a row's bits depend on that row alone."""

from batchrun.kernels.cpu import add_rms_norm, argmax, attention, rms_norm, rope_kv_write, silu_mul
from batchrun.ops.fixed_ops import linear, pack

__all__ = ["add_rms_norm", "argmax", "attention", "linear", "pack", "rms_norm", "rope_kv_write", "silu_mul"]
