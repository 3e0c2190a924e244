"""
A batch: a named set of jobs that is submitted, waited for, canceled and retried as one, with callback jobs.

    with scheduler.batch("nightly-2026-11-18", on_end=report, on_failure=warn) as batch:
        batch.enqueue_many(count, paths)
    batch.wait()

The block collects the calls; its end submits all of them in one transaction, or none if the block raises. The
callbacks are jobs that depend on the others, so they become ready in the transaction that ends the last job, or
the first that fails, whatever process writes it. The jobs have the tag `batch:NAME`, by which the command line, the
page and the HTTP API find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

from msgspec.structs import replace

from penstock.core.jobs.dependencies import LOCAL, MOST_PARENTS, Dependency, IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import ENDED, JobState, Move
from penstock.core.jobs.types import BATCH_TAG, CALLBACK_TAG, MOST_BATCH_NAME, JobId
from penstock.library.handle import JobHandle
from penstock.stores.api import Query

if TYPE_CHECKING:
    from penstock.library.function import JobFunction
    from penstock.library.scheduler import Scheduler

_PAGE: Final = 1_000
#: A job without arguments, or a tuple of one and its arguments.
Callback: TypeAlias = "JobFunction[..., Any, Any] | tuple[Any, ...]"


class BatchProgress(NamedTuple):
    """How many jobs of a batch there are, without its callbacks."""

    total: int
    done: int
    failed: int
    canceled: int

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.canceled


class Batch:
    """`jobs`, `on_end`, `on_failure`: the handles, from the end of the block on."""

    def __init__(
        self, scheduler: Scheduler, name: str, on_end: Callback | None, on_failure: Callback | None
    ) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MOST_BATCH_NAME:
            raise ValueError(
                f"the name of a batch is {name!r}; it must be a text of 1..{MOST_BATCH_NAME} characters"
            )
        self.name, self._scheduler = name, scheduler
        self._callbacks = {
            kind: _call(kind, callback)
            for kind, callback in (("on_end", on_end), ("on_failure", on_failure))
            if callback is not None
        }
        self._calls: list[tuple[JobFunction[..., Any, Any], Intent]] = []
        self.jobs: list[JobHandle[Any]] = []
        self.on_end: JobHandle[Any] | None = None
        self.on_failure: JobHandle[Any] | None = None

    # what it is made of

    def enqueue(self, function: JobFunction[..., Any, Any], /, *args: Any, **kwargs: Any) -> None:
        self._calls.append((function, function.request(args, kwargs)))

    def enqueue_many(self, function: JobFunction[..., Any, Any], calls: Iterable[Any]) -> None:
        """Each item is the arguments of one call, as in `JobFunction.enqueue_many`."""
        self._calls += [(function, intent) for intent in function.requests(calls)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._submit()

    def _submit(self) -> None:
        size = len(self._calls)
        if not 0 < size <= MOST_PARENTS:
            raise ValueError(f"batch {self.name} has {size} jobs; it must have 1..{MOST_PARENTS}")
        if sum(self._counts().values()):
            raise ValueError(f"there is a batch {self.name} already: give this one another name")
        intents = [_tagged(intent, f"{BATCH_TAG}{self.name}") for _, intent in self._calls]
        functions = [function for function, _ in self._calls]
        for what, (function, args) in self._callbacks.items():
            condition = ParentCondition.FAILED if what == "on_failure" else ParentCondition.DONE
            intent = replace(
                _tagged(function.request(args, {}), f"{CALLBACK_TAG}{self.name}"),
                after=tuple(Dependency(JobId(f"{LOCAL}{at}"), condition) for at in range(size)),
                if_unmet=IfUnmet.ANY if what == "on_failure" else IfUnmet.CANCEL,
            )
            functions.append(function)
            intents.append(intent)
        receipts = self._scheduler.submit(intents, 0)
        handles = [f.handle(receipt) for f, receipt in zip(functions, receipts, strict=True)]
        self.jobs = handles[:size]
        for what, handle in zip(self._callbacks, handles[size:], strict=True):
            setattr(self, what, handle)

    # the batch as one

    def progress(self) -> BatchProgress:
        counts = self._counts()
        ended = (counts.get(state, 0) for state in (JobState.DONE, JobState.FAILED, JobState.CANCELED))
        return BatchProgress(sum(counts.values()), *ended)

    def wait(self, timeout: float | None = None) -> BatchProgress:
        """Until every job is settled, or `timeout` seconds are over; the callbacks may still run."""
        waiter = self._scheduler.waiter
        pending: dict[JobId, Future[Any]] = {
            handle.id: waiter.watch(handle.id) for handle in self.jobs if handle.state not in ENDED
        }
        try:
            wait(pending.values(), timeout)
        finally:
            for job_id, ending in pending.items():
                waiter.forget(job_id, ending)
        return self.progress()

    def cancel(self) -> int:
        """Cancel every job that has not ended. Returns how many there were."""
        return self._change(Move.CANCEL)

    def retry(self) -> int:
        """Queue every FAILED or BLOCKED job again. Callbacks that ran do not run again."""
        return self._change(Move.RETRY)

    def _change(self, move: Move) -> int:
        changed, after = 0, 0
        while True:
            query = Query(tag=f"{BATCH_TAG}{self.name}", after=after, limit=_PAGE)
            result = self._scheduler.job_service.change_all(move, query)
            changed += result.changed
            if result.next is None:
                return changed
            after = result.next

    def _counts(self) -> dict[JobState, int]:
        return self._scheduler.store.count(Query(tag=f"{BATCH_TAG}{self.name}"))

    def __repr__(self) -> str:
        return f"<batch {self.name} of {len(self.jobs or self._calls)} jobs>"


def _tagged(intent: Intent, tag: str) -> Intent:
    return replace(intent, tags=(*intent.tags, tag))


def _call(kind: str, callback: Any) -> tuple[JobFunction[..., Any, Any], tuple[Any, ...]]:
    function, *args = callback if isinstance(callback, tuple) else (callback,)
    request: Callable[..., Any] | None = getattr(function, "request", None)
    if request is None:
        raise TypeError(f"{kind} is {callback!r}; it must be a job, or a tuple of a job and its arguments")
    request(tuple(args), {})  # refuses wrong arguments here
    return function, tuple(args)
