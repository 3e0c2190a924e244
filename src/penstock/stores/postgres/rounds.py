"""
The writer of changes, completions and rounds. One transaction ends dispatches and then starts jobs, so the
round can use the units that the ends return.

The transaction locks the ledger rows on which it decides: those of its host and of the admission classes that
are queued. All processes lock them in the same order. A process that starts a job of such a class, on any
host, needs the same rows and waits; so does one that ends a job. Without these locks two hosts would both see
the last free unit. Jobs need no lock while the round decides; only those that it starts or refuses are locked
at the end. The round does not wait for a job that another process is changing: it leaves that job out and
decides again.

A round trip takes longer than all statements of a round, so there are two: one locks and reads, one writes
and commits. The first trip also reads the queues, so the transaction guesses the rows to lock from the round
before, and assumes that no head is locked. If a guess is wrong, the server writes nothing, and the round runs
again with what it has learned. A transaction without a round guesses the same way, if it may end dispatches.

The second trip first sends the values that the server needs to begin. This process makes the events and the
jobs for the claimant while the server works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import psycopg

from penstock.core.jobs.admission import (
    EVERYTHING,
    Account,
    AdmissionClass,
    Ledger,
    admission_class_of,
    keys_of,
    windows,
)
from penstock.core.jobs.changes import Change, Note, completed
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Pick, Placement, RoundResult
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment
from penstock.stores.api import Admit, Apply, Complete, Grant, Operation
from penstock.stores.common.array_changes import advance_arrays
from penstock.stores.common.group_commit import GroupCommit, answered
from penstock.stores.common.rows import new_dispatch, spent_from
from penstock.stores.common.writes import EventRow, StopLimit, denial_rows, start_dispatch, stop_limit
from penstock.stores.postgres.admission_view import (
    UNKNOWN_HEAD,
    Heads,
    NewHead,
    PostgresAdmissionClasses,
    PostgresAdmissionView,
    ScanHint,
    accounts_from,
    add_rows,
    changed_heads,
)
from penstock.stores.postgres.changes import (
    Changes,
    Completions,
    Effects,
    Ended,
    Ends,
    Key,
    PostgresWriteBatch,
    lock_ledger,
)
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.dependencies import resolve_moves
from penstock.stores.postgres.groups import PostgresArrayRows, lock_arrays
from penstock.stores.postgres.pipeline import Values, array, column, columns
from penstock.stores.postgres.submit import RowCache

#: The code that the server's `refuse_round` raises: another transaction changed a job that the round saw.
ROUND_REFUSED: Final = "JB001"
#: How many jobs that have become due enter the ready queues in one transaction.
STEPS: Final = 5_000


class StartedRound(NamedTuple):
    """
    What a round started; complete when the transaction is. `jobs`: the leased ones. `parents`: the results of
    their parents by the number of the job, for jobs that were released in the same transaction.
    """

    dispatches: list[Dispatch]
    jobs: dict[JobId, Job]
    parents: dict[int, dict[JobId, tuple[JobState, str | None]]]


class Written(NamedTuple):
    """
    What a transaction wrote. `answers`: to changes and completions. `started`: by each round.
    `has_new_heads`: whether it put jobs into the ready queues that may stand before others.
    """

    answers: list[list[bool]]
    has_events: bool
    started: Sequence[StartedRound] = ()
    has_new_heads: bool = False


class NotLocked(Exception):
    """The round needs ledger rows that are not locked. `new_class`: its rows may not exist yet."""

    def __init__(self, keys: Iterable[Key], new_class: AdmissionClass | None = None) -> None:
        super().__init__()
        self.keys, self.new_class = keys, new_class


class RoundBatcher(GroupCommit):
    """
    The writer of changes, completions and rounds. `read_jobs`: reads the started jobs if the answer to a
    round was lost with its connection. `on_commit` is called after each transaction with whether it wrote
    events.
    """

    def __init__(
        self,
        database: Database,
        classes: PostgresAdmissionClasses,
        ordering: Ordering,
        *,
        new_id: Callable[[], str],
        read_jobs: Callable[[Sequence[JobId]], list[Job]],
        on_commit: Callable[[bool], None],
    ) -> None:
        self.database, self.classes, self.ordering, self.new_id = database, classes, ordering, new_id
        self.rows = RowCache(classes, ordering)
        self._read_jobs, self._on_commit = read_jobs, on_commit
        self.scan_hint = ScanHint()
        #: Whether a dependency existed when the last transaction took its locks.
        self.has_dependencies = False
        #: The ledger rows of hosts that exist by now.
        self._hosts: set[Key] = set()
        #: The ledger rows that the last round needed.
        self._likely: set[Key] = set()
        #: The answer to the last operation that was handed in.
        self._last: Future[Any] = answered([])
        super().__init__(self._write_all)

    def commit(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:
        answers = super().commit(operations, wait=wait)
        self._last = answers[-1]
        return answers

    def wait(self) -> None:
        """Wait until the operations that were handed in so far are answered."""
        self._last.exception()

    def _write_all(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Write the ends before the rounds, so that the rounds can use the returned units."""
        admissions = [op for op in operations if isinstance(op, Admit)]
        completions = [op for op in operations if isinstance(op, Complete)]
        ends: Ends
        if len(completions) + len(admissions) == len(operations):
            ends = Completions(
                self.database, self.classes, completions, expect_children=self.has_dependencies
            )
        else:
            now = self.database.now()
            ends = Changes(
                self.classes, [_changes(op, now) for op in operations if not isinstance(op, Admit)]
            )
        written = self._transact(ends, admissions)
        if isinstance(ends, Changes) or written.has_new_heads:
            self.scan_hint.disturb()
        grants = iter([self._grants(started) for started in written.started])
        self._on_commit(written.has_events)
        answers = iter(written.answers)
        return [next(grants) if isinstance(op, Admit) else next(answers) for op in operations]

    def _transact(self, ends: Ends, admissions: Sequence[Admit]) -> Written:
        hosts = {("host", admission.host) for admission in admissions}
        if new := hosts - self._hosts:
            self.database.transact(lambda session: session.execute("add_ledger", columns(sorted(new))))
            self._hosts |= new
        # Changes that end no dispatch need no row, and must not wait for the rounds of others.
        likely = self._likely | (hosts or self._hosts)
        keys, careful = likely if admissions or len(ends) else set(), False
        while True:
            attempt = RoundAttempt(self, keys, careful=careful)
            try:
                written = self.database.transact(lambda session: attempt.run(session, ends, admissions))  # noqa: B023 - called at once
            except psycopg.DatabaseError as error:
                if error.sqlstate != ROUND_REFUSED:
                    raise
                careful = True
            except NotLocked as more:
                if more.new_class is not None:
                    self.classes.make([more.new_class])
                keys |= set(more.keys)
            else:
                self._likely = attempt.needed or self._likely  # a round over empty queues needs no row
                return written

    def _grants(self, started: StartedRound) -> list[Grant]:
        leased = [d.job_id for d in started.dispatches if d.job_id is not None and d.started_at is not None]
        jobs = started.jobs
        if missing := [job_id for job_id in leased if job_id not in jobs]:
            jobs |= {job.job_id: job for job in self._read_jobs(missing)}
        granted = [(d, None if d.job_id is None else jobs.get(d.job_id)) for d in started.dispatches]
        return [Grant(d, job, {} if job is None else started.parents.get(job.no, {})) for d, job in granted]


