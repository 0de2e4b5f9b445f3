"""The operations on a CPU with native kernels: each row's bits are its own, but for those of `linear`."""

from batchrun.kernels.cpu import add_rms_norm, attention, rms_norm, rope_kv_write, silu_mul
from batchrun.ops.torch_ops import linear

__all__ = ["add_rms_norm", "attention", "linear", "rms_norm", "rope_kv_write", "silu_mul"]
