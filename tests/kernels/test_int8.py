"""Products in 8 bits: against float64, native against plain torch to the bit, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from batchrun.kernels import cpu
from batchrun.ops import int8_torch
from batchrun.weights.formats import Int8, round_rows
from tests.kernels.test_cpu import DTYPES, ROUNDING, quick
from tests.marks import needs_kernels

MAX_DEPTH = (2**31 - 1) // 127**2  # products of the largest magnitudes that int32 holds


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_int8(n: int, k: int) -> Int8:
    return Int8(torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) + 0.1, torch.float32)


def native(x: Tensor, weight: Int8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return cpu.linear_int8(x, cpu.Int8Panels(weight.values, weight.scales), bias, dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    """To the bit, any NaN equal to any."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@given(
    st.integers(0, 5), st.integers(1, 100), st.sampled_from([1e-38, 1e-30, 1e-3, 1.0, 1e38]),
    st.sampled_from([127, 11_008, 32_767]), st.integers(0, 99),
)  # fmt: skip
@example(rows=1, width=1, size=1e-45, largest=127, seed=0)
@quick
def test_rounding_is_to_the_nearest_and_uses_the_whole_range(
    rows: int, width: int, size: float, largest: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, width).clamp(-3, 3) * size
    integers, scales = round_rows(x, largest)
    assert scales.isfinite().all()
    assert torch.equal(integers, integers.round())
    assert ((integers.double() * scales.double()[:, None] - x).abs() <= scales.double()[:, None] * 0.51).all()
    assert ((integers.abs().amax(dim=1) == largest) | (x.abs().amax(dim=1) < 1e-30)).all()


def test_a_row_that_is_not_finite_becomes_nan() -> None:
    x = torch.ones(4, 5)
    x[0, 1], x[1, 4], x[2, 0] = torch.nan, torch.inf, -torch.inf
    values, scales = round_rows(x, 127)
    assert (values[:3] == 0).all()
    assert (values[3] == 127).all()
    assert (values * scales[:, None]).isnan().all(dim=1).tolist() == [True, True, True, False]


