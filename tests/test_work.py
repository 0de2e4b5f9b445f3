"""Who does what: units are one worker's at a time, and every row is somebody's, whoever dies, cedes or comes late."""

import itertools
import json
import os
import random
import shutil
import time
from dataclasses import replace

import pytest

from batchrun.data import workers
from batchrun.data.lease import Lease, LeaseListing, take
from batchrun.data.records import ASKS, SHARES, STOP
from batchrun.data.rows import PartialRow
from batchrun.data.scope import splits_to_do
from batchrun.data.source import Source
from batchrun.data.work import Isolation, Work, ranges_of, rows_of
from tests.outputs import (
    KILLED,
    answer,
    before_operation,
    hand,
    in_child,
    leftovers,
    make_job,
    operations,
    parts_of,
    race,
    rows_left,
    run_job,
    write_lines,
)

TTL = 0.4
N_ROWS = 20


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Processes die here, machines do not: waiting for the disk would show nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "in" / "a.jsonl", [{"id": i, "text": f"text {i}"} for i in range(1, N_ROWS + 1)])
    return tmp_path


@pytest.fixture
def job(folder):
    """Of five splits."""
    return make_job(folder)


@pytest.fixture
def one_split(folder):
    """A job whose rows 1 to 20 are one split."""
    return make_job(folder, split_rows=100)


@pytest.fixture
def expected(folder, one_split):
    """The parts of that one split as an undisturbed run makes them."""
    run_job(one_split)
    parts = parts_of(folder)
    shutil.rmtree(folder / "out")
    return parts


def claim_and_die(job, *, rows=(), suspects=(), left=(), begun=True):
    """Claims a unit in a process that dies with it, once it has done these rows, and begun those in ``left``."""

    def work():
        with hand(job, ttl=TTL) as worker:
            claim = worker.claim()
            if begun and claim.lease.deaths:
                worker.work.suspect(claim, suspects)
            worker.run(claim, rows)
            if left:
                worker.output.checkpoint([], [PartialRow(claim.split.number, row, [5, 6, 7]) for row in left])
            os._exit(KILLED)

    assert in_child(work) == KILLED


def units(claims):
    return [claim.unit for claim in claims]


# --- claims ------------------------------------------------------------------------------------------------------


def test_splits_are_claimed_in_order_as_many_as_are_wanted(job):
    with hand(job) as worker:
        first = worker.work.claim(1)
        assert units(first) == ["00000"]
        assert (first[0].n_rows, first[0].only, first[0].skip, first[0].partials) == (4, None, frozenset(), {})
        assert units(worker.work.claim(9)) == ["00001", "00002", "00003"]
        assert units(worker.work.claim(100)) == ["00004"]
        assert worker.work.claim(100) == []
        assert worker.work.claim(0) == []


def test_two_live_workers_share_the_splits(job):
    with hand(job) as one, hand(job) as two:
        claims = [worker.claim() for worker in (one, two, two, one, two)]
        assert units(claims) == ["00000", "00001", "00002", "00003", "00004"]
        assert one.claim() is two.claim() is None


def test_six_processes_never_claim_one_unit(folder, job):
    """While all of them live."""
    job = make_job(folder, split_rows=1)
    flags = folder / "flags"
    flags.mkdir()

    def work(index):
        claimed = []
        with hand(job) as worker:
            (flags / f"here-{index}").touch()
            while len(list(flags.glob("here-*"))) < 6:
                time.sleep(0.005)
            while claims := worker.work.claim(random.randint(1, 3)):
                claimed += units(claims)
                time.sleep(0.02)  # else the first to come may have all of them
            (flags / f"done-{index}").touch()
            while len(list(flags.glob("done-*"))) < 6:
                time.sleep(0.005)
        return claimed

    answers = race(6, work)
    claimed = list(itertools.chain.from_iterable(answers))
    assert sorted(claimed) == [f"{number:05d}" for number in range(N_ROWS)]
    assert sum(map(bool, answers)) > 1


