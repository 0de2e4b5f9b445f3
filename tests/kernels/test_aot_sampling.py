"""What argmax, draw, filters and log-probabilities become on GPUs: no spills, and rows read 128 bits at a time."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from batchrun.kernels.gpu import filters, logprobs, sampling
from tests.kernels.aot import ARCHS, compiled, problems

AHEAD = "LDGSTS.128"  # copies into shared memory that are on their way while others are used
pytestmark = pytest.mark.parametrize("arch", ARCHS)


@pytest.mark.parametrize("noise", [False, True])
def test_pick(arch: int, noise: bool) -> None:
    types = {"logits": "*fp32", "scores": "*fp32", "tokens": "*i32", "size": "i32:16", "length": "i32:16"}
    constants: dict[str, int | None] = {"BLOCK": sampling.BLOCK}
    if noise:
        types |= {"temperature": "*fp32", "floor": "*fp32", "key": "*i64", "position": "*i64"}
    else:
        constants |= dict.fromkeys(("temperature", "floor", "key", "position"))
    result = compiled(sampling.pick_kernel, types, constants, arch=arch, num_warps=sampling.WARPS)
    assert problems(result, instruction=AHEAD, min_warps_per_sm=32 if noise else 64) == []


def test_merge(arch: int) -> None:
    types = {"scores": "*fp32", "tokens": "*i32", "out": "*i64", "parts": "i32"}
    assert problems(compiled(sampling.merge_kernel, types, {"BLOCK": 256}, arch=arch, num_warps=1)) == []


@pytest.mark.parametrize("kernel", [filters.top_k_kernel, filters.top_p_kernel], ids=["top_k", "top_p"])
def test_filters(arch: int, kernel: Any) -> None:
    types = dict.fromkeys(("logits", "temperature", "top_p", "out", "largest", "min_p"), "*fp32")
    types |= {"top_k": "*i64", "workspace": "*i32", "size": "i32:16"}
    result = compiled(kernel, types, {"BLOCK": filters.BLOCK}, arch=arch, num_warps=filters.WARPS)
    assert problems(result, instruction=AHEAD, min_warps_per_sm=8) == []


@pytest.mark.parametrize("count", [0, 128])
def test_token_logprobs(arch: int, count: int) -> None:
    types = {"logits": "*fp32", "targets": "*i64", "of_target": "*fp32", "ids": "*i64", "values": "*fp32"}
    types |= {"workspace": "*i32", "size": "i32:16", "count": "i32"}
    constants = {"BLOCK": filters.BLOCK, "COUNT": count}
    result = compiled(logprobs.logprob_kernel, types, constants, arch=arch, num_warps=filters.WARPS)
    assert problems(result, instruction=AHEAD, min_warps_per_sm=8) == []
