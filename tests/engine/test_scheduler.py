"""Scheduling without a model: what the prefix cache keeps in a small pool, who waits for whom, what a queue expects."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from batchrun.engine.blocks import BlockPool
from batchrun.engine.request import Request, State, StepOutput
from batchrun.engine.scheduler import KVGroup, Limits, Scheduler
from batchrun.estimate import shared_tokens
from batchrun.sampling import SamplingParams
from tests.engine.driver import request

BLOCK = 4
SEQS = 4
Prompt = list[int]


class OldestFirst(BlockPool):
    """Evicts what was used longest ago, whoever waits for it."""

    def expect(self, chain: Sequence[bytes], turn: int) -> None:
        pass

    def withdraw(self, chain: Sequence[bytes], turn: int) -> None:
        pass


def make(kind: type[BlockPool], n_blocks: int, windows: Sequence[int | None] = (None,)) -> Scheduler:
    pools = [kind(n_blocks, BLOCK) for _ in windows]
    return Scheduler([KVGroup(window) for window in windows], pools, Limits(SEQS, 64))


def step(scheduler: Scheduler) -> list[Request]:
    """Schedule and settle one step, in which every token is 7; returns what finished."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    n_sampled = sum(row.samples for row in scheduled.rows)
    output = StepOutput([7] * n_sampled, [None] * n_sampled, [[] for _ in scheduled.rows])
    done = [each for each in scheduler.settle(scheduled, output) if len(each.tokens) == each.max_total]
    for each in done:
        scheduler.finish(each, "length")
    return done


def cached_share(kind: type[BlockPool], n_blocks: int, windows: Sequence[Sequence[Prompt]]) -> float:
    """Share of the prompt tokens that the cache supplies where windows are taken in as the engine takes them."""
    scheduler = make(kind, n_blocks)
    left = list(windows)
    key = 0
    while left or scheduler.has_work:
        while left and len(scheduler.waiting) < SEQS:
            for prompt in left.pop(0):
                key += 1
                scheduler.add(request(key, prompt, SamplingParams(max_tokens=1 + key % 5, ignore_eos=True)))
        step(scheduler)
        if kind is BlockPool:
            scheduler.check()
    assert scheduler.counters.preemptions == 0
    return scheduler.counters.cached_tokens / sum(len(prompt) for window in windows for prompt in window)


def attainable(windows: Sequence[Sequence[Prompt]]) -> float:
    """The same in a pool from which nothing has to be evicted."""
    prompts = [prompt for window in windows for prompt in window]
    return shared_tokens(prompts, BLOCK) / sum(map(len, prompts))


def workload(seed: int, *, n_windows: int, stems: int, users: int, loners: int) -> list[list[Prompt]]:
    """Windows in prefix order: in each, ``users`` prompts for each of the same stems, and long ones like no other."""
    rng = random.Random(seed)

    def tokens(count: int) -> Prompt:
        return [rng.randrange(10, 30_000) for _ in range(count)]

    shared = [tokens(48) for _ in range(stems)]
    windows = []
    for _ in range(n_windows):
        prompts = [stem + tokens(rng.randrange(1, 12)) for stem in shared for _ in range(users)]
        windows.append(sorted(prompts + [tokens(rng.randrange(40, 80)) for _ in range(loners)]))
    return windows


def test_what_is_expected_outlives_what_is_recent() -> None:
    """Stems that come again in the next window, between long prompts that do not."""
    windows = workload(0, n_windows=4, stems=12, users=1, loners=12)
    best = attainable(windows)
    assert cached_share(BlockPool, 300, windows) > 0.8 * best
    assert cached_share(OldestFirst, 300, windows) < 0.2 * best


@pytest.mark.parametrize("seed", range(12))
def test_counting_uses_is_never_worse_than_age(seed: int) -> None:
    rng = random.Random(seed)
    windows = workload(
        seed,
        n_windows=rng.randrange(1, 5),
        stems=rng.randrange(1, 16),
        users=rng.randrange(1, 4),
        loners=rng.randrange(0, 16),
    )
    n_blocks = rng.randrange(110, 300)
    assert cached_share(BlockPool, n_blocks, windows) >= cached_share(OldestFirst, n_blocks, windows) - 0.01


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def filled(scheduler: Scheduler, prompts: Sequence[Prompt]) -> None:
    """Run prompts to their ends, so that the cache has them."""
    for key, prompt in enumerate(prompts):
        scheduler.add(request(key, prompt, GREEDY))
    while scheduler.has_work:
        step(scheduler)