def test_six_processes_finish_the_job_with_each_row_answered_once(folder, job):
    """Some of them come late, and each leaves when it finds nothing to claim: what it held is done by then."""
    run_job(job)
    expected = parts_of(folder)
    shutil.rmtree(folder / "out")

    def work(index):
        time.sleep(0.02 * index)
        answered = []
        with hand(job) as worker:
            while claim := worker.claim():
                answered += worker.run(claim)
                worker.commit(claim)
        return answered

    answered = [tuple(row) for row in itertools.chain.from_iterable(race(6, work))]
    assert len(answered) == len(set(answered)) == N_ROWS
    manifest, again = run_job(job)
    assert (manifest.complete, again, parts_of(folder), leftovers(folder)) == (True, [], expected, [])


def test_requests_of_a_claim_grow_little_with_its_units(folder):
    """Each unit costs its lease; of one that was left, what is known of the holder. All else is asked for once."""
    counts = []
    for n_splits in (2, 12):
        write_lines(folder / "in" / "a.jsonl", [{"id": i, "text": "x"} for i in range(n_splits)])
        job = make_job(folder, split_rows=1, path=f"memory://{folder.name}-{time.time_ns()}/out")
        with hand(job) as first:
            with operations(first.output.store) as fresh:
                claims = first.work.claim(100)
            first.output.checkpoint([], [PartialRow(claim.split.number, 1, [1]) for claim in claims])
        with hand(job) as second, operations(second.output.store) as left:
            again = second.work.claim(100)
        assert len(claims) == len(again) == n_splits
        assert all(len(claim.partials) == 1 for claim in again)
        counts.append((len(fresh), len(left)))
    assert counts[1][0] - counts[0][0] == 10 * len(["create", "list"])
    assert counts[1][1] - counts[0][1] == 10 * len(["read", "create", "list", "delete"])


# --- takeover ----------------------------------------------------------------------------------------------------


def test_killed_workers_unit_goes_on_where_it_was(job, folder):
    claim_and_die(job, rows=[1, 2], left=[3])
    with hand(job) as worker:
        assert units(worker.work.claim(100)) == [
            "00001",
            "00002",
            "00003",
            "00004",
        ]  # what nobody has begun comes first
        claim = worker.claim()
        assert (claim.unit, claim.lease.epoch, claim.n_rows) == ("00000", 2, 2)
        assert (claim.skip, rows_left(claim)) == ({1, 2}, {3, 4})
        assert {row: partial.token_ids for row, partial in claim.partials.items()} == {3: [5, 6, 7]}
        assert worker.run(claim) == [(0, 3), (0, 4)]
        assert worker.commit(claim).rows == 4
        assert LeaseListing.of(worker.output.store).epochs.keys() == {"input", "00001", "00002", "00003", "00004"}


def test_released_workers_unit_is_free_at_once(job):
    with hand(job, limit=4) as first:
        claim = first.claim()
        first.run(claim, [2])
    with hand(job, limit=4) as second:
        claim = second.claim()
        assert (claim.unit, claim.lease.epoch, claim.lease.deaths, rows_left(claim)) == ("00000", 2, 0, {1, 3, 4})


def test_silent_far_workers_unit_is_free_in_time(one_split, monkeypatch):
    claim_and_die(one_split)
    monkeypatch.setattr(workers, "_machine", lambda: "elsewhere/2")
    with hand(one_split, ttl=60) as worker:
        began = time.monotonic()
        while (claim := worker.claim()) is None:
            time.sleep(0.02)
        assert time.monotonic() - began >= TTL
        assert (claim.unit, claim.lease.epoch) == ("00000", 2)


def test_own_unit_is_not_claimed_again(job):
    with hand(job, limit=4) as worker:
        assert worker.claim().unit == "00000"
        assert worker.claim() is None


