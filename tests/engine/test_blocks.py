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


def test_blocks_of_one_allocation_ascend() -> None:
    """Those of a chain are free the last first, and its next owner reads them in order again."""
    pool = BlockPool(9, 8)
    chain = pool.allocate(8)
    assert chain == sorted(chain)
    for block in chain:
        pool.publish(block, bytes([block]))
    pool.release(chain)
    assert pool.allocate(5) == chain[3:]
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


def cached(pool: BlockPool, *contents: bytes) -> None:
    """Leave free blocks with these contents, a chain in the order given."""
    blocks = pool.allocate(len(contents))
    for block, content in zip(blocks, contents, strict=True):
        pool.publish(block, content)
    pool.release(blocks)


def evicted(pool: BlockPool, candidates: list[bytes]) -> list[bytes]:
    """The contents in the order in which allocations evict them."""
    order = []
    while pool.n_free:
        pool.allocate(1)
        pool.check()
        order += [content for content in candidates if content not in order and pool.lookup(content) is None]
    return order


def test_what_nobody_expects_goes_first_then_what_is_needed_last() -> None:
    pool = BlockPool(7, 8)
    pool.expect([b"soon"], 1)
    for content in (b"soon", b"old", b"late"):
        cached(pool, content)
    cached(pool, b"stem", b"end")
    cached(pool, b"new")
    pool.expect([b"stem", b"end"], 2)
    pool.expect([b"soon"], 3)
    pool.expect([b"late"], 4)
    pool.check()
    order = [b"old", b"new", b"late", b"end", b"stem", b"soon"]
    assert evicted(pool, sorted(order)) == order


def test_a_withdrawn_use_gives_way_to_the_next_one() -> None:
    pool = BlockPool(4, 8)
    pool.expect([b"a", b"b"], 1)
    pool.expect([b"c"], 2)
    pool.expect([b"a"], 3)
    for content in (b"a", b"b", b"c"):
        cached(pool, content)
    pool.withdraw([b"a", b"b"], 1)
    pool.check()
    assert evicted(pool, [b"a", b"b", b"c"]) == [b"b", b"a", b"c"]


def test_a_preempted_request_comes_before_all_that_wait() -> None:
    pool = BlockPool(3, 8)
    cached(pool, b"a")
    cached(pool, b"b")
    pool.expect([b"a"], 1)
    pool.expect([b"b"], 2)
    pool.expect([b"b"], -1)
    assert evicted(pool, [b"a", b"b"]) == [b"a", b"b"]


def test_used_again_and_again_a_block_leaves_no_trail() -> None:
    """`check` bounds what is kept of each release."""
    pool = BlockPool(3, 8)
    cached(pool, b"a")
    pool.expect([b"a"], 1)
    for _ in range(100):
        block = pool.lookup(b"a")
        assert block is not None
        pool.share([block])
        pool.release([block])
        pool.check()
    assert evicted(pool, [b"a"]) == [b"a"]


@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from("asrpcewf"), st.integers(0, 5)), max_size=60))
def test_any_sequence_of_calls_keeps_the_invariants(n_blocks: int, calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(n_blocks, 4)
    held: list[list[int]] = []
    waiting: list[tuple[list[bytes], int]] = []  # chains and turns, in order
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
        elif call in "ef":
            chain = [bytes([each]) for each in range(number)]
            turn = waiting[-1][1] + 1 if waiting and call == "e" else waiting[0][1] - 1 if waiting else 0
            waiting.insert(len(waiting) if call == "e" else 0, (chain, turn))
            pool.expect(chain, turn)
        elif call == "w" and waiting:
            pool.withdraw(*waiting.pop(number % len(waiting)))
        pool.check()
    for blocks in held:
        pool.release(blocks)
    assert pool.n_free == pool.n_usable
    for chain, turn in waiting:
        pool.withdraw(chain, turn)
    pool.check()
    assert not pool.expected
