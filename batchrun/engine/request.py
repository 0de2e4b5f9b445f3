"""A request as the scheduler sees it, the step it takes part in, and what a step gives back. Plain data, no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

from batchrun.data.rows import TokenLogprob
from batchrun.sampling import SamplingParams

NO_TOKEN = -1


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from its prompt to its last token.

    ``tokens`` are known on the host: the prompt, then every settled output token. ``pending`` counts tokens that steps
    in flight will have sampled; their ids exist on the device alone. ``computed`` tokens have, or will have once the
    steps in flight end, keys and values in the cache; it chases ``len(tokens) + pending``.
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
    """``n`` tokens of one request from position ``start``: a prefill chunk, a decode token or a part between."""

    request: Request
    start: int
    n: int
    samples: bool  # the last of its tokens is the newest known one: a token is sampled after it
    incarnation: int


@dataclass(slots=True)
class Step:
    """What one forward pass computes. ``admitted`` requests are new on the device: their tokens are uploaded first."""

    rows: list[StepRow]
    admitted: list[Request]


@dataclass(slots=True)
class StepOutput:
    """Per sampling row, in the step's order: the sampled id and, where asked for, log-probabilities."""

    token_ids: list[int]  # NO_TOKEN where the logits were not numbers
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob]]  # per row of the step: of the prompt tokens after each position computed
