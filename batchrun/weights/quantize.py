"""Rounding plain weights to fewer bits, without calibration: by the weight alone, not by what it multiplies.

A group or row with anything that is not finite becomes NaN as a whole, never numbers that look right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from batchrun.weights.formats import Dense, Fp8, Int4, Int8, Weight

GROUP, INT8_GROUP = 64, 32  # columns of a group, at most
_LEAST_GROUP = 16  # columns: float32 scales and minimums take half a byte more for each number
LEAST_INT8, LARGEST_INT8 = -128, 127  # the least only where there are minimums: scales alone are symmetric
LARGEST_INT4 = 15
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_LEAST_SIGNED = -8
_LEAST_SCALE = 1e-30  # of a group whose numbers are all the same, where its dtype has so small a number
_SHARES = (1.0, 0.94, 0.88, 0.82)  # of a group's range that first scales span: what is beyond is rounded to the ends
_ROUNDS, _MORE_ROUNDS = 3, 4  # of refining every one of these scales, and then the best
_CPU_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 24  # numbers rounded at a time: on a CPU they stay in a core's cache


def to_int8(data: Tensor, *, group: int | None = None, signed: torch.dtype | None = None) -> Int8:
    """The nearest of 256 numbers that are spread evenly over the range of each group of columns of ``data`` [out, in].

    ``group`` columns are one (`group_size` of ``in``). ``signed``: the numbers are integers from -127 to 127 times
    scales of this dtype, and there are no minimums: off by a sixth more, or by a third in groups twice as large.
    """
    group = group or group_size(data.shape[1], INT8_GROUP)
    scales = _for_groups(data, group)
    minimums = None if signed else _for_groups(data, group)
    stored = torch.empty(data.shape, dtype=torch.int8, device=data.device)

    def fill(rows: slice) -> None:
        groups = data[rows].float().unflatten(1, (-1, group))
        if minimums is None:
            scales[rows] = _scales(groups.abs().amax(dim=-1) / LARGEST_INT8, signed or torch.float32)
            integers = nearest_int8(groups, scales[rows, :, None])
        else:
            least, most = groups.aminmax(dim=-1)
            scales[rows] = _scales((most - least) / (LARGEST_INT8 - LEAST_INT8), torch.float32)
            minimums[rows] = least - LEAST_INT8 * scales[rows]
            integers = ((groups - minimums[rows, :, None]) / scales[rows, :, None]).round_()
            integers.clamp_(LEAST_INT8, LARGEST_INT8)
        stored[rows] = integers.nan_to_num_().flatten(1).to(torch.int8)

    _for_chunks(data, fill)
    return Int8(stored, scales, minimums, data.dtype)


def to_int4(
    data: Tensor, *, group: int | None = None, signed: torch.dtype | None = None, importance: Tensor | None = None
) -> Int4:
    """Integers from 0 to 15 of ``data`` [out, in], with a scale and a minimum for each group of columns.

    ``group`` columns are one (`group_size` of ``in``), and ``importance`` is [in]; else see `fit_int4`.
    """
    group = group or group_size(data.shape[1])
    scales, minimums = _for_groups(data, group), _for_groups(data, group)
    stored = torch.empty((data.shape[0], data.shape[1] // 2), dtype=torch.uint8, device=data.device)
    weights = None if importance is None else importance.unflatten(0, (-1, group))

    def fill(rows: slice) -> None:
        groups = data[rows].float().unflatten(1, (-1, group))
        scale, minimum = fit_int4(groups, signed=signed, importance=weights)
        integers = nearest_int4(groups, scale, minimum).nan_to_num_().flatten(1)
        scales[rows], minimums[rows] = scale[..., 0], minimum[..., 0]
        stored[rows] = Int4.of(integers, scales[rows], None, data.dtype).stored

    _for_chunks(data, fill)
    return Int4(stored, scales, minimums, data.dtype)


def to_fp8(data: Tensor, *, scale_dtype: torch.dtype = torch.float32) -> Fp8:
    """The nearest of 8-bit floats of ``data`` [out, in], with a scale of ``scale_dtype`` for each row."""
    scales = torch.empty((data.shape[0], 1), dtype=torch.float32, device=data.device)
    stored = torch.empty(data.shape, dtype=torch.float8_e4m3fn, device=data.device)

    def fill(rows: slice) -> None:
        wide = data[rows].float()
        scales[rows] = _scales(wide.abs().amax(dim=1, keepdim=True) / LARGEST_FP8, scale_dtype)
        stored[rows] = nearest_fp8(wide, scales[rows])

    _for_chunks(data, fill)
    return Fp8(stored, scales, data.dtype)


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Makes a weight of plain numbers [out, in]."""

    make: Callable[..., Weight]
    by_inputs: bool = False  # whether ``make`` takes ``importance`` [in]: how much columns count

    def __call__(self, data: Tensor, importance: Callable[[], Tensor] | None = None) -> Weight:
        if self.by_inputs and importance is not None:
            return self.make(data, importance=importance())
        return self.make(data)


