"""
One dispatch that this process holds, from claim to settlement, and the running of its function.

The flags are written by the heartbeat's thread and read by the function's: one word each, so no lock is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.core.errors import JobStopped, NotFound, StaleDispatch, Unavailable
from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.intent import MAX_PAYLOAD
from penstock.core.jobs.types import Moment, Money
from penstock.core.text import is_kind, safe_str, type_name
from penstock.library.context import JobContext, JobFacts, RunControl, facts_of, here
from penstock.library.handle import Outcome, failure
from penstock.library.json_codec import text_of
from penstock.pools.future import Call
from penstock.scheduler.job_service import Answer, GrantedJob

if TYPE_CHECKING:
    from penstock.library.function import JobFunction

__all__ = ["JobAttempt", "perform", "perform_async"]

log = logging.getLogger("penstock.library")


class AttemptReports(Protocol):
    """What an attempt needs of the desk."""

    def heartbeat(
        self,
        dispatch_id: Any,
        *,
        progress: float | None = None,
        spent: Money | None = None,
        checkpoint: str | None = None,
        pid: int | None = None,
    ) -> Answer: ...


class JobAttempt:
    """Ties of a function that runs in this process."""

    __slots__ = (
        "_job_service",
        "_now",
        "began",
        "claimed_at",
        "ended_by",
        "expires_at",
        "facts",
        "fresh_progress",
        "function",
        "given_up",
        "lent",
        "lost",
        "pid_told",
        "spent",
        "stop",
        "yielding",
    )  # fmt: skip

    def __init__(
        self,
        claimed: GrantedJob,
        function: JobFunction[..., Any, Any],
        job_service: AttemptReports,
        now: Callable[[], Moment],
    ) -> None:
        self.facts: JobFacts = facts_of(*claimed)
        self.function = function
        self._job_service, self._now = job_service, now
        self.expires_at: Moment = claimed.dispatch.expires_at
        self.claimed_at: Moment = claimed.dispatch.admitted_at
        self.began: float = 0.0  # on the monotonic clock; 0: it waits for a thread
        self.stop: EndReason | None = None
        self.lost = False
        self.given_up = False  # its place is somebody else's
        self.lent = False  # it runs in a thread that is not of the hands
        self.yielding = False
        self.fresh_progress: float | None = None
        self.spent: Money | None = None
        self.ended_by: Any = None  # how the hands can end it: their own business
        self.pid_told = False  # by a heartbeat

    @property
    def cancelled(self) -> bool:
        # A lease that could not be renewed ends by the clock alone: with the store away nobody can tell us.
        return self.stop is not None or self.lost or self._now() >= self.expires_at

    def progress(self, fraction: float) -> None:
        self.fresh_progress = fraction

    def spend(self, total: Money) -> None:
        self.spent = total
        self.beat()

    def save(self, checkpoint: str) -> None:
        if not self.beat(checkpoint):
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self.facts.job_id)

    def beat(self, checkpoint: str | None = None) -> bool:
        """Renew the lease, and tell what there is to tell. False: it is not ours any more."""
        progress, self.fresh_progress = self.fresh_progress, None
        try:
            answer = self._job_service.heartbeat(
                self.facts.dispatch_id,
                progress=progress,
                spent=self.spent,
                checkpoint=checkpoint,
                pid=self.pid,
            )
        except (StaleDispatch, NotFound):
            self.lost = True
            return False
        self.pid_told = True
        self.expires_at = answer.expires_at
        self.stop = answer.stop
        return True

    @property
    def pid(self) -> int | None:
        """Of the process that runs the function: this one, or the worker that has its call."""
        return self.ended_by.pid if isinstance(self.ended_by, Call) else os.getpid()


def perform(function: JobFunction[..., Any, Any], facts: JobFacts, ties: RunControl) -> Outcome:
    token = here.set(context := partial(_context, [], facts, ties))
    try:
        args, kwargs = function.arguments.decode(facts.payload)
        return _returned(function.run(context, args, kwargs))
    except BaseException as error:  # noqa: BLE001  # whatever a job raises is its outcome, SystemExit too
        return _raised(error, ties)
    finally:
        here.reset(token)


async def perform_async(function: JobFunction[..., Any, Any], facts: JobFacts, ties: RunControl) -> Outcome:
    token = here.set(context := partial(_context, [], facts, ties))
    try:
        args, kwargs = function.arguments.decode(facts.payload)
        return _returned(await function.run(context, args, kwargs))
    except BaseException as error:  # noqa: BLE001  # as above; its task is ours, so a CancelledError ends here too
        return _raised(error, ties)
    finally:
        here.reset(token)


def _context(made: list[JobContext], facts: JobFacts, ties: RunControl) -> JobContext:
    """Few ask for it. It is one, however often it is asked for."""
    if not made:
        made.append(JobContext(facts, ties))
    return made[0]


_DONE: Final = Outcome(EndReason.COMPLETED)


def _returned(value: Any) -> Outcome:
    if value is None:
        return _DONE
    try:
        text = text_of(value)
    except BaseException as error:  # noqa: BLE001  # a foreign type may raise anything
        raise TypeError(
            f"it returned a {type_name(value)}, which JSON cannot carry: {safe_str(error)}"
        ) from None
    if len(text) > MAX_PAYLOAD:
        raise ValueError(
            f"it returned {len(text)} characters of JSON, the most is {MAX_PAYLOAD}: return where it is kept"
        )
    return Outcome(EndReason.COMPLETED, result=text)


def _raised(error: BaseException, ties: RunControl) -> Outcome:
    asked = ties.cancelled or ties.yielding
    if asked and is_kind(error, JobStopped):
        return Outcome(EndReason.GRACEFUL_SHUTDOWN)
    if is_kind(error, Unavailable):
        return failure(error, EndReason.UNAVAILABLE)
    return failure(error)
