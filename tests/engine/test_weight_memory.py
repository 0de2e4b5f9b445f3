"""What a plan says that weights take is what they take once they are loaded."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from batchrun.engine.memory import DTYPE_BYTES, weight_bytes
from batchrun.job import Quantization
from batchrun.model_files import resolve
from batchrun.ops import native_ops
from batchrun.quality import reading
from tests import gguf_files
from tests.engine.driver import load_decoder
from tests.marks import needs_kernels
from tests.models import save_model

QType = gguf.GGMLQuantizationType
PADDING = 0.06  # of the output columns: panels are whole


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are nearly whole panels."""
    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_model(tmp_path_factory.mktemp("memory") / "model", head_dim=48, **sizes)


def check(path: Path, quantization: Quantization, dtype: str) -> None:
    decoder = load_decoder(path, ops=native_ops, dtype=getattr(torch, dtype), quantization=quantization)
    planned = weight_bytes(resolve(str(path)), DTYPE_BYTES[dtype], quantization, "cpu")
    assert reading.weight_bytes(decoder) == pytest.approx(planned, rel=PADDING)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "dequantize", "int8", "int4", "fp8"])
def test_of_a_plain_checkpoint(checkpoint: Path, quantization: Quantization, dtype: str) -> None:
    check(checkpoint, quantization, dtype)


@needs_kernels
@pytest.mark.parametrize("kind", [QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1, QType.Q8_0])
@pytest.mark.parametrize("quantization", ["none", "dequantize"])
def test_of_a_gguf_file(checkpoint: Path, tmp_path: Path, kind: QType, quantization: Quantization) -> None:
    path = gguf_files.convert(checkpoint, tmp_path / "model.gguf", lambda name: QType.F32 if "norm" in name else kind)
    check(path, quantization, "bfloat16")
