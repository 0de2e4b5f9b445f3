"""Drafters find the longest match that scanning finds, propose what followed it, forget, and do bounded work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchrun.engine.speculation import suffix
from batchrun.engine.speculation.drafter import Draft, Drafter
from batchrun.engine.speculation.ngram import NgramDrafter
from batchrun.engine.speculation.suffix import END, LONGEST, VISITS, History, SuffixDrafter

tokens_of = st.integers(1, 4).flatmap(lambda alphabet: st.lists(st.integers(0, alphabet), max_size=120))
parts = st.lists(tokens_of, min_size=1, max_size=6)  # of one text, as they are appended


@pytest.fixture(params=[NgramDrafter, SuffixDrafter])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    made: Drafter = request.param()
    return made


@pytest.fixture
def every_place() -> Iterator[None]:
    """Chains are followed to their ends, so that what is found can be compared with what scanning finds.

    Examples are small: NumPy is used for few tokens already.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "_LOOP", 4)
        patch.setattr(suffix, "VISITS", 1 << 30)
        yield


def agreeing(context: list[int], text: list[int], place: int) -> int:
    """How many tokens of ``context`` end before ``place`` of ``text``: at most those that are compared."""
    n = 0
    while n < min(LONGEST, place, len(context)) and text[place - 1 - n] == context[-1 - n]:
        n += 1
    return n


def scan(context: list[int], texts: list[list[int]]) -> tuple[int, list[list[int]]]:
    """The length of the longest match in ``texts``, and all that followed such a match, the latest first."""
    found: dict[int, list[list[int]]] = {0: []}
    for text in reversed(texts):
        for place in reversed(range(1, len(text))):
            found.setdefault(agreeing(context, text, place), []).append(text[place:])
    longest = max(found)
    return longest, found[longest] if longest else []


# ---- prompt lookup


def prompt_lookup(tokens: list[int], least: int, most_match: int, most: int) -> Draft:
    for n in range(most_match, least - 1, -1):
        for index in range(len(tokens) - 1, n - 1, -1):
            if tokens[index - n : index] == tokens[-n:]:
                return Draft(tokens[index : index + most], n)
    return Draft([], 0)


@settings(deadline=None)
@given(parts=parts, least=st.integers(1, 3), longer=st.integers(0, 4), most=st.integers(1, 8))
def test_ngram_proposes_what_scanning_finds(parts: list[list[int]], least: int, longer: int, most: int) -> None:
    drafter = NgramDrafter(most_match=least + longer, least_match=least)
    state, tokens = drafter.begin(), []
    for part in parts:
        tokens += part
        assert drafter.propose(state, tokens, most) == prompt_lookup(tokens, least, least + longer, most)


@pytest.mark.parametrize(("most_match", "least_match"), [(2, 3), (2, 0)])
def test_ngram_refuses_runs_that_do_not_exist(most_match: int, least_match: int) -> None:
    with pytest.raises(ValueError, match="there are none"):
        NgramDrafter(most_match, least_match)


# ---- the history


def history(stream: list[int], capacity: int, at_once: int) -> History:
    made = History(capacity)
    for begin in range(0, len(stream), at_once):
        made.extend(stream[begin : begin + at_once])
    return made


def remembered(stream: list[int], capacity: int) -> list[list[int]]:
    """The texts, the oldest first, that a full memory holds which is written over from its beginning."""
    laps = [stream[begin : begin + capacity] for begin in range(0, len(stream), capacity)] or [[]]
    older = laps[-2][len(laps[-1]) + 1 :] if len(laps) > 1 else []
    return [older, laps[-1]]


def found(in_history: History, context: list[int]) -> tuple[int, list[list[int]]]:
    match = in_history.match(history(context, len(context), 1))
    held = in_history._tokens.tolist()
    return match.length, [held[place : held.index(END, place)] for place in match.places]


@pytest.mark.usefixtures("every_place")
@settings(max_examples=300, deadline=None)
@given(stream=tokens_of, context=tokens_of, capacity=st.integers(1, 150), at_once=st.sampled_from([1, 7, 60, 1000]))
@example(stream=[0] * 30, context=[0] * 5, capacity=100, at_once=7)
@example(stream=[0] * 100, context=[0] * 100, capacity=50, at_once=60)
@example(stream=[*range(20), 1, 2, 3], context=[*range(20)], capacity=100, at_once=100)
def test_history_finds_what_scanning_finds(stream: list[int], context: list[int], capacity: int, at_once: int) -> None:
    memory = history(stream, capacity, at_once)
    assert found(memory, context) == scan(context, remembered(stream, capacity))
    assert found(memory, stream) == scan(stream, remembered(stream, capacity))


