"""What guesses the next tokens of a request on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Draft(NamedTuple):
    """A guess of what follows a request's tokens."""

    tokens: list[int]  # in order; []: nothing was found
    evidence: int  # how good the ground is, 0 to 8: of two drafts of one drafter, the one with more promises more


class Drafter(Protocol):
    """Guesses what follows a request's tokens, on the host. Guesses move time, never results.

    What it proposes depends on the calls made alone, so a job whose steps are repeated has the same drafts.
    """

    def begin(self) -> Any:
        """The state of one request, for `propose`. It takes nothing until then."""
        ...

    def propose(self, state: Any, tokens: Sequence[int], most: int) -> Draft:
        """At most ``most`` tokens that may follow ``tokens``: those of the last call, and what came after them."""
        ...

    def learn(self, tokens: Sequence[int], n_prompt: int) -> None:
        """Take in a finished request: ``tokens[n_prompt:]`` is its output."""
        ...
