"""
A batch: a named set of jobs that is submitted, waited for, canceled and retried as one, with callback jobs.

    with scheduler.batch("nightly-2026-11-18", on_end=report, on_failure=warn) as batch:
        batch.enqueue_many(count, paths)
    batch.wait()

The block collects the calls, and its end submits all of them in one transaction, or none if the block raises.
After the block any process may add jobs: to an open batch until `close`, to any batch while one of its jobs
has not ended. `core/jobs/groups.py` has the rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

from penstock.core.errors import KeyConflict
from penstock.core.jobs.groups import MOST_MEMBERS, JobGroup, batch_id, member
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId
from penstock.library.handle import JobHandle
from penstock.scheduler.batches import BatchRequest
from penstock.stores.api import Query

if TYPE_CHECKING:
    from penstock.library.function import JobFunction
    from penstock.library.scheduler import Scheduler

#: How often `wait` reads the row of the batch, and how often it looks for BLOCKED jobs.
_LOOK_SEC: Final = 0.05
_LOOK_FOR_BLOCKED_SEC: Final = 1.0
#: A job without arguments, or a tuple of one and its arguments.
Callback: TypeAlias = "JobFunction[..., Any, Any] | tuple[Any, ...]"


class BatchProgress(NamedTuple):
    """How many jobs a batch has in all and in each final state, without its callbacks."""

    total: int
    done: int
    failed: int
    canceled: int

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.canceled


class Batch:
    """
    A batch of a scheduler. `jobs`, `on_end`, `on_failure`: the handles of its jobs, after the end of the
    block; a batch of `Scheduler.get_batch` has none. `id` lets other jobs wait for it: `after=[batch]`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        on_end: Callback | None = None,
        on_failure: Callback | None = None,
        *,
        is_open: bool = False,
        is_submitted: bool = False,
    ) -> None:
        self.id = batch_id(name)
        self.name, self._scheduler, self._is_open = name, scheduler, is_open
        self._is_submitted = is_submitted
        self._callbacks = {
            kind: _call(kind, callback)
            for kind, callback in (("on_end", on_end), ("on_failure", on_failure))
            if callback is not None
        }
        self._calls: list[tuple[JobFunction[..., Any, Any], Intent]] = []
        self.jobs: list[JobHandle[Any]] = []
        self.on_end: JobHandle[Any] | None = None
        self.on_failure: JobHandle[Any] | None = None

    # jobs

    def enqueue(self, function: JobFunction[..., Any, Any], /, *args: Any, **kwargs: Any) -> None:
        """Add a call, which the end of the block submits. After the block the job is submitted at once."""
        self._add(function, [function.request(args, kwargs)])

    def enqueue_many(self, function: JobFunction[..., Any, Any], calls: Iterable[Any]) -> None:
        """Add many calls. Each item has the arguments of one call, as in `JobFunction.enqueue_many`."""
        self._add(function, list(function.requests(calls)))

    def _add(self, function: JobFunction[..., Any, Any], intents: list[Intent]) -> None:
        if not self._is_submitted:
            self._calls += [(function, intent) for intent in intents]
            return
        receipts = self._scheduler.submit([member(intent, self.name) for intent in intents], 0)
        self.jobs += [function.handle(receipt) for receipt in receipts]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._submit()

    def _submit(self) -> None:
        size = len(self._calls)
        if size > MOST_MEMBERS:
            raise ValueError(f"batch {self.name} has {size:,} jobs; it may have {MOST_MEMBERS:,}")
        callbacks = {what: function.request(args, {}) for what, (function, args) in self._callbacks.items()}
        jobs = [intent for _, intent in self._calls]
        addon_id = next((intent.addon_id for intent in (*jobs, *callbacks.values())), None)
        request = BatchRequest(
            self.name,
            AddonId(self._scheduler.addon) if addon_id is None else addon_id,
            jobs,
            callbacks.get("on_end"),
            callbacks.get("on_failure"),
            self._is_open,
        )
        try:
            submitted = self._scheduler.batch_service.submit(request, self._scheduler.principal)
        except KeyConflict as conflict:
            raise ValueError(str(conflict)) from None
        self._is_submitted = True
        functions = [function for function, _ in (*self._calls, *self._callbacks.values())]
        handles = [f.handle(receipt) for f, receipt in zip(functions, submitted.receipts, strict=True)]
        self.jobs = handles[:size]
        for what, handle in zip(self._callbacks, handles[size:], strict=True):
            setattr(self, what, handle)

    # the batch as one

    @property
    def record(self) -> JobGroup:
        """The batch as it is now. NotFound: it is not submitted, or was pruned."""
        return self._scheduler.batch_service.get(self.name)

    @property
    def state(self) -> JobState:
        """RUNNING until the batch is closed and its last job has ended; then DONE, FAILED or CANCELED."""
        return self.record.state or JobState.RUNNING

    def progress(self) -> BatchProgress:
        group = self._scheduler.store.group(self.id) if self._is_submitted else None
        if group is None:
            return BatchProgress(0, 0, 0, 0)
        return BatchProgress(group.total, group.done, group.failed, group.canceled)

    def wait(self, timeout: float | None = None) -> BatchProgress:
        """
        Wait until the batch has ended, or all its remaining jobs are BLOCKED, or `timeout` seconds are over.
        Its callbacks may still run then.
        """
        until = None if timeout is None else time.monotonic() + timeout
        look_for_blocked = 0.0
        while True:
            group, now = self.record, time.monotonic()
            if group.state is not None or (until is not None and now >= until):
                break
            if now >= look_for_blocked and not group.is_open:
                look_for_blocked = now + _LOOK_FOR_BLOCKED_SEC
                counts = self._scheduler.store.count(Query(tag=self.id))
                if group.live and counts.get(JobState.BLOCKED, 0) == group.live:
                    break
            time.sleep(_LOOK_SEC)
        return self.progress()

    def close(self) -> JobState:
        """Close an open batch: it ends when the jobs that it has now have ended."""
        self._scheduler.batch_service.close(self.name, self._scheduler.principal)
        return self.state

    def cancel(self) -> int:
        """Close the batch and cancel every job that has not ended. Returns how many there were."""
        return self._scheduler.batch_service.cancel(self.name, self._scheduler.principal).changed

    def retry(self) -> int:
        """Queue every FAILED or BLOCKED job again. Callbacks that ran do not run again."""
        return self._scheduler.batch_service.retry(self.name, self._scheduler.principal).changed

    def __repr__(self) -> str:
        return f"<batch {self.name} of {len(self.jobs or self._calls)} jobs>"


def _call(kind: str, callback: Any) -> tuple[JobFunction[..., Any, Any], tuple[Any, ...]]:
    function, *args = callback if isinstance(callback, tuple) else (callback,)
    request: Callable[..., Any] | None = getattr(function, "request", None)
    if request is None:
        raise TypeError(f"{kind} is {callback!r}; it must be a job, or a tuple of a job and its arguments")
    request(tuple(args), {})  # refuses wrong arguments here
    return function, tuple(args)