def test_lost_units_are_noticed(folder, job):
    with hand(job) as one, hand(job) as two:
        claims = one.work.claim(12)
        assert units(claims) == ["00000", "00001", "00002"]
        assert one.work.lost(claims) == []
        take(two.output.store, Lease("00000", 2, two.output.attempt))  # it thought that the first was gone
        two.run(claims[1])
        two.commit(claims[1])
        assert units(one.work.lost(claims)) == ["00000", "00001"]
        write_lines(folder / "in" / "a.jsonl", [{"id": 1, "text": "other"}])
        files = two.source.files()
        splits_to_do(two.output, two.source, files, None)
        assert units(one.work.lost(claims)) == ["00000", "00001", "00002"]


def test_commit_by_another_between_any_two_operations_of_a_claim(folder, job):
    """A claimer that looked before the commit may take a lease after the leases were removed: it counts for nothing."""
    operation, came = 0, True
    while came:
        with hand(job) as one, hand(job) as two:
            mine = two.claim()
            two.run(mine)
            with before_operation(one.output.store, operation, two.commit, mine) as came:
                claim = one.claim()
            assert claim.unit == "00001", f"at operation {operation}"
            assert not came or "00000" not in LeaseListing.of(one.output.store).epochs, f"at operation {operation}"
        shutil.rmtree(folder / "out")
        operation += 1
    assert operation > 5


# --- shares ------------------------------------------------------------------------------------------------------


def test_ceded_rows_are_anothers(one_split):
    with hand(one_split) as one, hand(one_split) as two, hand(one_split) as three:
        mine = one.claim()
        assert two.claim() is None
        one.work.cede(mine, range(11, 21))
        share = two.claim()
        assert (share.unit, share.only, share.n_rows) == ("00000.001", frozenset(range(11, 21)), 10)
        assert one.claim() is three.claim() is None
        two.work.cede(share, [20, 18, 19])
        one.work.cede(mine, [2, 4])
        nested, other = three.work.claim(100)
        assert (nested.unit, rows_left(nested)) == ("00000.002", {18, 19, 20})
        assert (other.unit, rows_left(other)) == ("00000.003", {2, 4})
        three.work.cede(nested, [19])  # a share of a share of a share
        assert rows_left(one.claim()) == {19}


def test_units_are_disjoint_and_complete_for_who_takes_them_over(one_split):
    with hand(one_split) as one:
        mine = one.claim()
        one.run(mine, [1, 2])
        one.work.cede(mine, range(11, 21))
        with hand(one_split) as two:
            share = two.claim()
            two.run(share, [11])
            two.work.cede(share, range(16, 21))
    with hand(one_split) as late:
        claims = late.work.claim(100)
        assert units(claims) == ["00000.002"]  # nobody has begun it
        claims += late.work.claim(100)
        left = {claim.unit: rows_left(claim) for claim in claims}
        assert left == {
            "00000.002": set(range(16, 21)),
            "00000": set(range(3, 11)),
            "00000.001": set(range(12, 16)),
        }
        assert [claim.lease.epoch for claim in claims] == [1, 2, 2]
        assert all(claim.n_rows == len(left[claim.unit]) for claim in claims)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_shared_split_is_committed_by_whoever_is_last(folder, one_split, expected, order):
    with hand(one_split) as one, hand(one_split) as two, hand(one_split) as three, hand(one_split) as four:
        workers = [one, two, three, four]
        claims = [one.claim()]
        one.work.cede(claims[0], range(9, 21))
        claims.append(two.claim())
        two.work.cede(claims[1], range(14, 21))
        claims.append(three.claim())
        one.work.cede(claims[0], [7, 8])
        claims.append(four.claim())
        assert units(claims) == ["00000", "00000.001", "00000.002", "00000.003"]
        answered = []
        for index in order:
            assert one.output.commits() == {}
            claim = replace(claims[index], skip=claims[index].skip | ceded_later(claims, index))
            answered += workers[index].run(claim)
            record = workers[index].commit(claim)
            assert (record is None) == (index != order[-1])
        assert record.rows == N_ROWS
        assert sorted(answered) == [(0, row) for row in range(1, N_ROWS + 1)]
        assert one.finish().complete
        assert (parts_of(folder), leftovers(folder)) == (expected, [])


