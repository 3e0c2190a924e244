"""
What happens to most jobs: they are taken, and they complete. Here whole batches of them move by few steps.

Everything that is the same for a batch is reckoned once, and what must be read comes as one text: a cursor gives the interpreter's lock
away and takes it back for every row, and the threads that run the jobs want that lock too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

from penstock.core.jobs.changes import running_data, stop_moment
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, EventKind, dispatch_id_of
from penstock.core.jobs.ledger import FairShare
from penstock.core.jobs.ordering import Ordering, Pick, Placement
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import DispatchId, HostId, Moment
from penstock.stores.api import CompletedDispatch, Grant, Terms
from penstock.stores.sqlite.admission_view import Queued
from penstock.stores.sqlite.write_batch import SqliteWriteBatch, Started

__all__ = ["complete", "take"]

#: One that starts, and when it is expected to end.
_Starts: TypeAlias = tuple[Queued, Moment | None]
#: What picks that are taken together have in common.
_KIND: Final = attrgetter("admission_class", "offer")
_FIRST: Final = "1"
#: So many of one kind are not worth a statement of their own.
FEW: Final = 8
#: As they are written: a word costs the encoder half of what the enumeration's member does.
_DISPATCHING, _RUNNING, _DONE = str(EventKind.DISPATCHING), str(EventKind.RUNNING), str(EventKind.DONE)
_DISPATCHED, _RUNS, _IS_DONE, _COMPLETED = (
    *(str(state) for state in (JobState.DISPATCHING, JobState.RUNNING, JobState.DONE)),
    str(EndReason.COMPLETED),
)


def take(
    pages: SqliteWriteBatch,
    picks: Sequence[Pick],
    terms: Terms,
    ordering: Ordering,
    *,
    host: HostId,
    now: Moment,
) -> list[Grant]:
    """What a round has picked becomes dispatches, in its order."""
    made: list[Grant] = []
    fresh = pages.fresh
    said = pages.said(
        [p.waiting.no for p in picks if p.offer is Placement.LEASE and p.waiting.no not in fresh]
    )
    for (admission_class, offer), its in groupby(picks, _KIND):
        alike = [(cast("Queued", pick.waiting), pick.ends_at) for pick in its]
        if offer is Placement.LEASE:
            started = Started(admission_class, fresh, said, ordering.aging.per_point)
            made += _lease(pages, alike, terms, started, admission_class=admission_class, host=host, now=now)
        else:
            made += _reserve(pages, alike, terms, admission_class=admission_class, host=host, now=now)
        pages.start([queued.no for queued, _ in alike])
        pages.hold(host, pages.number(admission_class), len(alike))
        state = JobState.RUNNING if offer is Placement.LEASE else JobState.DISPATCHING
        pages.moved(admission_class.addon_id, JobState.QUEUED, state, len(alike))
        pages.touched.add(admission_class.addon_id)  # its account was changed by the round, as it picked
    return made


def _reserve(
    pages: SqliteWriteBatch,
    picks: Sequence[_Starts],
    terms: Terms,
    *,
    admission_class: AdmissionClass,
    host: HostId,
    now: Moment,
) -> list[Grant]:
    addon_id, until = admission_class.addon_id, now + terms.reserve_for
    made, rows, class_no, phase = (
        [],
        list[tuple[Any, ...]](),
        pages.number(admission_class),
        DispatchPhase.RESERVED,
    )
    for queued, ends_at in picks:
        no, job_id, fence, n = queued.no, queued.job_id, queued.fence + 1, queued.events + 1
        dispatch_id = dispatch_id_of(job_id, fence)
        pages.tell((now, _DISPATCHING, job_id, n, _DISPATCHED, "admitted", str(fence), None))
        rows.append((no, None, class_no, host, fence, phase, n, pages.batch, now, None, until, ends_at, None, None, ""))  # fmt: skip
        dispatch = Dispatch(
            dispatch_id, job_id, addon_id, host, admission_class, fence, phase, now, until, None, ends_at
        )
        made.append(Grant(dispatch))
    pages.add_live(rows)
    return made


def _lease(
    pages: SqliteWriteBatch,
    picks: Sequence[_Starts],
    terms: Terms,
    started: Started,
    *,
    admission_class: AdmissionClass,
    host: HostId,
    now: Moment,
) -> list[Grant]:
    """They run from now on, and their workers get the jobs as well."""
    addon_id, until, worker = admission_class.addon_id, now + terms.lease_for, terms.worker
    class_no, phase, batch, per_point = (
        pages.number(admission_class),
        DispatchPhase.LEASED,
        pages.batch,
        started.per_point,
    )
    kind, waited, told = (class_no, host, until), -1, running_data(worker, 0)
    made, plain, rows, events = [], list[int](), list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    fresh, leases, few, job_of = pages.fresh, pages.leased, len(picks) < FEW, started.job
    for queued, ends_at in picks:
        no, job_id, fence, n = queued.no, queued.job_id, queued.fence + 1, queued.events
        attempt, stop_at, stop_for = _FIRST, None, None
        if fence > 1:
            attempt = str(fence)
        if queued.max_runtime_sec is not None or queued.max_active_sec is not None:
            stop_at, stop_for = stop_moment(queued.max_runtime_sec, queued.max_active_sec, queued.active, now)
        if waited != (waits := now - queued.turn - queued.priority * per_point):
            waited, told = waits, running_data(worker, waits)
        dispatch_id: DispatchId = f"{job_id}.{attempt}"  # type: ignore[assignment]  # as `dispatch_id_of` makes it
        events += (
            (now, _DISPATCHING, job_id, n + 1, _DISPATCHED, "admitted", attempt, None),
            (now, _RUNNING, job_id, n + 2, _RUNS, "", attempt, told),
        )
        if few or ends_at is not None or stop_at is not None or no in fresh:
            rows.append(
                (no, None, class_no, host, fence, phase, n + 2, batch, now, now, until, ends_at, stop_at, stop_for, worker)
            )  # fmt: skip
        else:
            plain.append(no)
        dispatch = Dispatch(
            dispatch_id, job_id, addon_id, host, admission_class, fence, phase, now, until, now, ends_at,
            stop_at, stop_for, None, worker
        )  # fmt: skip
        made.append(Grant(dispatch, job_of(queued, dispatch_id)))
        leases[dispatch_id] = (no, n + 2, kind)
    pages.tell(*events)
    pages.lease(kind, worker, plain)
    pages.add_live(rows)
    return made


def complete(
    pages: SqliteWriteBatch, done: Sequence[CompletedDispatch], sharing: FairShare, now: Moment
) -> list[bool]:
    """As `changes.completed` says, for each that still runs under its lease."""
    pages.flush_rows()
    answers = [False] * len(done)
    plain, with_result = list[int](), list[tuple[int, str]]()
    events: list[tuple[Any, ...]] = []
    leases = pages.leases([each[0] for each in done], now)
    for at, no, n, _ in leases:
        dispatch_id, result = done[at]
        answers[at] = True
        if result is None:
            plain.append(no)
        else:
            with_result.append((no, result))
        job_id, _, attempt = dispatch_id.rpartition(".")
        events.append((now, _DONE, job_id, n + 1, _IS_DONE, _COMPLETED, attempt, None))
    pages.tell(*events)
    pages.complete(plain, with_result)
    for (class_no, host, _), n in Counter(kind for *_, kind in leases).items():
        admission_class = pages.give_back(HostId(host), class_no, n, sharing, now)
        pages.moved(admission_class.addon_id, JobState.RUNNING, JobState.DONE, n)
    return answers
