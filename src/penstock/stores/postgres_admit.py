"""
Admission: a transaction that locks the ledger rows it decides on, in one order for all: its host's, then the shared ones.

The rows are those of the demands in line. Whoever else wants to start a job of one of these demands, on whatever host, needs the
same rows and waits; whoever ends one waits too, and gives its units back to the next round. So the jobs need no lock while
the round weighs, and only those that it takes or refuses are locked at the end; one that somebody is changing at that moment is not
waited for, but left out, and the round is weighed again. Without the ledger locks two hosts would both see room for the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.core.books import EVERYTHING, Books, keys_of
from penstock.core.changes import Note, running, stop_moment
from penstock.core.demand import Demand
from penstock.core.job import Dispatch, Kind, dispatch_id_of
from penstock.core.landing import End
from penstock.core.order import Floor, Offer, Ordering, Pick, Verdict, ready_at
from penstock.core.spend import windows
from penstock.core.states import State
from penstock.core.words import DispatchId, HostId, Moment
from penstock.stores.dispatches import dispatch_row, new_dispatch
from penstock.stores.postgres_floor import Appetite, RowFloor, enter, spent_from
from penstock.stores.postgres_link import Link, Session, array, columns
from penstock.stores.postgres_pages import NO_JOB, Demands, Pages, accounts_from, lock_ledger
from penstock.stores.protocol import Terms
from penstock.stores.rows import encode

__all__ = ["Admitting"]

DISPATCHING: Final = Note(Kind.DISPATCHING, "admitted")
#: How many jobs whose time has come step into line in one transaction.
STEPS: Final = 5_000


class _NotLocked(Exception):
    """The verdict lends to a demand whose rows were not among those locked."""

    def __init__(self, demand: Demand) -> None:
        super().__init__()
        self.demand = demand


class Admitting:
    def __init__(self, link: Link, demands: Demands, ordering: Ordering, new_id: Callable[[], str]) -> None:
        self._link, self._demands, self._ordering, self._new_id = link, demands, ordering, new_id
        self._appetite = Appetite()
        self._hosts: set[HostId] = set()

    def admit(
        self, host: HostId, weigh: Callable[[Floor], Verdict], terms: Terms
    ) -> tuple[list[Dispatch], bool]:
        """What was started, and whether anything was written."""
        if host not in self._hosts:
            self._link.transact(lambda session: session.ask("add_ledger", columns([("host", host)])))
            self._hosts.add(host)
        asked: set[Demand] = set()
        while True:
            try:
                return self._link.transact(lambda session: self._round(session, host, weigh, terms, asked))
            except _NotLocked as more:
                self._demands.make([more.demand])
                asked.add(more.demand)

    def _round(
        self,
        session: Session,
        host: HostId,
        weigh: Callable[[Floor], Verdict],
        terms: Terms,
        asked: set[Demand],
    ) -> tuple[list[Dispatch], bool]:
        step = {"now": self._link.handed(), "most": STEPS}
        *_, lines = session.together(
            ("step_into_line", step), ("step_into_urgent_line", step), ("lines", None)
        )
        numbered = self._demands.of(session, {no for no, _ in lines})
        demands = asked | {numbered[no] for no, _ in lines}
        locked = _Locked(self._link, session, host, demands)
        taken: set[int] = set()
        while True:
            floor = RowFloor(
                session,
                host,
                locked.now,
                locked.books(),
                lines,
                demands=self._demands,
                appetite=self._appetite,
                without=taken,
            )
            verdict = weigh(floor)
            floor.over()
            if verdict.loan is not None and verdict.loan not in demands:
                raise _NotLocked(verdict.loan)
            lost = _lock_heads(session, verdict, floor)
            if not lost:
                break
            taken |= lost
        return _Round(session, floor, host, terms, self._demands, ordering=self._ordering).write(
            verdict, self._new_id
        )


class _Locked:
    """The ledger as it is while we hold it. A round changes its own copy, and may have to be weighed again."""

    def __init__(self, link: Link, session: Session, host: HostId, demands: set[Demand]) -> None:
        self._host = host
        keys = [("host", host), *(key for demand in demands for key in keys_of(demand))]
        self.now, [self._ledger] = link.opening(session, lock_ledger(keys))
        # Asked for after the locks: the accounts are guarded by their addons' ledger rows.
        addons = array(sorted({EVERYTHING, *(demand.addon_id for demand in demands)}))
        day, month = windows(self.now)
        self._accounts, self._spent = session.together(
            ("accounts", {"addons": addons}), ("spent", {"day": day.name, "month": month.name})
        )
        self._day = day.name

    def books(self) -> Books:
        books = Books(accounts=accounts_from(self._accounts), spent=spent_from(self._spent, self._day))
        enter(books, self._ledger, self._host)
        return books


def _lock_heads(session: Session, verdict: Verdict, floor: RowFloor) -> set[int]:
    """Those that we could not have as we saw them."""
    wanted = {
        *(pick.waiting.no for pick in verdict.picks),
        *(denial.waiting.no for denial in verdict.denials),
        *(waiting.no for waiting in verdict.passed),
    }
    if not wanted:
        return set()
    rows = columns([(no, floor.standby[no].events) for no in wanted])
    return wanted - {no for (no,) in session.ask("lock_heads", rows)}


class _Round:
    """What a verdict becomes."""

    def __init__(
        self,
        session: Session,
        floor: RowFloor,
        host: HostId,
        terms: Terms,
        demands: Demands,
        *,
        ordering: Ordering,
    ) -> None:
        self._session, self._floor, self._host, self._terms = session, floor, host, terms
        self._demands, self._aging, self._now = demands, ordering.aging, floor.now
        self._pages = Pages()
        self._pages.accounts = floor.books.accounts
        self._taken: list[tuple[Any, ...]] = []
        self._made: list[tuple[Any, ...]] = []

    def write(self, verdict: Verdict, new_id: Callable[[], str]) -> tuple[list[Dispatch], bool]:
        self._deny(verdict)
        dispatches = [self._pick(pick) for pick in verdict.picks]
        if verdict.loan is not None:
            loan = DispatchId(f"{new_id()}.0")
            dispatches.append(self._start(loan, None, verdict.loan, Offer.LEASE))
            self._pages.note(self._now, Note(Kind.ADMITTED), NO_JOB, loan)
        if self._taken:
            self._session.leave("take_jobs", columns(self._taken))
        if self._made:
            self._session.leave("add_dispatches", columns(self._made))
        return dispatches, self._pages.leave(self._session)

    def _deny(self, verdict: Verdict) -> None:
        rows = []
        for denial in verdict.denials:
            no, code, data = denial.waiting.no, denial.reason.code, denial.as_json()
            n = self._floor.standby[no].events + 1
            self._pages.note(self._now, Note(Kind.DENIED, code, data), (no, n, State.QUEUED))
            rows.append((code, encode(data) or "{}", self._now, n, no))
        if rows:
            self._session.leave("deny_jobs", columns(rows))
        if verdict.passed:
            self._session.leave("pass_jobs", [self._now, array([w.no for w in verdict.passed])])

    def _pick(self, pick: Pick) -> Dispatch:
        waiting, standby = pick.waiting, self._floor.standby[pick.waiting.no]
        fence, n, state = waiting.fence + 1, standby.events + 1, State.DISPATCHING
        dispatch_id = dispatch_id_of(waiting.job_id, fence)
        self._pages.note(self._now, DISPATCHING, (waiting.no, n, state), dispatch_id)
        if pick.offer is Offer.LEASE:
            state, n = State.RUNNING, n + 1
            waited = self._now - ready_at(waiting.turn, waiting.priority, self._aging)
            self._pages.note(
                self._now, running(self._terms.worker, waited), (waiting.no, n, state), dispatch_id
            )
        self._taken.append((state, fence, n, waiting.no))
        self._pages.moved(pick.demand.addon_id, State.QUEUED, state)
        return self._start(dispatch_id, pick, pick.demand, pick.offer)

    def _start(self, dispatch_id: DispatchId, pick: Pick | None, demand: Demand, offer: Offer) -> Dispatch:
        waiting, ends_at = None, None
        limits: tuple[Moment | None, End | None] = (None, None)
        if pick is not None:
            waiting, ends_at = pick.waiting, pick.ends_at
            s = self._floor.standby[waiting.no]
            limits = stop_moment(s.max_runtime_sec, s.max_active_sec, s.active, self._now)
        made = new_dispatch(
            dispatch_id,
            waiting,
            demand,
            offer,
            self._terms,
            host=self._host,
            now=self._now,
            ends_at=ends_at,
            limits=limits,
        )
        no = None if waiting is None else waiting.no
        self._made.append(dispatch_row(made, no, self._demands.number(demand)))
        self._pages.hold(self._host, demand, 1)
        return made
