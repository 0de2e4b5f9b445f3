"""Reading GGUF files: their metadata, where their tensors lie, and what both are called by Hugging Face models.

The ``gguf`` package's reader builds numpy views of every vocabulary entry, which takes seconds; this one takes
milliseconds and imports no torch, so that planning a job may read model files. Dequantising the tensors is
:mod:`batchrun.weights.source`'s work. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchrun.errors import JobError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGML_F32 = 0
PLAIN = frozenset({_GGML_F32, 1, 30})  # encodings that are floats: with float16 and bfloat16
# Bytes that a number takes in memory where its encoding stays packed: with a float32 scale for each group, and perhaps
# a minimum. See batchrun.weights.dequantize.
_PACKED = {
    2: 0.5 + 8 / 32,  # Q4_0
    3: 0.5 + 8 / 32,  # Q4_1
    6: 1 + 4 / 32,  # Q5_0
    7: 1 + 8 / 32,  # Q5_1
    8: 1 + 4 / 32,  # Q8_0
    10: 0.5 + 8 / 16,  # Q2_K
    11: 0.5 + 8 / 16,  # Q3_K
    12: 0.5 + 8 / 32,  # Q4_K
    13: 1 + 8 / 32,  # Q5_K
    14: 1 + 4 / 16,  # Q6_K
}

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file. ``shape`` is in torch's order (rows first), ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int

    @property
    def hf_name(self) -> str:
        """The name that Hugging Face models give this tensor; its own name where they know none."""
        if layer := _LAYER_TENSOR.fullmatch(self.name):
            number, part, kind = layer.groups()
            return f"model.layers.{number}.{_TENSOR_NAMES[part]}.{kind}" if part in _TENSOR_NAMES else self.name
        part, _, kind = self.name.rpartition(".")
        return f"{_TENSOR_NAMES[part]}.{kind}" if part in _TENSOR_NAMES else self.name

    @property
    def rows(self) -> tuple[int, int]:
        """Number of rows and length of one. A vector is a column, so that heads are groups of rows in biases too."""
        return (math.prod(self.shape), 1) if len(self.shape) < 2 else (math.prod(self.shape[:-1]), self.shape[-1])

    @property
    def end(self) -> int:
        """Where its bytes end in the file. Raises ``ValueError`` if its encoding is unknown."""
        n_rows, length = self.rows
        return self.offset + n_rows * row_bytes(self.ggml_type, length)


def resident_bytes(gguf: GGUFFile, dtype_bytes: int) -> int:
    """Bytes that the matrices take in memory: packed, or as plain numbers of ``dtype_bytes`` each."""
    matrices = (tensor for tensor in gguf.tensors.values() if len(tensor.shape) > 1)
    return int(sum(math.prod(each.shape) * _PACKED.get(each.ggml_type, dtype_bytes) for each in matrices))


def row_bytes(kind: int, n: int) -> int:
    """Bytes that a row of ``n`` numbers takes. Raises ``ValueError`` if encoding ``kind`` is unknown or cannot be."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if n % block:
        raise ValueError(f"a row of {n} numbers is not a whole number of {GGMLQuantizationType(kind).name} blocks")
    return int(n // block * size)


@dataclass(frozen=True)
class GGUFFile:
    """The header of one GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """The metadata value ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path, *, vocabulary: bool = False) -> GGUFFile:
    """Parse the header of ``path``.

    Without ``vocabulary``, metadata arrays of strings are given as their lengths, not as lists.
    Raises :class:`JobError` if the file is no GGUF of version 2 or 3, or is cut short.
    """
    try:
        return _read_gguf(path, path.stat().st_mtime_ns, vocabulary)
    except (OSError, ValueError, OverflowError, IndexError, struct.error) as error:
        raise JobError(f"{path}: not a readable GGUF file: {error}") from error


@lru_cache(maxsize=4)
def _read_gguf(path: Path, _version: int, vocabulary: bool) -> GGUFFile:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        metadata, tensors = _Cursor(data).header(vocabulary)
    return GGUFFile(path, metadata, tensors)


def check_tensors(gguf: GGUFFile) -> None:
    """Raises :class:`JobError` if a tensor has an encoding that is unknown, is empty, or is not all there."""
    size = gguf.path.stat().st_size
    for tensor in gguf.tensors.values():
        if 0 in tensor.shape:
            raise JobError(f"{gguf.path}: tensor {tensor.name} is {list(tensor.shape)}: it holds no numbers")
        try:
            end = tensor.end
        except ValueError as error:
            raise JobError(f"{gguf.path}: tensor {tensor.name}: {error}") from None
        if end > size:
            raise JobError(f"{gguf.path}: the file ends inside tensor {tensor.name}; fetch it again")


