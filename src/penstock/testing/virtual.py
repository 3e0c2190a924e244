"""
A scheduler for tests: the same rules and code, with a store in memory and a clock that only the test moves;
and assertions about enqueued calls.

Nothing runs by itself and nothing waits: `drain` runs all ready jobs on the test's own thread, one after the
other, in the order of the real scheduler. With `advance` it jumps from one due moment to the next, so a week
of retries takes milliseconds.
"""

from __future__ import annotations

import contextvars
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self, Unpack

from penstock.core.errors import NotFound, StaleDispatch
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Job
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, Moment, moment_of, seconds
from penstock.core.jobs.workers import WorkerKinds
from penstock.library.attempt import JobAttempt, renewals
from penstock.library.function import JobFunction
from penstock.library.handle import JobHandle
from penstock.library.job_runner import RunningWork
from penstock.library.options import MEMORY, LibrarySettings, Seconds, span_sec
from penstock.library.scheduler import Scheduler
from penstock.library.schedules import ScheduleHandle, in_words
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Query, Receipt, Store
from penstock.work.leases import LeaseKeeper
from penstock.work.outcome import CurrentJob, Invocation, Outcome, run

_MOST_SHOWN = 20


def assert_calls(
    store: Store,
    function: JobFunction[..., Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int | None,
) -> list[Job]:
    __tracebackhide__ = True
    jobs = store.find(Query(limit=1_000_000))
    payload = function.arguments.encode(args, kwargs) if args or kwargs else None
    matches = [
        job
        for job in jobs
        if job.intent.job_type == function.name
        and (payload is None or json.loads(job.intent.payload) == json.loads(payload))
    ]
    if len(matches) == count or (count is None and matches):
        return matches
    wanted = _call(function.name, payload)
    often = "not enqueued" if count is None else f"enqueued {len(matches)} times, not {count}"
    raise AssertionError(f"{wanted} is {often}; {_listed(store, jobs)}")


def assert_schedule(
    scheduler: Scheduler,
    what: JobFunction[..., Any, Any] | str,
    args: tuple[Any, ...],
    expected: dict[str, Any],
) -> ScheduleHandle:
    __tracebackhide__ = True
    records = scheduler.store.schedules()
    named = what if isinstance(what, str) else what.name
    payload = None if isinstance(what, str) or not args else json.loads(what.arguments.encode(args, {}))
    matches = [
        record.schedule
        for record in records
        if (record.name if isinstance(what, str) else record.schedule.intent.job_type) == named
        and (payload is None or json.loads(record.schedule.intent.payload) == payload)
    ]
    lines = [f"{r.name}: {r.schedule.intent.job_type} {in_words(r.schedule)}" for r in records]
    scheduled = "scheduled are:\n  " + "\n  ".join(lines) if lines else "nothing is scheduled"
    if len(matches) != 1:
        often = (
            "not scheduled" if not matches else f"scheduled {len(matches)} times: name one of the schedules"
        )
        raise AssertionError(f"{named} is {often}; {scheduled}")
    [schedule] = matches
    if "every" in expected:
        expected["every_sec"] = span_sec("every", expected.pop("every"))
    if isinstance(expected.get("at"), datetime):
        expected["at"] = moment_of(expected["at"])
    for name, value in expected.items():
        actual = getattr(schedule, name)
        if actual != value:
            raise AssertionError(f"{schedule.name} has {name} {actual!r}, not {value!r}; {scheduled}")
    return scheduler.get_schedule(schedule.name)


def calls_of(store: Store) -> list[str]:
    return [_line(job, store.now()) for job in store.find(Query(limit=1_000_000))]


def _listed(store: Store, jobs: list[Job]) -> str:
    if not jobs:
        return "nothing is enqueued"
    lines = [_line(job, store.now()) for job in jobs[-_MOST_SHOWN:]]
    if len(jobs) > _MOST_SHOWN:
        lines.insert(0, f"... {len(jobs) - _MOST_SHOWN} more")
    return "enqueued are:\n  " + "\n  ".join(lines)


def _line(job: Job, now: int) -> str:
    line = f"{_call(job.intent.job_type, job.intent.payload)}  {job.state}, priority {job.intent.priority}"
    if job.state == "QUEUED" and job.ready_at > now:
        line += f", due in {seconds(job.ready_at - now):g} s"
    return line


def _call(name: str, payload: str | None) -> str:
    if payload is None:
        return f"{name}(...)"
    arguments = json.loads(payload)
    if not isinstance(arguments, dict):
        return f"{name}({arguments!r})"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


_START: Final = datetime(2030, 1, 1, tzinfo=UTC)
_FOR_EVER: Final = 1 << 62
#: The most runs of one `drain`: a job that enqueues itself would run for ever.
_MOST_RUNS: Final = 100_000


class VirtualClock:
    def __init__(self, start: datetime = _START) -> None:
        self._now: Moment = int(start.timestamp()) * SECOND
        self._passing: list[Callable[[Moment], None]] = []

    def __call__(self) -> Moment:
        return self._now

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._now / SECOND, UTC)

    def advance(self, by: Seconds) -> None:
        """
        Move the clock by seconds or a timedelta. Inside a job this is the running time of the job: its lease
        is renewed, and its limits apply.
        """
        self.move_to(self._now + round(span_sec("by", by) * SECOND))

    def move_to(self, moment: Moment) -> None:
        if moment < self._now:
            raise ValueError("a virtual clock does not go back")
        for passing in self._passing:
            passing(moment)
        self._now = moment

    def step_to(self, moment: Moment) -> None:
        """Move one step within a `move_to`; for a callback of `on_passing`."""
        self._now = moment

    def on_passing(self, callback: Callable[[Moment], None]) -> None:
        """Call `callback` with the new moment before each move."""
        self._passing.append(callback)


