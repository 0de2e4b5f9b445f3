"""Prompt lookup (Saxena 2023): what followed a request's last tokens when they stood in it before is the guess."""

from __future__ import annotations

from collections.abc import Sequence

from batchrun.engine.speculation.drafter import Draft


class _Occurrences:
    """For each number of tokens, where each run of so many tokens last occurred: the index of what followed it."""

    def __init__(self, least: int, most: int) -> None:
        self.last: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(most, least - 1, -1)}
        self.size = 0  # leading tokens that were read: every run in ``last`` ends before the last of them

    def read(self, tokens: Sequence[int]) -> None:
        for index in range(self.size, len(tokens)):
            for n, last in self.last.items():
                if n <= index:
                    last[tuple(tokens[index - n : index])] = index
        self.size = len(tokens)


class NgramDrafter:
    """Drafts what followed the longest run of a request's last tokens that stood in it before, where it did so last.

    Runs of ``least_match`` to ``most_match`` tokens count; a draft's evidence is their number. The state of a request
    takes some 120 bytes for each of its tokens and each length of a run.
    """

    def __init__(self, most_match: int = 4, least_match: int = 1) -> None:
        if not 1 <= least_match <= most_match:
            raise ValueError(f"runs of {least_match} to {most_match} tokens: there are none")
        self._least, self._most = least_match, most_match

    def begin(self) -> _Occurrences:
        return _Occurrences(self._least, self._most)

    def propose(self, state: _Occurrences, tokens: Sequence[int], most: int) -> Draft:
        state.read(tokens)
        for n, last in state.last.items():
            if n <= len(tokens) and (index := last.get(tuple(tokens[len(tokens) - n :]))) is not None:
                return Draft(list(tokens[index : index + most]), n)
        return Draft([], 0)

    def learn(self, tokens: Sequence[int], n_prompt: int) -> None:
        """Nothing: only a request's own tokens are looked at."""
