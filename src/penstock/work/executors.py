"""
Executors run job functions: plain ones on threads, coroutines on one event loop, or all of them in worker
processes.

An executor gets attempts and calls `finished` once for each, from a thread of its own. It uses neither a
store nor HTTP, so the library and the SDK worker share it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from penstock.core.errors import (
    CallCanceled,
    CallEnded,
    JobStopped,
    NotFound,
    StaleDispatch,
    Unavailable,
    WorkerCrashedError,
)
from penstock.core.jobs.types import EndReason, Money, Span
from penstock.core.jobs.workers import AHEAD
from penstock.core.text import error_line, safe_str
from penstock.work.context import JobFacts
from penstock.work.leases import FunctionLease, RenewalRequest, boot_clock
from penstock.work.outcome import STOPPED, CurrentJob, Invocation, Outcome, failure, run, run_async

if TYPE_CHECKING:
    from penstock.pools.pool import WorkerPool


log = logging.getLogger("penstock.work")


A = TypeVar("A", bound=FunctionLease)


class JobExecutor(ABC, Generic[A]):
    """The base of both executors. Methods that are not overridden do nothing."""

    #: How much work of short functions may wait here. 0: none, because handing over an attempt is expensive
    #: anyway.
    ahead: Span = 0

    @abstractmethod
    def start(self, attempts: Sequence[A], *, at_once: bool = True, awake: int = 0) -> None:
        """
        Start attempts. `at_once` false: the functions are so short that waking one thread after the other is
        quicker. `awake`: this many threads take an attempt without being woken.
        """

    def run_soon(self, task: Callable[[], None]) -> bool:  # noqa: ARG002  # an executor with threads takes it
        """
        Let an idle thread call `task` and then run ready attempts. False: this executor has no such threads.
        """
        return False

    def work(self) -> None:
        """
        Run ready attempts in the calling thread, in place of one of the executor's threads, until none is ready.
        """

    def wake_threads(self) -> None:
        """Wake sleeping threads for attempts that have waited for a while."""

    @abstractmethod
    def end(self, attempt: A) -> None:
        """End an attempt that must stop, by force if possible. Called again until the attempt has ended."""

    def give_up(self, attempt: A) -> None:
        """Make room for another attempt: the lease of this one is over, and it still runs."""

    def ask_to_yield(self, attempt: A) -> None:
        """
        Tell a function in another process to yield. Functions in this process ask their attempt themselves.
        """

    @abstractmethod
    def close(self, *, wait: float) -> None:
        """Close within this many seconds in all."""


class ThreadExecutor(JobExecutor[A]):
    ahead = AHEAD

    def __init__(
        self, workers: int, began: Callable[[A], bool], finished: Callable[[A, Outcome], None]
    ) -> None:
        self._began, self._finished = began, finished
        #: Threads take from here until it is empty, then sleep until they are woken. A batch wakes each of
        #: them once.
        self._ready: deque[A | Callable[[], None]] = deque()
        #: One for each function that may begin: a thread that works has taken one.
        self._places: deque[None] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._threads: list[Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._coroutines = asyncio.Semaphore(workers)
        self._closing = False
        for _ in range(workers):
            self._start_thread()

    def start(self, attempts: Sequence[A], *, at_once: bool = True, awake: int = 0) -> None:
        plain = [attempt for attempt in attempts if not attempt.function.is_async]
        self._put(plain, (len(plain) if at_once else min(1, len(plain))) - awake)
        for attempt in attempts:
            if attempt.function.is_async:
                asyncio.run_coroutine_threadsafe(self._await(attempt), self._loop or self._start_loop())

    def run_soon(self, task: Callable[[], None]) -> bool:
        self._put([task], 1)
        return True

    def wake_threads(self) -> None:
        self._put((), len(self._ready))

    def _put(self, work: Sequence[A | Callable[[], None]], sleepers: int) -> None:
        self._ready.extend(work)
        for _ in range(min(sleepers, len(self._threads))):
            self._wake.put(None)

    def end(self, attempt: A) -> None:
        task = attempt.ended_by
        if isinstance(task, asyncio.Task) and self._loop is not None and not attempt.end_sent:
            attempt.end_sent = True
            self._loop.call_soon_threadsafe(task.cancel)

    def give_up(self, attempt: A) -> None:
        if not attempt.function.is_async:
            self._start_thread()

    def close(self, *, wait: float) -> None:
        """Close without waiting for stuck threads: they are daemon threads, and their results are refused."""
        until = time.monotonic() + wait
        self._closing = True
        self._put((), len(self._threads))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _start_thread(self) -> None:
        self._places.append(None)
        thread = Thread(target=self._run_thread, name=f"penstock-job-{next(self._numbers)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_thread(self) -> None:
        while not (self._run_ready() or self._closing):
            self._wake.get()

    def work(self) -> None:
        self._run_ready()

    def _run_ready(self) -> bool:
        """Return whether an attempt of this thread was given up: another thread has its place."""
        while self._ready:  # also after the place was given back: a thread that came meanwhile found none
            try:
                self._places.pop()
            except IndexError:
                return False
            while self._ready:
                try:
                    attempt = self._ready.popleft()
                except IndexError:  # another thread was quicker
                    break
                if callable(attempt):
                    attempt()
                    continue
                self._perform(attempt)
                if attempt.given_up:
                    return True
                del attempt  # free its payload before the next attempt comes
            self._places.append(None)
        return False

    def _perform(self, attempt: A) -> None:
        if self._began(attempt):
            self._finished(attempt, run(attempt.function.invoke, CurrentJob(attempt.facts, attempt)))

    # coroutines

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()

        def run_loop() -> None:
            going = True
            while going:
                try:
                    loop.run_forever()
                    going = False
                except BaseException as error:  # noqa: BLE001  # a task that a function started may raise SystemExit
                    log.warning(
                        "a task that a job started raised %s; the other tasks continue", error_line(error)
                    )
                    going = not self._closing
            if self._tasks:
                for task in self._tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(list(self._tasks)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        thread = Thread(target=run_loop, name="penstock-job-loop", daemon=True)
        self._threads.append(thread)
        thread.start()
        return loop

    async def _await(self, attempt: A) -> None:
        async with self._coroutines:
            if not self._began(attempt):
                return
            attempt.ended_by = task = asyncio.current_task()
            if task is not None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            outcome = await run_async(attempt.function.invoke, CurrentJob(attempt.facts, attempt))
            self._finished(attempt, outcome)


# Worker processes


class RemoteOutcome(NamedTuple):
    """
    The answer of a worker process. `unreported`: the total spent, if the scheduler does not have it yet.
    """

    outcome: Outcome
    unreported: Money | None = None


class RemoteCall(NamedTuple):
    """A call for a worker process. `function` can be imported there, and all fields can be pickled."""

    function: Callable[..., RemoteOutcome]
    args: tuple[Any, ...]


class LeasePage:
    """
    Shared memory with the moment until which each function in a worker process may run: one slot for each
    function that runs at once.

    The process that renews the leases may be frozen while its workers continue. They check their slot, and
    stop by themselves when the lease was not renewed.
    """

    def __init__(self, path: str, slots: int) -> None:
        """`slots`: how many to make in a new file. 0: the file exists."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if slots:
                os.ftruncate(descriptor, slots * 8)
            self._moments = memoryview(mmap.mmap(descriptor, 0)).cast("d")
        finally:
            os.close(descriptor)

    def write(self, slot: int, stop_at: float) -> None:
        self._moments[slot] = stop_at

    def is_over(self, slot: int) -> bool:
        return boot_clock() >= self._moments[slot]