class VirtualScheduler(Scheduler):
    """
    A scheduler with a virtual clock, for tests. `inline`: an enqueued call runs at once in the enqueueing
    code, which also gets its error.
    """

    def __init__(
        self,
        *,
        clock: VirtualClock | None = None,
        inline: bool = False,
        addon: str = "app",
        rules: SchedulerRules | None = None,
        **settings: Unpack[LibrarySettings],
    ) -> None:
        super().__init__(MEMORY, addon=addon, rules=rules, **settings)
        self.clock = clock or VirtualClock()
        # The virtual clock never jumps by itself, so it also serves as the steady clock.
        self.steady_clock = self.clock  # type: ignore[assignment]  # see above
        self._inline = inline
        self._service: SchedulerService | None = None
        self._running_now: list[JobAttempt] = []
        self._raised: dict[str, BaseException] = {}

    @classmethod
    @contextmanager
    def over(cls, scheduler: Scheduler, *, inline: bool = False) -> Iterator[Self]:
        """
        Replace a program's own scheduler within this block: this one gets the calls that the program
        enqueues, and the program's file is not touched.
        """
        virtual = cls(inline=inline, rules=scheduler.rules)
        virtual.functions = scheduler.functions
        virtual.declared_schedules = scheduler.declared_schedules
        names = ("_opened", "steady_clock", "work", "_begin", "submit", "submit_async")
        saved = {name: scheduler.__dict__[name] for name in names if name in scheduler.__dict__}
        virtual.start()
        scheduler.__dict__ |= {name: getattr(virtual, name) for name in names}
        try:
            yield virtual
        finally:
            for name in names:
                scheduler.__dict__.pop(name)
            scheduler.__dict__ |= saved
            virtual.close()

    # running

    def drain(self, *, advance: Seconds | Literal[True] | None = None) -> int:
        """
        Run all ready jobs, and those that they enqueue. Returns the number of runs. `advance`: how much time
        passes meanwhile; True: as much as is needed until nothing is due. Schedules fire meanwhile, except
        with True, because their moments have no end.
        """
        until = self.clock() if advance is None else _FOR_EVER
        if advance is not None and advance is not True:
            until = self.clock() + round(span_sec("advance", advance) * SECOND)
        runs = self._run_ready()
        alarm = self.store.alarm if advance is True else self._alarm
        while (due := alarm()) is not None and due <= until and until > self.clock():
            # A due job that does not start waits for the next tick.
            self.clock.move_to(min(until, max(due, self.clock() + (0 if due > self.clock() else SECOND))))
            ran = self._run_ready()
            runs += ran
            if advance is True and not ran and not self._expecting():
                break
        if advance is not None and advance is not True:
            self.clock.move_to(max(until, self.clock()))  # a job may have taken longer
            runs += self._run_ready()
        return runs

    def _alarm(self) -> Moment | None:
        """The next due moment of the store or of a schedule. Moments that wait for a job fire at its end."""
        moments = [self.store.alarm(), self.store.schedule_alarm()]
        if moments[1] == 0:
            moments[1:] = [record.next_moment for record in self.store.schedules()]
        return min((moment for moment in moments if moment is not None), default=None)

    def _expecting(self) -> bool:
        """Whether a job could start when time passes: one is queued and its function is registered here."""
        waiting = self.store.find(Query([JobState.QUEUED], limit=1_000))
        return any(job.intent.job_type in self.functions for job in waiting)

    def _run_ready(self) -> int:
        runs = 0
        service = self._shared_service
        while True:
            service.schedule_firer.step(self.clock())
            service.maintenance.step(self.clock())
            kinds = WorkerKinds(job_types=frozenset(self.functions))
            claimed = service.job_service.claim(kinds, 1, "virtual") if kinds.job_types else []
            if not claimed:
                return runs
            runs += 1
            if runs > _MOST_RUNS:
                raise RuntimeError(f"{_MOST_RUNS} runs and no end: does a job enqueue itself?")
            attempt = _Attempt(
                claimed[0],
                self.functions[claimed[0].job.intent.job_type],
                self._leases,
                seconds(self.clock()),
            )
            self._run(attempt)

    def _run(self, attempt: JobAttempt) -> None:
        function = _Recording(attempt.function)
        self._running_now.append(attempt)
        try:
            job = CurrentJob(attempt.facts, attempt)
            perform = _on_a_thread if function.is_async else run
            outcome = perform(function.invoke, job)
        finally:
            self._running_now.remove(attempt)
        if function.raised is not None:
            self._raised[attempt.facts.job_id] = function.raised
        with suppress(StaleDispatch, NotFound):  # canceled, timed out or lost while it ran: the trail says so
            self.job_service.end(
                attempt.facts.dispatch_id, outcome.end, result=outcome.result, error=outcome.error
            )

    def _pass(self, until: Moment) -> None:
        """Let time pass while a job runs, step by step, with its heartbeats and the maintenance."""
        while self._running_now and self.clock() < until:
            due = self._alarm()
            beat = self.clock() + self.rules.lease_for // 3
            self.clock.step_to(min(until, beat, max(self.clock() + 1, beat if due is None else due)))
            for attempt in self._running_now:
                attempt.report()
            self._shared_service.schedule_firer.step(self.clock())
            self._shared_service.maintenance.step(self.clock())

    # enqueueing

    def submit(self, intents: Sequence[Intent], wait_sec: float = 0) -> list[Receipt]:  # noqa: ARG002
        # A submit never waits for room: only the test itself could make room.
        receipts = super().submit(intents, 0)
        if self._inline:
            self._run_ready()
            for receipt in receipts:
                if error := self._raised.pop(receipt.job_id, None):
                    raise error
        return receipts

    async def submit_async(self, intents: Sequence[Intent], wait_sec: float = 0) -> list[Receipt]:
        return self.submit(intents, wait_sec)

    # the parts

    def _begin(self) -> RunningWork:
        return _Still(self._shared_service)

    @property
    def _shared_service(self) -> SchedulerService:
        if self._service is None:
            self._service = SchedulerService(self.store, self.rules, reserves=False)
            self._leases: LeaseKeeper[JobAttempt] = LeaseKeeper(
                renewals(self._service.job_service, self.clock),
                on_stop=lambda _: None,
                on_yield=lambda _: None,
                clock=lambda: seconds(self.clock()),
            )
            self.clock.on_passing(self._pass)
        return self._service

    # assertions

    def assert_enqueued(
        self, function: JobFunction[..., Any, Any], *args: Any, count: int | None = None, **kwargs: Any
    ) -> list[JobHandle[Any]]:
        """
        Assert that such a call was enqueued, whatever its state is now; without arguments, any call of the
        function. `count`: exactly this often. Returns the jobs. A failure lists the enqueued calls.
        """
        return [self._handle(job.job_id) for job in assert_calls(self.store, function, args, kwargs, count)]

    def assert_scheduled(
        self, what: JobFunction[..., Any, Any] | str, *args: Any, **expected: Any
    ) -> ScheduleHandle:
        """
        Assert that a job function, or the schedule of this name, is scheduled once. `args`: the arguments of
        the calls. `expected`: options of the schedule (`cron`, `every`, `at`, `zone`, `overlap`, `missed`,
        `paused`). Returns the schedule. A failure lists all schedules.
        """
        __tracebackhide__ = True
        return assert_schedule(self, what, args, expected)

    def enqueued(self) -> list[str]:
        """All enqueued calls, as text."""
        return calls_of(self.store)