@pytest.mark.usefixtures("every_place")
@settings(deadline=None)
@given(stream=tokens_of, contexts=parts, capacity=st.integers(1, 150))
def test_history_is_the_same_however_it_came(stream: list[int], contexts: list[list[int]], capacity: int) -> None:
    """With NumPy or in a loop: hashes, the order of places and what is cut off agree."""
    one_by_one, at_once = history(stream, capacity, 1), history(stream, capacity, 1000)
    for memory in (one_by_one, at_once):
        memory.extend([1, 2, 1])
    for context in [stream, *contexts]:
        assert found(one_by_one, context) == found(at_once, context)


def test_matches_are_bounded() -> None:
    """A context that is everywhere costs no more than one that is rare, and the latest places count."""
    memory = History(1 << 12)
    memory.extend([5, 6, 7] * 1000)
    match = memory.match(memory)
    assert match.length == LONGEST
    assert match.places == [LONGEST + 3000 - 3 * n for n in range(1, VISITS + 1)]


# ---- outputs of the job


def run(drafter: Drafter, prompt: list[int], output: list[int], most: int = 8) -> list[Draft]:
    """The drafts of a request that is decoded token by token."""
    state, drafts = drafter.begin(), []
    for n in range(len(output)):
        drafts.append(drafter.propose(state, prompt + output[:n], most))
    drafter.learn(prompt + output, len(prompt))
    return drafts


@pytest.mark.usefixtures("every_place")
@settings(deadline=None)
@given(outputs=st.lists(st.tuples(tokens_of, tokens_of), max_size=4), parts=parts, most=st.integers(1, 16))
def test_suffix_proposes_what_followed_a_longest_match(
    outputs: list[tuple[list[int], list[int]]], parts: list[list[int]], most: int
) -> None:
    drafter = SuffixDrafter(memory_tokens=1 << 10)
    for prompt, output in outputs:
        drafter.learn(prompt + output, len(prompt))
    learnt = [prompt[-suffix._BEFORE :] + output for prompt, output in outputs]
    state, tokens = drafter.begin(), []
    for part in parts:
        tokens += part
        draft = drafter.propose(state, tokens, most)
        assert len(draft.tokens) <= most
        followed = [after for texts in ([tokens], learnt) for after in scan(tokens, texts)[1]]
        assert not draft.tokens or draft.tokens in [after[: len(draft.tokens)] for after in followed]
        assert draft.evidence in (range(1, 9) if draft.tokens else [0])


def test_outputs_draft_for_other_requests() -> None:
    template = list(range(100, 140))
    drafter = SuffixDrafter()
    run(drafter, [1, 2, 3, 50, 51], template)
    drafts = run(drafter, [7, 8, 9, 50, 51], template)
    assert drafts[0].tokens, "the end of the prompt is known: so is how an output begins"
    assert all(draft.tokens == template[n : n + len(draft.tokens)] for n, draft in enumerate(drafts))
    assert drafts[20].tokens == template[20:28]
    assert drafts[20].evidence > drafts[0].evidence


def test_of_equally_frequent_continuations_the_latest_is_drafted() -> None:
    drafter = SuffixDrafter()
    for label in (30, 31):
        drafter.learn([1, 10, 11, 12, label], 1)
    assert drafter.propose(drafter.begin(), [9, 10, 11, 12], 8).tokens == [31]


def test_the_more_frequent_continuation_is_drafted() -> None:
    drafter = SuffixDrafter()
    for label in (30, 31, 31, 31, 30, 31):
        drafter.learn([1, 10, 11, 12, label, 40, 41], 1)
    assert drafter.propose(drafter.begin(), [9, 10, 11, 12], 8).tokens == [31, 40, 41]


def test_what_always_differs_is_not_drafted() -> None:
    """A draft goes as far as outputs agree, and not into what each row has for itself."""
    drafter = SuffixDrafter()
    for row in range(1000, 1020):
        drafter.learn([1, 10, 11, 12, 13, row, 14, 15], 1)
    assert drafter.propose(drafter.begin(), [9, 10, 11, 12], 8).tokens == [13]
    assert drafter.propose(drafter.begin(), [9, 10, 11, 12, 13], 8).tokens == []


def test_a_request_that_copies_is_drafted_from_itself() -> None:
    """What a row has for itself stands in its prompt: outputs of other rows, however long they match, know less."""
    drafter = SuffixDrafter()
    for row in range(1000, 1020):
        drafter.learn([1, 20, 21, 22, 23, 24, 25, 26, 10, row, row + 100], 1)
    prompt = [9, 9, 10, 2000, 2001, 2002, 8]
    draft = drafter.propose(drafter.begin(), [*prompt, 20, 21, 22, 23, 24, 25, 26, 10], 8)
    assert draft.tokens[:2] == [2000, 2001]