def _changes(operation: Operation[Any], now: Moment) -> Sequence[Change]:
    """
    The changes of an operation. A completion becomes a change, so that all apply in the order of arrival.
    """
    if isinstance(operation, Complete):
        return [completed(done.dispatch_id, now, done.result) for done in operation.done]
    assert isinstance(operation, Apply)
    return operation.changes


class RoundAttempt:
    """
    One attempt at the transaction. `keys`: the ledger rows to lock. `careful`: lock the heads before deciding
    what to do with them.
    """

    def __init__(self, batcher: RoundBatcher, keys: set[Key], *, careful: bool) -> None:
        self._batcher, self._keys, self._careful = batcher, keys, careful
        self.needed: set[Key] = set()

    def run(self, session: DatabaseSession, ends: Ends, admissions: Sequence[Admit]) -> Written:
        """Write the ends, then run the rounds. Each round sees what came before it."""
        self.needed = set()
        state = _LockedState(self._batcher, session, self._keys, admissions, ends)
        self._batcher.has_dependencies = session.has_dependencies
        first = effects = ends.judge(session, state.now, state.end_rows)
        self._need(effects.keys)
        batcher = self._batcher
        new_heads: list[NewHead] = []
        if effects.with_dependencies:
            dependencies = resolve_moves(session, effects, batcher.classes, batcher.ordering.aging)
            effects.defer(session, batcher.classes)
            dependencies.defer()
            new_heads += dependencies.released
        else:
            effects.defer(session, batcher.classes)
        if state.arrays:
            new_heads += self._advance_arrays(session, effects, state.arrays)
        if any(place.line(state.now) for place in effects.places.values()):  # requeued
            new_heads.append(UNKNOWN_HEAD)
        started: list[StartedRound] = []
        if not admissions:
            effects.writes.accounts = state.accounts(effects.ended)
            effects.writes.defer(session)
        without = effects.moved_numbers
        if admissions:
            new_heads = [head for head in new_heads if not state.heads.is_before(head)]
            if not all(map(state.heads.add, new_heads)):
                state.look_again(session)
                without = set()
        for number, admission in enumerate(admissions):
            if number:
                state, without = _LockedState(self._batcher, session, self._keys, admissions), set()
                effects = Effects(state.now)
            started.append(self._round(session, admission, state, effects, without))
            effects.writes.defer(session)
        session.waits_for_commit = len(ends) > 0 or session.writes
        return Written(first.answers, session.has_events, started, bool(new_heads))

    def _advance_arrays(
        self, session: DatabaseSession, effects: Effects, rows: Sequence[Any]
    ) -> list[NewHead]:
        """Advance the arrays of jobs that ended."""
        cache = self._batcher.rows
        arrays = PostgresArrayRows(session, rows, cache, effects.writes, effects.now)
        for record in arrays.records.values():
            self._need(set(), admission_class_of(record.array.member_intent))
        advance_arrays(arrays, effects.moves)
        return arrays.new_heads

    def _round(
        self,
        session: DatabaseSession,
        admission: Admit,
        state: _LockedState,
        effects: Effects,
        without: set[int],
    ) -> StartedRound:
        """
        Run one round. `effects`: of the ends in this transaction, which may not be written yet. `without`: the
        numbers of jobs whose rows they change.
        """
        batcher, host, heads = self._batcher, admission.host, state.heads
        classes = batcher.classes.read(session, {no for no, _ in heads.queues})
        self._need({key for no, _ in heads.queues for key in keys_of(classes[no])})
        while True:
            ledger = state.ledger(host, effects.ended)
            view = PostgresAdmissionView(
                session, host, state.now, ledger, heads, classes=batcher.classes, without=without
            )
            result = admission.run_round(view)
            if result.standalone_lease is not None:
                self._need(set(keys_of(result.standalone_lease)), result.standalone_lease)
            if not (lost := self._lock_heads(session, result)):
                break
            without |= lost
        batcher.scan_hint.has_run(view.most_pulled, len(heads.queues))
        effects.writes.accounts = ledger.accounts
        start = _Start(batcher, session, effects.writes, admission, state.now, released=heads.added)
        return start.write(result)

    def _need(self, keys: set[Key], new_class: AdmissionClass | None = None) -> None:
        if not keys <= self._keys or (
            new_class is not None and not self._batcher.classes.has_number(new_class)
        ):
            raise NotLocked(keys, new_class)
        self.needed |= keys

    def _lock_heads(self, session: DatabaseSession, result: RoundResult) -> set[int]:
        """The jobs that have changed since the round saw them, or are locked by another transaction."""
        if result.picks and not self._careful:
            return set()  # the statement that starts the picks also checks all heads
        heads = changed_heads(result)
        if not heads:
            return set()
        [locked] = session.flush(("lock_heads", columns(list(heads.items()))))
        return heads.keys() - {no for (no,) in locked}


