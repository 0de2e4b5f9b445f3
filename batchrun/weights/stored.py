"""One tensor of a checkpoint: as a file holds it, or as several that a file holds make it.

Quantized checkpoints store a layer's weight as integers, scales and more, under names of their own. A module of this
package for each format turns these into one tensor ``X.weight`` (`assemble`), which knows its shape before anything but
headers is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from safetensors import safe_open

from batchrun.errors import JobError
from batchrun.weights.formats import Weight

_SAFETENSORS_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOATS = tuple(_SAFETENSORS_FLOATS)
UNUSABLE = (ValueError, RuntimeError, ZeroDivisionError)  # what making a weight of a damaged file's tensors may raise

# Scales for rounding activations and the KV cache: no part of a weight, and neither is rounded by them here.
_ACTIVATION_SCALES = re.compile(r"\.((in|out)put|q|k|v|kv)_(scale|zero_point)$|\.input_scale_ub$")


class StoredTensor(Protocol):
    """One tensor of a checkpoint file."""

    @property
    def path(self) -> Path:
        """The file that holds it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows (outputs) first."""

    @property
    def dtype(self) -> torch.dtype:
        """The stored floating dtype; float32 for quantised blocks."""

    def copy_into(self, out: torch.Tensor) -> None:
        """Write it into the contiguous ``out`` (its shape, any floating dtype and device), as ``copy_`` converts."""

    def quantized(self, dtype: torch.dtype) -> Weight | None:
        """It as it is stored, on the CPU, to multiply activations of ``dtype``; None where it holds plain numbers."""


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """What a safetensors file holds under a name, of the dtype that the file calls ``encoding``."""

    path: Path
    name: str
    shape: tuple[int, ...]
    encoding: str

    @property
    def dtype(self) -> torch.dtype:
        if self.encoding not in _SAFETENSORS_FLOATS:
            self.refuse(f"holds {self.encoding} values, not plain floats")
        return _SAFETENSORS_FLOATS[self.encoding]

    def read(self) -> torch.Tensor:
        """It as it is stored, of whatever dtype."""
        with safe_open(self.path, framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(self.name)
        return tensor

    def copy_into(self, out: torch.Tensor) -> None:
        out.copy_(self.read().to(self.dtype))

    def quantized(self, dtype: torch.dtype) -> Weight | None:
        return None

    def expect(self, *shapes: tuple[int, ...]) -> None:
        """Raises :class:`JobError` if its shape is none of these."""
        if self.shape not in shapes:
            self.refuse(f"is {list(self.shape)}, expected {' or '.join(str(list(shape)) for shape in shapes)}")

    def refuse(self, reason: str) -> NoReturn:
        """Raises :class:`JobError`: this tensor cannot be used, for a ``reason`` that follows its name."""
        raise JobError(f"{self.path}: tensor {self.name} {reason}")


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """The matrix that ``make`` reads from several stored tensors, for activations of a dtype.

    ``make`` may raise `UNUSABLE` if what it reads cannot be a weight. ``kept``: whether the weight that it makes is
    a quantized one. ``shape`` may divide the rows of the matrix among several dimensions.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    make: Callable[[torch.dtype], Weight]
    kept: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def copy_into(self, out: torch.Tensor) -> None:
        out.copy_(self._made(self.dtype).dequantize().view(self.shape))

    def quantized(self, dtype: torch.dtype) -> Weight | None:
        return self._made(dtype) if self.kept and len(self.shape) == 2 else None

    def _made(self, dtype: torch.dtype) -> Weight:
        try:
            return self.make(dtype)
        except UNUSABLE as error:
            raise JobError(f"{self.path}: tensor {self.name}: {error}") from error


class Module:
    """The stored tensors of one module, by their names in it. What is taken will not be looked for by anyone else."""

    def __init__(self, tensors: dict[str, StoredTensor], prefix: str, path: Path) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self.path = path

    def take(self, part: str, encodings: Collection[str], *shapes: tuple[int, ...]) -> SafeTensor:
        """A tensor of one of ``shapes`` (of any, if none is given).

        Raises :class:`JobError` if it is not there, or of another encoding or shape.
        """
        tensor = self.find(part, encodings, *shapes)
        if tensor is None:
            raise JobError(f"{self.path}: tensor {self._prefix}{part} is missing")
        return tensor

    def find(self, part: str, encodings: Collection[str], *shapes: tuple[int, ...]) -> SafeTensor | None:
        """As `take`; None if it is not there."""
        tensor = self._tensors.pop(self._prefix + part, None)
        if not isinstance(tensor, SafeTensor):
            return None
        if tensor.encoding not in encodings:
            tensor.refuse(f"holds {tensor.encoding} values, expected {' or '.join(encodings)}")
        if shapes:
            tensor.expect(*shapes)
        return tensor

    def take_matrix(self, part: str, encoding: str) -> tuple[SafeTensor, int, int]:
        """A tensor of two dimensions, neither of them zero, and these."""
        tensor = self.take(part, (encoding,))
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            tensor.refuse(f"is {list(tensor.shape)}, expected two dimensions of one or more")
        return tensor, *tensor.shape

    def made(
        self, shape: tuple[int, ...], make: Callable[[torch.dtype], Weight], *, name: str = "weight", kept: bool = True
    ) -> MadeTensor:
        return MadeTensor(self.path, self._prefix + name, shape, make, kept)


Reader = Callable[[Module], MadeTensor]


def assemble(tensors: Mapping[str, SafeTensor], readers: Mapping[tuple[str, str], Reader]) -> dict[str, StoredTensor]:
    """The tensors of a quantized checkpoint under the names that models know; what belongs to no weight stays as it is.

    ``readers``: by the last part of a name and an encoding, what makes the weight of a module that has such a tensor.
    """
    left: dict[str, StoredTensor] = {
        name: each for name, each in tensors.items() if not _ACTIVATION_SCALES.search(name)
    }
    made: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        for (mark, encoding), read in readers.items():
            if name in left and name.endswith(mark) and tensor.encoding == encoding:
                weight = read(Module(left, name.removesuffix(mark), tensor.path))
                made[weight.name] = weight
    for name in sorted(left.keys() & made.keys()):
        raise JobError(f"{left[name].path}: tensor {name} is stored both plain and quantized")
    return left | made
