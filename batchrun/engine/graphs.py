"""CUDA graphs of steps in which every row decodes one token.

Launching a step's kernels one by one takes the host longer than a small step takes the device. A graph is captured once
for each layout of a step's inputs, which waits for the device, and replayed with one call. That layouts come again,
batches are filled up to a few sizes, with rows that read and write the reserved block 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from batchrun.engine.batch import Batch
from batchrun.engine.transfer import Layout, Transfer, bytes_of, layout_of, numbers_of, tensors_of
from batchrun.ops.attention_batch import AttentionBatch

_PARTS = 4  # steps from one power of two to the next
_MOST = 256  # graphs: each takes some of the driver's memory, and none is given back
_PAGES = 16  # what the width of block tables is a multiple of


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, the memory that it reads its inputs from, and the logits that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # uint8
    logits: Tensor


Key = tuple[Layout, tuple[object, ...]]  # everything of the inputs that a graph holds: it covers every host number


class DecodeGraphs:
    """Graphs of ``decode``, which turns the inputs of a step on the device into logits.

    ``fill_plan`` is the backend's: a plan of attention with the sizes of a larger batch.
    """

    def __init__(self, decode: Callable[[Batch], Tensor], fill_plan: Callable[..., Any], max_num_seqs: int) -> None:
        self._decode = decode
        self._fill_plan = fill_plan
        self._max_num_seqs = max_num_seqs
        self._captured: dict[Key, Captured] = {}
        self._seen: set[Key] = set()
        self._stream: Any = None
        self._pool: Any = None

    def fill(self, batch: Batch) -> Batch:
        """What a graph reads of a step that it `takes`."""
        return fill(batch, min(bucket(len(batch.token_rows)), self._max_num_seqs), self._fill_plan)

    def run(self, inputs: Batch, transfer: Transfer) -> Tensor:
        """The logits of a step that was filled up, valid until the next one runs.

        What comes for the first time is run as it is, which compiles what is not compiled; it is captured when it comes
        again.
        """
        layout = layout_of(list(tensors_of(inputs)))
        key = layout, tuple(numbers_of(inputs))
        captured = self._captured.get(key)
        if captured is None and (key not in self._seen or len(self._captured) == _MOST):
            self._seen.add(key)
            return self._decode(transfer.send(inputs))
        if captured is None:
            memory = torch.empty(bytes_of(layout), dtype=torch.uint8, device=transfer.device)
            captured = self._captured[key] = self._capture(transfer.send(inputs, memory), memory)
        else:
            transfer.send(inputs, captured.inputs)
        captured.graph.replay()
        return captured.logits

    def _capture(self, inputs: Batch, memory: Tensor) -> Captured:
        """All graphs share a stream, on which libraries keep working memory, and a pool, for one runs at a time."""
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on waiting for results of earlier steps meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = self._decode(inputs)
        return Captured(graph, memory, logits)


def takes(batch: Batch) -> bool:
    """Whether every row of a step computes one token and samples the next, which is what graphs are made of."""
    sampling = batch.sampling
    every = sampling is not None and len(sampling.rows) == len(batch.token_rows)
    return every and batch.uploads is None and batch.drafted is None and not any(batch.scored)


def bucket(count: int) -> int:
    """The size that a batch of ``count`` rows is filled up to: a power of two, or one of `_PARTS` even steps to it."""
    part = max(1, (1 << (count - 1).bit_length()) // (2 * _PARTS))
    return -(-count // part) * part


def fill(batch: Batch, rows: int, fill_plan: Callable[..., Any]) -> Batch:
    """What decoding reads of a step of one token a row, filled up to ``rows`` rows that nobody reads the results of."""
    missing = rows - len(batch.token_rows)
    return Batch(
        uploads=None,
        token_rows=functional.pad(batch.token_rows, (0, missing)),
        positions=functional.pad(batch.positions, (0, missing)),
        groups=[_filled(group, missing, fill_plan) for group in batch.groups],
        wanted=None,
        sampled=None,
        sampling=None,
        drafted=None,
        scored=[],
    )


def _filled(batch: AttentionBatch, missing: int, fill_plan: Callable[..., Any]) -> AttentionBatch:
    rows, pages = batch.block_table.shape
    return AttentionBatch(
        cu_q=torch.arange(rows + missing + 1, dtype=torch.int32),
        kv_len=functional.pad(batch.kv_len, (0, missing), value=1),
        block_table=functional.pad(batch.block_table, (0, -pages % _PAGES, 0, missing)),
        slots=functional.pad(batch.slots, (0, missing)),
        plan=fill_plan(batch.plan),
    )
