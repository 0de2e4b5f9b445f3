"""The engine's operations as Triton kernels, for NVIDIA GPUs; `batchrun.ops.torch_ops` says what each one computes.

No function waits for the device: what it launches depends on shapes and host integers alone, so a step can be captured
in a CUDA graph. Activations are float32, bfloat16 or float16. Of activations and logits only the rows need be
contiguous, of caches the blocks of a head, of all else the whole tensor.
"""

from .activation import gelu_mul, silu_mul
from .attention import attention
from .logprobs import token_logprobs
from .norm import add_rms_norm, rms_norm
from .rope import rope_kv_write
from .sampling import argmax, draw

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "draw",
    "gelu_mul",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "token_logprobs",
]