@needs_kernels
@given(
    st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 40) | st.sampled_from([192, 200, 900]),
    st.integers(1, 150), st.integers(1, 40) | st.sampled_from([511, 512, 513, 1100, 2049]), st.booleans(),
    st.integers(0, 9),
)  # fmt: skip
@quick
def test_linear_equals_float64_and_the_twin_and_rows_stand_alone(
    dtype: torch.dtype, out_dtype: torch.dtype, rows: int, n: int, k: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, k).to(dtype) * 10 ** torch.randn(rows, 1).to(dtype), random_int8(n, k)
    bias = torch.randn(n).to(dtype) if biased else None
    out = native(x, weight, bias, out_dtype)
    integers, scales = round_rows(x, int8_torch.largest_integer(k))
    assert (integers.double().abs().sum(dim=1) * 127 < 2**31).all()
    product = (integers.double() @ weight.values.double().T) * scales.double()[:, None] * weight.scales.double()
    expected = product + (bias.double() if bias is not None else 0)
    size = product.abs() + expected.abs()  # what rounding is relative to
    assert ((out.double() - expected).abs() <= size * 2e-7 + expected.abs() * ROUNDING[out_dtype]).all()
    assert equal(out, int8_torch.linear(x, weight, bias, out_dtype, None))
    for begin, end in ((0, 1), (rows // 2, rows), (rows // 3, rows // 3 + 7)):
        assert equal(native(x[begin:end].contiguous(), weight, bias, out_dtype), out[begin:end])
    order = torch.randperm(rows)
    assert equal(native(x[order], weight, bias, out_dtype), out[order])


@needs_kernels
def test_bits_do_not_depend_on_threads(restore_threads: None) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1000, 300), random_int8(500, 300)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(native(x, weight))
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernels
@given(st.integers(1, 30), st.integers(1, 70), st.integers(2, 900), st.integers(0, 99))
@quick
def test_the_error_of_rounding_is_bounded(rows: int, n: int, k: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, plain = torch.randn(rows, k), torch.randn(n, k)
    weight = Int8.quantize(plain)
    half_x = round_rows(x, int8_torch.largest_integer(k))[1].double() / 2  # what rounding may move
    half_w = weight.scales.double() / 2
    bound = half_x[:, None] * plain.double().abs().sum(1) + half_w * x.double().abs().sum(1, keepdim=True)
    bound += k * half_x[:, None] * half_w
    exact = x.double() @ plain.double().T
    error = (native(x, weight).double() - exact).abs()
    assert (error <= bound * 1.001).all()
    assert error.norm() <= 0.02 * (rows * n * k) ** 0.5  # the exact norm's expectation


@needs_kernels
@pytest.mark.parametrize("k", [1, 65_536, MAX_DEPTH])
def test_the_largest_sums_are_exact(k: int) -> None:
    ones = torch.ones(2, k)
    ones[1] = -1
    weight = Int8(torch.full((3, k), 127, dtype=torch.int8), torch.tensor([1.0, 0.5, 2.0]), torch.float32)
    weight.values[1] = -127
    expected = int8_torch.linear(ones, weight, None, torch.float32, None)
    assert equal(native(ones, weight), expected)
    sums = torch.tensor([127.0, -63.5, 254.0]) * k
    torch.testing.assert_close(expected, torch.stack([sums, -sums]))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_rows_and_zeros_are_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = random_int8(40, 77), torch.randn(40).to(dtype)
    clean = torch.randn(10, 77).to(dtype)
    x = clean.clone()
    x[2], x[3] = 0, 1e-38
    x[4, 76], x[5, 0], x[9, 30] = torch.nan, torch.inf, -torch.inf
    x[7] = torch.full((77,), 0x7FC01234, dtype=torch.int32).view(torch.float32).to(dtype)  # NaN with a payload
    out = native(x, weight, bias)
    assert equal(out, int8_torch.linear(x, weight, bias, dtype, None))
    assert out[[4, 5, 7, 9]].isnan().all()
    assert torch.equal(out[[2, 3]], bias.expand(2, -1))
    kept = [0, 1, 6, 8]
    assert torch.equal(out[kept], native(clean, weight, bias)[kept])
    broken = Int8.quantize(torch.cat([torch.full((1, 77), torch.nan), torch.ones(1, 77)]))
    assert native(clean, broken).isnan().any(dim=0).tolist() == [True, False]


@needs_kernels
def test_panels_give_the_weight_back() -> None:
    for n, k in ((1, 1), (40, 77), (16, 8), (33, 600)):
        weight = random_int8(n, k)
        assert torch.equal(cpu.Int8Panels(weight.values, weight.scales).to_dense(), weight.dequantize())


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    values, scales = torch.ones(8, 16, dtype=torch.int8), torch.ones(8)
    for wrong in ((values.int(), scales), (values, scales[:7]), (values, scales.double()), (values[0], scales)):
        with pytest.raises(ValueError, match="must be"):
            cpu.Int8Panels(*wrong)
    with pytest.raises(ValueError, match=f"{MAX_DEPTH + 1} columns; 1 to {MAX_DEPTH} can be summed exactly"):
        cpu.Int8Panels(torch.ones(1, MAX_DEPTH + 1, dtype=torch.int8), torch.ones(1))
    panels = cpu.Int8Panels(values, scales)
    out = torch.full((2, 8), 7.0)
    x = torch.ones(2, 16)
    for wrong_x in (x[:, :8].contiguous(), x.half(), x.T.contiguous().T):
        with pytest.raises(ValueError, match=r"the weight|must be"):
            cpu.linear_int8(wrong_x, panels, out=out)
    for wrong_bias in (torch.ones(9), scales.bfloat16()):
        with pytest.raises(ValueError, match="bias must be"):
            cpu.linear_int8(x, panels, wrong_bias, out=out)
    with pytest.raises(ValueError, match="must be"):
        cpu.linear_int8(x, panels, dtype=torch.bfloat16, out=out)
    assert (out == 7).all()