class ProcessSignals(NamedTuple):
    """Signals to a function in a worker process. `yield_file` appears when it should yield."""

    yield_file: str
    lease_page: str
    slot: int


class ProcessExecutor(JobExecutor[A]):
    """
    Runs jobs in worker processes: a job that computes does not slow the others, and a job that does not stop
    is ended. A process has one job at a time, so a crash ends only the job that it ran.

    `remote`: makes the call that runs an attempt, with the signals that end it.
    `grace_sec`: how long a process has after a stop before it is killed; called with the first attempt.
    """

    def __init__(
        self,
        workers: int,
        began: Callable[[A], bool],
        finished: Callable[[A, Outcome], None],
        remote: Callable[[A, ProcessSignals], RemoteCall],
        grace_sec: Callable[[A], float],
    ) -> None:
        self._workers, self._began, self._finished = workers, began, finished
        self._remote, self._grace_sec = remote, grace_sec
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        self._page_file = str(Path(self._folder.name) / "leases")
        self._page = LeasePage(self._page_file, workers)
        self._slots = deque(range(workers))
        self._taken: dict[A, int] = {}
        self._pool: WorkerPool | None = None
        #: Attempts wait here and not in the pool, so that those which have not begun can be given back.
        self._ready: deque[A] = deque()
        self._free, self._lock = workers, Lock()

    def start(self, attempts: Sequence[A], *, at_once: bool = True, awake: int = 0) -> None:  # noqa: ARG002  # of the protocol
        self._ready.extend(attempts)
        self._fill()

    def _fill(self) -> None:
        while True:
            with self._lock:
                if not self._free or not self._ready:
                    return
                self._free -= 1
                attempt = self._ready.popleft()
            if self._began(attempt):
                self._submit(attempt)
            else:
                with self._lock:
                    self._free += 1

    def _submit(self, attempt: A) -> None:
        slot = self._taken[attempt] = self._slots.popleft()

        def publish() -> None:
            self._page.write(slot, attempt.stop_at)

        publish()
        attempt.on_renewal = publish
        try:
            signals = ProcessSignals(str(self._yield_file(attempt)), self._page_file, slot)
            call = self._remote(attempt, signals)
            running = self._pool_for(attempt).submit(call.function, *call.args)
        except Exception as error:  # noqa: BLE001  # it cannot be sent: that is its outcome
            self._finish(attempt, failure(error))
            return
        attempt.ended_by = running
        running.add_done_callback(lambda done: self._over(attempt, done))

    def _pool_for(self, attempt: A) -> WorkerPool:
        if self._pool is None:
            from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # pools are slow to import for programs that use none

            self._pool = WorkerPool(
                self._workers,
                max_in_flight=self._workers,
                grace=self._grace_sec(attempt),
                crash_max_retries=1_000_000_000,  # the scheduler's retries have a backoff for such jobs
                name="penstock jobs",
            )
        return self._pool

    def _yield_file(self, attempt: A) -> Path:
        return Path(self._folder.name) / attempt.facts.dispatch_id

    def end(self, attempt: A) -> None:
        if attempt.ended_by is not None and not attempt.end_sent:
            attempt.end_sent = True
            attempt.ended_by.cancel("the job was told to stop")

    def ask_to_yield(self, attempt: A) -> None:
        self._yield_file(attempt).touch()

    def close(self, *, wait: float) -> None:
        if self._pool is not None:
            self._pool.dispose(timeout=wait)
        self._folder.cleanup()

    def _over(self, attempt: A, done: Future[RemoteOutcome]) -> None:
        try:
            outcome, unreported = done.result()
        except CallCanceled:
            # The Future ends at once, but the process may still run: the attempt is over when the process is
            # gone.
            Thread(target=self._wait_gone, args=(attempt,), name="penstock-ending", daemon=True).start()
            return
        except WorkerCrashedError as error:
            outcome = Outcome(EndReason.WORKER_CRASHED, error=f"its process died: {safe_str(error)}")
        except CallEnded:
            outcome = STOPPED  # the pool was closed
        except BaseException as error:  # noqa: BLE001  # its module could not be imported there, or raised SystemExit
            outcome = failure(error)
        else:
            if unreported is not None:
                attempt.spend(unreported, 0)
        self._finish(attempt, outcome)

    def _wait_gone(self, attempt: A) -> None:
        while attempt.ended_by.running():
            time.sleep(0.02)
        self._finish(attempt, STOPPED)

    def _finish(self, attempt: A, outcome: Outcome) -> None:
        self._yield_file(attempt).unlink(missing_ok=True)
        attempt.on_renewal = None
        self._slots.append(self._taken.pop(attempt))
        with self._lock:
            self._free += 1
        self._finished(attempt, outcome)
        self._fill()


