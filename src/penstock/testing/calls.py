"""What was enqueued, as calls that a person can read, and the assertion about it."""

from __future__ import annotations

from typing import Any

from penstock.core.job import Job
from penstock.core.words import seconds
from penstock.jobs.carried import plain
from penstock.jobs.function import JobFunction
from penstock.stores.protocol import Query, Store

__all__ = ["assert_calls", "calls_of"]

_MOST_SHOWN = 20


def assert_calls(
    store: Store,
    function: JobFunction[..., Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int | None,
) -> list[Job]:
    __tracebackhide__ = True
    jobs = store.find(Query(limit=1_000_000))
    payload = function.arguments.encode(args, kwargs) if args or kwargs else None
    found = [
        job
        for job in jobs
        if job.intent.job_type == function.name
        and (payload is None or plain(job.intent.payload) == plain(payload))
    ]
    if len(found) == count or (count is None and found):
        return found
    wanted = _call(function.name, payload)
    often = "not enqueued" if count is None else f"enqueued {len(found)} times, not {count}"
    raise AssertionError(f"{wanted} is {often}; {_listed(store, jobs)}")


def calls_of(store: Store) -> list[str]:
    return [_line(job, store.now()) for job in store.find(Query(limit=1_000_000))]


def _listed(store: Store, jobs: list[Job]) -> str:
    if not jobs:
        return "nothing is enqueued"
    lines = [_line(job, store.now()) for job in jobs[-_MOST_SHOWN:]]
    if len(jobs) > _MOST_SHOWN:
        lines.insert(0, f"... {len(jobs) - _MOST_SHOWN} more")
    return "enqueued are:\n  " + "\n  ".join(lines)


def _line(job: Job, now: int) -> str:
    later = (
        f", due in {seconds(job.ready_at - now):g} s" if job.state == "QUEUED" and job.ready_at > now else ""
    )
    return f"{_call(job.intent.job_type, job.intent.payload)}  {job.state}, priority {job.intent.priority}{later}"


def _call(name: str, payload: str | None) -> str:
    if payload is None:
        return f"{name}(...)"
    arguments = plain(payload)
    if not isinstance(arguments, dict):
        return f"{name}({arguments!r})"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
