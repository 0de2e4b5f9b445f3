"""Quantized safetensors checkpoints: each format stands for the numbers that it says, packed or plain."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchrun import Engine
from batchrun.errors import JobError
from batchrun.model_files import resolve
from batchrun.weights.formats import Dense, Fp8, Int4, Int8, Weight
from batchrun.weights.load import Loader, open_weights
from batchrun.weights.source import WeightSource
from tests.models import save_model
from tests.weights import writers
from tests.weights.logprobs import engine_logprobs, reference_logprobs
from tests.weights.writers import Format, write_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj."

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
MXFP4 = {"quant_method": "mxfp4"}
PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"


def gptq_formats() -> dict[str, tuple[type[Weight], Callable[[], Format]]]:
    formats = {}
    for bits, symmetric, desc_act, second in itertools.product((4, 8), *[(False, True)] * 3):
        options = {"symmetric": symmetric, "desc_act": desc_act, "second": second}
        name = f"gptq-{bits}" + "".join(f"-{option}" for option, on in options.items() if on)
        formats[name] = (Int4 if bits == 4 else Int8, lambda bits=bits, options=options: writers.gptq(bits, **options))
    return formats


FORMATS: dict[str, tuple[type[Weight], Callable[[], Format]]] = {
    **gptq_formats(),
    "gptq-one-group": (Int4, lambda: writers.gptq(group=-1)),
    "awq": (Int4, writers.awq),
    "awq-one-group": (Int4, lambda: writers.awq(-1)),
    "ct-4": (Int4, lambda: writers.compressed(PACKED, INT4)),
    "ct-4-asymmetric": (Int4, lambda: writers.compressed(PACKED, INT4 | {"symmetric": False})),
    "ct-4-order": (Int4, lambda: writers.compressed(PACKED, INT4, g_idx=True)),
    "ct-packed-8": (Int8, lambda: writers.compressed(PACKED, INT8)),
    "ct-packed-8-asymmetric": (Int8, lambda: writers.compressed(PACKED, INT8 | {"symmetric": False})),
    "ct-int8": (Int8, lambda: writers.compressed(INTEGERS, INT8)),
    "ct-int8-asymmetric": (Int8, lambda: writers.compressed(INTEGERS, INT8 | {"symmetric": False})),
    "ct-int8-tensor": (Int8, lambda: writers.compressed(INTEGERS, INT8 | {"strategy": "tensor"})),
    "ct-fp8": (Fp8, lambda: writers.compressed(FLOATS, FP8)),
    "ct-fp8-tensor": (Fp8, lambda: writers.compressed(FLOATS, FP8 | {"strategy": "tensor"})),
    "ct-fp8-block": (
        Fp8,
        lambda: writers.compressed(FLOATS, FP8 | {"strategy": "block", "block_structure": [128, 128]}),
    ),
    "fp8-block": (Fp8, lambda: writers.fp8("block")),
    "fp8-row": (Fp8, lambda: writers.fp8("row")),
    "fp8-tensor": (Fp8, lambda: writers.fp8("tensor")),
    "bitsandbytes-8": (Int8, writers.bitsandbytes_8bit),
    "nf4": (Dense, lambda: writers.bitsandbytes_4bit(nested=False)),
    "nf4-nested": (Dense, lambda: writers.bitsandbytes_4bit(nested=True)),
    "mxfp4": (Int8, writers.mxfp4),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of shapes that whole blocks of 128 fill, with biases."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "initializer_range": 0.1}
    return save_model(tmp_path_factory.mktemp("plain") / "qwen2", "qwen2", layers=2, **shape)


@pytest.fixture
def damaged(plain: Path, tmp_path: Path) -> Callable[..., str]:
    """Writes a checkpoint, changes what it stores of the first layer's q_proj, and tells how it is refused."""

    def refused(form: Format, **changes: Tensor | None) -> str:
        folder, _ = write_checkpoint(plain, tmp_path, form)
        stored = load_file(folder / "model.safetensors")
        for name, tensor in changes.items():
            stored.pop(Q_PROJ + name, None)
            if tensor is not None:
                stored[Q_PROJ + name] = tensor.contiguous()
        save_file(stored, folder / "model.safetensors")
        with pytest.raises(JobError) as error:
            Engine(str(folder), dtype="float32", max_model_len=64, max_num_seqs=1)
        assert str(folder / "model.safetensors") in str(error.value)
        return str(error.value)

    return refused


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_stands_for_the_numbers_it_says(plain: Path, tmp_path: Path, name: str) -> None:
    kept, make = FORMATS[name]
    folder, reference = write_checkpoint(plain, tmp_path, make())
    source, meant = open_weights(resolve(str(folder))), load_file(reference / "model.safetensors")
    assert source.names() == set(meant)
    for each, tensor in meant.items():
        assert source[each].shape == tensor.shape
        found = source.get(each)
        assert torch.allclose(found, tensor, rtol=1e-6, atol=1e-7 * tensor.abs().max().item()), each
        weight = source[each].quantized(torch.float32)
        assert (Dense if weight is None else type(weight)) is (kept if each.endswith("_proj.weight") else Dense), each
        assert weight is None or torch.equal(weight.dequantize(), found)
    wanted, quantized = reference_logprobs(reference), engine_logprobs(folder)
    assert (reference_logprobs(plain) - wanted).abs().mean() > 0.003  # there is something to find
    assert (quantized - wanted).abs().max() < 2e-3
    assert (engine_logprobs(folder, quantization="dequantize") - wanted).abs().max() < 2e-4


