"""Paged KV bookkeeping for one KV group: which blocks are free, shared, or kept for their content. No torch.

A block holds the keys and values of ``block_size`` consecutive positions in every layer of the group. Block 0 is
reserved: it fills block tables past a row's length, and where a sliding window has passed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush


class BlockPool:
    """Reference-counted blocks with a content index (prefix cache) that evicts by remaining uses.

    A block is in exactly one of four states: held (``refs > 0``), blank (in ``_blank``), or free with content, which
    is either expected by requests that wait (in ``_kept``) or by none (in ``_unasked``, oldest first). Content is known
    by its chained hash, which a block is given only after the forward pass that filled it has settled.

    Blank blocks are handed out first, then what nobody expects, the oldest first. Of what is expected, that goes first
    whose next use is furthest off, as Belady's rule has it: space for it would have to be held longest for one hit.
    Blocks of one chain are expected by a request at once; they are filed the last first, and leave in this order, for
    the beginning of a chain is of use without its end, and the end is of none without the beginning.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        if n_blocks < 2:
            raise ValueError("a pool needs at least one block beside the reserved one")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.expected: dict[bytes, deque[int]] = {}  # content -> turns of the requests that will look it up, ascending
        self._refs = [0] * n_blocks
        self._hash: list[bytes | None] = [None] * n_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(n_blocks - 1, 0, -1))
        self._unasked: OrderedDict[int, None] = OrderedDict()  # its oldest is found without a scan, unlike a dict's
        self._kept: dict[int, tuple[int, int, int]] = {}  # block -> its entry in `_furthest`
        self._furthest: list[tuple[int, int, int]] = []  # heap of (-next turn, when filed, block); some of the past
        self._clock = itertools.count()

    @property
    def n_usable(self) -> int:
        return self.n_blocks - 1

    @property
    def n_free(self) -> int:
        """Blocks that an allocation may take, those with cached content included."""
        return len(self._blank) + len(self._unasked) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting content where none is blank. The caller checked ``n_free``.

        In ascending order: memory is read the faster the more of a sequence's blocks follow one another.
        """
        taken = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            self._refs[block] = 1
            taken.append(block)
        return sorted(taken)

    def lookup(self, content: bytes) -> int | None:
        return self._by_hash.get(content)

    def knows(self, content: bytes) -> bool:
        """Whether the content is here or somebody counts on its being here later."""
        return content in self._by_hash or content in self.expected

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that a lookup named."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unfile(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks of a chain back."""
        for block in reversed(blocks):
            if block == 0:
                continue
            if self._refs[block] <= 0:
                raise ValueError(f"block {block} was released twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._file(block)

    def publish(self, block: int, content: bytes) -> None:
        """Offer a held, fully computed block to later requests. Of equal contents the first block stays known."""
        if block != 0 and self._hash[block] is None and content not in self._by_hash:
            self._hash[block] = content
            self._by_hash[content] = block

    def expect(self, chain: Sequence[bytes], turn: int) -> None:
        """A request will look these contents up. Its ``turn`` is before, or after, those of all that wait already."""
        for content in reversed(chain):
            turns = self.expected.get(content)
            if turns is None:
                self.expected[content] = deque((turn,))
            elif turn > turns[0]:
                turns.append(turn)
                continue
            else:
                turns.appendleft(turn)
            self._refile(content)

    def withdraw(self, chain: Sequence[bytes], turn: int) -> None:
        """The request of this turn waits no more."""
        for content in reversed(chain):
            turns = self.expected[content]
            was_next = turns[0] == turn
            turns.remove(turn)  # it is the first, or near it: requests leave about in the order of their turns
            if not turns:
                del self.expected[content]
            if was_next:
                self._refile(content)

    def clear_cache(self) -> None:
        """Forget all content that nobody holds."""
        for block in (*self._unasked, *self._kept):
            self._forget(block)
            self._blank.append(block)
        self._unasked.clear()
        self._kept.clear()
        self._furthest.clear()

    def _file(self, block: int) -> None:
        """Put a free block where it will be taken from in its turn."""
        content = self._hash[block]
        if content is None:
            self._blank.append(block)
        elif (turns := self.expected.get(content)) is None:
            self._unasked[block] = None
        else:
            self._kept[block] = entry = (-turns[0], next(self._clock), block)
            heappush(self._furthest, entry)
            if len(self._furthest) > 2 * self.n_blocks:  # most are of the past: O(1) for each entry that was pushed
                self._furthest = list(self._kept.values())
                heapify(self._furthest)

    def _unfile(self, block: int) -> None:
        if self._kept.pop(block, None) is None:
            del self._unasked[block]

    def _refile(self, content: bytes) -> None:
        """The next use of a content has changed."""
        block = self._by_hash.get(content)
        if block is not None and self._refs[block] == 0:
            self._unfile(block)
            self._file(block)

    def _evict(self) -> int:
        if self._unasked:
            block, _ = self._unasked.popitem(last=False)
        else:
            while self._kept.get((entry := heappop(self._furthest))[2]) is not entry:
                pass  # its block was used, or its content's next use has changed, since
            block = entry[2]
            del self._kept[block]
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        content = self._hash[block]
        if content is not None:
            del self._by_hash[content]
            self._hash[block] = None

    def check(self) -> None:
        """Raise AssertionError unless every invariant of the pool holds."""
        blank, unasked, kept = set(self._blank), set(self._unasked), set(self._kept)
        held = {b for b in range(1, self.n_blocks) if self._refs[b] > 0}
        states = (blank, unasked, kept, held)
        filed = {id(entry) for entry in self._furthest}
        for condition, what in (
            (self._refs[0] == 0 and self._hash[0] is None, "the reserved block is in use"),
            (len(blank) == len(self._blank), "a block is blank twice"),
            (sum(map(len, states)) == len(set().union(*states)), "a block is in two states"),
            (set().union(*states) == set(range(1, self.n_blocks)), "a block is in no state"),
            (all(self._hash[b] is None for b in blank), "a blank block has content"),
            (all(self._hash[b] is not None for b in unasked | kept), "a cached block has no content"),
            (all(self._hash[b] == h for h, b in self._by_hash.items()), "the content index is wrong"),
            (len(self._by_hash) == sum(h is not None for h in self._hash), "content is missing from the index"),
            (all(t and list(t) == sorted(set(t)) for t in self.expected.values()), "turns are out of order"),
            (all(self._hash[b] not in self.expected for b in unasked), "expected content may be evicted as unasked"),
            (all(self._next_turn(b) == -e[0] for b, e in self._kept.items()), "a block is filed under another turn"),
            (all(id(e) in filed for e in self._kept.values()), "a kept block cannot be evicted"),
            (len(self._furthest) <= 2 * self.n_blocks, "entries of the past pile up"),
        ):
            if not condition:
                raise AssertionError(what)

    def _next_turn(self, block: int) -> int | None:
        content = self._hash[block]
        turns = self.expected.get(content) if content is not None else None
        return turns[0] if turns else None
