"""batchrun's own side of a measurement: the engine in this process."""

from __future__ import annotations

import time
from typing import Any

from batchrun import __version__
from batchrun.bench.peer_worker import peak_memory
from batchrun.bench.sides import Pass
from batchrun.bench.workload import Workload
from batchrun.errors import JobError
from batchrun.job import EngineSpec, ModelSpec
from batchrun.model_files import ModelFiles


class EngineSide:
    """The engine under the options of a job.

    Importing the engine and torch is part of its loading, as a peer's libraries are part of theirs: this module imports
    neither.
    """

    def __init__(self, files: ModelFiles, model: ModelSpec, spec: EngineSpec, workload: Workload) -> None:
        self.name = f"batchrun {__version__}"
        self._workload = workload
        self._params = workload.sampling()
        options: dict[str, Any] = model.model_dump(exclude={"name_or_path"}) | spec.model_dump()
        start = time.perf_counter()
        import torch

        from batchrun.engine.engine import Engine
        from batchrun.engine.executor import thread_count, use_threads

        use_threads(thread_count(spec.num_threads))
        self.engine = Engine(files, **options)
        for _ in self.engine.generate(workload.prompts[:1], self._params[0].override({"max_tokens": 2})):
            pass  # first-use costs belong to loading
        self.load_seconds = time.perf_counter() - start
        self.threads = torch.get_num_threads()
        self.settings = {
            "dtype": model.dtype,
            "quantization": self.engine.model_spec.quantization,
            "threads": self.threads,
            "reproducible": model.reproducible,
            **self._engine_settings(),
        }

    def _engine_settings(self) -> dict[str, Any]:
        limits, pools = self.engine.limits, self.engine.scheduler.pools
        return {
            "operations": self.engine.executor.model.ops.__name__.rpartition(".")[2],
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "kv_cache_tokens": min(pool.n_usable * pool.block_size for pool in pools),
            "enable_prefix_caching": limits.enable_prefix_caching,
            "speculation": self.engine.spec.speculative_config.drafter or "off",
        }

    def run(self) -> Pass:
        engine = self.engine
        engine.reset_prefix_cache()
        before = engine.stats()
        outputs: list[tuple[int, ...]] = [()] * len(self._workload.prompts)
        start = time.perf_counter()
        for result in engine.generate(self._workload.prompts, self._params):
            if result.error is not None:
                raise JobError(f"row {result.index + 1} cannot be measured: {result.error}")
            outputs[result.index] = result.token_ids
        seconds = time.perf_counter() - start
        stats = engine.stats()
        details = {
            "steps": stats.steps - before.steps,
            "cached_prompt_tokens": stats.cached_tokens - before.cached_tokens,
            "preemptions": stats.preemptions - before.preemptions,
        }
        return Pass(seconds, outputs, peak_memory(), details)

    def close(self) -> None:
        self.engine.close()