class _LockedState:
    """
    What a round decides on, read after the locks. Without `admissions` there is no round, and only the rows
    of the ends and the ledger are read.
    """

    def __init__(
        self,
        batcher: RoundBatcher,
        session: DatabaseSession,
        keys: set[Key],
        admissions: Sequence[Admit],
        ends: Ends | None = None,
    ) -> None:
        self._sharing = batcher.ordering.sharing
        first: list[tuple[str, Values]] = [] if ends is None else ends.calls()
        array_ids = set() if ends is None else ends.arrays()
        of_arrays = [lock_arrays(array_ids)] if array_ids else []
        addons = {EVERYTHING, *(name for scope, name in keys if scope == "addon")}
        # Accounts are read after the lock: the ledger row of an addon guards its account.
        ledger: list[tuple[str, Values]] = [
            lock_ledger(keys),
            ("accounts", {"addons": array(sorted(addons))}),
        ]
        views: list[tuple[str, Values]] = []
        given_now, periods = batcher.database.given_now(), _periods(batcher.database.now())
        spending = any(admit.spending for admit in admissions)
        if admissions:
            most, look = batcher.scan_hint.call(0 if ends is None else len(ends))
            views = [("step_into_line", {"now": given_now, "most": STEPS}), look]
            if spending:
                views.append(("spent", periods))
        behind = [] if ends is None else ends.calls_behind_locks()
        self.now, answers = batcher.database.lock(session, *first, *of_arrays, *ledger, *views, *behind)
        until = len(answers) - len(behind)
        self.end_rows = [*answers[: len(first)], *answers[until:]]
        answers = answers[len(first) : until]
        self.arrays = answers.pop(0) if of_arrays else []
        self._ledger, self._accounts, *rows = answers
        self._scan_hint = batcher.scan_hint
        if admissions:
            _, heads, *spent = rows
            self._read_heads(heads, most, look)
            if spending and periods != (periods := _periods(self.now)):  # midnight has just passed
                spent = [session.execute("spent", periods)]
            self._spent = spent_from(chain.from_iterable(spent), periods["day"])

    def look_again(self, session: DatabaseSession) -> None:
        """Write what is deferred and read the heads again: the first round must see all new jobs."""
        most, look = self._scan_hint.call(0)
        [heads] = session.flush(look)
        self._read_heads(heads, most, look)

    def _read_heads(self, rows: Sequence[Any], most: int, look: tuple[str, Values]) -> None:
        self.heads = Heads(rows, most, everything=look[0] == "heads")
        self._scan_hint.has_read(self.heads)

    def accounts(self, ended: Ended) -> dict[AddonId, Account]:
        """A copy of the accounts after these dispatches returned their units."""
        accounts = accounts_from(self._accounts)
        for (_, admission_class), n in ended.items():
            account = accounts.setdefault(admission_class.addon_id, Account())
            account.hold(-n * admission_class.cost_units, self.now, self._sharing)
        return accounts

    def ledger(self, host: HostId, ended: Ended) -> Ledger:
        ledger = Ledger(accounts=self.accounts(ended), spent=self._spent)
        add_rows(ledger, self._ledger, host)
        for (where, admission_class), n in ended.items():
            for key in keys_of(admission_class):
                ledger.counts[key] -= n
            if where == host:
                ledger.units -= n * admission_class.cost_units
                ledger.running -= n
        return ledger


