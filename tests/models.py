"""Tiny random models, saved the way Hugging Face saves them, so that tests load what a user would load."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from batchrun.models.input_sizes import of_down, of_output
from batchrun.weights.formats import Dense
from batchrun.weights.quantize import PLAIN, QUANTIZERS

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn-rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "llama-odd-heads": {"head_dim": 20},  # that the native kernels do not take
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 320


def save_model(path: Path, family: str = "llama", *, layers: int = 3, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of ``family`` with a byte-level tokenizer to ``path``."""
    kind = family.split("-")[0]
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "llama3": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "yarn": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
        "initializer_range": 0.3,  # wide, so that logits differ and greedy choices are not near-ties
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, **FAMILIES[family], **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.generation_config.pad_token_id = None
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path, *, chat_template: str | None = CHAT_TEMPLATE, add_bos: bool = False) -> None:
    """A tokenizer whose tokens are bytes (ids 0 to 255) and `SPECIAL` (from 256)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def greedy(path: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy output ids of transformers' ``generate``, end-of-sequence ignored."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return greedy_with(model, prompt, max_tokens)


def greedy_with(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def round_layers(model: Any, quantization: str) -> None:
    """Rounds the linear layers of a transformers model as a quantized engine's are."""
    quantize = QUANTIZERS.get(quantization, PLAIN)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    with torch.inference_mode():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(quantize(linear.weight).dequantize())
            qkv = Dense(torch.cat([each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]))
            gate_up = Dense(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            sizes = partial(of_output, qkv, layer.input_layernorm.weight, heads, kv_heads)
            attention.o_proj.weight.copy_(quantize(attention.o_proj.weight, sizes).dequantize())
            sizes = partial(of_down, gate_up, layer.post_attention_layernorm.weight)
            mlp.down_proj.weight.copy_(quantize(mlp.down_proj.weight, sizes).dequantize())
