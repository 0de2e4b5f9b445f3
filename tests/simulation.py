"""Interleavings of workers over a simulated object store: real code, one step at a time, by a schedule that is data.

Workers run in threads, but only one of them runs at any moment: each stops before every operation on the store, every
sleep and every wait, and goes on when the schedule says so. The schedule may let time pass, crash a worker before or
after an operation has taken effect, or lose the reply to one. What a crashed worker does after that has no effect.
Time is virtual: operations take some, and the rest passes while all wait. Equal schedules give equal runs.

A *worker* is any function of a :class:`~batchrun.data.store.Store`. Threads that it starts are its own: a crash ends
them, and so does its end, as the end of a process would.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from batchrun.data import lease, patience, sink, work, workers
from batchrun.data import store as store_module
from batchrun.data.store import Store
from batchrun.data.workers import Owner

T = TypeVar("T")
Worker = Callable[[Store], None]

GO, CRASH_BEFORE, CRASH_AFTER, LOSE_REPLY = "go", "crash before", "crash after", "lose the reply to"
MOST_STEPS = 30_000
PACE = 0.05  # seconds that an operation takes

_START = 1_000_000.0  # of virtual time, seconds


class Crash(BaseException):
    """The worker was killed: nothing that it does from now on takes effect."""


class StuckError(AssertionError):
    """No task can go on, or they go on for ever."""


class Priorities:
    """Decisions at random that find rare orders: tasks have priorities, and the first able one goes on.

    At some steps the task that is first, or all of its process, becomes the last: see Burckhardt et al., "A Randomized
    Scheduler with Probabilistic Guarantees of Finding Bugs". At some it, or its process, stops for long, while time
    passes for the others, who may think that it is gone. Now and then something fails. After twice ``steps`` all get
    their turns, so that who waits for another, looking again and again, does not keep that one from going on.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        demotions: int = 60,
        stalls: int = 6,
        steps: int = 1500,
        mishaps: float = 0.005,
    ) -> None:
        self._rng = rng
        self._demotions = {rng.randrange(steps) for _ in range(demotions)}
        self._stalls = {rng.randrange(steps) for _ in range(stalls)}
        self._mishaps = mishaps
        self._fair_from = 2 * steps
        self._priorities: dict[Process | Task, float] = {}
        self._stalled: dict[Process | Task, int] = {}  # until that step
        self._step = 0

    def __call__(self, options: Sequence[Option]) -> int:
        """The place of the one that is chosen."""
        self._step += 1
        if self._rng.random() < self._mishaps:
            return self._rng.randrange(len(options))
        going = [place for place, (_, action) in enumerate(options) if action == GO]
        awake = [place for place in going if self._is_awake(options[place][0])] or going
        able = [place for place in awake if options[place][0].is_able()]
        if not able:
            return awake[0]
        if self._step > self._fair_from:
            return self._rng.choice(able)
        first = max(able, key=lambda place: (*self._priority(options[place][0]), -place))
        task = options[first][0]
        if self._step in self._demotions:
            self._priorities[self._rng.choice([task, task.process])] = -self._step
        if self._step in self._stalls:
            self._stalled[self._rng.choice([task, task.process])] = self._step + self._rng.choice([100, 300, 1000])
        return first

    def _is_awake(self, task: Task) -> bool:
        return max(self._stalled.get(task, 0), self._stalled.get(task.process, 0)) < self._step

    def _priority(self, task: Task) -> tuple[float, float]:
        of_process = self._priorities.setdefault(task.process, self._rng.random())
        return of_process, self._priorities.setdefault(task, self._rng.random())


@dataclass(eq=False)
class Process:
    """One worker and its threads."""

    name: str
    writer: str  # Store.writer
    host: int
    crashed: bool = False
    ended: bool = False  # it returned
    error: BaseException | None = None  # that it ended with, Crash aside


@dataclass(eq=False)
class Task:
    """One thread of a worker, at rest between two steps."""

    world: World
    process: Process
    run: Callable[[], None]
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    operation: str | None = None  # on the store, that it is about to do
    ready: Callable[[], bool] = lambda: True  # without an operation: whether it need not wait any longer,
    wakes: float = math.inf  # and when it stops to wait
    action: str = GO
    ended: bool = False

    def is_able(self) -> bool:
        """Whether it can go on now, without time passing."""
        return self.operation is not None or self.ready() or self.wakes <= self.world.now


Option = tuple[Task, str]  # who goes on, and how


