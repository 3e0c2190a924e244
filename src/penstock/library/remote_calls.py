"""
Job functions of a program in worker processes: what a worker process is sent, and how it finds the function.

The worker process imports the module of the function, and gets the arguments as the JSON that the queue holds. It
opens the store itself to report progress, spending and checkpoints.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.jobs.types import Money
from penstock.library.attempt import JobAttempt
from penstock.library.function import place_of
from penstock.scheduler.rules import SchedulerRules
from penstock.work.context import JobFacts
from penstock.work.executors import RemoteCall, RemoteOutcome, run_in_process

if TYPE_CHECKING:
    from penstock.library.function import JobFunction
    from penstock.library.scheduler import Scheduler

__all__ = ["grace_sec", "remote_call"]

#: How long a function that must stop has to see it before its process is ended.
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
