"""Weights: every checkpoint format gives the tensors that were saved, and what does not fit is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchrun.errors import JobError
from batchrun.model_files import ModelFiles, resolve
from batchrun.ops import native_ops, onednn_ops, torch_ops
from batchrun.weights.dequantize import dequantize, grouped, is_grouped
from batchrun.weights.formats import Dense, Fp8, Int8, Weight
from batchrun.weights.gguf import read_gguf, row_bytes
from batchrun.weights.load import Loader, open_weights
from batchrun.weights.quantize import QUANTIZERS
from tests import gguf_files
from tests.marks import needs_kernels
from tests.models import save_model

QType = gguf.GGMLQuantizationType
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, layers=2)


@pytest.fixture
def small(tmp_path: Path) -> ModelFiles:
    return resolve(str(save_model(tmp_path / "small", layers=1)))


def same(found: torch.Tensor, saved: torch.Tensor) -> bool:
    return found.dtype == saved.dtype and torch.equal(found, saved)


def test_single_safetensors(checkpoint: Path) -> None:
    saved = load_file(checkpoint / "model.safetensors")
    source = open_weights(resolve(str(checkpoint)))
    assert source.names() == set(saved)
    assert all(same(source.get(name), tensor) for name, tensor in saved.items())


def test_sharded_safetensors(tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "one"))
    folder = save_model(tmp_path / "many")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    files = resolve(str(folder))
    assert len(files.weights) > 2
    source = open_weights(files)
    saved = model.state_dict()
    assert source.names() == set(saved)
    assert all(same(source.get(name), tensor) for name, tensor in saved.items())
    files.weights[1].unlink()
    with pytest.raises(JobError, match=files.weights[1].name):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(QType.F32, torch.float32), (QType.F16, torch.float16), (QType.BF16, torch.bfloat16), (QType.Q8_0, torch.float32)],
)
def test_gguf(checkpoint: Path, tmp_path: Path, kind: QType, dtype: torch.dtype) -> None:
    path = gguf_files.convert(
        checkpoint,
        tmp_path / "model.gguf",
        lambda name: kind if "norm" not in name and "bias" not in name else QType.F32,
    )
    saved = load_file(checkpoint / "model.safetensors")
    source = open_weights(resolve(str(path)))
    assert source.names() == set(saved)
    for name, tensor in saved.items():
        found = source.get(name)
        if "norm" in name or "bias" in name:
            assert same(found, tensor), name
        elif kind == QType.Q8_0:
            # Quantising works within a row, so the order of rows does not enter.
            raw = gguf.quants.quantize(tensor.numpy(), kind)
            assert same(found, torch.from_numpy(gguf.quants.dequantize(raw, kind))), name
        else:
            assert same(found, tensor.to(dtype)), name


def test_gguf_header_equals_the_package(checkpoint: Path, tmp_path: Path) -> None:
    path = gguf_files.convert(checkpoint, tmp_path / "model.gguf", lambda _: QType.F32)
    ours, theirs = read_gguf(path, vocabulary=True), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {t.name: (t.shape, t.ggml_type, t.offset) for t in ours.tensors.values()} == {
        t.name: (tuple(reversed(t.shape.tolist())), t.tensor_type, t.data_offset) for t in theirs.tensors
    }
    assert read_gguf(path).metadata["tokenizer.ggml.tokens"] == len(fields["tokenizer.ggml.tokens"])


INTEGERS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", [QType[name] for name in [*INTEGERS, "IQ4_XS", "TQ1_0"]])
def test_blocks_equal_the_package(kind: QType) -> None:
    length = 512
    raw = np.random.default_rng(0).integers(0, 256, (40, row_bytes(kind, length)), dtype=np.uint8)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, size)
    blocks[blocks == 0x7C] = 1  # no scale is infinite or not a number
    for exponent in (0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF):
        blocks[blocks == exponent] = 3
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    assert torch.equal(dequantize(raw.reshape(-1), kind).view(40, length), expected)
    assert is_grouped(kind) == (kind.name in INTEGERS)
    if is_grouped(kind):
        assert torch.equal(grouped(raw.reshape(-1), kind, length, torch.float32).dequantize(), expected)


def test_reading_in_chunks_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.convert(save_model(tmp_path / "m", "llama"), tmp_path / "m.gguf", lambda _: QType.F32)
    whole = open_weights(resolve(str(path)))
    monkeypatch.setattr("batchrun.weights.source._CHUNK_ELEMENTS", 7 * 64)
    assert all(torch.equal(whole.get(name), open_weights(resolve(str(path))).get(name)) for name in whole.names())


def test_damaged_files_are_named(small: ModelFiles, tmp_path: Path) -> None:
    path = small.weights[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(JobError, match=r"model\.safetensors"):
        open_weights(small)
    path.write_bytes(whole)
    converted = gguf_files.convert(path.parent, tmp_path / "model.gguf", lambda _: QType.F32)
    data = converted.read_bytes()
    for end in range(0, len(data) - 1, len(data) // 37):
        converted.write_bytes(data[:end])
        with pytest.raises(JobError, match=r"model\.gguf"):
            open_weights(resolve(str(converted)))


def test_loader_fuses_and_converts(small: ModelFiles) -> None:
    saved = load_file(small.weights[0])
    parts = [Q_PROJ.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
    loader = Loader(open_weights(small), torch.bfloat16)
    fused = loader.take_linear(*parts, shape=(128, 64))
    assert fused.shape == (128, 64)
    assert fused.dtype == torch.bfloat16
    assert torch.equal(fused.dequantize(), torch.cat([saved[part] for part in parts]).bfloat16())
    ids = torch.tensor([[3, 0], [127, 3]])
    assert torch.equal(fused.rows(ids), fused.dequantize()[ids])


def test_loader_quantizes_linear_layers_and_no_table(small: ModelFiles) -> None:
    loader = Loader(open_weights(small), torch.float32, quantize=QUANTIZERS["int8"])
    assert isinstance(loader.take_table("model.embed_tokens.weight", shape=(320, 64)), Dense)
    weight = loader.take_linear(Q_PROJ, shape=(64, 64))
    assert isinstance(weight, Int8)
    assert (weight.shape, weight.dtype, weight.stored.dtype) == ((64, 64), torch.float32, torch.int8)
    plain = load_file(small.weights[0])[Q_PROJ]
    rounding = (weight.dequantize() - plain).abs().unflatten(1, (weight.scales.shape[1], -1))
    assert (rounding <= weight.scales[..., None] * 0.50001).all()
    ids = torch.tensor([[3, 0], [63, 3]])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])


@pytest.mark.parametrize("dim", [0, 1])
def test_the_whole_of_blocks_that_are_not_full_is_a_part(dim: int) -> None:
    weight = Fp8(torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3), torch.float32)
    assert torch.equal(weight.shard(dim, 0, 1).dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="whole number of blocks"):
        weight.shard(dim, 0, 2)


@pytest.mark.parametrize(
    "ops", [torch_ops, *(pytest.param(ops, marks=needs_kernels) for ops in (native_ops, onednn_ops))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantize", [Dense, *QUANTIZERS.values()])
def test_a_packed_weight_stands_for_the_same_numbers(
    ops: ModuleType, dtype: torch.dtype, quantize: Callable[[torch.Tensor], Weight]
) -> None:
    plain = torch.randn(40, 36).to(dtype)
    weight, kept = quantize(plain), quantize(plain)
    before = weight.dequantize()
    weight.pack(ops.pack)
    kept.pack(ops.pack, keep_rows=True)
    for each in (weight, kept):
        assert each.dequantize().dtype == dtype
        assert torch.equal(each.dequantize(), before)
    assert torch.equal(kept.rows(torch.tensor([39, 0])), before[[39, 0]])
    assert torch.equal(ops.linear(plain, weight), ops.linear(plain, kept))


def test_loader_names_what_does_not_fit(small: ModelFiles) -> None:
    loader = Loader(open_weights(small), torch.float32)
    assert loader.has(Q_PROJ)
    assert not loader.has("model.layers.9.mlp.up_proj.weight")
    with pytest.raises(JobError, match=r"model\.safetensors: tensor model\.layers\.9\.mlp\.up_proj\.weight is missing"):
        loader.take("model.layers.9.mlp.up_proj.weight")
    with pytest.raises(JobError, match=r"q_proj\.weight \[64, 64\], expected \[64, 32\]"):
        loader.take(Q_PROJ, shape=(64, 32))
    with pytest.raises(JobError, match="shape mismatch"):
        loader.take(Q_PROJ, "model.norm.weight")


def test_loader_accounts_for_every_tensor(small: ModelFiles) -> None:
    tensors = load_file(small.weights[0])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, small.weights[0])
    loader = Loader(open_weights(small), torch.float32)
    for name in sorted(tensors):
        if "inv_freq" not in name and name not in ("lm_head.weight", Q_PROJ):
            loader.take(name)
    with pytest.raises(JobError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.weight$"):
        loader.finish()
    loader.take(Q_PROJ)
    loader.finish()


def test_tensors_that_are_not_floats_are_refused(small: ModelFiles) -> None:
    save_file({"packed": torch.ones(2, 2, dtype=torch.int32)}, small.weights[0])
    with pytest.raises(JobError, match="packed holds I32"):
        open_weights(small).get("packed")
