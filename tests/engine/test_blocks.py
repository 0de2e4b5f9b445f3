"""The block pool keeps its invariants, and finds content exactly where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.engine.blocks import BlockPool


def test_content_is_found_until_its_block_is_reused() -> None:
    pool = BlockPool(4, 8)
    a, b = pool.allocate(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([a, b])
    assert pool.lookup(b"a") == a
    taken = pool.allocate(2)  # one blank, and the one of the chain's end
    assert b in taken
    assert pool.lookup(b"b") is None
    assert pool.lookup(b"a") == a
    pool.check()


def test_reused_block_is_not_found_by_its_old_content() -> None:
    pool = BlockPool(2, 8)
    (block,) = pool.allocate(1)
    pool.publish(block, b"old")
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.lookup(b"old") is None
    pool.publish(block, b"new")
    assert pool.lookup(b"new") == block
    pool.check()


def test_double_release_is_refused() -> None:
    pool = BlockPool(3, 8)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(blocks)


def test_reserved_block_is_never_handed_out() -> None:
    pool = BlockPool(5, 8)
    assert 0 not in pool.allocate(4)
    pool.release([0])
    pool.check()


@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from("asrpc"), st.integers(0, 5)), max_size=60))
def test_any_sequence_of_calls_keeps_the_invariants(n_blocks: int, calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(n_blocks, 4)
    held: list[list[int]] = []
    for call, number in calls:
        content = bytes([number])
        if call == "a" and pool.n_free >= number:
            held.append(pool.allocate(number))
        elif call == "s" and (block := pool.lookup(content)) is not None:
            pool.share([block])
            held.append([block])
        elif call == "r" and held:
            pool.release(held.pop(number % len(held)))
        elif call == "p" and held and held[-1]:
            pool.publish(held[-1][0], content)
        elif call == "c":
            pool.clear_cache()
        pool.check()
    for blocks in held:
        pool.release(blocks)
    assert pool.n_free == pool.n_usable
