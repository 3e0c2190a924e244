"""
`JobHandle`: one job, to look at, to wait for, to cancel. `enqueue` returns one; any process that opens the file can
make one by the job's id. `ResultWaiter`: the one thread that looks for the ends of jobs that callers wait for.

A failure crosses processes as text alone: an exception would have to be rebuilt from a file that others can write to.
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
from penstock.core.jobs.job import Dispatch, Event, Job, outcome_of, shown
from penstock.core.jobs.states import SETTLED, JobState
from penstock.core.jobs.types import JobId, dispatch_id_of
from penstock.stores.api import Store

if TYPE_CHECKING:
    from penstock.library.function import Arguments
    from penstock.library.scheduler import Scheduler


log = logging.getLogger("penstock.library")
R = TypeVar("R")

#: The slow poll is for change notices that were lost.
POLL_SEC: Final = 1.0


class JobHandle(Generic[R]):
    """
    `created`: False when a unique key was used before, and this is that first job. `deadline_reachable`: the forecast
    when the job was enqueued; None without a deadline or a forecast.

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
        """All that is known about it now."""
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
        """DONE, FAILED, CANCELED or BLOCKED: nothing happens by itself any more."""
        return self.job.state in SETTLED

    @property
    def progress(self) -> float | None:
        return self.job.progress

    def explain(self) -> Explanation:
        """Why it is where it is. `print(job.explain())` for people, `.as_json()` for programs."""
        return self._scheduler.explain(self.id)

    def events(self) -> list[Event]:
        """Everything that happened to it, in order."""
        entries: list[Event] = []
        while page := self._scheduler.store.events(entries[-1].n if entries else 0, 1_000, self.id):
            entries += page
        return [event for entry in entries for event in shown(entry)]

    def attempts(self) -> list[Dispatch]:
        return self._scheduler.store.attempts(self.id)

    # waiting

    def result(self, timeout: float | None = None) -> R:
        """Returns the value of the function. Raises JobFailed, JobCanceled, or TimeoutError with the reason of the wait."""
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
        if job.state is JobState.CANCELED:
            raise JobCanceled(f"job {self.id} was canceled", job_id=self.id)
        end, error = outcome_of(job, last)
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
        """Queued: at once. Running: the function must stop, and the job is CANCELED when it has."""
        return self._scheduler.job_service.cancel(self.id, by=self._scheduler.principal).state

    def retry(self) -> JobState:
        """FAILED or BLOCKED: back to the queue, with fresh counters."""
        return self._scheduler.job_service.retry(self.id, by=self._scheduler.principal).state

    def edit(self, **fields: Any) -> JobState:
        """`priority`, `not_before`, `deadline` of a queued job."""
        return self._scheduler.edit(self.id, fields)

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class Ending(NamedTuple):
    """`last`: the attempt that ended it; None if it ended in the queue."""

    job: Job
    last: Dispatch | None


class ResultWaiter:
    """
    Change notices of the store wake its thread, which reads only jobs that callers wait for. Under load a notice comes
    with every commit, so it rests twice as long as each read took: waiting then costs a third of one core at most,
    however many callers wait.
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
            return  # the disk may come back; a caller that cannot wait has a timeout
        for job_id in job_ids:
            if job_id not in jobs:
                self._settle(job_id, NotFound(f"job {job_id} has been forgotten", job_id=job_id))
            elif ending := self._ended(jobs[job_id]):
                self._settle(job_id, ending)

    def _ended(self, job: Job) -> Ending | None:
        if job.state not in SETTLED:
            return None
        last = self._store.dispatch(dispatch_id_of(job.job_id, job.fence)) if job.fence else None
        # A job may end after its last attempt did: in the queue again, it was canceled, or its deadline passed.
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
