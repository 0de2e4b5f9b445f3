"""Products of integers in groups: against float64, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from batchrun.bench.gpu.references import round_rows
from batchrun.kernels import cpu
from batchrun.weights.formats import Grouped, Int4, Int8
from tests.kernels.test_cpu import DTYPES, ROUNDING, quick
from tests.marks import needs_kernels


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_weight(
    bits: int, n: int, groups: int, group: int, *, minimums: bool = True, ordered: bool = False
) -> Grouped:
    k = groups * group
    integers = torch.randint(-128, 128, (n, k)) if bits == 8 else torch.randint(0, 16, (n, k))
    scales = torch.rand(n, groups) + 0.1
    least = torch.randn(n, groups) if minimums else None
    order = torch.randperm(k) if ordered else None
    if bits == 8:
        return Int8(integers.to(torch.int8), scales, least, torch.float32, order)
    return Int4.of(integers, scales, least, torch.float32, order)


def panels(weight: Grouped) -> cpu.GroupedPanels:
    return cpu.GroupedPanels(weight.stored, weight.scales, weight.minimums, weight.order, bits=weight.bits)


def native(x: Tensor, weight: Grouped, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return cpu.linear_grouped(x, panels(weight), bias, dtype)


def rounded(x: Tensor, weight: Grouped) -> tuple[Tensor, Tensor]:
    """Activations in the order of the weight's columns as the integers [T, G, K / G] and scales that they become."""
    largest = min(32767, (2**31 - 1) // ((128 if weight.bits == 8 else 15) * weight.group))
    x = x if weight.order is None else x[:, weight.order]
    integers, scales = round_rows(x.unflatten(1, (-1, weight.group)), largest)
    assert (integers.abs().sum(-1) * (128 if weight.bits == 8 else 15) < 2**31).all()
    return integers.double(), scales.double()


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
    st.sampled_from([4, 8]), st.sampled_from(DTYPES), st.sampled_from(DTYPES),
    st.integers(0, 40) | st.sampled_from([192, 200, 900]), st.integers(1, 150),
    st.sampled_from([(1, 1), (1, 7), (3, 2), (2, 16), (5, 32), (9, 64), (2, 128), (1, 600), (1, 1100)]),
    st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9),
)  # fmt: skip
@quick
def test_linear_equals_float64_and_rows_stand_alone(
    bits: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    rows: int,
    n: int,
    shape: tuple[int, int],
    biased: bool,
    minimums: bool,
    ordered: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    groups, group = shape
    group += bits == 4 and group % 2
    weight = random_weight(bits, n, groups, group, minimums=minimums, ordered=ordered)
    x = torch.randn(rows, groups * group).to(dtype) * 10 ** torch.randn(rows, 1).to(dtype)
    bias = torch.randn(n).to(dtype) if biased else None
    out = native(x, weight, bias, out_dtype)
    integers, scales = rounded(x, weight)
    wide = weight.integers().double().unflatten(1, (groups, -1)) * weight.scales.double()[..., None]
    wide += 0 if weight.minimums is None else weight.minimums.double()[..., None]
    numbers = (integers * scales[..., None]).flatten(1)
    expected = numbers @ wide.flatten(1).T + (0 if bias is None else bias.double())
    size = numbers.abs() @ wide.flatten(1).abs().T + expected.abs()  # what rounding is relative to
    assert ((out.double() - expected).abs() <= size * 2e-6 + expected.abs() * ROUNDING[out_dtype]).all()
    for begin, end in ((0, 1), (rows // 2, rows), (rows // 3, rows // 3 + 7)):
        assert equal(native(x[begin:end].contiguous(), weight, bias, out_dtype), out[begin:end])
    order = torch.randperm(rows)
    assert equal(native(x[order], weight, bias, out_dtype), out[order])


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_bits_do_not_depend_on_threads(bits: int, restore_threads: None) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1000, 320), random_weight(bits, 500, 10, 32)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(native(x, weight))
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, 1024])
def test_rounding_the_activations_costs_little(bits: int, group: int) -> None:
    """Far less than bfloat16, which loses 2e-3 of each."""
    torch.manual_seed(0)
    x, weight = torch.randn(50, 1024), random_weight(bits, 70, 1024 // group, group, minimums=False)
    exact = x.double() @ weight.dequantize().double().T
    assert (native(x, weight).double() - exact).norm() <= 1e-4 * exact.norm()


@needs_kernels
@pytest.mark.parametrize(("bits", "k"), [(8, 1), (4, 2), (8, 4096), (4, 4096), (8, cpu.MAX_GROUP), (4, cpu.MAX_GROUP)])
def test_the_largest_sums_are_exact(bits: int, k: int) -> None:
    ones = torch.ones(2, k)
    ones[1] = -1
    scales = torch.tensor([[1.0], [0.5], [2.0]])
    largest = -128 if bits == 8 else 15
    integers = torch.full((3, k), largest)
    weight: Grouped
    if bits == 8:
        weight = Int8(integers.to(torch.int8), scales, None, torch.float32)
    else:
        weight = Int4.of(integers, scales, None, torch.float32)
    sums = largest * k * scales[:, 0]
    torch.testing.assert_close(native(ones, weight), torch.stack([sums, -sums]))


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_rows_and_zeros_are_exact(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = random_weight(bits, 40, 3, 26), torch.randn(40).to(dtype)
    clean = torch.randn(10, 78).to(dtype)
    x = clean.clone()
    x[2], x[3] = 0, 1e-38
    x[4, 77], x[5, 0], x[9, 30] = torch.nan, torch.inf, -torch.inf
    x[7] = torch.full((78,), 0x7FC01234, dtype=torch.int32).view(torch.float32).to(dtype)  # NaN with a payload
    out = native(x, weight, bias)
    assert out[[4, 5, 7, 9]].isnan().all()
    assert torch.equal(out[[2, 3]], bias.expand(2, -1))
    kept = [0, 1, 6, 8]
    assert torch.equal(out[kept], native(clean, weight, bias)[kept])


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_panels_give_the_weight_and_its_rows_back(bits: int) -> None:
    for n, groups, group in ((1, 1, 2), (40, 7, 12), (16, 1, 8), (97, 5, 32)):
        weight = random_weight(bits, n, groups, group, ordered=n == 40)
        made, ids = panels(weight), torch.randint(0, n, (3, 4))
        assert torch.equal(made.to_dense(), weight.dequantize())
        assert torch.equal(made.rows(ids), weight.rows(ids))
        assert made.group == group


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    values, scales = torch.ones(8, 16, dtype=torch.int8), torch.ones(8, 1)
    for wrong in ((values.int(), scales), (values, scales[:7]), (values, scales.double()), (values[0], scales)):
        with pytest.raises(ValueError, match="must be"):
            cpu.GroupedPanels(*wrong, None, bits=8)
    with pytest.raises(ValueError, match="minimums must be"):
        cpu.GroupedPanels(values, scales, scales[:7], bits=8)
    with pytest.raises(ValueError, match="order must be"):
        cpu.GroupedPanels(values, scales, None, torch.arange(15), bits=8)
    with pytest.raises(ValueError, match="16 columns make no 3 groups"):
        cpu.GroupedPanels(values, torch.ones(8, 3), None, bits=8)
    with pytest.raises(ValueError, match="groups of 1 columns are odd"):
        cpu.GroupedPanels(values, torch.ones(8, 16), None, bits=8)
    with pytest.raises(ValueError, match="4 or 8 bits, not 2"):
        cpu.GroupedPanels(values, scales, None, bits=2)
    made = cpu.GroupedPanels(values, scales, None, bits=8)
    out = torch.full((2, 8), 7.0)
    x = torch.ones(2, 16)
    for wrong_x in (x[:, :8].contiguous(), x.half(), x.T.contiguous().T):
        with pytest.raises(ValueError, match=r"the weight|must be"):
            cpu.linear_grouped(wrong_x, made, out=out)
    for wrong_bias in (torch.ones(9), scales[:, 0].bfloat16()):
        with pytest.raises(ValueError, match="bias must be"):
            cpu.linear_grouped(x, made, wrong_bias, out=out)
    with pytest.raises(ValueError, match="must be"):
        cpu.linear_grouped(x, made, dtype=torch.bfloat16, out=out)
    assert (out == 7).all()