def ceded_later(claims, index):
    """The rows of the claims after that one: what its worker has ceded since is among them."""
    return frozenset().union(*(claim.only for claim in claims[index + 1 :]))


@pytest.mark.parametrize("dead", [0, 1])
def test_unit_whose_holder_died_before_its_commit_is_committed_by_another(folder, one_split, expected, dead):
    """All rows are durable, and nobody commits: the holder of one unit was told that another's are missing, and left;
    that other died with its last checkpoint."""
    with hand(one_split) as last:
        with hand(one_split) as one, hand(one_split) as two:
            mine = one.claim()
            one.work.cede(mine, range(11, 21))
            share = two.claim()
            first, second = ((one, mine), (two, share)) if dead else ((two, share), (one, mine))
            own = replace(mine, skip=share.only)
            first[0].run(own if first[1] is mine else share)
            assert first[0].commit(first[1]) is None
            second[0].run(own if second[1] is mine else share)
        claims = last.work.claim(100)
        assert units(claims) == ["00000", "00000.001"]
        for claim in claims:
            assert claim.n_rows == 0
            assert last.run(claim) == []
            assert last.commit(claim).rows == N_ROWS
        assert last.claim() is None
        assert last.finish().complete
        assert (parts_of(folder), leftovers(folder)) == (expected, [])


