"""A small model that guesses what a larger one with the same vocabulary samples.

It draws with the target's own noise (Gumbel coupling), so that both choose the same token about as often as their
distributions overlap: at least (1 - TV) / (1 + TV) of the time, TV being their total variation distance (Daliri, Musco
and Suresh 2024). It keeps its keys and values in the target's blocks: memory of its own under the same numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.engine.batch import Batch, Groups
from batchrun.engine.sampler import sample
from batchrun.models.decoder import Decoder
from batchrun.models.kv_cache import KVCache


class DraftModel:
    """``decoder`` guesses for a target of ``vocab_size`` tokens; it runs once `allocate` has given it a KV pool.

    Of a request's block tables it takes the first, which has all of a sequence's blocks.
    """

    def __init__(self, decoder: Decoder, device: torch.device, vocab_size: int) -> None:
        self.groups = Groups.of(decoder, [0] * len(decoder.windows))
        self._decoder = decoder
        self._device = device
        self._vocab_size = vocab_size
        self._caches: list[KVCache] = []

    def allocate(self, n_blocks: int, block_size: int) -> None:
        """Make a KV pool of ``n_blocks`` blocks in place of what there was."""
        self._caches = []
        self._caches = [self._decoder.new_cache(n_blocks, block_size, self._device) for _ in self._decoder.layers]

    def run(self, batch: Batch, tokens: Tensor) -> None:
        """Compute a step that is on the device, and write what is sampled into the token buffer ``tokens``."""
        decoder, sampling = self._decoder, batch.sampling
        ids = tokens[batch.token_rows, batch.positions].clamp(max=decoder.config.vocab_size - 1)  # the rest is padding
        hidden = decoder.forward(ids, batch.positions, batch.groups, self._caches, batch.wanted)
        if sampling is None:
            return
        logits = decoder.logits(hidden if batch.sampled is None else hidden[batch.sampled])
        if (missing := self._vocab_size - logits.shape[1]) != 0:  # of padding, which is never drafted
            logits = functional.pad(logits, (0, missing), value=-math.inf).contiguous()
        chosen = sample(logits, sampling, tokens, decoder.ops)
        tokens[sampling.rows, sampling.positions] = chosen.clamp(min=0)
