"""Noise, argmax and draw under Triton's interpreter, against the torch twin."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun.kernels import gpu
from batchrun.kernels.gpu import noise as gpu_noise
from batchrun.kernels.gpu import sampling
from batchrun.ops import noise, torch_ops

OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}


@triton.jit
def _philox(key, position, words, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    word = gpu_noise.philox(tl.load(key), tl.load(position), tl.load(words + at))
    tl.store(out + at, word.to(tl.int64))


@triton.jit
def _gumbel(key, position, words, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, gpu_noise.gumbel(tl.load(key), tl.load(position), tl.load(words + at)))


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 1, 131_071, 2**31 - 1])
def test_noise_has_the_same_bits(key: int, position: int) -> None:
    words = torch.cat([torch.arange(60), torch.tensor([127_999, 2**20, 2**31 - 1, 128_255])]).int()
    keys, positions = torch.tensor([key]), torch.tensor([position])
    out = torch.empty(64, dtype=torch.int64)
    _philox[(1,)](keys, positions, words, out, SIZE=64)
    assert torch.equal(out, noise.philox(keys, positions, words.long()))


def test_gumbel_values_are_as_exact_as_float32_can_be() -> None:
    words = torch.arange(1 << 16, dtype=torch.int32)
    key, position = torch.tensor([77]), torch.tensor([5])
    out = torch.empty(1 << 16)
    _gumbel[(1,)](key, position, words, out, SIZE=1 << 16)
    u = noise.uniform(key, position, words.long())
    assert u.max() > 0.9999
    assert u.min() < 0.0001
    expected = -torch.log(-torch.log(u))
    assert ((out.double() - expected).abs() <= 4e-7 + 1.2e-7 * expected.abs()).all()


@triton.jit
def _fixed_philox(key, position, word):
    return word.to(tl.uint32) << 8


def test_gumbel_is_exact_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and largest uniform numbers, and those about 1/2, as if Philox had drawn them."""
    ends = [0, 1, 2, 3, 2**23 - 2, 2**23 - 1, 2**23, 2**23 + 1, 2**24 - 4, 2**24 - 3, 2**24 - 2, 2**24 - 1]
    words = torch.tensor([*ends, 100, 10_000, 2**22, 2**24 - 1000], dtype=torch.int32)
    monkeypatch.setitem(gpu_noise.gumbel.fn.__globals__, "philox", _fixed_philox)
    out = torch.empty(16)
    _gumbel[(1,)](torch.tensor([0]), torch.tensor([0]), words, out, SIZE=16)
    expected = -torch.log(-torch.log((words.double() + 0.5) * 2.0**-24))
    assert ((out.double() - expected).abs() <= 4e-7 + 1.2e-7 * expected.abs()).all()
    assert out.max() < noise.MAX_GUMBEL == gpu_noise.MAX_GUMBEL.value


@pytest.fixture(params=[1, 1024])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in one part of many blocks, or in parts of a block each."""
    monkeypatch.setattr(sampling, "_PROGRAMS", request.param)


def hard_rows(size: int) -> Tensor:
    """Rows of equal, infinite and missing numbers."""
    torch.manual_seed(size)
    rows = torch.randn(9, size)
    rows[0] = 1.5
    rows[1] = -math.inf
    rows[2, size // 2 :] = rows[2, : (size + 1) // 2].clone()
    rows[3, -1] = math.inf
    rows[4, -1], rows[4, size // 3] = 99.0, math.nan
    rows[5, -1] = 50.0
    rows[6] = -math.inf
    rows[6, size // 2] = -3.0
    rows[7, 0], rows[7, size // 2] = 40.0, 40.0
    rows[8] = torch.arange(size) % 512  # equals a block apart
    return rows


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("size", [1, 2, 17, 512, 513, 1500])
def test_argmax(size: int) -> None:
    logits = hard_rows(size)
    expected = torch_ops.argmax(logits)
    assert torch.equal(gpu.argmax(logits), expected)
    assert expected[4] == -1
    assert expected[1] == 0


def test_argmax_of_a_real_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 50_300).bfloat16().float()[:, :50_257]  # with equals
    assert torch.equal(gpu.argmax(logits), torch_ops.argmax(logits))
    assert gpu.argmax(torch.empty(0, 100)).shape == (0,)


@pytest.mark.parametrize("rows", [1, 3, 256, 5000])
@pytest.mark.parametrize("size", [1, 500, 513, 50_257, 128_256, 262_144])
def test_parts_cover_a_row(rows: int, size: int) -> None:
    parts, length = sampling.split(rows, size)
    assert length % sampling.BLOCK == 0
    assert (parts - 1) * length < size <= parts * length


def settings(rows: int, **given: float) -> dict[str, Tensor]:
    chosen = OFF | given
    each = {name: torch.full((rows,), float(chosen[name])) for name in ("temperature", "min_p", "top_p")}
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(rows))
    return each | {
        "top_k": torch.full((rows,), int(chosen["top_k"])),
        "key": keys,
        "position": torch.arange(rows) * 1000,
    }


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("spread", "size"), [(1.0, 1), (0.1, 1500), (6.0, 700)])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.3},
        {"min_p": 0.1},
        {"top_k": 1},
        {"top_k": 7, "temperature": 2.0},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.01, "top_k": 40, "top_p": 0.8, "temperature": 1.3},
    ],
)
def test_draw_equals_the_twin(spread: float, size: int, given: dict[str, float]) -> None:
    torch.manual_seed(size)
    logits = spread * torch.randn(5, size)
    chosen = settings(5, **given)
    assert torch.equal(gpu.draw(logits, **chosen), torch_ops.draw(logits, **chosen))


def test_draw_with_a_filter_of_its_own_for_each_row() -> None:
    torch.manual_seed(3)
    logits = 4 * torch.randn(6, 800)[:, :700]
    logits[5, 9] = math.nan
    chosen = settings(6)
    chosen["temperature"] = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0])
    chosen["min_p"] = torch.tensor([0.0, 0.05, 0.0, 0.0, 0.2, 0.1])
    chosen["top_k"] = torch.tensor([0, 0, 3, 700, 20, 5])
    chosen["top_p"] = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.9, 0.5])
    out = gpu.draw(logits, **chosen)
    assert torch.equal(out, torch_ops.draw(logits, **chosen))
    assert out[5] == -1


@pytest.mark.usefixtures("programs")
def test_draw_of_equal_infinite_and_missing_numbers() -> None:
    logits = hard_rows(1100)
    chosen = settings(9)
    assert torch.equal(gpu.draw(logits, **chosen), torch_ops.draw(logits, **chosen))


def test_draw_from_a_real_vocabulary() -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(2, 50_257)
    chosen = settings(2, temperature=0.9)
    chosen["top_p"], chosen["top_k"] = torch.tensor([0.95, 1.0]), torch.tensor([0, 0])
    assert torch.equal(gpu.draw(logits, **chosen), torch_ops.draw(logits, **chosen))


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(100, 4).contiguous()
    chosen = settings(100)
    counts = torch.bincount(gpu.draw(logits, **chosen), minlength=4)
    assert (counts - torch.tensor([10.0, 20.0, 30.0, 40.0])).abs().max() < 20
