"""`ArrayHandle`: an array that a program has enqueued, to read, wait for, cancel and retry as one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.core.jobs.arrays import ArrayRecord
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId
from penstock.library.handle import JobHandle

if TYPE_CHECKING:
    from penstock.library.function import Arguments
    from penstock.library.scheduler import Scheduler

R = TypeVar("R")
#: How often `wait` reads the row of the array.
_LOOK_SEC: Final = 0.05


class ArrayHandle(Generic[R]):
    """
    One array of a scheduler. `created`: False if another call had used the unique key before, and this is its
    array.

    For example:

        array = thumbnail.enqueue_array(range(1, 1001), at_once=8)
        array.wait()
        print(array.done, array.failed_indices)
    """

    def __init__(
        self,
        scheduler: Scheduler,
        array_id: JobId,
        arguments: Arguments | None = None,
        *,
        created: bool = True,
    ) -> None:
        self._scheduler, self.id, self._arguments, self.created = scheduler, array_id, arguments, created

    @property
    def record(self) -> ArrayRecord:
        """The array as it is now. NotFound: it was pruned."""
        return self._scheduler.array_service.get(self.id)

    @property
    def state(self) -> JobState:
        """RUNNING until the last index has ended; then DONE, FAILED if an index failed, or CANCELED."""
        return self.record.state

    @property
    def progress(self) -> float:
        """The fraction of the indices that have ended."""
        record = self.record
        return record.progress.ended_count / record.array.spec.total

    @property
    def done(self) -> int:
        """How many indices are DONE."""
        return self.record.progress.done

    @property
    def failed_indices(self) -> str:
        """The failed indices as ranges: `3,7-9`."""
        return ",".join(map(str, self._scheduler.array_service.failed_indices(self.record)))

    def job(self, index: int) -> JobHandle[R]:
        """The newest job of an index. NotFound: it is not made yet, or was pruned."""
        return JobHandle(
            self._scheduler, self._scheduler.array_service.job_of(self.id, index), self._arguments
        )

    def wait(self, timeout: float | None = None) -> JobState:
        """Wait until the last index has ended. TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (state := self.state) is JobState.RUNNING:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"array {self.id} has not ended after {timeout} s")
            time.sleep(_LOOK_SEC)
        return state

    def cancel(self) -> JobState:
        """Make no more jobs, cancel the queued ones, and let the running ones stop."""
        return self._scheduler.array_service.cancel(self.id, by=self._scheduler.principal).state

    def retry(self) -> JobState:
        """Run the failed indices again."""
        return self._scheduler.array_service.retry(self.id, by=self._scheduler.principal).state

    def __repr__(self) -> str:
        return f"<array {self.id}>"