def test_what_happened_often_is_drafted_before_what_happened_at_length() -> None:
    drafter = SuffixDrafter()
    drafter.learn([1, 10, 6, 7, 8, 9], 1)
    often = [token for row in range(100, 116) for token in (row, 10, 5)]
    assert drafter.propose(drafter.begin(), [99, 10], 8).tokens == [6, 7, 8]
    assert drafter.propose(drafter.begin(), [*often, 99, 10], 8).tokens == [5]


def test_evidence_is_the_likelihood_of_the_first_token() -> None:
    """Which does not depend on how many are asked for; the longer the context, the less is missing to certainty."""
    text = [*range(100, 140)]
    for most in (1, 8):
        drafter = SuffixDrafter()
        drafter.learn([1, *text], 1)
        assert drafter.propose(drafter.begin(), text[:20], most).evidence == round(8 / (1 + 2 / 16))
        drafter.learn([1, 2, 119, 8], 1)
        assert drafter.propose(drafter.begin(), [3, 119], most).evidence == round(8 / (2 + 2 / 1))


def test_old_outputs_are_forgotten() -> None:
    drafter = SuffixDrafter(memory_tokens=1000)
    drafter.learn([1, *range(100, 120)], 1)
    question = [100, 101, 102]
    assert drafter.propose(drafter.begin(), question, 4).tokens == [103, 104, 105, 106]
    other = random.Random(0)
    for _ in range(40):
        drafter.learn([other.randrange(1000, 9000) for _ in range(50)], 1)
        drafter.propose(drafter.begin(), [1], 4)
    assert drafter.propose(drafter.begin(), question, 4).tokens == []


@pytest.mark.parametrize("proposing", [False, True])
def test_memory_is_bounded(proposing: bool) -> None:
    drafter = SuffixDrafter(memory_tokens=3000)
    for n in range(400):
        drafter.learn([n, *range(100)], 1)
        if proposing:
            drafter.propose(drafter.begin(), [1, 2, 3], 4)
        assert drafter.nbytes <= (44 if proposing else 8) * 3000 + 1024
    assert drafter.propose(drafter.begin(), [50, 51, 52], 2).tokens == [53, 54]


def test_a_memory_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_tokens: 0"):
        SuffixDrafter(memory_tokens=0)


# ---- both


class Counted(list[int]):
    """A request's tokens, counting those that are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_tokens_are_read_once(drafter: Drafter) -> None:
    random_token = random.Random(1).randrange
    tokens, state = Counted(random_token(50) for _ in range(5000)), drafter.begin()
    drafter.propose(state, tokens, 16)
    first, tokens.read = tokens.read, 0
    assert first <= 5000 * 10
    for _ in range(100):
        tokens.append(random_token(50))
        drafter.propose(state, tokens, 16)
    assert tokens.read <= 100 * (16 + 20)


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of `History.extend` brought."""
    sizes: list[int] = []
    extend = History.extend

    def counting(self: History, tokens: Sequence[int]) -> None:
        sizes.append(len(tokens))
        extend(self, tokens)

    monkeypatch.setattr(History, "extend", counting)
    return sizes


def test_learning_waits_for_a_proposal_and_is_spread(extensions: list[int]) -> None:
    drafter = SuffixDrafter()
    for n in range(1000):
        drafter.learn([n, *range(100)], 1)
    assert not extensions
    for call in range(40):
        drafter.propose(drafter.begin(), [3], 4)
        assert max(extensions) <= 4096
        assert sum(extensions) == call + 1 + min((call + 1) * 4096, 1000 * 102), "each token once"


def test_small_outputs_are_indexed_together(extensions: list[int]) -> None:
    """NumPy's calls take as long for one token as for a hundred: labels are not indexed one by one."""
    drafter = SuffixDrafter()
    for n in range(5000):
        drafter.learn([7, 8, n], 2)
        drafter.propose(drafter.begin(), [7, 8], 4)
    assert sum(size > 2 for size in extensions) < 120


def test_same_calls_give_same_drafts(drafter: Drafter) -> None:
    rng = random.Random(4)
    rows = [([rng.randrange(6) for _ in range(30)], [rng.randrange(6) for _ in range(30)]) for _ in range(10)]
    other = type(drafter)()
    assert [run(drafter, *row) for row in rows] == [run(other, *row) for row in rows]
