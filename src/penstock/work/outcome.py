"""
Calls a job function and turns its return or its exception into one `Outcome`.

User code can return and raise anything. SystemExit, KeyboardInterrupt and exceptions that override
`__class__` or `__str__` are outcomes too: the thread or process then runs the next job.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from types import CoroutineType, GeneratorType
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.core.errors import BadArgument, JobStopped, Unavailable
from penstock.core.jobs.types import EndReason
from penstock.core.text import error_text, is_kind, safe_str, type_name
from penstock.work.context import JobChannel, JobContext, JobFacts, json_of

#: Characters of JSON.
MAX_RESULT: Final = 1_000_000


class CurrentJob:
    """A job whose function runs. Its context is made on demand, because most functions never use it."""

    __slots__ = ("_context", "channel", "facts")

    def __init__(self, facts: JobFacts, channel: JobChannel) -> None:
        self.facts, self.channel = facts, channel
        self._context: JobContext | None = None

    @property
    def context(self) -> JobContext:
        if self._context is None:
            self._context = JobContext(self.facts, self.channel)
        return self._context


current: Final[ContextVar[CurrentJob | None]] = ContextVar("penstock_job", default=None)


def current_job() -> JobContext:
    """
    The context of the job that this code runs for. Raises LookupError outside a job.

    For example:

        def crawl(site: str) -> int:
            penstock.current_job().progress(0.5, "half of it")
            return 1
    """
    job = current.get()
    if job is None:
        raise LookupError("current_job() was called outside a job")
    return job.context


def current_job_or_none() -> JobContext | None:
    job = current.get()
    return None if job is None else job.context


class Outcome(NamedTuple):
    """How an attempt ended. The end rules of the core decide where its job goes."""

    end: EndReason
    #: As JSON.
    result: str | None = None
    #: One line that names the error, then the traceback.
    error: str | None = None


DONE: Final = Outcome(EndReason.COMPLETED)
#: The function ended because it was asked to yield.
STOPPED: Final = Outcome(EndReason.COOPERATIVE_PREEMPTION)
#: The function never began.
RELEASED: Final = Outcome(EndReason.RELEASED)
#: A function that calls the user's function. It may return a coroutine or a generator.
Invocation: TypeAlias = Callable[[CurrentJob], Any]


def run(invocation: Invocation, job: CurrentJob) -> Outcome:
    """
    Run a function, a coroutine (in an event loop of its own) or a generator (phase by phase) to its end.
    """
    token = current.set(job)
    try:
        value = invocation(job)
        if type(value) is CoroutineType:
            value = _run_coroutine(value)
        if type(value) is GeneratorType:
            value = _run_phases(value, job)
        return _returned(value)
    except BaseException as error:  # noqa: BLE001  # see above
        return _raised(error, job)
    finally:
        current.reset(token)


async def run_async(invocation: Invocation, job: CurrentJob) -> Outcome:
    """Run a coroutine in a task of its own: a CancelledError that ends the task is an outcome too."""
    token = current.set(job)
    try:
        return _returned(await invocation(job))
    except BaseException as error:  # noqa: BLE001  # see above
        return _raised(error, job)
    finally:
        current.reset(token)


def call_with(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the function. Raises BadArgument, with the function's name, when the arguments do not fit."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        # Raised by the call itself, before the function ran. Binding the arguments first would cost every
        # call.
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            name = getattr(function, "__qualname__", type_name(function))
            raise BadArgument(f"the payload does not fit {name}(): {safe_str(error)}") from None
        raise


def failure(error: BaseException, end: EndReason = EndReason.JOB_ERROR) -> Outcome:
    return Outcome(end, error=error_text(error))


def _run_coroutine(coroutine: CoroutineType[Any, Any, Any]) -> Any:
    import asyncio  # noqa: PLC0415  # slow to import, and most functions are not coroutines

    async def awaited() -> tuple[Any, BaseException | None]:
        # The exception must not pass through the event loop, which reads its `__class__` and then never ends.
        try:
            return await coroutine, None
        except BaseException as error:  # noqa: BLE001  # raised again outside
            return None, error

    value, error = asyncio.run(awaited())
    if error is not None:
        raise error
    return value


def _run_phases(phases: Generator[Any, None, Any], job: CurrentJob) -> Any:
    """
    Run a generator. The end of each phase is a safe place to stop, and the yielded value is the checkpoint.
    """
    while True:
        try:
            checkpoint = next(phases)
        except StopIteration as stop:
            return stop.value
        if checkpoint is not None:
            job.context.save_checkpoint(checkpoint)
        if job.context.should_yield:
            phases.close()
            job.context.check()


def _returned(value: Any) -> Outcome:
    if value is None:
        return DONE
    try:
        text = json_of(value)
    except BaseException as error:  # noqa: BLE001  # a foreign type may raise anything
        raise TypeError(
            f"it returned a {type_name(value)}, which JSON cannot carry: {safe_str(error)}"
        ) from None
    if len(text) > MAX_RESULT:
        raise ValueError(
            f"it returned {len(text)} characters of JSON; at most {MAX_RESULT} are kept: store it elsewhere and return its address"
        )
    return Outcome(EndReason.COMPLETED, result=text)


def _raised(error: BaseException, job: CurrentJob) -> Outcome:
    if is_kind(error, JobStopped) and (job.channel.canceled or job.channel.yielding):
        return STOPPED
    if is_kind(error, Unavailable):
        return failure(error, EndReason.UNAVAILABLE)
    return failure(error)
