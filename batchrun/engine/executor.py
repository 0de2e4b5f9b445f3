"""Runs steps on the device, in order, one after another: token buffer, KV caches, forward pass, sampling.

`Executor.launch` does not block. Sampled ids stay in the token buffer on the device, where the next step reads them, so
a step can be launched before the host knows what the one before it sampled. One thread launches steps and never waits
for the device; another waits for what came out of them and makes the host's results.
"""

from __future__ import annotations

import os
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchrun.data.rows import TokenLogprob
from batchrun.engine.batch import Batch, Groups, Sampling, ScoredRow, build_batch
from batchrun.engine.graphs import DecodeGraphs, takes
from batchrun.engine.memory import RESERVED_BLOCKS
from batchrun.engine.request import Request, Step, StepOutput, StepRow
from batchrun.engine.sampler import Logprobs, logprobs, sample, token_logprobs
from batchrun.engine.speculation.draft_model import DraftModel
from batchrun.engine.transfer import Transfer, rebuilt, tensors_of
from batchrun.job import Auto
from batchrun.kernels.machine import slurm_processors
from batchrun.models.decoder import Decoder
from batchrun.models.kv_cache import KVCache, zeros
from batchrun.sampling import SamplingParams

_REPORTED = 20  # log-probabilities of a row that memory is measured with
_LOGIT_ROWS = 256  # rows of logits that exist at once while prompts are scored


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step left on the device for the host."""

    chosen: Tensor | None  # int64 [S]
    reported: Logprobs | None  # of the rows whose log-probabilities are wanted
    scored: list[list[Logprobs]]  # per row of the step: of runs of its prompt
    drafts: Tensor | None = None  # int64 [D]


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A step's inputs on the host."""

    batch: Batch
    filled: Batch | None  # what a graph reads of them, where there is one for such a step
    rounds: list[Batch]  # of the draft model, which come first


class Executor:
    """One model on one device; it runs once `allocate` has given it a KV pool.

    ``max_num_seqs`` rows of at most ``max_model_len`` tokens in the token buffer, their keys and values in blocks of
    ``block_size`` tokens. A step has at most ``max_num_seqs + draft_rows`` rows of logits. ``num_threads`` bounds the
    CPU threads of an operation.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        device: torch.device,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        draft_rows: int = 0,
        draft_model: DraftModel | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.caches: list[KVCache] = []
        self.tokens = zeros((max_num_seqs, max_model_len), torch.int64, device)
        # Of every step: on a CPU, new memory would have to be cleared first.
        rows = max_num_seqs + draft_rows
        self._logits = torch.empty((rows, model.config.vocab_size), dtype=torch.float32, device=device)
        self._draft_rows = draft_rows
        self._draft_model = draft_model
        self._block_size = block_size
        self._groups = Groups.of(model)
        self._transfer = Transfer(device)
        self._graphs: DecodeGraphs | None = None
        self._failure: Exception | None = None
        self._launcher = ThreadPoolExecutor(1, "launcher", initializer=use_threads, initargs=(num_threads,))
        self._reader = ThreadPoolExecutor(1, "reader")

    def allocate(self, n_blocks: int) -> None:
        """Make a KV pool of ``n_blocks`` blocks per KV group, block 0 included, in place of what there was."""
        fill_plan = getattr(self.model.ops, "fill_plan", None)  # of operations that never wait for the device
        self._graphs = None
        if fill_plan is not None and self.device.type == "cuda":
            self._graphs = DecodeGraphs(self._decode, fill_plan, len(self.tokens))
        self.caches = []
        self.caches = [self.model.new_cache(n_blocks, self._block_size, self.device) for _ in self.model.layers]
        if self._draft_model is not None:
            self._draft_model.allocate(n_blocks, self._block_size)

    def peak_bytes(self, max_num_batched_tokens: int) -> int:
        """Bytes of the GPU that PyTorch holds while it runs the largest step that there can be, KV left out."""
        self.allocate(RESERVED_BLOCKS)
        torch.cuda.reset_peak_memory_stats()
        rows, longest = self.tokens.shape
        step = largest_step(
            *(rows, longest, max_num_batched_tokens, self._block_size, len(self.model.windows), self._draft_rows)
        )
        self.launch(step).result()
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_allocated()

    def launch(self, step: Step) -> Future[StepOutput]:
        """Queue a step behind those launched before, of which one at most has not ended."""
        laid_out = self._laid_out(step)
        return self._reader.submit(_read, laid_out.batch, self._launcher.submit(self._run, laid_out))

    def _laid_out(self, step: Step) -> LaidOut:
        batch = build_batch(step, self._block_size, self._groups)
        filled = self._graphs.fill(batch) if self._graphs is not None and takes(batch) else None
        draft_model = self._draft_model
        if draft_model is None:
            return LaidOut(batch, filled, [])
        return LaidOut(batch, filled, [build_batch(each, self._block_size, draft_model.groups) for each in step.rounds])

    def close(self) -> None:
        """Stop, and give the device's memory back."""
        self._launcher.shutdown(wait=True, cancel_futures=True)
        self._reader.shutdown(wait=True, cancel_futures=True)
        self.caches, self._graphs, self._draft_model = [], None, None
        self.tokens = self._logits = torch.empty(0)

    def _run(self, step: LaidOut) -> Landing:
        """Launch a step. None is run after one that failed, whose tokens it would miss."""
        if self._failure is not None:
            raise RuntimeError("an earlier step failed") from self._failure
        try:
            return self._launch(step)
        except Exception as error:
            self._failure = error
            raise

    @torch.inference_mode()
    def _launch(self, step: LaidOut) -> Landing:
        """Launch all of a step. Nothing in here may wait for the device, but that a graph is captured now and then."""
        batch = step.batch
        if self._graphs is not None and step.filled is not None and batch.sampling is not None:
            logits = self._graphs.run(step.filled, self._transfer)[: len(batch.token_rows)]
            return Landing(
                self._sample(logits, self._transfer.send(batch.sampling), [[] for _ in batch.scored]), self.device
            )
        step = self._transfer.send(step)
        batch = step.batch
        if batch.uploads is not None:
            self.tokens[batch.uploads.rows, batch.uploads.positions] = batch.uploads.tokens
        if self._draft_model is not None:
            for each in step.rounds:
                self._draft_model.run(each, self.tokens)
        drafted = batch.drafted  # to be read before samples take their places
        drafts = self.tokens[drafted.rows, drafted.positions] if drafted is not None else None
        hidden = self._hidden(batch)
        scored = [self._score(hidden, row) if row else [] for row in batch.scored]
        if batch.sampling is None:
            return Landing(Sampled(None, None, scored), self.device)
        logits = self._logits_of(hidden if batch.sampled is None else hidden[batch.sampled])
        return Landing(replace(self._sample(logits, batch.sampling, scored), drafts=drafts), self.device)

    def _hidden(self, batch: Batch) -> Tensor:
        ids = self.tokens[batch.token_rows, batch.positions]
        return self.model.forward(ids, batch.positions, batch.groups, self.caches, batch.wanted)

    def _logits_of(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden, self._logits[: len(hidden)])

    def _decode(self, batch: Batch) -> Tensor:
        """The logits of a step of one token a row, which is all that a graph holds."""
        return self._logits_of(self._hidden(batch))

    def _sample(self, logits: Tensor, sampling: Sampling, scored: list[list[Logprobs]]) -> Sampled:
        ops = self.model.ops
        raw = logits[sampling.reported] if sampling.reported is not None else None
        chosen = sample(logits, sampling, self.tokens, ops)
        known = chosen.clamp(min=0)
        self.tokens[sampling.rows, sampling.positions] = known
        if raw is None:
            return Sampled(chosen, None, scored)
        return Sampled(chosen, logprobs(raw, known[sampling.reported], max(sampling.tops), ops), scored)

    def _score(self, hidden: Tensor, row: ScoredRow) -> list[Logprobs]:
        """Log-probabilities of a run of prompt tokens, a bounded number of logit rows at a time."""
        runs = zip(hidden[row.first :].split(_LOGIT_ROWS), row.targets.split(_LOGIT_ROWS), strict=False)
        return [
            logprobs(self.model.logits(states[: len(targets)]), targets, row.top, self.model.ops)
            for states, targets in runs
        ]


