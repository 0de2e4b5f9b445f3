"""Which tile of queries meets which keys: the work of :mod:`batchrun.kernels.gpu.attention`, laid out on the host.

So the grids are known without asking the device. A **tile** is some tokens times the query heads of one KV head: its
lines. Rows that fit in one tile have their keys split into pieces of fixed size, aligned to position 0 (Dao et al.
2023, Flash-Decoding); neighbouring rows of one token that begin with the same blocks meet those in common tiles
(Juravsky et al. 2024, Hydragen). Where a token's keys lie in several pieces, each gives a partial result, and these
are merged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["GRAIN", "Plan", "Sizes", "padded", "plan"]

Ints = NDArray[np.int32]
Wide = NDArray[np.int64]
Flags = NDArray[np.bool_]

GRAIN = 64  # keys: the most that a kernel takes at once, so that only the last tile of a range is ever cut
SPLIT = 16 * GRAIN  # keys of one piece
MIN_SHARED = 4 * GRAIN  # fewer keys are not worth a partial result

FEW_LINES = 16
MANY_LINES = (64, 128)


class Sizes(NamedTuple):
    """What has to stay the same for a CUDA graph to run with another plan: sizes of the arrays, and ``many_tile``."""

    few: int
    many: int
    merges: int
    merged: int
    partials: int
    many_tile: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The items of a batch, longest first, and the partial results to merge.

    An item is (row, token, tokens, position, key_begin, key_end, partial, 0): the packed batch's tokens from ``token``,
    of which the first stands at ``position`` and each next one further, attend to those keys from ``key_begin`` to
    ``key_end`` of the row's block table that they may see. ``partial`` is -1 where the result is whole; else that of
    the item's token i is partial result ``partial + i``. An item of 0 tokens is padding. ``key_begin`` is a multiple of
    GRAIN unless there is a window; ``key_end`` is one, or else no later key is seen by any of the item's tokens.
    """

    few: Ints  # [W, 8]: items of at most few_tile lines
    many: Ints  # [V, 8]
    merge_tokens: Ints  # [M]: the tokens that have partial results; -1 is padding
    merge_starts: Ints  # [M + 1]: where each one's begin in merge_partials
    merge_partials: Ints  # [N]: partial results, in ascending order of their keys
    few_tile: int
    many_tile: int
    n_partials: int

    @property
    def sizes(self) -> Sizes:
        lists = (self.few, self.many, self.merge_tokens, self.merge_partials)
        few, many, merges, merged = map(len, lists)
        return Sizes(few, many, merges, merged, self.n_partials, self.many_tile)


class _Tiles(NamedTuple):
    """Tiles before their keys are cut into pieces. All int64 or bool [n]."""

    row: NDArray[Any]
    token: NDArray[Any]
    tokens: NDArray[Any]
    position: NDArray[Any]
    key_begin: NDArray[Any]
    key_end: NDArray[Any]
    many: NDArray[Any]
    split: NDArray[Any]  # their keys may be cut
    shares: NDArray[Any]  # their tokens meet other keys in other tiles


