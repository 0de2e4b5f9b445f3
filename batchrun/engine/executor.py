"""Runs steps on the device, in order, one after another: token buffer, KV caches, forward pass, sampling.

`Executor.launch` does not block. Sampled ids stay in the token buffer on the device, where the next step reads them, so
a step can be launched before the host knows what the one before it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from batchrun.data.rows import TokenLogprob
from batchrun.engine.batch import Batch, ScoredRow
from batchrun.engine.request import StepOutput
from batchrun.engine.sampler import logprobs, sample
from batchrun.models.decoder import Decoder
from batchrun.models.kv_cache import KVCache, zeros
from batchrun.ops.attention_batch import AttentionBatch, LastTokens

_LOGIT_ROWS = 256  # rows of logits that exist at once while prompts are scored


class Executor:
    """One model on one device.

    ``n_blocks`` blocks of ``block_size`` tokens per KV group, block 0 included; ``max_num_seqs`` rows of at most
    ``max_model_len`` tokens in the token buffer. ``num_threads`` bounds the CPU threads of an operation.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        device: torch.device,
        dtype: torch.dtype,
        n_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_threads: int | None = None,
    ) -> None:
        self.model = model
        self.device = device
        config = model.config
        shape = (n_blocks, config.n_kv_heads, block_size, config.head_dim)
        self.caches = [KVCache.zeros(*shape, dtype, device) for _ in model.layers]
        self.tokens = zeros((max_num_seqs, max_model_len), torch.int64, device)
        # Of every step: on a CPU, new memory would have to be cleared first.
        self._logits = torch.empty((max_num_seqs, config.vocab_size), dtype=torch.float32, device=device)
        self._stream = ThreadPoolExecutor(1, "executor", initializer=use_threads, initargs=(num_threads,))

    def launch(self, batch: Batch) -> Future[StepOutput]:
        """Queue a step behind those launched before."""
        return self._stream.submit(self._run, batch)

    def close(self) -> None:
        self._stream.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> StepOutput:
        for slot, known in batch.uploads:
            self.tokens[slot, : len(known)] = torch.from_numpy(known).to(self.device)
        positions = batch.positions.to(self.device)
        ids = self.tokens[batch.token_rows.to(self.device), positions]
        groups = [
            AttentionBatch(g.cu_q.to(self.device), g.kv_len.to(self.device), g.block_table.to(self.device),
                      g.slots.to(self.device)) for g in batch.groups
        ]  # fmt: skip
        sampled = LastTokens(batch.sampled.tokens.to(self.device), batch.sampled.cu_q.to(self.device))
        all_wanted = len(sampled.tokens) == len(ids) or any(batch.scored)
        hidden = self.model.forward(ids, positions, groups, self.caches, None if all_wanted else sampled)
        scored = [self._score(hidden, row) if row else [] for row in batch.scored]
        if not batch.samples:
            return StepOutput([], [], scored)
        if len(hidden) > len(batch.samples):
            hidden = hidden[sampled.tokens]
        logits = self.model.logits(hidden, self._logits[: len(hidden)])
        top = [row.params.logprobs for row in batch.samples]
        raw = logits.clone() if any(count is not None for count in top) else logits
        chosen = sample(logits, batch.samples, self.tokens, self.model.ops)
        slots = torch.tensor([row.slot for row in batch.samples], device=self.device)
        self.tokens[slots, torch.tensor([row.position for row in batch.samples], device=self.device)] = chosen.clamp(
            min=0
        )
        return StepOutput(chosen.tolist(), logprobs(raw, chosen.clamp(min=0), top), scored)

    def _score(self, hidden: Tensor, row: ScoredRow) -> list[TokenLogprob]:
        """Log-probabilities of a run of prompt tokens, a bounded number of logit rows at a time."""
        out: list[TokenLogprob] = []
        for begin in range(0, row.count, _LOGIT_ROWS):
            count = min(_LOGIT_ROWS, row.count - begin)
            logits = self.model.logits(hidden[row.first + begin : row.first + begin + count])
            targets = torch.tensor(row.targets[begin : begin + count], device=self.device)
            out.extend(_present(logprobs(logits, targets, [row.top] * count)))
        return out


def _present(entries: Sequence[TokenLogprob | None]) -> list[TokenLogprob]:
    return [entry for entry in entries if entry is not None]


def use_threads(count: int | None) -> None:
    """Bound the CPU threads of operations that the calling thread runs; None: leave them as they are."""
    if count is not None:
        torch.set_num_threads(count)
