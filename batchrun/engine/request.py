"""A request as the scheduler sees it, the step it takes part in, and what a step gives back. Plain data, no torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchrun.data.rows import TokenLogprob
from batchrun.sampling import SamplingParams

NO_TOKEN = -1

# Which tokens may follow these output tokens: int32 [ceil(V / 32)], in which token t is bit t % 32 of word t // 32.
TokenMask = Callable[[Sequence[int]], NDArray[np.int32]]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from its prompt to its last token.

    ``tokens`` are known on the host: the prompt, then every settled output token. ``pending`` counts tokens that steps
    in flight will have sampled; their ids exist on the device alone. ``computed`` tokens have, or will have once the
    steps in flight end, keys and values in the cache; it chases ``len(tokens) + pending``. It is ahead of them by the
    drafts of a step in flight, of which `Scheduler.settle` takes back those that do not come true.
    """

    key: Any  # the caller's handle
    tokens: list[int]
    n_prompt: int  # tokens[:n_prompt] are the prompt
    params: SamplingParams
    noise_key: int  # 64 bits: this request's randomness
    stop_ids: frozenset[int]  # end the text: end-of-sequence and stop_token_ids
    max_total: int  # prompt and output together
    computed: int = 0
    pending: int = 0
    mask: TokenMask | None = None  # asked before a token is sampled
    drafting: Any = None  # what the speculator knows of it
    state: State = State.WAITING
    slot: int = -1  # row of the device's token buffer while running
    incarnation: int = 0  # counts preemptions: what a step in flight did for an earlier one is not published
    blocks: list[array[int]] = field(default_factory=list)  # per KV group, in order of position; typecode "i"
    published: int = 0  # leading blocks that were offered to the prefix cache
    hashes: list[bytes] = field(default_factory=list)  # chained hashes of the leading full blocks of tokens
    turn: int = 0  # place in the queue while waiting
    expected: int = 0  # leading blocks that it will look for in the prefix cache, while waiting
    awaited: bytes = b""  # content of its prompt that another request was computing when last looked at
    cached: int = 0  # tokens that the prefix cache supplied at the last admission
    finish_reason: str | None = None
    error: str | None = None  # why it failed, in place of an answer
    text: str | None = None  # set early where a stop string ended it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Chained hashes of at least the first ``count`` full blocks of known tokens (extended lazily, kept)."""
        while len(self.hashes) < count:
            begin = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else b""
            self.hashes.append(hash_block(parent, self.tokens[begin : begin + block_size]))
        return self.hashes


def hash_block(parent: bytes, tokens: list[int]) -> bytes:
    """Identity of a block of tokens and of all before it: 128 bits of BLAKE2b, so collisions are out of reach."""
    digest = blake2b(parent, digest_size=16)
    digest.update(array("I", tokens).tobytes())
    return digest.digest()


def noise_key(*parts: object) -> int:
    """A 64-bit key of counter-based noise from what identifies a request (seed, file, row, sample index)."""
    digest = blake2b("\x1f".join(map(repr, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


@dataclass(slots=True)
class StepRow:
    """``n`` tokens of one request from position ``start``: a prefill chunk, a decode token or a part between.

    The last ``n_drafts`` of them are guesses, which the step verifies: a token is sampled before each of them and after
    the last one, and they are accepted as far as they equal the samples. The host gives them in ``drafts``, or the
    draft model makes them on the device.
    """

    request: Request
    start: int
    n: int
    samples: bool  # the last of its tokens that is no draft is the newest known one: a token is sampled after it
    incarnation: int
    n_drafts: int = 0
    drafts: Sequence[int] = ()
    n_accepted: int = 0  # of its drafts, once it is settled

    @property
    def end(self) -> int:
        return self.start + self.n

    @property
    def n_known(self) -> int:
        """Tokens of the request that are known when the row has run, whatever comes of its drafts."""
        return self.end - self.n_drafts

    @property
    def n_sampled(self) -> int:
        return 1 + self.n_drafts if self.samples else 0


@dataclass(slots=True)
class Step:
    """What one forward pass computes. ``admitted`` requests are new on the device: their tokens are uploaded first.

    In ``rounds`` the draft model computes before it, and samples the drafts that the rows verify.
    """

    rows: list[StepRow]
    admitted: list[Request]
    rounds: list[Step] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum([row.n for row in self.rows])


@dataclass(slots=True)
class StepOutput:
    """What a step gives back, in the order of its rows.

    Of each sampled token its id, and its log-probabilities where asked for; of each draft its id.
    """

    token_ids: list[int]  # NO_TOKEN where the logits were not numbers
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob]]  # per row of the step: of the prompt tokens after each position computed
    drafts: list[int] = field(default_factory=list)
