"""
Writes what is no change of one job: addons, hosts, schedules, arrays, batches, retention, and a new order of the
queue. All of that is rare, and the calling thread writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock.core.jobs.arrays import ArrayRecord
from penstock.core.jobs.changes import Note, addon_note, drain_note
from penstock.core.jobs.groups import JobGroup
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.types import Moment
from penstock.stores.api import (
    ChangeArray,
    ChangeBatch,
    ChangeSchedule,
    DrainHost,
    Learn,
    Operation,
    Prune,
    Receipt,
    RecordLoad,
    RegisterHost,
    RemoveHost,
    Reorder,
    ResolveDependencies,
    ScheduleWritten,
    SetAddon,
    Shift,
    Submit,
    SubmitBatch,
)
from penstock.stores.common.array_changes import change_array
from penstock.stores.common.group_commit import written_now
from penstock.stores.common.rows import schedule_values, without_jobs
from penstock.stores.common.writes import (
    NO_JOB,
    EventRow,
    event_row,
    learn,
    new_job_id,
    record_load,
    register_host,
    remove_host,
)
from penstock.stores.postgres.admission_view import PostgresAdmissionClasses, accounts_from
from penstock.stores.postgres.changes import Effects, PostgresWriteBatch, lock_ledger
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.dependencies import resolve_pending
from penstock.stores.postgres.groups import PostgresArrayRows, add_batch, change_batch, lock_arrays
from penstock.stores.postgres.pipeline import array, columns
from penstock.stores.postgres.submit import SubmitBatcher


class MaintenanceWriter:
    """
    The writer of maintenance. `number_events`: numbers the events that no reader has numbered. `on_commit` is
    called after each transaction with whether it wrote events.
    """

    def __init__(
        self,
        database: Database,
        classes: PostgresAdmissionClasses,
        aging: Aging,
        submits: SubmitBatcher,
        *,
        number_events: Callable[[], None],
        on_commit: Callable[[bool], None],
    ) -> None:
        self._database, self._classes, self._aging, self._submits = database, classes, aging, submits
        self._number_events, self._on_commit = number_events, on_commit

    def commit(
        self,
        operations: Sequence[Operation[Any]],
        *,
        wait: bool = False,  # noqa: ARG002 - the calling thread always writes
    ) -> list[Future[Any]]:
        return [written_now(partial(self._write, operation)) for operation in operations]

    def _write(self, operation: Operation[Any]) -> Any:
        if isinstance(operation, SetAddon):  # a ledger row that does not exist cannot be locked
            key = ("addon", operation.addon_id)
            self._database.transact(lambda session: session.execute("add_ledger", columns([key])))
        if isinstance(operation, ChangeSchedule) and operation.change.job is not None:
            self._submits.rows.prepare([operation.change.job.intent])
        if isinstance(operation, ChangeArray) and operation.intent is not None:
            self._submits.rows.prepare([operation.intent])
        if isinstance(operation, SubmitBatch):
            self._submits.rows.prepare(operation.intents)
        if isinstance(operation, Prune):  # readers number the events, and there may have been none
            self._number_events()

        def write(session: DatabaseSession) -> tuple[Any, bool]:
            return self._carry_out(session, operation), session.has_events

        answer, has_events = self._database.transact(write)
        self._on_commit(has_events)
        return answer

    def _carry_out(self, session: DatabaseSession, operation: Operation[Any]) -> Any:
        match operation:
            case ResolveDependencies():
                return self._resolve(session)
            case SetAddon():
                return self._set_addon(session, operation)
            case ChangeSchedule() | RecordLoad() | ChangeArray() | SubmitBatch() | ChangeBatch():
                return self._change_record(session, operation)
            case Prune(before, limit):
                return self._prune(session, before, limit)
            case Shift():
                return 0  # moments come from the server's clock, so a jump of this host's clock moves none
            case Reorder(aging, after, limit):
                values = {"after": after, "most": limit, "per_point": aging.per_point}
                return int(session.execute("reorder", values)[0][0])
            case RegisterHost() | RemoveHost() | DrainHost():
                return self._change_host(session, operation)
            case Learn():
                return learn(session, operation)
        raise TypeError(f"{type(operation).__name__} is no operation of this store")

    def _resolve(self, session: DatabaseSession) -> int:
        now, _ = self._database.lock(session)
        return resolve_pending(session, Effects(now), self._classes, self._aging)

    def _set_addon(self, session: DatabaseSession, operation: SetAddon) -> None:
        addon_id, weight, paused = operation.addon_id, operation.weight, operation.paused
        writes = PostgresWriteBatch()
        now, [_, accounts] = self._database.lock(
            session, lock_ledger([("addon", addon_id)]), ("accounts", {"addons": array([addon_id])})
        )
        writes.accounts = accounts_from(accounts)
        account = writes.account(addon_id)
        account.weight = account.weight if weight is None else weight
        account.paused = account.paused if paused is None else paused
        writes.note(now, addon_note(addon_id, account.weight, account.paused, operation.by))
        writes.defer(session)

    def _change_host(self, session: DatabaseSession, operation: RegisterHost | RemoveHost | DrainHost) -> Any:
        match operation:
            case RegisterHost(host):
                return register_host(session, host)
            case RemoveHost():
                return remove_host(session, operation)
            case DrainHost():
                return self._drain_host(session, operation)

    def _drain_host(self, session: DatabaseSession, drain: DrainHost) -> bool:
        values = {"host": drain.host, "draining": int(drain.draining)}
        now, [rows] = self._database.lock(session, ("drain_host", values))
        if rows:
            writes = PostgresWriteBatch()
            writes.note(now, drain_note(drain.host, drain.draining, drain.by))
            writes.defer(session)
        return bool(rows)

    def _change_record(
        self,
        session: DatabaseSession,
        operation: ChangeSchedule | RecordLoad | ChangeArray | SubmitBatch | ChangeBatch,
    ) -> ScheduleWritten | ArrayRecord | JobGroup | list[Receipt] | None:
        if isinstance(operation, ChangeArray):
            return self._change_array(session, operation)
        if isinstance(operation, SubmitBatch):
            return add_batch(session, self._database, self._submits, operation)
        if isinstance(operation, ChangeBatch):
            rows = self._submits.rows
            return change_batch(session, self._database, rows, operation.group_id, operation.decide)
        return self._write_schedule(session, operation)

    def _write_schedule(
        self, session: DatabaseSession, operation: ChangeSchedule | RecordLoad
    ) -> ScheduleWritten | None:
        """
        Write a decision about a schedule, or the load of an hour. The row of the schedule stays locked until
        the COMMIT, so one of several schedulers submits the job. If another transaction inserts the row
        meanwhile, this one runs again and finds it.
        """
        if isinstance(operation, RecordLoad):
            record_load(session, operation, self._database.now())
            return None
        change, depth = operation.change, operation.depth
        _, [known] = self._database.lock(session, ("lock_schedule", {"name": change.name}))
        if change.version != (known[0][0] if known else 0):
            return None
        receipt = None
        if change.job is not None:

            def events_for(receipt: Receipt) -> list[EventRow]:
                return [event_row(change.at, note, NO_JOB) for note in change.events(new_job_id(receipt))]

            receipt = self._submits.submit_in(session, Submit([change.job.intent], depth), events_for)
        job_id = new_job_id(receipt)
        record = change.row(job_id)
        if record is None:
            session.defer("remove_schedule", {"name": change.name})
        else:
            session.defer("set_schedule" if known else "add_schedule", schedule_values(record))
        if job_id is None:  # else the submit has written the events
            writes = PostgresWriteBatch()
            for note in change.events(None):
                writes.note(change.at, note)
            writes.defer(session)
        return ScheduleWritten(record, receipt)

    def _change_array(self, session: DatabaseSession, operation: ChangeArray) -> ArrayRecord | None:
        now, [rows] = self._database.lock(session, lock_arrays([operation.array_id]))
        writes = PostgresWriteBatch()
        arrays = PostgresArrayRows(session, rows, self._submits.rows, writes, now)
        record = change_array(arrays, operation)
        writes.defer(session)
        return record

    def _prune(self, session: DatabaseSession, before: Moment, limit: int) -> int:
        now, old = self._old_jobs(session, before, limit)
        session.defer("forget_commits", None)
        if not old:
            self._forget_groups(session, before)
            return 0
        nos, ids = array([no for no, *_ in old]), {job_id for _, job_id, *_ in old}
        batches = [
            (batch, numbered, without_jobs(text, ids))
            for batch, numbered, text in session.execute("batches_of", {"nos": nos})
        ]
        empty = {batch for batch, numbered, text in batches if numbered and text is None}
        session.defer("forget", {"nos": nos, "ids": array(sorted(ids))})
        session.defer("forget_batches", {"batches": array(sorted(empty))})
        if rest := [(batch, text or "[]") for batch, _, text in batches if batch not in empty]:
            session.defer("rewrite_batches", columns(rest))
        writes = PostgresWriteBatch()
        for _, _, addon_id, state in old:
            writes.tally[addon_id, state] -= 1
        writes.note(now, Note(EventKind.PRUNED, data={"jobs": len(old), "before": before}))
        writes.defer(session)
        if len(old) < limit:
            self._forget_groups(session, before)
        return len(old)

    def _forget_groups(self, session: DatabaseSession, before: Moment) -> None:
        """
        Prune arrays and batches behind all of their jobs: then the key of an array and the name of a batch are free
        again.
        """
        for name in ("forget_array_chunks", "forget_arrays", "forget_groups"):
            session.defer(name, {"before": before})

    def _old_jobs(self, session: DatabaseSession, before: Moment, limit: int) -> tuple[Moment, list[Any]]:
        """The moment, and the oldest settled jobs: locked, and removed from the lists of ended jobs."""
        old: list[Any] = []
        #: Jobs that a child waits for: they stay on their lists.
        waited_for: list[tuple[int, int, int]] = []
        read, finished = 0, set[int]()
        now, [lists] = self._database.lock(
            session, ("old_ended_jobs", {"before": before, "most": limit, "seen": read})
        )
        while lists:
            # By number among jobs of one moment, as in the other stores: a list has the order of its changes.
            listed = sorted(
                ((batch, at, no) for batch, at, jobs in lists for no in jobs), key=lambda job: job[1:]
            )
            finished |= {batch for batch, *_ in lists}
            while listed and len(old) < limit:  # `old_jobs` leaves some of them out
                piece, listed = listed[: limit - len(old)], listed[limit - len(old) :]
                nos, moments = array([no for *_, no in piece]), array([at for _, at, _ in piece])
                _, rows, awaited = session.execute_many(
                    ("lock_ended", {"nos": nos}),
                    ("old_jobs", {"nos": nos, "moments": moments}),
                    ("awaited", {"nos": nos}),
                )
                old += rows
                kept = {no for (no,) in awaited}
                waited_for += [job for job in piece if job[2] in kept]
            listed += waited_for
            waited_for = []
            if listed:
                session.defer("shorten_ended_jobs", columns([(batch, no) for batch, _, no in listed]))
                finished -= {batch for batch, *_ in listed}
            if len(old) == limit:
                break
            read += len(lists)
            lists = session.execute("old_ended_jobs", {"before": before, "most": limit, "seen": read})
        session.defer("forget_ended_jobs", {"batches": array(sorted(finished))})
        return now, old
