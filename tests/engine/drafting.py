"""An engine that verifies as many drafts as it can, whether or not they pay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from batchrun import Engine, SamplingParams
from batchrun.engine.request import Step
from batchrun.engine.speculation import speculator
from batchrun.engine.speculation.acceptance import Offer
from batchrun.engine.speculation.controller import Controller
from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.model_files import ModelFiles

Run = tuple[list[tuple[object, ...]], SpeculationStats | None]


class Always(Controller):
    """Verifies whatever there is, as much of each as a dice says."""

    dice = random.Random(0)

    def wants(self, n: int, room: int) -> bool:
        return n > 0

    def choose(self, n: int, tokens: int, offers: Sequence[Offer], room: int) -> list[int]:
        chosen = []
        for offer in offers:
            chosen.append(min(offer.length, room, self.dice.randrange(6)))
            room -= chosen[-1]
        return chosen


def answers_under_drafts(
    model: str | ModelFiles,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    config: dict[str, Any],
    **options: Any,
) -> Run:
    """All of the answers, and what drafts brought. Every fifth step a request is set back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "Controller", Always)
        engine = Engine(model, device="cpu", speculative_config=config, **options)
        schedule = engine.scheduler.schedule

        def set_back_and_schedule() -> Step | None:
            if engine.scheduler.counters.steps % 5 == 3:
                engine.scheduler.preempt_newest()
            return schedule()

        patch.setattr(engine.scheduler, "schedule", set_back_and_schedule)
        results = sorted(engine.generate(prompts, params), key=lambda result: result.index)
        stats, counters = engine.speculation_stats(), engine.scheduler.counters
        assert all(pool.n_free == pool.n_usable for pool in engine.scheduler.pools)
        assert counters.cached_tokens > 0 < counters.preemptions
        engine.close()
    return [(each.token_ids, each.logprobs, each.prompt_logprobs, each.finish_reason) for each in results], stats
