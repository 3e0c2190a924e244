"""
`Scheduler("jobs.db")`: the whole durable scheduler inside a program, with no server.

Any process may open the file to enqueue, look and wait. One of them, by `with scheduler:`, runs the jobs. With a
`postgresql://` address instead of a file any number of processes do, on any number of machines, each as a host with a
capacity of its own. The store is opened on first use, so a worker process can import a module that makes its scheduler
at the top without opening it.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from msgspec.structs import replace

from penstock.core.jobs.explain import Explanation, held_by_program
from penstock.core.jobs.intent import Intent, check
from penstock.core.jobs.learning import TypeStats
from penstock.core.jobs.reasons import Reason
from penstock.core.jobs.schedules import Schedule
from penstock.core.jobs.schedules import check as check_schedule
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId
from penstock.core.jobs.worker_reasons import NoFunction, NotDispatched
from penstock.library.batches import Batch, Callback
from penstock.library.function import Arguments, JobFunction, place_of
from penstock.library.handle import JobHandle, ResultWaiter
from penstock.library.job_runner import BackgroundWork, RunningWork
from penstock.library.options import (
    MEMORY,
    JobOptions,
    LibrarySettings,
    Options,
    Seconds,
    as_host,
    location,
    make_rules,
    moment,
    span_sec,
    store_at,
)
from penstock.library.schedules import ScheduleHandle, ScheduleOptions, declare, make_schedule
from penstock.scheduler.arrays import ArrayService
from penstock.scheduler.batches import BatchService
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.job_service import JobService
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.schedules import ScheduleService
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Query, Receipt, Store
from penstock.stores.opening import is_address, shown
from penstock.stores.sqlite.wakeups import present
from penstock.work.context import JobContext

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


class Scheduler:
    """
    `workers` functions run at once, on threads, or with `kind="process"` on processes of their own. `capacity` is the sum of the
    costs that may run at once: a number, or "auto" for what the machine has to spare at the moment.

    For example:

        scheduler = penstock.Scheduler("jobs.db")

        @scheduler.job(retries=(60, 300))
        def index(path: str) -> int:
            return len(path)

        with scheduler:  # this process runs the jobs
            print(index.enqueue("/data").result())
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        workers: int | None = None,
        kind: Literal["thread", "process"] = "thread",
        addon: str = "app",
        stop_timeout: Seconds = 30,
        rules: SchedulerRules | None = None,
        **settings: Unpack[LibrarySettings],
    ) -> None:
        self.place = location(where)
        #: As it may be shown: without a password.
        self.where = shown(self.place)
        self.rules = as_host(make_rules(rules, settings), self.place)
        self._workers = _workers(workers)
        if kind not in ("thread", "process"):
            raise ValueError(f"kind is {kind!r}; it must be 'thread' or 'process'")
        if kind == "process" and self.place == MEMORY:
            raise ValueError("kind='process' needs a file: other processes cannot see jobs in memory")
        self._kind = kind
        self._stop_timeout = span_sec("stop_timeout", stop_timeout)
        self._options = JobOptions(Intent(addon_id=AddonId("app"), job_type="-")).take({"addon": addon})
        self.functions: dict[str, JobFunction[..., Any, Any]] = {}
        #: What the program's code declares; written when it starts to run jobs.
        self.declared_schedules: dict[str, Schedule] = {}
        self._lock = threading.RLock()
        self._opened: OpenScheduler | None = None
        self.steady_clock = SteadyClock()
        #: Between start and stop.
        self.work: RunningWork | None = None

    # jobs

    @overload
    def job(
        self, fn: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /
    ) -> JobFunction[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def job(self, fn: Callable[Concatenate[JobContext, P], R], /) -> JobFunction[P, R, R]: ...
    @overload
    def job(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> JobFunction[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def job(self, fn: Callable[P, R], /) -> JobFunction[P, R, R]: ...
    @overload
    def job(self, *, name: str | None = None, **options: Unpack[Options]) -> JobDecorator: ...

    def job(self, *fn: Any, name: str | None = None, **options: Any) -> Any:
        """Makes a function a job, under its own name or `name`; what the options mean is in docs/jobs.md."""
        if not fn:
            return lambda fn: self._register(fn, name, options)
        return self._register(fn[0], name, options)

    def _register(self, fn: Any, name: str | None, given: dict[str, Any]) -> JobFunction[..., Any, Any]:
        if isinstance(fn, JobFunction):
            raise TypeError(f"{fn.name} is a job already")
        if not callable(fn):
            raise TypeError(f"{fn!r} is not a function; write @scheduler.job, or @scheduler.job(cost=...)")
        name = fn.__name__ if name is None else name
        options = self._options.take(given)
        options = replace(options, like=replace(options.like, job_type=name))
        function: JobFunction[..., Any, Any] = JobFunction(self, fn, options, Arguments(fn, name))
        self.check_options(options)
        if self._kind == "process":
            place_of(fn)
        with self._lock:
            earlier = self.functions.get(name)
            if earlier is not None and _home(earlier.fn) != _home(fn):
                raise ValueError(
                    f"there is a job {name!r} already ({'.'.join(_home(earlier.fn))}); give one of them another name=..."
                )
            self.functions[name] = function
            if self.work is not None:
                self.work.wake()
        return function

    def schedule(
        self, cron: str | None = None, *, name: str | None = None, **options: Unpack[ScheduleOptions]
    ) -> ScheduleDecorator:
        """
        Declares a schedule for a job function, or makes a function a job and schedules it: `@scheduler.schedule("0 6 * * mon-fri",
        zone="Europe/Berlin")`. It is called like its function, or `name`; what the options mean is in docs/schedules.md.
        """

        def declare_for(fn: Any) -> Any:
            function = fn if isinstance(fn, JobFunction) else self._register(fn, None, {})
            self._declare(make_schedule(name or function.name, function, cron, options))
            return function

        return declare_for

    def set_schedule(
        self,
        name: str,
        function: JobFunction[..., Any, Any],
        cron: str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleHandle:
        """Adds a schedule now, or edits the one of this name: for schedules that come from data and not from code."""
        self.schedule_service.set(make_schedule(name, function, cron, options), self.principal)
        return ScheduleHandle(self, name)

    def quietest_hour_before(self, before: str, *, zone: str = "UTC") -> str:
        """
        A daily cron line in the quietest of the twelve hours before "06:00", by the recorded load, for `set_schedule`.
        BadIntent: no load is recorded yet, as with a fixed capacity.
        """
        return self.schedule_service.quietest_line(before, zone)

    def schedules(self) -> list[ScheduleHandle]:
        """All of them, by name, whichever program made them."""
        return [ScheduleHandle(self, record.name) for record in self.schedule_service.list()]

    def get_schedule(self, name: str) -> ScheduleHandle:
        """NotFound."""
        return ScheduleHandle(self, self.schedule_service.get(name).name)

    def _declare(self, schedule: Schedule) -> None:
        """What is wrong with it is raised where it is declared. Its one moment may have passed in an earlier run."""
        check_schedule(schedule, self.steady_clock(), most_units=self.rules.capacity.most, before=schedule)
        with self._lock:
            earlier = self.declared_schedules.get(schedule.name)
            if earlier is not None and earlier.intent.job_type != schedule.intent.job_type:
                raise ValueError(
                    f"there is a schedule {schedule.name!r} already; give one of them another name=..."
                )
            self.declared_schedules[schedule.name] = schedule
            if self.work is not None:
                declare(self, schedule)

    def check_options(self, options: JobOptions) -> None:
        """Refuses options that are out of bounds when the job is registered, and not at its first call."""
        now = self.steady_clock()
        sample = replace(options, unique=False).intent("null", now, (), {})
        # A moment that has passed may be meant for calls long ago; only the call itself is refused for it.
        deadline = None if sample.deadline_at is None else max(sample.deadline_at, now + 1)
        check(replace(sample, deadline_at=deadline), now, most_units=self.rules.capacity.most)

    # looking

    def get(self, job_id: str) -> JobHandle[Any]:
        """A job by its id, whichever process enqueued it."""
        handle = self._handle(job_id)
        _ = handle.job  # NotFound
        return handle

    def find(
        self,
        state: JobState | str | Iterable[JobState | str] = (),
        *,
        name: str | None = None,
        addon: str | None = None,
        limit: int = 100,
    ) -> list[JobHandle[Any]]:
        """The newest first."""
        states = [state] if isinstance(state, str) else list(state)
        unknown = [word for word in states if word not in list(JobState)]
        if unknown:
            raise ValueError(f"state is {unknown[0]!r}; it must be one of {', '.join(JobState)}")
        query = Query(
            [JobState(word) for word in states],
            None if addon is None else AddonId(addon),
            name,
            newest_first=True,
            limit=limit,
        )
        return [self._handle(job.job_id, job.intent.job_type) for job in self.store.find(query)]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        counts = dict.fromkeys(JobState, 0)
        for addon in self.store.addons():
            for state, count in addon.jobs.items():
                counts[state] += count
        return counts

    def stats(self) -> list[TypeStats]:
        """
        What was learned about each job type: how long its jobs run, what they spend, how often they come, and
        how good the predictions of their starts were.
        """
        return self.job_service.type_stats()

    def _handle(self, job_id: str, job_type: str | None = None) -> JobHandle[Any]:
        if job_type is None:
            job = self.store.job(JobId(job_id))
            job_type = "" if job is None else job.intent.job_type
        function = self.functions.get(job_type)
        return JobHandle(self, JobId(job_id), None if function is None else function.arguments)

    def explain(self, job_id: JobId) -> Explanation:
        """The service's explanation, and whether this program runs such jobs, which only the library knows."""
        explanation = self.job_service.explain(job_id)
        if explanation.state is not JobState.QUEUED:
            return explanation
        job_type = JobHandle(self, job_id).job.intent.job_type
        if not self._dispatched():
            reason: Reason = NotDispatched(self.where if is_address(self.place) else Path(self.where).name)
        elif self.work is not None and job_type not in self.functions:
            reason = NoFunction(job_type, tuple(sorted(self.functions)))
        else:
            return explanation
        return held_by_program(explanation, reason, self.store.now())

    @property
    def principal(self) -> str:
        """Under which name the trail has what this program cancels, retries and edits."""
        return f"process {os.getpid()}"

    def _dispatched(self) -> bool:
        if self.work is not None:
            return True
        if is_address(self.place):
            now = self.store.now()
            return any(host.alive(now) for host in self.store.hosts())
        return self.place != MEMORY and present(Path(self.place))

    def edit(self, job_id: JobId, given: dict[str, Any]) -> JobState:
        editable = {"priority": "priority", "not_before": "earliest_start_at", "deadline": "deadline_at"}
        unknown = [name for name in given if name not in editable]
        if unknown:
            raise TypeError(f"{unknown[0]!r} cannot be edited; {', '.join(editable)} can")
        options = self._options.take(given)
        now = self.store.now()
        fields: dict[str, Any] = {"priority": options.like.priority} if "priority" in given else {}
        for name in given.keys() - {"priority"}:
            fields[editable[name]] = None if given[name] is None else moment(name, given[name], now)
        return self.job_service.edit(job_id, by=self.principal, **fields).state

    # submitting

    def batch(
        self,
        name: str,
        *,
        on_end: Callback | None = None,
        on_failure: Callback | None = None,
        open: bool = False,  # noqa: A002 - the word that all doors use
    ) -> Batch:
        """
        A named set of jobs, submitted together at the end of its `with` block. `on_end`: a job that starts when all
        have ended; `on_failure`: one that starts when the first has failed. An `open` batch does not end before
        `batch.close()`: jobs can be added to it until then.
        """
        return Batch(self, name, on_end, on_failure, is_open=open)

    def get_batch(self, name: str) -> Batch:
        """A batch that was submitted before, here or elsewhere. NotFound: there is none of that name."""
        self.batch_service.get(name)
        return Batch(self, name, is_submitted=True)

    @property
    def addon(self) -> str:
        """The addon that jobs count for unless they say otherwise."""
        return self._options.like.addon_id

    def submit(self, intents: Sequence[Intent], wait_sec: float) -> list[Receipt]:
        return self.job_service.submit(intents, wait_sec)

    async def submit_async(self, intents: Sequence[Intent], wait_sec: float) -> list[Receipt]:
        import asyncio  # noqa: PLC0415  # slow to import, and most programs do not use it

        receipts = await asyncio.wrap_future(self.job_service.submit_soon(intents, wait_sec))
        if any(intent.deadline_at is not None for intent in intents):
            return await asyncio.to_thread(self.job_service.explainer.with_forecasts, intents, receipts)
        return receipts

    # running

    def start(self) -> Self:
        """Takes the right to run these jobs, and begins. DispatcherHeld names the process that has it already."""
        with self._lock:
            if self.work is None:
                self.work = self._begin()
                _running.add(self)
                try:
                    for schedule in self.declared_schedules.values():
                        declare(self, schedule)
                    self.work.start()
                except BaseException:  # a Ctrl-C, after jobs have begun: they go back to the queue
                    self.stop()
                    raise
        return self

    def _begin(self) -> RunningWork:
        clock = (
            None if is_address(self.place) else self.steady_clock
        )  # a server's clock is not ours to follow
        return BackgroundWork(
            self.store, self.rules, clock, self.functions, workers=self._workers, kind=self._kind
        )

    def stop(self, timeout: Seconds | None = None) -> None:
        """
        Start nothing more, ask what runs to yield, and wait for it so long (`stop_timeout` of the scheduler). What has not ended then goes
        back to the queue; what has ended is on disk. The file stays open for enqueueing and looking.
        """
        wait = self._stop_timeout if timeout is None else span_sec("timeout", timeout)
        with self._lock:
            work, self.work = self.work, None
            _running.discard(self)
            if work is not None:
                work.stop(wait)

    def close(self) -> None:
        """Stop, and close the file."""
        self.stop()
        with self._lock:
            opened, self._opened = self._opened, None
            if opened is not None:
                opened.waiter.close()
                opened.service.stop()
                opened.store.close()

    def run(self) -> None:
        """Run jobs until Ctrl-C or SIGTERM: the whole of a worker program. A second Ctrl-C does not wait for what runs."""
        stopping = threading.Event()

        def ask(*_: object) -> None:
            stopping.set()
            # Here, and not in the main thread: the second signal may come before that wakes up.
            signal.signal(signal.SIGINT, signal.default_int_handler)

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.start()
            while not stopping.wait(3_600):
                pass
            self.stop()
        except KeyboardInterrupt:
            self.stop(0)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # the file

    @property
    def _open(self) -> OpenScheduler:
        opened = self._opened
        if opened is None:
            with self._lock:
                opened = self._opened = self._opened or self._make()
        return opened

    def _make(self) -> OpenScheduler:
        store = store_at(self.place, self.steady_clock, self.rules.ordering)
        return OpenScheduler(store, SchedulerService(store, self.rules), ResultWaiter(store))

    @property
    def store(self) -> Store:
        return self._open.store

    @property
    def waiter(self) -> ResultWaiter:
        return self._open.waiter

    @property
    def job_service(self) -> JobService:
        """The one of the running half knows the machine; any other knows the file."""
        work = self.work
        return self._open.service.job_service if work is None else work.service.job_service

    @property
    def array_service(self) -> ArrayService:
        work = self.work
        return self._open.service.arrays if work is None else work.service.arrays

    @property
    def batch_service(self) -> BatchService:
        work = self.work
        return self._open.service.batches if work is None else work.service.batches

    @property
    def schedule_service(self) -> ScheduleService:
        work = self.work
        return self._open.service.schedules if work is None else work.service.schedules

    def __repr__(self) -> str:
        return f"<Scheduler {self.where}, {'running' if self.work is not None else 'not running'} here>"


class OpenScheduler(NamedTuple):
    store: Store
    service: SchedulerService  # never started: its job service is for enqueueing and reading
    waiter: ResultWaiter


class ScheduleDecorator(Protocol):
    """`@scheduler.schedule(...)`, for type checkers: a job function stays one, any other function becomes one."""

    @overload
    def __call__(self, fn: JobFunction[P, C, R], /) -> JobFunction[P, C, R]: ...  # type: ignore[overload-overlap]  # it can be called like a function, and comes first
    @overload
    def __call__(
        self, fn: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /
    ) -> JobFunction[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[JobContext, P], R], /) -> JobFunction[P, R, R]: ...
    @overload
    def __call__(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> JobFunction[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> JobFunction[P, R, R]: ...


class JobDecorator(Protocol):
    """`@scheduler.job(...)`, for type checkers."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /
    ) -> JobFunction[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[JobContext, P], R], /) -> JobFunction[P, R, R]: ...
    @overload
    def __call__(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> JobFunction[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> JobFunction[P, R, R]: ...


def _workers(workers: Any) -> int:
    if workers is None:
        return min(32, (os.cpu_count() or 1) + 4)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers is {workers!r}; it must be a whole number of at least 1")
    return workers


def _home(fn: Any) -> tuple[str, str]:
    """A module that is run and imported, or imported anew, registers the same function twice."""
    return ("" if fn.__module__ in ("__main__", "__mp_main__") else fn.__module__), fn.__qualname__


_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def _stop_all() -> None:
    """The program ends without a stop: its jobs go back to the queue now, and not as crashes when the next one starts."""
    for scheduler in list(_running):
        scheduler.stop()


# Before the interpreter waits for threads and pools; `atexit` would come after them.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]  # noqa: SLF001  # as pools/pool.py does
