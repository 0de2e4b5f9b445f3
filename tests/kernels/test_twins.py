"""The torch twins of kernels that no CPU kernel has."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.nn import functional

from batchrun.ops import fixed_ops, torch_ops
from batchrun.ops.norm_native import add_rms_norm
from tests.marks import needs_kernels

PLAIN = [torch_ops, fixed_ops]


@pytest.mark.parametrize("ops", PLAIN, ids=lambda ops: ops.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_mul(ops: ModuleType, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(7, 50)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(ops.gelu_mul(gate_up).double(), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_an_offset(offset: float, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 96), (5, 96), (96,)))
    total = x + residual
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (offset + weight.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2**-6
    for function in (torch_ops.add_rms_norm, add_rms_norm):
        added = residual.clone()
        out = function(x, added, weight, 1e-6, offset=offset)
        assert torch.equal(added, total)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_token_logprobs_of_equals_the_smaller_id_first() -> None:
    logits = torch.randn(4, 500).round()
    logits[3] = torch.where(torch.rand(500) < 0.5, -0.0, 0.0)
    targets = torch.tensor([0, 499, 7, 250])
    of_target, ids, values = torch_ops.token_logprobs(logits, targets, 30)
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :30])
    wide = logits.double().log_softmax(-1)
    torch.testing.assert_close(values.double(), wide.gather(1, ids), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_target.double(), wide[range(4), targets], rtol=1e-6, atol=1e-6)
    assert torch_ops.token_logprobs(logits, targets, 0)[1].shape == (4, 0)
