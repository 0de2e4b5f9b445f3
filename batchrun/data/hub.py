"""Hugging Face datasets by name, for what files cannot name: each split of a dataset is one input file.

Rows count from 1. A dataset is a memory-mapped Arrow table, so reading is slicing. :mod:`datasets` is imported when
first needed, without any of the array frameworks that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchrun.data.rows import Batch, InputFile, Split
from batchrun.errors import JobError

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 1024
_RESERVED = ("path", "streaming")


def load(paths: Sequence[str], options: dict[str, Any]) -> dict[InputFile, Dataset]:
    """Every split of the datasets at ``paths``, downloaded and prepared; ``options`` as for ``load_dataset``.

    Raises JobError when a dataset cannot be loaded.
    """
    for name in _RESERVED:
        if name in options:
            raise JobError(f"input.dataset_options.{name}: cannot be set here")
    import datasets

    found: dict[InputFile, Dataset] = {}
    for path in paths:
        try:
            loaded = datasets.load_dataset(path, **options)
        except Exception as error:  # builders raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise JobError(f"input.path: dataset {path}: {reason}") from error
        parts = loaded if isinstance(loaded, dict) else {str(loaded.split): loaded}
        for split, dataset in parts.items():
            key = f"hf:{path}:{dataset.config_name}:{split}"
            found[InputFile(key, path, dataset.data.nbytes, dataset._fingerprint)] = dataset
    return found


def scan(file: InputFile, dataset: Dataset, split_rows: int) -> list[Split]:
    """The dataset's splits, numbered from 0."""
    starts = range(0, dataset.num_rows, split_rows)
    return [Split(file, i, start + 1, min(split_rows, dataset.num_rows - start)) for i, start in enumerate(starts)]


def read(split: Split, dataset: Dataset, columns: Sequence[str] | None) -> Iterator[Batch]:
    """The split's rows with ``columns`` (None: all) that the dataset has."""
    names = dataset.column_names
    wanted = names if columns is None else [name for name in columns if name in names]
    arrow = dataset.with_format("arrow")
    row_bytes = max(1, dataset.data.nbytes // max(1, dataset.num_rows))
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    end = split.first_row + split.n_rows
    for row in range(split.first_row, end, step):
        table: pa.Table = arrow[row - 1 : min(row + step, end) - 1]
        yield Batch(list(range(row, row + len(table))), [None] * len(table), table=table.select(wanted))
