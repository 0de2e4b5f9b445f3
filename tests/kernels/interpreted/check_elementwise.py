"""Norms, activations, rotary embedding and KV write under Triton's interpreter, against float64 and the torch twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from batchrun.kernels import gpu
from batchrun.models.kv_cache import KVCache
from batchrun.ops import kv_numbers, torch_ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # one step of a number's last place


def near(actual: Tensor, expected: Tensor, steps: float = 1.0, size: Tensor | float = 0.0) -> None:
    """Within ``steps`` of the last place of actual's dtype, or of a float32 as large as ``size``."""
    step, wide = ULP[actual.dtype], expected.double()
    allowed = steps * (step * (wide.abs() + 2**-6) + ULP[torch.float32] * size)
    error = (actual.double() - wide).abs()
    assert (error <= allowed).all(), f"off by {error.max():.3g}, {(error / allowed).max():.3g} times what is allowed"


def norm64(x: Tensor, weight: Tensor, offset: float = 0.0, eps: float = 1e-5) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "width"), [(3, 1), (2, 72), (3, 512), (2, 4100)])
def test_norms(dtype: torch.dtype, offset: float, rows: int, width: int) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(rows, width).to(dtype), (3 * torch.randn(rows, width)).to(dtype)
    weight = torch.randn(width).to(dtype)
    normed = gpu.rms_norm(x, weight, 1e-5, offset=offset)
    near(normed, norm64(x, weight, offset), 2)
    near(normed, torch_ops.rms_norm(x, weight, 1e-5, offset=offset), 2)
    total, added = x + residual, residual.clone()
    normed = gpu.add_rms_norm(x, added, weight, 1e-5, offset=offset)
    near(added, total)
    near(normed, norm64(added, weight, offset), 2)


def test_no_rows() -> None:
    assert gpu.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert gpu.silu_mul(torch.empty(0, 8)).shape == (0, 4)


def test_a_norm_keeps_not_a_number_to_its_row() -> None:
    x = torch.randn(2, 40)
    x[0, 3] = torch.nan
    out = gpu.rms_norm(x, torch.ones(40), 1e-5)
    assert out[0].isnan().all()
    near(out[1], norm64(x[1], torch.ones(40)), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 1), (2, 100), (2, 2048), (1, 2049)])
