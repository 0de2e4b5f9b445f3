"""Shows that memory does not grow with the input: ``python -m tests.bench.bounded_memory [ROWS]`` (default 2 million).

Runs a job over that many short rows, and one over 1,000, with a tiny model that answers one token, and prints the peak
resident memory of each: the runner with its model, and the process that prepares prompts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.models import save_model

_JOB = """
name: bounded
model: {{name_or_path: {model}, dtype: float32}}
input: {{path: {rows}}}
prompt: {{template: "{{{{ text }}}}"}}
sampling: {{temperature: 0, max_tokens: 1}}
output: {{path: {output}}}
engine: {{max_num_seqs: 1024, max_num_batched_tokens: 32768, kv_cache_memory: 64MiB, num_threads: 1}}
"""


def run(root: Path, model: Path, count: int) -> tuple[float, int, int]:
    """Run one job of ``count`` rows; returns seconds and the peak bytes of runner and feed."""
    rows = root / f"{count}.jsonl"
    with rows.open("w") as lines:
        for index in range(count):
            lines.write(f'{{"id": {index}, "text": "row number {index}"}}\n')
    job = root / f"{count}.yaml"
    job.write_text(_JOB.format(model=model, rows=rows, output=root / f"out-{count}"))
    started = time.monotonic()
    runner = psutil.Popen([sys.executable, "-m", "batchrun", "submit", str(job)])
    peak, child_peak = 0, 0
    while runner.poll() is None:
        try:
            peak = max(peak, runner.memory_info().rss)
            child_peak = max([child_peak, *(child.memory_info().rss for child in runner.children())])
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.2)
    if runner.returncode:
        raise subprocess.CalledProcessError(runner.returncode, "batchrun submit")
    return time.monotonic() - started, peak, child_peak


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = save_model(root / "model", layers=1, hidden_size=32, intermediate_size=16)
        for rows in (1_000, count):
            seconds, peak, child_peak = run(root, model, rows)
            print(f"{rows:>10,} rows: {seconds:,.0f} s, runner {peak / 1e6:,.0f} MB, feed {child_peak / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
