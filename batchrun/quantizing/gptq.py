"""Rounding a weight so that its products change least: GPTQ (Frantar et al. 2022, arXiv 2210.17323).

Columns are rounded one after the other, and what rounding one adds to the products of known activations is taken back
by those that are not rounded yet. Scales and minimums are found first, from the weight itself, and stay. The columns
with the largest activations go first ("static" order: groups are those of the stored order all the same).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from batchrun.quantizing.compress import Kind
from batchrun.weights.formats import Fp8, Int4, Int8
from batchrun.weights.quantize import nearest_fp8, nearest_int4, nearest_int8, to_fp8, to_int4, to_int8

_BLOCK = 128  # columns after which the others are brought up to date
_DAMPING = (0.01, 0.1, 1.0)  # of the mean of the diagonal, added to it: the first that can be computed with


class Curvature:
    """How the squared error of products grows with errors in a row of the weight.

    ``gram`` [in, in] float32 is the sum of ``x x^T`` over activations ``x``, up to a factor. Raises ValueError where it
    has anything that is not finite.
    """

    def __init__(self, gram: Tensor) -> None:
        if not gram.isfinite().all():
            raise ValueError("activations are not finite")
        self.importance = gram.diagonal().clone()
        self.order = self.importance.argsort(descending=True, stable=True)
        self.factor = _factor(gram[self.order][:, self.order])


def _factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of ``gram``, damped."""
    mean = gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    for damping in _DAMPING:
        damped = gram + torch.eye(len(gram), device=gram.device) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
    raise ValueError("activations are too large or too small to compute with")


def round_by_products(
    data: Tensor, kind: Kind, curvature: Curvature, *, group: int, scale_dtype: torch.dtype
) -> Int8 | Int4 | Fp8:
    """``data`` [out, in] with scales and minimums as `batchrun.quantizing.compress` stores them in ``scale_dtype``.

    Raises ValueError where it has anything that is not finite, or numbers too large to compute with.
    """
    wide = data.float()
    if not wide.isfinite().all():
        raise ValueError("weights are not finite")
    if kind == "fp8":
        scales = to_fp8(wide, scale_dtype=scale_dtype).scales
        rounded = _rounded(wide, curvature, scales.expand(wide.shape), None, kind)
        return Fp8(nearest_fp8(rounded, scales), scales, data.dtype)
    if kind == "int8":
        scales = to_int8(wide, group=group, signed=scale_dtype).scales
        spread = scales.repeat_interleave(group, dim=1)
        rounded = _rounded(wide, curvature, spread, None, kind)
        return Int8(nearest_int8(rounded, spread).to(torch.int8), scales, None, data.dtype)
    base = to_int4(wide, group=group, signed=scale_dtype, importance=curvature.importance)
    assert base.minimums is not None
    scales, minimums = (each.repeat_interleave(group, dim=1) for each in (base.scales, base.minimums))
    rounded = _rounded(wide, curvature, scales, minimums, kind)
    return Int4.of(nearest_int4(rounded, scales, minimums), base.scales, base.minimums, data.dtype)


def _rounded(data: Tensor, curvature: Curvature, scales: Tensor, minimums: Tensor | None, kind: Kind) -> Tensor:
    """``data`` [out, in] float32 moved to numbers that ``kind`` can hold with these scales and minimums [out, in].

    Raises ValueError where an error, which all that follow take over, is not finite.
    """
    order, factor, nearest = curvature.order, curvature.factor, _NEAREST[kind]
    left, scales = data.T[order], scales.T[order]  # a column is a row here: in one piece
    minimums = torch.zeros_like(scales) if minimums is None else minimums.T[order]
    for start in range(0, len(left), _BLOCK):
        end = min(start + _BLOCK, len(left))
        errors = torch.empty_like(left[start:end])
        for at in range(start, end):
            value = nearest(left[at], scales[at], minimums[at])
            error = (left[at] - value) / factor[at, at]
            left[at] = value
            left[at + 1 : end].addr_(factor[at, at + 1 : end], error, alpha=-1)
            errors[at - start] = error
        if not errors.isfinite().all():  # nearest numbers may be finite all the same
            raise ValueError("weights are too large to compute with")
        left[end:] -= factor[start:end, end:].T @ errors
    return torch.empty_like(left).index_copy_(0, order, left).T.contiguous()


_NEAREST: Mapping[Kind, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "int8": lambda x, scales, _: nearest_int8(x, scales) * scales,
    "int4": lambda x, scales, minimums: nearest_int4(x, scales, minimums) * scales + minimums,
    "fp8": lambda x, scales, _: nearest_fp8(x, scales).float() * scales,
}
