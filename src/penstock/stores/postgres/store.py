"""
Jobs in a PostgreSQL database, for any number of hosts. Every process may submit, read and dispatch.

Writes that arrive together in a process go out together: submits, turns (changes, and the rounds behind them) and heartbeats each have
a lane with group commit (`writer`), so that a submit never waits for a ledger row. The server's clock is the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from penstock.core.jobs.changes import Change, Note, Renewal, addon_note
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import AdmissionView, Aging, Ordering, RoundResult
from penstock.core.jobs.types import AddonId, HostId, JobId, Moment, Span
from penstock.stores.api import (
    LOST_FOR,
    Ahead,
    Clock,
    CompletedDispatch,
    Depth,
    Receipt,
    Ride,
    Standing,
    Tell,
    Terms,
    not_waited_for,
    say_nothing,
)
from penstock.stores.common.checks import drain_note, name_taken
from penstock.stores.common.dispatches import uuid7
from penstock.stores.common.group_commit import Writer
from penstock.stores.common.rows import host_values
from penstock.stores.common.trail import forget
from penstock.stores.postgres.batchers import Group, RoundBatcher, SubmitBatcher, answered
from penstock.stores.postgres.caller_transaction import borrowed, retried
from penstock.stores.postgres.changes import Completion
from penstock.stores.postgres.database import ConnectionOptions, Database, DatabaseSession
from penstock.stores.postgres.migrations import migrate
from penstock.stores.postgres.pipeline import array, columns
from penstock.stores.postgres.reads import PostgresReads
from penstock.stores.postgres.renew import RenewalBatch, Renewing
from penstock.stores.postgres.rounds import Admitting
from penstock.stores.postgres.start import Admission
from penstock.stores.postgres.submit import Submission, Submitting
from penstock.stores.postgres.wakeups import NotificationListener
from penstock.stores.postgres.write_batch import (
    NO_JOB,
    PostgresAdmissionClasses,
    PostgresWriteBatch,
    accounts_from,
    lock_ledger,
)

__all__ = ["PostgresStore"]

#: Of jobs that were leased and not asked for yet.
MOST_KEPT: Final = 10_000


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
        self._just_leased: dict[JobId, Job] = {}
        self._holder: str | None = None
        self._rings: list[Callable[[], None]] = []
        self._wakeups = NotificationListener(link, self._heard, by_notice=not options.pooler)
        self._submits = SubmitBatcher(self._submit_all)
        admitting = Admitting(link, self._demands, self._ordering, new_id=new_id, keep=self._keep)
        self._turns = RoundBatcher(admitting, self._committed)
        self._beats = Writer(lambda: Group(self._renew_all))

    # writes

    def submit(self, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        return self._submits.here(Submission(intents, depth))

    def submit_within(self, connection: Any, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        """
        `connection`: a psycopg Connection, or a SQLAlchemy Session or Connection on psycopg. Workers are told with its commit.
        A depth limit is kept but for what others submit at the same time: a lock until the caller's commit would hold up everybody.
        """
        submission = Submission(intents, depth)
        self._submitting.prepare([submission])
        with self._link.failures():
            return retried(lambda: self._run_within(connection, submission))

    def _run_within(self, connection: Any, submission: Submission) -> list[Receipt]:
        with borrowed(connection, self._link.sql) as session:
            [receipts] = self._submitting.run(session, [submission], exact=False)
            session.leave("notify", {"channel": self._wakeups.channel, "by": ""})
            self._turns.admitting.scan_hint.disturbed()
            return receipts

    def submit_soon(self, intents: Sequence[Intent], depth: Depth) -> Future[list[Receipt]]:
        return self._submits.soon(Submission(intents, depth))

    def _submit_all(self, submissions: list[Submission]) -> list[list[Receipt]]:
        self._submitting.prepare(submissions)
        receipts = self._submitting.submit(submissions)
        self._turns.admitting.scan_hint.disturbed()
        self._committed(any(receipt.created for answer in receipts for receipt in answer))
        return receipts

    def admit(
        self, host: HostId, run_round: Callable[[AdmissionView], RoundResult], terms: Terms
    ) -> list[Dispatch]:
        """Behind what this thread has ended before, and with it in one commit where it has not begun."""
        return self._turns.here(lambda group: group.add(Admission(host, run_round, terms))).result()

    def claimed(self, dispatches: Sequence[Dispatch]) -> list[Job]:
        ids = [d.job_id for d in dispatches if d.job_id is not None]
        kept = {job_id: job for job_id in ids if (job := self._just_leased.pop(job_id, None)) is not None}
        if missing := [
            job_id for job_id in ids if job_id not in kept
        ]:  # reserved before, or a COMMIT without an answer
            kept |= {job.job_id: job for job in self.jobs(missing)}
        return [kept[job_id] for job_id in ids if job_id in kept]

    def _keep(self, rows: list[Any]) -> Callable[[], None]:
        jobs = {job.job_id: job for job in self._jobs_from(rows, self._demands.known)}

        def keep() -> None:
            if len(self._just_leased) > MOST_KEPT:  # nobody came for them
                self._just_leased.clear()
            self._just_leased |= jobs

        return keep

    def ride(self, _board: Callable[[], Ride | None]) -> Callable[[], None]:
        """A round locks rows, and would hold them through other people's submits."""
        return lambda: None

    def apply(self, changes: Sequence[Change]) -> list[bool]:
        return self.apply_soon(changes).result()

    def apply_soon(self, changes: Sequence[Change]) -> Future[list[bool]]:
        if not changes:
            return answered([])
        return self._turns.soon(lambda group: group.add(changes))

    def complete_soon(self, done: Sequence[CompletedDispatch]) -> Future[list[bool]]:
        if not done:
            return answered([])
        return self._turns.soon(lambda group: group.add(Completion(done)))

    def exchange_soon(
        self,
        done: Sequence[CompletedDispatch],
        host: HostId,
        run_round: Callable[[AdmissionView], RoundResult],
        terms: Terms,
        ahead: Ahead = not_waited_for,  # noqa: ARG002 - the thread that waits for it is the one that writes
    ) -> Future[tuple[list[bool], list[Dispatch]]]:
        return self._turns.here(
            lambda group: (group.add(Completion(done)), group.add(Admission(host, run_round, terms)))
        )

    def renew(self, beats: Sequence[Renewal], tell: Tell = say_nothing) -> list[Standing | None]:
        return self.renew_soon(beats, tell).result()

    def renew_soon(self, beats: Sequence[Renewal], tell: Tell = say_nothing) -> Future[list[Standing | None]]:
        """A heartbeat behind the end of its run must find it ended."""
        told = _Beats(RenewalBatch(beats, tell), self._turns.last)
        return self._beats.soon(lambda group: group.add(told)) if beats else answered([])

    def _renew_all(self, told_beats: list[_Beats]) -> list[list[Standing | None]]:
        wait([beats.after for beats in told_beats])
        batches = [beats.beats for beats in told_beats]
        answers, told = self._link.transact(lambda session: self._renewing.run(session, batches))
        self._committed(told)
        return answers

    def set_addon(
        self, addon_id: AddonId, *, weight: int | None = None, paused: bool | None = None, by: str = ""
    ) -> None:
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

    def prune(self, before: Moment, limit: int) -> int:
        self._number()  # somebody must, where nobody reads; and what has no number yet cannot go
        forgotten = self._link.transact(lambda session: self._prune(session, before, limit))
        self._committed(forgotten > 0)
        return forgotten

    def _prune(self, session: DatabaseSession, before: Moment, limit: int) -> int:
        old: list[Any] = []
        seen, done_with = 0, set[int]()
        now, [sheets] = self._link.opening(
            session, ("old_ended_jobs", {"before": before, "most": limit, "seen": seen})
        )
        while sheets:
            listed = [(batch, at, no) for batch, at, jobs in sheets for no in jobs]
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

    def reorder(self, aging: Aging, after: int, limit: int) -> int:
        values = {"after": after, "most": limit, "per_point": aging.per_point}
        [(last,)] = self._link.transact(lambda session: session.ask("reorder", values))
        self._turns.admitting.scan_hint.disturbed()
        return int(last)

    def shift(self, by: Span) -> int:  # noqa: ARG002 - the protocol's
        """Nothing to do: the clock is the server's, and a jump of ours moves no lease."""
        return 0

    # hosts

    def register_host(self, host: Host) -> Host:
        def write(session: DatabaseSession) -> Host:
            _, [found] = self._link.opening(session, ("register_host", host_values(host)))
            if not found:
                raise name_taken(host)
            session.leave("forget_hosts", {"before": host.seen_at - LOST_FOR})
            return replace(host, draining=bool(found[0][0]))

        return self._link.transact(write)

    def leave(self, host: HostId, instance: str) -> None:
        def write(session: DatabaseSession) -> None:
            for name in ("leave_host", "lose_host"):
                session.leave(name, {"host": host, "instance": instance})

        self._link.transact(write)

    def drain(self, host: HostId, draining: bool, by: str = "") -> bool:
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

    def acquire_dispatch(self, holder: str) -> None:
        """One of many: nobody is refused, the ledger keeps them apart."""
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

    def on_change(self, ring: Callable[[], None]) -> None:
        self._rings.append(ring)

    def _committed(self, told: bool) -> None:
        if told:
            self._heard()
            self._wakeups.ring()

    def _heard(self) -> None:
        for heard in self._rings:
            heard()

    def close(self) -> None:
        self._turns.close()
        self._submits.close()
        self._beats.close()
        self._wakeups.close()
        self._link.close()


class _Beats(NamedTuple):
    beats: RenewalBatch
    after: Future[Any]