class _Still:
    """Stands in for a running part and has no thread."""

    def __init__(self, service: SchedulerService) -> None:
        self.service = service

    def start(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def stop(self, timeout: float) -> None:
        pass


class _Attempt(JobAttempt):
    """An attempt that checks itself whether it must stop, because no thread renews its lease."""

    @property
    def canceled(self) -> bool:
        return not self.report() or self.stop is not None

    def progress(self, fraction: float) -> None:
        super().progress(fraction)
        self.report()


class _Recording(JobFunction[..., Any, Any]):
    """A job function that keeps the raised exception: an outcome has only its text."""

    def __init__(self, function: JobFunction[..., Any, Any]) -> None:
        self.scheduler, self.arguments, self.is_async = (
            function.scheduler,
            function.arguments,
            function.is_async,
        )
        self.fn = function.fn
        self.raised: BaseException | None = None

    def invoke(self, job: CurrentJob) -> Any:
        if self.is_async:
            return self._awaited(super().invoke(job))
        try:
            return super().invoke(job)
        except BaseException as error:  # SystemExit too: keep it for the test, then raise it
            self.raised = error
            raise

    async def _awaited(self, running: Any) -> Any:
        try:
            return await running
        except BaseException as error:  # as above
            self.raised = error
            raise


def _on_a_thread(invocation: Invocation, job: CurrentJob) -> Outcome:
    """
    Run the job in a thread of its own: the test may be a coroutine, and a thread has one event loop at a
    time.
    """
    outcome: list[Outcome] = []
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(lambda: outcome.append(run(invocation, job)),))
    thread.start()
    thread.join()
    return outcome[0]
