"""What norms, activations, rotary embedding and KV write become on GPUs: no spills, and 128 bits at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from batchrun.kernels.gpu import activation, norm, rope
from tests.kernels.aot import ARCHS, compiled, problems

VECTORS = ("LDG.E.128", "STG.E.128")
pytestmark = pytest.mark.parametrize("arch", ARCHS)


@pytest.mark.parametrize(("dtype", "width"), [("*bf16", 4096), ("*fp32", 8192)])
def test_rms_norm(arch: int, dtype: str, width: int) -> None:
    types = {"x": dtype, "weight": dtype, "out": dtype, "width": "i32:16", "eps": "fp32"}
    constants = {"residual": None, "OFFSET": 1.0, "BLOCK": width}
    result = compiled(norm.norm_kernel, types, constants, arch=arch, num_warps=norm.warps(width))
    assert problems(result, instruction=VECTORS, min_warps_per_sm=32) == []


@pytest.mark.parametrize("width", [1024, 16_384])
def test_add_rms_norm(arch: int, width: int) -> None:
    types = dict.fromkeys(("x", "residual", "weight", "out"), "*bf16") | {"width": "i32:16", "eps": "fp32"}
    constants = {"OFFSET": 0.0, "BLOCK": width}
    result = compiled(norm.norm_kernel, types, constants, arch=arch, num_warps=norm.warps(width))
    assert problems(result, instruction=VECTORS, min_warps_per_sm=16) == []
    assert result.count("LDG.E.128") == 3 * result.count("STG.E.128") // 2  # one of each tensor, no more


@pytest.mark.parametrize(("function", "dtype"), [("silu", "*bf16"), ("gelu", "*fp16")])
def test_activations(arch: int, function: str, dtype: str) -> None:
    types = {"gate_up": dtype, "out": dtype, "width": "i32:16"}
    constants = {"ACTIVATION": function, "BLOCK": activation.BLOCK}
    result = compiled(activation.gated_kernel, types, constants, arch=arch, num_warps=activation.WARPS)
    assert problems(result, instruction=VECTORS, min_warps_per_sm=48) == []


@pytest.mark.parametrize(("dim", "normed"), [(128, True), (64, False), (80, False)])
def test_rope_kv_write(arch: int, dim: int, normed: bool) -> None:
    strides = ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride")
    types = (
        dict.fromkeys(("qkv", "q", "k_cache", "v_cache", "q_norm", "k_norm"), "*bf16")
        | {"cos_sin": "*fp32", "positions": "*i64", "slots": "*i64", "eps": "fp32"}
        | dict.fromkeys(strides, "i32:16")
        | dict.fromkeys(("q_parts", "q_heads", "kv_heads"), "i32")
    )
    heads, half = rope.tile(32, dim)
    constants = {"BLOCK_SIZE": 32, "DIM": dim, "HEADS": heads, "HALF": half}
    if not normed:
        constants |= {"q_norm": None, "k_norm": None}
    result = compiled(rope.rope_kernel, types, constants, arch=arch, num_warps=rope.WARPS)
    assert problems(result, instruction=VECTORS, min_warps_per_sm=36) == []
