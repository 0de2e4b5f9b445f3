"""Decode attention against memory bandwidth: ``python -m tests.bench.decode_attention [--repeat N]``.

One query per row attends to KV several times the size of the last-level cache, rows unshared, blocks where the engine's
pool puts them. The time is divided, by turns in the same run, by that of reading as many bytes in order, as fast as the
best of a few ways to read, and by that of reading the same blocks one after the other and doing nothing with them.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

import torch
from torch import Tensor

from batchrun.engine.blocks import BlockPool
from batchrun.engine.memory import kv_bytes_per_token
from batchrun.job import EngineSpec, KVCacheDType
from batchrun.kernels import cpu
from batchrun.kernels.cpu import build
from batchrun.models.kv_cache import DTYPES, KVCache, zeros
from batchrun.ops.attention_batch import AttentionBatch
from batchrun.text import table

_BLOCK = EngineSpec().block_size
_TOKENS = 1000  # of a row, on average
_PROMPT = 0.75  # of them
_GENERATIONS = 4  # of rows, of which the last is measured
_TIMES_CACHE = 10  # as large as the last-level cache
_SHAPES = {"SmolLM2 135M": (9, 3, 64), "Llama 8B": (32, 8, 128)}  # query heads, KV heads, head_dim
_UNKNOWN_CACHE = 32 << 20
Kept = tuple[str, KVCacheDType]  # dtypes of the model and of its KV cache
_KEPT: list[Kept] = [("float32", "auto"), *(("bfloat16", kept) for kept in ("auto", "fp8", "int8", "int4"))]
HEAD = [
    "model",
    "KV",
    "threads",
    "KV MB",
    "ms",
    "Mtokens/s",
    "GB/s",
    "in order GB/s",
    "ratio",
    "by block GB/s",
    "ratio",
]
_CPU = torch.device("cpu")
_HEAD_BYTES = 8192
_ABSENT = 0xA5  # a byte that the buffer does not hold


def last_level_cache() -> int:
    """Bytes of the largest cache of a processor."""
    units = {"K": 10, "M": 20, "G": 30}
    sizes = (path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(size[:-1]) << units[size[-1]] for size in sizes), default=_UNKNOWN_CACHE)


@dataclass(frozen=True, slots=True)
class Work:
    """Ways to do the same, and the bytes of memory that each has to read."""

    ways: list[Callable[[], object]]
    size: int


def reading_in_order(size: int, pool: ThreadPoolExecutor, threads: int) -> Work:
    """Ways to read ``size`` bytes once, in order."""
    memory = zeros((size // 4096, 1024), torch.float32, _CPU).fill_(1)
    vector = torch.ones(1024)
    find = ctypes.CDLL(None).memchr
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    share = size // threads

    def search() -> None:
        starts = [memory.data_ptr() + thread * share for thread in range(threads)]
        for found in pool.map(lambda start: find(start, _ABSENT, share), starts):
            assert found is None

    def dot() -> Tensor:
        return torch.dot(memory[: size // 8192].view(-1), memory[size // 8192 :].view(-1))

    return Work([search, memory.sum, memory.amax, lambda: memory @ vector, dot], size)


@cache
def block_reader() -> Callable[[int, int, int, int, int, int], None]:
    """The compiled `read_blocks.cpp`."""
    source = Path(__file__).with_name("read_blocks.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read_blocks.so"
        subprocess.run([*build.find_compiler(), *build.FLAGS, "-shared", "-o", str(library), str(source)], check=True)
        read = ctypes.CDLL(str(library)).read_blocks
    read.restype, read.argtypes = None, (*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_int)
    return read


def held_blocks(lengths: Sequence[int]) -> Tensor:
    """The block table of sequences as the engine's pool gives it after a while: int32 [B, P].

    Sequences are taken in with their prompts, `_PROMPT` of their length, and grow by turns; then they leave in any
    order, and others come.
    """
    counts = [-(-length // _BLOCK) for length in lengths]
    pool, draw = BlockPool(sum(counts) + 1, _BLOCK), Random(0)
    for generation in range(_GENERATIONS):
        held = [pool.allocate(int(_PROMPT * count)) for count in counts]
        while short := [row for row, count in enumerate(counts) if len(held[row]) < count]:
            for row in short:
                held[row].extend(pool.allocate(1))
        if generation < _GENERATIONS - 1:
            for row in draw.sample(range(len(held)), len(held)):
                for block in held[row]:
                    pool.publish(block, f"{generation} {block}".encode())
                pool.release(held[row])
    table = torch.zeros(len(held), max(counts), dtype=torch.int32)
    for line, row in zip(table, held, strict=True):
        line[: len(row)] = torch.tensor(row)
    return table


def bytes_per_token(heads: tuple[int, int, int], kept: Kept) -> int:
    """Bytes of a token's keys and values."""
    q_heads, kv_heads, dim = heads
    config = {"num_hidden_layers": 1, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    return kv_bytes_per_token(config, *kept)


def attending(heads: tuple[int, int, int], kept: Kept, size: int, threads: int) -> tuple[Work, Work]:
    """Decode attention over ``size`` bytes of KV or a little more, and reading its blocks in the same order."""
    q_heads, kv_heads, dim = heads
    draw = torch.Generator().manual_seed(0)
    token_bytes, dtype = bytes_per_token(heads, kept), getattr(torch, kept[0])
    rows = -(-size // (token_bytes * _TOKENS))
    kv_len = torch.randint(_TOKENS * 9 // 10, _TOKENS * 11 // 10, (rows,), generator=draw, dtype=torch.int32)
    pages = -(-int(kv_len.max()) // _BLOCK)
    blocks = held_blocks(kv_len.tolist())
    kv = KVCache.zeros(rows * pages + 1, kv_heads, _BLOCK, dim, DTYPES.get(kept[1], dtype), _CPU)
    k, v = kv.keys.fill_(1), kv.values.fill_(1)
    for scales in kv.scales or ():
        scales.fill_(1)
    batch = AttentionBatch(torch.arange(rows + 1, dtype=torch.int32), kv_len, blocks, torch.zeros(rows).long())
    q = torch.ones(rows, q_heads, dim, dtype=dtype)
    held = blocks[torch.arange(pages) * _BLOCK < kv_len[:, None]]
    block_bytes = token_bytes * _BLOCK
    read = block_reader()

    def reader(head: int) -> Callable[[], None]:
        return lambda: read(k.data_ptr(), held.data_ptr(), len(held), block_bytes, head, threads)

    return (
        Work(
            [lambda: cpu.attention(q, k, v, batch, scale=dim**-0.5, kv_scales=kv.scales)],
            int(kv_len.sum()) * token_bytes,
        ),
        Work([reader(block_bytes), reader(min(_HEAD_BYTES, block_bytes))], len(held) * block_bytes),
    )


def rates(works: Sequence[Work], repeat: int) -> list[float]:
    """Bytes a second of the fastest way of each, by medians of ``repeat`` rounds after one that does not count."""
    times: defaultdict[Callable[[], object], list[float]] = defaultdict(list)
    for _ in range(repeat + 1):
        for way in (way for work in works for way in work.ways):
            start = time.perf_counter()
            way()
            times[way].append(time.perf_counter() - start)
    return [work.size / min(median(times[way][1:]) for way in work.ways) for work in works]


def compare(name: str, kept: Kept, threads: int, size: int, repeat: int) -> list[str]:
    """The table's row of one model's shape."""
    torch.set_num_threads(threads)
    attend, read = attending(_SHAPES[name], kept, size, threads)
    with ThreadPoolExecutor(threads) as pool:
        own, by_block, in_order = rates([attend, read, reading_in_order(size, pool, threads)], repeat)
    tokens = own / bytes_per_token(_SHAPES[name], kept)  # a second
    figures = [f"{attend.size / 1e6:.0f}", f"{attend.size / own * 1e3:.1f}", f"{tokens / 1e6:.1f}", f"{own / 1e9:.1f}"]
    against = [text for rate in (in_order, by_block) for text in (f"{rate / 1e9:.1f}", f"{rate / own:.2f}x")]
    return [name, " ".join(kept).removesuffix(" auto"), str(threads), *figures, *against]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.decode_attention")
    parser.add_argument("--repeat", type=int, default=15, help="rounds; the medians are printed")
    args = parser.parse_args()
    last_level = last_level_cache()
    print(f"last-level cache {last_level >> 20} MiB, kernels {cpu.version()}, medians of {args.repeat} rounds")
    lines = [HEAD]
    for threads, name, kept in product(sorted({1, torch.get_num_threads()}), _SHAPES, _KEPT):
        lines.append(compare(name, kept, threads, _TIMES_CACHE * last_level, args.repeat))
    print(table(lines))


if __name__ == "__main__":
    main()
