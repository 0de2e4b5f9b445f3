"""SuffixDecoding (Oliaro et al. 2024): the longest suffix of a request's tokens that occurred before, in the request or
in outputs of the job, and what followed it most often. Outputs of one job are alike: templates, labels, keys.

What occurred is found as deflate finds it (RFC 1951, section 4): by chains of the places whose contexts have one hash.
The paper's suffix trees take hundreds of bytes a token in Python, and cannot forget.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchrun.engine.speculation.drafter import Draft

ORDERS = (1, 2, 4, 8)  # lengths of the contexts that are indexed; each is twice the one before
LONGEST = 16  # tokens of a context that are compared
VISITS = 16  # places of a chain that are looked at, the latest first
END = -1  # before, between and after texts: equal to no token
_MULTIPLIER = 0x9E3779B1  # of hashes: polynomials in it modulo 2**32, whose upper bits are used
_MASK = 0xFFFFFFFF
_DOUBT = 2.0  # divided by a context's length: places where something else followed it, beside those that are known
_LEAST_PROBABILITY = 0.1  # that all of a draft's tokens are right
_BEFORE = 8  # tokens of a prompt that are remembered with its output: how outputs begin
_AT_ONCE = 4096  # tokens of outputs that one `propose` indexes
_LOOP = 48  # tokens up to which a loop takes less time than NumPy's calls


class Match(NamedTuple):
    """Where the longest context was found: ``places`` are the indices of what followed it, the latest first."""

    length: int
    places: list[int]


class Path(NamedTuple):
    """What may come next, how likely its first token is, and how many of its tokens are expected to be right."""

    tokens: list[int]
    first: float
    expected: float


class _Chains:
    """The places whose contexts of ``order`` tokens have one hash, from the latest to earlier ones; 0 ends a chain."""

    __slots__ = ("earlier", "hash", "latest", "order", "power", "shift")

    def __init__(self, order: int, bits: int) -> None:
        self.order = order
        self.power = pow(_MULTIPLIER, order + 1, 1 << 32)  # the factor of the token that leaves a context
        self.shift = 32 - bits
        self.latest = array("i", [0]) * (1 << bits)  # upper bits of a hash -> place
        self.earlier = array("i")  # place -> place
        self.hash = 0  # of the context of the next token's place


class History:
    """The newest tokens of a stream, at most ``capacity``, and where contexts of 1, 2, 4 and 8 of them occurred.

    A *place* is the index of a token; its contexts are the tokens that end before it. A full memory is written over
    from its beginning. So a chain may lead to a place that holds something else by now: contexts are always compared.
    Chains are followed over `VISITS` places: of contexts that occur more often or share a hash, older ones are missed.

    A token takes 20 bytes as it comes, and up to 16 for each token of ``capacity`` are taken at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._limit = LONGEST + capacity
        bits = max(8, capacity.bit_length() - 1)
        self._chains = [_Chains(order, bits) for order in ORDERS]
        self._tokens = array("i", [END]) * LONGEST  # END first: every place has contexts
        self._reserve(LONGEST)
        self._restart()

    def __len__(self) -> int:
        """Tokens since the memory's beginning was written last."""
        return self._end - LONGEST

    @property
    def full(self) -> bool:
        """Whether the next token will be written over the oldest one."""
        return self._end == self._limit

    @property
    def nbytes(self) -> int:
        arrays = [self._tokens, *(a for chains in self._chains for a in (chains.latest, chains.earlier))]
        return sum(a.itemsize * len(a) for a in arrays)

    def _restart(self) -> None:
        self._end = LONGEST  # place of the next token
        for chains in self._chains:
            chains.hash = END * sum(pow(_MULTIPLIER, i + 1, 1 << 32) for i in range(chains.order)) & _MASK

    def _reserve(self, end: int) -> None:
        """Have room for tokens before ``end`` and for the END after them."""
        missing = end + 1 - len(self._tokens)
        if missing > 0:
            missing = max(missing, min(len(self._tokens) // 8, self._limit - end))
            self._tokens.frombytes(bytes(4 * missing))
            for chains in self._chains:
                chains.earlier.frombytes(bytes(4 * (len(self._tokens) - len(chains.earlier))))

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what comes next."""
        done = 0
        while done < len(tokens):
            if self.full:
                self._restart()
            part = tokens[done : done + self._limit - self._end]
            self._reserve(self._end + len(part))
            if len(part) > _LOOP:
                self._extend(part)
            else:
                for token in part:
                    self._append(token)
            done += len(part)

    def _append(self, token: int) -> None:
        place, tokens = self._end, self._tokens
        for chains in self._chains:
            value, latest = chains.hash, chains.latest
            slot = value >> chains.shift
            chains.earlier[place] = latest[slot]
            latest[slot] = place
            chains.hash = ((value + token) * _MULTIPLIER - tokens[place - chains.order] * chains.power) & _MASK
        tokens[place] = token
        self._end = place + 1
        tokens[self._end] = END

    def _extend(self, added: Sequence[int]) -> None:
        """`_append` them all, with NumPy."""
        begin, end = self._end, self._end + len(added)
        tokens = np.frombuffer(self._tokens, np.int32)
        tokens[begin:end] = added
        tokens[end] = END
        places = np.arange(begin, end)
        hashes = tokens[begin - LONGEST : end].astype(np.uint32) * np.uint32(_MULTIPLIER)  # of one token before a place
        length = 1
        for chains in self._chains:
            while length < chains.order:
                hashes = hashes[length:] + hashes[:-length] * np.uint32(pow(_MULTIPLIER, length, 1 << 32))
                length *= 2
            slots = (hashes[-len(added) - 1 : -1] >> chains.shift).astype(np.int64)  # the last hash is that of ``end``
            by_slot = np.sort(slots << 32 | places)  # and by place where the slot is one
            slots, ordered = by_slot >> 32, by_slot & _MASK
            latest, earlier = np.frombuffer(chains.latest, np.int32), np.frombuffer(chains.earlier, np.int32)
            earlier[ordered[0]] = latest[slots[0]]
            earlier[ordered[1:]] = np.where(slots[1:] == slots[:-1], ordered[:-1], latest[slots[1:]])
            latest[slots] = ordered  # of several the last remains
            chains.hash = int(hashes[-1])
        self._end = end

    def match(self, text: History) -> Match:
        """The longest of the contexts that the next token of ``text`` has and that are found here, and where."""
        context = text._tokens[max(LONGEST, text._end - LONGEST) : text._end]
        for chains, of_text in zip(reversed(self._chains), reversed(text._chains), strict=True):
            if chains.order <= len(context):
                length, places = chains.order, []
                for place in self._visit(chains, of_text.hash):
                    agreeing = self._agreeing(place, context, chains.order)
                    if agreeing > length:
                        length, places = agreeing, [place]
                    elif agreeing == length:
                        places.append(place)
                if places:
                    return Match(length, places)
        return Match(0, [])

    def _visit(self, chains: _Chains, value: int) -> list[int]:
        """The latest places in the chain of a hash."""
        places: list[int] = []
        place, age = chains.latest[value >> chains.shift], 0
        while place and len(places) < VISITS:
            older = (self._end - place) % (self.capacity + 1)
            if older <= age:  # what was written over leads to newer places
                break
            age = older
            places.append(place)
            place = chains.earlier[place]
        return places

    def _agreeing(self, place: int, context: array[int], order: int) -> int:
        """How many tokens of ``context`` end before ``place``, of ``order`` to twice as many; 0 for fewer."""
        tokens = self._tokens
        if tokens[place - order : place] != context[-order:]:
            return 0
        n, most = order, min(2 * order, len(context))
        while n < most and tokens[place - n - 1] == context[-n - 1]:
            n += 1
        return n

    def follow(self, match: Match, most: int) -> Path:
        """What followed at most of a match's places, then at most of these, and so on while it is likely enough."""
        tokens, places = self._tokens, match.places
        path: list[int] = []
        probability, first, expected = 1.0, 0.0, 0.0
        while len(path) < most and places:
            following = [tokens[place] for place in places]
            token = following[0]
            if (count := following.count(token)) < len(places):
                token = max(dict.fromkeys(following), key=following.count)  # of equals the latest
                count = following.count(token)
            probability *= count / (len(places) + _DOUBT / (match.length + len(path)))
            if token == END or probability < _LEAST_PROBABILITY:
                break
            path.append(token)
            first, expected = first or probability, expected + probability
            places = [place + 1 for place, other in zip(places, following, strict=True) if other == token]
        return Path(path, first, expected)


@dataclass(slots=True)
class _Text:
    """A request's tokens as a history of their own; none before the first draft."""

    history: History | None = None

    def read(self, tokens: Sequence[int]) -> History:
        history = self.history
        if history is None or len(tokens) > history.capacity:
            history = self.history = History(2 * len(tokens))
        history.extend(tokens[len(history) :])
        return history


class SuffixDrafter:
    """Drafts what most often followed the longest suffix of a request's tokens, in them or in outputs of the job.

    Both are looked at, and the path is taken of which more tokens are expected to be right. A draft's evidence is how
    likely its first token is by what was seen, in eighths. The newest ``memory_tokens`` of outputs are remembered, with
    what came before each: 44 bytes a token at most. Outputs are kept as they come, for next to nothing, and indexed by
    `propose`, not too many at once. The state of a request takes about 40 bytes for each of its tokens.
    """

    def __init__(self, memory_tokens: int = 1 << 20) -> None:
        if memory_tokens < 1:
            raise ValueError(f"memory_tokens: {memory_tokens} is less than 1")
        self._capacity = memory_tokens
        self._outputs: History | None = None
        self._waiting = array("i")  # outputs that are to be indexed, each ended by END

    @property
    def nbytes(self) -> int:
        """What is taken by outputs."""
        return self._waiting.itemsize * len(self._waiting) + (self._outputs.nbytes if self._outputs is not None else 0)

    def begin(self) -> _Text:
        return _Text()

    def propose(self, state: _Text, tokens: Sequence[int], most: int) -> Draft:
        own = state.read(tokens)
        outputs = self._indexed_outputs()
        paths = [history.follow(history.match(own), most) for history in (own, outputs) if history is not None]
        best = max(paths, key=lambda path: path.expected)
        return Draft(best.tokens, round(8 * best.first))

    def learn(self, tokens: Sequence[int], n_prompt: int) -> None:
        self._waiting.extend(tokens[max(0, n_prompt - _BEFORE) :])
        self._waiting.append(END)
        if len(self._waiting) > 2 * self._capacity:
            del self._waiting[: -self._capacity]

    def _indexed_outputs(self) -> History | None:
        """Outputs, as far as they are indexed. Few tokens take as long as a hundred, so they wait for more."""
        if self._outputs is None:
            if not self._waiting:
                return None
            self._outputs = History(self._capacity)
        outputs, waiting = self._outputs, self._waiting
        if waiting and len(waiting) >= min(len(outputs) // 16, _AT_ONCE // 4):
            outputs.extend(waiting[:_AT_ONCE])
            del waiting[:_AT_ONCE]
        return outputs
