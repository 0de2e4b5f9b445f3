"""Speculation in simulated engines: as fast as with the best fixed number of drafts, and never at a loss."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.engine.speculation.acceptance import Acceptance, Offer, Record
from batchrun.engine.speculation.controller import Controller
from batchrun.engine.speculation.step_clock import Curve, StepClock
from batchrun.engine.step_times import StepTimes

MOST = 8
Seconds = Callable[[float], float]  # of a step, by its tokens
Job = tuple["Kind", int, int]  # kind of request, tokens of its prompt and of its output


def through(points: dict[int, float]) -> Seconds:
    """Milliseconds at some sizes, linear between them and proportional above."""
    sizes, values = list(points), [value / 1e3 for value in points.values()]
    return lambda tokens: float(np.interp(tokens, sizes, values)) * max(1.0, tokens / sizes[-1])


def known(curve: Seconds) -> StepTimes:
    """Times as a calibration finds them."""
    return StepTimes(
        subject={},
        operations="none",
        threads=1,
        measured_at=0.0,
        vocab_size=320,
        layers={size: curve(size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)},
        head={16: 1e-9},
        memory_rate=1e10,
    )


CPU = through({1: 18, 4: 20, 16: 24, 64: 45, 256: 300})
GPU = through({1: 6, 200: 6.6, 400: 12})


@dataclass(frozen=True)
class Kind:
    """Requests alike: the chance of every draft, how often there is one, and what it stands on."""

    chance: float
    coverage: float = 1.0
    evidence: int = 8
    seems: float | None = None  # the chance while decoding is plain, where that is another


TEMPLATED = Kind(0.85, 0.95, 20)
FREE = Kind(0.2, 0.5, 2)


@dataclass
class Sim:
    kind: Kind
    output: int
    prompt: int = 0
    unseen: int = 0  # tokens that the draft model has not computed, but for the last one
    record: Record = field(default_factory=Record)


@dataclass
class World:
    """An engine whose steps take what ``curve`` says; ``overhead`` is what overlap hides."""

    curve: Seconds
    overhead: float = 0.0
    noise: float = 0.1
    outliers: float = 0.02
    slots: int = 256
    budget: int = 512  # tokens of a step
    draft_cost: float = 0.0  # time of a step of the draft model, in plain steps
    seed: int = 0


@dataclass
class Outcome:
    seconds: float = 0.0
    plain: float = 0.0  # seconds of plain steps that give the same tokens
    tokens: int = 0
    steps: int = 0
    on: int = 0
    drafts: int = 0
    by_kind: dict[Kind, int] = field(default_factory=dict)
    ons: list[bool] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Fixed:
    """As many drafts of each, always."""

    def __init__(self, k: int) -> None:
        self.k = k

    def wants(self, n: int, room: int) -> bool:
        return self.k > 0

    def choose(self, n: int, tokens: int, offers: Sequence[Offer], room: int) -> list[int]:
        return [min(self.k, offer.length, max(0, room // len(offers))) for offer in offers]

    def observe_step(self, *_: object, catch_up: int = 0) -> None: ...

    def observe_draft(self, *_: object, shadow: bool = False) -> None: ...


def run(world: World, jobs: Sequence[Job], controller: Controller | Fixed, *, shadows: bool = True) -> Outcome:
    """Requests of (kind, prompt, output) through the engine, until all are done."""
    rng = random.Random(world.seed)
    waiting = [Sim(kind, output, prompt, prompt) for kind, prompt, output in reversed(jobs)]
    running: list[Sim] = []
    out = Outcome()
    while waiting or running:
        while waiting and len(running) < world.slots:
            running.append(waiting.pop())
        rows = [each for each in running if not each.prompt]
        room = world.budget - len(rows)
        chunk = 0
        for each in running:
            if each.prompt and chunk < room:
                part = min(each.prompt, room - chunk)
                each.prompt -= part
                chunk += part
        n = len(rows)
        room -= chunk
        on = controller.wants(n, room)
        ks: list[int] = []
        catch_up = 0
        seconds = world.curve(max(1, n + chunk))
        if on:
            found = [rng.random() < each.kind.coverage for each in rows]
            offers = [
                Offer(each.record, MOST if f else 0, each.kind.evidence) for each, f in zip(rows, found, strict=True)
            ]
            if world.draft_cost:  # its step has the same budget
                left = world.budget
                for index, each in enumerate(rows):
                    if each.unseen + 1 > left:
                        offers[index] = offers[index]._replace(length=0)
                    left -= each.unseen + 1 if offers[index].length else 0
            ks = controller.choose(n, n + chunk, offers, room)
            assert sum(ks) <= room
            assert all(0 <= k <= offer.length for k, offer in zip(ks, offers, strict=True))
            seconds = world.curve(n + chunk + sum(ks)) + world.overhead
            if world.draft_cost:
                catch_up = sum(each.unseen for each, k in zip(rows, ks, strict=True) if k)
                for index in range(max(ks, default=0)):
                    drafting = sum(k > index for k in ks)
                    seconds += world.draft_cost * world.curve(drafting + (0 if index else catch_up))
        produced = 0
        for index, each in enumerate(rows):
            k = ks[index] if on else 0
            accepted = accept(rng, each.kind, k)
            if k:
                controller.observe_draft(each.record, each.kind.evidence, k, accepted)
                out.by_kind[each.kind] = out.by_kind.get(each.kind, 0) + k
            each.unseen = 0 if k else each.unseen + 1
            produced += min(accepted + 1, each.output)
            each.output -= min(accepted + 1, each.output)
        if not on and shadows:
            for each in rows[:4]:
                if rng.random() < 0.25:
                    drafted = MOST if rng.random() < each.kind.coverage else 0
                    controller.observe_draft(
                        each.record,
                        each.kind.evidence,
                        drafted,
                        accept(rng, each.kind, drafted, shadow=True),
                        shadow=True,
                    )
        running = [each for each in running if each.output or each.prompt]
        seen = seconds * (1 + world.noise * rng.uniform(-1.7, 1.7))
        if rng.random() < world.outliers:
            seen = seconds * rng.uniform(2, 10)
        if out.steps == 0:
            seen = 5.0
        controller.observe_step(seen, n, n + chunk, produced, ks if on else None, catch_up=catch_up)
        out.seconds += seconds
        out.plain += world.curve(max(1, n + chunk)) + ((produced - n) * world.curve(n) / n if n else 0)
        out.tokens += produced
        out.steps += 1
        out.on += on
        out.ons.append(on)
        out.drafts += sum(ks)
    return out


def accept(rng: random.Random, kind: Kind, k: int, *, shadow: bool = False) -> int:
    chance = kind.seems if shadow and kind.seems is not None else kind.chance
    count = 0
    while count < k and rng.random() < chance:
        count += 1
    return count


def best_fixed(world: World, jobs: Sequence[Job]) -> float:
    return max(run(world, jobs, Fixed(k)).rate for k in (1, 2, 3, 4, 6, 8))


# ---- the rate


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("curve", [CPU, GPU])
@pytest.mark.parametrize("n", [1, 4])
def test_templated_outputs_of_few_requests_are_as_fast_as_with_the_best_fixed_number(
    n: int, curve: Seconds, measured: bool
) -> None:
    world, jobs = World(curve, overhead=0.002, slots=n), [(TEMPLATED, 50, 800)] * (2 * n)
    found = run(world, jobs, Controller(MOST, known(curve) if measured else None))
    assert found.rate >= 1.5 * run(world, jobs, Fixed(0)).rate
    assert found.rate >= 0.9 * best_fixed(world, jobs)


@pytest.mark.parametrize("measured", [False, True])
def test_free_text_of_a_full_batch_is_decoded_plainly(measured: bool) -> None:
    world, jobs = World(CPU, overhead=0.002), [(FREE, 50, 500)] * 512
    found = run(world, jobs, Controller(MOST, known(CPU) if measured else None))
    assert found.on < 0.01 * found.steps
    assert found.drafts == 0 or not measured
    assert found.seconds <= 1.005 * found.plain


def random_world(seed: int) -> tuple[World, list[Job], StepTimes | None]:
    rng = random.Random(seed)
    base, flat = rng.choice([1, 5, 20]), rng.choice([1, 4, 16, 64, 200])
    slope = rng.choice([0.003, 0.01, 0.05, 0.2]) * base

    def curve(tokens: float) -> float:
        return (base + slope * max(0, tokens - flat) + 0.002 * base * tokens) / 1e3

    world = World(
        curve,
        overhead=rng.choice([0, 0.02, 0.1, 0.3]) * base / 1e3,
        outliers=rng.choice([0, 0.02, 0.05]),
        slots=rng.choice([1, 2, 4, 16, 64, 256]),
        draft_cost=rng.choice([0.05, 0.1, 0.3, 0.6]),
        seed=seed,
    )
    longest = 1200 if world.slots < 64 else 400
    kinds = [Kind(rng.random(), rng.random(), rng.randrange(40)) for _ in range(rng.choice([1, 2, 3]))]
    jobs = [(rng.choice(kinds), rng.choice([5, 50]), rng.randrange(200, longest)) for _ in range(max(world.slots, 6))]
    return world, jobs, known(curve) if rng.random() < 0.5 else None


def test_it_is_never_slower_than_plain_decoding_by_more_than_it_takes_to_find_out() -> None:
    """Batches of any kind that drain, in engines of any kind."""
    gains = []
    for seed in range(20):
        world, jobs, times = random_world(seed)
        found = run(replace(world, draft_cost=0.0), jobs, Controller(MOST, times))
        gains.append(found.plain / found.seconds)
        assert gains[-1] >= 0.97, seed
    assert np.mean(gains) > 1.2


def test_nor_is_it_with_a_draft_model() -> None:
    gains = []
    for seed in range(20):
        world, jobs, times = random_world(seed)
        jobs = [(Kind(kind.chance, evidence=0), prompt, output) for kind, prompt, output in jobs]
        believed = world.draft_cost * random.Random(seed).choice([0.5, 1, 2])
        found = run(world, jobs, Controller(MOST, times, shadows=False, draft_cost=believed), shadows=False)
        gains.append(found.plain / found.seconds)
        assert gains[-1] >= 0.97, seed
    assert np.mean(gains) > 1.1


# ---- changes


def test_a_change_of_acceptance_is_followed_both_ways() -> None:
    world = World(CPU, overhead=0.002, slots=4)
    free, templated = Kind(0.1), Kind(0.85)  # nothing else tells them apart
    jobs = [(kind, 0, 1500) for kind in (free, templated, free, templated) for _ in range(4)]
    found = run(world, jobs, Controller(MOST, None))
    plain = run(world, jobs, Fixed(0))
    first, last = found.ons[:1400], found.ons[-300:]
    assert np.mean(first) < 0.05
    assert np.mean(found.ons[1600:1900]) > 0.7
    assert np.mean(last) > 0.9
    middle = "".join("#" if on else "." for on in found.ons)
    assert "." * 300 in middle[2000:-400]  # the second time that text is free
    assert found.rate > 1.3 * plain.rate


def test_what_it_loses_is_bounded_even_where_drafts_are_worse_than_they_seem() -> None:
    world = World(CPU, overhead=0.004, slots=4)
    found = run(world, [(Kind(0.02, seems=0.95), 0, 4000)] * 4, Controller(MOST, None))
    assert found.on > 0
    assert found.seconds <= 1.012 * found.plain


@pytest.mark.parametrize("n", [2, 4, 8])
def test_after_long_free_text_drafts_come_back(n: int) -> None:
    """What was learned of them is forgotten by then."""
    world = World(through({1: 10, 200: 110}), slots=n, noise=0.05, outliers=0)
    jobs = [(kind, 0, length) for kind, length in ((Kind(0.7), 4000), (Kind(0.02), 3500), (Kind(0.7), 4000))]
    found = run(world, [job for job in jobs for _ in range(n)], Controller(16, None))
    assert np.mean(found.ons[-1000:]) > 0.9


def test_a_try_that_takes_far_longer_than_expected_counts_as_lost() -> None:
    controller = Controller(MOST, None)
    for _ in range(100):
        controller.observe_step(0.01, 4, 4, 4)
    controller.observe_step(0.06, 4, 4, 4, [1] * 4)
    assert controller._lost == pytest.approx(0.05)


def test_requests_that_copy_get_the_drafts() -> None:
    copies, free = Kind(0.9), Kind(0.1)  # nothing but their records tells them apart
    world = World(CPU, overhead=0.002, slots=8)
    found = run(world, [(copies, 10, 1000), (free, 10, 250)] * 16, Controller(MOST, known(CPU)))
    assert found.by_kind[copies] > 5 * found.by_kind[free]
    assert found.plain > 1.3 * found.seconds


def test_drafts_of_a_step_with_prompts_have_to_save_what_they_add_to_it() -> None:
    controller = Controller(MOST, known(GPU))
    for tokens in (64, 64, 64, 64, 64, 364, 364, 364):
        controller.observe_step(GPU(tokens), 64, tokens, 64)
    for i in range(400):
        controller.observe_draft(Record(), 2, 1, int(i % 4 == 0), shadow=True)
    offers = [Offer(Record(), 1, 2) for _ in range(64)]
    assert controller.choose(64, 64, offers, 1000) == [1] * 64  # a quarter of a token's 0.1 ms for 0.003 ms
    assert controller.choose(64, 364, offers, 1000) == [0] * 64  # for 0.027 ms
    assert controller.wants(64, 1000)


def test_prompts_that_keep_coming_do_no_harm() -> None:
    world, kinds = World(GPU, overhead=0.001, slots=32), (Kind(0.3), Kind(0.7))
    jobs = [(kinds[i % 2], 300, 40 + i % 50) for i in range(800)]
    found = run(world, jobs, Controller(MOST, None))
    assert found.seconds <= found.plain / 0.99
    assert found.seconds <= run(world, jobs, Fixed(0)).seconds / 0.99


# ---- a draft model


def test_a_draft_model_drafts_about_as_many_as_the_best_fixed_number() -> None:
    world, jobs = World(CPU, overhead=0.001, slots=1, draft_cost=0.3), [(Kind(0.8, evidence=0), 50, 1000)] * 4
    for believed in (0.15, 0.3, 0.6):
        found = run(world, jobs, Controller(MOST, None, shadows=False, draft_cost=believed), shadows=False)
        assert found.rate >= 0.9 * best_fixed(world, jobs)
        assert found.rate >= 1.2 * run(world, jobs, Fixed(0)).rate


def test_a_draft_model_is_not_asked_where_the_batch_is_full() -> None:
    world, jobs = World(CPU, overhead=0.001, draft_cost=0.3), [(Kind(0.8, evidence=0), 50, 500)] * 512
    found = run(world, jobs, Controller(MOST, known(CPU), shadows=False, draft_cost=0.3), shadows=False)
    assert found.on < 0.01 * found.steps
    assert found.seconds <= 1.005 * found.plain


def test_a_draft_model_that_is_no_good_is_tried_less_and_less_until_it_is() -> None:
    world = World(CPU, overhead=0.001, slots=2, draft_cost=0.3)
    bad, good = Kind(0.05, evidence=0), Kind(0.85, evidence=0)
    found = run(world, [(bad, 10, 20_000)] * 2, Controller(MOST, None, shadows=False, draft_cost=0.3), shadows=False)
    begins = [i for i in range(1, found.steps) if found.ons[i] and not found.ons[i - 1]]
    pauses = np.diff(begins)
    assert 3 <= len(begins) <= 10
    assert pauses[-1] > 4 * pauses[0]
    assert found.seconds <= 1.01 * found.plain
    changed = [(bad, 10, 3000)] * 2 + [(good, 10, 300)] * 60
    found = run(world, changed, Controller(MOST, None, shadows=False, draft_cost=0.3), shadows=False)
    assert np.mean(found.ons[-1000:]) > 0.9


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(("prompt", "output", "n"), [(1000, 20, 4), (300, 30, 16), (2000, 60, 4), (400, 10, 2)])
def test_a_draft_model_that_has_to_compute_long_prompts_for_short_outputs_does_no_harm(
    prompt: int, output: int, n: int, measured: bool
) -> None:
    curve = through({1: 10, 3000: 460})
    world = World(curve, slots=n, budget=3072, draft_cost=0.25)
    jobs = [(Kind(0.8, evidence=0), prompt, output // 2 + i % output) for i in range(200)]
    controller = Controller(5, known(curve) if measured else None, shadows=False, draft_cost=0.25)
    found = run(world, jobs, controller, shadows=False)
    assert found.plain / found.seconds >= 0.97
    assert found.rate >= 0.97 * run(world, jobs, Fixed(0)).rate


def test_a_draft_model_computes_prompts_where_outputs_are_long_enough() -> None:
    curve = through({1: 10, 3000: 460})
    world, jobs = World(curve, slots=4, budget=3072, draft_cost=0.25), [(Kind(0.8, evidence=0), 300, 300)] * 60
    found = run(world, jobs, Controller(5, None, shadows=False, draft_cost=0.25), shadows=False)
    assert found.rate >= 1.15 * run(world, jobs, Fixed(0)).rate


def test_what_the_draft_model_takes_for_prompts_is_lost_and_is_no_excess() -> None:
    curve = through({1: 10, 3000: 460})
    controller = Controller(4, known(curve), shadows=False, draft_cost=0.25)
    for _ in range(8):
        controller.observe_step(curve(4), 4, 4, 4)
    caught_up = 0.25 * (curve(1004) - curve(4))
    for _ in range(8):
        drafting = 4 * 0.25 * curve(4)
        controller.observe_step(curve(20) + drafting + caught_up, 4, 4, 4, [4] * 4, catch_up=1000)
        controller.observe_step(curve(20) + drafting, 4, 4, 4, [4] * 4)
    assert float(controller._clock.drafted(20, 20, 4, 4)) == pytest.approx(curve(20) + drafting, rel=1e-3)
    lost = 16 * (curve(20) + drafting - curve(4)) + 8 * caught_up
    assert controller._lost + controller._unpaid == pytest.approx(lost, rel=1e-3)
    for _ in range(200):
        controller.observe_step(curve(4), 4, 4, 4)
    assert controller._lost == pytest.approx(lost, rel=0.01)


# ---- decisions


@settings(max_examples=60, deadline=None)
@given(
    offers=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 5, 40]), st.integers(0, 6)), min_size=1, max_size=3
    ),
    slope=st.floats(0.0, 0.6),
    flat=st.integers(1, 4),
    room=st.integers(0, 9),
)
def test_the_chosen_drafts_have_the_best_rate_of_all(
    offers: list[tuple[int, int, int]], slope: float, flat: int, room: int
) -> None:
    def curve(tokens: float) -> float:
        return 1 + slope * max(0, tokens - flat)

    controller, n = Controller(3, known(curve)), len(offers)
    for evidence, right in ((0, 0), (1, 1), (5, 2), (40, 3)):
        for _ in range(5):
            controller.observe_draft(Record(), evidence, 3, right, shadow=True)
    made = [Offer(Record(), length, evidence) for length, evidence, _ in offers]
    for offer, (_, _, accepted) in zip(made, offers, strict=True):
        offer.record.accepted = float(accepted)
    chances = controller._acceptance.chances(made)
    clock = StepClock(known(curve))

    def rate(ks: Sequence[int]) -> float:
        gain = sum(float(chances[i, :k].sum()) for i, k in enumerate(ks))
        return (n + gain) / float(clock.plain(n + sum(ks), n + sum(ks)))

    possible = [ks for ks in product(*(range(offer.length + 1) for offer in made)) if sum(ks) <= room]
    chosen = controller.choose(n, n, made, room)
    assert tuple(chosen) in possible
    assert rate(chosen) == pytest.approx(max(map(rate, possible)))


def test_nothing_to_draft_for() -> None:
    controller = Controller(MOST, None)
    assert not controller.wants(0, 100)
    assert not controller.wants(4, 0)
    assert controller.choose(4, 4, [], 100) == []


def test_plain_steps_are_measured_before_and_while_it_speculates() -> None:
    world, jobs = World(CPU, slots=1, noise=0, outliers=0), [(Kind(0.8), 0, 8000)]
    found = run(world, jobs, Controller(MOST, None))
    text = "".join("#" if on else "." for on in found.ons)
    assert text.startswith("....")
    assert all(len(part) <= 510 for part in text.split("."))
    assert found.on > 0.97 * found.steps - 20


def test_the_same_events_lead_to_the_same_decisions() -> None:
    world, jobs, times = random_world(7)
    assert run(world, jobs, Controller(MOST, times)) == run(world, jobs, Controller(MOST, times))


def test_it_says_what_it_did() -> None:
    controller, record = Controller(3, known(lambda tokens: 1.0)), Record()
    for _ in range(4):
        controller.observe_step(1.0, 1, 1, 1)
    controller.observe_draft(record, 4, 3, 3, shadow=True)  # counts for nothing that was done
    controller.observe_draft(record, 4, 3, 1)
    controller.observe_step(1.5, 1, 1, 2, [3])
    stats = controller.stats
    assert (stats.drafted, stats.accepted) == ([1, 1, 1], [1, 0, 0])
    assert (stats.forwards, stats.tokens, stats.tokens_per_forward) == (1, 2, 2.0)
    assert (stats.seconds, stats.seconds_on, stats.seconds_plain) == (5.5, 1.5, pytest.approx(2))


def test_it_takes_next_to_no_time() -> None:
    controller = Controller(MOST, known(CPU))
    offers = [Offer(Record(), MOST, i) for i in range(64)]
    for offer in offers:
        controller.observe_draft(offer.record, offer.evidence, MOST, 4, shadow=True)

    def least(work: Callable[[], object], times: int) -> float:
        """Seconds of processor time per call, of the best of some rounds."""
        best = float("inf")
        for _ in range(10):
            start = time.process_time()
            for _ in range(times):
                work()
            best = min(best, (time.process_time() - start) / times)
        return best

    def plain_step() -> None:
        controller.wants(64, 400)
        controller.observe_step(0.045, 64, 64, 64)

    assert least(plain_step, 200) < 100e-6
    assert least(lambda: controller.choose(64, 64, offers, 400), 50) < 2e-3


# ---- what is learned


def test_a_curve_leaves_accidents_out_and_follows_a_change() -> None:
    rng, curve = random.Random(1), Curve()
    for step in range(200):
        curve.note(4, (10 if rng.random() < 0.1 else 1) * rng.uniform(0.9, 1.1), step)
    assert float(curve.at(4, 0.0)) == pytest.approx(1, rel=0.05)
    for step in range(200, 216):
        curve.note(4, 3.0, step)
    assert float(curve.at(4, 0.0)) == pytest.approx(3, rel=0.05)


def test_a_curve_is_linear_between_sizes_and_forgets() -> None:
    curve = Curve()
    assert float(curve.at(5, 7.0)) == 7.0
    curve.note(4, 1.0, 1)
    curve.note(64, 3.0, 100)
    assert curve.at([1, 4, 34, 64, 500], 0.0).tolist() == [1, 1, 2, 3, 3]
    curve.forget(50)
    assert curve.at([1, 500], 0.0).tolist() == [3, 3]


def test_unmeasured_steps_are_scaled_by_known_times() -> None:
    times = known(CPU)
    clock = StepClock(times)
    for step in range(4):
        clock.note_plain(2 * CPU(16), 16, 16, step)
    assert float(clock.plain(64, 64)) == pytest.approx(2 * CPU(64))
    assert StepClock(None).reach() == 0


def test_a_step_smaller_than_any_measured_takes_its_part() -> None:
    clock = StepClock(None)
    for step in range(4):
        clock.note_plain(3.0, 300, 4, step)
    assert clock.plain([4, 150, 300, 600], 4).tolist() == pytest.approx([0.04, 1.5, 3, 3])


def test_sizes_that_may_be_tried_are_those_still_known() -> None:
    clock = StepClock(None)
    for step in range(4):
        clock.note_plain(1.0, 4, 4, step)
        clock.note_drafted(4.0, 64, 64, 8, 4, step)
    assert clock.reach() == 128
    for step in range(3000, 3004):
        clock.note_plain(1.0, 4, 4, step)
    clock.forget(3004)
    assert clock.reach() == 8


def test_few_drafts_are_not_condemned_by_many() -> None:
    clock = StepClock(None)
    for step in range(4):
        clock.note_plain(1.0, 4, 4, step)
        clock.note_drafted(4.0, 64, 64, 15, 4, step)
    assert clock.drafted([4, 34, 64], [4, 34, 64], [0, 8, 15], 4).tolist() == pytest.approx([1, 2.5, 4])
    model = StepClock(None, draft_cost=0.1)
    for step in range(4):
        model.note_plain(1.0, 4, 4, step)
        model.note_drafted(4.4, 20, 20, 4, 4, step)
    assert model.drafted(4, 4, [0, 1, 4], 4).tolist() == pytest.approx([1, 1.85, 4.4])


def test_steps_with_drafts_take_at_least_a_plain_one() -> None:
    clock = StepClock(None)
    for step in range(8):
        clock.note_plain(1.0, 4, 4, step)
        clock.note_plain(9.0, 500, 4, step)
    for step in range(200):
        clock.note_drafted(0.1, 500, 500, 5, 4, step)
    assert (clock.drafted(np.arange(4, 900), np.arange(4, 900), 5, 4) >= 1).all()


def test_what_drafting_takes_is_learned_apart_from_the_size_of_steps() -> None:
    clock = StepClock(known(CPU))
    for step in range(8):
        clock.note_plain(CPU(4), 4, 4, step)
        clock.note_drafted(CPU(16) + 0.002, 16, 16, 3, 4, step)
    assert float(clock.drafted(20, 20, 4, 4)) == pytest.approx(float(clock.plain(20, 20)) + 0.002, rel=1e-3)
    model = StepClock(known(CPU), draft_cost=0.3)
    model.note_plain(CPU(4), 4, 4, 0)
    for step in range(8):
        model.note_drafted(CPU(16) + 3 * 0.5 * CPU(4), 16, 16, 3, 4, step)
    assert float(model.drafted(16, 16, 3, 4)) == pytest.approx(CPU(16) + 1.5 * CPU(4), rel=1e-3)


def test_acceptance_goes_by_evidence_position_and_request() -> None:
    acceptance, usual, copier = Acceptance(4, 0.5), Record(), Record()
    for _ in range(50):
        acceptance.observe(usual, 1, 4, 0)
        acceptance.observe(copier, 30, 4, 2)
    chances = acceptance.chances([Offer(Record(), 4, 1), Offer(Record(), 4, 30), Offer(Record(), 2, 30)])
    assert chances[0, 0] < 0.15
    assert (chances[1, :2] > 0.8).all()
    assert chances[1, 2] < 0.2
    assert (chances[2, 2:] == 0).all()
    assert (np.diff(chances, axis=1) <= 0).all()
    for _ in range(20):
        acceptance.observe(copier, 1, 4, 3)
    better, worse = acceptance.chances([Offer(copier, 4, 1), Offer(usual, 4, 1)])[:, 0]
    assert better > 1.3 * worse


def test_evidence_is_told_apart_as_drafters_give_it() -> None:
    acceptance = Acceptance(1, 0.5)
    for evidence in range(9):
        for i in range(90):
            acceptance.observe(Record(), evidence, 1, int(i % 10 <= evidence))
    chances = acceptance.chances([Offer(Record(), 1, evidence) for evidence in range(9)])[:, 0]
    assert (np.diff(chances) > 0.05).all()


def test_acceptance_forgets() -> None:
    acceptance = Acceptance(2, 0.5)
    for accepted in [0] * 1000 + [2] * 150:
        acceptance.observe(Record(), 3, 2, accepted)
    assert (acceptance.chances([Offer(Record(), 2, 3)])[0] > 0.6).all()


def test_prompts_that_take_longer_than_expected_are_not_held_against_drafts() -> None:
    controller, record = Controller(8, known(lambda tokens: 0.02 + 0.0005 * tokens)), Record()
    for _ in range(20):
        controller.wants(4, 64)
        controller.observe_draft(record, 4, 8, 7, shadow=True)
        controller.observe_step(0.022, 4, 4, 4)
    assert controller.wants(4, 64)
    for _ in range(4):
        controller.choose(4, 150, [Offer(record, 8, 4)] * 4, 64)
        for _ in range(4):
            controller.observe_draft(record, 4, 8, 7)
        controller.observe_step(0.25, 4, 150, 12, [8] * 4)  # the prompts alone should take 0.1
        assert controller.wants(4, 64)
