"""``batchrun quantize``: a model's checkpoint with linear layers of fewer bits, in compressed-tensors' format."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchrun.engine import memory
from batchrun.errors import JobError
from batchrun.job import JobSpec, load_job
from batchrun.model_files import ModelFiles, resolve
from batchrun.models.families import model_config
from batchrun.quantizing.compress import GROUPS, Kind, compress, compressed_like, quantization_config
from batchrun.quantizing.gptq import Curvature, round_by_products
from batchrun.quantizing.walk import PARTS, job_prompts, round_layers
from batchrun.text import format_bytes
from batchrun.weights.formats import Weight
from batchrun.weights.quantize import group_size, to_fp8, to_int4, to_int8
from batchrun.weights.source import open_weights
from batchrun.weights.write import Piece, plain_piece, write_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run_quantize(
    reference: str,
    kind: Kind,
    output: Path,
    *,
    revision: str | None = None,
    calibrate: str | None = None,
    rows: int = 128,
    echo: Callable[[str], None],
) -> None:
    """Write the model ``reference`` to the new directory ``output``, its linear layers as ``kind``.

    They are rounded one by one, or, with ``calibrate``, by the prompts of the first ``rows`` rows of that job file.
    Raises JobError where there is no such model, it cannot be so written, or ``output`` holds something.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise JobError(f"{output} exists already and is not empty; name a new directory")
    job = None if calibrate is None else load_job(calibrate)
    files = resolve(reference, revision)
    writing = Writing(files, kind)
    if files.encodings:
        echo(f"warning: {reference} is quantized already: rounding it again loses more, and may take more memory")
    echo(writing.describe())
    prompts = None if job is None else calibration_prompts(job, files, rows)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
            made = Path(folder) / "model"
            weights = {} if job is None or prompts is None else writing.calibrated(job, prompts, echo)
            write_model(files, made, writing.pieces(weights), writing.config)
            made.rename(output)
    except OSError as error:
        raise JobError(f"{output}: cannot be written: {error.strerror or error}") from None
    echo(f"{output}: weights of {_size(output.glob('*.safetensors'))}, before {_size(files.weights)}")


def _size(paths: Iterable[Path]) -> str:
    return format_bytes(sum(path.stat().st_size for path in paths))


class Writing:
    """What is written of a model: its linear layers as ``kind``, all else as plain numbers of the model's own dtype."""

    def __init__(self, files: ModelFiles, kind: Kind) -> None:
        """Raises JobError where the model has weights that ``kind`` cannot hold, or lacks some."""
        self._files, self._kind = files, kind
        self._source = open_weights(files)
        layers = range(model_config(files.config).n_layers)
        self._stems = [f"model.layers.{layer}.{name}" for layer in layers for names in PARTS.values() for name in names]
        if missing := [stem for stem in self._stems if f"{stem}.weight" not in self._source.names()]:
            raise JobError(f"{files.weights[0]}: tensor {missing[0]}.weight is missing")
        named = str(files.config.get("dtype") or files.config.get("torch_dtype")).removeprefix("torch.")
        self._dtype_name = named if named in _DTYPES else "bfloat16"
        self._dtype = _DTYPES[self._dtype_name]
        columns = math.gcd(*(self._shape(stem)[1] for stem in self._stems))
        self._group = group_size(columns, GROUPS.get(kind, columns))
        if kind == "int4" and self._group % 2:
            raise JobError(f"{files.weights[0]}: int4 needs an even number of columns in every linear layer")

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says of it."""
        return {"torch_dtype": self._dtype_name, "quantization_config": quantization_config(self._kind, self._group)}

    def describe(self) -> str:
        """One line that says what is made of the model."""
        scales = f"a scale for every {self._group} columns"
        if self._kind == "fp8":
            scales = "a scale for each output, activations rounded by token"
        others = len(self._source.names()) - len(self._stems)
        return (
            f"{self._files.reference}: {len(self._stems)} linear layers as {self._kind} ({scales}), "
            f"{others} other tensors in {self._dtype_name}"
        )

    def pieces(self, weights: Mapping[str, Weight]) -> list[Piece]:
        """All that is written: linear layers as among ``weights``, else rounded when it is their turn."""
        names = sorted(self._source.names())
        stems = set(self._stems)
        return [
            self._rounded_piece(stem, weights.get(stem))
            if (stem := name.removesuffix(".weight")) in stems and name != stem
            else plain_piece(self._source, name, self._dtype)
            for name in names
        ]

    def calibrated(
        self, job: JobSpec, prompts: Sequence[Sequence[int]], echo: Callable[[str], None]
    ) -> dict[str, Weight]:
        """The linear weights by layer, rounded by what ``prompts`` make of the model, on the device of ``job``."""
        device = memory.resolve_device(job.engine.device)
        dtype = memory.resolve_dtype(job.model.dtype, device)
        echo(f"calibrating with {len(prompts):,} prompts of {sum(map(len, prompts)):,} tokens, in {dtype} on {device}")

        def round_weight(stem: str, data: Tensor, curvature: Curvature) -> Weight:
            return round_by_products(data, self._kind, curvature, group=self._group, scale_dtype=self._dtype)

        return round_layers(
            self._files, self._source, prompts, round_weight, dtype=_DTYPES[dtype], device=torch.device(device)
        )

    def _rounded_piece(self, stem: str, weight: Weight | None) -> Piece:
        def make() -> dict[str, Tensor]:
            return compress(weight or self._round(self._source.get(f"{stem}.weight")), stem, self._dtype)

        return Piece(compressed_like(self._kind, self._shape(stem), self._group, stem, self._dtype), make)

    def _round(self, data: Tensor) -> Weight:
        if self._kind == "fp8":
            return to_fp8(data, scale_dtype=self._dtype)
        if self._kind == "int8":
            return to_int8(data, group=self._group, signed=self._dtype)
        return to_int4(data, group=self._group, signed=self._dtype)

    def _shape(self, stem: str) -> tuple[int, int]:
        tensor = self._source[f"{stem}.weight"]
        if len(tensor.shape) != 2:
            raise JobError(f"{tensor.path}: {stem}.weight is {list(tensor.shape)}, not [out, in]")
        return tensor.shape[0], tensor.shape[1]


def calibration_prompts(job: JobSpec, files: ModelFiles, rows: int) -> list[list[int]]:
    """The prompts of a job's first rows, none longer than the job runs them."""
    return job_prompts(job, files, memory.resolve_max_model_len(files.config, job.model), rows)
