"""Opens the models that an engine runs: the one whose tokens are sampled, and one that drafts for it."""

from __future__ import annotations

import torch

from batchrun.engine.memory import DTYPE_BYTES, Device, context_length, weight_bytes
from batchrun.engine.speculation.draft_model import DraftModel
from batchrun.engine.speculation.speculator import DraftCosts
from batchrun.errors import JobError
from batchrun.job import ModelSpec, SpeculativeSpec
from batchrun.model_files import ModelFiles
from batchrun.models.decoder import Decoder
from batchrun.models.families import model_config
from batchrun.ops import backend
from batchrun.weights.load import Loader, open_weights
from batchrun.weights.quantize import PLAIN, QUANTIZERS
from batchrun.weights.source import WeightSource


def load_decoder(
    files: ModelFiles,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    weights: WeightSource | None = None,
) -> Decoder:
    """The model of ``files``, for sequences of up to ``max_model_len`` tokens; ``weights``: where they are open."""
    config = model_config(files.config)
    ops = backend(device, dtype, config.head_dim, reproducible=spec.reproducible)
    quantize, keep = QUANTIZERS.get(spec.quantization, PLAIN), spec.quantization == "none"
    loader = Loader(weights or open_weights(files), dtype, device, ops.pack, quantize, keep=keep)
    return Decoder(config, loader, ops, max_model_len, spec.kv_cache_dtype)


def load_draft_model(files: ModelFiles, spec: SpeculativeSpec, target: Decoder, max_model_len: int) -> DraftModel:
    """The model of ``files`` as one that drafts for ``target``.

    Its own bits move no result, so it is never run reproducibly. Raises JobError where its layers see further back than
    the blocks that sequences keep for the target's.
    """
    model = ModelSpec(name_or_path=files.reference, quantization=spec.quantization)
    device, dtype = target.norm.device, target.norm.dtype
    decoder = load_decoder(files, model, device, dtype, max_model_len)
    kept = target.windows[0]
    if kept is not None and any(window is None or window > kept for window in decoder.windows):
        raise JobError(
            f"engine.speculative_config.model: {files.reference} attends to tokens more than {kept} back, "
            "which all layers of model.name_or_path have forgotten"
        )
    return DraftModel(decoder, device, target.config.vocab_size)


def draft_costs(
    draft: ModelFiles, spec: SpeculativeSpec, target: ModelFiles, model: ModelSpec, dtype: str, device: Device
) -> DraftCosts:
    """What the draft model takes, a step of it being to one of the target as their weights are."""
    width = DTYPE_BYTES[dtype]
    own = weight_bytes(draft, width, spec.quantization, device)
    return DraftCosts(
        step=own / max(1, weight_bytes(target, width, model.quantization, device)),
        context=context_length(draft.config),
    )
