"""A resolved model as files that its peers read: the same numbers, in the dtype that is measured."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from batchrun.errors import JobError
from batchrun.kernels.machine import cache_dir
from batchrun.model_files import ModelFiles
from batchrun.weights.write import write_directory


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
