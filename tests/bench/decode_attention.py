"""Decode attention against memory bandwidth: ``python -m tests.bench.decode_attention [--repeat N]``.

One query per row attends to KV several times the size of the last-level cache, rows unshared and blocks shuffled. The
time is divided by that of reading as many bytes in order, as fast as the best of a few ways to read, by turns in the
same run.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from batchrun.job import EngineSpec
from batchrun.kernels import cpu
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.text import table

_BLOCK = EngineSpec().block_size
_TOKENS = 1000  # of a row, on average
_TIMES_CACHE = 10  # as large as the last-level cache
_SHAPES = {"SmolLM2 135M": (9, 3, 64), "Llama 8B": (32, 8, 128)}  # query heads, KV heads, head_dim
_UNKNOWN_CACHE = 32 << 20
HEAD = ["model", "KV", "threads", "KV MB", "attention ms", "GB/s", "read GB/s", "by", "ratio", "of fastest"]
_ABSENT = 0xA5  # a byte that the buffer does not hold


def last_level_cache() -> int:
    """Bytes of the largest cache of a processor."""
    units = {"K": 10, "M": 20, "G": 30}
    sizes = (path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(size[:-1]) << units[size[-1]] for size in sizes), default=_UNKNOWN_CACHE)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Ones, in memory from NumPy as the engine's own KV is (large pages where the system has them)."""
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.empty(count, np.uint8)).view(dtype).view(shape).fill_(1)


def readers(size: int, pool: ThreadPoolExecutor, threads: int) -> dict[str, Callable[[], object]]:
    """Ways to read ``size`` bytes once, in order."""
    memory = filled((size // 4096, 1024), torch.float32)
    vector = torch.ones(1024)
    find = ctypes.CDLL(None).memchr
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    share = size // threads

    def search() -> None:
        starts = [memory.data_ptr() + thread * share for thread in range(threads)]
        for found in pool.map(lambda start: find(start, _ABSENT, share), starts):
            assert found is None

    return {
        "memchr": search,
        "torch.sum": memory.sum,
        "torch.amax": memory.amax,
        "torch.mv": lambda: memory @ vector,
        "torch.dot": lambda: torch.dot(memory[: size // 8192].view(-1), memory[size // 8192 :].view(-1)),
    }


def attention(heads: tuple[int, int, int], dtype: torch.dtype, size: int) -> tuple[Callable[[], Tensor], int]:
    """A call of decode attention, and the bytes of KV that it has to read: ``size`` or a little more."""
    q_heads, kv_heads, dim = heads
    draw = torch.Generator().manual_seed(0)
    token_bytes = 2 * kv_heads * dim * dtype.itemsize
    rows = -(-size // (token_bytes * _TOKENS))
    kv_len = torch.randint(_TOKENS * 9 // 10, _TOKENS * 11 // 10, (rows,), generator=draw, dtype=torch.int32)
    pages = -(-int(kv_len.max()) // _BLOCK)
    blocks = 1 + torch.randperm(rows * pages, generator=draw, dtype=torch.int32).view(rows, pages)
    k, v = filled((rows * pages + 1, kv_heads, 2, _BLOCK, dim), dtype).unbind(2)
    batch = AttentionBatch(torch.arange(rows + 1, dtype=torch.int32), kv_len, blocks, torch.zeros(rows).long())
    q = torch.ones(rows, q_heads, dim, dtype=dtype)
    return lambda: cpu.attention(q, k, v, batch, scale=dim**-0.5), int(kv_len.sum()) * token_bytes


def rounds(calls: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """The seconds of each call in ``repeat`` rounds, after one that does not count."""
    times = defaultdict(list)
    for _ in range(repeat + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in times.items()}


def compare(name: str, dtype: torch.dtype, threads: int, size: int, repeat: int) -> list[str]:
    """The table's row of one model's shape."""
    torch.set_num_threads(threads)
    call, read = attention(_SHAPES[name], dtype, size)
    with ThreadPoolExecutor(threads) as pool:
        took = rounds(readers(size, pool, threads) | {"attention": call}, repeat)
    own = took.pop("attention")
    reader = min(took, key=lambda name: median(took[name]))
    share = read / size  # of the bytes that a reader reads

    def ratio(pick: Callable[[list[float]], float]) -> str:
        return f"{pick(own) / (share * min(map(pick, took.values()))):.2f}x"

    milliseconds, rate = median(own) * 1e3, read / median(own) / 1e9
    figures = [f"{read / 1e6:.0f}", f"{milliseconds:.1f}", f"{rate:.1f}", f"{size / median(took[reader]) / 1e9:.1f}"]
    return [name, str(dtype).removeprefix("torch."), str(threads), *figures, reader, ratio(median), ratio(min)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.decode_attention")
    parser.add_argument("--repeat", type=int, default=15, help="rounds; the medians are printed")
    args = parser.parse_args()
    cache = last_level_cache()
    print(f"last-level cache {cache >> 20} MiB, kernels {cpu.version()}, medians of {args.repeat} rounds")
    lines = [HEAD]
    for threads, name, dtype in product(sorted({1, torch.get_num_threads()}), _SHAPES, (torch.float32, torch.bfloat16)):
        lines.append(compare(name, dtype, threads, _TIMES_CACHE * cache, args.repeat))
    print(table(lines))


if __name__ == "__main__":
    main()
