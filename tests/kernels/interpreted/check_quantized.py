"""Products of quantized weights under Triton's interpreter, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun.bench.gpu.references import round_rows
from batchrun.kernels import gpu
from batchrun.kernels.gpu import eight_bits, parts, planes
from batchrun.ops import fixed_triton_ops, fp8_triton, grouped_triton, triton_ops
from batchrun.weights.formats import Fp8, Grouped, Int4, Int8, Weight

OPS = [triton_ops, fixed_triton_ops]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # what a result of a dtype loses


@triton.jit
def _nearest(scaled, dtype: tl.constexpr):
    """The interpreter's rounding to e4m3 loses carries and what is below normal numbers: so it gets them rounded."""
    if dtype == tl.int8:
        return scaled.to(dtype)
    bits = scaled.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (scaled + 24576.0) - 24576.0  # to multiples of 2^-9
    return tl.where(tl.abs(scaled) < 0.015625, small, rounded).to(dtype)


def pretend(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Kernels think that they run on such a device: from 9.0 on it reads by descriptors, from 8.9 on it takes FP8."""
    for module in (planes, eight_bits):
        patch.setattr(module, "capability", lambda device: capability)


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["8.0", "9.0"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    pretend(monkeypatch, request.param)
    major_minor: tuple[int, int] = request.param
    return major_minor


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(eight_bits.quantize_kernel.fn.__globals__, "_code", _nearest)


def halves(x: Tensor) -> Tensor:
    """What float16 holds of them, as scales in checkpoints are."""
    return x.half().float()


def grouped(
    kind: type[Grouped], n: int, k: int, groups: int, *, minimum: bool = True, order: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Grouped:  # fmt: skip
    scales = halves(torch.rand(n, groups) * 0.01 + 1e-3)
    minimums = halves(0.05 * torch.randn(n, groups)) if minimum else None
    permutation = torch.randperm(k) if order else None
    if kind is Int8:
        return Int8(torch.randint(-128, 128, (n, k), dtype=torch.int8), scales, minimums, dtype, permutation)
    return Int4.of(torch.randint(0, 16, (n, k)), scales, minimums, dtype, permutation)


def fp8(n: int, k: int, *, blocks: bool, dtype: torch.dtype = torch.float32) -> Fp8:
    shape = (-(-n // 128), -(-k // 128)) if blocks else (n, 1)
    stored = (20 * torch.randn(n, k)).clamp(-448, 448)
    stored[0] *= 1e-3  # numbers below the normal ones
    return Fp8(stored.to(torch.float8_e4m3fn), halves(torch.rand(shape) * 0.01 + 1e-3), dtype)


def wide(weight: Weight) -> Tensor:
    """The weight before it was packed, float64."""
    return weight._plain(slice(None)).double()


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    size = expected.abs() + expected.square().mean().sqrt()
    error = ((found.double() - expected).abs() / size).max()
    assert error <= tolerance, f"off by {error:.3g}, {tolerance:.3g} is allowed"


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the kernels multiply instead of ``x`` where weights have 8 bits of that dtype."""
    codes, scales, _ = gpu.quantize_rows(x, dtype)
    return codes.double() * scales.double()[:, None]


SHAPES = [  # n, k, groups, rows
    (70, 320, 10, 3),  # groups of 32, a part of a tile at the end
    (33, 100, 1, 17),  # one group, no whole planes
    (33, 112, 1, 17),
    (40, 384, 6, 1),
    (130, 256, 2, 33),
    (20, 96, 2, 2),  # groups that no tile is a multiple of
    (20, 96, 6, 2),
    (129, 1152, 9, 5),  # sums in parts
]


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [Int4, Int8])
@pytest.mark.parametrize("minimum", [False, True])
def test_groups(shape: tuple[int, ...], kind: type[Grouped], minimum: bool) -> None:
    n, k, groups, rows = shape
    torch.manual_seed(n + k)
    weight = grouped(kind, n, k, groups, minimum=minimum)
    expected, x, bias = wide(weight), torch.randn(rows, k).bfloat16(), torch.randn(n)
    weight.pack(grouped_triton.pack)
    if weight.packed is None:
        x = rounded(x, torch.int8)
    found = triton_ops.linear(x.float() if weight.packed is None else x, weight, bias, torch.float32)
    near(found, x.double() @ expected.T + bias.double(), 4e-6)


