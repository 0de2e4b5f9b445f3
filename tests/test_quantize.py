"""Rounding weights: how far numbers may move, what is never lost, and what calibration must gain."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchrun.quantizing.compress import Kind
from batchrun.quantizing.gptq import Curvature, round_by_products
from batchrun.weights import quantize
from batchrun.weights.formats import Fp8, Grouped, Int4, Int8, Weight
from batchrun.weights.quantize import QUANTIZERS, group_size, to_fp8, to_int4, to_int8

KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def signed(data: Tensor) -> Int4:
    return to_int4(data, group=group_size(data.shape[1], 32), signed=torch.bfloat16)


ROUNDINGS: dict[str, Callable[[Tensor], Weight]] = {**QUANTIZERS, "signed int4": signed}


def nearest(data: Tensor, group: int) -> Tensor:
    """4 bits spread evenly from the least to the largest number of each group, as plain numbers."""
    groups = data.double().unflatten(1, (-1, group))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = ((most - least) / 15).clamp(min=1e-300)
    return (((groups - least) / scale).round() * scale + least).flatten(1)


def squares(data: Tensor, other: Tensor) -> Tensor:
    """The squared error of each row, float64."""
    return (data.double() - other.double()).square().sum(dim=1)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Matrices of an even number of columns: normal, heavy-tailed, far from zero, of few values, and of mixed sizes."""
    shape = draw(st.integers(1, 5)), 2 * draw(st.integers(1, 100))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    data = torch.randn(shape, generator=generator)
    kind = draw(st.sampled_from(["normal", "tails", "shifted", "few", "mixed"]))
    if kind == "tails":
        data = data**5
    elif kind == "shifted":
        data = data + 50
    elif kind == "few":
        data = data.round()
    elif kind == "mixed":
        data = data * 10 ** (8 * torch.rand(shape, generator=generator) - 4)
    return data * 10.0 ** draw(st.integers(-6, 6))


@settings(max_examples=150, deadline=None)
@given(weights())
def test_int4_is_never_worse_than_the_nearest_of_evenly_spread_integers(data: Tensor) -> None:
    found = squares(data, to_int4(data).dequantize())
    rounding = 1e-11 * data.double().square().sum(dim=1)  # of float32 arithmetic
    assert (found <= 1.0001 * squares(data, nearest(data, group_size(data.shape[1]))) + rounding).all()


@settings(max_examples=100, deadline=None)
@given(weights())
def test_errors_are_bounded(data: Tensor) -> None:
    for eight in (to_int8(data), to_int8(data, signed=torch.float32)):
        spread = eight.scales.repeat_interleave(eight.group, dim=1)
        assert ((data - eight.dequantize()).abs() <= 0.5001 * spread + 3e-7 * data.abs().amax()).all()
    floats = to_fp8(data)
    assert ((data - floats.dequantize()).abs() <= data.abs() / 15.99 + floats.scales * 2.0**-10).all()
    four = signed(data)
    assert four.minimums is not None
    assert torch.equal(four.scales, four.scales.bfloat16().float())
    assert torch.equal(four.minimums, -8 * four.scales)
    largest = data.unflatten(1, (-1, four.group)).abs().amax(dim=-1)
    assert (
        squares(data, four.dequantize()) <= (largest**2 * four.group / 200).sum(dim=1)
    ).all()  # evenly: / 192 to / 768


def test_int4_takes_back_much_of_what_the_nearest_integers_lose() -> None:
    data = torch.randn(400, 256, generator=torch.Generator().manual_seed(1))
    before = squares(data, nearest(data, 64)).sum()
    assert squares(data, to_int4(data).dequantize()).sum() < 0.86 * before
    assert squares(data, signed(data).dequantize()).sum() < 0.86 * before


def test_int4_by_importance_lowers_what_counts() -> None:
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(200, 128, generator=generator)
    importance = torch.rand(128, generator=generator) ** 4 + 1e-3
    plain, weighted = (to_int4(data, importance=each).dequantize() for each in (None, importance))
    assert ((weighted - data) ** 2 * importance).sum() < 0.86 * ((plain - data) ** 2 * importance).sum()
    once, thrice = (to_int4(data, importance=torch.full((128,), each)).dequantize() for each in (1.0, 3.0))
    assert ((once - thrice).abs() > 1e-5).float().mean() < 0.01


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("value", [0.0, -2.7, 3e-8, 1e30])
def test_rows_of_one_number(kind: str, value: float) -> None:
    data = torch.full((3, 128), value)
    data[1] = torch.linspace(-1, 1, 128)
    found = ROUNDINGS[kind](data).dequantize()
    loss = {"int4": 1e-6, "int8": 1e-6, "fp8": 1e-6, "signed int4": 4e-3}[kind]  # a bfloat16 scale
    assert ((found - data)[[0, 2]].abs() <= loss * abs(value)).all()


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_to_be_seen(kind: str, bad: float) -> None:
    data = torch.randn(4, 128)
    data[1, 70], data[3, :] = bad, bad
    weight = ROUNDINGS[kind](data)
    found = weight.dequantize()
    group = weight.group if isinstance(weight, Grouped) else 128
    assert found[1].isnan().sum() == group
    assert found[1, 70].isnan()
    assert found[3].isnan().all()
    assert found[[0, 2]].isfinite().all()


