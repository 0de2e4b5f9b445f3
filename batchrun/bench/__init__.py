"""Measures throughput: prompt ids in, output ids out; batchrun alone, or pass by pass beside a peer in the same run.

Every row generates all its ``max_tokens``, so that both sides do the same work.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from batchrun.bench.breakdown import measure_breakdown
from batchrun.bench.engine_side import EngineSide
from batchrun.bench.peers import PeerError, PeerSide
from batchrun.bench.report import Measured, Report
from batchrun.bench.workload import Workload, bench_job, read_workload
from batchrun.engine.memory import resolve_device, resolve_dtype, resolve_max_model_len
from batchrun.errors import JobError
from batchrun.job import EngineSpec, ModelSpec, Quantization
from batchrun.model_files import ModelFiles, resolve

_PAIRS = 3


def run_bench(
    target: Path,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    dtype: str = "auto",
    quantization: Quantization | None = None,
    limit: int | None = None,
    threads: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    against: str | None = None,
    peer_python: str | None = None,
    pairs: int | None = None,
    breakdown: bool = False,
) -> Report:
    """Measure the rows of ``target``, a JSONL file or a job file, in ``pairs`` passes of each side.

    ``against`` names a peer and ``peer_python`` the Python that has it (default: this one); where it is not there or
    fails, the report says so and has batchrun alone. Raises JobError where there is nothing to measure.
    """
    python = peer_python or sys.executable
    if shutil.which(python) is None:
        raise JobError(f"--peer-python: {python} cannot be run")
    if top_p < 1 and temperature == 0:
        raise JobError("--top-p takes effect with a --temperature only")
    job = bench_job(target, overrides, model)
    device = resolve_device(job.engine.device)
    if device != "cpu" and (against is not None or breakdown):
        raise JobError("--against and --breakdown measure on a CPU; set engine.device to cpu")
    dtype = resolve_dtype(job.model.dtype if dtype == "auto" else dtype, device)
    quantization = quantization or job.model.quantization
    spec = job.model.model_copy(update={"dtype": dtype, "quantization": quantization})
    engine_spec = job.engine.model_copy(update={"num_threads": threads} if threads is not None else {})
    files = resolve(spec.name_or_path, spec.revision)
    longest = resolve_max_model_len(files.config, spec)
    workload = read_workload(job, files, longest, limit=limit, temperature=temperature, top_p=top_p)
    passes = pairs or (1 if against is None else _PAIRS)
    return measure(files, spec, engine_spec, workload, against, python, pairs=passes, breakdown=breakdown)


def measure(
    files: ModelFiles,
    model: ModelSpec,
    engine: EngineSpec,
    workload: Workload,
    against: str | None = None,
    peer_python: str = sys.executable,
    *,
    pairs: int,
    breakdown: bool = False,
) -> Report:
    """Load batchrun and, where one is named, the peer, and let both pass over ``workload`` by turns, ``pairs`` times.

    ``model.dtype`` is a dtype, not ``auto``. A peer that is not there or fails costs a note.
    """
    notes: list[str] = []
    with ExitStack() as stack:
        side = EngineSide(files, model, engine, workload)
        stack.callback(side.close)
        measured = [Measured(side)]
        if against is not None:
            try:
                peer = stack.enter_context(PeerSide(against, peer_python, side.threads))
                peer.load(files, model.dtype, workload)
                measured.append(Measured(peer))
            except PeerError as error:
                notes.append(str(error))
        active = list(measured)
        for _ in range(pairs):
            for each in list(active):
                try:
                    each.passes.append(each.side.run())
                except PeerError as error:
                    notes.append(str(error))
                    active.remove(each)
        shares = measure_breakdown(side) if breakdown else None
    return Report(workload, [each for each in measured if each.passes], notes, shares)
