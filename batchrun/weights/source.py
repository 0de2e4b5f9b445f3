"""Checkpoint files as tensors under Hugging Face names, read one at a time into memory that the caller owns.

Tensors are pulled, not pushed: the model says which it wants, in any order, and nothing is held open or kept between
two reads, so that loading needs the memory of the finished weights and of one tensor beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from batchrun.errors import JobError
from batchrun.model_files import ModelFiles
from batchrun.weights.dequantize import dequantize, float_dtype
from batchrun.weights.gguf import GGUFTensor, check_tensors, read_gguf, row_bytes

_CHUNK_ELEMENTS = 1 << 18  # numbers decoded at a time: their floats stay in a core's cache
_SAFETENSORS_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


class WeightSource:
    """A checkpoint: random access to its tensors by name."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        """The names of all tensors, e.g. ``model.layers.0.self_attn.q_proj.weight``."""
        return set(self._tensors)

    def __getitem__(self, name: str) -> StoredTensor:
        """Where and how ``name`` is stored. Raises ``KeyError`` for a name not in :meth:`names`."""
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor:
        """The tensor, in CPU memory of its own, in its stored dtype (float32 if it was quantised)."""
        stored = self._tensors[name]
        out = torch.empty(stored.shape, dtype=stored.dtype)
        stored.copy_into(out)
        return out


def open_weights(files: ModelFiles) -> WeightSource:
    """Open the weights of a resolved model; reads headers only.

    Raises :class:`JobError` if a file is damaged, cut short or of an encoding that nobody here can decode.
    """
    if not files.weights:
        raise JobError(f"{files.reference}: the model was resolved without its weights")
    if files.format == "gguf":
        return WeightSource(_gguf_tensors(files.weights[0], int(files.config["head_dim"])))
    return WeightSource({name: tensor for path in files.weights for name, tensor in _safetensors(path)})


@dataclass(frozen=True, slots=True)
class _SafeTensor:
    path: Path
    name: str
    shape: tuple[int, ...]
    encoding: str

    @property
    def dtype(self) -> torch.dtype:
        if self.encoding not in _SAFETENSORS_FLOATS:
            raise JobError(f"{self.path}: tensor {self.name} holds {self.encoding} values, not plain floats")
        return _SAFETENSORS_FLOATS[self.encoding]

    def copy_into(self, out: torch.Tensor) -> None:
        # Opened for each tensor: pages of an open map count as this process's memory, whether still needed or not.
        with safe_open(self.path, framework="pt") as shard:
            out.copy_(shard.get_tensor(self.name))


def _safetensors(path: Path) -> Iterator[tuple[str, _SafeTensor]]:
    try:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                stored = shard.get_slice(name)
                yield name, _SafeTensor(path, name, tuple(stored.get_shape()), stored.get_dtype())
    except (OSError, SafetensorError) as error:
        raise JobError(f"{path}: not a readable safetensors file: {error}") from error


@dataclass(frozen=True, slots=True)
class _GGMLTensor:
    path: Path
    tensor: GGUFTensor
    head_dim: int | None  # set if the rows of each head have their two halves interleaved, as GGUF's Llama does

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return float_dtype(self.tensor.ggml_type)

    def copy_into(self, out: torch.Tensor) -> None:
        n_rows, length = self.tensor.rows
        step = self.head_dim or max(1, _CHUNK_ELEMENTS // length)
        n_bytes = row_bytes(self.tensor.ggml_type, length)
        rows = out.view(n_rows, length)
        with self.path.open("rb") as file, _one_thread():
            file.seek(self.tensor.offset)
            for start in range(0, n_rows, step):
                part = rows[start : start + step]
                chunk = dequantize(np.fromfile(file, np.uint8, len(part) * n_bytes), self.tensor.ggml_type)
                if self.head_dim:
                    chunk = chunk.view(-1, 2, length).transpose(0, 1)
                part.copy_(chunk.reshape(part.shape))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from waking its threads for each small copy: where cores are shared, waiting for them is dear."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _gguf_tensors(path: Path, head_dim: int) -> dict[str, _GGMLTensor]:
    gguf = read_gguf(path)
    check_tensors(gguf)
    found = {}
    for tensor in gguf.tensors.values():
        name = tensor.hf_name
        interleaved = gguf.architecture == "llama" and (".q_proj." in name or ".k_proj." in name)
        found[name] = _GGMLTensor(path, tensor, head_dim if interleaved else None)
    found.pop("rope_freqs.weight", None)  # it has become config["rope_scaling"]
    return found
