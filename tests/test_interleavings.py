"""The protocol of many workers under every interleaving that a search comes up with: each row once, whoever dies when.

The workers run the real output, leases, units and the thread that claims them; their engine is a wait.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun import claims as claims_module
from batchrun.claims import Claims
from batchrun.data import rerun, scope, sink
from batchrun.data.lease import LeaseListing, alone
from batchrun.data.parts import Layout, PartContent, write_part
from batchrun.data.records import (
    JOB,
    KEPT,
    MANIFESTS,
    REMOVING,
    RERUNS,
    SEGMENTS,
    SHARES,
    SPLITS,
    Manifest,
    SplitRecord,
    StoredFile,
    kept_file,
    lost_mark,
    unit_of,
)
from batchrun.data.rerun import open_again
from batchrun.data.results import Results
from batchrun.data.rows import Batch, PartialRow, Row, RowResult, Split
from batchrun.data.scope import splits_to_do
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.data.store import StorageError, Store
from batchrun.data.view import OutputView, counting_record
from batchrun.data.work import Claim, Work
from batchrun.data.workers import Watch, Worker
from batchrun.errors import BatchrunError, JobError, StoppedError
from batchrun.job import JobSpec
from tests import simulation
from tests.outputs import configuration, make_job, rows_left, write_lines
from tests.simulation import CRASH_AFTER, CRASH_BEFORE, Option, Priorities, Process, Schedule, World

TTL = 4.0
STEP = 1.5  # seconds that the engine needs for a few rows
FAILING = {"r2", "s1"}  # ids whose rows fail, unless a rerun runs them
FIRST = {"a": ["r1", "r2", "r3", "r4", "r5", "r6", "r7"], "b": ["s1", "s2"]}
MANY = {"a": [f"r{i}" for i in range(1, 13)], "b": FIRST["b"]}
SECOND = {"a": FIRST["a"], "b": ["s1", "s3", "s4"], "c": ["t1", "t2"]}


class Rows:
    """A job and its input, which may change. The files differ in a column's type: parts are written anew in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = make_job(folder, split_rows=5)
        self.write(FIRST)

    def write(self, files: dict[str, list[str]]) -> None:
        """Makes these the input, in place of what was."""
        self.files = files
        for path in (self.folder / "in").glob("*.jsonl"):
            if path.stem not in files:
                path.unlink()
        for name, ids in files.items():
            path = self.folder / "in" / f"{name}.jsonl"
            records = [{"id": i, "text": f"{i}{len(ids)}", "n": 1 if name == "a" else "x"} for i in ids]
            write_lines(path, records)
            os.utime(path, ns=(0, len(ids) * 10**9))  # so that a file changes exactly when its rows do

    @property
    def texts(self) -> dict[str, str]:
        """Id -> text of the rows as they are now, in their order."""
        return {i: f"{i}{len(ids)}" for ids in self.files.values() for i in ids}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong here is meant to."""
    caplog.set_level(logging.ERROR)


def no_more(output: Output, source: Source) -> None:
    """What a worker does besides, once the input is recorded: nothing."""


def rerun_failed(output: Output, source: Source) -> None:
    open_again(output, source, source.files(), ["failed"], 9)


@dataclass
class Submit:
    """A worker of that job, much like `batchrun.loop.Loop`, whose answers are its own."""

    job: JobSpec
    besides: Callable[[Output, Source], None] = no_more
    overwrite: bool = False
    max_tokens: int = 5  # another one is another configuration

    def __call__(self, store: Store) -> None:
        source = Source(self.job.input)
        files = source.files()
        settings = configuration(self.job) | {"model": self.max_tokens}
        options = {"inputs": files, "overwrite": self.overwrite, "ttl": TTL}
        with Output.open(self.job.output, settings, Layout.of(self.job), **options) as output:
            splits_to_do(output, source, files, None)
            self.besides(output, source)
            with Claims(Work(output, source.files())) as claims:
                self.run(output, source, claims)
            output.finish({})

    def run(self, output: Output, source: Source, claims: Claims) -> None:
        held: dict[str, tuple[Claim, list[Row]]] = {}
        committed = False
        while True:
            claims.check()
            for claim in claims.lost():
                held.pop(claim.unit, None)
            for claim in claims.take():
                left = rows_left(claim)
                held[claim.unit] = (claim, [row for row in source.rows(claim.split) if row.row in left])
            claims.want(0 if held else 1)
            if not held and claims.finished:
                return
            if not held:
                claims.idle(0.2, look=committed)
                committed = False
                continue
            unit, (claim, todo) = next(iter(held.items()))
            if claims.asked and len(todo) > 1:
                rest = todo[len(todo) // 2 :]
                del todo[len(todo) // 2 :]
                claims.cede(claim, [row.row for row in rest])
            time.sleep(STEP)
            now, todo[:] = todo[:2], todo[2:]
            unfinished = [PartialRow(claim.split.number, row.row, [1]) for row in todo]
            if now:
                output.checkpoint([self.answer(output, claim, row) for row in now], unfinished)
            if not todo and not claims.is_ceding(claim):
                del held[unit]
                claims.drop(claim)
                output.commit_split(claim.split, source)
                committed = True

    def answer(self, output: Output, claim: Claim, row: Row) -> RowResult:
        assert row.data is not None
        place = (claim.split.number, row.row)
        if row.data["id"] in FAILING and claim.max_tokens is None:
            return RowResult(*place, error=f"engine_error: by {output.attempt}")
        text = f"{row.data['text']} {self.max_tokens} {output.attempt}"
        return RowResult(*place, text, "stop", 1, 1, rerun_max_tokens=claim.max_tokens)


# ---- what has to hold


def read_part(data: bytes) -> list[dict[str, Any]]:
    return pq.read_table(io.BytesIO(data)).to_pylist()


def sha256(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def newest_manifest(world: World) -> Manifest | None:
    names = [name for name in world.objects if name.startswith(f"{MANIFESTS}/")]
    return Manifest.model_validate_json(world.objects[max(names)]) if names else None


@dataclass
class Witness:
    """Sees every change of the objects; :meth:`check_result` says what has to hold in the end."""

    world: World
    rows: Rows
    first: dict[tuple[int, str], str] = field(default_factory=dict)  # (split, id) -> the good answer committed first
    again: set[tuple[int, str]] = field(default_factory=set)  # those that a rerun has opened
    taken_back: bool = False  # something that was committed, by a rerun or a removal

    def __post_init__(self) -> None:
        self.world.check = self.see

    def see(self, name: str, before: bytes | None) -> None:
        objects = self.world.objects
        self.taken_back |= name in objects and (name == REMOVING or name.startswith(f"{RERUNS}/"))
        if objects.get(REMOVING) == b"removing":
            self.first.clear()
            self.again.clear()
        elif name.startswith("part-"):
            self._see_part(name, before)
        elif name.startswith(f"{SPLITS}/") and name.endswith(".json") and name in objects:
            record = SplitRecord.model_validate_json(objects[name])
            for row in read_part(objects.get(record.staged) or objects[record.part]):
                if row["error"] is None:
                    self.first.setdefault((record.split, row["custom_id"]), row["generated_text"])
        elif name.startswith(f"{SPLITS}/") and name.endswith(".lost") and name in objects:
            record = SplitRecord.model_validate_json(objects[name.removesuffix(".lost") + ".json"])
            rows = read_part(objects[record.part])
            self.again |= {(record.split, row["custom_id"]) for row in rows if row["error"]}

    def _see_part(self, name: str, before: bytes | None) -> None:
        """Fails at the change that takes away what a complete manifest names; readers may be at it."""
        objects, manifest = self.world.objects, newest_manifest(self.world)
        part = manifest and next((part for part in manifest.parts if part.name == name), None)
        if manifest is None or not manifest.complete or part is None or sha256(before) != part.sha256:
            return
        records = {n: objects[n] for n in objects if n.startswith(f"{SPLITS}/") and n.endswith(".json")}
        found = {n: SplitRecord.model_validate_json(data) for n, data in records.items()}
        newer = {record.sha256 for record in found.values() if record.part == name and record.commit != part.commit}
        counts = any(record.commit == part.commit and lost_mark(n) not in objects for n, record in found.items())
        now = sha256(objects.get(name))
        replaced = not counts and now in newer and self._is_all_committed(manifest)
        assert now == part.sha256 or replaced, f"{name} changed"

    def _is_all_committed(self, manifest: Manifest) -> bool:
        """Whether every split of the manifest has a commit record that counts."""
        names = {name for name in self.world.objects if name.startswith(f"{SPLITS}/")}
        return all(counting_record(part.split, names) in names for part in manifest.parts)

    @property
    def lenient(self) -> bool:
        """Whether a worker that others took for gone may have written what does not belong there any more.

        Then rows may have been run more often than they need to be, or by settings that another worker has replaced.
        """
        return self.taken_back and not self.world.sees_all

    def check_errors(self, processes: Sequence[Process]) -> None:
        """Raises what a worker may not end with."""
        for process in processes:
            error = process.error
            if error is not None and not is_fair(error) and not (self.lenient and isinstance(error, BatchrunError)):
                raise error

    def check_result(self) -> None:
        """Every row is there once, in order, as it was committed first, in the parts that the newest manifest names.

        And nothing is left of the work.
        """
        objects, manifest = self.world.objects, newest_manifest(self.world)
        assert manifest is not None
        assert manifest.complete
        found = []
        for part in manifest.parts:
            assert sha256(objects[part.name]) == part.sha256, part.name
            found += [(part.split, row) for row in read_part(objects[part.name])]
        texts = self.rows.texts
        settings = OutputView(self.world.store()).recorded_configuration()["model"]
        ids = [row["custom_id"] for _, row in found]
        assert sorted(ids) == sorted(texts)
        assert len(self.rows.files) > 2 or ids == list(texts)
        for split, row in found:
            key = (split, row["custom_id"])
            assert (row["error"] is None) != (row["generated_text"] is None)
            assert row["error"] or row["generated_text"].startswith(f"{texts[key[1]]} "), f"{key}: {row}"
            if self.lenient:
                continue
            assert row["error"] or f" {settings} " in row["generated_text"], f"{key}: {row}"
            assert row["generated_text"] == self.first.get(key, row["generated_text"]), f"{key} was answered before"
            if key in self.again:
                assert row.get("rerun_max_tokens") == 9, f"{key} was not run again"
        assert {name for name in objects if name.startswith("part-")} == {part.name for part in manifest.parts}
        left = [n for n in objects if n.startswith((f"{SEGMENTS}/", f"{SHARES}/", f"{KEPT}/"))]
        left += [name for name in LeaseListing.of(self.world.store()).epochs if unit_of(name)]
        assert not left


# ---- scenarios


def run_and_finish(
    world: World, rows: Rows, *waves: Sequence[Callable[[Store], None]], last: Callable[[Store], None] | None = None
) -> None:
    """Waves of workers under the schedule, then one to whom nothing happens; and what has to hold."""
    witness = Witness(world, rows)
    modules = (claims_module, rerun, scope, sys.modules[__name__])
    try:
        with world.installed(*modules):
            for workers in waves:
                witness.check_errors(world.run(*workers))
            world.calm()
            (process,) = world.run(last or Submit(rows.job))
            assert process.error is None, repr(process.error)
        witness.check_result()
    except Exception as error:
        error.add_note("\n".join(world.history))
        raise


def is_fair(error: BaseException) -> bool:
    """Whether a worker may end so: told to, or by an input that changed under it."""
    if isinstance(error, JobError) and "results of other settings" in str(error):
        return True
    stopped = isinstance(error, StoppedError) and not isinstance(error, StorageError)
    return stopped or (isinstance(error, JobError) and "changed while" in str(error))


def together(world: World, rows: Rows, n: int) -> None:
    """All do the same."""
    rows.write(FIRST)
    run_and_finish(world, rows, [Submit(rows.job)] * n)


def sharing(world: World, rows: Rows, n: int) -> None:
    """There are more workers than splits, so that some leave rows to others."""
    rows.write(MANY)
    whole = Submit(make_job(rows.folder, split_rows=100))
    run_and_finish(world, rows, [whole] * (n + 1), last=whole)


def changing(world: World, rows: Rows, n: int) -> None:
    """The input grows, and a file of it changes, while they are at it."""

    def change(store: Store) -> None:
        for _ in range(3):
            time.sleep(1.5)
            store.exists("nothing")
        rows.write(SECOND)

    rows.write(FIRST)
    run_and_finish(world, rows, [change, *[Submit(rows.job)] * n])


def rerunning(world: World, rows: Rows, n: int) -> None:
    """One of them has what failed run again, once something is committed."""

    def again(store: Store) -> None:
        for _ in range(20):  # all may have died
            if store.names(SPLITS):
                break
            time.sleep(1.0)
        Submit(rows.job, rerun_failed)(store)

    rows.write(FIRST)
    run_and_finish(world, rows, [*[Submit(rows.job)] * (n - 1), again])


def overwriting(world: World, rows: Rows, n: int) -> None:
    """One begins anew, with other settings, what one or two have left, while others with old or new ones come too."""
    rows.write(FIRST)
    ones = [Submit(rows.job)] * (n // 2)
    anew = Submit(rows.job, overwrite=True, max_tokens=6)
    others = [Submit(rows.job, max_tokens=5 + place % 2) for place in range(n - 1)]

    def last(store: Store) -> None:
        settings = OutputView(store).recorded_configuration()["model"] if store.exists(JOB) else 6
        try:
            Submit(rows.job, max_tokens=settings)(store)
        except JobError:
            if world.sees_all:
                raise
            anew(store)  # what somebody wrote who was wrongly thought to be gone may make no sense

    run_and_finish(world, rows, ones, [anew, *others], last=last)


Scenario = Callable[[World, Rows, int], None]
SCENARIOS: list[Scenario] = [together, sharing, changing, rerunning, overwriting]


def run_at_random(scenario: Scenario, rows: Rows, seed: int) -> World:
    rng = random.Random(seed)
    priorities = Priorities(rng, mishaps=rng.choice([0.0, 0.002, 0.02]), stalls=rng.choice([0, 8]))
    world = World(priorities, crashes=rng.randrange(4), lost_replies=rng.randrange(4), hosts=rng.choice([1, 1, 2, 4]))
    scenario(world, rows, rng.randrange(2, 5))
    return world


def search(scenario: Scenario, rows: Rows, seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_at_random(scenario, rows, seed)


decisions = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=60)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    scenario=st.sampled_from(SCENARIOS),
    decisions=decisions,
    workers=st.integers(2, 4),
    crashes=st.integers(0, 4),
    hosts=st.integers(1, 4),
)
def test_schedules(rows: Rows, scenario: Scenario, decisions: Any, workers: int, crashes: int, hosts: int) -> None:
    scenario(World(Schedule(decisions), crashes=crashes, lost_replies=2, hosts=hosts), rows, workers)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_random_worlds(rows: Rows, scenario: Scenario) -> None:
    search(scenario, rows, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_more_random_worlds(rows: Rows, scenario: Scenario) -> None:
    search(scenario, rows, range(100, 160))


def test_leases_that_mean_nothing(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers think that all others are gone: they do more than they need to, and nothing wrong."""
    monkeypatch.setattr(Watch, "is_gone", lambda *_: True)
    search(together, rows, range(3))