def test_lost_segment_of_a_shared_split_is_made_again(folder, one_split, expected):
    with hand(one_split) as one, hand(one_split) as two:
        mine = one.claim()
        one.work.cede(mine, range(11, 21))
        share = two.claim()
        two.run(share)
        for name in two.output.segments()[0][:2]:
            (folder / "out" / name).write_bytes(b"damaged")
        one.run(replace(mine, skip=share.only))
        assert one.commit(mine) is None
        assert two.commit(share) is None
        again = one.work.claim(100)  # by whoever comes, with both still there
        assert units(again) == ["00000", "00000.001"]
        assert [one.run(claim) for claim in again] == [[], [(0, 11), (0, 12), (0, 13), (0, 14)]]
        assert one.commit(again[1]).rows == N_ROWS
        manifest = one.finish()
    assert (manifest.complete, parts_of(folder), leftovers(folder)) == (True, expected, [])


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_claims_cessions_and_departures(folder, one_split, expected, seed):
    """Workers come, run some rows, cede others, leave with rows undone: each row is answered exactly once."""
    rng = random.Random(seed)
    answered, here = [], []
    for _ in range(300):
        if len(here) < 4 and rng.random() < 0.4:
            opened = hand(one_split)
            here.append((opened, opened.__enter__(), {}))  # unit -> claim, and the rows left of it
            continue
        if not here:
            continue
        opened, worker, held = rng.choice(here)
        claim, left = rng.choice([*held.values()]) if held else (None, set())
        action = rng.choice(["claim", "run", "run", "cede", "leave"])
        if action == "claim" and (found := worker.claim()):
            held[found.unit] = (found, rows_left(found))
        elif action == "run" and claim is not None:
            some = set(rng.sample(sorted(left), min(len(left), 3)))
            answered += worker.run(claim, some)
            left -= some
            if not left:
                del held[claim.unit]
                worker.commit(claim)
        elif action == "cede" and len(left) > 1:
            some = set(rng.sample(sorted(left), len(left) // 2))
            worker.work.cede(claim, some)
            left -= some
        elif action == "leave":
            here = [entry for entry in here if entry[1] is not worker]
            opened.__exit__(None, None, None)
    for opened, _, _ in here:
        opened.__exit__(None, None, None)
    manifest, rest = run_job(one_split)
    assert sorted(answered + rest) == [(0, row) for row in range(1, N_ROWS + 1)]
    assert (manifest.complete, parts_of(folder), leftovers(folder)) == (True, expected, [])


def prepared_race(one_split, folder):
    """A split all of whose rows are durable, whose holder has left, and whose share's holder is about to commit."""
    with hand(one_split) as one:
        mine = one.claim()
        one.work.cede(mine, range(11, 21))
        two = hand(one_split)
        worker = two.__enter__()
        share = worker.claim()
        worker.run(share)
        one.run(replace(mine, skip=share.only))
    return two, worker, share


@pytest.mark.slow
def test_commit_between_any_two_operations_of_a_claim(folder, one_split, expected):
    operation, came = 0, True
    while came:
        opened, other, share = prepared_race(one_split, folder)
        with hand(one_split) as late:
            with before_operation(late.output.store, operation, other.commit, share) as came:
                while claim := late.claim():
                    assert late.run(claim) == [], f"at operation {operation}"
                    late.commit(claim)
            if not came:
                other.commit(share)
            assert late.finish().complete
        opened.__exit__(None, None, None)
        assert (parts_of(folder), leftovers(folder)) == (expected, []), f"at operation {operation}"
        shutil.rmtree(folder / "out")
        operation += 1
    assert operation > 10


def test_claim_between_any_two_operations_of_a_commit(folder, one_split, expected):
    operation, came = 0, True
    while came:
        opened, other, share = prepared_race(one_split, folder)
        with hand(one_split) as late:
            with before_operation(other.output.store, operation, late.claim_ahead) as came:
                other.commit(share)
            while claim := late.claim():
                assert late.run(claim) == []
                late.commit(claim)
            assert late.finish().complete
        opened.__exit__(None, None, None)
        assert (parts_of(folder), leftovers(folder)) == (expected, []), f"at operation {operation}"
        shutil.rmtree(folder / "out")
        operation += 1
    assert operation > 10


def test_rows_and_ranges():
    rows = [7, 1, 2, 3, 9, 10]
    assert ranges_of(rows) == [(1, 4), (7, 8), (9, 11)]
    assert rows_of(ranges_of(rows)) == frozenset(rows)
    assert ranges_of([]) == []


# --- asking ------------------------------------------------------------------------------------------------------


def test_idle_worker_asks(job):
    with hand(job) as one, hand(job) as two:
        one.work.claim(16)
        two.work.ask()
        assert not one.work.is_asked()  # one split is there to be claimed
        two.claim()
        assert one.work.is_asked()
        assert not two.work.is_asked()  # its own ask is none
        two.work.stop_asking()
        assert not one.work.is_asked()
        two.work.ask()
        two.work.ask()
        assert one.work.is_asked()
    with hand(job) as three:
        three.work.claim(100)
        assert not three.work.is_asked()  # who asked is gone


def test_share_that_waits_answers_an_ask(one_split):
    with hand(one_split) as one, hand(one_split) as two, hand(one_split) as three:
        mine = one.claim()
        two.work.ask()
        assert one.work.is_asked()
        one.work.cede(mine, [19, 20])
        assert not one.work.is_asked()
        three.work.ask()
        assert one.work.is_asked()  # two ask for one share
        assert two.claim().only == {19, 20}
        two.work.stop_asking()
        assert one.work.is_asked()


def test_ask_of_a_dead_worker_counts_for_nothing(job):
    def ask():
        with hand(job, ttl=TTL) as worker:
            worker.work.ask()
            os._exit(KILLED)

    assert in_child(ask) == KILLED
    with hand(job) as worker:
        worker.work.claim(100)
        assert len(worker.output.store.names(ASKS)) == 1
        assert not worker.work.is_asked()


# --- rows that kill ----------------------------------------------------------------------------------------------


def test_deaths_without_progress_isolate_a_unit(one_split):
    claim_and_die(one_split)
    with hand(one_split) as worker:
        claim = worker.claim()
        assert (claim.lease.deaths, claim.isolation) == (1, None)
    for _ in range(2):
        claim_and_die(one_split)
    with hand(one_split) as worker:
        claim = worker.claim()
        assert (claim.lease.deaths, claim.isolation) == (2, Isolation(64))


def test_deaths_of_those_that_had_not_begun_count_once(one_split):
    for _ in range(4):
        claim_and_die(one_split, begun=False)
    with hand(one_split) as worker:
        assert worker.claim().isolation is None


def test_suspect_that_got_on_or_ran_beside_others_is_not_guilty(one_split):
    for _ in range(2):
        claim_and_die(one_split)
    claim_and_die(one_split, suspects=[3])
    claim_and_die(one_split, suspects=[3])
    claim_and_die(one_split, suspects=[3], left=[3])  # it was killed by something else
    claim_and_die(one_split, suspects=[3])
    claim_and_die(one_split, suspects=[3, 4])
    claim_and_die(one_split, suspects=[3])
    with hand(one_split) as worker:
        assert worker.claim().isolation == Isolation(1, frozenset({3}))


def test_progress_and_leaving_forgive_deaths(one_split):
    claim_and_die(one_split)
    claim_and_die(one_split, rows=[1])
    with hand(one_split) as worker:
        claim = worker.claim()
        assert (claim.lease.deaths, claim.lease.done, claim.isolation) == (1, (1, 0), None)
    claim_and_die(one_split)
    with hand(one_split) as worker:
        assert worker.claim().lease.deaths == 1  # the one before left of its own will


def test_isolated_unit_is_claimed_alone(folder):
    job = make_job(folder, split_rows=10)
    for _ in range(3):
        claim_and_die(job)  # the first split, then the second, and the first again
    with hand(job) as worker:
        (claim,) = worker.work.claim(100)
        assert (claim.unit, claim.isolation) == ("00000", Isolation(64))
        (claim,) = worker.work.claim(100)
        assert (claim.unit, claim.isolation) == ("00001", None)


@pytest.mark.parametrize(("n_rows", "bad"), [(20, 13), (300, 1), (300, 222), (1, 1)])
def test_row_that_kills_is_found(folder, n_rows, bad):
    """Every worker dies as soon as it runs that row: some eight at most do before its number is known."""
    write_lines(folder / "in" / "a.jsonl", [{"id": i, "text": f"text {i}"} for i in range(1, n_rows + 1)])
    job = make_job(folder, split_rows=1000)

    def work():
        with hand(job, ttl=TTL) as worker:
            claim = worker.claim()
            isolation = claim.isolation
            if isolation is None:
                worker.work.suspect(claim, [])
                os._exit(KILLED)
            assert len(isolation.suspects) <= 64
            left = rows_left(claim)
            while left:
                suspects = sorted(left & isolation.suspects)
                chunk = suspects[: isolation.chunk] if suspects else sorted(left)[:64]
                if set(chunk) & isolation.guilty:
                    assert isolation.guilty == {bad}
                    os._exit(0)
                worker.work.suspect(claim, chunk)
                if bad in chunk:
                    os._exit(KILLED)
                worker.output.checkpoint([answer_to(claim, row) for row in chunk], [])
                left -= set(chunk)

    def answer_to(claim, row):
        return answer(claim.split, next(found for found in Source(job.input).rows(claim.split) if found.row == row))

    deaths = 0
    while (code := in_child(work)) == KILLED:
        deaths += 1
        assert deaths < 9
    assert code == 0
    assert deaths >= 3


def test_suspects_are_narrowed_by_eight_without_those_that_are_done(one_split):
    claim_and_die(one_split)
    claim_and_die(one_split)
    claim_and_die(one_split, rows=[5], suspects=range(1, 21))
    with hand(one_split) as worker:
        assert worker.claim().isolation == Isolation(2, frozenset(range(1, 21)) - {5})


def test_single_suspect_is_guilty_unless_it_is_done(one_split):
    for _ in range(2):
        claim_and_die(one_split)
    for _ in range(3):
        claim_and_die(one_split, suspects=[3])
    claim_and_die(one_split, begun=False)  # what was known stays known
    with hand(one_split) as worker:
        assert worker.claim().isolation.guilty == {3}


def test_finished_suspect_is_not_guilty(one_split):
    for _ in range(2):
        claim_and_die(one_split)
    claim_and_die(one_split, rows=[3], suspects=[3])
    with hand(one_split) as worker:
        isolation = worker.claim().isolation
        assert (isolation.guilty, isolation.suspects) == (frozenset(), frozenset())


# --- the rest ----------------------------------------------------------------------------------------------------


def test_told_to_stop(job):
    with hand(job) as one:
        assert not one.output.is_told_to_stop()
        one.output.store.put(STOP, json.dumps({"id": "1"}).encode())
        assert one.output.is_told_to_stop()
        with hand(job) as two:
            assert not two.output.is_told_to_stop()  # it came later
            one.output.store.put(STOP, json.dumps({"id": "2"}).encode())
            assert two.output.is_told_to_stop()


def test_scope(job):
    with hand(job) as one:
        files = one.source.files()
        work = Work(one.output, files, {1, 3})
        assert [split.number for split in work.splits()] == [1, 3]
        assert work.total_rows() == 8
        assert units(work.claim(100)) == ["00001", "00003"]
        assert units(one.work.claim(100)) == ["00000", "00002", "00004"]


def test_worker_without_a_limit_does_what_others_record_later(folder, job):
    with hand(job) as worker, hand(job, limit=20) as limited:
        claims = worker.work.claim(100)
        assert len(claims) == 5
        write_lines(folder / "in" / "b.jsonl", [{"id": 21, "text": "text 21"}])
        with hand(job) as late:
            assert len(late.work.splits()) == 6
        assert limited.claim() is None
        claim = worker.claim()
        assert (claim.unit, claim.split.file.key) == ("00005", "b.jsonl")
        assert worker.work.total_rows() == 21
        assert worker.run(claim) == [(5, 1)]
        assert worker.commit(claim).rows == 1


def test_worker_reads_a_file_that_changed_since_it_came(folder, job):
    with hand(job) as worker:
        write_lines(folder / "in" / "a.jsonl", [{"id": 1, "text": "other"}])
        with hand(job) as late:
            assert [split.number for split in late.work.splits()] == [5]
        claim = worker.claim()
        assert claim.unit == "00005"
        assert worker.run(claim) == [(5, 1)]
        worker.commit(claim)
        assert worker.finish().rows == 1


def test_files_are_read_from_where_this_worker_finds_them(folder, job):
    """What is recorded has lost its credentials, or is another machine's path."""
    with hand(job) as worker:
        files = [replace(file, path=f"/elsewhere/{file.key}") for file in worker.source.files()]
        assert Work(worker.output, files).claim(1)[0].split.file == files[0]


def test_survey(job):
    with hand(job, ttl=TTL) as one, hand(job) as two:
        two.output.worker.progress = {"finished": 7}
        one.output.worker.progress = {"finished": 9}
        two.output.worker.leave()
        with hand(job) as three:
            survey = three.work.survey()
            assert survey.n_workers == 2
            assert survey.rows[two.output.attempt] == 7
            assert three.output.attempt not in survey.rows


def test_todo_and_totals(job):
    with hand(job) as worker:
        assert worker.work.total_rows() == N_ROWS
        claim = worker.claim()
        worker.run(claim)
        worker.commit(claim)
        assert [split.number for split in worker.work.todo()] == [1, 2, 3, 4]
        assert worker.output.store.names(SHARES) == []
