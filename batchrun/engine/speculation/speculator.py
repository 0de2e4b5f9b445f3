"""Gives rows of a step drafts to verify, as far as these are worth it, and learns what becomes of them. No torch.

Drafts go on from tokens that the host knows, so the engine settles a step before it schedules one with drafts. While
that does not pay, steps overlap as they do without speculation, and a few requests are watched: what the drafter would
have guessed is compared with what comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from batchrun.engine.request import Request, Step, StepRow
from batchrun.engine.scheduler import Scheduler
from batchrun.engine.speculation.acceptance import Offer, Record
from batchrun.engine.speculation.controller import Controller
from batchrun.engine.speculation.drafter import Draft, Drafter
from batchrun.engine.speculation.ngram import NgramDrafter
from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.engine.speculation.suffix import SuffixDrafter
from batchrun.engine.step_times import StepTimes
from batchrun.job import SpeculativeSpec

_WATCHED = 4  # requests, while steps overlap
_MOST = {"ngram": 16, "suffix": 16, "draft_model": 5}  # drafts of a row


class DraftCosts(NamedTuple):
    """What a draft model takes."""

    step: float  # time of one step of it, in steps of the target
    context: int  # tokens that it was made for: it drafts no further


@dataclass(slots=True)
class Drafting:
    """What is known of a request that is drafted for."""

    record: Record
    lookup: Any  # the drafter's
    evidence: int = 0  # of the drafts that are being verified
    imagined: Draft | None = None  # that nobody verifies: it is judged by the tokens that come
    imagined_at: int = 0  # tokens before it
    seen: int = 0  # tokens whose keys and values the draft model has, if the request was not set back since
    incarnation: int = 0


class Speculator:
    """Joins a drafter and the controller to the engine; ``drafter`` None: the draft model guesses.

    ``most``: drafts of a row. ``draft_rows``: rows of logits for drafts, beside those that sequences leave free.
    ``context``: tokens of a sequence up to which it is drafted for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        controller: Controller,
        drafter: Drafter | None,
        *,
        most: int,
        draft_rows: int,
        context: float = math.inf,
    ) -> None:
        self.controller = controller
        self._scheduler = scheduler
        self._drafter = drafter
        self._most = most
        self._draft_rows = draft_rows
        self._context = context
        self._turn = 0

    def wants(self) -> bool:
        """Whether the next step is to verify drafts: it is then to be scheduled when all before it have settled."""
        n = len(self._scheduler.running)
        return self.controller.wants(n, self._room(n, n))

    def draft(self, step: Step) -> None:
        """Extend the rows of a step just scheduled by drafts."""
        rows = [row for row in step.rows if row.samples and row.end == len(row.request.tokens)]
        if self._drafter is not None:
            self._look_up(step, rows, self._drafter)
        else:
            self._let_model_draft(step, [row for row in rows if row.request.mask is None])

    def settled(self, step: Step, finished: Sequence[Request], seconds: float, *, overlapped: bool) -> None:
        """Learn from a step that took ``seconds``, and from the answers that it finished."""
        sampling = [row for row in step.rows if row.samples]
        for row in sampling:
            if row.n_drafts:
                self._verified(row, self._of(row.request))
        if self._drafter is not None:
            self._learn(self._drafter, [row.request for row in sampling], finished, overlapped)
        drafts = [row.n_drafts for row in sampling]
        produced = sum(1 + row.n_accepted for row in sampling)
        verified = None if overlapped else drafts
        catch_up = sum(row.n - 1 for row in step.rounds[0].rows) if step.rounds else 0
        self.controller.observe_step(
            seconds, len(sampling), step.n_tokens - sum(drafts), produced, verified, catch_up=catch_up
        )

    def forget(self) -> None:
        """Draft as if no request had finished yet."""
        if self._drafter is not None:
            self._drafter = type(self._drafter)()

    def stats(self) -> SpeculationStats:
        """Totals so far."""
        return self.controller.stats.copy()

    def _learn(
        self, drafter: Drafter, sampling: Sequence[Request], finished: Sequence[Request], overlapped: bool
    ) -> None:
        watched = self._scheduler.running[:_WATCHED] if overlapped else sampling
        for request in watched:
            self._judge(request)
        if overlapped and watched:
            self._turn += 1  # one of them at each step: guessing takes time
            self._imagine(watched[self._turn % len(watched)], drafter)
        for request in finished:
            if request.error is None:
                drafter.learn(request.tokens, request.n_prompt)
            request.drafting = None

    # ---- drafts of the host

    def _look_up(self, step: Step, rows: Sequence[StepRow], drafter: Drafter) -> None:
        drafts = [self._proposed(row, drafter) for row in rows]
        offers = [
            Offer(self._of(row.request).record, len(draft.tokens), draft.evidence)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        for row, draft, count in zip(rows, drafts, self._choose(step, rows, offers), strict=True):
            drafting = self._of(row.request)
            if count:
                drafting.evidence, drafting.imagined = draft.evidence, None
                self._scheduler.add_drafts(row, count, draft.tokens)
            elif drafting.imagined is None:
                drafting.imagined, drafting.imagined_at = draft, len(row.request.tokens)

    def _proposed(self, row: StepRow, drafter: Drafter) -> Draft:
        """A draft, as far as the request's mask lets it through if it has one."""
        request = row.request
        draft = drafter.propose(self._of(request).lookup, request.tokens, self._limit(row))
        if request.mask is None:
            return draft
        for count, token in enumerate(draft.tokens):
            words = request.mask([*request.output_ids, *draft.tokens[:count]])
            if not words[token // 32] >> token % 32 & 1:
                return Draft(draft.tokens[:count], draft.evidence)
        return draft

    def _imagine(self, request: Request, drafter: Drafter) -> None:
        """Note what would be guessed now, if nothing is noted."""
        drafting, known = self._of(request), len(request.tokens)
        if drafting.imagined is None and request.n_output and known + 1 < request.max_total:
            drafting.imagined = drafter.propose(drafting.lookup, request.tokens, self._most)
            drafting.imagined_at = known

    def _judge(self, request: Request) -> None:
        """Compare what was imagined with what came, once it is decided."""
        drafting = request.drafting
        if drafting is None or drafting.imagined is None:
            return
        draft: Draft = drafting.imagined
        came = request.tokens[drafting.imagined_at : drafting.imagined_at + len(draft.tokens)]
        pairs = zip(draft.tokens, came, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if accepted == len(came) < len(draft.tokens):
            return  # right so far
        drafting.imagined = None
        self.controller.observe_draft(drafting.record, draft.evidence, len(draft.tokens), accepted, shadow=True)

    # ---- the draft model

    def _let_model_draft(self, step: Step, rows: Sequence[StepRow]) -> None:
        """Choose rows to be drafted for, and lay out what the draft model computes: its rounds come before the step.

        In the first round it computes what it has not seen, at most as many tokens as a step may have: a row of which
        some are left waits for a later step.
        """
        left = self._scheduler.limits.max_num_batched_tokens
        offers = [Offer(self._of(row.request).record, self._limit(row), 0) for row in rows]
        rounds: list[list[StepRow]] = [[] for _ in range(self._most)]
        for row, count in zip(rows, self._choose(step, rows, offers), strict=True):
            if not count or not left:
                continue
            drafting, known = self._of(row.request), row.end
            if drafting.incarnation != row.incarnation:
                drafting.seen, drafting.incarnation = 0, row.incarnation
            begin, end = drafting.seen, min(known, drafting.seen + left)
            left -= end - begin
            if end < known:
                rounds[0].append(StepRow(row.request, begin, end - begin, False, row.incarnation))
                drafting.seen = end
                continue
            for index in range(self._scheduler.add_drafts(row, count)):
                start = known - 1 + index if index else begin
                rounds[index].append(StepRow(row.request, start, known + index - start, True, row.incarnation))
        step.rounds = [Step(each, []) for each in rounds if each]

    # ---- both

    def _of(self, request: Request) -> Drafting:
        if request.drafting is None:
            lookup = self._drafter.begin() if self._drafter is not None else None
            request.drafting = Drafting(Record(), lookup)
        drafting: Drafting = request.drafting
        return drafting

    def _limit(self, row: StepRow) -> int:
        """Drafts that the row may have: the token sampled after the last of them is one of the request's."""
        return int(max(0, min(self._most, row.request.max_total - 1 - row.end, self._context - row.end)))

    def _room(self, n: int, tokens: int) -> int:
        """Drafts that a step of ``n`` sampling rows and ``tokens`` has room for."""
        limits = self._scheduler.limits
        return max(0, min(limits.max_num_seqs + self._draft_rows - n, limits.max_num_batched_tokens - tokens))

    def _choose(self, step: Step, rows: Sequence[StepRow], offers: Sequence[Offer]) -> list[int]:
        n, tokens = sum(row.samples for row in step.rows), step.n_tokens
        return self.controller.choose(n, tokens, offers, self._room(n, tokens))

    def _verified(self, row: StepRow, drafting: Drafting) -> None:
        self.controller.observe_draft(drafting.record, drafting.evidence, row.n_drafts, row.n_accepted)
        # The draft model has not seen its last draft.
        drafting.seen = row.n_known + min(row.n_accepted, row.n_drafts - 1)


def open_speculator(
    spec: SpeculativeSpec, scheduler: Scheduler, times: StepTimes | None, draft_rows: int, costs: DraftCosts | None
) -> Speculator | None:
    """What ``spec`` asks for; None: nothing. ``costs`` are those of its draft model, if it has one."""
    method = spec.drafter
    if method is None:
        return None
    most = _MOST[method] if spec.num_speculative_tokens == "auto" else spec.num_speculative_tokens
    if costs is not None:
        controller = Controller(most, times, shadows=False, draft_cost=costs.step)
        return Speculator(scheduler, controller, None, most=most, draft_rows=draft_rows, context=costs.context)
    drafter = SuffixDrafter() if method == "suffix" else NgramDrafter()
    return Speculator(scheduler, Controller(most, times), drafter, most=most, draft_rows=draft_rows)
