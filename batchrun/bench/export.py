"""A resolved model as files that its peers read: the same numbers, in the dtype that is measured."""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from batchrun.errors import JobError
from batchrun.kernels.machine import cache_dir
from batchrun.model_files import ModelFiles
from batchrun.weights.source import StoredTensor, open_weights

_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def hugging_face_directory(files: ModelFiles, dtype: str) -> Path:
    """A directory of ``config.json`` and safetensors: the model's own, or one made once of a GGUF file."""
    if files.format == "safetensors":
        return files.weights[0].parent
    return _exported(files, dtype, lambda files, path: write_directory(files, dtype, path))


def gguf_file(files: ModelFiles) -> Path:
    """A GGUF file of float16 weights, which is what OpenVINO reads besides quantised ones, made once of a GGUF file.

    Raises JobError for a model in another format.
    """
    if files.format != "gguf":
        raise JobError(f"{files.reference} is not a GGUF file")
    return _exported(files, "float16.gguf", write_gguf)


def _exported(files: ModelFiles, name: str, write: Callable[[ModelFiles, Path], None]) -> Path:
    """What ``write`` made of the model, from the cache or made now; other processes never see it half done."""
    target = Path(cache_dir(), "bench", f"{re.sub(r'[^A-Za-z0-9.-]', '-', files.revision)}-{name}")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            made = Path(work) / "model"
            write(files, made)
            if not target.exists():
                made.rename(target)
    return target


def write_directory(files: ModelFiles, dtype: str, folder: Path) -> None:
    """Make ``folder`` of ``config.json`` and one safetensors file."""
    folder.mkdir()
    config = files.config | {"torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    source = open_weights(files)
    _write_safetensors(folder / "model.safetensors", {name: source[name] for name in sorted(source.names())}, dtype)


def _write_safetensors(path: Path, tensors: dict[str, StoredTensor], dtype: str) -> None:
    """Write tensors in ``dtype``, one at a time, so that no more than one is in memory."""
    kind: torch.dtype = getattr(torch, dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + torch.Size(tensor.shape).numel() * kind.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            out = torch.empty(tensor.shape, dtype=kind)
            tensor.copy_into(out)
            file.write(out.view(torch.uint8).numpy().tobytes())
        os.fsync(file.fileno())


def write_gguf(files: ModelFiles, path: Path) -> None:
    """Write a GGUF model as it is, matrices in float16 and vectors in float32."""
    import gguf

    reader = gguf.GGUFReader(files.weights[0])
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.astype("float16" if data.ndim > 1 else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
