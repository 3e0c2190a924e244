"""
`JobHandle`: one job, to look at, to wait for, to cancel. `enqueue` returns one; any process that opens the file can
make one by the job's id.

A failure crosses processes as text alone: an exception would have to be rebuilt from a file that others can write to.
"""

from __future__ import annotations

from concurrent.futures import TimeoutError as WaitTimeout
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.errors import JobCanceled, JobFailed, NotFound
from penstock.core.jobs.explain import Explanation
from penstock.core.jobs.job import Dispatch, Event, Job, outcome_of, shown
from penstock.core.jobs.states import SETTLED, JobState
from penstock.core.jobs.types import JobId
from penstock.library.result_waiter import Ending
from penstock.work.json_codec import plain

if TYPE_CHECKING:
    from penstock.library.function import Arguments
    from penstock.library.scheduler import Scheduler


R = TypeVar("R")


class JobHandle(Generic[R]):
    """
    `created`: False when a unique key was used before, and this is that first job. `deadline_reachable`: how that looked when it was
    enqueued; None without a deadline, or when it cannot be said.
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
        job = self._scheduler._store.job(self.id)
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
        return self._scheduler._explain(self.id)

    def events(self) -> list[Event]:
        """Everything that happened to it, in order."""
        found: list[Event] = []
        while page := self._scheduler._store.events(found[-1].n if found else 0, 1_000, self.id):
            found += page
        return [event for entry in found for event in shown(entry)]

    def attempts(self) -> list[Dispatch]:
        return self._scheduler._store.attempts(self.id)

    # waiting

    def result(self, timeout: float | None = None) -> R:
        """What the function returned. Raises JobFailed, JobCanceled, or TimeoutError that says what it is waiting for."""
        ending = self._scheduler._waiter.ending(self.id)
        if ending is None:
            waiting = self._scheduler._waiter.watch(self.id)
            try:
                ending = waiting.result(timeout)
            except WaitTimeout:
                raise self._late(timeout) from None
            finally:
                self._scheduler._waiter.forget(self.id, waiting)
        return self._outcome(ending)

    async def wait(self) -> R:
        """`result` for an event loop; `asyncio.timeout` bounds it."""
        import asyncio  # noqa: PLC0415  # slow to import for those who do not use it

        waiting = self._scheduler._waiter.watch(self.id)
        try:
            ending = await asyncio.wrap_future(waiting)
        finally:
            self._scheduler._waiter.forget(self.id, waiting)
        return self._outcome(ending)

    def _late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"job {self.id} has not ended after {timeout} s: {self.explain().text}")

    def _outcome(self, ending: Ending) -> R:
        job, last = ending
        if job.state is JobState.DONE:
            text = None if last is None else last.result
            if self._arguments is not None:
                return self._arguments.result(text)  # type: ignore[no-any-return]  # by the function's own annotation
            return None if text is None else plain(text)  # type: ignore[return-value]  # whose function is not known here
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
        """Queued: at once. Running: the run is told, and lands as CANCELED when it is gone."""
        return self._scheduler._job_service.cancel(self.id, by=self._scheduler._principal).state

    def retry(self) -> JobState:
        """FAILED or BLOCKED: back to the queue, with fresh counters."""
        return self._scheduler._job_service.retry(self.id, by=self._scheduler._principal).state

    def edit(self, **fields: Any) -> JobState:
        """`priority`, `not_before`, `deadline` of a queued job."""
        return self._scheduler._edit(self.id, fields)

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)
