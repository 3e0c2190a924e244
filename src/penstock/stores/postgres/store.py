"""
Jobs in a PostgreSQL database, for any number of hosts. Every process may submit, read and dispatch.

Operations that arrive together in a process go to the server together: submits, rounds (with changes and
completions) and heartbeats have a writer with group commit each, so that a submit never waits for a ledger
row. The server's clock is the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec.structs import replace

from penstock.core.jobs.changes import Change, Note, addon_note, completed, drain_note
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.types import HostId, JobId, Moment
from penstock.stores.api import (
    LOST_FOR,
    Admit,
    Apply,
    Clock,
    Complete,
    Depth,
    DrainHost,
    Grant,
    Operation,
    Prune,
    Receipt,
    RegisterHost,
    Relay,
    RemoveHost,
    Renew,
    Reorder,
    SetAddon,
    Shift,
    Standing,
    Submit,
    name_taken,
)
from penstock.stores.common.group_commit import (
    BatchUnknown,
    Commit,
    GroupCommit,
    answered,
    failed,
    in_turn,
    outcome_of,
    with_jobs,
)
from penstock.stores.common.rows import forget, host_values, uuid7
from penstock.stores.postgres.changes import Applying, Changes, Completing
from penstock.stores.postgres.database import ConnectionOptions, Database, DatabaseSession
from penstock.stores.postgres.migrations import migrate
from penstock.stores.postgres.pipeline import array, columns
from penstock.stores.postgres.reads import PostgresReads
from penstock.stores.postgres.renew import Renewing
from penstock.stores.postgres.rounds import Admitting, RoundAnswers, StartedRound
from penstock.stores.postgres.submit import Submitting, borrowed, retried
from penstock.stores.postgres.wakeups import NotificationListener
from penstock.stores.postgres.write_batch import (
    NO_JOB,
    PostgresAdmissionClasses,
    PostgresWriteBatch,
    accounts_from,
    lock_ledger,
)


class PostgresStore(PostgresReads):
    shared = True
    """
    `clock` is for tests; without one the server's decides. `schema` is made and brought up to date if it is not. `pooler`: behind a
    PgBouncer in transaction mode, without prepared statements and LISTEN.
    """

    def __init__(
        self,
        dsn: str,
        clock: Clock | None = None,
        *,
        schema: str = "penstock",
        options: ConnectionOptions | None = None,
        ordering: Ordering | None = None,
        new_id: Callable[[], str] = uuid7,
    ) -> None:
        options = options or ConnectionOptions()
        self._ordering = ordering or Ordering()
        link = Database(dsn, schema, options, clock)
        try:
            migrate(link)
            link.now()  # once known, the time is known while the server is away
        except BaseException:  # nobody will hold this store, Ctrl-C included: its connections go with it
            link.close()
            raise
        super().__init__(link, PostgresAdmissionClasses(link))
        self._submitting = Submitting(link, self._demands, self._ordering, new_id)
        self._renewing = Renewing(link)
        self._holder: str | None = None
        self._listeners: list[Callable[[], None]] = []
        self._wakeups = NotificationListener(link, self._notify_listeners, by_notice=not options.pooler)
        self._submits = SubmitBatcher(self._submit_all)
        admitting = Admitting(
            link, self._demands, self._ordering, new_id=new_id, jobs_from=self._started_jobs
        )
        self._rounds = RoundBatcher(admitting, self.jobs, self._committed)
        self._renewals = GroupCommit(self._renew_all)  # type: ignore[arg-type]  # nothing but `Renew` comes to it

    # writes

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:
        """
        Submits, rounds and heartbeats have a writer each; a commit that needs several of them goes to one behind the other. Upkeep is
        written in the calling thread.
        """
        writer = self._writer_of(operations[0])
        if len(operations) == 1 or all(self._writer_of(operation) == writer for operation in operations):
            return writer(operations, wait=wait)
        return in_turn([(self._writer_of(operation), operation) for operation in operations])

    def _writer_of(self, operation: Operation[Any]) -> Commit:
        if isinstance(operation, Submit):
            return self._submits.commit
        if isinstance(operation, Apply | Complete | Admit):
            return self._rounds.commit
        return self._renewals.commit if isinstance(operation, Renew) else self._keep_up

    def submit_within(self, connection: Any, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        """
        `connection`: a psycopg Connection, or a SQLAlchemy Session or Connection on psycopg. Workers are told with its commit.
        A depth limit is kept but for what others submit at the same time: a lock until the caller's commit would hold up everybody.
        """
        submit = Submit(intents, depth)
        self._submitting.prepare([submit])
        with self._link.failures():
            return retried(lambda: self._run_within(connection, submit))

    def _run_within(self, connection: Any, submit: Submit) -> list[Receipt]:
        with borrowed(connection, self._link.sql) as session:
            [receipts] = self._submitting.run(session, [submit], exact=False)
            session.leave("notify", {"channel": self._wakeups.channel, "by": ""})
            self._rounds.admitting.scan_hint.disturbed()
            return receipts

    def _submit_all(self, submits: list[Submit]) -> list[list[Receipt]]:
        self._submitting.prepare(submits)
        receipts = self._submitting.submit(submits)
        self._rounds.admitting.scan_hint.disturbed()
        self._committed(any(receipt.created for answer in receipts for receipt in answer))
        return receipts

    def _started_jobs(self, rows: list[Any]) -> list[Job]:
        return self._jobs_from(rows, self._demands.known)

    def _renew_all(self, renewals: list[Renew]) -> list[list[Standing | None]]:
        """A heartbeat behind the end of its run must find it ended, so it waits for the rounds that were handed in before."""
        self._rounds.last.exception()
        answers, told = self._link.transact(lambda session: self._renewing.run(session, renewals))
        self._committed(told)
        return answers

    # upkeep

    def _keep_up(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:  # noqa: ARG002 - it always does
        return [outcome_of(partial(self._write_upkeep, operation)) for operation in operations]

    def _write_upkeep(self, operation: Operation[Any]) -> Any:
        match operation:
            case SetAddon():
                return self._set_addon(operation)
            case Prune(before, limit):
                return self._prune(before, limit)
            case Shift():
                return 0  # the clock is the server's, and a jump of ours moves no lease
            case Reorder():
                return self._reorder(operation)
            case RegisterHost(host):
                return self._register_host(host)
            case RemoveHost(host_id, instance):
                return self._remove_host(host_id, instance)
            case DrainHost():
                return self._drain_host(operation)
        raise TypeError(f"{type(operation).__name__} is no operation of this store")

    def _set_addon(self, set_addon: SetAddon) -> None:
        addon_id, weight, paused, by = set_addon.addon_id, set_addon.weight, set_addon.paused, set_addon.by
        key = ("addon", addon_id)
        self._link.transact(lambda session: session.ask("add_ledger", columns([key])))

        def write(session: DatabaseSession) -> None:
            pages = PostgresWriteBatch()
            now, [_, accounts] = self._link.opening(
                session, lock_ledger([key]), ("accounts", {"addons": array([addon_id])})
            )
            pages.accounts = accounts_from(accounts)
            account = pages.account(addon_id)
            account.weight = account.weight if weight is None else weight
            account.paused = account.paused if paused is None else paused
            pages.note(now, addon_note(addon_id, account.weight, account.paused, by), NO_JOB)
            pages.leave(session)

        self._link.transact(write)
        self._committed(told=True)

    def _prune(self, before: Moment, limit: int) -> int:
        self._number()  # where no process reads events, this one must; and an event without a number cannot go
        forgotten = self._link.transact(lambda session: self._forget(session, before, limit))
        self._committed(forgotten > 0)
        return forgotten

    def _forget(self, session: DatabaseSession, before: Moment, limit: int) -> int:
        old: list[Any] = []
        seen, done_with = 0, set[int]()
        now, [sheets] = self._link.opening(
            session, ("old_ended_jobs", {"before": before, "most": limit, "seen": seen})
        )
        while sheets:
            # By number among jobs of one moment, as in the other stores: a batch has them in the order of its changes.
            listed = sorted(
                ((batch, at, no) for batch, at, jobs in sheets for no in jobs), key=lambda job: job[1:]
            )
            done_with |= {batch for batch, *_ in sheets}
            while listed and len(old) < limit:  # some may have been revived since they were listed
                piece, listed = listed[: limit - len(old)], listed[limit - len(old) :]
                nos, moments = array([no for *_, no in piece]), array([at for _, at, _ in piece])
                _, found = session.together(
                    ("lock_ended", {"nos": nos}), ("old_jobs", {"nos": nos, "moments": moments})
                )
                old += found
            if listed:
                session.leave("shorten_ended_jobs", columns([(batch, no) for batch, _, no in listed]))
                done_with -= {batch for batch, *_ in listed}
            if len(old) == limit:
                break
            seen += len(sheets)
            sheets = session.ask("old_ended_jobs", {"before": before, "most": limit, "seen": seen})
        session.leave("forget_ended_jobs", {"batches": array(sorted(done_with))})
        session.leave("forget_commits", None)
        if not old:
            return 0
        nos, ids = array([no for no, *_ in old]), {job_id for _, job_id, *_ in old}
        told = [
            (batch, numbered, forget(text, ids))
            for batch, numbered, text in session.ask("batches_of", {"nos": nos})
        ]
        empty = {batch for batch, numbered, text in told if numbered and text is None}
        session.leave("forget", {"nos": nos, "ids": array(sorted(ids))})
        session.leave("forget_batches", {"batches": array(sorted(empty))})
        if rest := [(batch, text or "[]") for batch, _, text in told if batch not in empty]:
            session.leave("rewrite_batches", columns(rest))
        pages = PostgresWriteBatch()
        for _, _, addon_id, state in old:
            pages.tally[addon_id, state] -= 1
        pages.note(now, Note(EventKind.PRUNED, data={"jobs": len(old), "before": before}), NO_JOB)
        pages.leave(session)
        return len(old)

    def _reorder(self, reorder: Reorder) -> int:
        values = {"after": reorder.after, "most": reorder.limit, "per_point": reorder.aging.per_point}
        [(last,)] = self._link.transact(lambda session: session.ask("reorder", values))
        self._rounds.admitting.scan_hint.disturbed()
        return int(last)

    def _register_host(self, host: Host) -> Host:
        def write(session: DatabaseSession) -> Host:
            _, [found] = self._link.opening(session, ("register_host", host_values(host)))
            if not found:
                raise name_taken(host)
            session.leave("forget_hosts", {"before": host.seen_at - LOST_FOR})
            return replace(host, draining=bool(found[0][0]))

        return self._link.transact(write)

    def _remove_host(self, host: HostId, instance: str) -> None:
        def write(session: DatabaseSession) -> None:
            for name in ("leave_host", "lose_host"):
                session.leave(name, {"host": host, "instance": instance})

        self._link.transact(write)

    def _drain_host(self, drain: DrainHost) -> bool:
        host, draining, by = drain.host, drain.draining, drain.by

        def write(session: DatabaseSession) -> bool:
            now, [found] = self._link.opening(
                session, ("drain_host", {"host": host, "draining": int(draining)})
            )
            if found:
                pages = PostgresWriteBatch()
                pages.note(now, drain_note(host, draining, by), NO_JOB)
                pages.leave(session)
            return bool(found)

        known = self._link.transact(write)
        self._committed(known)
        return known

    # the dispatchers

    def acquire_dispatch(self, holder: str, relay: Relay | None = None) -> None:  # noqa: ARG002 - every process commits for itself
        """One of many: none is refused, the ledger keeps them apart."""
        self._link.transact(
            lambda session: session.leave("register_dispatcher", {"holder": holder, "now": self._link.now()})
        )
        self._holder = holder
        self.listen()

    def release_dispatch(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            self._link.transact(lambda session: session.leave("unregister_dispatcher", {"holder": holder}))

    def listen(self) -> None:
        self._wakeups.listen()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def _committed(self, told: bool) -> None:
        if told:
            self._notify_listeners()
            self._wakeups.ring()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        self._rounds.close()
        self._submits.close()
        self._renewals.close()
        self._wakeups.close()
        self._link.close()


class SubmitBatcher(GroupCommit):
    """`write`: all of them in one transaction, answered when that is durable."""

    def __init__(self, write: Callable[[list[Submit]], list[list[Receipt]]]) -> None:
        super().__init__(write)  # type: ignore[arg-type]  # nothing but submits comes here
        #: The thread that has it submits for itself. If a Ctrl-C at the wrong moment loses it, the writer's own thread does it all.
        self._pass = deque([object()])

    def commit(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:
        """
        In the calling thread while no other one submits, so that two threads need not wake each other. Also in the main
        thread, unlike a round: no other thread waits for these answers, and a submit that a Ctrl-C comes into is as open
        as one that is waited for.
        """
        mine = self._take_pass() if wait else None
        if mine is None:
            return super().commit(operations)
        try:
            return [answered(answer) for answer in self._write(list(operations))]
        except BatchUnknown as unknown:
            return [
                failed(with_jobs(unknown, receipts))
                for _, receipts in zip(operations, unknown.answers, strict=True)
            ]
        except Exception as error:  # noqa: BLE001 - it is the answer
            if len(operations) == 1:
                return [failed(error)]
        finally:
            self._pass.append(mine)
        return super().commit(operations)  # one of them is bad, and fails alone

    def _take_pass(self) -> object | None:
        """Not before submits that were handed in earlier, perhaps by the same thread."""
        if self._closed or not self.idle:
            return None
        try:
            return self._pass.pop()
        except IndexError:
            return None


class RoundBatcher(GroupCommit):
    """
    Changes, completions and rounds. `read_jobs`: for a round whose answer was lost with its connection. `committed`: called
    after each transaction with whether it wrote events.
    """

    def __init__(
        self,
        admitting: Admitting,
        read_jobs: Callable[[Sequence[JobId]], list[Job]],
        committed: Callable[[bool], None],
    ) -> None:
        self.admitting, self._read_jobs, self._committed = admitting, read_jobs, committed
        self._applying = Applying(admitting.link, admitting.demands, admitting.ordering)
        #: Behind it, all operations that were handed in so far have been answered.
        self.last: Future[Any] = answered([])
        super().__init__(self._write_all)

    def commit(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:
        answers = super().commit(operations, wait=wait)
        self.last = answers[-1]
        return answers

    def _write_all(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """The ends before the rounds, so that the rounds have the room that was given back."""
        link, demands = self.admitting.link, self.admitting.demands
        admissions = [op for op in operations if isinstance(op, Admit)]
        completions = [op for op in operations if isinstance(op, Complete)]
        if len(completions) + len(admissions) == len(operations):
            written = self.admitting.write(Completing(link, demands, completions), admissions)
        else:
            now = link.now()
            changes = Changes(demands, [_changes(op, now) for op in operations if not isinstance(op, Admit)])
            if admissions:
                written = self.admitting.write(changes, admissions)
            else:
                written = RoundAnswers(*link.transact(lambda session: self._applying.run(session, changes)))
            self.admitting.scan_hint.disturbed()
        started = iter([self._grants(started) for started in written.started])
        self._committed(written.told)
        applied = iter(written.applied)
        return [next(started) if isinstance(op, Admit) else next(applied) for op in operations]

    def _grants(self, started: StartedRound) -> list[Grant]:
        jobs = started.jobs
        if missing := [d.job_id for d in started.dispatches if _runs(d) and d.job_id not in jobs]:
            jobs |= {job.job_id: job for job in self._read_jobs([job_id for job_id in missing if job_id])}
        return [
            Grant(d, jobs.get(d.job_id) if d.job_id is not None and _runs(d) else None)
            for d in started.dispatches
        ]


def _runs(dispatch: Dispatch) -> bool:
    return dispatch.job_id is not None and dispatch.started_at is not None


def _changes(operation: Operation[Any], now: Moment) -> Sequence[Change]:
    """Beside changes, completions are changes too, so that all are judged in the order of their arrival."""
    if isinstance(operation, Complete):
        return [completed(done.dispatch_id, now, done.result) for done in operation.done]
    assert isinstance(operation, Apply)
    return operation.changes
