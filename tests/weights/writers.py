"""Quantized checkpoints of tiny models, written as each format's own documents have it.

A writer takes a layer's weight [out, in] and gives what the checkpoint stores of it, by the names in the module, and
the weight that this stands for, float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
Write = Callable[[Tensor], tuple[Stored, Tensor]]


@dataclass(frozen=True)
class Format:
    """A way to write: the checkpoint's ``quantization_config``, and what writes a layer."""

    config: Mapping[str, Any]
    write: Write


def write_checkpoint(plain: Path, folder: Path, form: Format) -> tuple[Path, Path]:
    """The model in ``plain`` with its linear layers in a format, and one with the weights that this stands for."""
    quantized, reference = folder / "quantized", folder / "reference"
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if name.endswith("_proj.weight"):
            parts, meant[name] = form.write(stored.pop(name))
            stored |= {name.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
    for copy in (quantized, reference):
        shutil.copytree(plain, copy, dirs_exist_ok=True)
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    configure(quantized, form.config)
    return quantized, reference


def configure(folder: Path, quantization: Any) -> None:
    """Give the model in a folder another ``quantization_config``."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def pack_words(integers: Tensor, bits: int) -> Tensor:
    """Unsigned integers [rows, columns] as int32 words of neighbours along the rows, lowest bits first."""
    per_word = 32 // bits
    words = torch.zeros(len(integers) // per_word, integers.shape[1], dtype=torch.int64)
    for place in range(per_word):
        words |= integers[place::per_word].long() << (place * bits)
    return words.to(torch.int32)  # wraps around


def round_columns(weight: Tensor, group_of: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers [out, in], float16 scales and zero points [out, groups] of a weight [out, in]."""
    levels = (1 << bits) - 1
    scales, zeros, integers = [], [], torch.empty_like(weight)
    for group in range(int(group_of.max()) + 1):
        columns = group_of == group
        low, high = weight[:, columns].aminmax(dim=1)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / levels).half()
        zero = torch.full_like(low, (levels + 1) // 2) if symmetric else (-low / scale.float()).round().clamp(0, levels)
        integers[:, columns] = (weight[:, columns] / scale.float()[:, None] + zero[:, None]).round().clamp(0, levels)
        scales.append(scale)
        zeros.append(zero)
    return integers, torch.stack(scales, 1), torch.stack(zeros, 1)


def meaning(integers: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    """``scale * (integer - zero)``, rounded once to float32."""
    return ((integers - zeros[:, group_of]).double() * scales.double()[:, group_of]).float()


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = False, desc_act: bool = False, second: bool = False
) -> Format:
    """Layers as GPTQ has them; with ``desc_act``, columns are grouped in a random order."""

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        k = weight.shape[1]
        group_of = torch.arange(k) // (k if group == -1 else group)
        if desc_act:  # layers that share their input share its order
            group_of = group_of[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        integers, scales, zeros = round_columns(weight, group_of, bits, symmetric)
        if not (symmetric or second):
            zeros = zeros.clamp(min=1)  # what is stored is one less
        stored = {
            "qweight": pack_words(integers.T, bits),
            "qzeros": pack_words(zeros if second else zeros - 1, bits).T,
            "scales": scales.T,
            "g_idx": group_of.int(),
        }
        return stored, meaning(integers, scales, zeros, group_of)

    version = {"checkpoint_format": "gptq_v2"} if second else {}
    options = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act}
    return Format({"quant_method": "gptq", **options, **version}, write)


def awq(group: int = 32) -> Format:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def columns(integers: Tensor) -> Tensor:
        """[N, rows] as int32 [rows, N / 8]."""
        return pack_words(integers.unflatten(0, (-1, 8))[:, order].flatten(0, 1), 4).T

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        k = weight.shape[1]
        group_of = torch.arange(k) // (k if group == -1 else group)
        integers, scales, zeros = round_columns(weight, group_of, 4, symmetric=False)
        stored = {"qweight": columns(integers), "qzeros": columns(zeros), "scales": scales.T}
        return stored, meaning(integers, scales, zeros, group_of)

    options = {"bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Format({"quant_method": "awq", **options}, write)


def compressed(form: str, weights: Mapping[str, Any], *, g_idx: bool = False) -> Format:
    """Layers that the ``compressed-tensors`` package compresses and, for their meaning, decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        n, k = weight.shape
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if g_idx else torch.arange(k)
        strategy = str(args.strategy)
        groups = {"tensor": weight.view(1, -1), "channel": weight[:, None]}.get(strategy)
        if strategy == "group":
            groups = weight[:, order].view(n, -1, args.group_size)
        elif strategy == "block":
            groups = weight.view(-(-n // 128), 128, -(-k // 128), 128).transpose(1, 2).flatten(2)
        scale, zero = calculate_qparams(*groups.aminmax(dim=-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if g_idx:
            state["weight_g_idx"] = torch.empty(k, dtype=torch.int32)
            state["weight_g_idx"][order] = (torch.arange(k) // args.group_size).int()
            integers = (weight[:, order].view_as(groups) / scale[..., None]).round().clamp(-8, 7)
            meant = torch.empty_like(weight).index_copy_(1, order, (integers * scale[..., None]).flatten(1))
            plain = torch.empty_like(weight).index_copy_(1, order, integers.flatten(1))
            ones = {"weight": plain, "weight_scale": torch.ones_like(scale), "weight_zero_point": zero}
            stored = compressor.compress(ones, scheme)
            return {**stored, "weight_scale": scale, "weight_g_idx": state["weight_g_idx"]}, meant
        stored = compressor.compress(state, scheme)
        return dict(stored), compressor.decompress(stored, scheme)["weight"].float()

    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    options = {"format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return Format({"quant_method": "compressed-tensors", **options, "quantization_status": "compressed"}, write)


def fp8(scale_of: str) -> Format:
    """Layers of FP8; ``scale_of``: ``block``, ``row`` or ``tensor``."""

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        n, k = weight.shape
        if scale_of == "block":
            blocks = weight.view(n // 128, 128, k // 128, 128).abs().amax((1, 3))
            name, scale = "weight_scale_inv", blocks / 448
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            largest = weight.abs().amax() if scale_of == "tensor" else weight.abs().amax(1, keepdim=True)
            name, scale = "weight_scale", largest / 448
            spread = scale.expand(n, k)
        floats = (weight / spread).to(torch.float8_e4m3fn)
        stored = {"weight": floats, name: scale}
        if scale_of == "tensor":
            stored["input_scale"] = torch.tensor(0.5)  # for activations: not part of the weight
        return stored, floats.float() * spread

    config = {"quant_method": "fp8", "activation_scheme": "static" if scale_of == "tensor" else "dynamic"}
    return Format(config | ({"weight_block_size": [128, 128]} if scale_of == "block" else {}), write)


def bitsandbytes_8bit() -> Format:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        largest = weight.abs().amax(1)
        integers = (weight * (127 / largest)[:, None]).round().to(torch.int8)
        stored = {"weight": integers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, integers * (largest / 127)[:, None]

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, write)


def bitsandbytes_4bit(*, nested: bool) -> Format:
    """NF4 in blocks of 64; ``nested``: their largest magnitudes are quantized, too, in blocks of 256."""
    table = torch.cat((torch.distributions.Normal(0, 1).icdf(torch.linspace(0.05, 0.95, 15)) / 1.6449, torch.ones(1)))

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        blocks = weight.flatten().view(-1, 64)
        largest = blocks.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        stored = {"weight.absmax": largest}
        if nested:
            offset, levels = largest.mean().item(), torch.linspace(-1, 1, 256)
            parts = (largest - offset).split(256)
            tops = torch.stack([part.abs().amax() for part in parts])
            spread = tops.repeat_interleave(256)[: len(largest)]
            indices = ((largest - offset) / spread)[:, None].sub(levels).abs().argmin(1)
            largest = levels[indices] * spread + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            stored = {
                "weight.absmax": indices.to(torch.uint8),
                "weight.nested_absmax": tops,
                "weight.nested_quant_map": levels.clone(),
            }
        indices = (blocks / largest[:, None])[..., None].sub(table).abs().argmin(2)
        high, low = indices.flatten().to(torch.uint8).view(-1, 1, 2).unbind(2)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored |= {
            "weight": high << 4 | low,
            "weight.quant_map": table.clone(),
            "weight.quant_state.bitsandbytes__nf4": text,
        }
        return stored, (table[indices] * largest[:, None]).view(weight.shape)

    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}
    return Format({"quant_method": "bitsandbytes", **options}, write)


def mxfp4() -> Format:
    """Blocks of 32 that stand for what transformers' reader makes of them."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        groups = weight.unflatten(1, (-1, 32))
        exponents = (groups.abs().amax(2) / 6).log2().ceil()
        scaled = groups * torch.exp2(-exponents)[..., None]
        indices = scaled[..., None].sub(torch.tensor(FP4_VALUES)).abs().argmin(3).to(torch.uint8)
        blocks, scales = indices[..., ::2] | indices[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
        meant = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
        return {"weight_blocks": blocks, "weight_scales": scales}, meant.contiguous()

    return Format({"quant_method": "mxfp4"}, write)
