"""A running engine compiles nothing, loads nothing and starts nothing: what its first steps did is all there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CHILD = """
import sys
from batchrun import Engine, SamplingParams

events = []
watched = {"import", "compile", "exec", "ctypes.dlopen", "subprocess.Popen", "os.posix_spawn", "os.exec"}
sys.addaudithook(lambda name, args: events.append((name, args)) if name in watched else None)
PARAMS = (
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=3, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, max_tokens=2, ignore_eos=True, prompt_logprobs=1),
)

def generate(engine, rows, length):
    prompts = [[(row * 7 + place) % 250 for place in range(length)] for row in range(rows)]
    for result in engine.generate(prompts, [PARAMS[row % len(PARAMS)] for row in range(rows)]):
        assert result.error is None, result.error

for dtype in sys.argv[2:]:
    bounds = dict(max_num_seqs=32, max_num_batched_tokens=128, kv_cache_memory="8MiB", num_threads=1)
    engine = Engine(sys.argv[1], dtype=dtype, **bounds)
    generate(engine, 3, 5)
    assert events or dtype != sys.argv[2], "the hook hears nothing"
    events.clear()
    for rows, length in ((1, 1), (2, 200), (7, 33), (32, 12), (5, 64)):
        generate(engine, rows, length)
    assert not events, (dtype, events)
    engine.close()
assert "torch._dynamo" not in sys.modules
"""


def test_no_shape_of_a_batch_makes_a_running_engine_compile_or_load(tiny_model: Path) -> None:
    arguments = [str(tiny_model), "float32", "bfloat16"]
    done = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
