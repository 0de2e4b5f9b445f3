"""Which tokens of which request run in the next step: admission, chunked prefill, prefix hits, preemption. No torch.

There are no phases. Each request has ``computed`` tokens that chase its known ones, and a step takes some of the
difference for as many requests as its token budget and the KV pools allow. A step may be scheduled while the one before
it is in flight. Steps run in order on one stream, so a block that is released here may be handed out at once: whatever
an earlier step still writes there is overwritten before it is read. Only publication of content waits for `settle`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import repeat

from batchrun.engine.blocks import BlockPool
from batchrun.engine.request import Request, State, Step, StepOutput, StepRow

_ADMISSION_LOOKAHEAD = 256  # waiting requests looked at in one step, where those before wait for a shared prefix
_LENGTH_SAMPLES = 512  # finished outputs that the expected output length is drawn from
_LENGTH_QUANTILE = 0.9


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV is kept alike. ``window`` is the number of positions a query sees, itself included; None: all."""

    window: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # running requests
    max_num_batched_tokens: int  # tokens in a step: at least max_num_seqs, so that every running request gets one
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made; tokens count each time they are computed."""

    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0  # supplied by the prefix cache
    admitted_tokens: int = 0  # asked for at admissions
    output_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    def __init__(self, groups: list[KVGroup], pools: list[BlockPool], limits: Limits) -> None:
        self.groups = groups
        self.pools = pools
        self.limits = limits
        self.block_size = pools[0].block_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission: the newest is preempted first
        self.counters = Counters()
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._computing: dict[bytes, Request] = {}  # first unpublished prompt block -> who computes it
        self._lengths: deque[int] = deque(maxlen=_LENGTH_SAMPLES)
        self._expected_output: int | None = None  # tokens; None: too few requests have finished to tell

    # ---- what the engine calls

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can run before a step in flight has settled."""
        rows: list[StepRow] = []
        preempted = self._continue_running(rows)
        admitted = [] if preempted else self._admit(rows)
        if not rows:
            return None
        self.counters.steps += 1
        self.counters.computed_tokens += sum(row.n for row in rows)
        return Step(rows, admitted)

    def settle(self, step: Step, output: StepOutput) -> list[Request]:
        """Append what ``step`` sampled and publish the blocks that it filled; returns the requests that sampled."""
        sampled = []
        position = 0
        for row, scored in zip(step.rows, output.prompt_logprobs, strict=True):
            request = row.request
            if request.state is not State.FINISHED:
                request.prompt_logprobs.extend(scored[max(0, len(request.prompt_logprobs) - row.start) :])
                self._publish(row)
            if not row.samples:
                continue
            token, logprob = output.token_ids[position], output.logprobs[position]
            position += 1
            request.pending -= 1
            if request.state is State.FINISHED:
                continue  # the token after its last one
            request.tokens.append(token)
            self.counters.output_tokens += 1
            if logprob is not None:
                request.logprobs.append(logprob)
            sampled.append(request)
        return sampled

    def finish(self, request: Request, reason: str) -> None:
        """End a request (settled tokens decide when, so the engine calls this): its blocks and slot are free again."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            if reason in ("stop", "length"):
                self._note_length(request)
            self._vacate(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        request.state = State.FINISHED
        request.finish_reason = reason

    def _note_length(self, request: Request) -> None:
        if request.params.ignore_eos:
            return
        self._lengths.append(request.n_output)
        if len(self._lengths) * 8 >= _LENGTH_SAMPLES:
            self._expected_output = sorted(self._lengths)[int(_LENGTH_QUANTILE * (len(self._lengths) - 1))]

    def preempt_newest(self) -> bool:
        """Take the newest running request's blocks; it will be computed anew. False when nothing runs."""
        if not self.running:
            return False
        request = self.running.pop()
        self._vacate(request)
        request.computed = 0
        request.published = 0
        request.state = State.WAITING
        self.waiting.appendleft(request)
        self.counters.preemptions += 1
        return True

    # ---- running requests

    def _continue_running(self, rows: list[StepRow]) -> bool:
        """Rows of running requests, oldest first; True when one had to be preempted to make room."""
        decodes = sum(1 for r in self.running if r.known - r.computed == 1 and not r.exhausted)
        prefill_budget = self.limits.max_num_batched_tokens - decodes
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            missing = request.known - request.computed
            count = missing if missing <= 1 else min(missing, prefill_budget)
            if count <= 0 or request.exhausted:
                continue
            while not self._grow(request, request.computed + count):
                self.preempt_newest()
                preempted = True
                if request.state is State.WAITING:
                    return True
            if missing > 1:
                prefill_budget -= count
            rows.append(self._advance(request, count))
        return preempted

    def _advance(self, request: Request, count: int) -> StepRow:
        start = request.computed
        request.computed += count
        samples = request.computed == request.known and not request.exhausted
        if samples:
            request.pending += 1
        self._free_passed(request, start)
        return StepRow(request, start, count, samples, request.incarnation)

    def _grow(self, request: Request, length: int) -> bool:
        """Hold blocks for ``length`` tokens; False when a pool has too few."""
        missing = -(-length // self.block_size) - len(request.blocks[0])
        if missing <= 0:
            return True
        if any(pool.n_free < missing for pool in self.pools):
            return False
        for held, pool in zip(request.blocks, self.pools, strict=True):
            held.extend(pool.allocate(missing))
        return True

    def _free_passed(self, request: Request, start: int) -> None:
        """Sliding-window groups give back blocks that neither the row just scheduled nor a later one sees.

        The step's rows write before they read, so a block that this row still reads must not be handed out.
        """
        for held, pool, group in zip(request.blocks, self.pools, self.groups, strict=True):
            if group.window is None:
                continue
            index = max(0, start - group.window + 1) // self.block_size - 1
            while index >= 0 and held[index] != 0:
                pool.release([held[index]])
                held[index] = 0
                index -= 1

    def _vacate(self, request: Request) -> None:
        for held, pool in zip(request.blocks, self.pools, strict=True):
            pool.release(held)
        request.blocks = []
        self._slots.append(request.slot)
        request.slot = -1
        request.incarnation += 1
        self._release_claim(request)

    # ---- admission

    def _admit(self, rows: list[StepRow]) -> list[Request]:
        admitted: list[Request] = []
        if not self.waiting or not self._slots:
            return admitted
        budget = self.limits.max_num_batched_tokens - sum(row.n for row in rows)
        promised = [sum(map(self._missing_blocks, self.running, repeat(index))) for index in range(len(self.pools))]
        passed_over: list[Request] = []
        while self.waiting and self._slots and budget > 0 and len(passed_over) < _ADMISSION_LOOKAHEAD:
            request = self.waiting.popleft()
            if request.pending or self._prefix_in_progress(request):
                passed_over.append(request)
                continue
            if not self._try_admit(request, budget, promised, alone=not self.running):
                passed_over.append(request)
                break
            admitted.append(request)
            row = self._advance(request, min(request.known - request.computed, budget))
            rows.append(row)
            budget -= row.n
        self.waiting.extendleft(reversed(passed_over))
        return admitted

    def _try_admit(self, request: Request, budget: int, promised: list[int], *, alone: bool) -> bool:
        """Give the request cached blocks, a slot and blocks for its first chunk, if it fits.

        ``promised`` counts, per pool, the blocks that running requests are expected to take later; it is kept up.
        """
        hit = self._longest_hit(request)
        first_chunk = min(len(request.tokens) - hit * self.block_size, budget)
        now = -(-(hit * self.block_size + first_chunk) // self.block_size) - hit
        revived = [self._hit_blocks(request, hit, index) for index in range(len(self.pools))]
        for index, (pool, blocks) in enumerate(zip(self.pools, revived, strict=True)):
            held = [block for block in blocks if block]
            room = pool.n_free - sum(map(pool.is_free, held))
            later = max(now, self._expected_blocks(request, index) - len(held))
            if room < now or (not alone and room - promised[index] < later):
                return False
        for pool, blocks in zip(self.pools, revived, strict=True):
            pool.share(block for block in blocks if block)
        request.blocks = revived
        for held, pool in zip(request.blocks, self.pools, strict=True):
            held.extend(pool.allocate(now))
        request.computed = request.cached = hit * self.block_size
        request.published = hit
        request.slot = self._slots.pop()
        request.state = State.RUNNING
        self.running.append(request)
        for index in range(len(self.pools)):
            promised[index] += self._missing_blocks(request, index)
        self.counters.admitted_tokens += len(request.tokens)
        self.counters.cached_tokens += request.cached
        self._claim(request)
        return True

    def _missing_blocks(self, request: Request, index: int) -> int:
        """Blocks of a pool that a running request is expected to take on top of those that it holds."""
        held = request.blocks[index]
        count = len(held) if self.groups[index].window is None else sum(map(bool, held))
        return max(0, self._expected_blocks(request, index) - count)

    def _expected_blocks(self, request: Request, index: int) -> int:
        """Blocks of a pool that a request is expected to hold at its end, or at most while a window slides."""
        limit = request.max_total
        if self._expected_output is not None and not request.params.ignore_eos:
            limit = min(limit, max(request.n_prompt + self._expected_output, request.known + 1))
        window = self.groups[index].window
        if window is not None:
            limit = min(limit, window + self.limits.max_num_batched_tokens + self.block_size)
        return -(-limit // self.block_size)

    # ---- prefix cache

    def _cacheable(self, request: Request) -> bool:
        # Scored prompt positions must be computed, so a request that scores its prompt takes no hit.
        return self.limits.enable_prefix_caching and request.params.prompt_logprobs is None

    def _longest_hit(self, request: Request) -> int:
        """Leading blocks that every group can supply. At least one token is left to compute."""
        if not self._cacheable(request):
            return 0
        count = (len(request.tokens) - 1) // self.block_size
        hashes = request.block_hashes(count, self.block_size)
        while True:
            before = count
            for pool, group in zip(self.pools, self.groups, strict=True):
                count = self._group_hit(pool, group, hashes, count)
            if count == before:
                return count

    def _group_hit(self, pool: BlockPool, group: KVGroup, hashes: list[bytes], count: int) -> int:
        if group.window is None:
            for index in range(count):
                if pool.lookup(hashes[index]) is None:
                    return index
            return count
        while count > 0:
            needed = range(self._first_visible(group, count), count)
            missing = [index for index in needed if pool.lookup(hashes[index]) is None]
            if not missing:
                return count
            count = missing[-1]
        return 0

    def _first_visible(self, group: KVGroup, n_blocks: int) -> int:
        """The first block that a query right after ``n_blocks`` blocks sees."""
        if group.window is None:
            return 0
        return max(0, n_blocks * self.block_size - group.window + 1) // self.block_size

    def _hit_blocks(self, request: Request, hit: int, index: int) -> list[int]:
        first = self._first_visible(self.groups[index], hit)
        pool = self.pools[index]
        found = [pool.lookup(content) for content in request.hashes[first:hit]]
        return [0] * first + [block for block in found if block is not None]

    def _publish(self, row: StepRow) -> None:
        """Offer the full blocks that a settled row completed. Every token in them is known by now."""
        request = row.request
        if row.incarnation != request.incarnation or not self.limits.enable_prefix_caching:
            return
        full = min(row.start + row.n, len(request.tokens)) // self.block_size
        if full <= request.published:
            return
        hashes = request.block_hashes(full, self.block_size)
        for held, pool in zip(request.blocks, self.pools, strict=True):
            for index in range(request.published, full):
                pool.publish(held[index], hashes[index])
        request.published = full
        self._release_claim(request)
        self._claim(request)

    def _prefix_in_progress(self, request: Request) -> bool:
        """Its next missing block is being computed by another request: better wait than compute it twice."""
        if not self._cacheable(request):
            return False
        hit = self._longest_hit(request)
        if (hit + 1) * self.block_size >= len(request.tokens):
            return False
        return request.block_hashes(hit + 1, self.block_size)[hit] in self._computing

    def _claim(self, request: Request) -> None:
        """Announce every full block of known tokens that this request will compute and publish."""
        if not self._cacheable(request):
            return
        full = len(request.tokens) // self.block_size
        for content in request.block_hashes(full, self.block_size)[request.published :]:
            self._computing.setdefault(content, request)

    def _release_claim(self, request: Request) -> None:
        for content in request.hashes:
            if self._computing.get(content) is request:
                del self._computing[content]
