"""Whether to speculate, and how many drafts of each request to verify: whatever gives most tokens per second.

A step that verifies ``m`` drafts gives ``n + gain(m)`` tokens, where ``gain`` sums the chances that a draft and all
before it in its request are accepted. These chances fall along a request, so the ``m`` likeliest drafts of all requests
are prefixes, and no other ``m`` gain more. With ``T(m)`` the time of such a decode step, a token costs
``price = min over m of T(m) / (n + gain(m))`` seconds at best, or what it costs by plain decoding where that is less.
The ``m`` that attains the minimum maximises ``gain(m) * price - T(m)`` (Dinkelbach 1967). So does a step with prompt
chunks: it takes drafts as long as what they save is more than what they add to *its* time.

Before a step is scheduled nobody knows what drafts there will be: the latest offers stand for them, those of watched
requests while decoding is plain. To begin, speculation has to be expected to be clearly faster than plain decoding as
measured at about this size and not long ago. What it may have lost after all is bounded by a share of the time.

A draft model has to compute the prompts too. That pays where outputs are long: speculation is expected to take what it
computes of them per token of output besides, and has lost it only by and by, or once it stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.speculation.acceptance import Acceptance, Floats, Offer, Record
from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.engine.speculation.step_clock import StepClock
from batchrun.engine.step_times import StepTimes

_MARGIN = 1.05  # of plain decoding's rate, to begin to speculate
_EVERY_ON = 4  # steps between decisions while speculating
_EVERY_OFF = 16
_LATEST = 64  # offers that stand for the next ones
_PRIOR = 0.3  # chance of a host drafter's draft; whether it has any is seen while decoding is plain
_PRIOR_MODEL = 0.7  # of a draft model's, which only speculation tells
_MEASURED = 4  # plain steps that tell their time
_MEASURE_PAUSE = 40  # steps between two times that speculation stops in order to measure
_LOSS = 0.005  # of all time, that speculation may have lost
_CLIP = 2  # times what is expected: a step that takes longer may do so by accident
_CLIP_NEW = 8  # the same for a size that was not tried before
_PROMISE = 2.0  # times that, at most, where a speedup is expected of drafts that were watched
_FREE_LOSS = 2  # plain steps that it may have lost besides
_KEPT = 1 - 1 / 4000  # with every step, of the counts of prompts and outputs
_PROBE_STEPS = 4
_PROBE_OFFERS = 4  # requests, and drafts of each
_PAUSES = 64, 16384  # steps between probes, at first and at most


class _Best(NamedTuple):
    drafts: NDArray[np.intp]  # to verify, as indices into the flat chances
    speedup: float  # of decode steps with the best drafts, and prompts of a draft model, over plain ones


class Controller:
    """Decides from what it is told; keeps no clock of its own.

    ``most``: drafts of a request in a step. ``times``: where known, how step times depend on size. ``shadows``: drafts
    are also looked at while decoding is plain (`observe_draft` with ``shadow``); a draft model is too dear for that, so
    its chances are probed now and then. ``draft_cost``: time of one step of the draft model, in plain steps.

    For each step the caller asks `wants`; where that is true and it has offers for the step, `choose`; then it tells
    `observe_draft` of every draft that was verified, and `observe_step`.
    """

    def __init__(self, most: int, times: StepTimes | None, *, shadows: bool = True, draft_cost: float = 0.0) -> None:
        self.stats = SpeculationStats()
        self._steps = 0
        self._clock = StepClock(times, draft_cost)
        self._acceptance = Acceptance(most, _PRIOR if shadows else _PRIOR_MODEL)
        self._latest: deque[Offer] = deque(maxlen=_LATEST)
        self._shadows = shadows
        self._on = False
        self._was_on = False  # the last step
        self._decide_at = 0  # step
        self._measure = 0  # plain steps to run before speculation may go on
        self._measure_at = 0  # step from which on these may be asked for
        self._probe = 0  # steps of a probe that are left
        self._probe_at, self._pause = _PAUSES[0], _PAUSES[0]
        self._seconds = 0.0  # of all steps, without accidents
        self._lost = 0.0  # seconds, by speculation; negative: gained, which is soon forgotten
        self._draft_cost = draft_cost
        self._prompts = 0.0  # of late: seconds that the draft model needs for all prompts, ...
        self._caught_up = 0.0  # ... seconds that it did take for prompts, ...
        self._outputs = 0.0  # ... and tokens of output
        self._unpaid = 0.0  # of the seconds that it took: to be lost by and by
        if not shadows:
            self._latest.append(Offer(Record(), most, 0))

    # ---- decisions

    def wants(self, n: int, room: int) -> bool:
        """Whether to draft for the next step, of about ``n`` sampling rows and with room for so many drafts."""
        if n <= 0 or room <= 0:
            return False
        if self._steps >= self._decide_at:
            self._decide(n, room)
        return (self._on or self._probe > 0) and not self._measure

    def choose(self, n: int, tokens: int, offers: Sequence[Offer], room: int) -> list[int]:
        """How many drafts of each offer to verify in a step of ``n`` sampling rows.

        ``tokens``: of the step without drafts, prompt chunks included; ``room``: drafts that it can take in all. Of a
        draft model an offer's ``length`` is the most that it may draft.
        """
        if not offers:
            return []
        self._latest.extend(offers[-_LATEST:])
        if self._probe:
            return self._probed(offers, room)
        chances = self._acceptance.chances(offers)
        chosen = self._best(chances, 1.0, n, tokens, room).drafts // chances.shape[1]
        return [int(count) for count in np.bincount(chosen, minlength=len(offers))]

    def _best(self, chances: Floats, each: float, n: int, tokens: int, room: float) -> _Best:
        """The best drafts of those with these ``chances``; ``each``: requests that a row of them stands for."""
        flat = chances.ravel()
        order = np.argsort(-flat, kind="stable")  # a request's equal chances stay in order
        most = min(room, self._clock.reach() - tokens) / each
        order = order[: max(0, int(min(most, float(np.count_nonzero(flat)))))]
        drafts = each * np.arange(len(order) + 1)
        gains = np.concatenate(([0.0], each * flat[order].cumsum()))
        depth = np.concatenate(([0], np.maximum.accumulate(order % chances.shape[1] + 1)))
        seconds = self._clock.drafted(n + drafts, n + drafts, depth, n)
        plain = min(float(self._clock.plain(n, n)), float(seconds.min())) / n  # a step with drafts does more
        price = float((seconds / (n + gains)).min())
        if tokens > n:
            seconds = self._clock.drafted(tokens + drafts, n + drafts, depth, n)
        return _Best(
            order[: int((gains * min(plain, price) - seconds).argmax())], plain / (price + self._prompts_each())
        )

    def _decide(self, n: int, room: int) -> None:
        step = self._steps
        self._clock.forget(step)
        was_on = self._on
        promise = self._speedup(n, room)
        self._on = promise >= (1.0 if was_on else _MARGIN) and self._is_allowed(n, promise)
        if self._on and not self._shadows:
            self._pause = _PAUSES[0]
        if was_on and not self._on:
            self._probe_at = step + self._pause
        if not self._on and not self._shadows and step >= self._probe_at:
            self._consider_probe(n, room)
        if (self._on or self._probe) and not self._clock.is_measured(n, step, _MEASURED) and step >= self._measure_at:
            self._measure = _MEASURED + self._was_on  # the first one after a step that was on does not overlap
            self._measure_at = step + _MEASURE_PAUSE
        if not self._on and not self._probe:  # nothing more will come of it
            self._lost, self._unpaid = self._lost + self._unpaid, 0.0
        self._decide_at = step + (_EVERY_ON if self._on else _EVERY_OFF)

    def _speedup(self, n: int, room: int) -> float:
        """Expected of speculation, with drafts like the latest ones."""
        if not self._latest:
            return 0.0
        return self._speedup_with(self._acceptance.chances(self._latest), n, room)

    def _speedup_with(self, chances: Floats, n: int, room: int) -> float:
        return self._best(chances, n / len(chances), n, n, room).speedup

    def _is_allowed(self, n: int, promise: float = 1.0) -> bool:
        """Whether speculation has not lost too much; the more it promises, the more it may have lost."""
        allowed = _LOSS * self._seconds + _FREE_LOSS * float(self._clock.plain(n, n))
        return self._lost <= allowed * (min(promise, _PROMISE) if self._shadows else 1.0)

    def _prompts_each(self) -> float:
        """Seconds that the draft model needs for prompts, per token of output."""
        return max(self._prompts, self._caught_up) / max(self._outputs, 1.0)

    # ---- probes of a draft model

    def _consider_probe(self, n: int, room: int) -> None:
        """Probe unless even drafts as good as one may hope for would not do, at this size."""
        hoped = np.full((1, self._acceptance.most), _PRIOR_MODEL).cumprod(axis=1)
        if not self._is_allowed(n) or self._speedup_with(hoped, n, room) < _MARGIN:
            return
        self._acceptance.fade()
        self._latest.clear()
        self._probe = _PROBE_STEPS
        self._pause = min(2 * self._pause, _PAUSES[1])
        self._probe_at = self._steps + self._pause

    @staticmethod
    def _probed(offers: Sequence[Offer], room: int) -> list[int]:
        chosen = [0] * len(offers)
        for index, offer in enumerate(offers[:_PROBE_OFFERS]):
            chosen[index] = min(offer.length, _PROBE_OFFERS, room)
            room -= chosen[index]
        return chosen

    # ---- what has happened

    def observe_step(
        self,
        seconds: float,
        n: int,
        tokens: int,
        produced: int,
        drafts: Sequence[int] | None = None,
        *,
        catch_up: int = 0,
    ) -> None:
        """A step of ``n`` sampling rows and ``tokens``, drafts not among them, took ``seconds``.

        The time is that since the end of the step before, and ``produced`` counts output tokens. ``drafts`` of each
        request that were verified; None: it was a plain step. ``catch_up``: tokens that the draft model computed beyond
        one a row.
        """
        stats, clock = self.stats, self._clock
        self._steps += 1
        stats.seconds += seconds
        plain = float(clock.plain(tokens, n))
        if self._steps > 1:  # the first one loads and compiles
            self._seconds += min(seconds, _CLIP * plain)
            if self._draft_cost:
                self._pay(min(seconds, plain) * (tokens - n) / tokens, produced)
        if drafts is None:
            if not self._was_on:
                clock.note_plain(seconds, tokens, n, self._steps)
            self._measure = max(0, self._measure - 1)
            self._was_on = False
            return
        self._was_on = True
        self._probe = max(0, self._probe - 1)
        if n > 0:
            self._note_drafted(seconds, n, tokens, produced, drafts, catch_up)

    def _note_drafted(
        self, seconds: float, n: int, tokens: int, produced: int, drafts: Sequence[int], catch_up: int
    ) -> None:
        """Learn from a step with drafts, and charge what it lost or won."""
        stats, clock = self.stats, self._clock
        m, depth = sum(drafts), max(drafts, default=0)
        plain = float(clock.plain(tokens, n))
        caught_up = min(clock.catch_up(catch_up, n), max(0.0, seconds - plain))
        expected = float(clock.drafted(tokens + m, n + m, depth, n))
        plain = min(plain, expected) if clock.knows(tokens) else max(plain, seconds - caught_up)
        won = (produced - n) * min(float(clock.plain(n, n)), plain) / n
        stats.seconds_on += seconds
        stats.seconds_plain += plain + won
        expected += caught_up
        clip = _CLIP_NEW if clock.is_new(tokens, m) else _CLIP
        if 2 * caught_up <= expected:  # else the rest is hard to tell
            noted = min(seconds, _CLIP * expected) - caught_up
            clock.note_drafted(noted, tokens + m, n + m, depth, n, self._steps)
        self._caught_up += caught_up
        self._unpaid += caught_up
        cost = min(seconds, clip * expected) - caught_up - plain
        if tokens > n:  # prompts take now more, now less: drafts, no more than a step of their own would
            cost = min(cost, float(clock.drafted(n + m, n + m, depth, n)))
        self._lost = max(self._lost + cost - won, -_LOSS * self._seconds)

    def _pay(self, prompts: float, produced: int) -> None:
        """Spread what the draft model took for prompts over the outputs; the step's ``prompts`` took so many seconds.

        Lost at once, it would end speculation before what it gives has come.
        """
        self._prompts = self._prompts * _KEPT + self._draft_cost * prompts
        self._caught_up *= _KEPT
        self._outputs = self._outputs * _KEPT + produced
        paid = min(self._unpaid, self._prompts_each() * produced)
        self._unpaid -= paid
        self._lost += paid

    def observe_draft(
        self, record: Record, evidence: int, drafted: int, accepted: int, *, shadow: bool = False
    ) -> None:
        """Of a request's ``drafted`` tokens the first ``accepted`` were right; none drafted: the drafter had none.

        ``shadow``: they were not verified, but compared with what plain decoding gave.
        """
        if shadow:
            self._latest.append(Offer(record, drafted, evidence))
        if not drafted:
            return
        self._acceptance.observe(record, evidence, drafted, accepted)
        if not shadow:
            self.stats.note(drafted, accepted)
