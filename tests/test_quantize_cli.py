"""`batchrun quantize`: checkpoints that others read as the numbers they were meant to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchrun.cli import main
from batchrun.errors import JobError
from batchrun.job import load_job
from batchrun.model_files import resolve
from batchrun.preflight import preflight
from batchrun.quantizing import run_quantize
from batchrun.quantizing.compress import GROUPS, Kind
from batchrun.quantizing.walk import job_prompts
from batchrun.tokenization.tokenizer import Tokenizer
from batchrun.weights.formats import Weight
from batchrun.weights.gguf import read_gguf
from batchrun.weights.quantize import group_size, to_fp8, to_int4, to_int8
from batchrun.weights.source import open_weights
from batchrun.weights.write import plain_piece, write_model
from tests import gguf_files
from tests.jobs import write_job
from tests.models import save_model

KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")
IDS = torch.arange(60)[None] * 7 % 256
BF16 = torch.bfloat16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantize(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["quantize", *map(str, arguments)])


def read_by_transformers(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def save_model_of(dtype: torch.dtype, path: Path, *, layers: int) -> Path:
    """As `save_model`, with float32 numbers that the configuration says to be of ``dtype``."""
    model = save_model(path, layers=layers)
    config = json.loads((model / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    (model / "config.json").write_text(json.dumps(config))
    return model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS).logits.float()
    return found


def rounded(path: Path, kind: Kind, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of ``dtype`` with the linear weights of a tiny model as they are rounded here."""
    saved, group = load_file(path / "model.safetensors"), group_size(32, GROUPS.get(kind, 32))  # of 64 and 96 columns
    rounding: dict[Kind, Callable[[Tensor], Weight]] = {
        "int8": lambda data: to_int8(data, group=group, signed=dtype),
        "int4": lambda data: to_int4(data, group=group, signed=dtype),
        "fp8": lambda data: to_fp8(data, scale_dtype=dtype),
    }
    model = read_by_transformers(path, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(rounding[kind](saved[name]).dequantize())
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_numbers_that_were_meant(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    model = save_model_of(dtype, tmp_path / "plain", layers=2)
    before = logits(read_by_transformers(model, dtype))
    done = quantize(model, "--to", kind, "-o", tmp_path / "made")
    assert done.exit_code == 0, done.output
    assert f"14 linear layers as {kind}" in done.output
    assert "before" in done.output
    options: dict[str, Any] = {}
    if kind == "fp8":  # or else activations are rounded as well
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    found = logits(read_by_transformers(tmp_path / "made", dtype, **options))
    wanted = logits(rounded(model, kind, dtype))
    assert (wanted - before).abs().max() > 0.1  # there is something to find
    tolerance = 1e-3 if dtype == torch.float32 else 0.0  # 4 bits: from 0 and a minimum here, from -8 there
    assert (found - wanted).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_groups_of_zeros_and_tiny_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_model_of(dtype, tmp_path / "plain", layers=1)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"  # 64 columns in groups of 32
    plain = tensors[name] = tensors[name].float()
    plain[0] = 0
    plain[1, :32] = 0
    plain[2] *= torch.finfo(dtype).smallest_normal
    plain[3, 32:] *= torch.finfo(dtype).smallest_normal
    save_file({key: each.to(dtype) for key, each in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    job = write_job(tmp_path, model, text_rows(20), model={"dtype": "float32"})
    for kind, *options in [(kind, *options) for kind in KINDS for options in ((), ("--calibrate", job))]:
        folder = tmp_path / f"{kind}-{len(options)}"
        done = quantize(model, "--to", kind, "-o", folder, *options)
        assert done.exit_code == 0, done.output
        for key, each in load_file(folder / "model.safetensors").items():
            assert each.float().isfinite().all(), key
            if key.endswith("weight_scale"):
                assert (each.abs() >= torch.finfo(dtype).smallest_normal).all(), key
        found = open_weights(resolve(str(folder))).get(name).float()
        assert not found[0].any()
        lost = (found - plain).square().sum(dim=1) / plain.square().sum(dim=1)
        assert (lost[[1, 3, 4]] < {"int8": 0.001, "int4": 0.05, "fp8": 0.003}[kind]).all(), lost


def test_fp8_activations_are_rounded_by_transformers(tmp_path: Path, tiny_model: Path) -> None:
    assert quantize(tiny_model, "--to", "fp8", "-o", tmp_path / "made").exit_code == 0
    model = read_by_transformers(tmp_path / "made")
    assert logits(model).isfinite().all()
    assert model.lm_head.weight.dtype == torch.float32
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is True


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_other_families(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path / "plain", family, layers=2)
    assert quantize(model, "--to", "int4", "-o", tmp_path / "made").exit_code == 0
    found = logits(read_by_transformers(tmp_path / "made"))
    assert (found - logits(rounded(model, "int4"))).abs().max() < 1e-3


def test_packed_integers_are_those_of_the_package(tmp_path: Path, tiny_model: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    name = "model.layers.0.mlp.down_proj"  # 96 columns
    plain = load_file(tiny_model / "model.safetensors")[f"{name}.weight"]
    for kind, bits in (("int4", 4), ("int8", 8)):
        assert quantize(tiny_model, "--to", kind, "-o", tmp_path / kind).exit_code == 0
        made = load_file(tmp_path / kind / "model.safetensors")
        assert tuple(made[f"{name}.weight_shape"].tolist()) == plain.shape
        integers = unpack_from_int32(made[f"{name}.weight_packed"], bits, plain.shape)
        ours = (to_int8 if bits == 8 else to_int4)(plain, group=32, signed=torch.float32)
        assert torch.equal(integers + (0 if bits == 8 else 8), ours.integers())
        assert torch.equal(made[f"{name}.weight_scale"], ours.scales)


def test_of_a_gguf_file_all_is_made_that_transformers_needs(tmp_path: Path, tiny_model: Path) -> None:
    import gguf

    path = gguf_files.convert(
        tiny_model,
        tmp_path / "model.gguf",
        lambda name: gguf.GGMLQuantizationType.Q8_0 if "proj" in name else gguf.GGMLQuantizationType.F32,
        metadata={},
    )
    files = resolve(str(path))
    assert quantize(path, "--to", "int8", "-o", tmp_path / "made").exit_code == 0
    made = read_by_transformers(tmp_path / "made", BF16)
    assert made.config.torch_dtype == BF16  # a GGUF file names none
    source = open_weights(files)
    name = "model.layers.0.mlp.up_proj.weight"
    wanted = to_int8(source.get(name).bfloat16(), group=32, signed=BF16).dequantize()
    logits(made)  # transformers unpacks at the first step
    assert (made.get_parameter(name).float() - wanted.float()).abs().max() < 0.01 * wanted.abs().max()
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "made"), Tokenizer.load(files)
    text = "She sells 12 sea shells; naïve café 日本"
    assert theirs(text)["input_ids"] == ours.encode(text, add_special_tokens=True)
    again = resolve(str(path))
    assert read_gguf(path).metadata["general.architecture"] == again.config["model_type"]


def test_files_of_a_directory_that_are_no_weights_are_copied(tmp_path: Path, tiny_model: Path) -> None:
    assert quantize(tiny_model, "--to", "int8", "-o", tmp_path / "made").exit_code == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (tiny_model / name).read_bytes()
    plain, made = (json.loads((folder / "config.json").read_text()) for folder in (tiny_model, tmp_path / "made"))
    assert made.pop("torch_dtype") == plain.pop("dtype")
    assert made.pop("quantization_config")["format"] == "pack-quantized"
    assert made == plain


def test_what_a_directory_says_of_its_own_weights_is_not_copied(tmp_path: Path) -> None:
    model = save_model(tmp_path / "plain", layers=1)
    stale = ("pytorch_model.bin.index.json", "tf_model.index.json", "quantize_config.json", "quant_config.json")
    for name in stale:
        (model / name).write_text('{"bits": 4, "weight_map": {}}')
    assert quantize(model, "--to", "int8", "-o", tmp_path / "made").exit_code == 0
    made = {path.name for path in (tmp_path / "made").iterdir()}
    assert not made & set(stale)
    assert {"config.json", "generation_config.json", "model.safetensors"} <= made


def test_shards(tmp_path: Path, tiny_model: Path) -> None:
    files = resolve(str(tiny_model))
    source = open_weights(files)
    pieces = [plain_piece(source, name, torch.float32) for name in sorted(source.names())]
    write_model(files, tmp_path / "made", pieces, {"torch_dtype": "float32"}, shard_bytes=100_000)
    shards = sorted((tmp_path / "made").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 110_000 for shard in shards)
    again = open_weights(resolve(str(tmp_path / "made")))
    assert again.names() == source.names()
    assert all(torch.equal(again.get(name), source.get(name)) for name in source.names())
    assert torch.equal(logits(read_by_transformers(tmp_path / "made")), logits(read_by_transformers(tiny_model)))


def test_no_more_than_one_tensor_is_made_at_a_time(tmp_path: Path, tiny_model: Path, monkeypatch: Any) -> None:
    alive: list[int] = []
    files = resolve(str(tiny_model))
    source = open_weights(files)
    pieces = [plain_piece(source, name, torch.float32) for name in sorted(source.names())]
    monkeypatch.setattr("torch.empty", _counting(torch.empty, alive))
    write_model(files, tmp_path / "made", pieces, {})
    assert len(alive) > 20
    assert max(alive) <= 2


def _counting(make: Any, alive: list[int]) -> Any:
    import weakref

    there: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def counted(*arguments: Any, **options: Any) -> Tensor:
        tensor: Tensor = make(*arguments, **options)
        there.add(tensor)
        alive.append(len(there))
        return tensor

    return counted


def test_what_is_there_is_not_written_over(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "notes.txt").write_text("mine")
    done = quantize(tiny_model, "--to", "int8", "-o", tmp_path / "made")
    assert done.exit_code == 2
    assert "exists already and is not empty" in done.output
    done = quantize(tiny_model, "--to", "int8", "-o", tmp_path / "made" / "notes.txt")
    assert done.exit_code == 2
    (tmp_path / "made" / "notes.txt").unlink()
    assert quantize(tiny_model, "--to", "int8", "-o", tmp_path / "made").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_nothing_is_left_of_what_failed(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(JobError, match="made: cannot be written: no space left"):
        run_quantize(str(tiny_model), "int4", tmp_path / "deep" / "made", echo=print)
    assert list((tmp_path / "deep").iterdir()) == []


def test_bad_requests_are_named(tmp_path: Path, tiny_model: Path) -> None:
    done = quantize(tiny_model, "--to", "int8", "-o", tmp_path / "made", "--rows", 3)
    assert done.exit_code == 2
    assert "--rows goes with --calibrate" in done.output
    done = quantize(tmp_path / "nothing", "--to", "int8", "-o", tmp_path / "made")
    assert done.exit_code == 2
    assert "nothing" in done.output
    odd = save_model(tmp_path / "odd", layers=1, intermediate_size=97)
    done = quantize(odd, "--to", "int4", "-o", tmp_path / "made")
    assert "int4 needs an even number of columns" in done.output
    assert quantize(odd, "--to", "fp8", "-o", tmp_path / "made").exit_code == 0


# ---- calibration


def text_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"number {n * 7919 % 1000} is {'odd' if n % 2 else 'even'}"} for n in range(first, count)]


def test_prompts_are_those_of_the_job(tmp_path: Path, tiny_model: Path) -> None:
    rows: list[Any] = [{"id": 0}, *text_rows(9, 1)]
    job = load_job(str(write_job(tmp_path, tiny_model, rows)))
    prompts = job_prompts(job, resolve(str(tiny_model)), 512, 4)
    tokenizer = Tokenizer.load(resolve(str(tiny_model)))
    assert prompts == [tokenizer.encode(f"Say {row['text']}", add_special_tokens=True) for row in rows[1:4]]
    assert "missing" in preflight(job).first_prompt()
    job = load_job(str(write_job(tmp_path, tiny_model, [{"id": 0}] * 3)))
    with pytest.raises(JobError, match="can be made into a prompt: the first one"):
        job_prompts(job, resolve(str(tiny_model)), 512, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_calibrated_layers_say_more_nearly_what_the_plain_model_says(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path / "plain", family, layers=2)
    job = write_job(tmp_path, model, text_rows(80), model={"dtype": "float32"})
    assert quantize(model, "--to", "int4", "-o", tmp_path / "alone").exit_code == 0
    done = quantize(model, "--to", "int4", "-o", tmp_path / "by-rows", "--calibrate", job, "--rows", 64)
    assert done.exit_code == 0, done.output
    assert "calibrating with 64 prompts" in done.output
    encode = Tokenizer.load(resolve(str(model))).encode
    held_out = [torch.tensor([encode(f"Say {row['text']}", add_special_tokens=True)]) for row in text_rows(80, 64)]
    plain, alone, by_rows = (read_by_transformers(tmp_path / name) for name in ("plain", "alone", "by-rows"))
    lost = []
    with torch.inference_mode():
        for other in (alone, by_rows):
            pairs = [(plain(ids).logits, other(ids).logits) for ids in held_out]
            lost.append(sum(float((a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum()) for a, b in pairs))
    assert lost[1] < 0.6 * lost[0]


def test_a_calibrated_checkpoint_is_of_the_same_form(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, text_rows(5))
    for kind in KINDS:
        folders = tmp_path / f"{kind}-alone", tmp_path / f"{kind}-by-rows"
        assert quantize(tiny_model, "--to", kind, "-o", folders[0]).exit_code == 0
        assert quantize(tiny_model, "--to", kind, "-o", folders[1], "--calibrate", job).exit_code == 0
        headers = []
        for folder in folders:
            with safe_open(folder / "model.safetensors", "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                headers.append({name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()})
        assert headers[0] == headers[1]
        assert (folders[0] / "config.json").read_bytes() == (folders[1] / "config.json").read_bytes()


def test_a_layer_that_gives_no_numbers_is_named(tmp_path: Path, tiny_model: Path) -> None:
    broken = save_model(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    job = write_job(tmp_path, broken, text_rows(3))
    done = quantize(broken, "--to", "int4", "-o", tmp_path / "made", "--calibrate", job)
    assert done.exit_code == 2
    assert "model.safetensors: model.layers.1.mlp.gate_proj: weights are not finite" in done.output
    assert not (tmp_path / "made").exists()
