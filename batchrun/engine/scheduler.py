"""Which tokens of which request run in the next step: admission, chunked prefill, prefix hits, preemption. No torch.

There are no phases. Each request has ``computed`` tokens that chase its known ones, and a step takes some of the
difference for as many requests as its token budget and the KV pools allow. A step may be scheduled while the one before
it is in flight. Steps run in order on one stream, so a block that is released here may be handed out at once: whatever
an earlier step still writes there is overwritten before it is read. Only publication of content waits for `settle`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

from batchrun.data.rows import TokenLogprob
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
        self.waiting: deque[Request] = deque()  # in order of their turns
        self.running: list[Request] = []  # in order of admission: the newest is preempted first
        self.counters = Counters()
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._computing: dict[bytes, Request] = {}  # content of unpublished prompt blocks -> who computes it
        self._windowed = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        self._refused: Request | None = None  # waits for room, of which no more has come since it was looked for
        self._first_turn = 0  # below those of all that wait
        self._last_turn = 0  # above them
        self._lengths: deque[int] = deque(maxlen=_LENGTH_SAMPLES)
        self._expected_output: int | None = None  # tokens; None: too few requests have finished to tell

    # ---- what the engine calls

    def add(self, request: Request) -> None:
        """Queue a request. The order of prefixes is best: the cache then serves most with the least memory."""
        self._last_turn += 1
        self._expect(request, self._likely_hit(request), self._last_turn)
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can run before a step in flight has settled."""
        rows: list[StepRow] = []
        admitted = self._admit(rows, self._continue_running(rows))
        if not rows:
            return None
        step = Step(rows, admitted)
        self.counters.steps += 1
        self.counters.computed_tokens += step.n_tokens
        return step

    def add_drafts(self, row: StepRow, count: int, drafts: Sequence[int] = ()) -> int:
        """Let a row of the step just scheduled verify drafts after its newest token, which `settle` has appended.

        At most ``count`` of them; where no blocks are free for these, those that the request's own have room for.
        Returns how many. Without ``drafts`` the draft model makes them. The request sits out until the step settles.
        """
        request = row.request
        if not row.samples or row.end != len(request.tokens):
            raise ValueError("drafts go on from tokens that are known")
        count = min(count, request.max_total - 1 - row.end)
        missing = row.end + count - len(request.blocks[0]) * self.block_size
        if missing > 0 and not self._grow(request, row.end + count):
            count -= missing
        row.n_drafts = max(0, count)
        row.drafts = drafts[: row.n_drafts]
        row.n += row.n_drafts
        request.computed += row.n_drafts
        self.counters.computed_tokens += row.n_drafts
        return row.n_drafts

    def settle(self, step: Step, output: StepOutput) -> Iterator[Request]:
        """Append what ``step`` sampled, as far as its drafts came true, and publish the blocks that it filled.

        Yields a request after each of its tokens: if the caller finishes it, those after this one are dropped.
        """
        sampled = zip(output.token_ids, output.logprobs, strict=True)
        drafts = iter(output.drafts)
        for row, scored in zip(step.rows, output.prompt_logprobs, strict=True):
            request = row.request
            live = request.finish_reason is None
            if live and scored:
                request.prompt_logprobs.extend(scored[max(0, len(request.prompt_logprobs) - row.start) :])
            if live and row.n_known >= (request.published + 1) * self.block_size:
                self._publish(row)
            if not row.samples:
                continue
            verified = _verified(list(islice(sampled, row.n_sampled)), list(islice(drafts, row.n_drafts)))
            request.pending -= 1
            if not live:
                continue  # the token after its last one
            if row.incarnation == request.incarnation:
                request.computed -= row.n_sampled - len(verified)
            for row.n_accepted, (token, logprob) in enumerate(verified):
                request.tokens.append(token)
                if logprob is not None:
                    request.logprobs.append(logprob)
                self.counters.output_tokens += 1
                yield request
                if request.finish_reason is not None:
                    break

    def finish(self, request: Request, reason: str) -> None:
        """End a request (settled tokens decide when, so the engine calls this): its blocks and slot are free again."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            if reason in ("stop", "length"):
                self._note_length(request)
            self._vacate(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
            self._withdraw(request)
        request.state = State.FINISHED
        request.finish_reason = reason

    def withdraw(self, requests: Sequence[Request]) -> None:
        """End requests that are not wanted any more, any number of them at once."""
        waiting = {id(request) for request in requests if request.state is State.WAITING}
        self.waiting = deque(request for request in self.waiting if id(request) not in waiting)
        for request in requests:
            if request.state is State.WAITING:
                self._withdraw(request)
                request.state, request.finish_reason = State.FINISHED, "abort"
            else:
                self.finish(request, "abort")

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
        self._first_turn -= 1
        self._expect(request, min(request.published, self._lookups(request)), self._first_turn)
        self._vacate(request)
        request.computed = 0
        request.published = 0
        request.state = State.WAITING
        self.waiting.appendleft(request)
        self.counters.preemptions += 1
        return True

    # ---- running requests

    def _continue_running(self, rows: list[StepRow]) -> int:
        """Rows of running requests, oldest first; returns the tokens that admissions may take.

        Each has one token of the budget, and the oldest that miss more have what is left. Where a request had to be
        preempted to make room, none is left for admissions.
        """
        spare = self.limits.max_num_batched_tokens - len(self.running)
        preempted = False
        for request in self.running:  # a preemption takes the last of them
            known = request.known
            missing = known - request.computed
            if missing <= 0 or known >= request.max_total or (request.mask is not None and request.pending):
                continue
            count = min(missing, 1 + spare)
            spare -= count - 1
            length = request.computed + count
            while length > len(request.blocks[0]) * self.block_size and not self._grow(request, length):
                self.preempt_newest()
                preempted = True
                if request.state is State.WAITING:
                    return 0
            rows.append(self._advance(request, count, known))
        return 0 if preempted else spare

    def _advance(self, request: Request, count: int, known: int) -> StepRow:
        """The row that computes the next ``count`` of a request's ``known`` tokens."""
        start = request.computed
        request.computed = start + count
        samples = start + count == known < request.max_total
        if samples:
            request.pending += 1
        if self._windowed:
            self._free_passed(request, start)
        return StepRow(request, start, count, samples, request.incarnation)

    def _grow(self, request: Request, length: int) -> bool:
        """Hold blocks for ``length`` tokens, which are more than it has blocks for; False when a pool has too few."""
        missing = -(-length // self.block_size) - len(request.blocks[0])
        if any(pool.n_free < missing for pool in self.pools):
            return False
        for held, pool in zip(request.blocks, self.pools, strict=True):
            held.extend(pool.allocate(missing))
        return True

    def _free_passed(self, request: Request, start: int) -> None:
        """Sliding-window groups give back blocks that neither the row just scheduled nor a later one sees.

        The step's rows write before they read, so a block that this row still reads must not be handed out.
        """
        for group, window in self._windowed:
            held = request.blocks[group]
            index = max(0, start - window + 1) // self.block_size - 1
            while index >= 0 and held[index] != 0:
                self.pools[group].release([held[index]])
                held[index] = 0
                index -= 1
                self._refused = None

    def _vacate(self, request: Request) -> None:
        for held, pool in zip(request.blocks, self.pools, strict=True):
            pool.release(held)
        self._release_claims(request, request.published, len(request.hashes))
        request.blocks = []
        self._slots.append(request.slot)
        request.slot = -1
        request.incarnation += 1
        self._refused = None

    # ---- admission

    def _admit(self, rows: list[StepRow], budget: int) -> list[Request]:
        """Let waiting requests run, as many as slots, blocks and ``budget`` tokens allow; adds their rows.

        One for which there are too few blocks ends admission: it keeps its place at the front, so that smaller ones
        behind it do not take what it waits for.
        """
        admitted: list[Request] = []
        passed_over: list[Request] = []
        promised: list[int] = []
        while self.waiting and self._slots and budget > 0 and len(passed_over) < _ADMISSION_LOOKAHEAD:
            if self.waiting[0] is self._refused:
                break
            request = self.waiting.popleft()
            hit = None if request.pending else self._hit_to_take(request)
            if hit is None:
                passed_over.append(request)
                continue
            promised = promised or self._promised()
            if not self._try_admit(request, hit, budget, promised):
                self._refused = request
                self.waiting.appendleft(request)
                break
            admitted.append(request)
            known = request.known
            row = self._advance(request, min(known - request.computed, budget), known)
            rows.append(row)
            budget -= row.n
        self.waiting.extendleft(reversed(passed_over))
        return admitted

    def _promised(self) -> list[int]:
        """Per pool, the blocks that running requests are expected to take on top of those that they hold."""
        return [sum(map(self._missing_blocks, self.running, repeat(index))) for index in range(len(self.pools))]

    def _try_admit(self, request: Request, hit: int, budget: int, promised: list[int]) -> bool:
        """Give the request its ``hit`` cached blocks, a slot and blocks for its first chunk, if it fits.

        ``promised`` is kept up. What running requests are expected to take is left to them.
        """
        first_chunk = min(len(request.tokens) - hit * self.block_size, budget)
        now = -(-(hit * self.block_size + first_chunk) // self.block_size) - hit
        revived = [self._hit_blocks(request, hit, index) for index in range(len(self.pools))]
        for index, (pool, blocks) in enumerate(zip(self.pools, revived, strict=True)):
            cached = [block for block in blocks if block]
            room = pool.n_free - sum(map(pool.is_free, cached))
            later = max(now, self._expected_blocks(request, index) - len(cached))
            if room < now or (self.running and room - promised[index] < later):
                return False
        for pool, blocks in zip(self.pools, revived, strict=True):
            pool.share(block for block in blocks if block)
        self._withdraw(request)
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

    def _lookups(self, request: Request) -> int:
        """Leading blocks that the prefix cache may supply: at least one token is left to compute."""
        return (len(request.tokens) - 1) // self.block_size if self._cacheable(request) else 0

    def _longest_hit(self, request: Request) -> int:
        """Leading blocks that every group can supply."""
        count = self._lookups(request)
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

    def _hit_blocks(self, request: Request, hit: int, index: int) -> array[int]:
        first = self._first_visible(self.groups[index], hit)
        pool = self.pools[index]
        found = [pool.lookup(content) for content in request.hashes[first:hit]]
        return array("i", [0] * first + [block for block in found if block is not None])

    def _publish(self, row: StepRow) -> None:
        """Offer the full blocks that a settled row completed; what its drafts complete, the row after it offers."""
        request = row.request
        if row.incarnation != request.incarnation:
            return
        first, full = request.published, row.n_known // self.block_size
        request.published = full
        if not self.limits.enable_prefix_caching:
            return
        hashes = request.block_hashes(full, self.block_size)
        for held, pool in zip(request.blocks, self.pools, strict=True):
            for index in range(first, full):
                pool.publish(held[index], hashes[index])
        self._release_claims(request, first, full)

    def _hit_to_take(self, request: Request) -> int | None:
        """Leading blocks that every group can supply, or None: others compute the next ones, so it had better wait.

        ``request.awaited`` is the last of these, so that looking again while it is in work takes no walk.
        """
        if request.awaited in self._computing:
            return None
        hit = end = self._longest_hit(request)
        while end < self._lookups(request) and request.hashes[end] in self._computing:
            end += 1
        if end == hit:
            return hit
        request.awaited = request.hashes[end - 1]
        return None

    def _claim(self, request: Request) -> None:
        """Announce every full block of known tokens that this request will compute and publish."""
        if self._cacheable(request):
            full = len(request.tokens) // self.block_size
            for content in request.block_hashes(full, self.block_size)[request.published :]:
                self._computing.setdefault(content, request)

    def _release_claims(self, request: Request, first: int, end: int) -> None:
        """The request no longer computes blocks ``first`` to ``end``: they are published, or it has stopped."""
        for content in request.hashes[first:end]:
            if self._computing.get(content) is request:
                del self._computing[content]

    # ---- remaining uses: what waiting requests will look for in the prefix cache

    def _likely_hit(self, request: Request) -> int:
        """Leading blocks that the cache is likely to have once the request's turn has come.

        The request queued before it has them too, or they are there, are being computed, or are expected by others.
        """
        count = self._lookups(request)
        hit = 0
        if self.waiting:
            before = self.waiting[-1]
            hit = min(count, self._common_blocks(before, request))
            request.hashes = before.block_hashes(hit, self.block_size)[:hit]
        while hit < count:
            content = request.block_hashes(hit + 1, self.block_size)[hit]
            if content not in self._computing and not any(pool.knows(content) for pool in self.pools):
                break
            hit += 1
        return hit

    def _common_blocks(self, one: Request, other: Request) -> int:
        """Leading full blocks of equal tokens."""
        size = self.block_size
        limit = min(len(one.tokens), len(other.tokens)) // size
        begins = range(0, limit * size, size)
        differ = (i for i in begins if one.tokens[i : i + size] != other.tokens[i : i + size])
        return next(differ, limit * size) // size

    def _expect(self, request: Request, count: int, turn: int) -> None:
        """Tell the pools that the request will look for its ``count`` leading blocks."""
        request.turn, request.expected = turn, count
        request.block_hashes(count, self.block_size)
        for pool, chain in self._expected_chains(request):
            pool.expect(chain, turn)

    def _withdraw(self, request: Request) -> None:
        """The request waits no more: the pools need not keep anything for it."""
        for pool, chain in self._expected_chains(request):
            pool.withdraw(chain, request.turn)
        request.expected = 0

    def _expected_chains(self, request: Request) -> Iterator[tuple[BlockPool, list[bytes]]]:
        """Per pool, the contents that a hit of ``request.expected`` blocks takes: of a window, what it shows."""
        for pool, group in zip(self.pools, self.groups, strict=True):
            yield pool, request.hashes[self._first_visible(group, request.expected) : request.expected]

    def check(self) -> None:
        """Raise AssertionError unless the pools' invariants hold and they expect just what waiting requests do."""
        expected: list[dict[bytes, list[int]]] = [{} for _ in self.pools]
        for request in self.waiting:
            for (_, chain), turns in zip(self._expected_chains(request), expected, strict=True):
                for content in chain:
                    turns.setdefault(content, []).append(request.turn)
        for pool, turns in zip(self.pools, expected, strict=True):
            pool.check()
            if {content: list(found) for content, found in pool.expected.items()} != turns:
                raise AssertionError("a pool expects other uses than those of waiting requests")


def _verified(
    sampled: list[tuple[int, TokenLogprob | None]], drafts: list[int]
) -> list[tuple[int, TokenLogprob | None]]:
    """The samples that follow known tokens: those up to the first that is not the draft in its place."""
    for count, ((token, _), draft) in enumerate(zip(sampled, drafts, strict=False), 1):
        if token != draft:
            return sampled[:count]
    return sampled
