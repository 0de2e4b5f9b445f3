"""The engine's operations as Triton kernels, for NVIDIA GPUs; `batchrun.ops.torch_ops` says what each one computes.

No function waits for the device: what it launches depends on shapes and host integers alone, so a step can be captured
in a CUDA graph. Activations are float32, bfloat16 or float16. Of activations and logits only the rows need be
contiguous, of caches the blocks of a head, of all else the whole tensor.
"""

from .activation import gelu_mul, silu_mul
from .attention import attention
from .eight_bits import multiplies_fp8, multiply_bytes, quantize_rows, takes_bytes
from .logprobs import token_logprobs
from .norm import add_rms_norm, rms_norm
from .planes import Planes, can_pack, multiply_planes, pack_planes
from .rope import rope_kv_write
from .sampling import argmax, draw

__all__ = [
    "Planes",
    "add_rms_norm",
    "argmax",
    "attention",
    "can_pack",
    "draw",
    "gelu_mul",
    "multiplies_fp8",
    "multiply_bytes",
    "multiply_planes",
    "pack_planes",
    "quantize_rows",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "takes_bytes",
    "token_logprobs",
]