def plan(
    cu_q: Ints,
    kv_len: Ints,
    block_table: Ints,
    *,
    block_size: int,
    group: int,
    window: int | None = None,
    reproducible: bool = False,
    max_lines: int = MANY_LINES[-1],
) -> Plan:
    """The plan of a batch, given as in ``AttentionBatch``; ``group`` is the number of query heads of a KV head.

    ``reproducible``: a token's result depends on its own keys alone: one form of tile, nothing split, nothing shared.
    ``max_lines`` is what ``attention.max_lines`` says.
    """
    if not 0 < group <= max_lines:
        raise ValueError(f"{group} query heads share a KV head; 1 to {max_lines} can")
    starts, q_len, lengths = cu_q[:-1].astype(np.int64), np.diff(cu_q).astype(np.int64), kv_len.astype(np.int64)
    alone = reproducible or window is not None
    common = np.zeros(max(len(q_len) - 1, 0), np.int64) if alone else _common(q_len, lengths, block_table, block_size)
    first, count, keys = _groups(common)

    few_tile = max(FEW_LINES, 1 << (group - 1).bit_length())
    longest = group if reproducible else group * max(q_len.max(initial=0), count.max(initial=0))
    many_tile = min(MANY_LINES[int(longest > MANY_LINES[0])], max_lines)
    tokens_of = (0 if reproducible else few_tile // group, many_tile // group)

    run, offset, tokens, many = _cover(count, *tokens_of)
    always = np.ones(len(run), np.bool_)
    ends = keys[run]
    prefixes = _Tiles(first[run], starts[first[run]] + offset, tokens, ends - 1, 0 * ends, ends, many, always, always)

    shared = np.zeros_like(lengths)
    row, place = _expand(count)
    shared[first[row] + place] = keys[row]
    row, offset, tokens, many = _cover(q_len, *tokens_of)
    position = lengths[row] - q_len[row] + offset
    begin = shared[row] if window is None else np.maximum(position - window + 1, 0)
    split = (tokens == q_len[row]) & (not reproducible)
    own = _Tiles(row, starts[row] + offset, tokens, position, begin, position + tokens, many, split, shared[row] > 0)
    return _cut(_Tiles(*map(np.concatenate, zip(prefixes, own, strict=True))), few_tile, many_tile)


def padded(made: Plan, sizes: Sizes) -> Plan:
    """The same plan in arrays of these sizes, for a CUDA graph; ValueError where it does not fit."""
    if any(have > room for have, room in zip(made.sizes, sizes, strict=True)):
        raise ValueError(f"a plan of {made.sizes} does not fit in {sizes}")
    few, many, merges, merged, partials, many_tile = sizes
    return replace(
        made,
        few=_grown(made.few, few, 0),
        many=_grown(made.many, many, 0),
        merge_tokens=_grown(made.merge_tokens, merges, -1),
        merge_starts=_grown(made.merge_starts, merges + 1, int(made.merge_starts[-1])),
        merge_partials=_grown(made.merge_partials, merged, 0),
        n_partials=partials,
        many_tile=many_tile,
    )


def _grown(array: Ints, length: int, fill: int) -> Ints:
    return np.concatenate((array, np.full((length - len(array), *array.shape[1:]), fill, np.int32)))


def _common(q_len: Wide, lengths: Wide, block_table: Ints, block_size: int) -> Wide:
    """How many keys each row but the first may share with the one before it [B - 1]: a multiple of GRAIN, or 0.

    Each keeps at least one key to itself: its own.
    """
    keys = np.zeros(max(len(q_len) - 1, 0), np.int64)
    most = (np.minimum(lengths[1:], lengths[:-1]) - 1) // block_size
    wanted = -(-MIN_SHARED // block_size)
    alike = (block_table[1:, :wanted] == block_table[:-1, :wanted]).all(1)
    pairs = np.flatnonzero(alike & (most >= wanted) & (q_len[1:] == 1) & (q_len[:-1] == 1))
    if len(pairs):
        width = int(most[pairs].max())
        same = block_table[pairs + 1, :width] == block_table[pairs, :width]
        blocks = np.where(same.all(1), width, same.argmin(1))
        keys[pairs] = np.minimum(blocks, most[pairs]) * block_size // GRAIN * GRAIN
    return keys


def _groups(common: Wide) -> tuple[Wide, Wide, Wide]:
    """The runs of rows that share keys: first row, number of rows, number of keys.

    A run is cut where its rows have least in common if the parts share more in all. (Keys shared by n rows are read
    n - 1 times less.)
    """
    groups: list[tuple[int, int, int]] = []
    todo = [(0, len(common))]  # pairs of neighbours
    while todo:
        begin, end = todo.pop()
        least = int(common[begin:end].min(initial=np.iinfo(np.int64).max))
        cuts = [begin - 1, *(begin + np.flatnonzero(common[begin:end] == least)).tolist(), end]
        parts = [(cut + 1, after) for cut, after in pairwise(cuts) if cut + 1 < after]
        saved = sum(int(common[slice(*part)].min()) * (part[1] - part[0]) for part in parts)
        if begin < end and least > 0 and saved <= least * (end - begin):
            groups.append((begin, end - begin + 1, least))
        else:
            todo.extend(parts)
    first, count, keys = np.array(sorted(groups), np.int64).reshape(-1, 3).T
    return first, count, keys


def _expand(counts: Wide) -> tuple[Wide, Wide]:
    """For each of ``counts[i]`` things of each i: i, and its number among them."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _cover(counts: Wide, few: int, many: int) -> tuple[Wide, Wide, Wide, Flags]:
    """Runs of tokens cut into tiles of at most ``few`` tokens, or else ``many``: run, offset, tokens, whether many."""
    is_many = counts > few
    size = np.where(is_many, many, max(few, 1))
    run, place = _expand(-(-counts // size))
    offset = place * size[run]
    return run, offset, np.minimum(size[run], counts[run] - offset), is_many[run]


def _cut(tiles: _Tiles, few_tile: int, many_tile: int) -> Plan:
    """Cut the tiles' keys into pieces, and list the partial results that this gives."""
    base = tiles.key_begin // SPLIT
    pieces = np.where(tiles.split, -(-tiles.key_end // SPLIT) - base, 1)
    tile, place = _expand(pieces)
    piece = _Tiles(*(column[tile] for column in tiles))
    bound = (base[tile] + place) * SPLIT
    begin = np.maximum(piece.key_begin, bound)
    end = np.where(piece.split, np.minimum(piece.key_end, bound + SPLIT), piece.key_end)

    is_partial = piece.shares | (pieces[tile] > 1)
    results = np.where(is_partial, piece.tokens, 0)
    partial = np.where(is_partial, np.cumsum(results) - results, -1)
    owner, place = _expand(results)
    token = piece.token[owner] + place
    order = np.lexsort((begin[owner], token))
    merge_tokens, merge_starts = np.unique(token[order], return_index=True)

    columns = (piece.row, piece.token, piece.tokens, piece.position, begin, end, partial, np.zeros_like(begin))
    longest = np.argsort(begin - end, kind="stable")
    items, many = np.stack(columns, axis=1).astype(np.int32)[longest], piece.many[longest]
    return Plan(
        few=items[~many],
        many=items[many],
        merge_tokens=merge_tokens.astype(np.int32),
        merge_starts=np.append(merge_starts, len(order)).astype(np.int32),
        merge_partials=(partial[owner] + place)[order].astype(np.int32),
        few_tile=few_tile,
        many_tile=many_tile,
        n_partials=len(order),
    )