# ---- that the search finds what it is to find


def write_what_is_there(
    path: Path, batches: Iterable[Batch], results: Results, split: Split, layout: Layout
) -> PartContent:
    """Writes a part without those rows that have no results."""

    def there() -> Iterator[Batch]:
        for batch in batches:
            found = results.take(batch.rows)["row"].is_valid().to_pylist()
            records = list(itertools.compress(batch.records or [], found))
            rows = list(itertools.compress(batch.rows, found))
            yield Batch(rows, [None] * len(rows), records=records)

    return write_part(path, there(), results, split, layout)


def forget_all(store: Store, splits: Any) -> None:
    """Removes the segments of every split when one is committed."""
    store.delete(store.names(SEGMENTS))


def record_and_remove(output: Output, files: Any, splits: Sequence[Split], *others: Any) -> None:
    """Removes what was replaced in the input as soon as that is known."""
    record_input(output, files, splits, *others)
    current = {output.layout.part_name(split.number) for split in splits}
    output.store.delete(name for name in output.store.names("") if name.startswith("part-") and name not in current)


def keep_after_the_mark(
    output: Output, source: Source, split: Split, commit: str, part: Sequence[StoredFile], kinds: Sequence[str]
) -> int:
    """Takes a commit back before what is kept of its part is durable."""
    count = keep_others(output, source, split, commit, part, kinds)
    if count:
        kept = output.store.read(kept_file(commit))
        output.store.delete([kept_file(commit)])
        output.store.put(lost_mark(commit), b"{}")
        output.store.put(kept_file(commit), kept)
    return count