class Landing:
    """What a step leaves on the device, on its way to the host. It is there when the step has ended."""

    def __init__(self, sampled: Sampled, device: torch.device) -> None:
        self._sampled = rebuilt(sampled, [each.to("cpu", non_blocking=True) for each in tensors_of(sampled)])
        self._there = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        if self._there is not None:
            self._there.record()

    def wait(self) -> Sampled:
        if self._there is not None:
            self._there.synchronize()
        return self._sampled


def _read(batch: Batch, launched: Future[Landing]) -> StepOutput:
    """Wait for a step, and make the host's results of what it left."""
    sampled = launched.result().wait()
    scored = [
        [each for run in runs for each in token_logprobs(run, [row.top] * len(run.targets))] if row else []
        for row, runs in zip(batch.scored, sampled.scored, strict=True)
    ]
    if batch.sampling is None or sampled.chosen is None:
        return StepOutput([], [], scored)
    reported: list[TokenLogprob | None] = [None] * len(sampled.chosen)
    if sampled.reported is not None and batch.sampling.reported is not None:
        entries = token_logprobs(sampled.reported, batch.sampling.tops)
        for index, entry in zip(batch.sampling.reported.tolist(), entries, strict=True):
            reported[index] = entry
    drafts = sampled.drafts.tolist() if sampled.drafts is not None else []
    return StepOutput(sampled.chosen.tolist(), reported, scored, drafts)


def largest_step(rows: int, longest: int, tokens: int, block_size: int, n_groups: int, drafts: int = 0) -> Step:
    """A step of ``rows`` sequences and ``tokens`` tokens in all, or as many as sequences of ``longest`` tokens have.

    It does whatever takes memory: the first row is greedy, the others are drawn, with penalties and log-probabilities;
    ``drafts`` of the tokens are verified, as far as rows are long enough. All keys and values are in block 0.
    """
    params = SamplingParams(max_tokens=1, top_p=0.9, logprobs=_REPORTED, repetition_penalty=1.1)
    step = Step([], [])
    for slot in range(rows):
        count = min(tokens // rows + (slot < tokens % rows), longest - 1)
        verified = min(drafts // rows + (slot < drafts % rows), count - 1)
        chosen = params if slot else params.model_copy(update={"temperature": 0.0})
        request = Request(slot, [0] * count, count - verified, chosen, slot, frozenset(), count + 1, slot=slot)
        request.blocks = [array("i", [0] * -(-count // block_size)) for _ in range(n_groups)]
        step.admitted.append(request)
        step.rows.append(StepRow(request, 0, count, True, 0, n_drafts=verified))
    return step


def thread_count(wanted: int | Auto) -> int | None:
    """CPU threads of an operation: those ``wanted``, at most one for each processor; None: as many as there are now.

    ``auto`` takes what torch takes of the processors that this process is bound to, and no more than Slurm gave it.
    """
    if wanted != "auto":
        return min(wanted, os.cpu_count() or 1)
    share = slurm_processors()
    return None if share is None else min(share, torch.get_num_threads())


def use_threads(count: int | None) -> None:
    """Bound the CPU threads of operations that the calling thread runs; None: leave them as they are."""
    if count is not None:
        torch.set_num_threads(count)
