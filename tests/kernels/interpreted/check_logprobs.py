"""Log-probabilities under Triton's interpreter, against the torch twin and float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from batchrun.kernels import gpu
from batchrun.kernels.gpu import logprobs
from batchrun.ops import torch_ops


def compare(logits: Tensor, targets: Tensor, count: int) -> None:
    of_target, ids, values = gpu.token_logprobs(logits, targets, count)
    twin_target, twin_ids, twin_values = torch_ops.token_logprobs(logits, targets, count)
    assert torch.equal(ids, twin_ids)
    assert ids.shape == values.shape == (len(logits), count)
    wide = logits.double().log_softmax(-1)
    for found in ((of_target, values), (twin_target, twin_values)):
        for actual, expected in zip(found, (wide.gather(1, targets[:, None])[:, 0], wide.gather(1, ids)), strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("size", [2, 2047, 4100])
@pytest.mark.parametrize("count", [0, 1, 20, 100])
def test_random_rows(size: int, count: int) -> None:
    torch.manual_seed(size)
    compare(5 * torch.randn(3, size), torch.tensor([0, size - 1, size // 2]), min(count, size))


@pytest.mark.parametrize("count", [1, 7, 64, 100])
def test_of_equals_the_smaller_id_comes_first(count: int) -> None:
    torch.manual_seed(count)
    logits = torch.stack([torch.randn(3000).round(), torch.zeros(3000), torch.where(torch.rand(3000) < 0.5, -0.0, 0.0)])
    compare(logits, torch.tensor([5, 2999, 0]), count)
    assert gpu.token_logprobs(logits, torch.zeros(3, dtype=torch.int64), count)[1][2].tolist() == list(range(count))


def test_infinite_and_missing_numbers() -> None:
    logits = torch.randn(5, 300)
    logits[0, 10:] = -math.inf
    logits[1] = -math.inf
    logits[2, 7] = math.inf
    logits[3, 9] = math.nan
    logits[4] = -math.nan
    compare(logits, torch.tensor([3, 3, 7, 3, 3]), 20)
    assert gpu.token_logprobs(logits, torch.tensor([3, 3, 7, 3, 3]), 20)[0][3].isnan()


def test_rows_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ROWS", 2)
    compare(torch.randn(5, 230)[:, :200], torch.arange(5), 11)


def test_a_real_vocabulary() -> None:
    torch.manual_seed(0)
    compare((3 * torch.randn(1, 50_257)).bfloat16().float(), torch.tensor([50_256]), 20)
