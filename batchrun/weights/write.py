"""Checkpoint directories in Hugging Face's layout, written one piece at a time: no more than one is in memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchrun.model_files import ModelFiles
from batchrun.tokenization.gguf_vocabulary import gguf_tokenizer
from batchrun.weights.gguf import read_gguf
from batchrun.weights.source import WeightSource, open_weights

SHARD_BYTES = 4 << 30  # of one file, unless one piece is larger
_CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
}
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
_NOT_COPIED = ("config.json", "*.index.json", "*quant*_config.json")  # what says where and how weights are stored


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors that are made at one time: what ``make`` returns is like ``tensors``, which are on the meta device."""

    tensors: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plain_piece(source: WeightSource, name: str, dtype: torch.dtype) -> Piece:
    """A tensor of ``source`` as plain numbers of ``dtype``."""
    stored = source[name]

    def make() -> dict[str, Tensor]:
        out = torch.empty(stored.shape, dtype=dtype)
        stored.copy_into(out)
        return {name: out}

    return Piece({name: torch.empty(stored.shape, dtype=dtype, device="meta")}, make)


def write_directory(files: ModelFiles, dtype: str, folder: Path) -> None:
    """Make ``folder`` of the model as plain numbers of ``dtype``, with its tokenizer."""
    source = open_weights(files)
    pieces = [plain_piece(source, name, getattr(torch, dtype)) for name in sorted(source.names())]
    write_model(files, folder, pieces, {"torch_dtype": dtype})


def write_model(
    files: ModelFiles, folder: Path, pieces: Sequence[Piece], config: Mapping[str, Any], shard_bytes: int = SHARD_BYTES
) -> None:
    """Make ``folder`` of ``pieces`` and of all of ``files`` that is no weight; ``config`` goes before the model's."""
    folder.mkdir()
    own = {key: value for key, value in files.config.items() if key not in ("quantization_config", "dtype")}
    _write_json(folder / "config.json", own | dict(config))
    if files.format == "gguf":
        _write_gguf_tokenizer(files, folder)
    else:
        _copy_small_files(files.weights[0].parent, folder)
    _write_shards(folder, _shards(pieces, shard_bytes))


def _shards(pieces: Iterable[Piece], limit: int) -> list[list[Piece]]:
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if shards[-1] and size + piece.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.nbytes
    return shards


def _write_shards(folder: Path, shards: Sequence[Sequence[Piece]]) -> None:
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0])
        return
    places: dict[str, str] = {}
    for number, pieces in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, pieces)
        places |= {tensor: name for piece in pieces for tensor in piece.tensors}
    total = sum(piece.nbytes for pieces in shards for piece in pieces)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def write_safetensors(path: Path, pieces: Sequence[Piece]) -> None:
    """Write one file, wider numbers first, so that each tensor lies at a multiple of its number's size.

    Format: https://github.com/huggingface/safetensors#format
    """
    tensors = {name: tensor for piece in pieces for name, tensor in piece.tensors.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor = tensors[name]
        starts[name], end = end, end + tensor.nbytes
        offsets = [starts[name], end]
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        data = file.tell()
        for piece in pieces:
            for name, tensor in piece.make().items():
                assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape), name
                file.seek(data + starts[name])
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())


def _copy_small_files(source: Path, folder: Path) -> None:
    """The tokenizer, the chat template and the generation config of a directory, among others, none about weights."""
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and not any(fnmatchcase(path.name, each) for each in _NOT_COPIED):
                shutil.copyfile(path, folder / path.name)


def _write_gguf_tokenizer(files: ModelFiles, folder: Path) -> None:
    """``tokenizer.json`` and what else transformers reads beside it, of what a GGUF file says."""
    backend, special_tokens = gguf_tokenizer(read_gguf(files.tokenizer, vocabulary=True))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", config | special_tokens)
    if files.generation.get("eos_token_id"):
        ids = {key: files.config[key] for key in ("bos_token_id", "pad_token_id")}
        _write_json(folder / "generation_config.json", ids | files.generation)
    if template := files.chat_templates.get("default"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