@pytest.mark.parametrize("name", [name for name, (kept, _) in FORMATS.items() if kept is not Dense])
def test_joined_layers_stay_quantized(plain: Path, tmp_path: Path, name: str) -> None:
    kept, make = FORMATS[name]
    folder, reference = write_checkpoint(plain, tmp_path, make())
    parts = [Q_PROJ.replace("q_", f"{part}_") + "weight" for part in "qkv"]
    loader = Loader(open_weights(resolve(str(folder))), torch.float32)
    meant = load_file(reference / "model.safetensors")
    fused = loader.take_linear(*parts, shape=(sum(len(meant[part]) for part in parts), 256))
    assert type(fused) is kept
    assert torch.allclose(fused.dequantize(), torch.cat([meant[part] for part in parts]), rtol=1e-6, atol=1e-6)


def test_modules_may_stay_plain(plain: Path, tmp_path: Path) -> None:
    """Those that a checkpoint names (modules_to_not_convert, ignore), and that therefore store plain weights."""
    folder, reference = write_checkpoint(plain, tmp_path, writers.fp8("row"))
    stored = load_file(folder / "model.safetensors")
    plain_weight = load_file(plain / "model.safetensors")[Q_PROJ + "weight"]
    del stored[Q_PROJ + "weight_scale"]
    save_file(stored | {Q_PROJ + "weight": plain_weight}, folder / "model.safetensors")
    meant = load_file(reference / "model.safetensors") | {Q_PROJ + "weight": plain_weight}
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    assert (engine_logprobs(folder) - reference_logprobs(reference)).abs().max() < 2e-3


def test_parts_of_a_layer_may_lie_in_several_files(plain: Path, tmp_path: Path) -> None:
    folder, reference = write_checkpoint(plain, tmp_path, writers.gptq())
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    for index in range(3):
        save_file({name: stored[name] for name in names[index::3]}, folder / f"model-{index}.safetensors")
    source, meant = open_weights(resolve(str(folder))), load_file(reference / "model.safetensors")
    assert source.names() == set(meant)
    assert all(torch.allclose(source.get(name), meant[name], rtol=1e-6) for name in meant)