def test_a_queue_expects_what_was_or_will_be_computed_before_its_turn() -> None:
    scheduler = make(BlockPool, 64)
    stem, other = list(range(16)), list(range(100, 116))
    filled(scheduler, [stem])
    for key, prompt in enumerate(([*stem, 50], [*other, 60], [*other, 61], [*other, 62])):
        scheduler.add(request(key, prompt, GREEDY))
    cached, first, second, third = scheduler.waiting
    assert [each.expected for each in scheduler.waiting] == [4, 0, 4, 4]
    (pool,) = scheduler.pools
    turns = [list(pool.expected[content]) for each in (cached, third) for content in each.hashes[:4]]
    assert turns == [[cached.turn]] * 4 + [[second.turn, third.turn]] * 4
    scheduler.finish(second, "abort")
    assert list(pool.expected[third.hashes[0]]) == [third.turn]
    scheduler.check()
    while scheduler.has_work:
        step(scheduler)
        scheduler.check()
    assert not pool.expected
    assert (cached.cached, first.cached, third.cached) == (16, 0, 16)


@pytest.mark.parametrize("why", ["scored", "no prefix cache"])
def test_a_request_that_takes_no_hits_expects_none(why: str) -> None:
    scheduler = make(BlockPool, 64)
    if why != "scored":
        scheduler.limits = Limits(SEQS, 64, enable_prefix_caching=False)
    params = GREEDY.override({"prompt_logprobs": 0}) if why == "scored" else GREEDY
    for key in range(3):
        scheduler.add(request(key, [*range(20), key], params))
    assert [each.expected for each in scheduler.waiting] == [0, 0, 0]
    assert not scheduler.pools[0].expected


def test_a_preempted_request_finds_its_blocks_again() -> None:
    """While it waits, others take what nobody expects, although its own blocks were released before."""
    scheduler = make(BlockPool, 25)
    filled(scheduler, [list(range(500, 516))])
    victim = request(0, list(range(32)), GREEDY)
    scheduler.add(victim)
    step(scheduler)
    scheduler.preempt_newest()
    (pool,) = scheduler.pools
    last = [pool.lookup(content) for content in victim.hashes]
    assert None not in last
    assert victim.expected == 8
    taken = pool.allocate(pool.n_free - 8)
    scheduler.check()
    assert [pool.lookup(content) for content in victim.hashes] == last
    pool.release(taken)
    step(scheduler)
    assert victim.state is State.RUNNING
    assert victim.cached == 32


def test_a_window_expects_no_more_than_it_shows() -> None:
    scheduler = make(BlockPool, 64, (None, 9))
    stem = list(range(40))
    for key in range(3):
        scheduler.add(request(key, [*stem, 100 + key], GREEDY))
    whole, shown = (pool.expected for pool in scheduler.pools)
    hashes = scheduler.waiting[1].hashes
    assert set(whole) == set(hashes[:10])
    assert set(shown) == set(hashes[8:10])  # the first query, at 40, sees from 32
    while scheduler.has_work:
        step(scheduler)
        scheduler.check()
    assert scheduler.counters.cached_tokens == 2 * 40


def test_a_refused_request_is_admitted_once_there_is_room() -> None:
    scheduler = make(BlockPool, 13)  # 48 tokens
    small, large = request(0, list(range(20)), GREEDY), request(1, list(range(50, 80)), GREEDY)
    for each in (small, large):
        scheduler.add(each)
    while small.state is not State.FINISHED:
        step(scheduler)
        assert large.state is State.WAITING
    step(scheduler)
    assert large.state is State.RUNNING


def test_who_waits_for_a_prefix_goes_on_when_it_is_given_up() -> None:
    scheduler = make(BlockPool, 200)
    stem = list(range(100))
    first, second = (request(key, [*stem, key], GREEDY) for key in range(2))
    for each in (first, second):
        scheduler.add(each)
    step(scheduler)
    assert second in scheduler.waiting
    scheduler.finish(first, "abort")
    step(scheduler)
    assert second.state is State.RUNNING
    assert second.cached == 64  # what the first had computed


def test_every_running_request_has_a_token_of_the_budget() -> None:
    """Prompts take what is left over, and never what a request needs to go on."""
    scheduler = make(BlockPool, 200)
    scheduler.limits = Limits(SEQS, SEQS)
    requests = [request(key, [key] * 6, GREEDY.override({"max_tokens": 30})) for key in range(SEQS)]
    for each in requests:
        scheduler.add(each)
    while any(each.n_output < 3 for each in requests):
        before = {each: each.computed for each in scheduler.running}
        step(scheduler)
        gained = [each.computed - count for each, count in before.items()]
        assert all(count >= 1 for count in gained)
        assert sum(gained) <= SEQS
