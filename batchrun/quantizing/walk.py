"""Rounding a model's linear layers by what the rows of a job make of it, layer by layer.

The rows run through the decoder as they would in a job. Each layer is rounded by the activations that the layers before
it, already rounded, hand to it, so that what those lost is seen, and the next layer gets what this one gives once it
is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from batchrun.data.prompt import PromptBuilder
from batchrun.data.source import Source
from batchrun.errors import JobError
from batchrun.job import JobSpec
from batchrun.model_files import ModelFiles
from batchrun.models.decoder import Decoder, Layer, Linear
from batchrun.models.families import model_config
from batchrun.models.kv_cache import KVCache
from batchrun.ops import torch_ops
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.quantizing.gptq import Curvature
from batchrun.tokenization.tokenizer import Tokenizer
from batchrun.weights.formats import Dense, Weight
from batchrun.weights.load import Loader
from batchrun.weights.source import WeightSource

BLOCK_SIZE = 32
_BATCH_TOKENS = 4096
PARTS: Mapping[str, tuple[str, ...]] = {  # of a layer: which weights of the checkpoint each of its matrices is of
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
Round = Callable[[str, Tensor, Curvature], Weight]  # of a layer's name and plain weight; raises ValueError


def job_prompts(job: JobSpec, files: ModelFiles, max_model_len: int, count: int) -> list[list[int]]:
    """Token ids of the prompts of a job's first ``count`` rows, for the model ``files``; error rows are left out.

    Raises JobError where there is none.
    """
    builder = PromptBuilder(job.prompt, job.sampling, Tokenizer.load(files), max_model_len)
    source = Source(job.input)
    rows = (row for split in source.splits(source.files()) for row in source.rows(split))
    prepared = [each for row in islice(rows, count) for each in builder.build([row])]
    prompts = [list(each.token_ids) for each in prepared if each.error is None]
    if not prompts:
        reason = f"the first one's error is {prepared[0].error}" if prepared else "there is none"
        raise JobError(f"--calibrate: no row of {job.input.path} can be made into a prompt: {reason}")
    return prompts


def round_layers(
    files: ModelFiles,
    source: WeightSource,
    prompts: Sequence[Sequence[int]],
    round_weight: Round,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Weight]:
    """The model's linear weights on the CPU by name, as ``round_weight`` rounds them, from activations of ``dtype``.

    Holds all of the plain model in memory. Raises JobError that names a layer which cannot be rounded.
    """
    watched = _Watched()
    longest = max(map(len, prompts))
    decoder = Decoder(model_config(files.config), Loader(source, dtype, device, keep=False), watched, longest)  # type: ignore[arg-type]
    batches = [PackedPrompts.of(decoder, each) for each in _batches(prompts)]
    states = [decoder.embedding.rows(batch.ids) for batch in batches]
    found: dict[str, Weight] = {}
    following = [layer.input_norm for layer in decoder.layers[1:]] + [decoder.norm]
    for index, (layer, norm) in enumerate(zip(decoder.layers, following, strict=True)):
        watched.grams.clear()
        for batch, state in zip(batches, states, strict=True):
            batch.run(decoder, layer, norm, state.clone())
        linears: dict[str, Any] = {}
        for part, names in PARTS.items():
            stems = [f"model.layers.{index}.{name}" for name in names]
            linear: Linear = getattr(layer, part)
            rows = [source[f"{stem}.weight"].shape[0] for stem in stems]
            try:
                curvature = Curvature(watched.grams[linear.weight])
                plain = linear.weight.dequantize().split(rows)
                weights = [round_weight(stem, each, curvature) for stem, each in zip(stems, plain, strict=True)]
            except ValueError as error:
                raise JobError(f"{source[f'{stems[0]}.weight'].path}: {stems[0]}: {error}") from None
            linears[part] = replace(linear, weight=Dense(torch.cat([weight.dequantize() for weight in weights])))
            found |= {stem: weight.to(torch.device("cpu")) for stem, weight in zip(stems, weights, strict=True)}
        for batch, state in zip(batches, states, strict=True):
            batch.run(decoder, replace(layer, **linears), norm, state)
        decoder.layers[index] = replace(layer, **linears)
    return found


def _batches(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for prompt in prompts:
        if batch and sum(map(len, batch)) + len(prompt) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


class _Watched:
    """`torch_ops`, whose products also sum up what each weight multiplies: ``grams`` [in, in] float32."""

    def __init__(self) -> None:
        self.grams: dict[Weight, Tensor] = {}

    def linear(self, x: Tensor, weight: Weight, *others: Any) -> Tensor:
        wide = x.float()
        if weight in self.grams:
            self.grams[weight].addmm_(wide.T, wide)
        else:
            self.grams[weight] = wide.T @ wide
        return torch_ops.linear(x, weight, *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Some prompts as one step of a decoder, from their first tokens on, with memory for one layer's keys."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    batch: AttentionBatch
    cache: KVCache

    @classmethod
    def of(cls, decoder: Decoder, prompts: Sequence[Sequence[int]]) -> PackedPrompts:
        """For a decoder of `torch_ops`."""
        device, config = decoder.norm.device, decoder.config
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        blocks = -(-lengths // BLOCK_SIZE)
        table = torch.zeros(len(prompts), int(blocks.max()), dtype=torch.int32)
        number = 0
        for row, count in zip(table, blocks.tolist(), strict=True):
            row[:count] = torch.arange(number, number + count)
            number += count
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        rows = torch.arange(len(prompts)).repeat_interleave(lengths)
        slots = table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        cu_q = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        batch = AttentionBatch(*(each.to(device) for each in (cu_q, lengths.int(), table, slots)))
        cache = KVCache.zeros(number, config.n_kv_heads, BLOCK_SIZE, config.head_dim, decoder.norm.dtype, device)
        return cls(ids.to(device), positions.to(device), batch, cache)

    @torch.inference_mode()
    def run(self, decoder: Decoder, layer: Layer, next_norm: Tensor, residual: Tensor) -> Tensor:
        """One layer over ``residual`` [T, H], to which its output is added; returns it normed for the next."""
        hidden = torch_ops.rms_norm(residual, layer.input_norm, decoder.config.norm_eps)
        return decoder.run_layer(layer, next_norm, hidden, residual, self.positions, self.batch, self.cache)