def _to_four_bits(data: Tensor, importance: Tensor | None = None) -> Weight:
    """As `to_int4`; half a byte cannot be left, so that an odd number of columns has 8 bits."""
    return to_int4(data, importance=importance) if data.shape[1] % 2 == 0 else to_int8(data)


PLAIN = Quantizer(Dense)
QUANTIZERS: Mapping[str, Quantizer] = {
    "int8": Quantizer(to_int8),
    "int4": Quantizer(_to_four_bits, by_inputs=True),
    "fp8": Quantizer(to_fp8),
}


def nearest_int8(x: Tensor, scales: Tensor) -> Tensor:
    """Whole numbers from -127 to 127, as floats, that are nearest to ``x / scales``."""
    return (x / scales).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)


def nearest_int4(x: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Whole numbers from 0 to 15, as floats, that are nearest to ``(x - minimums) / scales``."""
    return ((x - minimums) / scales).round_().clamp_(0, LARGEST_INT4)


def nearest_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """The 8-bit floats that are nearest to ``x / scales``."""
    return (x / scales).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)


def group_size(columns: int, most: int = GROUP) -> int:
    """The largest even number from 16 to ``most`` (even itself) that divides ``columns``; ``columns`` if there is none.

    Then a whole row is one group: in smaller ones, scales and minimums would soon take more than the integers.
    """
    return next((size for size in range(most, _LEAST_GROUP - 1, -2) if columns % size == 0), columns)


def fit_int4(
    groups: Tensor, *, signed: torch.dtype | None = None, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scales and minimums [N, G, 1] float32 with which 0 to 15 stand for ``groups`` [N, G, columns] float32.

    Scales and minimums that span several shares of a group's range are refined by turns, as in Lloyd (1982): the
    integers that are nearest by them, then by least squares the scale and minimum that are best for those integers.
    llama.cpp's ``make_qkx2_quants`` searches alike, and from there is that squares weigh more for larger numbers, which
    comes nearer to what the model said (KL divergence) than plain squares, and than the zero points of HQQ (Badri and
    Shaji 2023). Where plain squares are then more than with integers spread evenly over the range, those it is.

    ``signed``: scales are numbers of this dtype, and a minimum is -8 times its scale, as where integers from -8 to 7
    are stored. A scale may be negative, so that -8 can be the group's largest number; nothing is promised of plain
    squares. ``importance`` [G, columns], if there is any, is what squares are multiplied by instead.
    """
    center = 0.0 if signed else groups.mean(dim=-1, keepdim=True)  # sums about it lose fewer bits
    weights = _weights(groups, signed=signed is not None) if importance is None else importance
    numbers = _Numbers(groups - center, weights, signed=signed is not None)
    best = None
    for share in _SHARES:
        found = numbers.refined(*numbers.spread(share), _ROUNDS)
        best = found if best is None else _better(found, best)
    assert best is not None
    scale, minimum, _ = numbers.refined(*best[:2], _MORE_ROUNDS)
    if signed is not None:
        scale = _scales(scale, signed)
        minimum = _LEAST_SIGNED * scale
    elif importance is None:
        even = numbers.spread(1.0)
        take = numbers.squares(scale, minimum) <= numbers.squares(*even)
        scale, minimum = torch.where(take, scale, even[0]), torch.where(take, minimum, even[1])
    return scale.where((scale + minimum).isfinite(), torch.nan), minimum + center


def _weights(groups: Tensor, *, signed: bool) -> Tensor:
    """What squares are multiplied by where nothing is known of the activations, above zero."""
    sizes = groups.square()
    mean = sizes.mean(dim=-1, keepdim=True)
    weights = sizes + mean if signed else sizes.sqrt_() + mean.sqrt()
    return weights.clamp_(min=_LEAST_SCALE)


_Fit = tuple[Tensor, Tensor, Tensor]  # scale, minimum, and by how much they lower the squares; [N, G, 1]


class _Numbers:
    """Groups of numbers [N, G, columns] and the sums over them that least squares need."""

    def __init__(self, numbers: Tensor, importance: Tensor, *, signed: bool) -> None:
        self._numbers, self._importance, self._signed = numbers, importance, signed
        self._weighted = numbers * importance
        self._count = importance.sum(dim=-1, keepdim=True)
        self._sum = self._weighted.sum(dim=-1, keepdim=True)

    def spread(self, share: float) -> tuple[Tensor, Tensor]:
        """Scales and minimums of integers spread evenly over ``share`` of each group's range, in the middle of it."""
        least, most = self._numbers.aminmax(dim=-1, keepdim=True)
        if self._signed:
            scale = torch.where(most > -least, most, least) * (share / _LEAST_SIGNED)
            scale = scale.where(scale != 0, _LEAST_SCALE)
            return scale, _LEAST_SIGNED * scale
        scale = ((most - least) * (share / LARGEST_INT4)).clamp_(min=_LEAST_SCALE)
        return scale, (least + most) / 2 - LARGEST_INT4 / 2 * scale

    def refined(self, scale: Tensor, minimum: Tensor, rounds: int) -> _Fit:
        """The fit after some rounds of refining a scale and minimum."""
        gain = scale
        for _ in range(rounds):
            integers = nearest_int4(self._numbers, scale, minimum)
            scale, minimum, gain = self._fit(integers, scale)
        return scale, minimum, gain

    def squares(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The plain squared errors of groups, [N, G, 1]."""
        rounded = nearest_int4(self._numbers, scale, minimum).mul_(scale).add_(minimum)
        return rounded.sub_(self._numbers).square_().sum(dim=-1, keepdim=True)

    def _fit(self, integers: Tensor, scale: Tensor) -> _Fit:
        """What is best for these integers; with ``scale`` where they are all the same and any would do."""
        product = (integers * self._weighted).sum(dim=-1, keepdim=True)
        weighted = integers * self._importance
        total = weighted.sum(dim=-1, keepdim=True)
        squares = weighted.mul_(integers).sum(dim=-1, keepdim=True)
        # Integers count from `origin`, numbers from what it stands for: 0, or about both means.
        origin = -_LEAST_SIGNED if self._signed else total / self._count
        squares -= origin * (2 * total - origin * self._count)
        product -= origin * self._sum
        scale = torch.where(squares > 0, product / squares, scale)
        minimum = -origin * scale
        return scale, minimum if self._signed else minimum + self._sum / self._count, scale * product


def _better(a: _Fit, b: _Fit) -> _Fit:
    """Of each group the fit that lowers the squares more; ``b`` where they are no numbers."""
    take = a[2] > b[2]
    return torch.where(take, a[0], b[0]), torch.where(take, a[1], b[1]), torch.where(take, a[2], b[2])


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as ``dtype`` holds them, float32: none is zero, nor so small or large that ``dtype`` has only part of it.

    Signs stay, and what is not finite becomes NaN.
    """
    limits = torch.finfo(dtype)
    sizes = wanted.abs().clamp(max(limits.smallest_normal, _LEAST_SCALE), limits.max).to(dtype).float()
    return sizes.copysign(wanted).where(wanted.isfinite(), torch.nan)


def _for_groups(data: Tensor, group: int) -> Tensor:
    return torch.empty((data.shape[0], data.shape[1] // group), dtype=torch.float32, device=data.device)


def _for_chunks(data: Tensor, fill: Callable[[slice], None]) -> None:
    """Call ``fill`` with rows of ``data``, some at a time, until all were; on a CPU in as many threads as torch uses.

    Each thread computes alone: torch's own threads, which wait for each other at every small step, are several times
    slower where cores are shared.
    """
    count = max(1, (_CPU_CHUNK if data.is_cpu else _GPU_CHUNK) // data.shape[1])
    chunks = [slice(start, start + count) for start in range(0, data.shape[0], count)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # which the threads of the pool begin with
    try:
        with ThreadPoolExecutor(threads if data.is_cpu else 1) as pool:
            list(pool.map(torch.inference_mode()(fill), chunks))  # whichever mode the caller is in
    finally:
        torch.set_num_threads(threads)