def test_biases_of_zeros_need_no_place(tmp_path: Path) -> None:
    """Old GPTQ checkpoints have one for every layer."""
    model = save_model(tmp_path / "llama", layers=1)
    folder, _ = write_checkpoint(model, tmp_path, writers.gptq())
    stored, bias = load_file(folder / "model.safetensors"), f"{Q_PROJ}bias"
    save_file(stored | {bias: torch.zeros(64)}, folder / "model.safetensors")
    Engine(str(folder), dtype="float32", max_model_len=64, max_num_seqs=1).close()
    save_file(stored | {bias: torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(JobError, match=r"model\.safetensors: tensors that this model has no place for: .*q_proj\.bias"):
        Engine(str(folder), dtype="float32", max_model_len=64, max_num_seqs=1)


def opened_as(tmp_path: Path, config: Mapping[str, Any], **parts: Tensor) -> WeightSource:
    """A checkpoint that stores ``parts`` of a module ``x``; ``_parts`` follow the name of its weight."""
    folder = save_model(tmp_path / "model", layers=1)
    stored = {f"x.weight{name}" if name[0] == "_" else f"x.{name}": tensor for name, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors")
    writers.configure(folder, config)
    return open_weights(resolve(str(folder)))


def stored_as(tmp_path: Path, config: Mapping[str, Any], **parts: Tensor) -> Weight:
    """The weight of a module ``x`` of which a checkpoint stores ``parts``, as `opened_as` has it."""
    weight = opened_as(tmp_path, config, **parts)["x.weight"].quantized(torch.float32)
    assert weight is not None
    return weight


def test_gptq_by_hand(tmp_path: Path) -> None:
    weight = stored_as(
        tmp_path,
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False},
        qweight=torch.tensor([[0x76543210] * 7 + [0x0FEDCBA9]], dtype=torch.int32),
        qzeros=torch.tensor([[0x20000006]], dtype=torch.int32),  # of output 0: 7; of output 7: 3; of the others: 1
        scales=torch.tensor([[0.5] * 7 + [2.0]]).half(),
    )
    rows = weight.dequantize().tolist()
    assert rows[0] == [-3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0]
    assert rows[1] == [-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert rows[7] == [12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 24.0, -6.0]


def test_words_in_settings_may_be_of_any_case(tmp_path: Path) -> None:
    """Here: the version of the format, which says whether zero points are stored less one."""
    parts = {
        "qweight": torch.full((1, 8), 0x33333333, dtype=torch.int32),
        "qzeros": torch.tensor([[0x22222222]], dtype=torch.int32),
        "scales": torch.ones(1, 8).half(),
    }
    for version, value in (("gptq_v2", 1.0), ("GPTQ_V2", 1.0), ("GPTQ", 0.0)):
        config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "checkpoint_format": version}
        weight = stored_as(tmp_path, config, **parts)
        assert torch.equal(weight.dequantize(), torch.full((8, 8), value)), version


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_gptq_has_its_zeros_in_the_middle(tmp_path: Path, bits: int) -> None:
    """As version 1 or 2 stores them; of others it says that it is not symmetric after all."""
    middle, n = 1 << (bits - 1), 32 // bits
    config = {"quant_method": "gptq", "bits": bits, "group_size": -1}
    integers = torch.full((n, 8), middle + 2)
    parts = {"qweight": writers.pack_words(integers.T, bits), "scales": torch.ones(1, n).half()}
    for version in ("gptq", "gptq_v2"):
        for zeros in (torch.full((n, 1), middle - 1), torch.full((n, 1), middle)):
            qzeros = writers.pack_words(zeros, bits).T.contiguous()
            weight = stored_as(tmp_path, config | {"checkpoint_format": version}, **parts, qzeros=qzeros)
            assert torch.equal(weight.dequantize(), torch.full((n, 8), 2.0))
            zeros[-1] = middle - 3
            qzeros = writers.pack_words(zeros, bits).T.contiguous()
            with pytest.raises(JobError, match=r"model\.safetensors: tensor x\.qzeros .* not symmetric, although sym"):
                stored_as(tmp_path, config | {"checkpoint_format": version}, **parts, qzeros=qzeros)
    mixed = torch.tensor([[middle - 1], [middle]]).repeat(n // 2, 1)
    with pytest.raises(JobError, match=r"x\.qzeros .* not symmetric"):
        stored_as(tmp_path, config, **parts, qzeros=writers.pack_words(mixed, bits).T.contiguous())


def test_mxfp4_exponents(tmp_path: Path) -> None:
    """The least, the largest, and that which says NaN."""
    weight = stored_as(
        tmp_path,
        {"quant_method": "mxfp4"},
        _blocks=torch.full((3, 1, 16), 0x22, dtype=torch.uint8),  # ones
        _scales=torch.tensor([[0], [254], [255]], dtype=torch.uint8),
    )
    values = weight.dequantize()
    assert values[:2, 0].tolist() == [2.0**-127, 2.0**127]
    assert values[2].isnan().all()
    assert values[:2].isfinite().all()


def test_awq_by_hand(tmp_path: Path) -> None:
    weight = stored_as(
        tmp_path,
        {"quant_method": "awq", "bits": 4, "group_size": 2},
        qweight=torch.tensor([[0x75316420], [0x00000001]], dtype=torch.int32),
        qzeros=torch.tensor([[0x00010002]], dtype=torch.int32),  # of output 0: 2; of output 1: 1
        scales=torch.tensor([[0.5, 2, 1, 1, 1, 1, 1, 1]]).half(),
    )
    assert weight.dequantize().tolist() == [[-1, -0.5], [0, -2], *([float(column), 0] for column in range(2, 8))]


def test_fp8_blocks_that_the_weight_does_not_fill(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    floats = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    whole = Fp8Dequantize(None)._dequantize_one(floats, scales, torch.float32)
    weight = stored_as(
        tmp_path,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        weight=floats[:200, :300].contiguous(),
        weight_scale_inv=scales,
    )
    assert torch.equal(weight.dequantize(), whole[:200, :300])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1)])
def test_fp8_scales_of_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    floats, scales = torch.randn(200, 30).to(torch.float8_e4m3fn), torch.rand(shape)
    weight = stored_as(tmp_path, {"quant_method": "fp8"}, weight=floats, weight_scale=scales)
    assert torch.equal(weight.dequantize(), floats.float() * scales.view(-1, 1))


@pytest.mark.parametrize(("bits", "nested"), [(4, False), (4, True), (8, False)])
def test_what_bitsandbytes_writes(tmp_path: Path, bits: int, nested: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    plain = torch.randn(48, 128)
    if bits == 4:
        packed, state = bnb.functional.quantize_4bit(plain, quant_type="nf4", compress_statistics=nested)
        parts = {"weight": packed, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
        meant = bnb.functional.dequantize_4bit(packed, state)
    else:
        integers, largest, _ = bnb.functional.int8_vectorwise_quant(plain.half())
        parts = {"weight": integers, "SCB": largest}
        meant = bnb.functional.int8_vectorwise_dequant(integers, largest)
    folder = save_model(tmp_path / "model", layers=1)
    save_file({f"x.{name}": tensor for name, tensor in parts.items()}, folder / "model.safetensors")
    writers.configure(
        folder, {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True, "bnb_4bit_quant_type": "nf4"}
    )
    found = open_weights(resolve(str(folder))).get("x.weight")
    assert torch.allclose(found, meant.float(), rtol=1e-5)


def grouped_by_one(bits: int) -> Format:
    """GPTQ that says so."""
    form = writers.gptq(bits)
    return replace(form, config={**form.config, "group_size": 1})


class TestDamage:
    """Each gives one error, which names the file and the tensor."""

    def test_missing(self, damaged: Callable[..., str]) -> None:
        assert f"tensor {Q_PROJ}scales is missing" in damaged(writers.gptq(), scales=None)
        assert f"tensor {Q_PROJ}qzeros is missing" in damaged(writers.gptq(), qzeros=None)
        assert f"tensor {Q_PROJ}weight is missing" in damaged(writers.gptq(), qweight=None)
        assert f"tensor {Q_PROJ}qzeros is missing" in damaged(writers.awq(), qzeros=None)
        assert f"tensor {Q_PROJ}weight_scale is missing" in damaged(writers.fp8("row"), weight_scale=None)
        assert f"tensor {Q_PROJ}weight_scale is missing" in damaged(writers.compressed(PACKED, INT4), weight_scale=None)
        assert f"tensor {Q_PROJ}weight_shape is missing" in damaged(writers.compressed(PACKED, INT4), weight_shape=None)
        assert f"tensor {Q_PROJ}SCB is missing" in damaged(writers.bitsandbytes_8bit(), SCB=None)
        nf4 = writers.bitsandbytes_4bit(nested=True)
        for part in ("absmax", "quant_map", "nested_absmax", "quant_state.bitsandbytes__nf4"):
            assert f"tensor {Q_PROJ}weight.{part} is missing" in damaged(nf4, **{f"weight.{part}": None})
        assert f"tensor {Q_PROJ}weight_scales is missing" in damaged(writers.mxfp4(), weight_scales=None)

    def test_left_over(self, damaged: Callable[..., str]) -> None:
        ones = torch.ones(3)
        assert f"no place for: {Q_PROJ}strange" in damaged(writers.awq(), strange=ones)
        assert f"no place for: {Q_PROJ}weight_scale" in damaged(writers.gptq(), weight_scale=ones)
        assert f"{Q_PROJ}weight is stored both plain and quantized" in damaged(writers.awq(), weight=ones)

    def test_wrong_shape(self, damaged: Callable[..., str]) -> None:
        scales = damaged(writers.gptq(), scales=torch.ones(4, 256).half())
        assert f"tensor {Q_PROJ}scales is [4, 256], expected [8, 256]" in scales
        zeros = damaged(writers.awq(), qzeros=torch.ones(8, 31, dtype=torch.int32))
        assert f"tensor {Q_PROJ}qzeros is [8, 31], expected [8, 32]" in zeros
        vector = damaged(writers.awq(), qweight=torch.ones(8, dtype=torch.int32))
        assert f"tensor {Q_PROJ}qweight is [8], expected two dimensions" in vector
        groups = damaged(writers.gptq(group=96))  # of 256 inputs
        assert "qweight has 256 inputs, which are no whole groups of 96" in groups
        assert f"{Q_PROJ}weight_scale is [3, 2], expected" in damaged(writers.fp8("row"), weight_scale=torch.ones(3, 2))
        three_bits = damaged(writers.compressed(PACKED, INT4), weight_packed=torch.ones(256, 24, dtype=torch.int32))
        assert f"{Q_PROJ}weight_packed is [256, 24], which is no matrix [256, 256] of 4 or 8 bits" in three_bits
        assert f"{Q_PROJ}weight_scale is [256, 7]" in damaged(
            writers.compressed(INTEGERS, INT8), weight_scale=torch.ones(256, 7)
        )
        rows = damaged(writers.mxfp4(), weight_scales=torch.ones(256, 7, dtype=torch.uint8))
        assert f"{Q_PROJ}weight_scales is [256, 7], expected [256, 8]" in rows

    def test_wrong_type(self, damaged: Callable[..., str]) -> None:
        scales = damaged(writers.gptq(), scales=torch.ones(8, 256, dtype=torch.int32))
        assert f"tensor {Q_PROJ}scales holds I32 values, expected" in scales
        other = damaged(writers.fp8("row"), weight=torch.ones(256, 256).to(torch.float8_e5m2), weight_scale=None)
        assert f"tensor {Q_PROJ}weight holds F8_E5M2 values, not plain floats" in other

    def test_wrong_values(self, damaged: Callable[..., str]) -> None:
        groups = damaged(writers.gptq(), g_idx=torch.zeros(256, dtype=torch.int32))
        assert f"tensor {Q_PROJ}weight: its g_idx does not divide 256 columns into 8 equal groups" in groups
        name = "weight.quant_state.bitsandbytes__nf4"
        state = damaged(writers.bitsandbytes_4bit(nested=False), **{name: torch.ones(9, dtype=torch.uint8)})
        assert f"tensor {Q_PROJ}{name} is no description" in state
        layout = damaged(writers.bitsandbytes_8bit(), weight_format=torch.tensor(1, dtype=torch.uint8))
        assert f"tensor {Q_PROJ}weight_format names a layout" in layout

    @pytest.mark.parametrize(
        "change",
        [
            {"blocksize": 0},
            {"blocksize": -64},
            {"blocksize": True},
            {"blocksize": 64.0},
            {"blocksize": 1 << 80},
            {"shape": [-4, -64]},
            {"shape": [4.0, 64.0]},
            {"shape": [4, 64, 1]},
            {"shape": 256},
            {"nested_blocksize": 0},
            {"nested_blocksize": None},
            {"nested_offset": True},
            {"nested_offset": "0.5"},
            {"nested_offset": 10**400},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_states_of_bitsandbytes(self, tmp_path: Path, change: dict[str, Any]) -> None:
        form, name = writers.bitsandbytes_4bit(nested=True), "weight.quant_state.bitsandbytes__nf4"
        parts, _ = form.write(torch.randn(4, 64))
        state = json.dumps(json.loads(bytes(parts[name].tolist())) | change)
        parts[name] = torch.tensor(list(state.encode()), dtype=torch.uint8)
        with pytest.raises(JobError, match=rf"model\.safetensors: tensor x\.{name} is no description"):
            stored_as(tmp_path, form.config, **parts)

    def test_an_offset_may_be_an_integer(self, tmp_path: Path) -> None:
        form, name = writers.bitsandbytes_4bit(nested=True), "weight.quant_state.bitsandbytes__nf4"
        parts, _ = form.write(torch.randn(4, 64))
        state, found = json.loads(bytes(parts[name].tolist())), []
        for offset in (2, 2.0):
            text = json.dumps(state | {"nested_offset": offset})
            parts[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
            found.append(opened_as(tmp_path, form.config, **parts).get("x.weight"))
        assert torch.equal(*found)

    def test_nested_scales_without_a_state(self, damaged: Callable[..., str]) -> None:
        """The state of scales that are not quantized, beside ones that are."""
        indices = torch.zeros(1024, dtype=torch.uint8)
        refused = damaged(writers.bitsandbytes_4bit(nested=False), **{"weight.absmax": indices})
        assert "quant_state.bitsandbytes__nf4 is no description" in refused

    @pytest.mark.parametrize(
        ("form", "changes", "named"),
        [
            (writers.compressed(INTEGERS, INT8), {"weight": (10**13, 0), "weight_scale": (1,)}, "weight is [1000"),
            (writers.compressed(INTEGERS, INT8), {"weight": (128, 256), "weight_scale": (128, 1)}, "shape mismatch"),
            (writers.bitsandbytes_8bit(), {"weight": (256, 128)}, "q_proj.weight [256, 128]"),
            (writers.compressed(PACKED, INT4), {"weight_packed": (256, 0), "weight_shape": [256, 0]}, "_packed is"),
            (
                writers.compressed(PACKED, INT4),
                {"weight_packed": (256, 2), "weight_shape": [256, 9], "weight_scale": (256, 1)},
                "does not divide a weight [256, 9] of 4 bits",
            ),
            (writers.mxfp4(), {"weight_blocks": (256, 0, 16), "weight_scales": (256, 0)}, "expected blocks"),
            (grouped_by_one(4), {}, "no whole groups of 1 integers of 4 bits"),
            (grouped_by_one(8), {}, "no whole groups of 1 integers of 8 bits"),
            (writers.awq(-1), {"qweight": (255, 32)}, "has 255 inputs, which are no whole groups of 255"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_shapes_that_no_weight_has(
        self, damaged: Callable[..., str], form: Format, changes: dict[str, Any], named: str
    ) -> None:
        encodings = {"weight": torch.int8, "weight_packed": torch.int32, "qweight": torch.int32}
        tensors = {
            name: torch.tensor(shape)
            if isinstance(shape, list)
            else torch.ones(shape, dtype=encodings.get(name, torch.uint8 if form.config == MXFP4 else torch.float32))
            for name, shape in changes.items()
        }
        assert named in damaged(form, **tensors)

    def test_groups_of_three(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match=r"x\.weight_scale is \[8, 2\], which does not divide a weight \[8, 6\]"):
            stored_as(
                tmp_path,
                writers.compressed(INTEGERS, INT8).config,
                weight=torch.ones(8, 6, dtype=torch.int8),
                _scale=torch.ones(8, 2),
            )

    @pytest.mark.parametrize("fault", [ValueError, RuntimeError, ZeroDivisionError, torch.OutOfMemoryError])
    def test_what_cannot_be_packed(self, plain: Path, tmp_path: Path, fault: type[Exception]) -> None:
        """Is named; a device that has no memory left is no fault of the file's."""

        def pack(weight: Weight) -> None:
            raise fault("odd")

        folder, _ = write_checkpoint(plain, tmp_path, writers.fp8("row"))
        loader = Loader(open_weights(resolve(str(folder))), torch.float32, pack=pack)
        names = [Q_PROJ.replace("q_", f"{part}_") + "weight" for part in "qk"]
        told = rf"model\.safetensors: {', '.join(names)} cannot be used: odd"
        kind, match = (JobError, told) if fault is not torch.OutOfMemoryError else (fault, "^odd")
        with pytest.raises(kind, match=match):
            loader.take_linear(*names, shape=(384, 256))

    def test_plain_layers_of_a_wrong_shape(self, plain: Path, tmp_path: Path) -> None:
        """Nothing of them is read."""
        folder = shutil.copytree(plain, tmp_path / "model")
        tensors = load_file(plain / "model.safetensors")
        for name, wrong in (
            ("self_attn.q_proj.weight", (10**13, 0)),
            ("self_attn.k_proj.weight", (64, 256)),
            ("self_attn.v_proj.bias", (64,)),
            ("self_attn.o_proj.weight", (256, 128)),
            ("mlp.up_proj.weight", (384,)),
            ("mlp.gate_proj.weight", ()),
            ("mlp.down_proj.weight", (384, 256)),
            ("post_attention_layernorm.weight", (1,)),
        ):
            name = f"model.layers.1.{name}"
            save_file(tensors | {name: torch.zeros(wrong)}, folder / "model.safetensors")
            with pytest.raises(JobError) as error:
                Engine(str(folder), dtype="float32", max_model_len=64, max_num_seqs=1)
            assert f"{folder / 'model.safetensors'}: shape mismatch: found " in str(error.value)
            assert f"{name} {list(wrong)}" in str(error.value)


def refusal(folder: Path, config: Any) -> str:
    writers.configure(folder, config)
    with pytest.raises(JobError) as error:
        resolve(str(folder), weights=False)
    assert str(error.value).startswith(f"{folder}: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq"}, "weights quantised with 'hqq' are not supported (supported: awq,"),
        ({"bits": 4}, "weights quantised with 'None'"),
        ([4], "quantization_config is a list"),
        ({"quant_method": "gptq", "bits": 3}, "'gptq', bits: 3 is not supported (supported: 4, 8)"),
        ({"quant_method": "gptq", "bits": 4.0}, "'gptq', bits: 4.0 is not supported (supported: 4, 8)"),
        ({"quant_method": "gptq", "bits": 4, "group_size": None}, "group_size: None"),
        ({"quant_method": "gptq", "bits": 4, "group_size": True}, "group_size: True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1.0}, "group_size: -1.0"),
        ({"quant_method": "gptq", "bits": 4, "sym": 1}, "sym: 1 is not supported (supported: True, False)"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["-:mlp"]}, "dynamic: ['-:mlp']"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:mlp": {"bits": 8}}}, "dynamic +:mlp: {'bits': 8}"),
        ({"quant_method": "awq", "bits": 8}, "'awq', bits: 8"),
        ({"quant_method": "awq", "bits": 4.0}, "'awq', bits: 4.0"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point: False"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size: [64, 64]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "'bitsandbytes', bnb_4bit_quant_type: 'int4'"),
        ({"quant_method": "compressed-tensors"}, "config_groups.format: None"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(tmp_path: Path, config: Any, named: str) -> None:
    assert named in refusal(save_model(tmp_path / "model", layers=1), config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "nvfp4-pack-quantized"}, "group_0.format: 'nvfp4-pack-quantized'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format: 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"config_groups": {"g": {"weights": INT4 | {"num_bits": 3}}}}, "g.weights.num_bits: 3"),
        ({"config_groups": {"g": {"format": INTEGERS, "weights": INT4}}}, "g.weights.num_bits: 4"),
        (
            {"config_groups": {"g": {"format": FLOATS, "weights": FP8 | {"strategy": "block"}}}},
            "g.weights.block_structure: None",
        ),
    ],
)
def test_compressed_tensors_options_are_refused_at_once(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = {**writers.compressed(PACKED, INT4).config, **change}
    assert named in refusal(save_model(tmp_path / "model", layers=1), config)


def test_accepted_options(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", layers=1)
    for config in (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:lm_head": {}}, "format": "gptq"},
        {"quant_method": "awq", "bits": 4, "version": "GEMM", "modules_to_not_convert": None},
        {"load_in_8bit": True},
        writers.compressed(PACKED, INT4).config | {"transform_config": {}, "sparsity_config": {"format": "dense"}},
    ):
        writers.configure(folder, config)
        assert resolve(str(folder), weights=False).config["quantization_config"]