def _periods(now: Moment) -> dict[str, str]:
    return {window.kind: window.name for window in windows(now)}


_UNLIMITED: Final[StopLimit] = (None, None)
_KIND: Final = attrgetter("admission_class", "offer")


class _Start:
    """Defers the result of a round to the session."""

    def __init__(
        self,
        batcher: RoundBatcher,
        session: DatabaseSession,
        writes: PostgresWriteBatch,
        admission: Admit,
        now: Moment,
        *,
        released: Collection[int],
    ) -> None:
        """`released`: the numbers of jobs that had parents until this transaction."""
        self._batcher, self._session, self._writes, self._now = batcher, session, writes, now
        self._released = released
        self._admit, self._host, self._terms = admission, admission.host, admission.terms
        self._started = StartedRound([], {}, defaultdict(dict))

    def write(self, result: RoundResult) -> StartedRound:
        denied = denial_rows(result, self._now, self._writes.note)
        if result.picks or result.standalone_lease is not None:
            self._start(result)
        # After the start, which checks that the heads are as they were read.
        if denied:
            self._session.defer("deny_jobs", columns(denied))
        if result.passed:
            self._session.defer("pass_jobs", [self._now, array([job.no for job in result.passed])])
        return self._started

    def _start(self, result: RoundResult) -> None:
        now, terms, picks = self._now, self._terms, result.picks
        limits = [stop_limit(p, now) if p.offer is Placement.LEASE else _UNLIMITED for p in picks]
        common = {
            "batch": self._session.batch,
            "host": self._host,
            "now": now,
            "lease_until": now + terms.lease_for,
            "reserved_until": now + terms.reserve_for,
            "worker": terms.worker,
        }
        if picks:
            self._session.defer_rows("start_jobs", common | _heads(result, limits), self._keep)
        if released := [pick.waiting.no for pick in picks if pick.waiting.no in self._released]:
            self._session.defer_rows("results_of_parents", {"nos": array(released)}, self._keep_parents)
        standalone = (
            None
            if result.standalone_lease is None
            else self._start_standalone(result.standalone_lease, common)
        )
        flight = {
            "jobs": array([pick.waiting.no for pick in picks]),
            "standalone_lease": standalone,
            "live": len(picks) + (standalone is not None),
            "expires_at": now + min(terms.lease_for, terms.reserve_for),
            "stop_at": min((stop_at for stop_at, _ in limits if stop_at is not None), default=None),
        }
        self._session.defer("insert_flight", common | flight)
        for (admission_class, offer), alike in groupby(picks, _KIND):
            n = sum(1 for _ in alike)
            self._writes.use_units(self._host, admission_class, n)
            state = JobState.RUNNING if offer is Placement.LEASE else JobState.DISPATCHING
            self._writes.count_move(admission_class.addon_id, JobState.QUEUED, state, n)
        if picks:
            self._writes.note_many(lambda: self._start_events(picks, limits))

    def _keep(self, rows: list[Any]) -> None:
        jobs = self._batcher.classes.jobs(self._session, rows)
        self._started.jobs.update((job.job_id, job) for job in jobs)

    def _keep_parents(self, rows: list[Any]) -> None:
        for child_no, job_id, state, result in rows:
            self._started.parents[child_no][job_id] = JobState(state), result

    def _start_standalone(self, admission_class: AdmissionClass, common: dict[str, Any]) -> DispatchId:
        """Defer a lease without a job. Returns its id."""
        dispatch_id = DispatchId(f"{self._batcher.new_id()}.0")
        number = self._batcher.classes.number(admission_class)
        values = common | {"dispatch_id": dispatch_id, "class_no": number}
        self._session.defer("insert_standalone_lease", values)
        made = new_dispatch(
            dispatch_id, None, admission_class, Placement.LEASE, self._terms, host=self._host, now=self._now
        )
        self._started.dispatches.append(made)
        self._writes.use_units(self._host, admission_class, 1)
        self._writes.note(self._now, Note(EventKind.ADMITTED), dispatch_id=dispatch_id)
        return dispatch_id

    def _start_events(self, picks: list[Pick], limits: list[StopLimit]) -> Iterator[EventRow]:
        """The events of the picks. Also makes their dispatches, in front of a lease without a job."""
        dispatches: list[Dispatch] = []
        for pick, limit in zip(picks, limits, strict=True):
            made, events = start_dispatch(pick, limit, self._admit, self._now, self._batcher.ordering.aging)
            dispatches.append(made)
            yield from events
        self._started.dispatches[:0] = dispatches


def _heads(result: RoundResult, limits: list[StopLimit]) -> dict[str, bytes]:
    """The values of `start_jobs`: the picks first. For other heads it needs only their count of events."""
    heads, picks = changed_heads(result), result.picks
    return {
        "heads": array(list(heads)),
        "seen": array(list(heads.values())),
        "leased": array([pick.offer is Placement.LEASE for pick in picks]),
        "ends_at": column([pick.ends_at for pick in picks]),
        "stop_at": column([stop_at for stop_at, _ in limits]),
        "stop_for": column([stop_for for _, stop_for in limits]),
    }