#: A function that sends a renewal to the scheduler. False: the attempt must stop.
Report: TypeAlias = Callable[[RenewalRequest], bool]
PROGRESS_SEC: Final = 1.0


class ProcessChannel:
    """
    The channel of a function in a worker process. It sends its own reports; the process that started it
    renews the lease. It reads cancels from memory that the pool shares with its workers, requests to yield
    from a file that appears, and the end of an unrenewed lease from the lease page.
    """

    def __init__(self, facts: JobFacts, signals: ProcessSignals, report: Report) -> None:
        from penstock.pools.context import current_call  # noqa: PLC0415  # as above

        self._facts, self._report, self._call = facts, report, current_call()
        self._yield_file, self._page, self._slot = (
            signals.yield_file,
            _page_at(signals.lease_page),
            signals.slot,
        )
        self._stopped = False
        self._reported_at = 0.0
        self._spent: Money | None = None
        #: The total spent, if the scheduler does not have it yet.
        self.unreported: Money | None = None

    @property
    def canceled(self) -> bool:
        return (
            self._stopped
            or (self._call is not None and self._call.canceled)
            or self._page.is_over(self._slot)
        )

    @property
    def yielding(self) -> bool:
        return os.path.exists(self._yield_file)  # noqa: PTH110  # asked in loops: a third of the time of a Path

    def progress(self, fraction: float) -> None:
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_SEC or fraction == 1:
            self._reported_at = now
            self._try_to_send(fraction)

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        self._spent = total
        self._try_to_send(None)

    def save_checkpoint(self, text: str) -> None:
        self._send(None, text)
        if self._stopped:
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self._facts.job_id)

    def log_handler(self) -> None:
        return None

    def _try_to_send(self, progress: float | None) -> None:
        try:
            self._send(progress, None)
        except Unavailable:
            self.unreported = self._spent  # the next report or the outcome carries it

    def _send(self, progress: float | None, checkpoint: str | None) -> None:
        try:
            request = RenewalRequest(self._facts.dispatch_id, progress, self._spent, checkpoint, os.getpid())
            self._stopped = not self._report(request)
        except (StaleDispatch, NotFound):
            self._stopped = True
        self.unreported = None


@cache
def _page_at(path: str) -> LeasePage:
    """The page of a worker process, opened once: the process runs one job after the other."""
    return LeasePage(path, 0)


def run_in_process(
    invocation: Invocation, facts: JobFacts, signals: ProcessSignals, report: Report
) -> RemoteOutcome:
    """Run an attempt; called in the worker process."""
    channel = ProcessChannel(facts, signals, report)
    return RemoteOutcome(run(invocation, CurrentJob(facts, channel)), channel.unreported)