def alone(data: Tensor, kind: Kind, dtype: torch.dtype) -> Int8 | Int4 | Fp8:
    """As `batchrun quantize` rounds without calibration, with scales of ``dtype``."""
    if kind == "fp8":
        return to_fp8(data, scale_dtype=dtype)
    return {"int8": to_int8, "int4": to_int4}[kind](data, group=32, signed=dtype)


def odd_sizes(dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows [4, 128] of ``dtype``, as float32, whose scales are near the ends of what it can hold."""
    limits, generator = torch.finfo(dtype), torch.Generator().manual_seed(4)
    normal = torch.randn(4, 128, generator=generator)
    zero_group = normal.clone()
    zero_group[:, 32:64] = 0
    tiny_group = normal.clone()
    tiny_group[:, 32:64] *= limits.smallest_normal
    large = normal / normal.abs().amax() * min(limits.max / 16, 1e25)
    found = {
        "zeros": torch.zeros(4, 128),
        "zero group": zero_group,
        "tiny": normal * limits.smallest_normal,
        "tinier": normal * limits.smallest_normal * limits.eps,
        "tiny group": tiny_group,
        "large": large,
        "normal": normal,
    }
    return {name: data.to(dtype).float() for name, data in found.items()}


def assert_scales_are_whole(weight: Int8 | Int4 | Fp8, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert torch.equal(weight.scales, weight.scales.to(dtype).float())
    assert (weight.scales.abs() >= limits.smallest_normal).all()
    assert (weight.scales.abs() <= limits.max).all()
    assert weight.stored.float().isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_numbers_that_their_dtype_holds(kind: Kind, dtype: torch.dtype) -> None:
    share = {"int8": 0.009, "int4": 0.25, "fp8": 0.07}[kind]  # of a row's largest number
    for name, data in odd_sizes(dtype).items():
        weight = alone(data, kind, dtype)
        assert_scales_are_whole(weight, dtype)
        errors = (weight.dequantize() - data).abs()
        least = max(torch.finfo(dtype).smallest_normal, 1e-30)  # of scales
        assert (errors <= share * data.abs().amax(dim=1, keepdim=True) + 0.5001 * least).all(), name
        assert not weight.dequantize()[data.eq(0).all(dim=1)].any()


def test_signed_scales_keep_their_sign_where_they_are_held_to_the_least() -> None:
    data = torch.zeros(2, 32)
    data[0, 0], data[1, 0] = 1e-5, -1e-5
    scales = to_int4(data, group=32, signed=torch.float16).scales[:, 0]
    least = torch.finfo(torch.float16).smallest_normal
    assert scales.tolist() == [-least, least]


@pytest.mark.parametrize("kind", KINDS)
def test_scales_beyond_their_dtype_are_its_largest(kind: Kind) -> None:
    weight = alone(torch.tensor([[1e30], [-1e30]]).expand(2, 32), kind, torch.float16)
    assert (weight.scales.abs() == torch.finfo(torch.float16).max).all()
    found = weight.dequantize()
    assert found.isfinite().all()
    assert (found.sign() == torch.tensor([[1.0], [-1.0]])).all()


@pytest.mark.parametrize("columns", [1, 2, 20, 33, 62, 66, 74, 127])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_columns_that_make_no_whole_groups(kind: str, columns: int) -> None:
    data = torch.randn(5, columns)
    weight = QUANTIZERS[kind](data)
    assert weight.shape == (5, columns)
    assert isinstance(weight, {"int8": Int8, "fp8": Fp8, "int4": Int8 if columns % 2 else Int4}[kind])
    assert (weight.dequantize() - data).abs().max() < 0.4


def test_the_size_of_groups() -> None:
    assert [group_size(k) for k in (576, 1536, 4864, 96, 20, 66, 33, 1)] == [64, 64, 64, 48, 20, 22, 33, 1]
    assert group_size(576, 32) == 32
    assert [group_size(k, 32) for k in (74, 28, 48, 2, 1)] == [74, 28, 24, 2, 1]


@pytest.mark.parametrize("columns", [64, 74, 94, 134, 576, 1001])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_scales_and_minimums_are_less_than_the_integers(kind: str, columns: int) -> None:
    weight = QUANTIZERS[kind](torch.randn(5, columns))
    assert isinstance(weight, Grouped)
    assert weight.minimums is not None
    assert weight.scales.nbytes + weight.minimums.nbytes <= weight.stored.nbytes


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_dtype_is_kept_and_numbers_are_rounded_from_their_own(kind: str, dtype: torch.dtype) -> None:
    data = torch.randn(6, 128).to(dtype)
    weight, wide = ROUNDINGS[kind](data), ROUNDINGS[kind](data.float())
    assert weight.dtype == weight.dequantize().dtype == dtype
    assert torch.equal(weight.stored, wide.stored)


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_the_same_bits_each_time_whatever_the_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(300, 192)
    monkeypatch.setattr(quantize, "_CPU_CHUNK", 5000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = ROUNDINGS[kind](data)
        torch.set_num_threads(4)
        with torch.inference_mode():
            second = ROUNDINGS[kind](data)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert torch.equal(first.stored, second.stored)
    assert torch.equal(first.dequantize(), second.dequantize())


# ---- GPTQ


def activations(columns: int, count: int = 2000) -> Tensor:
    """Activations that go together, some of them large."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(columns // 4, columns, generator=generator)
    mixed = torch.randn(count, columns // 4, generator=generator) @ mixing
    sizes = torch.randn(columns, generator=generator).exp()
    return (mixed + torch.randn(count, columns, generator=generator)) * sizes


def gptq(
    data: Tensor, kind: Kind, gram: Tensor, group: int = 32, dtype: torch.dtype = torch.bfloat16
) -> Int8 | Int4 | Fp8:
    return round_by_products(data, kind, Curvature(gram), group=group, scale_dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_zero_or_size_spoils_the_rest_of_its_row(kind: Kind, dtype: torch.dtype) -> None:
    x = activations(128)
    for name, data in odd_sizes(dtype).items():
        weight = gptq(data, kind, x.T @ x, dtype=dtype)
        assert_scales_are_whole(weight, dtype)
        found = weight.dequantize()
        assert not found[data.eq(0).all(dim=1)].any()
        wide = x.double()
        if name not in ("tiny", "tinier"):  # of which nothing may be left
            lost, before = (
                (wide @ (each.double() - data.double()).T).square().sum()
                for each in (found, alone(data, kind, dtype).dequantize())
            )
            assert lost < 0.9 * before or name == "zeros", name


@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_too_large_on_the_way_is_refused(kind: Kind) -> None:
    gram = torch.full((64, 64), 1e4) + torch.eye(64)
    with pytest.raises(ValueError, match="too large to compute with"):
        gptq(torch.full((1, 64), 3e38), kind, gram, dtype=torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_activations_change_less_than_by_rounding_alone(kind: Kind) -> None:
    x, data = activations(160), torch.randn(50, 160)
    alone = {"int8": partial(to_int8, signed=torch.float32), "int4": signed, "fp8": to_fp8}[kind](data).dequantize()
    found = gptq(data, kind, x.T @ x).dequantize()
    assert (x @ (found - data).T).square().sum() < 0.5 * (x @ (alone - data).T).square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_activations_that_do_not_go_together_leave_each_number_at_its_nearest(kind: Kind) -> None:
    data = torch.randn(20, 96)
    found = gptq(data, kind, torch.eye(96))
    alone: Weight = to_int4(data, group=32, signed=torch.bfloat16, importance=torch.ones(96))
    if kind != "int4":
        alone = (to_int8(data, group=32, signed=torch.bfloat16), to_fp8(data, scale_dtype=torch.bfloat16))[
            kind == "fp8"
        ]
    assert (found.dequantize() != alone.dequantize()).float().mean() < 0.005  # sums in another order: a tie may differ


def test_gptq_is_the_elimination_that_it_stands_for() -> None:
    x, data = activations(200), torch.randn(7, 200)
    gram = (x.T @ x).double()
    found = gptq(data, "int8", gram.float(), group=40)
    assert isinstance(found, Int8)
    scales = found.scales.double().repeat_interleave(40, dim=1)
    damped = gram + torch.eye(200) * (0.01 * gram.diagonal().mean())
    inverse, left = damped.inverse(), data.double()
    for at in gram.diagonal().argsort(descending=True).tolist():
        value = (left[:, at] / scales[:, at]).round().clamp(-127, 127) * scales[:, at]
        # Optimal Brain Surgeon, one column at a time: what is fixed is eliminated from the inverse.
        moved = (left[:, at] - value) / inverse[at, at]
        left -= moved[:, None] * inverse[at]
        left[:, at] = value
        inverse = inverse - inverse[:, at, None] * inverse[at] / inverse[at, at]
        inverse[at, :], inverse[:, at] = 0, 0
        inverse[at, at] = 1
    assert ((found.dequantize().double() - left).abs() > 1e-4).double().mean() < 0.01


def test_inputs_that_are_always_zero_cost_nothing() -> None:
    x, data = activations(64), torch.randn(8, 64)
    x[:, [3, 40]] = 0
    found = gptq(data, "int4", x.T @ x).dequantize()
    assert found.isfinite().all()
    assert (found - data).abs().max() < 3
    assert gptq(data, "int4", torch.zeros(64, 64)).dequantize().isfinite().all()


def test_what_cannot_be_computed_with_is_refused() -> None:
    with pytest.raises(ValueError, match="activations are not finite"):
        gptq(torch.randn(4, 64), "int4", torch.full((64, 64), math.nan))
    data = torch.randn(4, 64)
    data[1, 1] = math.inf
    with pytest.raises(ValueError, match="weights are not finite"):
        gptq(data, "int4", torch.eye(64))
