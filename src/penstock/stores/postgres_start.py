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

from penstock.core.changes import Note, running_data, stop_moment
from penstock.core.demand import Demand
from penstock.core.job import Dispatch, Kind, dispatch_id_of
from penstock.core.landing import End
from penstock.core.order import Denial, Floor, Offer, Ordering, Pick, Verdict, ready_at
from penstock.core.states import State
from penstock.core.words import DispatchId, HostId, Moment
from penstock.stores.dispatches import new_dispatch
from penstock.stores.postgres_floor import RowFloor, Standby
from penstock.stores.postgres_link import Session
from penstock.stores.postgres_pages import NO_JOB, Demands, EventRow, Pages
from penstock.stores.postgres_wire import array, column, columns
from penstock.stores.protocol import Terms
from penstock.stores.rows import encode

__all__ = ["Admission", "Starting"]

_ADMITTED: Final = "admitted"
#: What picks have in common.
_KIND: Final = attrgetter("demand", "offer")


class Admission(NamedTuple):
    host: HostId
    weigh: Callable[[Floor], Verdict]
    terms: Terms


class _Limit(NamedTuple):
    """Of a pick that is leased: when it must be stopped, and for what."""

    stop_at: Moment | None = None
    stop_for: End | None = None


class Starting:
    """`keep`: is given the rows of the jobs that are leased, since their workers will ask for them."""

    def __init__(
        self,
        session: Session,
        floor: RowFloor,
        pages: Pages,
        admission: Admission,
        *,
        demands: Demands,
        ordering: Ordering,
        new_id: Callable[[], str],
        keep: Callable[[list[Any]], Callable[[], None]],
    ) -> None:
        self._session, self._floor, self._pages, self._now = session, floor, pages, floor.now
        self._host, self._terms = admission.host, admission.terms
        self._demands, self._ordering, self._new_id, self._keep = demands, ordering, new_id, keep

    def write(self, verdict: Verdict) -> list[Dispatch]:
        """They are in the list when the session has been finished."""
        denied = [self._deny(denial) for denial in verdict.denials]
        started: list[Dispatch] = []
        if verdict.picks or verdict.loan is not None:
            self._start(verdict, started)
        # Behind it, for it looks whether the heads are as they were seen.
        if denied:
            self._session.leave("deny_jobs", columns(denied))
        if verdict.passed:
            self._session.leave("pass_jobs", [self._now, array([w.no for w in verdict.passed])])
        return started

    def _deny(self, denial: Denial) -> tuple[Any, ...]:
        no, code, data = denial.waiting.no, denial.reason.code, denial.as_json()
        n = self._floor.standby[no].events + 1
        told = (no, denial.waiting.job_id, n, State.QUEUED)
        self._pages.note(self._now, Note(Kind.DENIED, code, data), told)
        return code, encode(data) or "{}", self._now, n, no

    def _start(self, verdict: Verdict, started: list[Dispatch]) -> None:
        now, terms, picks, standby = self._now, self._terms, verdict.picks, self._floor.standby
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
            self._session.leave_for("start_jobs", common | self._heads(verdict, limits), self._keep)
        flight = {
            "jobs": array([pick.waiting.no for pick in picks]),
            "loan": None if verdict.loan is None else self._lend(verdict.loan, common, started),
            "live": len(picks) + (verdict.loan is not None),
            "expires_at": now + min(terms.lease_for, terms.reserve_for),
            "stop_at": min((limit.stop_at for limit in limits if limit.stop_at is not None), default=None),
        }
        self._session.leave("take_off", common | flight)
        for (demand, offer), alike in groupby(picks, _KIND):
            n = sum(1 for _ in alike)
            self._pages.hold(self._host, demand, n)
            state = State.RUNNING if offer is Offer.LEASE else State.DISPATCHING
            self._pages.moved(demand.addon_id, State.QUEUED, state, n)
        if picks:
            self._pages.note_many(lambda: self._told(picks, limits, started))

    def _limit(self, pick: Pick, standby: Standby) -> _Limit:
        if (
            standby.max_runtime_sec is None and standby.max_active_sec is None
        ) or pick.offer is not Offer.LEASE:
            return _UNLIMITED
        limits = stop_moment(standby.max_runtime_sec, standby.max_active_sec, standby.active, self._now)
        return _Limit(*limits)

    def _heads(self, verdict: Verdict, limits: list[_Limit]) -> dict[str, bytes]:
        """Those that are picked come first; of the others nothing is said but how they were seen."""
        seen, lease = self._floor.heads_of(verdict), Offer.LEASE
        return {
            "heads": array(list(seen)),
            "seen": array(list(seen.values())),
            "leased": array([pick.offer is lease for pick in verdict.picks]),
            "ends_at": column([pick.ends_at for pick in verdict.picks]),
            "stop_at": column([limit.stop_at for limit in limits]),
            "stop_for": column([limit.stop_for for limit in limits]),
        }

    def _lend(self, demand: Demand, common: dict[str, Any], started: list[Dispatch]) -> DispatchId:
        loan = DispatchId(f"{self._new_id()}.0")
        number = self._demands.number(demand)
        self._session.leave("lend", common | {"dispatch_id": loan, "demand": number})
        started.append(
            new_dispatch(loan, None, demand, Offer.LEASE, self._terms, host=self._host, now=self._now)
        )
        self._pages.hold(self._host, demand, 1)
        self._pages.note(self._now, Note(Kind.ADMITTED), NO_JOB, loan)
        return loan

    def _told(self, picks: list[Pick], limits: list[_Limit], started: list[Dispatch]) -> Iterator[EventRow]:
        now, worker, aging = self._now, self._terms.worker, self._ordering.aging
        for number, (pick, limit) in enumerate(zip(picks, limits, strict=True)):
            waiting = pick.waiting
            job_id, fence, n = waiting.job_id, waiting.fence + 1, self._floor.standby[waiting.no].events + 1
            made = new_dispatch(
                dispatch_id_of(job_id, fence),
                waiting,
                pick.demand,
                pick.offer,
                self._terms,
                host=self._host,
                now=now,
                ends_at=pick.ends_at,
                limits=limit,
            )
            started.insert(number, made)
            yield now, Kind.DISPATCHING, job_id, n, State.DISPATCHING, _ADMITTED, str(fence), None
            if pick.offer is Offer.LEASE:
                data = running_data(worker, now - ready_at(waiting.turn, waiting.priority, aging))
                yield now, Kind.RUNNING, job_id, n + 1, State.RUNNING, "", str(fence), data


_UNLIMITED: Final = _Limit()
