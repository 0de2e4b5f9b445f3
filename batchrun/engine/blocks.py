"""Paged KV bookkeeping for one KV group: which blocks are free, shared, or kept for their content. No torch.

A block holds the keys and values of ``block_size`` consecutive positions in every layer of the group. Block 0 is
reserved: it fills block tables past a row's length, and where a sliding window has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks with a content index (prefix cache).

    A block is in exactly one of three states: held (``refs > 0``), free with content that may be asked for again (in
    ``_cached``, oldest first), or blank (in ``_blank``). Content is known by its chained hash, which a block is given
    only after the forward pass that filled it has settled.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        if n_blocks < 2:
            raise ValueError("a pool needs at least one block beside the reserved one")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._refs = [0] * n_blocks
        self._hash: list[bytes | None] = [None] * n_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(n_blocks - 1, 0, -1))
        self._cached: dict[int, None] = {}

    @property
    def n_usable(self) -> int:
        return self.n_blocks - 1

    @property
    def n_free(self) -> int:
        """Blocks that an allocation may take, those with cached content included."""
        return len(self._blank) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting the content that was used longest ago. The caller checked ``n_free``."""
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = next(iter(self._cached))
                del self._cached[block]
                self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def lookup(self, content: bytes) -> int | None:
        return self._by_hash.get(content)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that a lookup named."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, the last first, so that the ends of chains are evicted before their beginnings."""
        for block in reversed(blocks):
            if block == 0:
                continue
            if self._refs[block] <= 0:
                raise ValueError(f"block {block} was released twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, content: bytes) -> None:
        """Offer a held, fully computed block to later requests. Of equal contents the first block stays known."""
        if block != 0 and self._hash[block] is None and content not in self._by_hash:
            self._hash[block] = content
            self._by_hash[content] = block

    def clear_cache(self) -> None:
        """Forget all content that nobody holds."""
        for block in self._cached:
            self._forget(block)
            self._blank.append(block)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        content = self._hash[block]
        if content is not None:
            del self._by_hash[content]
            self._hash[block] = None

    def check(self) -> None:
        """Raise AssertionError unless every invariant of the pool holds."""
        blank, cached = set(self._blank), set(self._cached)
        held = {b for b in range(1, self.n_blocks) if self._refs[b] > 0}
        for condition, what in (
            (self._refs[0] == 0 and self._hash[0] is None, "the reserved block is in use"),
            (len(blank) == len(self._blank), "a block is blank twice"),
            (not blank & cached and not blank & held and not cached & held, "a block is in two states"),
            (blank | cached | held == set(range(1, self.n_blocks)), "a block is in no state"),
            (all(self._hash[b] is None for b in blank), "a blank block has content"),
            (all(self._hash[b] is not None for b in cached), "a cached block has no content"),
            (all(self._hash[b] == h for h, b in self._by_hash.items()), "the content index is wrong"),
            (len(self._by_hash) == sum(h is not None for h in self._hash), "content is missing from the index"),
        ):
            if not condition:
                raise AssertionError(what)