def test_activations(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(rows, 2 * width).to(dtype) * 4
    gate_up[0, 0] = -40  # where the exponential is large
    gate, up = gate_up.double().chunk(2, dim=-1)
    size = (gate * up).abs()
    near(gpu.silu_mul(gate_up), functional.silu(gate) * up, 2, size)
    near(gpu.silu_mul(gate_up), torch_ops.silu_mul(gate_up), 2, size)
    near(gpu.gelu_mul(gate_up), functional.gelu(gate, approximate="tanh") * up, 2, size)
    near(gpu.gelu_mul(gate_up), torch_ops.gelu_mul(gate_up), 2, size)


def test_rows_of_wider_tensors() -> None:
    wide = torch.randn(3, 2, 100)
    x, residual, weight = wide[:, 0, :72], wide[:, 1, 3:75], torch.randn(72)
    near(gpu.rms_norm(x, weight, 1e-5), norm64(x, weight), 2)
    near(gpu.silu_mul(x), torch_ops.silu_mul(x), 2)
    before, total = wide.clone(), x + residual
    near(gpu.add_rms_norm(x, residual, weight, 1e-5), norm64(total, weight), 2)
    assert torch.equal(residual, total)
    before[:, 1, 3:75] = total
    assert torch.equal(wide, before)


def caches(n_blocks: int, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    memory = torch.full((n_blocks, kv_heads, 2, block_size, dim), 7.0, dtype=dtype)
    return memory[:, :, 0], memory[:, :, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "block_size"),
    [(32, 8, 128, 32), (9, 3, 64, 16), (7, 1, 80, 18), (2, 2, 256, 128), (1, 1, 2, 16)],
)
def test_rope_kv_write(
    dtype: torch.dtype, normed: bool, q_heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    torch.manual_seed(dim)
    positions = torch.tensor([0, 1, 131_071, 40_000, 5])
    slots = torch.tensor([block_size, 3 * block_size - 1, 0, 4 * block_size + 3, 3])  # 0 and 3: padding, in block 0
    angles = torch.arange(131_072)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    qkv = torch.randn(5, (q_heads + 2 * kv_heads) * dim).to(dtype)
    norms = {"q_norm": torch.randn(dim).to(dtype), "k_norm": torch.randn(dim).to(dtype), "eps": 1e-6} if normed else {}
    k_cache, v_cache = caches(5, kv_heads, block_size, dim, dtype)
    q = gpu.rope_kv_write(qkv, cos_sin, positions, slots, k_cache, v_cache, **norms)

    k_expected, v_expected = caches(5, kv_heads, block_size, dim, dtype)
    twin = torch_ops.rope_kv_write(qkv, cos_sin, positions, slots, k_expected, v_expected, **norms)
    assert torch.equal(v_cache, v_expected)
    untouched = torch.ones(5, block_size, dtype=torch.bool)
    untouched.view(-1)[slots] = False
    assert (k_cache.transpose(1, 2)[untouched] == 7).all()

    heads = qkv.double().view(5, -1, dim)[:, : q_heads + kv_heads]
    if normed:
        q_normed, k_normed = (norm64(heads, norms[name], eps=1e-6) for name in ("q_norm", "k_norm"))
        heads = torch.cat([q_normed[:, :q_heads], k_normed[:, q_heads:]], dim=1)
    cos, sin = cos_sin.double()[positions][:, None].chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    size = heads.abs().amax(-1, keepdim=True)  # a sum of two products is as exact as these are
    written, expected = (x[slots // block_size, :, slots % block_size] for x in (k_cache, k_expected))
    for actual, reference in (
        (torch.cat([q, written], dim=1), rotated),
        (torch.cat([q, written], dim=1), torch.cat([twin, expected], dim=1).double()),
    ):
        assert ((actual.double() - reference).abs() <= (4 if normed else 2) * ULP[dtype] * size).all()


def test_rope_kv_write_into_a_cache_of_another_dtype() -> None:
    qkv, cos_sin = torch.randn(3, 5 * 16)[:, :64], torch.randn(9, 16)
    positions, slots = torch.tensor([0, 4, 8], dtype=torch.int32), torch.tensor([16, 17, 40])
    k_cache, v_cache = caches(3, 1, 16, 16, torch.float16)
    k_expected, v_expected = caches(3, 1, 16, 16, torch.float16)
    q = gpu.rope_kv_write(qkv, cos_sin, positions, slots, k_cache, v_cache)
    near(q, torch_ops.rope_kv_write(qkv, cos_sin, positions, slots, k_expected, v_expected), 4)
    near(k_cache, k_expected.double(), 2)
    assert torch.equal(v_cache, v_expected)


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(8, 128, 32), (3, 64, 16), (1, 80, 18), (2, 20, 2)])
def test_fewer_bits_are_those_of_the_twin(
    kept: torch.dtype, dtype: torch.dtype, kv_heads: int, dim: int, block_size: int
) -> None:
    """To the bit, of the keys and values that a plain cache would hold: halves between two numbers, too."""
    torch.manual_seed(dim)
    largest, heads = kv_numbers.LARGEST[kept], 2 + 2 * kv_heads
    qkv = torch.randn(8, heads, dim)
    halves = torch.randint(0, int(2 * largest), (heads, dim)) / 2
    qkv[0] = halves if kept == torch.uint8 else halves * torch.randn(heads, dim).sign()
    qkv[0, :, 0] = largest  # with which the scale is 1, or with the lowest bits of that
    qkv[0, :, 1] = 0
    qkv[1], qkv[2], qkv[3], qkv[4] = qkv[1] * 1e-3, qkv[2] + 3, qkv[3] - 3, 0
    qkv[5, 2:, 7], qkv[6, 2:, 3] = torch.inf, torch.nan
    qkv = qkv.flatten(1).to(dtype)
    angles = torch.arange(40)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions, slots = torch.tensor([0, 3, 1, 39, 7, 8, 9, 4]), block_size + torch.randperm(4 * block_size)[:8]
    slots[7] = 0  # padding

    def written(kept_as: torch.dtype) -> KVCache:
        cache = KVCache.zeros(5, kv_heads, block_size, dim, kept_as, torch.device("cpu"))
        for part in (cache.keys, cache.values, *(cache.scales or ())):
            (part if part.dtype.itemsize > 1 else part.view(torch.uint8)).fill_(7)
        gpu.rope_kv_write(qkv, cos_sin, positions, slots, cache.keys, cache.values, kv_scales=cache.scales)
        return cache

    plain, found = written(dtype), written(kept)
    assert found.scales is not None
    blocks, offsets = slots // block_size, slots % block_size
    untouched = torch.ones(5, block_size, dtype=torch.bool)
    untouched[blocks, offsets] = False
    for vectors, numbers, scales in zip(
        (plain.keys, plain.values), (found.keys, found.values), found.scales, strict=True
    ):
        codes, expected = kv_numbers.quantize(vectors[blocks, :, offsets], kept)
        finite = expected.isfinite()
        assert finite.sum() == 6 * kv_heads
        assert torch.equal(scales[blocks, :, offsets][finite], expected[finite])
        assert scales[blocks, :, offsets][~finite].isnan().all()
        assert torch.equal(numbers.view(torch.uint8)[blocks, :, offsets][finite], codes.view(torch.uint8)[finite])
        assert (scales.transpose(1, 2)[untouched] == 7).all()
        assert (numbers.view(torch.uint8).transpose(1, 2)[untouched] == 7).all()


def test_caches_that_do_not_fit_are_refused() -> None:
    qkv, cos_sin = torch.randn(1, 6 * 16), torch.randn(9, 16)
    at = torch.zeros(1, dtype=torch.int64)
    cache = KVCache.zeros(2, 2, 4, 16, torch.int8, torch.device("cpu"))
    assert cache.scales is not None
    k_scales, v_scales = cache.scales
    plain, other = torch.zeros(2, 2, 2, 4, 16).unbind(2), torch.zeros(2, 2, 2, 4, 8).unbind(2)
    for caches, scales, message in (
        ((cache.keys, cache.values), None, "int8 without scales"),
        (plain, cache.scales, "float32 with scales"),
        ((cache.keys, cache.values), (k_scales, v_scales.contiguous()), "scales with strides"),
        ((cache.keys, cache.values), (k_scales.half(), v_scales), "float16 scales"),
        ((cache.keys.contiguous(), cache.values), cache.scales, "caches .* with strides"),
        (other, None, "caches .* with strides"),
    ):
        with pytest.raises(ValueError, match=message):
            gpu.rope_kv_write(qkv, cos_sin, at, at, *caches, kv_scales=scales)
    odd = KVCache.zeros(2, 2, 4, 18, torch.int8, torch.device("cpu"))
    with pytest.raises(ValueError, match="heads of 18 elements in int8"):
        gpu.rope_kv_write(qkv, torch.randn(9, 18), at, at, odd.keys, odd.values, kv_scales=odd.scales)
