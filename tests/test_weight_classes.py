"""The classes of weights: what is joined, divided, moved or looked up stands for the same numbers."""

from __future__ import annotations

import pytest
import torch

from batchrun.weights.formats import Dense, Fp8, Int4, Int8, Weight, cat

CPU = torch.device("cpu")


def integers(
    kind: str, n: int, k: int = 64, group: int = 16, *, minimums: bool = True, ordered: bool = False
) -> Weight:
    scales = torch.rand(n, k // group) + 0.1
    least = torch.randn(n, k // group) if minimums else None
    order = torch.randperm(k, generator=torch.Generator().manual_seed(0)) if ordered else None
    if kind == "int8":
        return Int8(torch.randint(-128, 128, (n, k), dtype=torch.int8), scales, least, torch.float32, order)
    return Int4.of(torch.randint(0, 16, (n, k)), scales, least, torch.float32, order)


def fp8(n: int, k: int = 64, *, by_row: bool = True) -> Fp8:
    scales = torch.rand((n, 1) if by_row else (-(-n // 128), -(-k // 128))) + 0.1
    return Fp8(torch.randn(n, k).to(torch.float8_e4m3fn), scales, torch.float32)


def dense(n: int, k: int = 64) -> Dense:
    return Dense(torch.randn(n, k))


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ([dense(3), dense(5)], Dense),
        ([integers("int8", 3), integers("int8", 5)], Int8),
        ([integers("int4", 3), integers("int4", 5, minimums=False)], Int4),
        ([integers("int4", 3), integers("int4", 5, group=32)], Int4),
        ([integers("int4", 3), integers("int8", 5, group=64), integers("int4", 2)], Int8),
        ([integers("int4", 3, ordered=True), integers("int4", 5, ordered=True)], Int4),
        ([integers("int4", 3), integers("int4", 5, ordered=True)], Dense),
        ([integers("int4", 3, k=96, group=16), integers("int4", 5, k=96, group=24)], Dense),
        ([fp8(3), fp8(5)], Fp8),
        ([fp8(128, 200, by_row=False), fp8(130, 200, by_row=False)], Dense),
        ([fp8(128, 200, by_row=False), fp8(256, 200, by_row=False)], Fp8),
        ([fp8(3), integers("int8", 3)], Dense),
        ([dense(3), integers("int4", 3)], Dense),
    ],
)
def test_joined_weights_are_the_numbers_one_after_the_other(weights: list[Weight], kind: type[Weight]) -> None:
    joined = cat(weights)
    expected = torch.cat([weight.dequantize() for weight in weights])
    assert (type(joined), joined.shape) == (kind, tuple(expected.shape))
    torch.testing.assert_close(joined.dequantize(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "weight",
    [
        dense(6), integers("int8", 6), integers("int4", 6), integers("int4", 6, group=64),
        integers("int8", 6, minimums=False), fp8(6), fp8(512, 256, by_row=False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_make_the_whole(weight: Weight, dim: int) -> None:
    parts = [weight.shard(dim, index, 2) for index in range(2)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts], dim), weight.dequantize())
    assert all(part.nbytes <= weight.nbytes for part in parts)


def test_what_cannot_be_divided_is_refused() -> None:
    for weight, dim, count in (
        (dense(7), 0, 2),
        (integers("int4", 6, ordered=True), 1, 2),
        (integers("int8", 6, k=48), 1, 2),
        (fp8(256, 300, by_row=False), 0, 4),
    ):
        with pytest.raises(ValueError, match=r"divided|whole number of blocks"):
            weight.shard(dim, 0, count)


@pytest.mark.parametrize(
    "weight", [dense(6), integers("int8", 6, ordered=True), integers("int4", 6), fp8(6), fp8(300, 200, by_row=False)]
)
def test_rows_are_looked_up(weight: Weight) -> None:
    ids = torch.tensor([[5, 0], [5, 3]])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])
    assert torch.equal(weight.to(CPU).dequantize(), weight.dequantize())


def test_columns_in_another_order_multiply_their_inputs() -> None:
    weight, x = integers("int8", 6, ordered=True), torch.randn(2, 64)
    assert isinstance(weight, Int8)
    assert weight.order is not None
    plain = Int8(weight.stored, weight.scales, weight.minimums, weight.dtype)
    expected = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(x[:, weight.order].double() @ plain.dequantize().double().T, expected)


def test_widened_is_the_same() -> None:
    weight = integers("int4", 6, ordered=True)
    assert isinstance(weight, Int4)
    assert torch.equal(Int8.widen(weight).dequantize(), weight.dequantize())
    assert weight.nbytes == 6 * 32 + 2 * 6 * 4 * 4 + 64 * 8


def test_what_fits_no_weight_is_refused() -> None:
    values, scales = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 2)
    for wrong in (
        lambda: Dense(torch.zeros(3)),
        lambda: Int8(values, scales[:3], None, torch.float32),
        lambda: Int8(values, torch.ones(4, 3), None, torch.float32),
        lambda: Int8(values, scales, scales[:, :1], torch.float32),
        lambda: Int4(values.view(torch.uint8), torch.ones(4, 16), None, torch.float32),
        lambda: Fp8(values.float().to(torch.float8_e4m3fn), torch.ones(4, 2), torch.float32),
    ):
        with pytest.raises(ValueError, match=r"\[4, |\[out, in\]|bits"):
            wrong()
