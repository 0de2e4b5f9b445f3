"""Small GGUF files written with the ``gguf`` package, as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from batchrun.weights.gguf import GGUFTensor

Quantise = Callable[[str], gguf.GGMLQuantizationType]
CORPUS = (
    """\
The quick brown fox jumps over the lazy dog. She sells 12 sea shells by the sea shore; it's 1,234.50 dollars!
def area(width, height):
    return width * height  # don't worry, they're floats

    Indented text, tabs\tand   runs of   blanks.
日本語の文章もあります。数字は123です。 Größe, naïve café, Ελληνικά, русский текст, emoji 🙂🙃.
"""
    * 4
)


def train_bpe(vocab_size: int = 500) -> tuple[list[str], list[str]]:
    """A byte-level vocabulary and its merges, learned from `CORPUS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def write_tokenizer(
    path: Path,
    *,
    model: str,
    tokens: Sequence[str],
    token_types: Sequence[int],
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    pre: str | None = None,
    special: Mapping[str, int] | None = None,
    flags: Mapping[str, bool] | None = None,
    chat_template: str | None = None,
) -> Path:
    """A GGUF file that holds a tokenizer, and of a model no more than is needed to be one."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, hidden_size=32, heads=2, kv_heads=1, layers=1, ffn=32)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(token_types))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for name, number in (special or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    for name, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    return _finish(writer, path)


def convert(
    model: Path, path: Path, quantise: Quantise, *, metadata: Mapping[str, Any] | None = None, extra: Any = ()
) -> Path:
    """Convert a Hugging Face model directory with one safetensors file. ``extra``: further (name, array) tensors."""
    config = json.loads((model / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    _write_shape(
        writer,
        hidden_size=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        layers=config["num_hidden_layers"],
        ffn=config["intermediate_size"],
        head_dim=config.get("head_dim"),
    )
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"{architecture}.{key}", value)
    tokens, merges = train_bpe(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, data in load_file(model / "model.safetensors").items():
        for part, count in heads.items():
            if part in name and architecture == "llama":
                data = permute(data, count)
        kind = quantise(name)
        encoded = encode(data, kind)
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight", ".bias"))), encoded, raw_dtype=kind)
    for name, data in extra:
        writer.add_tensor(name, data)
    return _finish(writer, path)


def encode(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The blocks of ``data``; random ones where the package has no encoder."""
    if kind in _SCALES:
        return random_blocks(data.shape, kind)
    return gguf.quants.quantize(data, kind)


# Where a block has its scale and its scale of minimums (float16), and how much larger the latter is, so that numbers
# spread around zero.
_SCALES = {
    gguf.GGMLQuantizationType.Q2_K: (80, 82, 1.5),
    gguf.GGMLQuantizationType.Q3_K: (108, None, 0),
    gguf.GGMLQuantizationType.Q4_K: (0, 2, 7.5),
    gguf.GGMLQuantizationType.Q5_K: (0, 2, 15.5),
    gguf.GGMLQuantizationType.Q6_K: (208, None, 0),
    gguf.GGMLQuantizationType.IQ4_XS: (0, None, 0),
}


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, deviation: float = 0.1) -> np.ndarray:
    """Random blocks that stand for numbers of about this standard deviation, as bytes [rows, bytes]."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    scale_at, minimum_at, ratio = _SCALES[kind]
    blocks = np.random.default_rng(sum(shape)).integers(0, 256, (shape[0], shape[1] // elements, size), np.uint8)
    scale = 1e-3
    for _ in range(2):  # the second time with the scale that the first one shows to be right
        for at, value in ((scale_at, scale), (minimum_at, scale * ratio)):
            if at is not None:
                blocks[..., at : at + 2] = np.array([value], "<f2").view(np.uint8)
        raw = blocks.reshape(shape[0], -1)
        scale *= deviation / gguf.quants.dequantize(raw, kind).std()
    return raw


def meaning(path: Path) -> dict[str, np.ndarray]:
    """What the package reads in a file that `convert` made: float32, under the names that models know."""
    reader = gguf.GGUFReader(path)
    heads = {
        f"{part}_proj": int(reader.fields[f"llama.attention.{key}"].contents())
        for part, key in (("q", "head_count"), ("k", "head_count_kv"))
        if reader.fields["general.architecture"].contents() == "llama"
    }
    found = {}
    for tensor in reader.tensors:
        name = GGUFTensor(tensor.name, (), 0, 0).hf_name
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, count in heads.items():
            if part in name:
                data = data.reshape(count, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        found[name] = data
    return found


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which GGUF keeps the rows of Llama's query and key projections: halves of a head interleaved."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_shape(
    writer: gguf.GGUFWriter,
    *,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    layers: int,
    ffn: int,
    head_dim: int | None = None,
) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
