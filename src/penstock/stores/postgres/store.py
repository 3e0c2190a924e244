"""
The PostgreSQL store: jobs in one database for any number of hosts. Every process may submit, read and
dispatch.

`commit` hands each operation to one of three writers. Operations that arrive together at a writer share a
transaction (`common/group_commit.py`).

- `SubmitBatcher` (submit.py) inserts jobs. Without a depth limit, parents and batches it locks no row that
  another transaction needs.
- `RoundBatcher` (rounds.py) applies changes and completions and runs rounds, in that order. It locks rows of
  the ledger until its COMMIT is on disk.
- `RenewBatcher` (changes.py) renews leases. It locks dispatches, and waits for the rounds handed in before it.

There are three writers because a round locks the ledger until the disk has synced: a submit or a heartbeat in
the same transaction would wait for the rounds of all other hosts. So a commit of operations for several
writers becomes several transactions, one after the other: `commit(Submit, Admit)` writes the jobs, and then a
round sees them. Maintenance (`maintenance.py`) is rare, and the calling thread writes it.

Each transaction locks and reads in its first round trip, decides in Python, and writes with its COMMIT in
the second (`database.py`). All moments come from the server's clock. After a commit with events the process
notifies its own listeners and the other processes (`wakeups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Job
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import AdmissionView
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import DispatchId, HostId
from penstock.stores.api import (
    Admit,
    Apply,
    Clock,
    Complete,
    Depth,
    Operation,
    Query,
    Receipt,
    Relay,
    Renew,
    Submit,
)
from penstock.stores.common.group_commit import failed
from penstock.stores.common.reads import SqlReads
from penstock.stores.common.rows import uuid7
from penstock.stores.postgres.admission_view import (
    Heads,
    PostgresAdmissionClasses,
    PostgresAdmissionView,
    ledger_from,
)
from penstock.stores.postgres.changes import RenewBatcher
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.maintenance import MaintenanceWriter
from penstock.stores.postgres.pipeline import ConnectionOptions, array
from penstock.stores.postgres.queries import count_sql, find_sql
from penstock.stores.postgres.rounds import RoundBatcher
from penstock.stores.postgres.submit import SubmitBatcher
from penstock.stores.postgres.wakeups import NotificationListener

T = TypeVar("T")
#: How many rows of each ready queue `read_view` reads at first.
LOOK: Final = 16
#: How many batches of events one statement reads.
PIECE: Final = 100


class PostgresStore(SqlReads[DatabaseSession]):
    """
    The store in the schema `schema` of a database, which it makes or brings up to date. `clock`: for tests,
    instead of the server's.
    """

    shared = True

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
        options, ordering = options or ConnectionOptions(), ordering or Ordering()
        database = Database(dsn, schema, options, clock)
        try:
            database.migrate()
            database.now()  # read the server's clock now, so that the time is known while the server is away
        except BaseException:  # Ctrl-C included: no caller gets this store, so its connections must be closed
            database.close()
            raise
        classes = PostgresAdmissionClasses(database)
        super().__init__(classes, database.given_now)
        self.database, self.now = database, database.now
        self._listeners: list[Callable[[], None]] = []
        self.wakeups = NotificationListener(database, self._notify_listeners, by_notice=not options.pooler)
        self.rounds = RoundBatcher(
            database, classes, ordering, new_id=new_id, read_jobs=self.jobs, on_commit=self._committed
        )
        self.submits = SubmitBatcher(database, classes, ordering, new_id=new_id, on_commit=self._submitted)
        self.renewals = RenewBatcher(database, self.rounds.wait, self._committed)
        self.maintenance = MaintenanceWriter(
            *(database, classes, ordering.aging, self.submits),
            number_events=self._number_events,
            on_commit=self._submitted,
        )

    # writes

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:
        writer, *others = [self._writer_of(operation) for operation in operations]
        if all(other == writer for other in others):
            return writer(operations, wait=wait)
        return self._commit_in_turn(operations)

    def _writer_of(self, operation: Operation[Any]) -> Callable[..., list[Future[Any]]]:
        if isinstance(operation, Submit):
            return self.submits.commit
        if isinstance(operation, Apply | Complete | Admit):
            return self.rounds.commit
        return self.renewals.commit if isinstance(operation, Renew) else self.maintenance.commit

    def _commit_in_turn(self, operations: Sequence[Operation[Any]]) -> list[Future[Any]]:
        """Hand each operation to its writer after the answer to the operation before it."""
        answers: list[Future[Any]] = [Future() for _ in operations]

        def hand_in(at: int) -> None:
            def pass_on(written: Future[Any]) -> None:
                error = written.exception()
                if error is None:
                    answers[at].set_result(written.result())
                else:
                    answers[at].set_exception(error)
                if at + 1 < len(operations):
                    hand_in(at + 1)

            try:
                [written] = self._writer_of(operations[at])([operations[at]])
            except Exception as error:  # noqa: BLE001 - it is the answer
                written = failed(error)
            written.add_done_callback(pass_on)

        hand_in(0)
        return answers

    def submit_within(self, connection: Any, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        """
        Submit in the transaction of the caller's connection: a psycopg Connection, or a SQLAlchemy Session or
        Connection on psycopg. The caller's commit notifies the workers.
        """
        notice = ("notify", {"channel": self.wakeups.channel, "by": ""})
        receipts = self.submits.submit_within(connection, Submit(intents, depth), notice)
        self.rounds.scan_hint.disturb()
        return receipts

    def _submitted(self, has_events: bool) -> None:
        """Called after a commit that may have put jobs before those of the last round."""
        self.rounds.scan_hint.disturb()
        self._committed(has_events)

    def _committed(self, has_events: bool) -> None:
        if has_events:
            self._notify_listeners()
            self.wakeups.notify()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    # reads

    def _snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        return self.database.snapshot(work)

    def _query(self, name: str, values: Any = None) -> list[Any]:
        return self.database.query(name, values)

    def _batches(self, name: str, values: dict[str, Any]) -> Generator[tuple[int, str], None, None]:
        """
        Batches of events. Readers number the events, so all that were committed before this call are
        included.
        """
        self._number_events()
        values = {"most": PIECE} | values | {"kinds": array(values.get("kinds", ()))}
        while rows := self._query(name, values):
            for before, text, until in rows:
                yield before, text
                values["after"] = until

    def _dispatch_rows(self, session: DatabaseSession, dispatch_ids: Sequence[DispatchId]) -> list[Any]:
        return session.execute("dispatches_by_id", {"ids": array(dispatch_ids)})

    def _number_events(self) -> None:
        while self.database.query("unnumbered")[0][0]:
            self.database.transact(_number_events)

    def read_view(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        now = self.database.now()

        def read(session: DatabaseSession) -> T:
            ledger = ledger_from(session, host, now)
            heads = Heads(session.execute("heads", {"most": LOOK}), LOOK)
            return view(PostgresAdmissionView(session, host, now, ledger, heads, classes=self.classes))

        return self.database.snapshot(read)

    def ledger(self, host: HostId) -> Ledger:
        now = self.database.now()
        return self.database.snapshot(lambda session: ledger_from(session, host, now))

    def find(self, query: Query) -> list[Job]:
        sql, values = find_sql(query)

        def read(session: DatabaseSession) -> list[Job]:
            return self.classes.jobs(session, session.execute_sql(self.database.in_schema(sql), values))

        return self.database.snapshot(read)

    def count(self, query: Query) -> dict[JobState, int]:
        sql, values = count_sql(query)

        def read(session: DatabaseSession) -> dict[JobState, int]:
            rows = session.execute_sql(self.database.in_schema(sql), values)
            return {JobState(state): n for state, n in rows}

        return self.database.snapshot(read)

    def trouble(self) -> str | None:
        return None  # the server reports it at the next write

    # the dispatchers

    def acquire_dispatch(self, holder: str, relay: Relay | None = None) -> None:  # noqa: ARG002 - every process commits for itself
        """Any number of processes may dispatch: the ledger keeps them apart."""
        self.listen()

    def release_dispatch(self) -> None:
        """Nothing to release."""

    def listen(self) -> None:
        self.wakeups.listen()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def close(self) -> None:
        for writer in (self.rounds, self.submits, self.renewals):
            writer.close()
        self.wakeups.close()
        self.database.close()


def _number_events(session: DatabaseSession) -> None:
    session.execute("lock_numbers")
    session.defer("number_events", None)
    session.defer("add_up_tally", None)
