"""The promises, checked against the audit trail and against the marks that the jobs wrote outside of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.chaos.kill_loop import COST, UNITS, Aftermath
from penstock.chaos.markers import Marker, marks
from penstock.core.jobs.job import Event, EventKind
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId
from penstock.scheduler.job_service import feed
from penstock.scheduler.stats import ENDS
from penstock.stores.api import Store

__all__ = ["PromiseCheck", "check_promises"]


class PromiseCheck(NamedTuple):
    name: str
    promise: str
    #: The violations. Empty: the promise holds.
    broken: list[str]


def check_promises(aftermath: Aftermath, store: Store) -> list[PromiseCheck]:
    markers = marks(aftermath.folder)
    beside = [f"{mark.job_id} ran beside itself" for mark in markers if mark.what == "beside"]
    events = list(feed(store))
    return [
        PromiseCheck("RS-1", "a job accepted is never lost", [*_lost(aftermath, store)]),
        PromiseCheck("RS-1", "a DONE job ran to its end", [*_undone(aftermath.acknowledged, markers)]),
        PromiseCheck("RS-2", "never two live attempts of one job", beside),
        PromiseCheck("RS-2", "every attempt has a higher fence than the one before", [*_fences(events)]),
        PromiseCheck("RS-3", "every job ends in one state, and stays there", [*_moved_on(events)]),
        PromiseCheck("RS-4", "never more units in use than there are", [*_overfull(events)]),
        PromiseCheck("JB-3", "the trail has no gap and the ledger adds up", store.audit()),
    ]


def _lost(aftermath: Aftermath, store: Store) -> Iterator[str]:
    jobs = {job.job_id: job for job in store.jobs([JobId(job) for job in aftermath.acknowledged])}
    for job_id in aftermath.acknowledged:
        job = jobs.get(JobId(job_id))
        if job is None:
            yield f"{job_id} is gone"
        elif job.state is not JobState.DONE:
            yield f"{job_id} is {job.state}"


def _undone(acknowledged: Sequence[str], markers: Sequence[Marker]) -> Iterator[str]:
    ended = {mark.job_id for mark in markers if mark.what == "ended"}
    return (f"{job_id} did not" for job_id in acknowledged if job_id not in ended)


def _fences(events: Iterable[Event]) -> Iterator[str]:
    last: dict[str, int] = {}
    for event in events:
        if event.kind is EventKind.RUNNING and event.dispatch_id is not None:
            job_id, _, fence = event.dispatch_id.rpartition(".")
            if int(fence) <= last.get(job_id, 0):
                yield f"{event.dispatch_id} came after fence {last[job_id]}"
            last[job_id] = int(fence)


def _moved_on(events: Iterable[Event]) -> Iterator[str]:
    done: set[str] = set()
    for event in events:
        if event.job_id is None or event.state is None:
            continue
        if event.job_id in done:
            yield f"{event.job_id} moved on to {event.state}"
        elif event.state is JobState.DONE:
            done.add(event.job_id)


def _overfull(events: Iterable[Event]) -> Iterator[str]:
    """A dispatch uses its units from its first event to its last."""
    held: set[str] = set()
    for event in events:
        if event.dispatch_id is None:
            continue
        if event.kind in ENDS:
            held.discard(event.dispatch_id)
        elif event.kind in (EventKind.DISPATCHING, EventKind.RUNNING):
            held.add(event.dispatch_id)
            if len(held) * COST > UNITS:
                yield f"{len(held) * COST} units at event {event.seq}"
