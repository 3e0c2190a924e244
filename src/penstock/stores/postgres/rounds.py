"""
One transaction for what has ended and what may start: the ends give their units back, and the round behind
them uses them.

The transaction locks the ledger rows that it decides on, in one order for all processes: those of its host,
then the shared ones. They are the rows of the admission classes that are queued. A process that wants to
start a job of such a class, on any host, needs the same rows and waits; one that ends a job waits too, and
gives its units to the next round. So the jobs need no lock while the round decides; only those that it starts
or refuses are locked at the end. The round does not wait for a job that another process is changing: it
leaves that job out and decides again. Without the ledger locks two hosts would both see the last free unit.

A round trip costs more than all statements of a round, so there are two: one locks and reads, one writes and
commits. The transaction guesses the rows to lock from the round before, because it reads the queues in the
same trip, and assumes that the heads can be had. Where either is wrong the server writes nothing, and the
round runs again with what it knows by then.

The second trip first sends what the server needs to begin. The values for the claimant and the events are
made while the server works: both sides work at the same time for the larger half of a round.
"""

#: The code that `refuse_round` raises: another round was at a job before this one.
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol

import psycopg

from penstock.core.jobs.admission import EVERYTHING, Account, Ledger, keys_of
from penstock.core.jobs.changes import Note, running_data, stop_moment
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, EventKind, Job, dispatch_id_of
from penstock.core.jobs.ordering import Denial, Ordering, Pick, Placement, RoundResult, ready_at
from penstock.core.jobs.spending import windows
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, HostId, JobId, Moment
from penstock.stores.api import Admit
from penstock.stores.common.rows import encode, new_dispatch
from penstock.stores.postgres.admission_view import (
    Heads,
    PostgresAdmissionView,
    PostgresSpent,
    ScanHint,
    Standby,
    enter,
    spent_from,
)
from penstock.stores.postgres.changes import Judged
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import Values, array, column, columns
from penstock.stores.postgres.write_batch import (
    NO_JOB,
    EventRow,
    Key,
    PostgresAdmissionClasses,
    PostgresWriteBatch,
    accounts_from,
    lock_ledger,
)

ROUND_REFUSED: Final = "JB001"

#: How many jobs whose time has come step into line in one transaction.
STEPS: Final = 5_000
#: After one whose time had come, for so long it is taken for granted that there are others.
STEPPING_SEC: Final = 1.0


class RoundAnswers(NamedTuple):
    """An answer for every change, whether events were written, and what each round started."""

    applied: list[list[bool]]
    told: bool
    started: Sequence[StartedRound] = ()


