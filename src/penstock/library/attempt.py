"""
One attempt of this process, from claim to report; and the call of its function in a worker process.

A worker process imports the function's module, gets the arguments as JSON, and opens the store itself to
report progress, spending and checkpoints.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import JobStopped
from penstock.core.jobs.types import Moment, Money, seconds
from penstock.library.function import import_path_of
from penstock.scheduler.job_service import GrantedJob, JobService
from penstock.scheduler.rules import SchedulerRules
from penstock.work.context import JobFacts
from penstock.work.executors import ProcessSignals, RemoteCall, RemoteOutcome, run_in_process
from penstock.work.leases import (
    FunctionLease,
    LeaseKeeper,
    RenewalReply,
    RenewalRequest,
    Send,
    facts_of,
)

if TYPE_CHECKING:
    from penstock.library.function import JobFunction


class JobAttempt(FunctionLease):
    """
    The lease of a function that this process runs, and its channel to the scheduler. The store is near, so
    spending and checkpoints are written at once and do not wait for a heartbeat.
    """

    function: JobFunction[..., Any, Any]

    def __init__(
        self,
        claimed: GrantedJob,
        function: JobFunction[..., Any, Any],
        keeper: LeaseKeeper[JobAttempt],
        sent_at: float,
    ) -> None:
        """`sent_at`: when the dispatch was admitted, on the keeper's clock."""
        dispatch = claimed.dispatch
        ttl = seconds(dispatch.expires_at - dispatch.admitted_at)
        super().__init__(facts_of(*claimed), function, keeper, sent_at, ttl)
        self.claimed_at: Moment = dispatch.admitted_at

    def spend(self, total: Money, amount: Money) -> None:
        super().spend(total, amount)
        self.report()

    def save_checkpoint(self, text: str) -> None:
        self.latest_checkpoint = text
        if not self.report():
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self.facts.job_id)

    def report(self) -> bool:
        """
        Renew the lease and report new values. False: the lease is lost. Unavailable: nothing was written.
        """
        for _, error in self._keeper.send_now([self]):
            raise error
        return not self.lost


def renewals(job_service: JobService, now: Callable[[], Moment]) -> Send:
    """The function by which a lease keeper renews leases: heartbeats that this process commits itself."""

    def send(requests: Sequence[RenewalRequest]) -> list[RenewalReply | Exception]:
        replies: list[RenewalReply | Exception] = []
        for request in requests:
            answer = job_service.heartbeat(**request._asdict())
            ttl = seconds(answer.expires_at - now())
            replies.append(RenewalReply(ttl, answer.stop, answer.should_yield))
        return replies

    return send


#: How long a function may take to stop before its process is ended.
GRACE_SEC: Final = 5.0


def grace_sec(_attempt: JobAttempt) -> float:
    return GRACE_SEC


def remote_call(attempt: JobAttempt, signals: ProcessSignals) -> RemoteCall:
    import_path, scheduler = import_path_of(attempt.function.fn), attempt.function.scheduler
    arguments = None if _is_job_at(import_path) else _SchedulerArguments(scheduler.location, scheduler.rules)
    return RemoteCall(_run, (import_path, attempt.facts, signals, arguments))


class _SchedulerArguments(NamedTuple):
    """
    The scheduler of a function whose name in its module is not the job, as after `job = scheduler.job(fn)`: a
    worker process registers it again.
    """

    where: str
    rules: SchedulerRules


def _is_job_at(import_path: tuple[str, str]) -> bool:
    """Whether a worker process that imports this place finds the job there, and not the plain function."""
    from penstock.library.function import JobFunction  # noqa: PLC0415  # it imports us

    value: Any = sys.modules.get(import_path[0])
    for part in import_path[1].split("."):
        value = getattr(value, part, None)
    return isinstance(value, JobFunction)


def _function_at(
    import_path: tuple[str, str], job_type: str, arguments: _SchedulerArguments | None
) -> JobFunction[..., Any, Any]:
    from penstock.library.function import JobFunction  # noqa: PLC0415  # as above

    module, name = import_path
    value: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    if isinstance(value, JobFunction):
        return value
    if arguments is None:
        raise TypeError(f"{module}.{name} is no job in a worker process")
    registered = _registered.get((arguments.where, job_type))
    if registered is None or registered.fn is not value:
        from penstock.library.scheduler import Scheduler  # noqa: PLC0415  # as above

        registered = Scheduler(arguments.where, rules=arguments.rules).job(name=job_type)(value)
        _registered[arguments.where, job_type] = registered
    return registered


#: Jobs that this worker process has registered itself.
_registered: Final[dict[tuple[str, str], JobFunction[..., Any, Any]]] = {}


def _run(
    import_path: tuple[str, str],
    facts: JobFacts,
    signals: ProcessSignals,
    arguments: _SchedulerArguments | None,
) -> RemoteOutcome:
    function = _function_at(import_path, facts.job_type, arguments)
    job_service = function.scheduler.job_service

    def report(request: RenewalRequest) -> bool:
        return job_service.heartbeat(**request._asdict()).stop is None

    return run_in_process(function.invoke, facts, signals, report)
