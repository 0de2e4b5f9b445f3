"""Checkpoint files as tensors under Hugging Face names, read one at a time into memory that the caller owns.

Tensors are pulled, not pushed: the model says which it wants, in any order, and nothing is held open or kept between
two reads, so that loading needs the memory of the finished weights and of one tensor beside them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from batchrun.errors import JobError
from batchrun.model_files import ModelFiles
from batchrun.weights import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from batchrun.weights.dequantize import Bytes, GGMLType, dequantize, float_dtype, grouped, is_grouped, is_plain
from batchrun.weights.formats import Weight, cat
from batchrun.weights.gguf import GGUFTensor, check_tensors, read_gguf, row_bytes
from batchrun.weights.quantization_config import check, method
from batchrun.weights.stored import SafeTensor, StoredTensor

_CHUNK_ELEMENTS = 1 << 18  # numbers decoded at a time: their floats stay in a core's cache
_FORMATS = {
    "awq": awq.tensors,
    "bitsandbytes": bitsandbytes.tensors,
    "compressed-tensors": compressed_tensors.tensors,
    "fp8": fp8.tensors,
    "gptq": gptq.tensors,
    "mxfp4": mxfp4.tensors,
}

logger = logging.getLogger(__name__)


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
    """Open the weights of a resolved model; reads headers only, and what a quantized one says of its shapes.

    Raises :class:`JobError` if a file is damaged, cut short or of an encoding that nobody here can decode.
    """
    if not files.weights:
        raise JobError(f"{files.reference}: the model was resolved without its weights")
    if files.format == "gguf":
        return WeightSource(_gguf_tensors(files.weights[0], int(files.config["head_dim"])))
    tensors = {name: tensor for path in files.weights for name, tensor in _safetensors(path)}
    if config := files.config.get("quantization_config"):
        return WeightSource(_FORMATS[method(config)](tensors, check(config)))
    return WeightSource(tensors)


def _safetensors(path: Path) -> Iterator[tuple[str, SafeTensor]]:
    try:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                stored = shard.get_slice(name)
                yield name, SafeTensor(path, name, tuple(stored.get_shape()), stored.get_dtype())
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
        rows, start = out.view(n_rows, length), 0
        with _one_thread():
            for raw in self._chunks():
                part = rows[start : start + len(raw)]
                part.copy_(dequantize(raw.reshape(-1), self.tensor.ggml_type).view(part.shape))
                start += len(raw)

    def quantized(self, dtype: torch.dtype) -> Weight | None:
        kind, (_, length) = self.tensor.ggml_type, self.tensor.rows
        if not is_grouped(kind):
            return None
        with _one_thread():
            return cat([grouped(raw.reshape(-1), kind, length, dtype) for raw in self._chunks()])

    def _chunks(self) -> Iterator[Bytes]:
        """The tensor's bytes, [rows, bytes], some whole rows at a time, in the order in which models want them."""
        n_rows, length = self.tensor.rows
        step = self.head_dim or max(1, _CHUNK_ELEMENTS // length)
        n_bytes = row_bytes(self.tensor.ggml_type, length)
        with self.path.open("rb") as file:
            file.seek(self.tensor.offset)
            for start in range(0, n_rows, step):
                count = min(step, n_rows - start)
                raw = np.fromfile(file, np.uint8, count * n_bytes).reshape(count, n_bytes)
                yield raw.reshape(-1, 2, n_bytes).swapaxes(0, 1).reshape(count, n_bytes) if self.head_dim else raw


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
        n_rows, _ = tensor.rows
        if interleaved and (head_dim < 1 or head_dim % 2 or n_rows % head_dim):
            raise JobError(
                f"{path}: tensor {tensor.name} has {n_rows} rows, which are no whole heads of two halves, "
                f"each head of {head_dim}"
            )
        found[name] = _GGMLTensor(path, tensor, head_dim if interleaved else None)
    found.pop("rope_freqs.weight", None)  # it has become config["rope_scaling"]
    kinds = Counter(GGMLType(each.tensor.ggml_type) for each in found.values())
    if widened := [kind for kind in kinds if not is_plain(kind) and not is_grouped(kind)]:
        shown = ", ".join(f"{kind.name} ({kinds[kind]} tensors)" for kind in sorted(widened))
        logger.info("%s: these encodings have no packed form here and become plain numbers: %s", path.name, shown)
    return found
