"""
`JobFunction`: a function that is also a job. Call it as before, or enqueue its call; both are typed alike.

Enqueueing makes an intent of the arguments, submits it, and returns a handle when the job is on disk.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, Unpack

from penstock.core.errors import BadArgument, KeyConflict
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import JobId
from penstock.library.arguments import Arguments
from penstock.library.handle import JobHandle
from penstock.library.options import JobOptions, Options
from penstock.stores.api import Receipt
from penstock.work.context import CurrentJob, JobContext, JobFacts, NoChannel, current_job_or_none

if TYPE_CHECKING:
    from penstock.library.scheduler import Scheduler

__all__ = ["JobFunction", "Place", "Within", "place_of"]

#: Where a worker process finds a function: its module, and the path inside it.
Place: TypeAlias = tuple[str, str]


def place_of(fn: Any) -> Place:
    if "<" in fn.__qualname__:
        raise ValueError(
            f"{fn.__qualname__} is defined inside a function, or is a lambda: no worker process can find it by name; "
            'define it at the top of a module, or use kind="thread"'
        )
    return fn.__module__, fn.__qualname__


P = ParamSpec("P")
R = TypeVar("R")
#: What calling it directly gives: R, or a coroutine of R.
C = TypeVar("C")
Submit: TypeAlias = Callable[[Sequence[Intent]], list[Receipt]]


class JobFunction(Generic[P, C, R]):
    def __init__(
        self, scheduler: Scheduler, fn: Callable[..., C], options: JobOptions, arguments: Arguments
    ) -> None:
        functools.update_wrapper(self, fn)
        self.scheduler, self.fn, self.arguments = scheduler, fn, arguments
        self._options = options
        self._intents = options.intents()
        self.is_async = inspect.iscoroutinefunction(fn)

    @property
    def name(self) -> str:
        """The job's type in the queue. Whoever opens the same file and registers this name can run what was enqueued."""
        return self._options.like.job_type

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """Now, here, without the scheduler."""
        if self.arguments.wants_context:
            return self.fn(current_job_or_none() or self._detached(), *args, **kwargs)
        return self.fn(*args, **kwargs)

    def _detached(self) -> JobContext:
        return JobContext(JobFacts("", self.name), NoChannel())

    def invoke(self, job: CurrentJob) -> C:
        """For a job, with the arguments of its payload."""
        args, kwargs = self.arguments.decode(job.facts.payload)
        if self.arguments.wants_context:
            return self.fn(job.context, *args, **kwargs)
        return self.fn(*args, **kwargs)

    def options(self, **given: Unpack[Options]) -> JobFunction[P, C, R]:
        """The same job with other options, for the calls enqueued through what this returns."""
        options = self._options.take(dict(given))
        self.scheduler._check(options)
        return JobFunction(self.scheduler, self.fn, options, self.arguments)

    def within(self, connection: Any) -> Within[P, R]:
        """
        To enqueue as part of a transaction of yours: the jobs are there when it commits and never were when it rolls back. `connection`:
        a psycopg Connection, or a SQLAlchemy Session or Connection on psycopg, to the database that the scheduler is in.
        """
        return Within(self, connection)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """On disk when it returns."""
        return self._enqueue(
            lambda intents: self.scheduler._submit(intents, self._options.wait_for_space), args, kwargs
        )

    def _enqueue(self, submit: Submit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobHandle[R]:
        intent = self._intent(args, kwargs)
        try:
            [receipt] = submit([intent])
        except KeyConflict as conflict:
            return self._first(conflict, intent)
        return self._handle(receipt)

    async def enqueue_async(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """The same for an event loop, which goes on while the disk writes."""
        intent = self._intent(args, kwargs)
        try:
            [receipt] = await self.scheduler._submit_async([intent], self._options.wait_for_space)
        except KeyConflict as conflict:
            return self._first(conflict, intent)
        return self._handle(receipt)

    def enqueue_many(self, calls: Iterable[Any]) -> list[JobHandle[R]]:
        """
        All of them or none, in one transaction. Each item is the arguments of one call: a tuple of them, a dict by name, or the
        argument itself where there is one (a tuple or a dict as the one argument is written `((1, 2),)`).
        """
        return self._enqueue_many(
            lambda intents: self.scheduler._submit(intents, self._options.wait_for_space), calls
        )

    def _enqueue_many(self, submit: Submit, calls: Iterable[Any]) -> list[JobHandle[R]]:
        intents = [self._intent(*_call(item)) for item in calls]
        return [self._handle(receipt) for receipt in submit(intents)] if intents else []

    def _intent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Intent:
        payload = self.arguments.encode(args, kwargs)
        if self._intents is not None:
            return self._intents(payload)
        return self._options.intent(payload, self.scheduler._store.now(), args, kwargs)

    def _first(self, conflict: KeyConflict, intent: Intent) -> JobHandle[R]:
        """The same call under other times or another priority is still the job that was asked for."""
        job_id = conflict.data.get("job_id")
        first = None if job_id is None else self.scheduler._store.job(job_id)
        if first is None or (first.intent.job_type, first.intent.payload) != (
            intent.job_type,
            intent.payload,
        ):
            raise conflict
        return self._handle(Receipt(first.job_id, first.state, created=False))

    def _handle(self, receipt: Receipt) -> JobHandle[R]:
        return JobHandle(
            self.scheduler,
            JobId(receipt.job_id),
            self.arguments,
            created=receipt.created,
            deadline_reachable=receipt.deadline_reachable,
        )

    def __repr__(self) -> str:
        return f"<job {self.name} on {self.scheduler.where}>"


class Within(Generic[P, R]):
    """A job's function on its way into a transaction of the caller's. What is returned stands for a job that others see after the commit."""

    def __init__(self, function: JobFunction[P, Any, R], connection: Any) -> None:
        self._function, self._connection = function, connection

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        return self._function._enqueue(self._submit, args, kwargs)

    def enqueue_many(self, calls: Iterable[Any]) -> list[JobHandle[R]]:
        return self._function._enqueue_many(self._submit, calls)

    def _submit(self, intents: Sequence[Intent]) -> list[Receipt]:
        return self._function.scheduler._submit_within(self._connection, intents)


def _call(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match item:
        case tuple():
            return item, {}
        case dict():
            if not all(isinstance(name, str) for name in item):
                raise BadArgument("a dict in enqueue_many is the arguments of a call by name", argument=None)
            return (), item
        case _:
            return (item,), {}
