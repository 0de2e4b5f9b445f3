"""Quantized GGUF files: each type of block stands for the numbers that the ``gguf`` package reads in it."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from batchrun.errors import JobError
from batchrun.model_files import resolve
from batchrun.weights.formats import Dense, Int4, Int8
from batchrun.weights.load import Loader, open_weights
from tests import gguf_files
from tests.models import save_model
from tests.weights.logprobs import engine_logprobs, reference_logprobs

MIXTURES: dict[str, Mapping[str, str]] = {
    "small blocks": {
        "q_proj": "Q4_0",
        "k_proj": "Q4_1",
        "v_proj": "Q5_0",
        "o_proj": "Q5_1",
        "gate_proj": "Q4_0",
        "up_proj": "Q4_0",
        "down_proj": "Q8_0",
        "embed_tokens": "Q8_0",
    },
    "large blocks": {  # as in Q4_K_M files, and more
        "q_proj": "Q4_K",
        "k_proj": "Q4_K",
        "v_proj": "Q6_K",
        "o_proj": "Q3_K",
        "gate_proj": "Q2_K",
        "up_proj": "Q5_K",
        "down_proj": "Q6_K",
        "lm_head": "Q6_K",
    },
    "plain beside packed": {"q_proj": "Q4_K", "k_proj": "IQ4_XS", "v_proj": "F16", "up_proj": "IQ4_XS"},
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows that whole blocks of 256 fill."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
    return save_model(tmp_path_factory.mktemp("plain") / request.param, request.param, layers=2, **shape)


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest, plain: Path, tmp_path: Path) -> tuple[str, Path, dict[str, Tensor]]:
    """The name of a mixture of types, a file of it, and what the package reads in that."""

    def kind(name: str) -> gguf.GGMLQuantizationType:
        types = [kind for part, kind in MIXTURES[request.param].items() if f"{part}.weight" in name]
        return gguf.GGMLQuantizationType[(*types, "F32")[0]]

    path = gguf_files.convert(plain, tmp_path / "model.gguf", kind)
    meant = {name: torch.from_numpy(data.copy()) for name, data in gguf_files.meaning(path).items()}
    return request.param, path, meant


def test_a_file_stands_for_the_numbers_it_says(
    mixture: tuple[str, Path, dict[str, Tensor]], plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, path, meant = mixture
    with caplog.at_level(logging.INFO, logger="batchrun.weights"):
        source = open_weights(resolve(str(path)))
    told = ["model.gguf: these encodings have no packed form here and become plain numbers: IQ4_XS (4 tensors)"]
    assert caplog.messages == (told if name == "plain beside packed" else [])
    assert source.names() == set(meant)
    for each, tensor in meant.items():
        assert torch.equal(source.get(each), tensor), each
        weight = source[each].quantized(torch.float32)
        assert weight is None or torch.equal(weight.dequantize(), tensor), each
    reference = tmp_path / "reference"
    shutil.copytree(plain, reference)
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    wanted = reference_logprobs(reference)
    assert (engine_logprobs(path) - wanted).abs().max() < 2e-3
    assert (engine_logprobs(path, quantization="dequantize") - wanted).abs().max() < 2e-4


def test_what_joined_layers_become(mixture: tuple[str, Path, dict[str, Tensor]]) -> None:
    name, path, meant = mixture
    loader = Loader(open_weights(resolve(str(path))), torch.float32)
    classes = {"small blocks": (Int8, Int4), "large blocks": (Int8, Int8), "plain beside packed": (Dense, Dense)}
    for parts, kept in zip(("qkv", ("gate", "up")), classes[name], strict=True):
        block = "self_attn" if parts == "qkv" else "mlp"
        names = [f"model.layers.1.{block}.{part}_proj.weight" for part in parts]
        out = sum(len(meant[each]) for each in names)
        fused = loader.take_linear(*names, shape=(out, 256))
        assert type(fused) is kept
        assert torch.equal(fused.dequantize(), torch.cat([meant[each] for each in names]))


def test_chunks_of_a_quantized_tensor_are_joined(
    mixture: tuple[str, Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.weights.source._CHUNK_ELEMENTS", 7 * 256)
    _, path, meant = mixture
    source = open_weights(resolve(str(path)))
    for name, tensor in meant.items():
        weight = source[name].quantized(torch.float32)
        assert weight is None or torch.equal(weight.dequantize(), tensor), name


def file_with(tmp_path: Path, name: str, *shape: int) -> Path:
    """One with a further tensor of zeros; its heads are of 16."""
    model, further = save_model(tmp_path / "llama", layers=1), (name, np.zeros(shape, np.float32))
    return gguf_files.convert(model, tmp_path / "model.gguf", lambda _: gguf.GGMLQuantizationType.F32, extra=[further])


@pytest.mark.parametrize(("rows", "head_dim"), [(24, 16), (8, 16), (30, 15), (16, 0)])
@pytest.mark.parametrize("part", ["q", "k"])
def test_rows_that_make_no_heads_of_two_halves(tmp_path: Path, part: str, rows: int, head_dim: int) -> None:
    files = resolve(str(file_with(tmp_path, f"blk.1.attn_{part}.weight", rows, 64)))
    files = dataclasses.replace(files, config=files.config | {"head_dim": head_dim})
    with pytest.raises(JobError, match=rf"model\.gguf: tensor blk\.\d\.attn_[qk]\.weight has \d+ rows.* {head_dim}$"):
        open_weights(files)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)])
def test_tensors_without_numbers_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = file_with(tmp_path, "blk.1.ffn_up.weight", *shape)
    with pytest.raises(JobError, match=r"model\.gguf: tensor blk\.1\.ffn_up\.weight is \[.*\]: it holds no numbers"):
        open_weights(resolve(str(path)))