class Ends(Protocol):
    """What the transaction begins with: statements, and what is to be written by what they answered."""

    def __len__(self) -> int:
        """How many runs it may end."""
        ...

    def calls(self) -> list[tuple[str, Values]]: ...

    def judge(self, session: DatabaseSession, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged: ...


class _NotLocked(Exception):
    """Rows are needed that were not among those locked. `loan`: by a demand that perhaps nobody has made yet."""

    def __init__(self, keys: Iterable[Key], loan: AdmissionClass | None = None) -> None:
        super().__init__()
        self.keys, self.loan = keys, loan


class Admitting:
    def __init__(
        self,
        link: Database,
        demands: PostgresAdmissionClasses,
        ordering: Ordering,
        *,
        new_id: Callable[[], str],
        jobs_from: Callable[[list[Any]], list[Job]],
    ) -> None:
        """`jobs_from`: makes jobs of the rows of those that are leased."""
        self.link, self.demands, self.ordering, self.new_id = link, demands, ordering, new_id
        self.jobs_from = jobs_from
        self.scan_hint = ScanHint()
        self._hosts: set[HostId] = set()
        #: The rows that the last turn needed.
        self._likely: set[Key] = set()
        #: Until when jobs are let into line without asking whether there are any.
        self.stepping_until = float("-inf")
        #: Somebody went by what was spent, so it is asked for with the rest.
        self.budgeted = False

    def write(self, ends: Ends, admissions: Sequence[Admit]) -> RoundAnswers:
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
            except psycopg.DatabaseError as error:
                if error.sqlstate != ROUND_REFUSED:
                    raise
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

    def run(self, session: DatabaseSession, ends: Ends, admissions: Sequence[Admit]) -> RoundAnswers:
        of, self.needed = self._of, set()
        seen = _Seen(of, session, self._keys, ends.calls(), ended=len(ends), heads=bool(admissions))
        judged = ends.judge(session, seen.now, seen.ends)
        self._need(judged.keys)
        judged.leave(session, of.demands)
        started: list[StartedRound] = []
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
        return RoundAnswers(judged.answers, told, started)

    def _round(self, session: DatabaseSession, admission: Admit, seen: _Seen, before: Judged) -> StartedRound:
        """`before`: what ended in this transaction, and is not written yet."""
        of, host = self._of, admission.host
        demands = of.demands.of(session, {no for no, _ in seen.heads.lines})
        self._need({key for no, _ in seen.heads.lines for key in keys_of(demands[no])})
        taken = {job.no for job in before.jobs.values() if job.moved}
        while True:
            ledger = seen.ledger(host, before.ended)
            admission_view = PostgresAdmissionView(
                session, host, seen.now, ledger, seen.heads, demands=of.demands, without=taken
            )
            round_result = admission.run_round(admission_view)
            if round_result.loan is not None:
                self._need(set(keys_of(round_result.loan)), round_result.loan)
            if not (lost := self._lock_heads(session, round_result, admission_view)):
                break
            taken |= lost
        admission_view.tell(of.scan_hint)
        before.pages.accounts = ledger.accounts
        starting = Starting(
            session,
            admission_view,
            before.pages,
            admission,
            demands=of.demands,
            ordering=of.ordering,
            new_id=of.new_id,
            jobs_from=of.jobs_from,
        )
        return starting.write(round_result)

    def _need(self, keys: set[Key], loan: AdmissionClass | None = None) -> None:
        if not keys <= self._keys or (loan is not None and not self._of.demands.knows(loan)):
            raise _NotLocked(keys, loan)
        self.needed |= keys

    def _lock_heads(
        self, session: DatabaseSession, round_result: RoundResult, admission_view: PostgresAdmissionView
    ) -> set[int]:
        """Those that we could not have as we saw them."""
        # Where something is picked, the statement that starts it looks for itself.
        if round_result.picks and not self._careful:
            return set()
        wanted = admission_view.heads_of(round_result)
        return (
            set()
            if not wanted
            else wanted.keys() - {no for (no,) in session.ask("lock_heads", columns(list(wanted.items())))}
        )


class _Seen:
    """All that a round goes by, read behind the locks. A round changes its own copy, and may have to be weighed again."""

    def __init__(
        self,
        of: Admitting,
        session: DatabaseSession,
        keys: set[Key],
        first: Sequence[tuple[str, Values]] = (),
        *,
        ended: int = 0,
        heads: bool = True,
    ) -> None:
        """
        `first`: what comes before the locks on the ledger, and ends so many. `heads`: not needed where nothing is to be started.
        """
        handed = of.link.handed()
        self._sharing, (most, look) = of.ordering.sharing, of.scan_hint.call(ended, handed)
        addons = {EVERYTHING, *(name for scope, name in keys if scope == "addon")}
        lines: list[tuple[str, Values]] = []
        if of.budgeted:
            day, month = windows(of.link.now())
            lines.append(("spent", {"day": day.name, "month": month.name}))
        if stepping := monotonic() < of.stepping_until:
            lines.append(("step_into_line", {"now": handed, "most": STEPS}))
        lines.append(look)
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
        if self.heads.due:
            of.stepping_until = monotonic() + STEPPING_SEC
            if not stepping:
                _, rows = session.together(("step_into_line", {"now": self.now, "most": STEPS}), look)
                self.heads = Heads(rows, most, everything=look[0] == "heads")
        if heads:
            of.scan_hint.looked(self.heads)
        self._spent = PostgresSpent(partial(_ask_spent, of, session, self.now))
        if heads and of.budgeted and windows(self.now)[0].name == day.name:  # else midnight has just passed
            self._spent.found = spent_from(behind[2], day.name)

    def accounts(self, ended: Mapping[tuple[HostId, AdmissionClass], int]) -> dict[AddonId, Account]:
        accounts = accounts_from(self._accounts)
        for (_, admission_class), n in ended.items():
            account = accounts.setdefault(admission_class.addon_id, Account())
            account.hold(-n * admission_class.cost_units, self.now, self._sharing)
        return accounts

    def ledger(self, host: HostId, ended: Mapping[tuple[HostId, AdmissionClass], int]) -> Ledger:
        ledger = Ledger(accounts=self.accounts(ended), spent=self._spent)
        enter(ledger, self._ledger, host)
        for (where, admission_class), n in ended.items():
            for key in keys_of(admission_class):
                ledger.counts[key] -= n
            if where == host:
                ledger.units, ledger.running = (
                    ledger.units - n * admission_class.cost_units,
                    ledger.running - n,
                )
        return ledger


def _ask_spent(of: Admitting, session: DatabaseSession, now: Moment) -> dict[AddonId, dict[str, int]]:
    of.budgeted = True
    day, month = windows(now)
    return spent_from(session.ask("spent", {"day": day.name, "month": month.name}), day.name)


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
