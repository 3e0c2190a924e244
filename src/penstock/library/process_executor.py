"""
Jobs on worker processes: one that computes does not slow the others, one that crashes harms nobody else, and one that will not stop is
ended.

The child finds the function by importing where it was defined, and is given arguments as the JSON that the queue holds. What it reports while
it runs (progress, spending, checkpoints) it writes to the file by itself; that it should stop it sees in the memory that its
pool shares with it, that it should yield by a file that appears.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import reduce
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import (
    CallCanceled,
    CallEnded,
    JobStopped,
    NotFound,
    StaleDispatch,
    WorkerCrashedError,
)
from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.types import Money
from penstock.core.text import safe_str
from penstock.library.attempt import JobAttempt
from penstock.library.executors import Began, Finished
from penstock.library.function import place_of
from penstock.pools.context import current_call
from penstock.pools.pool import WorkerPool
from penstock.scheduler.rules import SchedulerRules
from penstock.work.context import CurrentJob, JobFacts
from penstock.work.outcome import Outcome, failure, run

if TYPE_CHECKING:
    from penstock.library.function import JobFunction
    from penstock.library.scheduler import Scheduler

__all__ = ["ProcessExecutor"]

#: Told to stop, it has so long to see it before its process is ended.
GRACE_SEC: Final = 5.0
PROGRESS_SEC: Final = 1.0


class ProcessExecutor:
    ahead = 0  # a process holds one job at a time: what dies with it must be what it ran

    def __init__(self, workers: int, began: Began, finished: Finished) -> None:
        self._began, self._finished = began, finished
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        self._yield_file = Path(self._folder.name) / "yield"
        self._pool = WorkerPool(
            workers,
            max_in_flight=workers,
            grace=GRACE_SEC,
            crash_max_retries=1_000_000_000,  # a job that kills its worker is the queue's business: it has a backoff
            name="penstock jobs",
        )

    def start(self, attempts: Sequence[JobAttempt], *, at_once: bool = True, awake: int = 0) -> None:  # noqa: ARG002 - the pool decides
        for attempt in attempts:
            if self._began(attempt):
                self._submit(attempt)

    def _submit(self, attempt: JobAttempt) -> None:
        try:
            place = place_of(attempt.function.fn)
            home = None if _is_job_at(place) else _home_of(attempt.function.scheduler)
            call = self._pool.submit(_run, place, attempt.facts, str(self._yield_file), home)
        except Exception as error:  # noqa: BLE001  # it cannot be sent: that is its outcome
            self._finished(attempt, failure(error))
            return
        attempt.ended_by = call
        call.add_done_callback(lambda done: self._over(attempt, done))

    def send(self, node_call: Callable[[], None]) -> bool:  # noqa: ARG002 - the protocol's
        return False  # there are no threads here

    def rouse(self) -> None:
        pass  # nothing waits here

    def end(self, attempt: JobAttempt) -> None:
        call = attempt.ended_by
        if call is not None:
            call.cancel("the job was told to stop")

    def give_up(self, attempt: JobAttempt) -> None:
        pass  # `end` has taken its process, and the pool starts another

    def ask_to_yield(self) -> None:
        self._yield_file.touch()

    def close(self, *, wait: float) -> None:
        self._pool.dispose(timeout=wait)
        self._folder.cleanup()

    def _over(self, attempt: JobAttempt, done: Future[Outcome]) -> None:
        try:
            outcome = done.result()
        except CallCanceled:
            # The Future is free at once, its process is not: the job's units go back when that is gone.
            Thread(target=self._wait_gone, args=(attempt,), name="penstock-ending", daemon=True).start()
            return
        except WorkerCrashedError as error:
            outcome = Outcome(EndReason.WORKER_CRASHED, error=safe_str(error))
        except CallEnded:
            outcome = Outcome(EndReason.GRACEFUL_SHUTDOWN)  # the pool was closed around it
        except BaseException as error:  # noqa: BLE001  # its module could not be imported there, or raised SystemExit
            outcome = failure(error)
        self._finished(attempt, outcome)

    def _wait_gone(self, attempt: JobAttempt) -> None:
        while attempt.ended_by.running():
            time.sleep(0.02)
        self._finished(attempt, Outcome(EndReason.CANCELED))


class _Home(NamedTuple):
    """The scheduler of a function that is registered under another name than its own: `job = scheduler.job(fn)`."""

    where: str
    rules: SchedulerRules


def _home_of(scheduler: Scheduler) -> _Home:
    return _Home(scheduler._place, scheduler.rules)


def _is_job_at(place: tuple[str, str]) -> bool:
    """Whether a worker that imports this place finds the job there, and not the plain function."""
    from penstock.library.function import JobFunction  # noqa: PLC0415  # it imports us

    found: Any = sys.modules.get(place[0])
    for part in place[1].split("."):
        found = getattr(found, part, None)
    return isinstance(found, JobFunction)


def _function_at(place: tuple[str, str], job_type: str, home: _Home | None) -> JobFunction[..., Any, Any]:
    from penstock.library.function import JobFunction  # noqa: PLC0415  # as above

    module, name = place
    found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    if isinstance(found, JobFunction):
        return found
    if home is None:
        raise TypeError(f"{module}.{name} is no job in a worker process")
    known = _registered.get((home.where, job_type))
    if known is None or known.fn is not found:
        from penstock.library.scheduler import Scheduler  # noqa: PLC0415  # as above

        known = Scheduler(home.where, rules=home.rules).job(name=job_type)(found)
        _registered[home.where, job_type] = known
    return known


#: Made in a worker process.
_registered: Final[dict[tuple[str, str], JobFunction[..., Any, Any]]] = {}


def _run(place: tuple[str, str], facts: JobFacts, yield_file: str, home: _Home | None) -> Outcome:
    function = _function_at(place, facts.job_type, home)
    return run(function.invoke, CurrentJob(facts, _ProcessChannel(function, facts, yield_file)))


class _ProcessChannel:
    """From the worker process. The scheduler renews the lease."""

    def __init__(self, function: JobFunction[..., Any, Any], facts: JobFacts, yield_file: str) -> None:
        self._function, self._facts, self._yield_file = function, facts, yield_file
        self._lost = False
        self._told_at = 0.0
        self._spent: Money | None = None

    @property
    def canceled(self) -> bool:
        call = current_call()
        return self._lost or (call is not None and call.cancelled)

    @property
    def yielding(self) -> bool:
        return Path(self._yield_file).exists()

    def progress(self, fraction: float) -> None:
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_SEC or fraction == 1:
            self._told_at = now
            self._beat(progress=fraction)

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        self._spent = total
        self._beat()

    def log_handler(self) -> None:
        return None

    def save_checkpoint(self, text: str) -> None:
        self._beat(checkpoint=text)
        if self._lost:
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self._facts.job_id)

    def _beat(self, **told: Any) -> None:
        try:
            job_service = self._function.scheduler._job_service
            answer = job_service.heartbeat(
                self._facts.dispatch_id, spent=self._spent, pid=os.getpid(), **told
            )
            self._lost = answer.stop is not None
        except (StaleDispatch, NotFound):
            self._lost = True
