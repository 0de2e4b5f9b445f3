"""The cutoffs of filters under Triton's interpreter: which tokens survive, against the torch twin and float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from batchrun.kernels.gpu import filters
from batchrun.ops import draw

EXACT = 1e-6  # of the mass


def logits(kind: str, size: int) -> Tensor:
    torch.manual_seed(size)
    row = 3 * torch.randn(size)
    if kind == "flat":
        row *= 0.01
    elif kind == "peaked":
        row[size // 3] = 60
    elif kind == "steps":  # many equals
        row = row.round()
    elif kind == "constant":
        row[:] = -2.5
    elif kind == "masked":
        row[torch.rand(size) < 0.97] = -math.inf
        row[size // 2] = 1
    elif kind == "wide":
        row = row.sign() * 10.0 ** (12 * torch.randn(size)).clamp(-44, 37)
    elif kind == "zeros":
        row = torch.where(torch.rand(size) < 0.5, -0.0, 0.0)
    return row


KINDS = ["normal", "flat", "peaked", "steps", "constant", "masked", "wide", "zeros"]


def cutoffs(row: Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The kernel's cutoff and the twin's."""
    given = {"min_p": torch.tensor([min_p]), "top_k": torch.tensor([top_k]), "top_p": torch.tensor([top_p])}
    cut = filters.cutoffs(row[None], temperature=torch.tensor([temperature]), **given)
    return cut[0], draw._cutoffs(row[None] / temperature, *given.values())[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 1000, 2049])
@pytest.mark.parametrize("top_k", [1, 2, 999, 2048])
def test_top_k(kind: str, size: int, top_k: int) -> None:
    row = logits(kind, size)
    cut, expected = cutoffs(row, 0.7, 0.0, top_k, 1.0)
    assert torch.equal(row / 0.7 >= cut, row / 0.7 >= expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2049])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1 - 2**-24])
@pytest.mark.parametrize("top_k", [0, 40])
def test_top_p(kind: str, size: int, top_p: float, top_k: int) -> None:
    row = logits(kind, size)
    scaled = row / 1.3
    cut, expected = cutoffs(row, 1.3, 0.0, top_k, top_p)
    kept = scaled >= cut
    assert kept.any()
    if top_k:
        assert not (kept & (scaled < scaled.topk(min(top_k, size)).values[-1])).any()
    if not torch.equal(kept, scaled >= expected):
        left = scaled.double().masked_fill(scaled < cutoffs(row, 1.3, 0.0, top_k, 1.0)[1], -math.inf)
        mass = left.softmax(0)
        assert mass[kept].sum() >= top_p - EXACT
        assert mass[scaled > scaled[kept].min()].sum() < top_p + EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("min_p", [0.001, 0.2, 1.0])
def test_min_p_before_the_others(kind: str, min_p: float) -> None:
    row = logits(kind, 777)
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.8), (100, 0.8)):
        cut, expected = cutoffs(row, 1.0, min_p, top_k, top_p)
        differ = (row >= cut) != (row >= expected)
        assert (row[differ] - (row.max() + math.log(min_p))).abs().max() < 1e-6 if differ.any() else True


def test_rows_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than one launch takes, each with a filter of its own, and one without."""
    monkeypatch.setattr(filters, "ROWS", 2)
    torch.manual_seed(0)
    rows = 3 * torch.randn(5, 500)
    rows[3, 4] = math.nan
    given = {
        "temperature": torch.tensor([1.0, 0.5, 1.0, 1.0, 2.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.1, 0.0]),
        "top_k": torch.tensor([3, 0, 0, 9, 4]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.5, 0.3]),
    }
    out = filters.cutoffs(rows, **given)
    for i in (0, 1, 2, 4):
        assert torch.equal(filters.cutoffs(rows[i : i + 1], **{k: v[i : i + 1] for k, v in given.items()})[0], out[i])
    assert out[1] == -math.inf
    assert torch.isfinite(out[[0, 2, 4]]).all()


@pytest.mark.parametrize(("kind", "top_k", "top_p"), [("flat", 0, 0.9), ("normal", 20_000, 1.0), ("steps", 300, 0.5)])
def test_a_search_that_stays_in_the_workspace(kind: str, top_k: int, top_p: float) -> None:
    row = logits(kind, 50_257)
    cut, expected = cutoffs(row, 1.0, 0.0, top_k, top_p)
    kept, twin = row >= cut, row >= expected
    if not torch.equal(kept, twin):
        mass = row.double().softmax(0)
        assert top_p < 1
        assert mass[kept != twin].sum() < EXACT
