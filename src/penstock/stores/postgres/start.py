"""
What a verdict becomes: rows that go from the queue, attempts that begin, and what is told of it.

Only what the server needs to begin is put together at once. The values for whoever asked, and what is told, are made while it is busy
with that: both sides work at the same time for the larger half of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

from penstock.core.jobs.changes import Note, running_data, stop_moment
from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, EventKind, Job, dispatch_id_of
from penstock.core.jobs.ordering import (
    Denial,
    Ordering,
    Pick,
    Placement,
    RoundResult,
    ready_at,
)
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import DispatchId, JobId, Moment
from penstock.stores.api import Admit
from penstock.stores.common.dispatches import new_dispatch
from penstock.stores.common.rows import encode
from penstock.stores.postgres.admission_view import PostgresAdmissionView, Standby
from penstock.stores.postgres.database import DatabaseSession
from penstock.stores.postgres.pipeline import array, column, columns
from penstock.stores.postgres.write_batch import (
    NO_JOB,
    EventRow,
    PostgresAdmissionClasses,
    PostgresWriteBatch,
)

__all__ = ["StartedRound", "Starting"]

_ADMITTED: Final = "admitted"
#: What picks have in common.
_KIND: Final = attrgetter("admission_class", "offer")


class StartedRound(NamedTuple):
    """What a round started, complete when its session has been finished. `jobs`: those that it leased."""

    dispatches: list[Dispatch]
    jobs: dict[JobId, Job]


class _Limit(NamedTuple):
    """Of a pick that is leased: when it must be stopped, and for what."""

    stop_at: Moment | None = None
    stop_for: EndReason | None = None


class Starting:
    """`jobs_from`: makes jobs of the rows of those that are leased."""

    def __init__(
        self,
        session: DatabaseSession,
        admission_view: PostgresAdmissionView,
        pages: PostgresWriteBatch,
        admission: Admit,
        *,
        demands: PostgresAdmissionClasses,
        ordering: Ordering,
        new_id: Callable[[], str],
        jobs_from: Callable[[list[Any]], list[Job]],
    ) -> None:
        self._session, self._admission_view, self._pages, self._now = (
            session,
            admission_view,
            pages,
            admission_view.now,
        )
        self._host, self._terms = admission.host, admission.terms
        self._demands, self._ordering, self._new_id, self._jobs_from = demands, ordering, new_id, jobs_from
        self._jobs: dict[JobId, Job] = {}

    def write(self, round_result: RoundResult) -> StartedRound:
        denied = [self._deny(denial) for denial in round_result.denials]
        started: list[Dispatch] = []
        if round_result.picks or round_result.loan is not None:
            self._start(round_result, started)
        # Behind it, for it looks whether the heads are as they were seen.
        if denied:
            self._session.leave("deny_jobs", columns(denied))
        if round_result.passed:
            self._session.leave("pass_jobs", [self._now, array([w.no for w in round_result.passed])])
        return StartedRound(started, self._jobs)

    def _keep(self, rows: list[Any]) -> None:
        self._jobs.update((job.job_id, job) for job in self._jobs_from(rows))

    def _deny(self, denial: Denial) -> tuple[Any, ...]:
        no, code, data = denial.waiting.no, denial.reason.code, denial.as_json()
        n = self._admission_view.standby[no].events + 1
        told = (no, denial.waiting.job_id, n, JobState.QUEUED)
        self._pages.note(self._now, Note(EventKind.DENIED, code, data), told)
        return code, encode(data) or "{}", self._now, n, no

    def _start(self, round_result: RoundResult, started: list[Dispatch]) -> None:
        now, terms, picks, standby = self._now, self._terms, round_result.picks, self._admission_view.standby
        limits = [self._limit(pick, standby[pick.waiting.no]) for pick in picks]
        common = {
            "batch": self._session.batch,
            "host": self._host,
            "now": now,
            "lease_until": now + terms.lease_for,
            "reserved_until": now + terms.reserve_for,
            "worker": terms.worker,
        }
        if picks:
            self._session.leave_for("start_jobs", common | self._heads(round_result, limits), self._keep)
        flight = {
            "jobs": array([pick.waiting.no for pick in picks]),
            "standalone_lease": None
            if round_result.loan is None
            else self._lend(round_result.loan, common, started),
            "live": len(picks) + (round_result.loan is not None),
            "expires_at": now + min(terms.lease_for, terms.reserve_for),
            "stop_at": min((limit.stop_at for limit in limits if limit.stop_at is not None), default=None),
        }
        self._session.leave("insert_flight", common | flight)
        for (admission_class, offer), alike in groupby(picks, _KIND):
            n = sum(1 for _ in alike)
            self._pages.hold(self._host, admission_class, n)
            state = JobState.RUNNING if offer is Placement.LEASE else JobState.DISPATCHING
            self._pages.moved(admission_class.addon_id, JobState.QUEUED, state, n)
        if picks:
            self._pages.note_many(lambda: self._told(picks, limits, started))

    def _limit(self, pick: Pick, standby: Standby) -> _Limit:
        if (
            standby.max_runtime_sec is None and standby.max_active_sec is None
        ) or pick.offer is not Placement.LEASE:
            return _UNLIMITED
        limits = stop_moment(standby.max_runtime_sec, standby.max_active_sec, standby.active, self._now)
        return _Limit(*limits)

    def _heads(self, round_result: RoundResult, limits: list[_Limit]) -> dict[str, bytes]:
        """Those that are picked come first; of the others nothing is said but how they were seen."""
        seen, lease = self._admission_view.heads_of(round_result), Placement.LEASE
        return {
            "heads": array(list(seen)),
            "seen": array(list(seen.values())),
            "leased": array([pick.offer is lease for pick in round_result.picks]),
            "ends_at": column([pick.ends_at for pick in round_result.picks]),
            "stop_at": column([limit.stop_at for limit in limits]),
            "stop_for": column([limit.stop_for for limit in limits]),
        }

    def _lend(
        self, admission_class: AdmissionClass, common: dict[str, Any], started: list[Dispatch]
    ) -> DispatchId:
        loan = DispatchId(f"{self._new_id()}.0")
        number = self._demands.number(admission_class)
        self._session.leave("insert_standalone_lease", common | {"dispatch_id": loan, "class_no": number})
        started.append(
            new_dispatch(
                loan, None, admission_class, Placement.LEASE, self._terms, host=self._host, now=self._now
            )
        )
        self._pages.hold(self._host, admission_class, 1)
        self._pages.note(self._now, Note(EventKind.ADMITTED), NO_JOB, loan)
        return loan

    def _told(self, picks: list[Pick], limits: list[_Limit], started: list[Dispatch]) -> Iterator[EventRow]:
        now, worker, aging = self._now, self._terms.worker, self._ordering.aging
        for number, (pick, limit) in enumerate(zip(picks, limits, strict=True)):
            waiting = pick.waiting
            job_id, fence, n = (
                waiting.job_id,
                waiting.fence + 1,
                self._admission_view.standby[waiting.no].events + 1,
            )
            made = new_dispatch(
                dispatch_id_of(job_id, fence),
                waiting,
                pick.admission_class,
                pick.offer,
                self._terms,
                host=self._host,
                now=now,
                ends_at=pick.ends_at,
                limits=limit,
            )
            started.insert(number, made)
            yield now, EventKind.DISPATCHING, job_id, n, JobState.DISPATCHING, _ADMITTED, str(fence), None
            if pick.offer is Placement.LEASE:
                data = running_data(worker, now - ready_at(waiting.turn, waiting.priority, aging))
                yield now, EventKind.RUNNING, job_id, n + 1, JobState.RUNNING, "", str(fence), data


_UNLIMITED: Final = _Limit()
