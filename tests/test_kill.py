"""`kill -9` at random moments: every row comes out once, its bytes are those of a run that nobody killed, and what was
decoded twice is no more than a checkpoint's worth per kill.

How tokens are counted. Each run is `batchrun submit` with one addition: it logs when each step ended and how many
tokens its engine had decoded by then, and when each write to the output began and ended; the log outlives it. What is
durable is read from the output itself: tokens of committed parts, of segments, and of unfinished rows. What a kill lost
is what was durable before the run, plus what the run decoded, less what is durable after. It may not be more than the
run decoded within its last ``checkpoint_seconds`` and the step before those, steps being the grain in which an engine
stops to look. A fifth of the interval is the storage's: where a busy machine made a write of this run take longer, the
excess counts too. A step in flight counts for nobody.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchrun.data.records import SEGMENTS
from batchrun.data.view import OutputView
from batchrun.observe.status import read_status
from tests.jobs import output_rows, write_job
from tests.outputs import parts_of
from tests.runs import Run

KILLS_AT_START = 5  # before the first step
KILLS_AT_WORK = 15
CHECKPOINT_SECONDS = 0.5


def durable_tokens(out: Path) -> int:
    view = OutputView.at(str(out))
    if view is None:
        return 0
    committed = view.committed()
    tokens = sum(record.completion_tokens for record in committed.values())
    done: set[tuple[int, int]] = set()
    for path in (out / SEGMENTS).glob("*.parquet"):
        split, table = int(path.name.partition("-")[0]), pq.read_table(path)
        if split not in committed:
            rows = {(split, row) for row in table["row"].to_pylist()}
            assert not rows & done, "a finished row was run again"
            done |= rows
            tokens += pc.sum(table["completion_tokens"]).as_py() or 0
    return tokens + sum(len(begun.token_ids) for place, begun in view.partials().items() if place not in done)


def make_rows() -> list[dict[str, Any]]:
    lengths = random.Random(1)
    rows = [{"id": i, "text": f"row {i}", "params": {"max_tokens": lengths.randint(20, 300)}} for i in range(60)]
    rows[17]["text"] = None
    return rows


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path: Path, tiny_model: Path) -> None:
    rows = make_rows()
    sections: dict[str, Any] = {
        "model": {"reproducible": True},
        "input": {"split_rows": 13},
        "sampling": {"temperature": 0.8, "ignore_eos": True, "logprobs": 1, "from_column": "params"},
        "output": {"checkpoint_seconds": CHECKPOINT_SECONDS},
        "engine": {"max_num_seqs": 16, "num_threads": 1},
    }
    total = sum(row["params"]["max_tokens"] for row in rows if row["text"])
    (tmp_path / "whole").mkdir()
    with Run(write_job(tmp_path / "whole", tiny_model, rows, **sections), tmp_path / "log") as whole:
        assert whole.wait() == 3
    assert whole.decoded() == total
    began, first = (at for _, at, _ in whole.notes("begin", "step")[:2])

    job = write_job(tmp_path, tiny_model, rows, **sections)
    chance = random.Random(2)
    moments = ["work"] * KILLS_AT_WORK + ["start"] * KILLS_AT_START
    chance.shuffle(moments)
    durable = lost = decoded = 0
    for number, moment in enumerate(moments):  # of work done rather than of the clock: machines differ in speed
        with Run(job, tmp_path / f"log-{number}") as run:
            if moment == "start":
                time.sleep(chance.uniform(0, first - began))
            else:
                tokens = chance.uniform(0, total / KILLS_AT_WORK)
                while run.decoded() <= tokens and run.process.is_alive():
                    time.sleep(0.005)
            killed = run.kill()
        before, durable = durable, durable_tokens(tmp_path / "out")
        again = before + run.decoded() - durable
        assert 0 <= again <= run.may_lose(killed, CHECKPOINT_SECONDS)
        decoded, lost = decoded + run.decoded(), lost + again

    with Run(job, tmp_path / "log-last") as last:
        assert last.wait() == 3
    assert decoded + last.decoded() - lost == total
    assert read_status(str(tmp_path / "out")).workers == []
    assert [row["id"] for row in output_rows(tmp_path)] == [row["id"] for row in rows]
    assert parts_of(tmp_path) == parts_of(tmp_path / "whole")
