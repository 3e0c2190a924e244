"""
One dispatch that this process holds, from claim to settlement, and the call of its function here or in a
worker process.

The heartbeat's thread writes the flags and the function's thread reads them: one word each, so no lock is
needed.

A worker process imports the module of the function, gets the arguments as the JSON that the queue holds, and
opens the store itself to report progress, spending and checkpoints.
"""

#: How long a function that must stop has to see it before its process is ended.
from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.core.errors import JobStopped, NotFound, StaleDispatch
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.types import EndReason, Moment, Money
from penstock.library.function import place_of
from penstock.scheduler.job_service import Answer, GrantedJob
from penstock.scheduler.rules import SchedulerRules
from penstock.work.context import JobFacts
from penstock.work.executors import RemoteCall, RemoteOutcome, run_in_process

if TYPE_CHECKING:
    from penstock.library.function import JobFunction
    from penstock.library.scheduler import Scheduler


log = logging.getLogger("penstock.library")


class AttemptReports(Protocol):
    """What an attempt needs of the job service."""

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
    """The channel of a function that runs in this process."""

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
        self.given_up = False  # another attempt has its place
        self.yielding = False
        self.fresh_progress: float | None = None
        self.spent: Money | None = None
        self.ended_by: Any = None  # how the hands can end it: their own business
        self.pid_told = False  # by a heartbeat

    @property
    def canceled(self) -> bool:
        # A lease that could not be renewed ends by the clock alone: without the store no heartbeat can tell.
        return self.stop is not None or self.lost or self._now() >= self.expires_at

    def progress(self, fraction: float) -> None:
        self.fresh_progress = fraction

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        self.spent = total
        self.beat()

    def log_handler(self) -> None:
        return None

    def save_checkpoint(self, text: str) -> None:
        if not self.beat(text):
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self.facts.job_id)

    def beat(self, checkpoint: str | None = None) -> bool:
        """Renews the lease and reports what is new. False: the lease is lost."""
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
        return self.ended_by.pid if hasattr(self.ended_by, "pid") else os.getpid()


def facts_of(job: Job, dispatch: Dispatch, checkpoint: str | None) -> JobFacts:
    intent = job.intent
    return JobFacts(
        job.job_id,
        intent.job_type,
        dispatch.dispatch_id,
        dispatch.fence,
        job.attempt,
        intent.addon_id,
        intent.tags,
        intent.deadline_at,
        intent.payload,
        checkpoint,
    )


GRACE_SEC: Final = 5.0


def grace_sec(_attempt: JobAttempt) -> float:
    return GRACE_SEC


def remote_call(attempt: JobAttempt, yield_file: str) -> RemoteCall:
    place = place_of(attempt.function.fn)
    home = None if _is_job_at(place) else _home_of(attempt.function.scheduler)
    return RemoteCall(_run, (place, attempt.facts, yield_file, home))


class _Home(NamedTuple):
    """The scheduler of a function that is registered under another name than its own: `job = scheduler.job(fn)`."""

    where: str
    rules: SchedulerRules


def _home_of(scheduler: Scheduler) -> _Home:
    return _Home(scheduler._place, scheduler.rules)


def _is_job_at(place: tuple[str, str]) -> bool:
    """Whether a worker that imports this place finds the job there, and not the plain function."""
    from penstock.library.function import JobFunction  # noqa: PLC0415  # it imports us

    found: Any = sys.modules.get(place[0])
    for part in place[1].split("."):
        found = getattr(found, part, None)
    return isinstance(found, JobFunction)


def _function_at(place: tuple[str, str], job_type: str, home: _Home | None) -> JobFunction[..., Any, Any]:
    from penstock.library.function import JobFunction  # noqa: PLC0415  # as above

    module, name = place
    found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    if isinstance(found, JobFunction):
        return found
    if home is None:
        raise TypeError(f"{module}.{name} is no job in a worker process")
    known = _registered.get((home.where, job_type))
    if known is None or known.fn is not found:
        from penstock.library.scheduler import Scheduler  # noqa: PLC0415  # as above

        known = Scheduler(home.where, rules=home.rules).job(name=job_type)(found)
        _registered[home.where, job_type] = known
    return known


#: Made in a worker process.
_registered: Final[dict[tuple[str, str], JobFunction[..., Any, Any]]] = {}


def _run(place: tuple[str, str], facts: JobFacts, yield_file: str, home: _Home | None) -> RemoteOutcome:
    function = _function_at(place, facts.job_type, home)
    return run_in_process(function.invoke, facts, yield_file, partial(_report, function.scheduler, facts))


def _report(
    scheduler: Scheduler, facts: JobFacts, progress: float | None, spent: Money | None, checkpoint: str | None
) -> bool:
    answer = scheduler._job_service.heartbeat(
        facts.dispatch_id, progress=progress, spent=spent, checkpoint=checkpoint, pid=os.getpid()
    )
    return answer.stop is None