class _Cursor:
    """A position in the mapped file; every method reads what is there and moves past it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def header(self, vocabulary: bool) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self.data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version, n_tensors, n_pairs = self.numbers("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        metadata = {}
        for _ in range(n_pairs):
            key = self.string()
            metadata[key] = self.value(vocabulary)
        entries = [self.tensor_entry() for _ in range(n_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment <= 0:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-self.at // alignment) * alignment
        return metadata, {name: GGUFTensor(name, shape, kind, start + at) for name, shape, kind, at in entries}

    def numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) != length:
            raise ValueError("it ends inside its header")
        self.at += length
        return raw.decode("utf-8")

    def value(self, vocabulary: bool) -> Any:
        (kind,) = self.numbers("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(_layout(kind))[0]
        kind, count = self.numbers("IQ")
        if kind == _STRING:
            return self.strings(count) if vocabulary else self.skip_strings(count)
        return list(self.numbers(f"{count}{_layout(kind)}"))

    def strings(self, count: int) -> list[str]:
        start = self.at
        self.skip_strings(count)
        raw, at, length_at = self.data[start : self.at], 0, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            end = at + 8 + length_at(raw, at)[0]
            found.append(raw[at + 8 : end].decode("utf-8"))
            at = end
        return found

    def skip_strings(self, count: int) -> int:
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        if at > len(data):
            raise ValueError("it ends inside its header")
        self.at = at
        return count

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (n_dims,) = self.numbers("I")
        dims = self.numbers(f"{n_dims}Q")
        kind, offset = self.numbers("IQ")
        return name, dims[::-1], kind, offset


def _layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a metadata value of the unknown type {kind}")
    return _SCALARS[kind]


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """The ``config.json`` that a Hugging Face repository of this model would hold.

    ``gguf`` may have been read with or without its vocabulary. Raises :class:`JobError` for an architecture, or a
    variant of one, that batchrun does not run.
    """
    if gguf.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise JobError(f"{gguf.path}: GGUF architecture {gguf.architecture!r} is not supported (supported: {known})")
    if gguf.of_architecture("expert_count", 0):
        raise JobError(f"{gguf.path}: mixture-of-experts GGUF files are not supported")
    if gguf.metadata.get("split.count", 1) > 1:
        raise JobError(f"{gguf.path}: split GGUF files are not supported; merge the parts into one first")
    hidden_size, n_heads = _required(gguf, "embedding_length"), _required(gguf, "attention.head_count")
    window = gguf.of_architecture("attention.sliding_window")
    mistral = gguf.architecture == "llama" and window is not None  # GGUF calls Mistral "llama"
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if mistral else ARCHITECTURES[gguf.architecture]],
        "model_type": "mistral" if mistral else gguf.architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _required(gguf, "feed_forward_length"),
        "num_hidden_layers": _required(gguf, "block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": gguf.of_architecture("attention.head_count_kv", n_heads),
        "head_dim": gguf.of_architecture("attention.key_length") or hidden_size // n_heads,
        "rms_norm_eps": _required(gguf, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _required(gguf, "context_length"),
        "vocab_size": _vocab_size(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "rope_theta": gguf.of_architecture("rope.freq_base", 10000.0),
    }
    if window is not None:
        config |= {"sliding_window": window, "use_sliding_window": True}
    if scaling := _rope_scaling(gguf):
        config["rope_scaling"] = scaling
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[name] = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _required(gguf: GGUFFile, key: str) -> Any:
    value = gguf.of_architecture(key)
    if value is None or isinstance(value, list):
        state = "has no" if value is None else "has one value a layer for"
        raise JobError(f"{gguf.path}: this GGUF file {state} {gguf.architecture}.{key}")
    return value


def _vocab_size(gguf: GGUFFile) -> int:
    if embedding := gguf.tensors.get("token_embd.weight"):
        return embedding.shape[0]
    raise JobError(f"{gguf.path}: this GGUF file has no tensor token_embd.weight")


def _rope_scaling(gguf: GGUFFile) -> dict[str, Any] | None:
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf)
    kind = gguf.of_architecture("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": gguf.of_architecture("rope.scaling.factor", 1.0)}
    if original := gguf.of_architecture("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(gguf: GGUFFile) -> dict[str, Any]:
    """Llama 3's frequency scaling, which GGUF stores as its outcome: one divisor for each rotated pair.

    Every Llama 3 release scales with the same bounds, so the factor alone is recovered, and the whole is checked.
    """
    tensor = gguf.tensors["rope_freqs.weight"]
    n_pairs = math.prod(tensor.shape)
    with gguf.path.open("rb") as file:
        file.seek(tensor.offset)
        raw = file.read(4 * n_pairs)
    if tensor.ggml_type != _GGML_F32 or len(raw) != 4 * n_pairs:
        raise JobError(f"{gguf.path}: cannot read the rope frequency factors of this GGUF file")
    divisors = struct.unpack(f"<{n_pairs}f", raw)
    scaling = {
        "rope_type": "llama3",
        "factor": float(max(divisors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisor = _llama3_divisor(scaling, gguf.of_architecture("rope.freq_base", 10000.0), n_pairs)
    if any(abs(found - divisor(pair)) > 1e-3 * found for pair, found in enumerate(divisors)):
        raise JobError(f"{gguf.path}: the rope frequency factors of this GGUF file are not those of Llama 3")
    return scaling


def _llama3_divisor(scaling: dict[str, Any], theta: float, n_pairs: int) -> Callable[[int], float]:
    """What Llama 3 divides the frequency of rotated pair ``i`` by."""
    low, high, context = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )

    def divisor(pair: int) -> float:
        wavelength = 2 * math.pi * theta ** (pair / n_pairs)
        smooth = min(max((context / wavelength - low) / (high - low), 0.0), 1.0)
        return float(1 / ((1 - smooth) / scaling["factor"] + smooth))

    return divisor
