"""`ArrayHandle`: an array that a program has enqueued, and what can be done with it as a whole."""

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
#: How often `wait` looks at the one row of the array.
_LOOK_SEC: Final = 0.05


class ArrayHandle(Generic[R]):
    """
    `created`: False when a unique key was used before, and this is that first array.

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
        """All that is known about it now."""
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
        """As ranges: `3,7-9`."""
        return ",".join(map(str, self._scheduler.array_service.failed_indices(self.record)))

    def job(self, index: int) -> JobHandle[R]:
        """The newest job of an index. NotFound: it has none yet, or no longer."""
        return JobHandle(
            self._scheduler, self._scheduler.array_service.job_of(self.id, index), self._arguments
        )

    def wait(self, timeout: float | None = None) -> JobState:
        """Until the last index has ended. TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (state := self.state) is JobState.RUNNING:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"array {self.id} has not ended after {timeout} s")
            time.sleep(_LOOK_SEC)
        return state

    def cancel(self) -> JobState:
        """No more jobs are made; those that wait are canceled, those that run must stop."""
        return self._scheduler.array_service.cancel(self.id, by=self._scheduler.principal).state

    def retry(self) -> JobState:
        """Run the failed indices again."""
        return self._scheduler.array_service.retry(self.id, by=self._scheduler.principal).state

    def __repr__(self) -> str:
        return f"<array {self.id}>"
