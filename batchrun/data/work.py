"""What is left to do on an output, and who does what of it.

A unit is a split, or a share of one: rows that a holder of the split left to others because it had not begun them.
Whoever holds a unit's lease runs those of its rows that have no results yet and no later share has. Near the end, a
worker that finds nothing to claim asks; workers with rows that wait make shares of them, one for each who asks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from batchrun.data.lease import Lease, LeaseListing, read_lease, read_suspects, remove_leases, take, write_suspects
from batchrun.data.records import (
    ASKS,
    SHARES,
    InputRecord,
    ShareRecord,
    encode,
    read_records,
    share_file,
    share_of,
    unit_name,
)
from batchrun.data.rows import InputFile, PartialRow, Split
from batchrun.data.sink import Output
from batchrun.data.view import splits_of
from batchrun.data.workers import Watch, read_worker, worker_attempts

_ISOLATED_FROM = 2  # deaths of a unit's holders without any progress from which on its rows are run a few at a time,
FIRST_CHUNK = 64  # this many first,
_CHUNK_SHARE = 8  # and when the holder dies again, this part of those that ran then;
_GUILTY_FROM = 3  # deaths with one and the same row alone make it an error


@dataclass(frozen=True)
class Isolation:
    """How to find the rows of a unit that kill their worker: they run in chunks, and the one that runs is on record.

    ``suspects`` ran when the last holder died, and are run first. ``guilty`` ran alone then, time and again: an error.
    """

    chunk: int
    suspects: frozenset[int] = frozenset()
    guilty: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Claim:
    """A unit that this worker is to run."""

    split: Split
    lease: Lease
    only: frozenset[int] | None  # the rows of a share; None: all of the split
    skip: frozenset[int]  # rows that have results, and those of later shares
    partials: dict[int, PartialRow] = field(default_factory=dict)  # row -> what an earlier holder left of it
    max_tokens: int | None = None  # in place of the job's
    isolation: Isolation | None = None

    @property
    def unit(self) -> str:
        return self.lease.name

    @cached_property
    def n_rows(self) -> int:
        """How many rows it may have, at most."""
        return self.split.n_rows - len(self.skip) if self.only is None else len(self.only - self.skip)


@dataclass(frozen=True)
class Survey:
    """What one look around says of the others."""

    n_workers: int  # that live, this one included
    rows: dict[str, int]  # attempt -> rows that it says that it has finished; this one's left out


class Work:
    """The units of an output as one worker sees them. For one thread.

    ``files`` tell where this worker reads them: a path as recorded has lost its credentials. ``scope`` are the numbers
    of the splits to have done; None: all that there are, those too that others record later.
    """

    def __init__(self, output: Output, files: Iterable[InputFile], scope: Collection[int] | None = None) -> None:
        self.output = output
        self._store = output.store
        self._watch = Watch(output.store, output.worker.owner.ttl)
        self._paths = {file.key: file.path for file in files}
        self._scope = scope
        self._splits: tuple[InputRecord | None, list[Split]] = (None, [])
        self._holders: dict[tuple[str, int], Lease] = {}  # leases as last read, by unit and epoch: they do not change
        self._asking = False

    def splits(self) -> list[Split]:
        """The splits to have done."""
        record = self.output.input_record()
        if record is not self._splits[0]:
            found = splits_of(record) if record else []
            self._splits = (record, [s for s in found if self._scope is None or s.number in self._scope])
        return self._splits[1]

    def total_rows(self) -> int:
        """Rows that the parts of these will have, as far as is known."""
        return sum(map(rows_expected, self.splits()))

    def todo(self) -> list[Split]:
        """Those that are not committed."""
        commits = self.output.commits()
        return [split for split in self.splits() if split.number not in commits]

    def claim(self, rows: int) -> list[Claim]:
        """Units that nobody works on, of at least so many rows if there are: the first in order, or the next best."""
        candidates = self._candidates(self.todo())
        scene = self._look(candidates)
        claims: list[Claim] = []
        while candidates and _rows_of(claims) < rows and not any(claim.isolation for claim in claims):
            claims += self._still_open(self._take(candidates, scene, rows - _rows_of(claims)))
        return claims

    def _look(self, candidates: Collection[_Unit]) -> _Scene:
        """What is to be known to take some of these; looked at after their holders went."""
        scene = _Scene()
        if not candidates:
            return scene
        scene.segments = self.output.segments()
        scene.shares = self._share_numbers()
        rerun = self.output.rerun()
        if rerun is not None and rerun.max_tokens is not None:
            scene.max_tokens = dict.fromkeys(self.output.rerun_splits(), rerun.max_tokens)
        if any(unit.epoch for unit in candidates):
            splits = {unit.split.number for unit in candidates}
            for (split, row), partial in self.output.partials(splits).items():
                scene.partials.setdefault(split, {})[row] = partial
        return scene

    def _take(self, candidates: list[_Unit], scene: _Scene, rows: int) -> list[Claim]:
        """Takes the first of the candidates, which go from the list, up to so many rows or one that is isolated."""
        taken: list[Claim] = []
        while candidates and _rows_of(taken) < rows:
            unit = candidates.pop(0)
            split = unit.split.number
            done = frozenset(self.output.rows_in(scene.segments.get(split, ())))
            shares = self._shares(split, scene)
            if unit.share not in {0, *shares}:
                continue  # the split is committed
            left = {row: partial for row, partial in scene.partials.get(split, {}).items() if row not in done}
            own = shares.get(unit.share)  # None: of the split itself
            progress = (
                sum(own is None or row in own for row in done),
                sum(len(partial.token_ids) for row, partial in left.items() if own is None or row in own),
            )
            lease = self._next_lease(unit, progress, scene)
            if not take(self._store, lease):
                random.shuffle(candidates)  # others claim at this moment
                continue
            taken.append(self._claimed(unit, lease, done, left, scene))
            if taken[-1].isolation:
                break
        return taken

    def _still_open(self, taken: list[Claim]) -> list[Claim]:
        """Those of the claims whose splits are not committed, once that is looked at after they were taken."""
        commits = self.output.commits() if taken else {}
        if late := [claim.unit for claim in taken if claim.split.number in commits]:
            remove_leases(self._store, late)  # they were, before these were taken
        return [claim for claim in taken if claim.split.number not in commits]

    def lost(self, claims: Iterable[Claim]) -> list[Claim]:
        """Those of ``claims`` that others have taken over or finished, or that count no more."""
        leases, todo = LeaseListing.of(self._store), {split.number for split in self.todo()}
        return [
            claim
            for claim in claims
            if claim.split.number not in todo or leases.epochs.get(claim.unit, 0) > claim.lease.epoch
        ]

    def cede(self, claim: Claim, rows: Collection[int]) -> None:
        """Leaves rows of a claimed unit to others: not begun, nor to be begun by this worker."""
        record = ShareRecord(attempt=self.output.attempt, ranges=ranges_of(rows))
        split = claim.split.number
        for share in itertools.count(max(self._share_numbers().get(split, ()), default=0) + 1):
            if self._store.create(share_file(split, share), encode(record)):
                return

    def ask(self) -> None:
        """Lets the others know that this worker has nothing to do."""
        if not self._asking:
            self._store.put(f"{ASKS}/{self.output.attempt}", b"1")
        self._asking = True

    def stop_asking(self) -> None:
        if self._asking:
            self._store.delete([f"{ASKS}/{self.output.attempt}"])
        self._asking = False

    def is_asked(self) -> bool:
        """Whether another worker has nothing to do, and finds nothing that it could claim."""
        asking = [name.removeprefix(f"{ASKS}/") for name in self._store.names(ASKS)]
        others = [attempt for attempt in asking if attempt != self.output.attempt and not self._watch.is_gone(attempt)]
        return len(others) > 0 and len(others) > len(self._candidates(self.todo()))

    def survey(self) -> Survey:
        rows = {}
        for attempt in worker_attempts(self._store):
            worker = None if attempt == self.output.attempt else read_worker(self._store, attempt)
            if worker is not None and isinstance(finished := worker.progress.get("finished"), int):
                rows[attempt] = finished
        return Survey(max(1, len(self._watch.living())), rows)

    def suspect(self, claim: Claim, rows: Collection[int]) -> None:
        """Puts on record, of a unit whose last holder died, that it is begun; or which rows run now, if isolated."""
        write_suspects(self._store, claim.lease, rows)

    def _candidates(self, todo: list[Split]) -> list[_Unit]:
        """The units that nobody works on: those that nobody has begun, or else those whose holders are gone."""
        leases = LeaseListing.of(self._store)
        shares = self._share_numbers()
        units = [
            _Unit(split, share, leases.epochs.get(unit_name(split.number, share), 0))
            for split in todo
            for share in (0, *shares.get(split.number, ()))
        ]
        fresh = [unit for unit in units if unit.epoch == 0]
        return fresh or self._left(units)

    def _left(self, units: list[_Unit]) -> list[_Unit]:
        """Those of the units whose last holders are gone, with these."""
        gone = {self.output.attempt: False}
        left = []
        known, self._holders = self._holders, {}
        for unit in units:
            key = (unit.name, unit.epoch)
            holder = self._holders[key] = known.get(key) or read_lease(self._store, *key)
            if holder.attempt not in gone:
                gone[holder.attempt] = self._watch.is_gone(holder.attempt)
            if gone[holder.attempt]:
                left.append(replace(unit, holder=holder))
        return left

    def _next_lease(self, unit: _Unit, done: tuple[int, int], scene: _Scene) -> Lease:
        """The lease to take, with what is known of how earlier holders fared."""
        lease = Lease(unit.name, unit.epoch + 1, self.output.attempt, done=done)
        holder = unit.holder
        if holder is None or not self._died(holder.attempt, scene):
            return lease
        running = read_suspects(self._store, holder)
        if running is None and holder.deaths:  # it died before it had begun the unit
            return replace(lease, deaths=holder.deaths, suspects=holder.suspects, alone=holder.alone)
        suspects, got_on = running or (), done > holder.done
        again = holder.alone if suspects == holder.suspects else 0
        return replace(
            lease,
            deaths=1 if got_on else holder.deaths + 1,
            suspects=suspects,
            alone=again + 1 if len(suspects) == 1 and not got_on else 0,
        )

    def _died(self, attempt: str, scene: _Scene) -> bool:
        """Whether that worker, which is gone, went without a word."""
        if attempt not in scene.died:
            worker = read_worker(self._store, attempt)
            scene.died[attempt] = worker is not None and not worker.released
        return scene.died[attempt]

    def _claimed(
        self, unit: _Unit, lease: Lease, done: frozenset[int], partials: dict[int, PartialRow], scene: _Scene
    ) -> Claim:
        shares = self._shares(unit.split.number, scene)
        file = unit.split.file
        later = [rows for share, rows in shares.items() if share > unit.share]
        return Claim(
            split=replace(unit.split, file=replace(file, path=self._paths.get(file.key, file.path))),
            lease=lease,
            only=shares[unit.share] if unit.share else None,
            skip=done.union(*later),
            partials=partials,
            max_tokens=scene.max_tokens.get(unit.split.number),
            isolation=_isolation(lease, done),
        )

    def _share_numbers(self) -> dict[int, list[int]]:
        """Split -> its shares, in order."""
        numbers: dict[int, list[int]] = {}
        for split, share in sorted(filter(None, map(share_of, self._store.names(SHARES)))):
            numbers.setdefault(split, []).append(share)
        return numbers

    def _shares(self, split: int, scene: _Scene) -> dict[int, frozenset[int]]:
        """Share of that split -> its rows, without those that are gone."""
        if split not in scene.share_rows:
            names = {share_file(split, share): share for share in scene.shares.get(split, ())}
            records = read_records(self._store, names, ShareRecord)
            scene.share_rows[split] = {names[name]: rows_of(record.ranges) for name, record in records.items()}
        return scene.share_rows[split]


@dataclass(frozen=True)
class _Unit:
    """A unit, its newest epoch, and who held it then if that one is gone."""

    split: Split
    share: int
    epoch: int
    holder: Lease | None = None

    @property
    def name(self) -> str:
        return unit_name(self.split.number, self.share)


@dataclass
class _Scene:
    """What was seen before units are taken, once for all that one call takes."""

    segments: dict[int, list[str]] = field(default_factory=dict)  # of each split
    partials: dict[int, dict[int, PartialRow]] = field(default_factory=dict)  # split -> row -> what is left of it
    shares: dict[int, list[int]] = field(default_factory=dict)  # of each split
    share_rows: dict[int, dict[int, frozenset[int]]] = field(default_factory=dict)  # as far as they were read
    max_tokens: dict[int, int] = field(default_factory=dict)  # of splits for which a rerun says how many
    died: dict[str, bool] = field(default_factory=dict)  # attempt that is gone -> whether without a word


def _rows_of(claims: Iterable[Claim]) -> int:
    return sum(claim.n_rows for claim in claims)


def rows_expected(split: Split) -> int:
    """Rows that the split's part will have, as far as is known."""
    return split.n_rows + (split.error is not None)


def _isolation(lease: Lease, done: frozenset[int]) -> Isolation | None:
    if not lease.suspects:
        return Isolation(FIRST_CHUNK) if lease.deaths >= _ISOLATED_FROM else None
    suspects = frozenset(lease.suspects) - done
    if lease.alone >= _GUILTY_FROM:
        return Isolation(FIRST_CHUNK, guilty=suspects)
    return Isolation(max(1, len(lease.suspects) // _CHUNK_SHARE), suspects)


def ranges_of(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Row numbers as runs of consecutive ones: the first of each, and the one after its last."""
    ranges: list[tuple[int, int]] = []
    for row in sorted(rows):
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges


def rows_of(ranges: Iterable[tuple[int, int]]) -> frozenset[int]:
    """The inverse of ranges_of."""
    return frozenset(itertools.chain.from_iterable(itertools.starmap(range, ranges)))
