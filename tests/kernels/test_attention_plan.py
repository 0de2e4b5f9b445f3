"""The plan of GPU attention gives every token each key that it must see exactly once, and no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.kernels.gpu import attention_plan
from batchrun.kernels.gpu.attention_plan import GRAIN, Plan, padded, plan


@dataclass(frozen=True)
class Batch:
    cu_q: np.ndarray
    kv_len: np.ndarray
    block_table: np.ndarray
    block_size: int


def batch(rows: list[tuple[int, int]], prefixes: list[tuple[int, int]], block_size: int = 16) -> Batch:
    """Rows of (tokens, earlier keys); ``prefixes``: each row's (document, keys) of which it has the blocks."""
    q_len = np.array([tokens for tokens, _ in rows], np.int32)
    kv_len = q_len + np.array([earlier if tokens else 0 for tokens, earlier in rows], np.int32)
    width = max(1, -(-int(kv_len.max(initial=0)) // block_size))
    table = np.zeros((len(rows), width), np.int32)
    for i, (document, keys) in enumerate(prefixes):
        blocks = -(-int(kv_len[i]) // block_size)
        table[i, :blocks] = 100_000 + 1000 * i + np.arange(blocks)
        whole = min(keys, int(kv_len[i])) // block_size
        table[i, :whole] = 1000 * document + 1 + np.arange(whole)
    return Batch(np.append(0, np.cumsum(q_len)).astype(np.int32), kv_len, table, block_size)


def planned(given: Batch, group: int, window: int | None = None, reproducible: bool = False) -> Plan:
    return plan(
        given.cu_q,
        given.kv_len,
        given.block_table,
        block_size=given.block_size,
        group=group,
        window=window,
        reproducible=reproducible,
    )


def check(given: Batch, made: Plan, group: int, window: int | None) -> None:
    """Every key that a token sees is in exactly one item of the token; one result, or partial ones merged in order."""
    seen: dict[int, Counter[tuple[int, int]]] = {token: Counter() for token in range(int(given.cu_q[-1]))}
    whole: Counter[int] = Counter()
    of_partial: dict[int, tuple[int, int]] = {}
    row_of = np.repeat(np.arange(len(given.kv_len)), np.diff(given.cu_q))
    for items, lines in ((made.few, made.few_tile), (made.many, made.many_tile)):
        for row, token, tokens, position, begin, end, partial, zero in items.tolist():
            assert zero == 0
            assert tokens * group <= lines
            assert begin % GRAIN == 0 if window is None else begin > position - window  # keys behind it may be gone
            assert end % GRAIN == 0 or end >= position + tokens
            for i in range(tokens):
                first = begin if window is None else max(begin, position + i - window + 1)
                keys = np.arange(first, min(end, position + i + 1))
                blocks = given.block_table[row, keys // given.block_size]
                assert (blocks == given.block_table[row_of[token + i], keys // given.block_size]).all()
                seen[token + i].update(keys.tolist())
                if partial < 0:
                    whole[token + i] += 1
                else:
                    assert partial + i not in of_partial
                    of_partial[partial + i] = (token + i, begin)
    for row, (begin, end) in enumerate(zip(given.cu_q, given.cu_q[1:], strict=False)):
        for token in range(begin, end):
            position = int(given.kv_len[row]) - int(end) + token
            lowest = 0 if window is None else max(0, position - window + 1)
            assert seen[token] == Counter(range(lowest, position + 1))
    check_merges(made, whole, of_partial, int(given.cu_q[-1]))


def check_merges(made: Plan, whole: Counter[int], of_partial: dict[int, tuple[int, int]], n_tokens: int) -> None:
    merged = [token for token in made.merge_tokens.tolist() if token >= 0]
    assert sorted([*whole.elements(), *merged]) == list(range(n_tokens))
    used = []
    for token, begin, end in zip(made.merge_tokens, made.merge_starts, made.merge_starts[1:], strict=False):
        parts = made.merge_partials[begin:end].tolist()
        used += parts
        assert (len(parts) > 0) == (token >= 0)
        assert all(of_partial[part][0] == token for part in parts)
        keys = [of_partial[part][1] for part in parts]
        assert keys == sorted(set(keys))
    assert sorted(used) == sorted(of_partial)
    assert set(of_partial) <= set(range(made.n_partials))


ROW = st.tuples(st.sampled_from([0, 1, 1, 1, 1, 2, 5, 8, 17, 40, 70]), st.integers(0, 700))
PREFIX = st.tuples(st.integers(0, 1), st.sampled_from([0, 100, 300, 1000]))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(ROW, PREFIX), max_size=12),
    block_size=st.sampled_from([16, 32, 48, 64, 128]),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 16, 17, 71, 128]),
    window=st.none() | st.integers(1, 400),
    reproducible=st.booleans(),
    room=st.none() | st.integers(0, 5),
)
def test_every_visible_key_once(rows, block_size, group, window, reproducible, room) -> None:
    given = batch([row for row, _ in rows], [prefix for _, prefix in rows], block_size)
    with mock.patch.multiple(attention_plan, SPLIT=2 * GRAIN, MIN_SHARED=GRAIN):
        made = planned(given, group, window, reproducible)
    if reproducible:
        assert len(made.few) == made.n_partials == 0
    if room is not None:
        made = padded(made, made.sizes._replace(**{name: getattr(made.sizes, name) + room for name in GROWN}))
    check(given, made, group, window)


GROWN = ("few", "many", "merges", "merged", "partials")


def test_rows_of_one_token_share_their_prefix() -> None:
    rows, prefixes = [(1, 700)] * 5 + [(1, 300)] + [(1, 700)] * 40, [(0, 640)] * 5 + [(1, 300)] + [(2, 512)] * 40
    given = batch(rows, prefixes)
    made = planned(given, group=4)
    check(given, made, 4, None)
    shared = sorted(made.many.tolist())
    assert [(item[0], item[2], item[4], item[5]) for item in shared] == [
        (0, 5, 0, 640),
        (6, 32, 0, 512),
        (6, 8, 0, 512),
    ]
    assert made.many_tile == 128
    assert made.n_partials == 2 * 45
    assert not len(planned(given, group=4, window=600).merge_tokens)


def test_rows_that_are_equal_keep_their_last_key() -> None:
    given = batch([(1, 511)] * 2 + [(1, 1023)] * 2, [(0, 512)] * 2 + [(1, 1024)] * 2)
    made = planned(given, group=4)
    check(given, made, 4, None)
    assert sorted(made.few[made.few[:, 2] == 2][:, [0, 4, 5]].tolist()) == [[0, 0, 448], [2, 0, 960]]


def test_groups_share_what_saves_most() -> None:
    common = np.array([64, 640, 640, 64, 0, 128, 128, 192], np.int64)
    first, count, keys = attention_plan._groups(common)
    assert list(zip(first, count, keys, strict=True)) == [(1, 3, 640), (5, 4, 128)]


def test_rows_are_split_at_fixed_positions() -> None:
    given = batch([(1, 2500), (8, 1020), (200, 1500)], [(0, 0)] * 3)
    made = planned(given, group=4)
    check(given, made, 4, None)
    assert sorted(made.few[:, [0, 4, 5]].tolist()) == [[0, 0, 1024], [0, 1024, 2048], [0, 2048, 2501]]
    assert sorted(made.many[made.many[:, 0] == 1][:, 4:6].tolist()) == [[0, 1024], [1024, 1028]]
    assert (made.many[made.many[:, 0] == 2][:, 6] == -1).all()
    assert (np.diff(made.many[:, 5] - made.many[:, 4]) <= 0).all()


def test_a_larger_graph_takes_the_plan_of_a_smaller_batch() -> None:
    small, large = (planned(batch([(n, 2000)] * 3, [(0, 0)] * 3), group=8) for n in (1, 40))
    sizes = type(small.sizes)(*map(max, small.sizes, large.sizes))
    assert padded(small, sizes).sizes == padded(large, sizes).sizes == sizes
    with pytest.raises(ValueError, match="does not fit"):
        padded(large, small.sizes)


def test_refuses_heads_that_fit_no_tile() -> None:
    given = batch([(1, 5)], [(0, 0)])
    with pytest.raises(ValueError, match="129 query heads"):
        planned(given, group=129)
