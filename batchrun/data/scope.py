"""How far a run goes: the splits that it has to have done, given what earlier ones recorded and its own limit."""

from __future__ import annotations

import itertools
from dataclasses import replace

from batchrun.data.rows import InputFile, Split
from batchrun.data.sink import Output
from batchrun.data.source import Source
from batchrun.errors import JobError


def splits_to_do(output: Output, source: Source, files: list[InputFile], limit: int | None) -> list[Split]:
    """The splits to have done, recorded: those that were before, then those of the rows after them, up to ``limit``.

    Raises JobError where ``limit`` is below the rows that were recorded, unless they are committed up to there.
    """
    splits = output.check_input(files) if output.recorded_input() is not None else []
    total = sum(split.n_rows for split in splits)
    if limit is not None and limit < total:
        return _committed_splits(output, splits, limit)
    manifest = output.manifest()
    if manifest is not None and manifest.complete and manifest.run.get("limit", 0) is None:
        return splits  # all there are: a run without a limit has finished them
    ends = {split.file.key: split.first_row + split.n_rows for split in splits}
    for split in source.splits(files):
        end = ends.get(split.file.key)
        if end is not None and split.first_row + split.n_rows <= end:
            continue
        if limit is not None and total >= limit:
            break
        if end is not None and split.first_row < end:
            _, split = source.cut(split, end - split.first_row)
        if limit is not None and total + split.n_rows > limit:
            split, _ = source.cut(split, limit - total)
        total += split.n_rows
        splits.append(replace(split, number=len(splits)))
    output.record_input(files, splits)
    return splits


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