class Schedule:
    """Decisions from a list of (steps to wait, choice), which a property-based test can draw and shrink.

    Choice 0, which is also what follows the list, lets the task go on that ran last.
    """

    def __init__(self, decisions: Iterable[tuple[int, int]] = ()) -> None:
        self._decisions = iter(decisions)
        self._next = next(self._decisions, None)
        self._waited = 0

    def __call__(self, options: Sequence[Option]) -> int:
        """The place of the one that is chosen."""
        if self._next is None or self._waited < self._next[0]:
            self._waited += 1
            return 0
        choice = self._next[1] % len(options)
        self._next, self._waited = next(self._decisions, None), 0
        return choice


class World:
    """The objects, the clock, and the processes. ``decide`` chooses among ways to go on; the first changes nothing.

    At most ``crashes`` processes crash and ``lost_replies`` replies are lost. Processes are on ``hosts`` by turns; on
    one host each knows at once which others are dead.
    """

    def __init__(
        self, decide: Callable[[Sequence[Option]], int], *, crashes: int = 0, lost_replies: int = 0, hosts: int = 1_000
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.now = _START
        self.history: list[str] = []  # what happened, for people
        self.processes: list[Process] = []
        self.check: Callable[[str, bytes | None], None] = lambda name, before: None  # after each change of an object
        self.broken: AssertionError | None = None  # what it first raised
        self._decide = decide
        self._crashes, self._lost_replies, self._hosts = crashes, lost_replies, hosts
        self._tasks: list[Task] = []
        self._tasks_by_thread: dict[int, Task] = {}
        self._turn = threading.Semaphore(0)  # released by the task that comes to rest
        self._uuids = 0

    @property
    def sees_all(self) -> bool:
        """Whether no process can be thought gone that is not."""
        return self._hosts == 1

    # ---- running

    def run(self, *workers: Worker) -> list[Process]:
        """Runs the workers until all have ended or crashed. Returns their processes, and raises nothing of theirs.

        Raises what :attr:`check` raised, and StuckError if they do not come to an end.
        """
        try:
            return self._run(workers)
        finally:
            self._end_all()

    def _run(self, workers: Sequence[Worker]) -> list[Process]:
        begun = []
        for worker in workers:
            number = len(self.processes)
            process = Process(f"w{number}", f"{number:032x}", number % self._hosts)
            self.processes.append(process)
            begun.append(process)
            self.start(process, self._main(process, worker))
        last: Task | None = None
        for _ in range(MOST_STEPS):
            self._tasks = [task for task in self._tasks if not task.ended]
            if not self._tasks:
                return begun
            last = self._step(last)
            if self.broken is not None:
                raise self.broken
        raise StuckError(f"no end after {MOST_STEPS} steps: {self.history[-40:]}")

    def _end_all(self) -> None:
        """Lets no thread outlive the run."""
        while left := [task for task in self._tasks if not task.ended]:
            left[0].process.crashed = True
            self._resume(left[0], GO)

    def calm(self) -> None:
        """From now on nobody crashes, no reply is lost, and whoever ran last goes on."""
        self._decide, self._crashes, self._lost_replies = Schedule(), 0, 0

    def store(self, process: Process | None = None) -> Store:
        """The objects as one process sees them; without one, as somebody sees them to whom nothing happens."""
        store = Store("memory://simulation")
        store.fs, store.root = _FileSystem(self), ""
        store._backend = _Objects(self)
        if process is not None:
            store.writer = process.writer
        return store

    @contextmanager
    def installed(self, *modules: types.ModuleType) -> Iterator[World]:
        """Within it time, threads, chance and the store of the output, and of ``modules``, are those of this world."""
        replacements = {
            "time": _Time(self),
            "threading": _Threading(self),
            "uuid": _Uuids(self),
            "random": random.Random(0),
            "ThreadPoolExecutor": _OneByOne,
        }
        with ExitStack() as stack:
            for module in (lease, patience, sink, store_module, work, workers, *modules):
                for name in replacements.keys() & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, name, replacements[name]))
            stack.enter_context(mock.patch.object(sink, "Store", self._store_of_worker))
            stack.enter_context(mock.patch.object(Owner, "current", self._owner))
            stack.enter_context(mock.patch.object(Owner, "state", lambda owner: self._state_of(owner)))
            yield self

    def start(self, process: Process, run: Callable[[], None]) -> Task:
        """A new thread of a process, at rest before its first step."""
        task = Task(self, process, run)

        def body() -> None:
            self._tasks_by_thread[threading.get_ident()] = task
            task.gate.acquire()
            try:
                if not process.crashed:
                    task.run()
            except Crash:
                pass
            except Exception as error:
                process.error = process.error or error
            finally:
                task.ended = True
                self._turn.release()

        self._tasks.append(task)
        threading.Thread(target=body, daemon=True).start()
        return task

    def _main(self, process: Process, worker: Worker) -> Callable[[], None]:
        def run() -> None:
            try:
                worker(self.store(process))
                process.ended = True
            finally:
                process.crashed = True  # nothing of it goes on

        return run

    def _step(self, last: Task | None) -> Task:
        """Lets one task go on until it rests again."""
        for task in self._tasks:
            if task.process.crashed:  # it has to unwind; the store refuses whatever it does meanwhile
                return self._resume(task, GO)
        able = [task for task in self._tasks if task.is_able()]
        asleep = sorted((task for task in self._tasks if self.now < task.wakes < math.inf), key=lambda task: task.wakes)
        asleep = [task for task in asleep if task not in able]
        if not able and not asleep:
            raise StuckError(f"all wait for ever: {self.history[-40:]}")
        if last in able:
            able.remove(last)
            able.insert(0, last)
        options = [(task, GO) for task in [*able, *asleep]]
        at_store = [task for task in able if task.operation is not None]
        if self._crashes:
            options += [(task, action) for task in at_store for action in (CRASH_BEFORE, CRASH_AFTER)]
        if self._lost_replies:
            options += [(task, LOSE_REPLY) for task in at_store]
        task, action = options[self._decide(options) if len(options) > 1 else 0]
        self._crashes -= action in (CRASH_BEFORE, CRASH_AFTER)
        self._lost_replies -= action == LOSE_REPLY
        if task in asleep:
            self.now = max(self.now, task.wakes)
        self._tasks.remove(task)
        self._tasks.append(task)  # who has waited longest is the first of those that are able
        self.history.append(
            f"{task.process.name} {action} {task.operation or 'waits no longer'} at {self.now - _START:g}"
        )
        return self._resume(task, action)

    def _resume(self, task: Task, action: str) -> Task:
        task.action = action
        task.gate.release()
        self._turn.acquire()
        return task

    # ---- what workers meet

    def operate(self, operation: str, effect: Callable[[], T]) -> T:
        """One operation on the store, when and as the schedule says."""
        task = self.current()
        if task is None:
            return effect()
        task.operation = operation
        action = self._rest(task)
        task.operation = None
        if action == CRASH_BEFORE:
            task.process.crashed = True
            raise Crash
        self.now += PACE
        try:
            return effect()
        finally:
            if action == CRASH_AFTER:
                task.process.crashed = True
                raise Crash
            if action == LOSE_REPLY:
                raise ConnectionResetError("the reply was lost")

    def wait(self, seconds: float, ready: Callable[[], bool] = lambda: False) -> bool:
        """Lets time pass until ``ready`` or for that long; whether it is ready."""
        task = self.current()
        if task is None:
            self.now += seconds if seconds < math.inf else 0.0
            return ready()
        task.ready, task.wakes = ready, self.now + seconds
        self._rest(task)
        task.ready, task.wakes = (lambda: True), math.inf
        return ready()

    def current(self) -> Task | None:
        """The task whose thread this is."""
        return self._tasks_by_thread.get(threading.get_ident())

    def change(self, name: str, data: bytes | None) -> None:
        """Replaces or removes an object."""
        before = self.objects.get(name)
        if data is None:
            self.objects.pop(name, None)
        else:
            self.objects[name] = data
        try:
            self.check(name, before)
        except AssertionError as error:
            self.broken = self.broken or error

    def uuid(self) -> str:
        self._uuids += 1
        return f"{self._uuids:032x}"

    def _rest(self, task: Task) -> str:
        if not task.process.crashed:
            self._turn.release()
            task.gate.acquire()
        if task.process.crashed:
            raise Crash
        return task.action

    def _process(self) -> Process:
        task = self.current()
        assert task is not None, "only workers open the output"
        return task.process

    def _store_of_worker(self, *_: Any) -> Store:
        """What the store's class gives a worker in this world."""
        return self.store(self._process())

    def _owner(self, attempt: str, ttl: float) -> Owner:
        """What :meth:`Owner.current` says in this world."""
        process = self._process()
        return Owner(attempt, f"host {process.host}", "", 0, 0.0, f"{self.now}", ttl)

    def _state_of(self, owner: Owner) -> str:
        """What :meth:`Owner.state` says in this world."""
        process = next((process for process in self.processes if process.writer == owner.attempt), None)
        task = self.current()
        here = task.process.host if task is not None else None
        if process is None or process.host != here:
            return "elsewhere"
        return "dead" if process.crashed else "alive"


