"""Makes models to judge rounding to 4 bits by: ``python -m tests.bench.dithered DIR``.

The demo's model is a GGUF file whose linear weights are Q4_1, integers of 4 bits in groups of 32: rounding them to 4
bits would find those integers again. ``DIR/dithered`` is a plain checkpoint in which each of their numbers is moved
evenly by up to half a step of its group, and ``DIR/nearest`` is one of what is left of that with the nearest of
integers spread evenly over groups of 64: what `batchrun.weights.quantize.to_int4` is compared with. Compare with
``batchrun quality DIR/nearest --against DIR/dithered`` and ``batchrun quality DIR/dithered --weights int4``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchrun.bench.workload import DEMO_MODEL
from batchrun.model_files import ModelFiles, resolve
from batchrun.weights.formats import Weight
from batchrun.weights.quantize import LARGEST_INT4, group_size
from batchrun.weights.source import StoredTensor, WeightSource, open_weights
from batchrun.weights.write import plain_piece, write_model

Q4_1_GROUP = 32


@dataclass(frozen=True, slots=True)
class Changed:
    """A stored matrix whose plain numbers are what ``change`` makes of its own."""

    stored: StoredTensor
    change: Callable[[Tensor], Tensor]

    @property
    def path(self) -> Path:
        return self.stored.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def copy_into(self, out: Tensor) -> None:
        wide = torch.empty(self.stored.shape)
        self.stored.copy_into(wide)
        out.copy_(self.change(wide))

    def quantized(self, dtype: torch.dtype) -> Weight | None:
        return None


def dither(data: Tensor, seed: int) -> Tensor:
    blocks = data.unflatten(1, (-1, Q4_1_GROUP))
    least, most = blocks.aminmax(dim=-1, keepdim=True)  # both are among a block's numbers, 15 steps apart
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed))
    return (blocks + (noise - 0.5) * (most - least) / LARGEST_INT4).flatten(1)


def nearest(data: Tensor) -> Tensor:
    groups = data.unflatten(1, (-1, group_size(data.shape[1])))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scales = (most - least) / LARGEST_INT4
    return (((groups - least) / scales).round() * scales + least).flatten(1)


def write(files: ModelFiles, folder: Path, change: Callable[[Tensor, int], Tensor]) -> ModelFiles:
    """Make ``folder`` of the model in float32, with ``change`` of its linear layers, which are numbered."""
    source = open_weights(files)
    tensors: dict[str, StoredTensor] = {name: source[name] for name in sorted(source.names())}
    for number, name in enumerate(tensors):
        if name.endswith("_proj.weight"):
            tensors[name] = Changed(tensors[name], lambda data, number=number: change(data, number))
    changed = WeightSource(tensors)
    pieces = [plain_piece(changed, name, torch.float32) for name in tensors]
    write_model(files, folder, pieces, {"torch_dtype": "float32"})
    return resolve(str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dithered", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default=DEMO_MODEL, help="a GGUF file of Q4_1 blocks")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    plain = write(resolve(args.model), args.directory / "dithered", dither)
    write(plain, args.directory / "nearest", lambda data, _: nearest(data))


if __name__ == "__main__":
    main()
