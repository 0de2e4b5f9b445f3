"""What norms, activations, rotary embedding and KV write become on GPUs: no spills, and 128 bits at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from batchrun.kernels import gpu
from batchrun.models.kv_cache import KVCache
from tests.kernels.aot import ARCHS, launched, problems

VECTORS = ("LDG.E.128", "STG.E.128")
pytestmark = pytest.mark.parametrize("arch", ARCHS)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 4096), (torch.float32, 8192), (torch.bfloat16, 1152)])
def test_rms_norm(arch: int, dtype: torch.dtype, width: int) -> None:
    x, weight = empty(9, width, dtype=dtype), empty(width, dtype=dtype)
    (result,) = launched(lambda: gpu.rms_norm(x, weight, 1e-6, offset=1.0), arch=arch)
    assert problems(result, instruction=VECTORS, min_warps_per_sm=32) == []


@pytest.mark.parametrize("width", [2048, 16_384])
def test_add_rms_norm(arch: int, width: int) -> None:
    x, weight = empty(9, width), empty(width)
    (result,) = launched(lambda: gpu.add_rms_norm(x, x, weight, 1e-6), arch=arch)
    assert problems(result, instruction=VECTORS, min_warps_per_sm=16) == []
    assert result.count("LDG.E.128") == 3 * result.count("STG.E.128") // 2  # every element is read once


@pytest.mark.parametrize("function", [gpu.silu_mul, gpu.gelu_mul])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations(arch: int, function: object, dtype: torch.dtype) -> None:
    assert callable(function)
    (result,) = launched(lambda: function(empty(9, 2 * 14_336, dtype=dtype)), arch=arch)
    assert problems(result, instruction=VECTORS, min_warps_per_sm=48) == []


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "normed"), [(32, 8, 128, True), (9, 3, 64, False), (32, 8, 80, False)]
)
def test_rope_kv_write(arch: int, q_heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    memory = empty(50, kv_heads, 2, 32, dim)
    each = torch.empty(9, dtype=torch.int64, device="meta")
    norms = {"q_norm": empty(dim), "k_norm": empty(dim), "eps": 1e-6} if normed else {}
    qkv, cos_sin = empty(9, (q_heads + 2 * kv_heads) * dim), empty(4096, dim, dtype=torch.float32)
    (result,) = launched(
        lambda: gpu.rope_kv_write(qkv, cos_sin, each, each, memory[:, :, 0], memory[:, :, 1], **norms), arch=arch
    )
    assert problems(result, instruction=VECTORS, min_warps_per_sm=32) == []


@pytest.mark.parametrize(("kept", "stored"), [(torch.float8_e4m3fn, 64), (torch.int8, 64), (torch.uint8, 64)], ids=str)
def test_rope_kv_write_in_fewer_bits(arch: int, kept: torch.dtype, stored: int) -> None:
    cache = KVCache.zeros(50, 8, 32, 128, kept, torch.device("meta"))
    each = torch.empty(9, dtype=torch.int64, device="meta")
    qkv, cos_sin = empty(9, 48 * 128), empty(4096, 128, dtype=torch.float32)
    (result,) = launched(
        lambda: gpu.rope_kv_write(qkv, cos_sin, each, each, cache.keys, cache.values, kv_scales=cache.scales), arch=arch
    )
    assert problems(result, instruction=(*VECTORS, f"STG.E.{stored}"), min_warps_per_sm=32) == []
