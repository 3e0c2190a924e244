"""What a job's function can know and say while it runs: `penstock.current_job()`, or a first parameter annotated `JobContext`."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, Final, NamedTuple, Protocol

from penstock.core.errors import JobStopped
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.types import DispatchId, Money
from penstock.library.json_codec import plain, text_of
from penstock.library.options import money

__all__ = ["JobContext", "JobFacts", "RunControl", "current_job", "detached", "facts_of", "here"]


class RunControl(Protocol):
    """What binds a running function to its dispatch: flags in its own process, the file from another one."""

    @property
    def cancelled(self) -> bool: ...

    @property
    def yielding(self) -> bool: ...

    def progress(self, fraction: float) -> None: ...

    def spend(self, total: Money) -> None: ...

    def save(self, checkpoint: str) -> None: ...


_NO_DISPATCH: Final = DispatchId("")


class JobFacts(NamedTuple):
    """What stays true for the whole attempt. It travels to other processes."""

    job_type: str
    job_id: str = ""
    dispatch_id: DispatchId = _NO_DISPATCH
    fence: int = 0
    attempt: int = 1
    payload: str = "{}"
    tags: tuple[str, ...] = ()
    unit: str = "USD"
    checkpoint: str | None = None


def facts_of(job: Job, dispatch: Dispatch, checkpoint: str | None) -> JobFacts:
    intent, failed = job.intent, job.counters
    return JobFacts(
        intent.job_type,
        job.job_id,
        dispatch.dispatch_id,
        dispatch.fence,
        1 + failed.crash + failed.unavailable + failed.error,
        intent.payload,
        intent.tags,
        intent.unit,
        checkpoint,
    )


class JobContext:
    """
    `attempt` counts from 1 and grows with each failure; `fence` grows with each start, whatever its cause: hand it to an outside
    system that can refuse older numbers, and a run that was given up can do no harm there.
    """

    def __init__(self, facts: JobFacts, ties: RunControl) -> None:
        self._facts, self._ties = facts, ties
        self._spent: Money = 0
        self._checkpoint = facts.checkpoint

    @property
    def id(self) -> str:
        return self._facts.job_id

    @property
    def job_type(self) -> str:
        return self._facts.job_type

    @property
    def tags(self) -> tuple[str, ...]:
        return self._facts.tags

    @property
    def attempt(self) -> int:
        return self._facts.attempt

    @property
    def fence(self) -> int:
        return self._facts.fence

    # leaving

    @property
    def cancelled(self) -> bool:
        """Canceled, out of time or money, or its lease could not be renewed: whatever it returns now is refused."""
        return self._ties.cancelled

    def should_yield(self) -> bool:
        """The program is stopping. Save a checkpoint and leave through `check()`; or finish, if that is quick."""
        return self._ties.yielding or self._ties.cancelled

    def check(self) -> None:
        """The way out of a deep loop: raises JobStopped when the run must end. A job that yields so goes back to the queue."""
        if self.should_yield():
            raise JobStopped("this run was asked to end", job_id=self.id)

    # telling

    def progress(self, fraction: float) -> None:
        """0 to 1. Cheap: written down with the next heartbeat, once a second at most."""
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(f"progress is {fraction!r}; it must be a number from 0 to 1")
        self._ties.progress(float(fraction))

    def spend(self, amount: float | str | Decimal) -> None:
        """So much more was spent, in the job's unit. On disk when it returns; at the job's cost_limit `cancelled` becomes true."""
        millionths = money("amount", amount)
        if millionths < 0:
            raise ValueError(f"amount is {amount!r}; it must be 0 or more {self._facts.unit}")
        self._spent += millionths
        self._ties.spend(self._spent)

    def save_checkpoint(self, value: Any) -> None:
        """Anything that JSON can carry. On disk when it returns; the next attempt begins with it."""
        text = text_of(value, "the checkpoint")
        self._ties.save(text)
        self._checkpoint = text

    def load_checkpoint(self, default: Any = None) -> Any:
        return default if self._checkpoint is None else plain(self._checkpoint)

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """Says which job every line is about."""
        return _JobLog(
            logging.getLogger(f"penstock.job.{self.job_type}"), {"job_id": self.id, "attempt": self.attempt}
        )

    def __repr__(self) -> str:
        return f"<JobContext {self.job_type} {self.id[-8:]}, attempt {self.attempt}>"


class _JobLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return f"[{str((self.extra or {}).get('job_id'))[-8:]}] {msg}", kwargs


#: Made only if the function asks: most jobs do not.
here: ContextVar[Callable[[], JobContext] | None] = ContextVar("penstock_job", default=None)


def current_job() -> JobContext | None:
    """The job that this code runs for, or None outside of one."""
    make = here.get()
    return None if make is None else make()


class _Loose:
    """A function called directly, with no job behind it: nobody cancels it, and what it says goes nowhere."""

    cancelled = yielding = False

    def progress(self, fraction: float) -> None:
        pass

    def spend(self, total: Money) -> None:
        pass

    def save(self, checkpoint: str) -> None:
        pass


def detached(job_type: str) -> JobContext:
    return JobContext(JobFacts(job_type), _Loose())
