"""What a worker does from its first claim to its last: rows in, engine steps, results out.

Four things go on at once. The engine's thread (the caller's) runs steps and nothing else that takes time; a child
process reads, templates and tokenizes ahead (`batchrun.data.feed`); a thread claims work and looks at what other
workers do (`batchrun.claims`); a writer thread turns finished requests into text and makes them durable
(`batchrun.data.writer`). The caller's thread waits for storage only where results would pile up.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchrun.claims import Claims
from batchrun.data.feed import Feed, FeedError, Order, Window
from batchrun.data.rows import PartialRow, PreparedRow, RowResult, Split
from batchrun.data.sink import Output
from batchrun.data.work import FIRST_CHUNK, Claim, Work, rows_expected
from batchrun.data.writer import Writer
from batchrun.engine.request import noise_key
from batchrun.errors import EXIT_STOPPED, ROW_ERROR_KINDS, StoppedError, ThresholdError, row_error, without_credentials
from batchrun.estimate import expect
from batchrun.model_files import resolve
from batchrun.observe.progress import Progress, Snapshot
from batchrun.observe.report import RunReport
from batchrun.preflight import Preflight
from batchrun.signals import StopSignals

if TYPE_CHECKING:
    from batchrun.engine.engine import Engine
    from batchrun.engine.request import Request

_ROWS_AT_ONCE = 256  # that the engine is given when it could run more
_ROWS_IN_HAND = 2  # times the sequences that run at once: how many rows to hold before claiming more
_MAX_RESULTS = 20_000  # finished rows, and log-probabilities of theirs, that make a checkpoint due,
_MAX_LOGPROBS = 200_000  # however young the last one is
_EXPECTED_ROWS = 512  # of the first window, that the first ETA is judged by
_OBJECTS_PER_COLLECTION = 10_000
_IDLE_SECONDS = 0.2  # how long to wait for prompts, or for others, while there is nothing to do


@dataclass(slots=True)
class _OpenUnit:
    """A unit in work. It is complete when all its windows were delivered and every row of them is finished."""

    claim: Claim
    delivered: bool = False
    unfinished: int = 0
    finished: int = 0
    begun: bool = False
    next_row: int = 0  # rows below it were delivered
    ceded: set[int] = field(default_factory=set)  # rows that were not begun, and that are others' now
    held: deque[PreparedRow] = field(default_factory=deque)  # delivered, and not given to the engine

    @property
    def split(self) -> Split:
        return self.claim.split

    @property
    def complete(self) -> bool:
        return self.delivered and self.unfinished == 0

    @property
    def in_hand(self) -> int:
        """Rows that are still to be done, as far as is known."""
        if self.delivered:
            return self.unfinished
        return max(self.unfinished, self.claim.n_rows - len(self.ceded) - self.finished)

    def undelivered(self) -> list[int]:
        """Row numbers that windows to come may bring."""
        if self.delivered:
            return []
        split, claim = self.split, self.claim
        rows: Iterable[int] = range(max(self.next_row, split.first_row), split.first_row + split.n_rows)
        if claim.only is not None:
            rows = sorted(row for row in claim.only if row >= self.next_row)
        return [row for row in rows if row not in claim.skip and row not in self.ceded]


class Loop:
    """One worker's part of a job. ``stopped`` says, after :meth:`run`, whether it ended before all was done."""

    def __init__(self, ready: Preflight, output: Output, work: Work, stop: StopSignals) -> None:
        self.ready = ready
        self.job = ready.job
        self.output = output
        self.stop = stop
        self.stopped = False
        self.errors: Counter[str] = Counter()  # kind -> rows, of this run
        self._work = work
        committed, done = output.committed(), output.done_rows()
        self._todo = {split.number: split for split in work.todo()}
        self.rows_before = sum(record.rows for record in committed.values())
        self.rows_before += sum(len(rows) for split, rows in done.items() if split in self._todo)
        self._errors_before = sum(record.errors for record in committed.values())
        self._errors_before += sum(not ok for split in self._todo for ok in done.get(split, {}).values())
        self._blank = sum(  # rows of committed splits that were blank, or that `where` dropped
            rows_expected(split) - committed[split.number].rows for split in work.splits() if split.number in committed
        )
        self._claims = Claims(work)
        self._open: dict[str, _OpenUnit] = {}
        self._results: list[tuple[Claim, Request | RowResult]] = []
        self._held_logprobs = 0  # entries among these results
        self.finished_rows = 0
        self._finished_tokens = 0
        self._engine: Engine | None = None
        self._accused_at: int | None = None  # the engine's output tokens when a suspected row began to run alone
        self._settled = True

    def run(self) -> None:
        """Run every split that is not committed, until all are, or until told to stop."""
        if not self._todo:
            done = f"all {self.rows_before:,} rows were done before" if self.rows_before else "there are no rows to run"
            print(f"{self.job.name}: {done}", file=sys.stderr)
            return
        if self.rows_before:
            text = f"resuming: {self.rows_before:,} of {self._total_rows:,} rows are done"
            print(f"{self.job.name}: {text}", file=sys.stderr)
        with ExitStack() as stack:
            stack.enter_context(_rare_collections())
            feed = stack.enter_context(
                Feed(self.job.input, self.job.prompt, self.job.sampling, self.ready.model, self.ready.max_model_len)
            )
            stack.enter_context(self._claims)
            import_module("batchrun.engine.engine")  # takes seconds, in which the feed prepares the first rows
            writer = stack.enter_context(Writer(self.output, self.ready.source, self.job.output.checkpoint_seconds))
            progress = stack.enter_context(Progress(self._total_rows, rows_before=self.rows_before, name=self.job.name))
            stack.callback(self._close_engine)
            try:
                self._loop(feed, writer, progress)
            except Exception as error:
                if isinstance(error, FeedError) or not isinstance(error, StoppedError | ThresholdError):
                    with suppress(Exception):  # what went wrong may go wrong again
                        self._save(writer)
                raise

    def _loop(self, feed: Feed, writer: Writer, progress: Progress) -> None:
        while True:
            if reason := self._reason_to_stop():
                progress.write(f"{self.job.name}: stopping ({reason}): making finished and begun rows durable")
                self._save(writer)
                self.stopped = True
                return
            self._claims.check()
            self._drop_lost()
            self._take_claims(feed)
            if not self._open:
                if self._rest(writer):
                    break
            else:
                self._work_on(feed, writer, progress)
            self.output.worker.progress = self._status()
            progress.update(self._snapshot(), self._total_rows)
        progress.update(self._snapshot(), self._total_rows)

    def _reason_to_stop(self) -> str | None:
        return self.stop.reason or ("batchrun cancel" if self._claims.told_to_stop else None)

    def _work_on(self, feed: Feed, writer: Writer, progress: Progress) -> None:
        """One turn with work in hand: rows in, a step, results out."""
        busy = self._engine is not None and self._engine.has_work
        self._take_windows(feed, progress, 0.0 if busy else _IDLE_SECONDS)
        self._run_isolated(writer)
        if self._engine is not None:
            for request in self._engine.step():
                self._finish_row(request)
        if self._claims.asked:
            self._cede()
        self._check_errors(writer)
        self._close_units(writer)
        full = len(self._results) >= _MAX_RESULTS or self._held_logprobs >= _MAX_LOGPROBS
        cleared = self._accused_at is not None and self.engine.stats().output_tokens > self._accused_at
        if cleared:  # a row that has got on, once that is durable, is not what kills workers
            self._accused_at = None
        if writer.due or full or cleared:
            self._checkpoint(writer)

    def _rest(self, writer: Writer) -> bool:
        """Wait for others, or for what is being written; True once all is committed."""
        settled = writer.settle(_IDLE_SECONDS)
        if settled and self._claims.finished:
            return True
        self._claims.idle(_IDLE_SECONDS if settled else 0.0, look=settled and not self._settled)
        self._settled = settled
        return False

    # ---- what it holds

    def _take_claims(self, feed: Feed) -> None:
        """Take what was claimed, and say how much more is wanted: enough to keep the engine full, and a fair share."""
        for claim in self._claims.take():
            opened = self._open[claim.unit] = _OpenUnit(claim)
            feed.request(Order(claim.unit, claim.split, claim.only, claim.skip, claim.max_tokens))
            if claim.isolation:
                opened.next_row = claim.split.first_row
        in_hand = sum(opened.in_hand for opened in self._open.values())
        if any(opened.claim.isolation for opened in self._open.values()):
            self._claims.want(0)
            return
        most = 1
        if self._engine is not None:
            left = self._total_rows - self.rows_before - self.finished_rows - self._claims.others_rows
            most = min(_ROWS_IN_HAND * self._engine.limits.max_num_seqs, -(-left // self._claims.n_workers))
        self._claims.want(max(0, max(1, most) - in_hand))

    def _drop_lost(self) -> None:
        """Let go of units that others have taken over or finished: their results stand."""
        for claim in self._claims.lost():
            opened = self._open.pop(claim.unit, None)
            if opened is not None and self._engine is not None:
                self._engine.withdraw([r for r in self._engine.unfinished() if r.key[0] == claim.unit])

    def _cede(self) -> None:
        """Leave half of the rows that are not begun, of the unit that has most of them, to others."""
        best: tuple[_OpenUnit, list[int]] | None = None
        waiting = self._waiting()
        for unit, opened in self._open.items():
            if opened.claim.isolation:
                continue
            held = [prepared.row for prepared in opened.held]
            rows = max(opened.undelivered(), held, waiting.get(unit, []), key=len)
            if best is None or len(rows) > len(best[1]):
                best = (opened, rows)
        if best is None or not best[1]:
            return
        opened, rows = best[0], best[1][len(best[1]) // 2 :]
        self._let_go(opened, set(rows))
        self._claims.cede(opened.claim, rows)

    def _let_go(self, opened: _OpenUnit, rows: set[int]) -> None:
        """Forget these rows of a unit, which are not begun."""
        opened.ceded |= rows
        held, opened.held = opened.held, deque(prepared for prepared in opened.held if prepared.row not in rows)
        opened.unfinished -= len(held) - len(opened.held)
        if self._engine is not None:
            keys = {(opened.claim.unit, row) for row in rows}
            requests = [request for request in self._engine.waiting if request.key in keys]
            self._engine.withdraw(requests)
            opened.unfinished -= len(requests)

    def _waiting(self) -> dict[str, list[int]]:
        """Unit -> rows that wait in the engine, beyond those for which there is room, and have generated nothing."""
        found: dict[str, list[int]] = {}
        if self._engine is not None:
            room = self._engine.limits.max_num_seqs - self._engine.stats().running
            for request in itertools.islice(self._engine.waiting, max(0, room), None):
                if not request.n_output:
                    found.setdefault(request.key[0], []).append(request.key[1])
        return found

    # ---- rows in

    def _take_windows(self, feed: Feed, progress: Progress, timeout: float) -> None:
        """Give the engine rows while it has fewer than it could run."""
        while self._engine is None or self._engine.hungry:
            if self._begin_rows():
                continue
            window = feed.poll(timeout)
            if window is None:
                return
            begins = self._engine is None
            self._take(window)
            if begins and self._begin_rows():
                self._expect(window, self.engine, progress)
            timeout = 0.0

    def _begin_rows(self) -> bool:
        """Give the engine some of the rows that were delivered first; False if there are none."""
        for opened in self._open.values():
            if opened.held and opened.claim.isolation is None:
                if opened.claim.lease.deaths and not opened.begun:
                    self._work.suspect(opened.claim, [])
                opened.begun = True
                for _ in range(min(_ROWS_AT_ONCE, len(opened.held))):
                    self._add(opened, opened.held.popleft())
                return True
        return False

    def _expect(self, window: Window, engine: Engine, progress: Progress) -> None:
        """Let the first ETA be that of rows like the first window's."""
        rows = window.rows[:_EXPECTED_ROWS]
        left = self._total_rows - self.rows_before
        if expected := expect(self.ready, rows, left, engine.limits, engine.step_times):
            progress.expect(*expected)

    def _take(self, window: Window) -> None:
        opened = self._open.get(window.name)
        if opened is None:
            return  # lost meanwhile
        opened.delivered = window.last
        rows = [prepared for prepared in window.rows if prepared.row not in opened.ceded]
        opened.next_row = max([opened.next_row, *(prepared.row + 1 for prepared in window.rows)])
        opened.unfinished += len(rows)
        for prepared in rows:
            if prepared.error is not None:
                self._finish_row(RowResult(opened.split.number, prepared.row, error=prepared.error), opened)
            else:
                opened.held.append(prepared)

    def _run_isolated(self, writer: Writer) -> None:
        """Begin the next rows of an isolated unit when nothing else runs, having put on record which these are."""
        for opened in self._open.values():
            isolation = opened.claim.isolation
            if isolation is None or not opened.delivered or not opened.held or self.engine.has_work:
                continue
            for prepared in opened.held:
                if prepared.row in isolation.guilty:
                    error = row_error("worker_died", "the process died each time it ran this row")
                    self._finish_row(RowResult(opened.split.number, prepared.row, error=error), opened)
            held = [prepared for prepared in opened.held if prepared.row not in isolation.guilty]
            held.sort(key=lambda prepared: prepared.row not in isolation.suspects)
            suspects = sum(prepared.row in isolation.suspects for prepared in held)
            chunk = held[: min(isolation.chunk, suspects) if suspects else FIRST_CHUNK]
            opened.held = deque(held[len(chunk) :])
            self._checkpoint(writer)
            writer.drain()  # what is finished is durable when one of these kills this process
            self._work.suspect(opened.claim, [prepared.row for prepared in chunk])
            self._accused_at = self.engine.stats().output_tokens if len(chunk) == 1 else None
            for prepared in chunk:
                self._add(opened, prepared)

    def _add(self, opened: _OpenUnit, prepared: PreparedRow) -> None:
        engine, params = self.engine, prepared.params
        assert params is not None
        partial = opened.claim.partials.pop(prepared.row, None)
        try:
            request = engine.request(
                (opened.claim.unit, prepared.row),
                prepared.token_ids,
                params,
                self._noise_key(opened.split, prepared),
                partial.token_ids if partial else (),
            )
        except ValueError as error:
            failed = row_error("engine_error", str(error))
            self._finish_row(RowResult(opened.split.number, prepared.row, error=failed), opened)
            return
        if partial is not None:
            request.logprobs = list(partial.logprobs or ())
            request.prompt_logprobs = list((partial.prompt_logprobs or ())[1:])
        engine.add(request)

    def _noise_key(self, split: Split, prepared: PreparedRow) -> int:
        assert prepared.params is not None
        seed = prepared.params.seed
        if seed is None:
            return int.from_bytes(os.urandom(8), "little")
        return noise_key("seed", seed) if prepared.own_seed else noise_key(seed, split.file.key, prepared.row, 0)

    @property
    def engine(self) -> Engine:
        """The engine, loaded when the first row needs it."""
        if self._engine is None:
            from batchrun.engine.engine import Engine

            spec = self.job.model
            files = resolve(spec.name_or_path, spec.revision)
            if files.revision != self.ready.model.revision:
                raise StoppedError(f"{files.reference} changed while the job started; run the same command again")
            options = spec.model_dump(exclude={"name_or_path"}) | self.job.engine.model_dump()
            self._engine = Engine(files, tokenizer=self.ready.tokenizer, **options)
        return self._engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()

    # ---- results out

    def _finish_row(self, result: Request | RowResult, opened: _OpenUnit | None = None) -> None:
        """Take note of a finished row; ``opened`` is its unit, if ``result`` is no request, which tells."""
        if not isinstance(result, RowResult):
            opened, row = self._open[result.key[0]], result.key[1]
            self._finished_tokens += len(result.tokens) - result.cached
            if result.error is not None:
                result = RowResult(opened.split.number, row, error=row_error("engine_error", result.error))
        assert opened is not None
        if isinstance(result, RowResult):
            kind = (result.error or "").partition(":")[0]
            self.errors[kind if kind in ROW_ERROR_KINDS else "other"] += 1
        else:
            self._held_logprobs += len(result.logprobs) + len(result.prompt_logprobs)
        opened.unfinished -= 1
        opened.finished += 1
        self.finished_rows += 1
        self._results.append((opened.claim, result))

    def _close_units(self, writer: Writer) -> None:
        """Hand complete units to the writer: their splits are committed, unless rows of them are others' still."""
        complete = [o for o in self._open.values() if o.complete and not self._claims.is_ceding(o.claim)]
        if not complete:
            return
        self._checkpoint(writer)
        for opened in complete:
            del self._open[opened.claim.unit]
            self._claims.drop(opened.claim)
            writer.commit(opened.split)
            if opened.split.error is not None and opened.claim.only is None:
                self.finished_rows += 1  # the part tells of the rest of a damaged file as one more row
                self.errors["unreadable_file"] += 1

    def _checkpoint(self, writer: Writer) -> None:
        results, self._results, self._held_logprobs = self._results, [], 0
        engine = self._engine
        unfinished = engine.unfinished() if engine is not None else []
        partials = [self._partial(request) for request in unfinished if request.n_output]
        # Rows that an earlier attempt began and this one has not reached stay known by that attempt's snapshot.
        writer.checkpoint((_row_result(claim, result, engine) for claim, result in results), partials)

    def _partial(self, request: Request) -> PartialRow:
        from batchrun.engine.engine import prompt_logprobs

        unit, row = request.key
        split = self._open[unit].split.number
        return PartialRow(split, row, request.output_ids, list(request.logprobs) or None, prompt_logprobs(request))

    def _check_errors(self, writer: Writer) -> None:
        """End the run where its first error has to: good rows become durable, so that only bad ones are run again."""
        if not self.errors or self.job.errors.on_error == "record":
            return
        failed = next(((claim, r) for claim, r in self._results if isinstance(r, RowResult)), None)
        if failed is None:
            return
        self._results = [(claim, result) for claim, result in self._results if not isinstance(result, RowResult)]
        self._checkpoint(writer)
        claim, result = failed
        raise ThresholdError(f"{claim.split.file.key}: row {result.row}: {result.error} (errors.on_error is fail)")

    def _save(self, writer: Writer) -> None:
        """Settle the step in flight and make everything durable that is known."""
        if self._engine is not None:
            for request in self._engine.drain():
                self._finish_row(request)
        self._checkpoint(writer)

    # ---- what it says of itself

    @property
    def _total_rows(self) -> int:
        return self._claims.total_rows - self._blank

    def _snapshot(self) -> Snapshot:
        others = self._claims.others_rows
        if self._claims.finished:  # more exactly than what they last said of themselves
            others = max(0, self._total_rows - self.rows_before - self.finished_rows)
        now = Snapshot(rows=self.finished_rows, row_errors=self.errors.total(), others=others)
        if self._engine is None:
            return now
        stats = self._engine.stats()
        return replace(
            now,
            prompt_tokens=stats.admitted_tokens - stats.cached_tokens,
            cached_tokens=stats.cached_tokens,
            completion_tokens=stats.output_tokens,
            finished_tokens=self._finished_tokens,
            running=stats.running,
            waiting=stats.waiting,
            kv_use=stats.kv_used,
            speculation=self._engine.speculation_stats(),
        )

    def _status(self) -> dict[str, Any]:
        now = self._snapshot()
        return {
            "finished": now.rows,
            "rows": self.rows_before + now.rows + now.others,
            "of": self._total_rows,
            "errors": self._errors_before + now.row_errors,
            "prompt_tokens": now.prompt_tokens,
            "output_tokens": now.completion_tokens,
            "running": now.running,
            "waiting": now.waiting,
            "tokens_per_forward": None if now.speculation is None else now.speculation.tokens_per_forward,
        }

    def describe_steps(self) -> dict[str, int]:
        """The bounds of the engine's steps, for the manifest; none where this worker ran no row."""
        if self._engine is None:
            return {}
        limits = self._engine.limits
        return {"max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens}

    def report(self, seconds: float) -> RunReport:
        now = self._snapshot()
        return RunReport(
            name=self.job.name,
            output=without_credentials(self.job.output.path),
            exit_code=EXIT_STOPPED,
            total_rows=self._total_rows,
            ok_rows=self.rows_before - self._errors_before + now.rows - now.row_errors,
            errors=all_errors(self.errors, self._errors_before + now.row_errors),
            rows_before=self.rows_before,
            rows_by_others=now.others,
            prompt_tokens=now.prompt_tokens,
            cached_tokens=now.cached_tokens,
            completion_tokens=now.completion_tokens,
            seconds=seconds,
            speculation=now.speculation,
        )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have Python's garbage collector look less often at what a run holds: thousands of lists of token ids."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def all_errors(of_this_run: Mapping[str, int], total: int) -> dict[str, int]:
    """Errors by kind; those of other runs and workers, whose kinds nobody counts, as one."""
    errors = dict(of_this_run)
    if others := total - sum(errors.values()):
        errors["in other runs"] = others
    return errors


def _row_result(claim: Claim, result: Request | RowResult, engine: Engine | None) -> RowResult:
    """What the output stores of a finished request; its text is made here, off the engine's thread."""
    if isinstance(result, RowResult):
        result.rerun_max_tokens = claim.max_tokens
        return result
    from batchrun.engine.engine import prompt_logprobs

    assert engine is not None
    return RowResult(
        split=claim.split.number,
        row=result.key[1],
        text=engine.text(result),
        finish_reason=result.finish_reason,
        prompt_tokens=result.n_prompt,
        completion_tokens=result.n_output,
        logprobs=result.logprobs if result.params.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs(result),
        rerun_max_tokens=claim.max_tokens,
    )
