"""
The seven checks. Each compares a promise with the audit trail, with the store, and with the marks that the
jobs wrote outside of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from penstock.chaos.markers import Journal
from penstock.core.jobs.job import ENDS, Event, EventKind
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import DispatchId, HostId, JobId
from penstock.scheduler.job_service import feed
from penstock.stores.api import Store

#: The units of each host, and of each job.
UNITS: Final = 40
COST: Final = 10


class Aftermath(NamedTuple):
    """
    The result of a trial. `acknowledged`: the ids of submitted jobs. `done_to`: counts of deeds such as
    ("killed", "a job"). `settled`: whether all jobs ended. `trouble`: why the trial stopped early.
    """

    folder: Path
    acknowledged: list[str]
    done_to: Counter[tuple[str, str]]
    settled: bool
    trouble: str = ""


class PromiseCheck(NamedTuple):
    name: str
    promise: str
    #: The violations. Empty: the promise holds.
    broken: list[str]


def check_promises(aftermath: Aftermath, store: Store) -> list[PromiseCheck]:
    journal = Journal(aftermath.folder).read()
    events = list(feed(store))
    return [
        PromiseCheck("RS-1", "a job accepted is never lost", [*_lost(aftermath, store)]),
        PromiseCheck("RS-1", "a DONE job ran to its end", [*_undone(events, journal.ended)]),
        PromiseCheck("RS-2", "never two live attempts of one job", journal.overlaps),
        PromiseCheck("RS-2", "every attempt has a higher fence than the one before", [*_fences(events)]),
        PromiseCheck("RS-3", "every job ends in one state, and stays there", [*_moved_on(events)]),
        PromiseCheck("RS-4", "never more units in use than there are", [*_overfull(events, store)]),
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


def _undone(events: Iterable[Event], ended: Collection[str]) -> Iterator[str]:
    """Check DONE by attempt: the report of an abandoned attempt must not end the job of the present one."""
    for event in events:
        if event.kind is EventKind.DONE and event.dispatch_id not in ended:
            yield f"{event.dispatch_id} did not"


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


def _overfull(events: Iterable[Event], store: Store) -> Iterator[str]:
    """Check the units in use of each host. A dispatch uses units from its first event to its last."""
    held: Counter[HostId | None] = Counter()
    host_of: dict[DispatchId, HostId | None] = {}
    for event in events:
        if event.dispatch_id is None:
            continue
        if event.kind in ENDS and event.dispatch_id in host_of:
            held[host_of.pop(event.dispatch_id)] -= COST
        elif event.kind in (EventKind.DISPATCHING, EventKind.RUNNING) and event.dispatch_id not in host_of:
            dispatch = store.dispatch(event.dispatch_id)
            host = host_of[event.dispatch_id] = dispatch.host if dispatch is not None else None
            held[host] += COST
            if held[host] > UNITS:
                yield f"{held[host]} units on {host} at event {event.seq}"