class _Objects:
    """An object store's operations, each at one moment: see batchrun.data.store._Backend."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read(self, name: str) -> bytes:
        def effect() -> bytes:
            if name not in self._world.objects:
                raise FileNotFoundError(name)
            return self._world.objects[name]

        return self._world.operate(f"read {name}", effect)

    def size(self, name: str) -> int | None:
        def effect() -> int | None:
            data = self._world.objects.get(name)
            return None if data is None else len(data)

        return self._world.operate(f"size of {name}", effect)

    def names(self, directory: str) -> list[tuple[str, bool]]:
        def effect() -> list[tuple[str, bool]]:
            inside = [name.removeprefix(prefix) for name in self._world.objects if name.startswith(prefix)]
            return list(dict.fromkeys((name.partition("/")[0], "/" in name) for name in inside))

        prefix = f"{directory}/" if directory else ""
        return self._world.operate(f"list {directory}", effect)

    def sizes(self, directory: str) -> dict[str, int]:
        def effect() -> dict[str, int]:
            inside = {
                name.removeprefix(prefix): data for name, data in self._world.objects.items() if name.startswith(prefix)
            }
            return {name: len(data) for name, data in inside.items() if "/" not in name}

        prefix = f"{directory}/" if directory else ""
        return self._world.operate(f"list {directory}", effect)

    def write(self, name: str, data: bytes) -> None:
        self._world.operate(f"write {name}", lambda: self._world.change(name, data))

    def write_file(self, source: Path, name: str) -> None:
        self.write(name, source.read_bytes())

    def create(self, name: str, data: bytes) -> None:
        def effect() -> None:
            if name in self._world.objects:
                raise FileExistsError(name)
            self._world.change(name, data)

        self._world.operate(f"create {name}", effect)

    def move(self, source: str, target: str) -> None:
        def copy() -> None:
            if source not in self._world.objects:
                raise FileNotFoundError(source)
            self._world.change(target, self._world.objects[source])

        self._world.operate(f"copy {source} to {target}", copy)
        self.delete(source)

    def sweep_uploads(self, is_dead: Callable[[str, timedelta], bool]) -> None:
        pass

    def delete(self, name: str) -> None:
        self._world.operate(f"delete {name}", lambda: self._world.change(name, None))


class _FileSystem:
    """What :meth:`Store.local_copy` wants of fsspec. A file is read at one moment."""

    protocol = ("memory",)

    def __init__(self, world: World) -> None:
        self._objects = _Objects(world)

    def open(self, path: str, mode: str, **_: Any) -> _Opened:
        return _Opened(self._objects.read(path.lstrip("/")))


class _Opened(io.BytesIO):
    """A file as fsspec opens it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.details = {"size": len(data), "ETag": hashlib.sha256(data).hexdigest()}


