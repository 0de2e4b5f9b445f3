"""Drives the real scheduler, pools and executor step by step, with whatever shape and disturbance a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from batchrun.engine.blocks import BlockPool
from batchrun.engine.executor import Executor
from batchrun.engine.request import Request, Step, noise_key
from batchrun.engine.scheduler import KVGroup, Limits, Scheduler
from batchrun.job import KVCacheDType, Quantization
from batchrun.model_files import resolve
from batchrun.models.decoder import Decoder
from batchrun.models.families import model_config
from batchrun.ops import backend
from batchrun.sampling import SamplingParams
from batchrun.weights.load import Loader, open_weights
from batchrun.weights.quantize import PLAIN, QUANTIZERS

MAX_LEN = 256
MAX_DRAFTS = 40  # of a step
CPU = torch.device("cpu")


def load_decoder(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    reproducible: bool = False,
    ops: ModuleType | None = None,
    packed: bool = True,
    quantization: Quantization = "none",
    kv_cache_dtype: KVCacheDType = "auto",
) -> Decoder:
    """``packed`` False: with plain weights, as where a backend has no layout of its own."""
    files = resolve(str(path))
    config = model_config(files.config)
    ops = ops or backend(CPU, dtype, config.head_dim, reproducible=reproducible)
    pack = {"pack": ops.pack} if packed else {}
    quantize = QUANTIZERS.get(quantization, PLAIN)
    loader = Loader(open_weights(files), dtype, CPU, quantize=quantize, keep=quantization == "none", **pack)
    return Decoder(config, loader, ops, MAX_LEN, kv_cache_dtype)


def request(
    key: int, prompt: Sequence[int], params: SamplingParams, output: Sequence[int] = (), stop_ids: Sequence[int] = ()
) -> Request:
    return Request(
        key=key,
        tokens=[*prompt, *output],
        n_prompt=len(prompt),
        params=params,
        noise_key=noise_key("test", key),
        stop_ids=frozenset(stop_ids),
        max_total=min(len(prompt) + params.max_tokens, MAX_LEN),
    )


class Driver:
    """A decoder with pools of its own. Checks the pools' invariants at every step."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        n_blocks: int = 256,
        block_size: int = 8,
        max_num_seqs: int = 16,
        budget: int = 2048,
        prefix_caching: bool = True,
        overlap: bool = True,
    ) -> None:
        self.executor = Executor(
            decoder,
            device=CPU,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_LEN,
            draft_rows=MAX_DRAFTS,
        )
        self.executor.allocate(n_blocks)
        groups = [KVGroup(window) for window in decoder.windows]
        limits = Limits(max_num_seqs, max(budget, max_num_seqs), prefix_caching)
        self.scheduler = Scheduler(groups, [BlockPool(n_blocks, block_size) for _ in groups], limits)
        self.overlap = overlap

    def run(
        self,
        requests: Sequence[Request],
        disturb: Callable[[int, Scheduler], None] | None = None,
        guess: Callable[[Request], list[int]] | None = None,
    ) -> None:
        """Run requests to their end; ``disturb(step number, scheduler)`` is called before each step is scheduled.

        Rows of requests whose tokens are known verify what ``guess`` has for them.
        """
        scheduler = self.scheduler
        for each in requests:
            scheduler.add(each)
        in_flight = None
        number = 0
        while scheduler.has_work or in_flight:
            if disturb is not None:
                disturb(number, scheduler)
            number += 1
            step = scheduler.schedule()
            self.check()
            launched = None
            if step is not None and guess is not None:
                add_guesses(step, scheduler, guess)
            if step is not None:
                launched = (step, self.executor.launch(step))
                if not self.overlap:
                    in_flight, launched = launched, None
            if in_flight is not None:
                done, running = in_flight
                for each in scheduler.settle(done, running.result()):
                    if each.tokens[-1] in each.stop_ids or len(each.tokens) >= each.max_total:
                        scheduler.finish(each, "stop" if each.tokens[-1] in each.stop_ids else "length")
            in_flight = launched
        self.check()

    def check(self) -> None:
        self.scheduler.check()

    def close(self) -> None:
        self.executor.close()
        for pool in self.scheduler.pools:
            assert pool.n_free == pool.n_usable, "blocks leaked"

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.executor.close()


def add_guesses(step: Step, scheduler: Scheduler, guess: Callable[[Request], list[int]]) -> None:
    """Let the rows of a step verify guesses, as far as its request's tokens are known and the budget goes."""
    room = MAX_DRAFTS
    for row in step.rows:
        if row.samples and row.end == len(row.request.tokens):
            drafts = guess(row.request)[: min(room, scheduler.limits.max_num_batched_tokens - step.n_tokens)]
            room -= scheduler.add_drafts(row, len(drafts), drafts)


def guesses(answers: Mapping[Any, Sequence[int]], rng: random.Random, most: int = 6) -> Callable[[Request], list[int]]:
    """Guesses of any length up to ``most`` of what follows, right and wrong ones; ``answers``: by a request's key."""

    def guess(request: Request) -> list[int]:
        follows = answers[request.key][request.n_output :][: rng.randrange(most + 1)]
        return [token if rng.random() < 0.8 else rng.randrange(256) for token in follows]

    return guess
