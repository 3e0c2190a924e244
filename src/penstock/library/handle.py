"""
`JobHandle`: one job, to read, wait for, and cancel. `enqueue` returns one, and `Scheduler.get` makes one of
an id. `ResultWaiter`: the thread that reads the ends of jobs for which callers wait.

A failure is stored as text only: an exception object would have to be made from a file that other users may
write.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from threading import Event as ThreadEvent
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from penstock.core.errors import JobCanceled, JobFailed, NotFound, Unavailable
from penstock.core.jobs.explain import Explanation
from penstock.core.jobs.job import DEPENDENCY_UNMET, Dispatch, Event, Job, outcome_of, shown
from penstock.core.jobs.states import SETTLED, JobState
from penstock.core.jobs.types import JobId, dispatch_id_of
from penstock.stores.api import Store

if TYPE_CHECKING:
    from penstock.library.function import Arguments
    from penstock.library.scheduler import Scheduler


log = logging.getLogger("penstock.library")
R = TypeVar("R")

#: How often to read without a change notice, which may be lost.
POLL_SEC: Final = 1.0


class JobHandle(Generic[R]):
    """
    One job of a scheduler. `created`: False if another call had used the unique key before, and this is its
    job. `deadline_reachable`: the forecast when the job was enqueued; None without a deadline or a forecast.

    For example:

        job = index.enqueue("/data")
        print(job.state, job.explain())
        print(job.result(timeout=60))  # in a coroutine: await job.wait()
    """

    def __init__(
        self,
        scheduler: Scheduler,
        job_id: JobId,
        arguments: Arguments | None = None,
        *,
        created: bool = True,
        deadline_reachable: bool | None = None,
    ) -> None:
        self._scheduler, self.id, self._arguments = scheduler, job_id, arguments
        self.created, self.deadline_reachable = created, deadline_reachable

    # looking

    @property
    def job(self) -> Job:
        """The job as it is now. NotFound: there is none, or it was pruned."""
        job = self._scheduler.store.job(self.id)
        if job is None:
            raise NotFound(
                f"there is no job {self.id}; settled ones are forgotten after a time", job_id=self.id
            )
        return job

    @property
    def state(self) -> JobState:
        return self.job.state

    @property
    def done(self) -> bool:
        """Whether the job is DONE, FAILED, CANCELED or BLOCKED: the scheduler does nothing more with it."""
        return self.job.state in SETTLED

    @property
    def progress(self) -> float | None:
        return self.job.progress

    def explain(self) -> Explanation:
        """Why the job is in its state: `print(job.explain())` for people, `.as_json()` for programs."""
        return self._scheduler.explain(self.id)

    def events(self) -> list[Event]:
        """All events of the job, in order."""
        entries: list[Event] = []
        while page := self._scheduler.store.events(entries[-1].n if entries else 0, 1_000, self.id):
            entries += page
        return [event for entry in entries for event in shown(entry)]

    def attempts(self) -> list[Dispatch]:
        return self._scheduler.store.attempts(self.id)

    # waiting

    def result(self, timeout: float | None = None) -> R:
        """
        Wait for the result of the function. Raises JobFailed, JobCanceled, or TimeoutError with the
        explanation.
        """
        ending = self._scheduler.waiter.ending(self.id)
        if ending is None:
            waiting = self._scheduler.waiter.watch(self.id)
            try:
                ending = waiting.result(timeout)
            except WaitTimeout:
                raise self._late(timeout) from None
            finally:
                self._scheduler.waiter.forget(self.id, waiting)
        return self._outcome(ending)

    async def wait(self) -> R:
        """`result` for an event loop; `asyncio.timeout` bounds it."""
        import asyncio  # noqa: PLC0415  # slow to import, and most programs do not use it

        waiting = self._scheduler.waiter.watch(self.id)
        try:
            ending = await asyncio.wrap_future(waiting)
        finally:
            self._scheduler.waiter.forget(self.id, waiting)
        return self._outcome(ending)

    def _late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"job {self.id} has not ended after {timeout} s: {self.explain().text}")

    def _outcome(self, ending: Ending) -> R:
        job, last = ending
        if job.state is JobState.DONE:
            text = None if last is None else last.result
            if self._arguments is not None:
                return self._arguments.result(text)  # type: ignore[no-any-return]  # by the function's own annotation
            return None if text is None else json.loads(text)  # type: ignore[return-value]  # no function is registered here
        end, error = outcome_of(job, last)
        if job.state is JobState.CANCELED:
            why = f": {error}" if end == DEPENDENCY_UNMET else ""
            raise JobCanceled(f"job {self.id} was canceled{why}", job_id=self.id)
        reason, text = str(end), error or ""
        first = text.partition("\n")[0] or reason.replace("_", " ")
        failed = JobFailed(
            f"job {self.id} is {job.state}: {first}",
            job_id=self.id,
            state=job.state,
            reason=reason,
            traceback=text.partition("\n")[2],
        )
        if text:
            failed.add_note(text.partition("\n")[2].rstrip())
        raise failed

    # changing

    def cancel(self) -> JobState:
        """Cancel the job: at once if it is queued; a running function must stop first."""
        return self._scheduler.job_service.cancel(self.id, by=self._scheduler.principal).state

    def retry(self) -> JobState:
        """Queue a FAILED or BLOCKED job again, with new counters."""
        return self._scheduler.job_service.retry(self.id, by=self._scheduler.principal).state

    def edit(self, **fields: Any) -> JobState:
        """Change `priority`, `not_before`, `deadline`, `run_when` or `quiet_for` of a queued job."""
        return self._scheduler.edit(self.id, fields)

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class Ending(NamedTuple):
    """A settled job. `last`: the attempt that ended it; None: it ended in the queue."""

    job: Job
    last: Dispatch | None


class ResultWaiter:
    """
    Reads the jobs for which callers wait, in one thread, which change notices of the store wake. Under load
    every commit sends a notice, so the thread pauses twice as long as each read took, and needs at most a
    third of one core.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.waiting: dict[JobId, list[Future[Ending]]] = {}
        self._lock, self._wakeup = Lock(), ThreadEvent()
        self._thread: Thread | None = None
        self._closed = False

    def ending(self, job_id: JobId) -> Ending | None:
        job = self._store.job(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}", job_id=job_id)
        return self._ended(job)

    def watch(self, job_id: JobId) -> Future[Ending]:
        waiting: Future[Ending] = Future()
        with self._lock:
            self.waiting.setdefault(job_id, []).append(waiting)
            if self._thread is None:
                self._store.on_change(self.wake)
                self._thread = Thread(target=self._loop, name="penstock-waits", daemon=True)
                self._thread.start()
        self._wakeup.set()
        return waiting

    def forget(self, job_id: JobId, waiting: Future[Ending]) -> None:
        with self._lock:
            futures = self.waiting.get(job_id, [])
            if waiting in futures:
                futures.remove(waiting)
            if not futures:
                self.waiting.pop(job_id, None)

    def wake(self) -> None:
        if self.waiting:
            self._wakeup.set()

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._closed:
            if self.waiting:
                self._store.listen()
            self._wakeup.wait(POLL_SEC if self.waiting else None)
            self._wakeup.clear()
            began = time.perf_counter()
            self._read(list(self.waiting))
            time.sleep(min(POLL_SEC, 2 * (time.perf_counter() - began)) if self.waiting else 0)

    def _read(self, job_ids: Sequence[JobId]) -> None:
        try:
            jobs = {job.job_id: job for job in self._store.jobs(job_ids)}
        except Unavailable as error:
            log.warning("cannot read the jobs that callers wait for: %s", error)
            return  # the store may come back; a caller can set a timeout
        for job_id in job_ids:
            if job_id not in jobs:
                self._settle(job_id, NotFound(f"job {job_id} has been forgotten", job_id=job_id))
            elif ending := self._ended(jobs[job_id]):
                self._settle(job_id, ending)

    def _ended(self, job: Job) -> Ending | None:
        if job.state not in SETTLED:
            return None
        last = self._store.dispatch(dispatch_id_of(job.job_id, job.fence)) if job.fence else None
        # A job may end after its last attempt, in the queue: by a cancel, or by its deadline.
        return Ending(job, last if last is not None and last.ended_at == job.ended_at else None)

    def _settle(self, job_id: JobId, ending: Ending | NotFound) -> None:
        with self._lock:
            futures = self.waiting.pop(job_id, [])
        for waiting in futures:
            if not waiting.set_running_or_notify_cancel():
                continue
            if isinstance(ending, Ending):
                waiting.set_result(ending)
            else:
                waiting.set_exception(ending)
