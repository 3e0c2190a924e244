"""One write transaction after the other, each shared by everything that arrived together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, cast

import apsw
from msgspec.structs import replace

from penstock.core.errors import OutcomeUnknown
from penstock.core.jobs.changes import Change, Note, Renewal
from penstock.core.jobs.intent import AdmissionClass, Intent, all_but_payload
from penstock.core.jobs.job import Dispatch, DispatchStep, EventKind, JobStep, place
from penstock.core.jobs.ordering import Ordering, Placement, RoundResult
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment
from penstock.stores.api import (
    Admit,
    Apply,
    Clock,
    Complete,
    Depth,
    Grant,
    NotesFor,
    Operation,
    Receipt,
    Renew,
    Standing,
    Submit,
    Terms,
    key_conflict,
)
from penstock.stores.common.rows import body_hash, by_name, encode, intent_row, job_row, listed, new_dispatch
from penstock.stores.sqlite.admission_view import NewQueued, Queued, SqliteAdmissionClasses
from penstock.stores.sqlite.changes import Moved, complete, move_dispatch, move_job, renew, take
from penstock.stores.sqlite.connection import WriteLock, failures, one, query, statements
from penstock.stores.sqlite.guard import FileGuard, FileLost, Loss
from penstock.stores.sqlite.maintenance import SqliteUpkeep
from penstock.stores.sqlite.submit_relay import NamedSubmit
from penstock.stores.sqlite.totals import SqliteTotals
from penstock.stores.sqlite.write_batch import NO_JOB, SqliteWriteBatch

_SUBMITTED, _QUEUED = str(EventKind.SUBMITTED), str(JobState.QUEUED)
#: What `apply` reads by.
JOBS: Final = "jobs_for_changes"
DISPATCHES: Final = "dispatches_for_changes"
#: How many jobs whose time has come step into line in one transaction.
STEPS: Final = 5_000
#: In the place of what `jobs_for_steps` says of a job, where there is none.
_NO_ROW: Final = (0, "", 0, 0, AddonId(""), "")


class AcceptLoss(Operation[None], frozen=True):
    """The first operation on a file that was put back: see `guard`."""

    loss: Loss


class Transaction(SqliteUpkeep):
    """`committed` is called when one is durable that has written events."""

    def __init__(
        self,
        con: apsw.Connection,
        lock: WriteLock,
        path: Path,
        clock: Clock,
        ordering: Ordering,
        *,
        guard: FileGuard,
        new_id: Callable[[], str],
        committed: Callable[[], None],
    ) -> None:
        self._con, self._lock, self._path, self._ordering = con, lock, path, ordering
        self._clock, self._now = clock, 0
        self._new_id, self._committed = new_id, committed
        self._previews: list[Callable[[], None]] = []
        self._demands, self._sums = SqliteAdmissionClasses(), SqliteTotals(con)
        self._guard, self._failures = guard, failures(path)
        self._sql = statements()
        #: What the last job that was submitted shares with the next, if they differ by their payload alone; and it in rows, as they are at that moment.
        self._like: Any = None
        self._like_at = 0
        self._admission_class: AdmissionClass | None = None
        self._rest: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]] = ((), (), ())

    def __enter__(self) -> Self:
        with self._failures:
            self._begin()
        self._pages = SqliteWriteBatch(self._con, self._demands, self._sums, self._now)
        return self

    def _begin(self) -> None:
        self._lock.__enter__()
        try:
            # IMMEDIATE, always: a deferred transaction that turns into a writer fails at once, whatever the busy timeout.
            self._con.execute("BEGIN IMMEDIATE")
            self._guard.look()
            self._sums.begin()
            # One moment for all that is committed together, asked for when the lock has been waited for.
            self._now = self._clock()
        except BaseException as error:  # `__exit__` will not come, so the lock goes back here
            if self._con.in_transaction:
                self._con.execute("ROLLBACK")
            try:
                if isinstance(error, FileLost):
                    raise self._guard.save(error) from None
            finally:
                self._lock.__exit__()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._failures:
            self._end(error)
        self._failures.__exit__(kind, error, trace)
        if error is None and self._pages.told:
            self._committed()
        del self._pages  # with the payloads of what was submitted

    def _end(self, error: BaseException | None) -> None:
        stands = False
        try:
            if error is None:
                self._pages.flush()
                for preview in self._previews:  # the sync takes a while, and needs no interpreter
                    preview()
                self._commit()
                self._sums.committed()
                stands = True
                self._guard.committed(self._sums.event)
        finally:
            self._previews.clear()
            if not stands:
                self._undo()
            self._lock.__exit__()

    def _commit(self) -> None:
        """
        An error here leaves the outcome open: all that a commit writes may be in the `-wal` when its sync fails, and the next process
        to open the file finds it there.
        """
        try:
            self._con.execute("COMMIT")
        except apsw.IOError as error:
            self._erase()
            raise OutcomeUnknown(
                f"{self._path} could not be synced to the disk ({error}): this may or may not have been written",
                kind="unknown",
            ) from error

    def _erase(self) -> None:
        """
        Overwrite in the `-wal` what a failed commit has written: a job that is not found now must not be there after the next start. That
        holds for a kill even if this sync fails as well; only after a power cut the outcome is open.
        """
        with suppress(apsw.Error):
            self._undo()
            version = self._con.pragma("user_version")
            self._con.execute(f"BEGIN IMMEDIATE; PRAGMA user_version = {version}; COMMIT")

    def _undo(self) -> None:
        """SQLite may have done its part already, as it does on a full disk."""
        if self._con.in_transaction:
            self._con.execute("ROLLBACK")
        self._demands.forget()
        self._sums.forget()
        self._like = None

    def write(self, operation: Operation[Any]) -> Any:
        match operation:
            case NamedSubmit():
                return self.submit(operation.intents, operation.depth, operation.job_ids, sure=operation.sure)
            case Submit(intents, depth):
                return self.submit(intents, depth)
            case Complete(done):
                return complete(self._pages, done, self._ordering.sharing, self._now)
            case Admit():
                grants = self.admit(operation)
                if operation.preview is not None:
                    self._previews.append(partial(operation.preview, grants))
                return grants
            case Apply(changes):
                return self.apply(changes)
            case Renew(renewals, notes_for):
                return self.renew(renewals, notes_for)
            case AcceptLoss(loss):
                return self.accept_loss(loss)
        return self.keep_up(operation)

    # submit

    def submit(
        self, intents: Sequence[Intent], depth: Depth, names: Sequence[JobId] = (), *, sure: bool = True
    ) -> list[Receipt]:
        """`names`: the ids that the jobs shall have. Not `sure`: another process may have written them already."""
        known = {
            i: self._known(intent) for i, intent in enumerate(intents) if intent.idempotency_key is not None
        }
        known.update({} if sure else self._written(names))
        fresh = [intent for i, intent in enumerate(intents) if known.get(i) is None]
        depth.check(fresh, self._pages.queued)
        receipts = []
        made: dict[tuple[AddonId, str], tuple[Receipt, bytes]] = {}
        for i, intent in enumerate(intents):
            receipt = known.get(i)
            key = (intent.addon_id, intent.idempotency_key or "")
            if receipt is None and key in made:
                receipt = _same_body(made[key], intent)
            if receipt is None:
                receipt = self._insert(intent, names[i] if names else JobId(self._new_id()))
                if intent.idempotency_key is not None:
                    made[key] = (replace(receipt, created=False), body_hash(intent))
            receipts.append(receipt)
        return receipts

    def _known(self, intent: Intent) -> Receipt | None:
        self._pages.flush_rows()
        found = {"addon_id": intent.addon_id, "key": intent.idempotency_key}
        for job_id, state, said in query(self._con, "jobs_by_key", found):
            return _same_body((Receipt(job_id, JobState(state), created=False), said), intent)
        return None

    def _written(self, names: Sequence[JobId]) -> dict[int, Receipt]:
        self._pages.flush_rows()
        there = self._rows(JOBS, list(names))
        return {
            i: Receipt(name, JobState(there[name][1]), created=True)
            for i, name in enumerate(names)
            if name in there
        }

    def _insert(self, intent: Intent, job_id: JobId) -> Receipt:
        now, no, like = self._now, self._pages.next_no(), all_but_payload(intent)
        if like != self._like:
            self._put_into_rows(intent, like)
        elif now != self._like_at:
            if intent.earliest_start_at is not None or intent.deadline_at is not None:
                self._put_into_rows(intent, like, self._admission_class)
            else:
                self._move_rows_to(now)
        of_job, of_queue, of_intent = self._rest
        job = (no, job_id, self._pages.batch, *of_job)
        self._pages.add_job(job, NewQueued(no, job_id, *of_queue), (no, intent.payload, *of_intent))
        self._pages.fresh[no] = intent
        self._pages.tally[intent.addon_id, JobState.QUEUED] += 1
        self._pages.tell((now, _SUBMITTED, job_id, 1, _QUEUED, "", None, None))
        return Receipt(job_id, JobState.QUEUED, created=True)

    def _put_into_rows(
        self, intent: Intent, like: Any, admission_class: AdmissionClass | None = None
    ) -> None:
        now = self._now
        its_place = place(intent, now, None, self._ordering, admission_class)
        class_no = self._demands.number(self._con, its_place.admission_class)
        row = job_row(0, JobId(""), intent, its_place, class_no=class_no, now=now)
        (addon_id, _, line, turn, ready_at, urgent_at, priority, _, earliest, deadline, *limits, key) = row[
            2:
        ]
        self._like, self._like_at, self._admission_class = like, now, its_place.admission_class
        of_job = (addon_id, class_no, ready_at, priority, now, earliest, deadline, *limits, key)
        of_queue = (class_no, line, turn, ready_at, urgent_at, deadline, priority, *limits)
        self._rest = of_job, of_queue, intent_row(0, intent)[2:]

    def _move_rows_to(self, now: Moment) -> None:
        """Of a job that may start at once and has no deadline: all of its moments are this one."""
        (addon_id, class_no, _, priority, _, *of_job), (_, line, turn, _, *of_queue), of_intent = self._rest
        self._rest = (
            (addon_id, class_no, now, priority, now, *of_job),
            (class_no, line, turn + now - self._like_at, now, *of_queue),
            of_intent,
        )
        self._like_at = now

    # admit

    def admit(self, admit: Admit) -> list[Grant]:
        host, terms = admit.host, admit.terms
        now, admission_view = self._now, self._pages.admission_view(host, self._now)
        if admission_view.anybody:
            # Looked for first: an UPDATE that finds nobody costs fifty times what this does, and nearly always there is nobody.
            step = list(query(self._con, "due_jobs", {"now": now, "most": STEPS}))
            if step:
                self._con.executemany(self._sql["step_into_line"], step)
        try:
            round_result = admit.run_round(admission_view)
        finally:
            admission_view.close()
        self._deny(round_result, now)
        grants = take(self._pages, round_result.picks, terms, self._ordering, host=host, now=now)
        if round_result.loan is not None:
            grants.append(Grant(self._loan(round_result.loan, host, now, terms)))
        return grants

    def _deny(self, round_result: RoundResult, now: Moment) -> None:
        if round_result.denials or round_result.passed:
            self._pages.flush_rows()
        rows = []
        for denial in round_result.denials:
            no, code, data = denial.waiting.no, denial.reason.code, denial.as_json()
            n = cast("Queued", denial.waiting).events + 1
            told = (no, denial.waiting.job_id, n, JobState.QUEUED)
            self._pages.note(now, Note(EventKind.DENIED, code, data), told)
            rows.append((code, encode(data) or "{}", now, n, no))
        if rows:
            self._con.executemany(self._sql["deny_jobs"], rows)
        if round_result.passed:
            self._con.executemany(
                self._sql["pass_jobs"], [(now, waiting.no) for waiting in round_result.passed]
            )

    def _loan(self, admission_class: AdmissionClass, host: HostId, now: Moment, terms: Terms) -> Dispatch:
        dispatch_id = DispatchId(f"{self._new_id()}.0")
        made = new_dispatch(dispatch_id, None, admission_class, Placement.LEASE, terms, host=host, now=now)
        class_no = self._demands.number(self._con, admission_class)
        self._pages.flush_rows()
        (no,) = one(self._con, "next_standalone_lease")
        self._pages.add_live(
            [(no, dispatch_id, class_no, host, 0, made.phase, 0, None, now, now, made.expires_at, None, None, None, made.worker)]
        )  # fmt: skip
        self._pages.hold(host, class_no, 1)
        self._pages.touched.add(
            admission_class.addon_id
        )  # its account was changed by the round, as it picked
        self._pages.note(now, Note(EventKind.ADMITTED), NO_JOB, dispatch_id)
        return made

    # apply

    def apply(self, changes: Sequence[Change]) -> list[bool]:
        self._pages.forget_leases()
        self._pages.flush_rows()
        jobs = self._rows(JOBS, [change.job.job_id for change in changes if change.job is not None])
        named = [change.dispatch.dispatch_id for change in changes if change.dispatch is not None]
        dispatches = self._rows(DISPATCHES, named)
        return [self._apply(change, jobs, dispatches, self._now) for change in changes]

    def _rows(self, name: str, ids: list[Any]) -> dict[str, Any]:
        """All that a batch decides on, read at once. A row is taken out when it is moved: whoever comes next reads it anew."""
        values = by_name(ids) if name == DISPATCHES else listed(ids)
        return {row[-1]: row for row in query(self._con, name, {"ids": values})}

    def _row(self, rows: dict[str, Any], name: str, key: str) -> Any:
        if key not in rows:
            self._pages.flush_rows()
            rows.update(self._rows(name, [key]))
        return rows.get(key)

    def _apply(self, change: Change, jobs: dict[str, Any], dispatches: dict[str, Any], now: Moment) -> bool:
        job, dispatch = change.job, change.dispatch
        if (job is not None and not self._job_matches(job, jobs)) or (
            dispatch is not None and not self._dispatch_matches(dispatch, dispatches, now)
        ):
            return False
        no, _, _, n, addon_id, _ = _NO_ROW if job is None else jobs.pop(job.job_id)
        active, dispatch_id, events = 0, None, n + len(change.notes)
        if dispatch is not None:
            dispatch_id = dispatch.dispatch_id
            _, _, class_no, host, started_at, in_flight, *_ = dispatches.pop(dispatch_id)
            move_dispatch(self._pages, dispatch, in_flight, events, now)
            if dispatch.target is DispatchPhase.ENDED:  # only here do units go back, and a row ends once
                self._pages.give_back(host, class_no, 1, self._ordering.sharing, now)
                active = 0 if started_at is None else max(0, now - started_at)
        if job is None:
            for note in change.notes:
                self._pages.note(change.at, note, NO_JOB, dispatch_id)
            return True
        move_job(self._pages, job, Moved(no, events, active, now))
        self._pages.moved(addon_id, job.source, job.target)
        for note in change.notes:
            n += 1
            self._pages.note(change.at, note, (no, job.job_id, n, job.target), dispatch_id)
        return True

    def _job_matches(self, step: JobStep, jobs: dict[str, Any]) -> bool:
        row = self._row(jobs, JOBS, step.job_id)
        return row is not None and row[1] == step.source and row[2] == step.fence

    def _dispatch_matches(self, step: DispatchStep, dispatches: dict[str, Any], now: Moment) -> bool:
        row = self._row(dispatches, DISPATCHES, step.dispatch_id)
        if row is None or row[0] != step.source or row[6] != step.source_reason:
            return False
        return row[1] > now or not step.while_valid

    # renew

    def renew(self, renewals: Iterable[Renewal], notes_for: NotesFor) -> list[Standing | None]:
        self._pages.forget_leases()
        self._pages.flush_rows()
        return [renew(self._con, self._pages, renewal, notes_for, self._now) for renewal in renewals]


def _same_body(first: tuple[Receipt, bytes], intent: Intent) -> Receipt:
    receipt, said = first
    if said != body_hash(intent):
        raise key_conflict(intent, receipt.job_id)
    return receipt