@pytest.mark.parametrize("n", [20, 150])
def test_integers_of_one_group(n: int, capability: tuple[int, int]) -> None:
    torch.manual_seed(n)
    weight, x = grouped(Int8, n, 1040, 1), torch.randn(3, 1040)
    expected = rounded(x, torch.int8) @ wide(weight).T
    weight.pack(grouped_triton.pack)
    assert weight.packed is None
    near(triton_ops.linear(x, weight), expected, 4e-6)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS, ids=["triton", "fixed_triton"])
@pytest.mark.parametrize("result", [None, torch.float32], ids=str)
def test_dtypes_bias_and_order(dtype: torch.dtype, ops: ModuleType, result: torch.dtype | None) -> None:
    torch.manual_seed(3)
    for kind, groups in ((Int4, 3), (Int8, 3), (Int8, 1)):
        weight = grouped(kind, 45, 96, groups, order=True, dtype=dtype)
        expected, x = wide(weight), torch.randn(7, 96).to(dtype)
        bias, out = torch.randn(45).to(dtype), torch.empty(7, 45, dtype=result or dtype)
        weight.pack(ops.pack)
        met = rounded(x, torch.int8) if groups == 1 else x.double()
        tolerance = max(2 * ROUNDED[result or dtype], 4e-6)
        near(ops.linear(x, weight, bias, result), met @ expected.T + bias.double(), tolerance)
        assert ops.linear(x, weight, None, result, out) is out
        near(out, met @ expected.T, tolerance)


@pytest.mark.parametrize("ops", OPS, ids=["triton", "fixed_triton"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "k", "rows"), [(70, 320, 3), (33, 100, 17), (140, 1024, 2), (200, 144, 40)])
def test_fp8(ops: ModuleType, blocks: bool, n: int, k: int, rows: int, capability: tuple[int, int]) -> None:
    torch.manual_seed(n)
    weight, x, bias = fp8(n, k, blocks=blocks), torch.randn(rows, k).bfloat16(), torch.randn(n)
    expected = wide(weight)
    weight.pack(ops.pack)
    assert (weight.packed is None) == (capability >= (8, 9) and k % 16 == 0)
    met = x.double() if weight.packed is not None else rounded(x, torch.float8_e4m3fn)
    near(ops.linear(x, weight, bias, torch.float32), met @ expected.T + bias.double(), 4e-6)