class _Time:
    """The module ``time``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sleep(self, seconds: float) -> None:
        self._world.wait(seconds)

    def monotonic(self) -> float:
        return self._world.now

    time = perf_counter = monotonic

    def clock_gettime(self, clock: int) -> float:
        return self._world.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Threading:
    """The module ``threading``, as far as the code under test needs it; its threads are tasks."""

    def __init__(self, world: World) -> None:
        self.Thread = lambda **options: _Thread(world, **options)
        self.Event = lambda: _Event(world)
        self.Lock = lambda: _Lock(world)

    def __getattr__(self, name: str) -> Any:
        if name in {"RLock", "Condition", "Semaphore", "Barrier", "Timer"}:
            raise NotImplementedError(
                f"threading.{name} has to be simulated first: waiting for it would stop the world"
            )
        return getattr(threading, name)


class _Thread:
    def __init__(self, world: World, *, target: Callable[..., None], args: Sequence[Any] = (), **_: Any) -> None:
        self._world, self._run = world, lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        task = self._world.current()
        if task is None:
            raise NotImplementedError("only workers start threads")
        self._task = self._world.start(task.process, self._run)

    def join(self, timeout: float | None = None) -> None:
        self._world.wait(math.inf if timeout is None else timeout, lambda: not self.is_alive())

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended


class _Lock:
    def __init__(self, world: World) -> None:
        self._world, self._held = world, False

    def __enter__(self) -> None:
        while self._held:
            self._world.wait(math.inf, lambda: not self._held)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class _Event:
    def __init__(self, world: World) -> None:
        self._world, self._set = world, False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.wait(math.inf if timeout is None else timeout, self.is_set)


class _Uuids:
    """The module ``uuid``: names that are the same in every run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def uuid4(self) -> Any:
        return types.SimpleNamespace(hex=self._world.uuid())


class _OneByOne:
    """A pool whose pieces run one after the other, so that the schedule alone decides what is at once."""

    def __init__(self, max_workers: int) -> None:
        pass

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        return [function(item) for item in items]

    def __enter__(self) -> _OneByOne:
        return self

    def __exit__(self, *_: object) -> None:
        pass
