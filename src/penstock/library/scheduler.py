"""
`Scheduler("jobs.db")`: the whole durable scheduler inside a program, without a server.

Any process may open the file to enqueue jobs, read them and wait for them. One process runs the jobs (`with
scheduler:`). With a `postgresql://` address instead of a file any number of processes do, on any number of
machines; each is a host with a capacity of its own. The store is opened on first use, so a worker process can
import a module that makes a scheduler and does not open the store.
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
from penstock.library.function import Arguments, JobFunction, import_path_of
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
from penstock.library.ways_out import with_calls
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
    A durable scheduler whose jobs are in the file, or database, `where`.

    It runs `workers` functions at once: on threads, or with `kind="process"` in processes of their own.
    `capacity` is the sum of the costs of jobs that may run at once: a number, or "auto" for what the machine
    can spare.

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
        self.location = location(where)
        #: The file or address without a password, for messages.
        self.where = shown(self.location)
        self.rules = as_host(make_rules(rules, settings), self.location)
        self._workers = _workers(workers)
        if kind not in ("thread", "process"):
            raise ValueError(f"kind is {kind!r}; it must be 'thread' or 'process'")
        if kind == "process" and self.location == MEMORY:
            raise ValueError("kind='process' needs a file: other processes cannot see jobs in memory")
        self._kind = kind
        self._stop_timeout = span_sec("stop_timeout", stop_timeout)
        self._options = JobOptions(Intent(addon_id=AddonId("app"), job_type="-")).take({"addon": addon})
        self.functions: dict[str, JobFunction[..., Any, Any]] = {}
        #: The schedules that the code declares. They are written when this process starts to run jobs.
        self.declared_schedules: dict[str, Schedule] = {}
        self._lock = threading.RLock()
        self._opened: OpenScheduler | None = None
        self.steady_clock = SteadyClock()
        #: What runs between start and stop; None before and after.
        self.work: RunningWork | None = None
        _schedulers.add(self)

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
        """Make a function a job, under its own name or `name`. docs/jobs.md describes the options."""
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
        options = replace(options, template=replace(options.template, job_type=name))
        function: JobFunction[..., Any, Any] = JobFunction(self, fn, options, Arguments(fn, name))
        self.check_options(options)
        if self._kind == "process":
            import_path_of(fn)
        with self._lock:
            earlier = self.functions.get(name)
            if earlier is not None and _identity(earlier.fn) != _identity(fn):
                raise ValueError(
                    f"there is a job {name!r} already ({'.'.join(_identity(earlier.fn))}); give one of them another name=..."
                )
            self.functions[name] = function
            if self.work is not None:
                self.work.wake()
        return function

    def schedule(
        self, cron: str | None = None, *, name: str | None = None, **options: Unpack[ScheduleOptions]
    ) -> ScheduleDecorator:
        """
        Declare a schedule for a job function; any other function becomes a job first. For example
        `@scheduler.schedule("0 6 * * mon-fri", zone="Europe/Berlin")`. The schedule has the function's name,
        or `name`. docs/schedules.md describes the options.
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
        """
        Add a schedule now, or edit the one of this name: for schedules that come from data and not from code.
        """
        self.schedule_service.set(make_schedule(name, function, cron, options), self.principal)
        return ScheduleHandle(self, name)

    def quietest_hour_before(self, before: str, *, zone: str = "UTC") -> str:
        """
        A daily cron line for `set_schedule`, in the quietest of the twelve hours before a time such as
        "06:00", by the recorded load. BadIntent: no load is recorded yet; with a fixed capacity none is.
        """
        return self.schedule_service.quietest_line(before, zone)

    def schedules(self) -> list[ScheduleHandle]:
        """All schedules by name, also those of other programs."""
        return [ScheduleHandle(self, record.name) for record in self.schedule_service.list()]

    def get_schedule(self, name: str) -> ScheduleHandle:
        """The schedule of this name. NotFound: there is none."""
        return ScheduleHandle(self, self.schedule_service.get(name).name)

    def _declare(self, schedule: Schedule) -> None:
        """
        Check and keep a declaration, so that errors are raised where it stands. Its one moment may have
        passed.
        """
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
        """Refuse options that are out of bounds when the job is registered, and not at its first call."""
        now = self.steady_clock()
        sample = replace(options, unique=False).intent("null", now, (), {})
        # A deadline that has passed is no error here: only a call is refused for it.
        deadline = None if sample.deadline_at is None else max(sample.deadline_at, now + 1)
        check(replace(sample, deadline_at=deadline), now, most_units=self.rules.capacity.most)

    # looking

    def get(self, job_id: str) -> JobHandle[Any]:
        """The job with this id, also of another process. NotFound: there is none."""
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
        """Jobs in these states, of a function and an addon, the newest first."""
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
        What the scheduler has learned about each job type: how long its jobs run, what they spend, how often
        they are submitted, and how good the predictions of their starts were.
        """
        return self.job_service.type_stats()

    def _handle(self, job_id: str, job_type: str | None = None) -> JobHandle[Any]:
        if job_type is None:
            job = self.store.job(JobId(job_id))
            job_type = "" if job is None else job.intent.job_type
        function = self.functions.get(job_type)
        return JobHandle(self, JobId(job_id), None if function is None else function.arguments)

    def explain(self, job_id: JobId) -> Explanation:
        """
        Why the job is in its state. Says also if no program runs such jobs, or this one has no such function.
        """
        explanation = self.job_service.explain(job_id)
        if self.work is not None and not is_address(self.location):
            explanation = with_calls(explanation)
        if explanation.state is not JobState.QUEUED:
            return explanation
        job_type = JobHandle(self, job_id).job.intent.job_type
        if not self._dispatched():
            reason: Reason = NotDispatched(self.where if is_address(self.location) else Path(self.where).name)
        elif self.work is not None and job_type not in self.functions:
            reason = NoFunction(job_type, tuple(sorted(self.functions)))
        else:
            return explanation
        return held_by_program(explanation, reason, self.store.now())

    @property
    def principal(self) -> str:
        """The name under which the trail records what this program cancels, retries and edits."""
        return f"process {os.getpid()}"

    def _dispatched(self) -> bool:
        if self.work is not None:
            return True
        if is_address(self.location):
            now = self.store.now()
            return any(host.alive(now) for host in self.store.hosts())
        return self.location != MEMORY and present(Path(self.location))

    def edit(self, job_id: JobId, given: dict[str, Any]) -> JobState:
        """Change priority, times and load of a queued job; `JobHandle.edit` calls this."""
        times = {"not_before": "earliest_start_at", "deadline": "deadline_at"}
        of_template = {"priority": "priority", "run_when": "run_when", "quiet_for": "quiet_for_sec"}
        editable = ["priority", *times, "run_when", "quiet_for"]
        unknown = [name for name in given if name not in editable]
        if unknown:
            raise TypeError(f"{unknown[0]!r} cannot be edited; {', '.join(editable)} can")
        options = self._options.take(given)
        now = self.store.now()
        fields: dict[str, Any] = {
            field: getattr(options.template, field) for name, field in of_template.items() if name in given
        }
        for name in given.keys() & times.keys():
            fields[times[name]] = None if given[name] is None else moment(name, given[name], now)
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
        A named set of jobs, submitted together at the end of its `with` block. `on_end`: a job that starts
        when all of them have ended. `on_failure`: a job that starts when the first of them has failed. An
        `open` batch does not end before `batch.close()`, so that jobs can be added until then.
        """
        return Batch(self, name, on_end, on_failure, is_open=open)

    def get_batch(self, name: str) -> Batch:
        """The submitted batch of this name, also of another process. NotFound: there is none."""
        self.batch_service.get(name)
        return Batch(self, name, is_submitted=True)

    @property
    def addon(self) -> str:
        """The addon that jobs count for by default."""
        return self._options.template.addon_id

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
        """
        Begin to run jobs. DispatcherHeld: another process runs the jobs of this file; the error names it.
        """
        with self._lock:
            if self.work is None:
                self.work = self._begin()
                _running.add(self)
                try:
                    for schedule in self.declared_schedules.values():
                        declare(self, schedule)
                    self.work.start()
                except BaseException:  # Ctrl-C included: jobs that have begun go back to the queue
                    self.stop()
                    raise
        return self

    def _begin(self) -> RunningWork:
        clock = None if is_address(self.location) else self.steady_clock  # a database has its server's clock
        return BackgroundWork(
            self.store, self.rules, clock, self.functions, workers=self._workers, kind=self._kind
        )

    def stop(self, timeout: Seconds | None = None) -> None:
        """
        Start no more jobs, ask running functions to yield, and wait for them up to `timeout` (by default
        `stop_timeout` of the scheduler). Jobs that have not ended by then go back to the queue; ends are on
        disk. The file stays open, so jobs can still be enqueued and read.
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
        """
        Run jobs until Ctrl-C or SIGTERM: all that a worker program needs. A second Ctrl-C stops without
        waiting.
        """
        stopping = threading.Event()

        def ask(*_: object) -> None:
            stopping.set()
            # Set here and not after the wait: the second signal may come before the main thread wakes up.
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
        store = store_at(self.location, self.steady_clock, self.rules.ordering)
        return OpenScheduler(store, SchedulerService(store, self.rules), ResultWaiter(store))

    def leave_to_parent(self) -> None:
        """
        In a forked process: forget what the parent has opened and runs. The threads of that are in the parent
        only, and nothing of it is closed here: its connections are shared with the parent.
        """
        self._lock = threading.RLock()  # another thread may have held it, which stayed in the parent
        _parts_of_parent.append((self._opened, self.work))
        self._opened = self.work = None

    @property
    def store(self) -> Store:
        return self._open.store

    @property
    def waiter(self) -> ResultWaiter:
        return self._open.waiter

    @property
    def job_service(self) -> JobService:
        """
        The job service of the running scheduler, which knows the machine's load; else one that only has the
        store.
        """
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
    """What a scheduler opens on first use."""

    store: Store
    service: SchedulerService  # never started: its services are for enqueueing and reading
    waiter: ResultWaiter


class ScheduleDecorator(Protocol):
    """
    `@scheduler.schedule(...)`, for type checkers: a job function stays one, any other function becomes one.
    """

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


def _identity(fn: Any) -> tuple[str, str]:
    """
    What a function is recognized by: a module that is run and imported, or reloaded, registers it twice.
    """
    return ("" if fn.__module__ in ("__main__", "__mp_main__") else fn.__module__), fn.__qualname__


_schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()
_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()
#: In a forked process: what its parent has opened and runs.
_parts_of_parent: list[object] = []


def _after_fork() -> None:
    _running.clear()  # the end of this process must not stop the parent's
    for scheduler in list(_schedulers):
        scheduler.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _stop_all() -> None:
    """
    Stop schedulers at the end of a program that did not: their jobs go back to the queue now, and not as
    crashes later.
    """
    for scheduler in list(_running):
        scheduler.stop()


# Called before the interpreter waits for threads and pools; functions of `atexit` are called after that.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]  # noqa: SLF001  # as pools/pool.py does