def test_many_rows_meet_what_a_library_multiplies(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    weight, x = fp8(48, 64, blocks=False, dtype=torch.bfloat16), torch.randn(70, 64).bfloat16()
    bias, expected = torch.randn(48).bfloat16(), wide(weight)
    weight.pack(fp8_triton.pack)
    met = x.double() if weight.packed is not None else rounded(x, torch.float8_e4m3fn)
    monkeypatch.setattr(fp8_triton, "DENSE_ROWS", 70)
    monkeypatch.setattr(fp8_triton, "multiply", None)
    near(triton_ops.linear(x, weight, bias), met @ expected.T + bias.double(), 2.0**-6)
    monkeypatch.setattr(grouped_triton, "DENSE_ROWS", 70)
    monkeypatch.setattr(grouped_triton, "multiply", None)
    weight4 = grouped(Int4, 48, 64, 2, order=True, dtype=torch.bfloat16)
    expected = wide(weight4)
    weight4.pack(grouped_triton.pack)
    near(triton_ops.linear(x, weight4), x.double() @ expected.T, 2.0**-6)


def test_packed_weights_can_be_unpacked() -> None:
    torch.manual_seed(6)
    ids = torch.tensor([[3, 0, 69], [5, 5, 1]])
    for weight in (
        *(grouped(Int4, 70, 160, groups, order=order) for groups, order in ((5, False), (1, True), (10, True))),
        grouped(Int8, 70, 160, 10, minimum=False),
        *(fp8(70, 160, blocks=blocks) for blocks in (False, True)),
        grouped(Int4, 70, 24, 2),  # groups of 12, which are no planes
    ):
        expected = wide(weight)
        weight.pack(triton_ops.pack, keep_rows=True)
        assert (weight._stored is None) == isinstance(weight.packed, gpu.Planes)
        near(weight.dequantize(), expected, 1e-6)
        near(weight.rows(ids), expected[ids], 1e-6)
        assert weight.rows(ids[:0]).shape == (0, 3, expected.shape[1])


def test_scales_of_any_size_keep_what_float16_can() -> None:
    torch.manual_seed(7)
    scales = torch.exp(4 * torch.randn(64, 4)) * 10.0 ** torch.randint(-12, 12, (64, 1))
    minimums = torch.randn(64, 4) * scales * 10
    scales[3], minimums[3] = 1e-30, 0.7  # rows of equal numbers
    scales[4], minimums[4] = 0.0, 0.0
    weight = Int4.of(torch.randint(0, 16, (64, 128)), scales, minimums, torch.float32)
    expected = wide(weight)
    weight.pack(grouped_triton.pack)
    error = (weight.dequantize().double() - expected).abs().amax(1)
    assert (error <= expected.abs().amax(1) * 2.0**-10).all()


def test_codes_of_floats_that_are_no_numbers_count_as_the_next_larger() -> None:
    codes = torch.tensor([0x7F, 0xFF, 0x7E, 0xFE], dtype=torch.uint8).repeat(2, 4)
    scales = torch.tensor([[0.5], [torch.nan]])
    found = gpu.pack_planes(codes, scales, None, None, code="fp8", group=16, dtype=torch.float32).to_dense()
    assert found[0, :4].tolist() == [240, -240, 224, -224]
    assert found[1].isnan().all()  # as what is rounded on loading has it


def test_activations_are_rounded_to_integers_as_elsewhere() -> None:
    torch.manual_seed(8)
    x = torch.randn(5, 300) * torch.tensor([1.0, 1e-3, 1e4, 0.0, 1.0])[:, None]
    x[4, 7] = torch.nan
    codes, scales, sums = gpu.quantize_rows(x, torch.int8)
    expected, their_scales = round_rows(x, 127)
    assert (codes[:4].float() - expected[:4]).abs().max() <= 1
    assert (codes[:4].float() != expected[:4]).float().mean() < 0.01  # next to the middle of two
    torch.testing.assert_close(scales[:4], their_scales[:4])
    torch.testing.assert_close(sums[:4], (expected * their_scales[:, None]).sum(1)[:4], rtol=1e-3, atol=1e-2)
    assert scales[4].isnan()
    assert sums[4].isnan()


def test_activations_are_rounded_to_floats() -> None:
    torch.manual_seed(8)
    x = torch.randn(4, 300) * torch.tensor([1.0, 1e-3, 1e4, 0.0])[:, None]
    codes, scales, _ = gpu.quantize_rows(x, torch.float8_e4m3fn)
    assert codes.float().abs().amax(1)[:3].eq(448).all()
    assert torch.equal(codes.float(), (x * (1 / scales[:, None])).to(codes.dtype).float())


@pytest.mark.parametrize("ops", OPS, ids=["triton", "fixed_triton"])
def test_not_a_number_keeps_to_its_row(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    pretend(monkeypatch, (9, 0))
    for weight in (grouped(Int4, 20, 64, 2), grouped(Int8, 20, 64, 1), fp8(20, 64, blocks=False)):
        weight.pack(ops.pack)
        x = torch.randn(3, 64)
        x[1, 5] = torch.inf
        out = ops.linear(x, weight)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all()


def test_a_rows_bits_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    pretend(monkeypatch, (9, 0))
    for weight in (
        *(grouped(Int4, 20, 768, 6), grouped(Int8, 20, 384, 1)),
        *(fp8(20, 384, blocks=blocks) for blocks in (False, True)),
        grouped(Int4, 20, 24, 2, dtype=torch.bfloat16),
    ):
        weight.pack(fixed_triton_ops.pack)
        x = torch.randn(70, weight.shape[1]).bfloat16()
        together = fixed_triton_ops.linear(x, weight)
        for row in (0, 69):
            assert torch.equal(fixed_triton_ops.linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.usefixtures("capability")
def test_no_rows_and_rows_of_wider_tensors() -> None:
    torch.manual_seed(11)
    weight = grouped(Int4, 20, 64, 2)
    expected, x = wide(weight), torch.randn(4, 3, 70).bfloat16()[:, 1, 3:67]
    weight.pack(triton_ops.pack)
    assert triton_ops.linear(x[:0], weight).shape == (0, 20)
    near(triton_ops.linear(x, weight, dtype=torch.float32), x.double() @ expected.T, 4e-6)


def test_sums_are_divided_where_there_are_few_tiles() -> None:
    assert parts.count_parts(64, 64) == 8
    assert parts.count_parts(600, 64) == 1
    assert parts.count_parts(1, 9) == 2
    assert parts.count_parts(1, 3) == 1
