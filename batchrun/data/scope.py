"""How far a run goes: the splits to have done, given what earlier runs recorded, what became of the input, and a limit.

New files add splits. A changed file's splits are replaced by new ones, with numbers of their own. A file that is gone
leaves those of its splits that are committed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from batchrun.data.lease import alone
from batchrun.data.records import InputRecord
from batchrun.data.rows import InputFile, Split
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.data.view import splits_of
from batchrun.errors import JobError

log = logging.getLogger(__name__)

_INPUT_LEASE = "input"


@dataclass
class _Input:
    """An input record in the making."""

    files: dict[str, InputFile] = field(default_factory=dict)  # by key; those that are gone and have splits, too
    splits: list[Split] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)  # keys of files all of whose rows are in the splits
    next_split: int = 0
    n_rows: int = 0  # of the splits

    def keep(self, split: Split) -> None:
        self.splits.append(split)
        self.n_rows += split.n_rows

    def add(self, split: Split) -> None:
        self.keep(replace(split, number=self.next_split))
        self.next_split += 1


def splits_to_do(output: Output, source: Source, files: Sequence[InputFile], limit: int | None) -> list[Split]:
    """The splits to have done, recorded: those that were before, then those of the rows after them, up to ``limit``.

    Raises JobError where ``limit`` is below the rows that were recorded, unless they are committed up to there.
    """
    with alone(output.store, output.worker, _INPUT_LEASE):
        record = output.whole_input_record()
        if record is not None and not _is_record_of(record, files):
            files = source.files()  # others may have recorded what came after these were listed
        wanted = _Input() if record is None else _still_there(output, record, {file.key: file for file in files})
        if limit is not None and limit < wanted.n_rows:
            return _committed_splits(output, wanted.splits, limit)
        if new := [file for file in files if file.key not in wanted.whole]:
            _extend(wanted, source, new, limit)
        wanted.files |= {file.key: file for file in files}
        output.record_input(list(wanted.files.values()), wanted.splits, wanted.whole, wanted.next_split)
        return wanted.splits


def _is_record_of(record: InputRecord, files: Sequence[InputFile]) -> bool:
    return {(file.key, file.size, file.version) for file in record.files} == {(f.key, f.size, f.version) for f in files}


def _still_there(output: Output, record: InputRecord, now: dict[str, InputFile]) -> _Input:
    """What of the recorded input still counts. A file that is the same elsewhere is read from where it is now."""
    commits = output.commits()
    whole = {record.files[index].key for index in record.whole}
    same = {file.key for file in record.files if (found := now.get(file.key)) and _is_same(file, found)}
    kept = _Input(next_split=record.next_split)
    changed: dict[str, int] = {}
    lost: dict[str, int] = {}
    for split in splits_of(record):
        key = split.file.key
        if key in same:
            kept.keep(replace(split, file=now[key]))
        elif key in now:
            changed[key] = changed.get(key, 0) + split.n_rows
        elif split.number in commits:
            kept.keep(split)
        else:
            lost[key] = lost.get(key, 0) + split.n_rows
    for key, rows in changed.items():
        log.warning("%s has changed: its rows (%s before) are run again", key, f"{rows:,}")
    for key, rows in lost.items():
        log.warning("%s is gone: %s rows of it were not finished, and are left out", key, f"{rows:,}")
    kept.files = {split.file.key: split.file for split in kept.splits}
    kept.whole = {key for key in whole if key in same or (key in kept.files and key not in lost)}
    return kept


def _is_same(file: InputFile, now: InputFile) -> bool:
    return (file.size, file.version) == (now.size, now.version)


def _extend(wanted: _Input, source: Source, files: Iterable[InputFile], limit: int | None) -> None:
    """Adds the rows of ``files`` that are not in any split yet, up to ``limit`` rows in all."""
    covered: dict[str, list[tuple[int, int]]] = {file.key: [] for file in files}
    for split in wanted.splits:
        if split.file.key in covered:
            covered[split.file.key].append((split.first_row, split.first_row + split.n_rows))
    for key, splits in itertools.groupby(source.splits(list(files)), lambda split: split.file.key):
        for split in splits:
            for piece in _uncovered(source, split, sorted(covered[key])):
                room = piece.n_rows if limit is None else limit - wanted.n_rows
                if room > 0:
                    wanted.add(piece if piece.n_rows <= room else source.cut(piece, room)[0])
                if piece.n_rows > room:
                    return
        wanted.whole.add(key)
    wanted.whole |= covered.keys()  # those without any rows, too


def _uncovered(source: Source, split: Split, covered: Iterable[tuple[int, int]]) -> list[Split]:
    """The pieces of ``split`` that lie in none of the sorted ranges of rows."""
    pieces = []
    for first, end in covered:
        if end <= split.first_row or first >= split.first_row + split.n_rows:
            continue
        if first > split.first_row:
            piece, split = source.cut(split, first - split.first_row)
            pieces.append(piece)
        split = source.cut(split, min(end - split.first_row, split.n_rows))[1]
    return [*pieces, split] if split.n_rows else pieces


def _committed_splits(output: Output, splits: list[Split], limit: int) -> list[Split]:
    """Those of the first ``limit`` rows. Raises JobError where one is not committed."""
    committed = output.committed()
    starts = itertools.accumulate((split.n_rows for split in splits), initial=0)
    wanted = [split for split, start in zip(splits, starts, strict=False) if start < limit]
    if all(split.number in committed for split in wanted):
        return wanted
    total = sum(split.n_rows for split in splits)
    raise JobError(
        f"--limit {limit}: {output.store.url} was begun with {total:,} rows, and its first {limit:,} are not finished; "
        f"give --limit {total} or more, no --limit, another output.path, or --overwrite to start again"
    )
