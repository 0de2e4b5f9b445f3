"""GPU attention in Triton's interpreter, against dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from batchrun.kernels.gpu import attention_plan
from batchrun.kernels.gpu.attention import attention
from batchrun.kernels.gpu.attention_plan import padded, plan


@dataclass
class Case:
    rows: list[tuple[int, int]]  # query tokens, earlier keys
    heads: tuple[int, int] = (2, 2)  # query heads, KV heads
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    shared: int = 0  # keys that all rows have in common
    dtype: torch.dtype = torch.float32
    reproducible: bool = False
    scale: float = 0.3


class Setup:
    """A cache full of NaN but for the keys that some query sees, and the queries."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        random = torch.Generator().manual_seed(seed)
        n_heads, n_kv_heads = case.heads
        size = case.block_size
        self.q_len = np.array([tokens for tokens, _ in case.rows], np.int32)
        self.kv_len = np.array([sum(row) for row in case.rows], np.int32)
        self.cu_q = np.append(0, np.cumsum(self.q_len)).astype(np.int32)
        blocks = -(-self.kv_len // size)
        free = iter((torch.randperm(int(blocks.sum()) + 2, generator=random) + 1).tolist())
        self.table = np.zeros((len(case.rows), int(blocks.max(initial=1))), np.int32)
        memory = torch.full((int(blocks.sum()) + 3, n_kv_heads, 2, size, case.head_dim), torch.nan, dtype=case.dtype)
        self.k_cache, self.v_cache = memory[:, :, 0], memory[:, :, 1]
        self.dense: list[Tensor] = []
        common = torch.randn(2, case.shared, n_kv_heads, case.head_dim, generator=random)
        for row, (tokens, earlier) in enumerate(case.rows):
            first = 0 if case.window is None else max(0, earlier - case.window + 1)
            keep = case.shared // size
            self.table[row, first // size : blocks[row]] = [next(free) for _ in range(first // size, blocks[row])]
            if row:
                self.table[row, :keep] = self.table[0, :keep]
            keys = torch.randn(2, tokens + earlier, n_kv_heads, case.head_dim, generator=random)
            keys[:, : case.shared] = common
            keys = keys.to(case.dtype)
            self.dense.append(keys)
            for key in range(first, tokens + earlier):
                block = self.table[row, key // size]
                self.k_cache[block, :, key % size], self.v_cache[block, :, key % size] = keys[0, key], keys[1, key]
        self.q = torch.randn(int(self.cu_q[-1]), n_heads, case.head_dim, generator=random).to(case.dtype)

    def run(self, **sizes: int) -> Tensor:
        case = self.case
        made = plan(
            self.cu_q,
            self.kv_len,
            self.table,
            block_size=case.block_size,
            group=case.heads[0] // case.heads[1],
            window=case.window,
            reproducible=case.reproducible,
        )
        if sizes:
            made = padded(made, made.sizes._replace(**{name: getattr(made.sizes, name) + n for name, n in sizes.items()}))
        names = ("few", "many", "merge_tokens", "merge_starts", "merge_partials")
        arrays = {name: torch.from_numpy(getattr(made, name).copy()) for name in names}
        self.plan = SimpleNamespace(
            **arrays, few_tile=made.few_tile, many_tile=made.many_tile, n_partials=made.n_partials
        )
        batch = SimpleNamespace(block_table=torch.from_numpy(self.table), plan=self.plan)
        return attention(
            self.q, self.k_cache, self.v_cache, batch, scale=case.scale, window=case.window, softcap=case.softcap
        )

    def expected(self) -> Tensor:
        case, parts = self.case, []
        for row, (tokens, earlier) in enumerate(case.rows):
            q = self.q[self.cu_q[row] : self.cu_q[row + 1]].double()
            k, v = self.dense[row].double().repeat_interleave(case.heads[0] // case.heads[1], dim=2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * case.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            behind = torch.arange(earlier, earlier + tokens)[:, None] - torch.arange(earlier + tokens)
            hidden = (behind < 0) | (behind >= (case.window or earlier + tokens))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(case: Case, **sizes: int) -> Setup:
    setup = Setup(case)
    torch.testing.assert_close(setup.run(**sizes).double(), setup.expected(), atol=TOLERANCE[case.dtype], rtol=1e-4)
    return setup


def test_first() -> None:
    check(Case([(1, 40), (5, 0), (1, 63), (1, 64), (1, 65)]))
