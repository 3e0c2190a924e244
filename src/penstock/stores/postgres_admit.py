"""
One transaction for what has ended and what may start: the ends give their units back, and the round behind them gives them away again.

It locks the ledger rows it decides on, in one order for all: its host's, then the shared ones. The rows are those of the demands in
line. Whoever else wants to start a job of one of these demands, on whatever host, needs the same rows and waits; whoever ends one waits
too, and gives its units back to the next round. So the jobs need no lock while the round weighs, and only those that it takes or
refuses are locked at the end; one that somebody is changing at that moment is not waited for, but left out, and the round is weighed
again. Without the ledger locks two hosts would both see room for the last one.

A round trip costs more than all of a round's statements, so there are two: one locks and reads, one writes and commits. Which rows to
lock is guessed from the round before, since the lines are read in the same trip; and that the heads can be had is taken for granted.
Where either turns out to be wrong the server has written nothing, and the round is done again with what is known by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from psycopg.errors import DivisionByZero

from penstock.core.books import EVERYTHING, Books, keys_of
from penstock.core.changes import Note, running, stop_moment
from penstock.core.demand import Demand
from penstock.core.job import Dispatch, Kind, dispatch_id_of
from penstock.core.landing import End
from penstock.core.order import Denial, Floor, Offer, Ordering, Pick, Verdict, ready_at
from penstock.core.share import Account
from penstock.core.spend import windows
from penstock.core.states import State
from penstock.core.words import AddonId, DispatchId, HostId, Moment
from penstock.stores.dispatches import new_dispatch
from penstock.stores.postgres_apply import Judged
from penstock.stores.postgres_floor import Appetite, Heads, RowFloor, enter, spent_from
from penstock.stores.postgres_link import Link, Session
from penstock.stores.postgres_pages import NO_JOB, Demands, Key, Pages, accounts_from, lock_ledger
from penstock.stores.postgres_wire import Values, array, columns
from penstock.stores.protocol import Terms
from penstock.stores.rows import encode

__all__ = ["Admission", "Admitting", "Ends", "Turn"]

DISPATCHING: Final = Note(Kind.DISPATCHING, "admitted")
#: How many jobs whose time has come step into line in one transaction.
STEPS: Final = 5_000


class Admission(NamedTuple):
    host: HostId
    weigh: Callable[[Floor], Verdict]
    terms: Terms


class Turn(NamedTuple):
    """What came of it: an answer for every change, whether anything is to be told, and what each round started."""

    answers: list[list[bool]]
    told: bool
    started: Sequence[list[Dispatch]] = ()


class Ends(Protocol):
    """What the transaction begins with: statements, and what is to be written by what they answered."""

    def __len__(self) -> int:
        """How many runs it may end."""
        ...

    def calls(self) -> list[tuple[str, Values]]: ...

    def judge(self, session: Session, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged: ...


class _NotLocked(Exception):
    """Rows are needed that were not among those locked. `loan`: by a demand that perhaps nobody has made yet."""

    def __init__(self, keys: Iterable[Key], loan: Demand | None = None) -> None:
        super().__init__()
        self.keys, self.loan = keys, loan


class Admitting:
    def __init__(
        self,
        link: Link,
        demands: Demands,
        ordering: Ordering,
        *,
        new_id: Callable[[], str],
        keep: Callable[[list[Any]], None],
    ) -> None:
        """`keep`: is given the rows of the jobs that are leased, since their workers will ask for them."""
        self.link, self.demands, self.ordering, self.new_id, self.keep = link, demands, ordering, new_id, keep
        self.appetite = Appetite()
        self._hosts: set[HostId] = set()
        #: The rows that the last turn needed.
        self._likely: set[Key] = set()

    def turn(self, ends: Ends, admissions: Sequence[Admission]) -> Turn:
        """What ended, then the rounds, each of which sees what was before it."""
        for host in {admission.host for admission in admissions} - self._hosts:
            self.link.transact(lambda session: session.ask("add_ledger", columns([("host", host)])))  # noqa: B023 - called at once
            self._hosts.add(host)
        keys = self._likely | {("host", admission.host) for admission in admissions}
        careful = False
        while True:
            turning = _Turning(self, keys, careful=careful)
            try:
                turn = self.link.transact(lambda session: turning.run(session, ends, admissions))  # noqa: B023 - called at once
            except DivisionByZero:
                careful = True
            except _NotLocked as more:
                if more.loan is not None:
                    self.demands.make([more.loan])
                keys |= set(more.keys)
            else:
                self._likely = turning.needed or self._likely  # with nothing in line nothing was needed
                return turn


class _Turning:
    """`keys`: the ledger rows to lock. `careful`: heads are locked before it is decided what to do with them."""

    def __init__(self, admitting: Admitting, keys: set[Key], *, careful: bool) -> None:
        self._of, self._keys, self._careful = admitting, keys, careful
        self.needed: set[Key] = set()

    def run(self, session: Session, ends: Ends, admissions: Sequence[Admission]) -> Turn:
        of, self.needed = self._of, set()
        seen = _Seen(of, session, self._keys, ends.calls(), ended=len(ends), heads=bool(admissions))
        judged = ends.judge(session, seen.now, seen.ends)
        self._need(judged.keys)
        judged.leave(session, of.demands)
        started: list[list[Dispatch]] = []
        told = False
        if not admissions:
            judged.pages.accounts = seen.accounts(judged.ended)
            told = judged.pages.leave(session)
        for number, admission in enumerate(admissions):
            if number:
                session.flush()
                seen = _Seen(of, session, self._keys)
            before = Judged(seen.now) if number else judged
            started.append(self._round(session, admission, seen, before))
            told |= before.pages.leave(session)
        return Turn(judged.answers, told, started)

    def _round(self, session: Session, admission: Admission, seen: _Seen, before: Judged) -> list[Dispatch]:
        """`before`: what ended in this transaction, and is not written yet."""
        of, host = self._of, admission.host
        demands = of.demands.of(session, {no for no, _ in seen.heads.lines})
        self._need({key for no, _ in seen.heads.lines for key in keys_of(demands[no])})
        taken = {job.no for job in before.jobs.values() if job.moved}
        while True:
            books = seen.books(host, before.ended)
            floor = RowFloor(session, host, seen.now, books, seen.heads, demands=of.demands, without=taken)
            verdict = admission.weigh(floor)
            if verdict.loan is not None:
                self._need(set(keys_of(verdict.loan)), verdict.loan)
            if not (lost := self._lock_heads(session, verdict, floor)):
                break
            taken |= lost
        floor.tell(of.appetite)
        before.pages.accounts = books.accounts
        writing = _Round(session, floor, admission, before.pages, of)
        return writing.write(verdict)

    def _need(self, keys: set[Key], loan: Demand | None = None) -> None:
        if not keys <= self._keys or (loan is not None and not self._of.demands.knows(loan)):
            raise _NotLocked(keys, loan)
        self.needed |= keys

    def _lock_heads(self, session: Session, verdict: Verdict, floor: RowFloor) -> set[int]:
        """Those that we could not have as we saw them."""
        wanted = floor.heads_of(verdict)
        # Where something is picked, the statement that starts it looks for itself.
        if not wanted or (verdict.picks and not self._careful):
            return set()
        return wanted.keys() - {no for (no,) in session.ask("lock_heads", columns(list(wanted.items())))}


class _Seen:
    """All that a round goes by, read behind the locks. A round changes its own copy, and may have to be weighed again."""

    def __init__(
        self,
        of: Admitting,
        session: Session,
        keys: set[Key],
        first: Sequence[tuple[str, Values]] = (),
        *,
        ended: int = 0,
        heads: bool = True,
    ) -> None:
        """
        `first`: what comes before the locks on the ledger, and ends so many. `heads`: not needed where nothing is to be started.
        """
        self._sharing, (most, look) = of.ordering.sharing, of.appetite.call(ended)
        day, month = windows(of.link.now())
        step = {"now": of.link.handed(), "most": STEPS}
        addons = {EVERYTHING, *(name for scope, name in keys if scope == "addon")}
        lines: list[tuple[str, Values]] = [
            ("spent", {"day": day.name, "month": month.name}),
            ("step_into_line", step),
            look,
        ]
        self.now, answers = of.link.opening(
            session,
            *first,
            lock_ledger(keys),
            # Asked for after the locks: the accounts are guarded by their addons' ledger rows.
            ("accounts", {"addons": array(sorted(addons))}),
            *(lines if heads else ()),
        )
        self.ends, behind = answers[: len(first)], answers[len(first) :]
        self._ledger, self._accounts = behind[:2]
        self.heads = Heads(behind[-1] if heads else (), most, everything=look[0] == "heads")
        if heads:
            of.appetite.looked(self.heads)
        self._spent, self._day = behind[2] if heads else (), day.name
        today, this_month = windows(self.now)
        if heads and today.name != day.name:  # midnight has just passed
            self._spent = session.ask("spent", {"day": today.name, "month": this_month.name})
            self._day = today.name

    def accounts(self, ended: Mapping[tuple[HostId, Demand], int]) -> dict[AddonId, Account]:
        accounts = accounts_from(self._accounts)
        for (_, demand), n in ended.items():
            account = accounts.setdefault(demand.addon_id, Account())
            account.hold(-n * demand.cost_units, self.now, self._sharing)
        return accounts

    def books(self, host: HostId, ended: Mapping[tuple[HostId, Demand], int]) -> Books:
        books = Books(accounts=self.accounts(ended), spent=spent_from(self._spent, self._day))
        enter(books, self._ledger, host)
        for (where, demand), n in ended.items():
            for key in keys_of(demand):
                books.counts[key] -= n
            if where == host:
                books.units, books.running = books.units - n * demand.cost_units, books.running - n
        return books


class _Round:
    """What a verdict becomes."""

    def __init__(
        self, session: Session, floor: RowFloor, admission: Admission, pages: Pages, of: Admitting
    ) -> None:
        self._session, self._floor, self._host, self._terms = session, floor, admission.host, admission.terms
        self._demands, self._aging, self._now = of.demands, of.ordering.aging, floor.now
        self._new_id, self._pages = of.new_id, pages
        self._keep = of.keep
        #: Of the picks, in their order: whether leased, and until when.
        self._taken: list[tuple[bool, Moment | None, Moment | None, End | None]] = []

    def write(self, verdict: Verdict) -> list[Dispatch]:
        denied = [self._deny(denial) for denial in verdict.denials]
        dispatches = [self._pick(pick) for pick in verdict.picks]
        if verdict.loan is not None:
            loan = DispatchId(f"{self._new_id()}.0")
            dispatches.append(self._start(loan, None, verdict.loan, Offer.LEASE))
            self._pages.note(self._now, Note(Kind.ADMITTED), NO_JOB, loan)
        if dispatches:
            self._leave(verdict, dispatches)
        # Behind it, for it looks whether the heads are as they were seen.
        if denied:
            self._session.leave("deny_jobs", columns(denied))
        if verdict.passed:
            self._session.leave("pass_jobs", [self._now, array([w.no for w in verdict.passed])])
        return dispatches

    def _leave(self, verdict: Verdict, dispatches: Sequence[Dispatch]) -> None:
        now, terms = self._now, self._terms
        told = {
            "batch": self._session.batch,
            "host": self._host,
            "now": now,
            "lease_until": now + terms.lease_for,
            "reserved_until": now + terms.reserve_for,
            "worker": terms.worker,
        }
        loan = None
        if verdict.picks:
            heads = zip(("heads", "seen"), columns(list(self._floor.heads_of(verdict).items())), strict=True)
            names = ("leased", "ends_at", "stop_at", "stop_for")
            taken = dict(zip(names, columns(self._taken), strict=True))
            self._session.leave("start_jobs", {**told, **dict(heads), **taken}, self._keep)
        if verdict.loan is not None:
            loan = dispatches[-1].dispatch_id
            number = self._demands.number(verdict.loan)
            self._session.leave("lend", {**told, "dispatch_id": loan, "demand": number})
        flight = {
            "jobs": array([pick.waiting.no for pick in verdict.picks]),
            "loan": loan,
            "live": len(dispatches),
            "expires_at": min(dispatch.expires_at for dispatch in dispatches),
            "stop_at": min((d.stop_at for d in dispatches if d.stop_at is not None), default=None),
        }
        self._session.leave("take_off", {**told, **flight})

    def _deny(self, denial: Denial) -> tuple[Any, ...]:
        no, code, data = denial.waiting.no, denial.reason.code, denial.as_json()
        n = self._floor.standby[no].events + 1
        told = (no, denial.waiting.job_id, n, State.QUEUED)
        self._pages.note(self._now, Note(Kind.DENIED, code, data), told)
        return code, encode(data) or "{}", self._now, n, no

    def _pick(self, pick: Pick) -> Dispatch:
        waiting, standby = pick.waiting, self._floor.standby[pick.waiting.no]
        fence, n, state = waiting.fence + 1, standby.events + 1, State.DISPATCHING
        dispatch_id = dispatch_id_of(waiting.job_id, fence)
        told = (waiting.no, waiting.job_id, n, state)
        self._pages.note(self._now, DISPATCHING, told, dispatch_id, mentioned=False)
        if pick.offer is Offer.LEASE:
            state, n = State.RUNNING, n + 1
            waited = self._now - ready_at(waiting.turn, waiting.priority, self._aging)
            told = (waiting.no, waiting.job_id, n, state)
            note = running(self._terms.worker, waited)
            self._pages.note(self._now, note, told, dispatch_id, mentioned=False)
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
        if pick is not None:
            self._taken.append((offer is Offer.LEASE, made.ends_at, made.stop_at, made.stop_for))
        self._pages.hold(self._host, demand, 1)
        return made
