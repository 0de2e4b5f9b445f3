"""What argmax, draw, filters and log-probabilities become on GPUs: no spills, and rows read 128 bits at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from batchrun.kernels import gpu
from tests.kernels.aot import ARCHS, launched, problems

AHEAD = "LDGSTS.128"  # copies into shared memory that are on their way while others are used
pytestmark = pytest.mark.parametrize("arch", ARCHS)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_argmax(arch: int) -> None:
    pick, merge = launched(lambda: gpu.argmax(empty(64, 128_256)), arch=arch)
    assert problems(pick, instruction=AHEAD, min_warps_per_sm=64) == []
    assert problems(merge) == []


def test_draw(arch: int) -> None:
    real, whole = empty(64), empty(64, dtype=torch.int64)
    given = {"temperature": real, "min_p": real, "top_p": real, "top_k": whole, "key": whole, "position": whole}
    top_k, top_p, pick, merge = launched(lambda: gpu.draw(empty(64, 128_256), **given), arch=arch)
    for result in (top_k, top_p):
        assert problems(result, instruction=AHEAD, min_warps_per_sm=8) == []
    assert problems(pick, instruction=AHEAD, min_warps_per_sm=32) == []
    assert pick.count("IMAD.WIDE.U32") >= 17  # a Philox number has as many products
    assert problems(merge) == []


@pytest.mark.parametrize("count", [0, 1, 100])
def test_token_logprobs(arch: int, count: int) -> None:
    targets = empty(64, dtype=torch.int64)
    (result,) = launched(lambda: gpu.token_logprobs(empty(64, 128_256), targets, count), arch=arch)
    assert problems(result, instruction=AHEAD, min_warps_per_sm=8) == []


def test_a_vocabulary_that_no_vector_divides(arch: int) -> None:
    pick, _ = launched(lambda: gpu.argmax(empty(64, 50_257)), arch=arch)
    assert problems(pick, min_warps_per_sm=32) == []