record_input, keep_others = Output.record_input, rerun._keep_others
# Each: where the search begins (near a world that finds it), the scenario, and what is replaced by what.
FAULTS: dict[str, tuple[int, Scenario, Any, str, Any]] = {
    "a part without all rows": (202, sharing, sink, "write_part", write_what_is_there),
    "segments of others removed": (206, together, sink, "forget_units", forget_all),
    "a removal before its time": (271, changing, Output, "record_input", record_and_remove),
    "a commit before its cession": (225, sharing, Claims, "is_ceding", lambda *_: False),
    "a rerun's mark before its kept rows": (275, rerunning, rerun, "_keep_others", keep_after_the_mark),
    "a removal that looks for nobody": (205, overwriting, Watch, "others", lambda *_: []),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(rows: Rows, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first, scenario, where, what, fault = FAULTS[name]
    monkeypatch.setattr(where, what, fault)
    with pytest.raises((AssertionError, BatchrunError)):
        search(scenario, rows, range(first, first + 200))


def test_a_create_that_overwrites_is_found(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation._Objects, "create", simulation._Objects.write)
    monkeypatch.setattr(Store, "probe_exclusive_create", lambda store: None)  # which would say so
    monkeypatch.setattr(Watch, "is_gone", lambda *_: True)  # so that many commit the same
    with pytest.raises((AssertionError, BatchrunError)):
        search(together, rows, range(203, 303))


def test_equal_schedules_give_equal_runs(rows: Rows) -> None:
    def history() -> list[str]:
        world = World(Schedule([(7, 5), (3, 2), (20, 9), (1, 1)] * 5), crashes=2, lost_replies=1)
        together(world, rows, 3)
        return world.history

    first = history()
    assert first == history()
    assert any("crash" in line for line in first)


def test_a_race_is_found() -> None:
    winners: list[str] = []

    def careless(store: Store) -> None:
        """Looks, then writes, as if nobody could come between."""
        if not store.exists("winner"):
            store.put("winner", store.writer.encode())
            winners.append(store.writer)

    def run(decisions: Sequence[tuple[int, int]]) -> int:
        winners.clear()
        world = World(Schedule(decisions))
        with world.installed():
            world.run(careless, careless)
        return len(winners)

    assert run([]) == 1
    assert max(run([(gap, 1)]) for gap in range(4)) == 2


def test_what_a_change_breaks_is_raised() -> None:
    """Even if the worker, which thinks that its storage failed, goes on."""

    def check(name: str, before: bytes | None) -> None:
        assert before is None, "changed"

    def twice(store: Store) -> None:
        store.put("a", b"1")
        store.put("a", b"2")

    world = World(Schedule())
    world.check = check
    with world.installed(), pytest.raises(AssertionError, match="changed"):
        world.run(twice)


@pytest.mark.parametrize(("hosts", "least", "most"), [(1, 0, 5), (2, 60, 80)])
def test_silent_worker_is_taken_over_by_the_clock_and_a_dead_one_at_once(hosts: int, least: int, most: int) -> None:
    taken: list[float] = []

    def hold(store: Store) -> None:
        with Worker(store, ttl=60.0) as worker, alone(store, worker, "job"):
            taken.append(world.now)
            store.exists("job")

    def crash_holding(options: Sequence[Option]) -> int:
        places = [place for place, (_, action) in enumerate(options) if action == CRASH_BEFORE]
        return places[0] if taken and places else 0

    world = World(crash_holding, crashes=1, hosts=hosts)
    with world.installed():
        world.run(hold, hold)
    assert len(taken) == 2
    assert least <= taken[1] - taken[0] <= most


def test_what_a_crashed_worker_does_has_no_effect() -> None:
    def stubborn(store: Store) -> None:
        try:
            store.put("a", b"1")
        finally:
            store.put("b", b"2")

    world = World(lambda options: [action for _, action in options].index(CRASH_AFTER), crashes=1)
    with world.installed():
        (process,) = world.run(stubborn)
    assert world.objects == {"a": b"1"}
    assert process.crashed
    assert world.history[-1].startswith("w0 crash after write a ")
