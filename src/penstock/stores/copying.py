"""
Copies everything from a SQLite file into an empty PostgreSQL database, in one transaction, and checks that
both are the same.

During the copy no process may dispatch from the file, and a process that submits to it waits.
"""

# ruff: noqa: S608  # only names of our own tables are put together; every value is bound or copied
from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from penstock.core.errors import StoreFailed
from penstock.core.jobs.admission import keys_of
from penstock.core.jobs.groups import FIRST_GROUP
from penstock.stores.common.rows import class_from
from penstock.stores.opening import SharedOptions, open_postgres, shown
from penstock.stores.postgres.database import Database
from penstock.stores.postgres.pipeline import ConnectionOptions, PipelineConnection
from penstock.stores.sqlite.connection import (
    DispatchLock,
    connect,
    failures,
    migrate,
    newest_numbers,
)
from penstock.stores.sqlite.open_files import MainFile
from penstock.stores.sqlite.transaction import WriteLock

#: The table in PostgreSQL, and the table or view in the file with the same columns.
TABLES: Final = {
    "admission_class": "admission_class",
    "ledger": "ledger_totals",
    "addon": "addon_totals",
    "tally": "tally_totals",
    "budget": "budget",
    "checkpoint": "checkpoint",
    "schedule": "schedule",
    "load_hour": "load_hour",
    "job_array": "job_array",
    "array_chunk": "array_chunk",
    "job_group": "job_group",
    "learned": "learned",
    "dependency": "dependency",
    "pending_end": "pending_end",
}


class Copied(NamedTuple):
    """
    The number of rows copied, by name (`jobs QUEUED`, `queued`, `groups` ...): counted on both sides, and
    equal.
    """

    counts: dict[str, int]


def copy_to_postgres(source: Path, target: str, sharing: SharedOptions | None = None) -> Copied:
    """
    Copy a SQLite file to PostgreSQL. DispatcherHeld: a process dispatches from the file. StoreFailed: the
    target is not empty, or differs from the file after the copy.
    """
    sharing = sharing or SharedOptions()
    with _held(source) as con:
        store = open_postgres(target, sharing=sharing)  # makes the tables
        try:
            # No timeouts: the transaction is idle while this process reads the file.
            options = ConnectionOptions(pooler=sharing.pooler, statement_timeout_ms=0, idle_timeout_ms=0)
            link = Database(target, sharing.schema, options, None)
            with closing(link), link.failures(), link.connection() as server, server.transaction():
                _refuse_unless_empty(server, link, target)
                for table, source_table in TABLES.items():
                    _copy(con, server, link, table, source_table)
                _copy_jobs(con, server, link)
                _copy_events(con, server, link)
                _set_counters(con, server, link)
                _make_flights(server, link)
                copied = _compare(con, server, link)
            problems = store.audit()
        finally:
            store.close()
    if problems:
        raise StoreFailed(f"{shown(target)} is not sound after the copy: {problems[0]}", kind="copy")
    return copied


@contextmanager
def _held(source: Path) -> Iterator[apsw.Connection]:
    with (
        failures(source),
        closing(MainFile(source)) as main_file,
        closing(DispatchLock(source, "penstock db copy", main_file)),
        closing(WriteLock(source)) as lock,
        closing(connect(source)) as con,
    ):
        migrate(con, source, lock)
        with lock:
            con.execute("BEGIN IMMEDIATE")
            try:
                yield con
            finally:
                con.execute("ROLLBACK")


def _refuse_unless_empty(server: PipelineConnection, link: Database, target: str) -> None:
    others = ("job", "queue", "dispatch", "flight", "ended_jobs", "trail", "mention")
    names = ", ".join(f"penstock.{table}" for table in (*TABLES, *others))
    server.execute(link.in_schema(f"LOCK TABLE {names} IN EXCLUSIVE MODE"))
    for table in ("job", "dispatch", "trail", "addon", "admission_class"):
        if server.execute(link.in_schema(f"SELECT 1 FROM penstock.{table} LIMIT 1")).fetchone() is not None:
            raise StoreFailed(
                f"{shown(target)} is not empty (schema {link.schema}): choose another schema or database, nothing was changed",
                kind="copy",
            )


def _copy(con: apsw.Connection, server: PipelineConnection, link: Database, table: str, source: str) -> None:
    names = [name for (name,) in con.execute("SELECT name FROM pragma_table_info(?)", (source,))]
    _fill(server, link, table, names, con.execute(f"SELECT {', '.join(names)} FROM {source}"))


#: For each table in PostgreSQL: its columns of the same name in the file, its other columns with the SQL that
#: reads them from the file, and the table or view of the file. In PostgreSQL the own row of a finished job
#: says that it is settled.
_JOB_TABLES: Final[tuple[tuple[str, str, dict[str, str], str], ...]] = (
    (
        "job",
        (
            "no, job_id, addon_id, class_no, j.events, created_at, ready_at, priority, earliest_start_at, not_before, deadline_at, expected_sec, "
            "max_runtime_sec, max_active_sec, active, crash, unavailable, error, start, spent, spent_before, progress, denied, denied_data, "
            "denied_at, passed_at, ended_at, submitted_in, payload, tags, unit, cost_limit, time_sensitive, retry_delays, preemptible, dependencies, idempotency_key"
        ),
        {
            "state": "iif(ended_at IS NULL, NULL, state)",
            "tried": "fence - (state IN ('DISPATCHING', 'RUNNING'))",
            "body_hash": "iif(body_hash IS NULL, NULL, lower(hex(body_hash)))",
        },
        "job_full j JOIN intent USING (no)",
    ),
    (
        "queue",
        (
            "no, job_id, class_no, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec, max_runtime_sec, "
            "max_active_sec, active, denied, denied_data, denied_at, passed_at, unmet"
        ),
        {},
        "queue",
    ),
    (
        "dispatch",
        (
            "d.dispatch_id, d.job_no, d.class_no, host, d.fence, phase, admitted_at, expires_at, started_at, ends_at, stop_at, stop_for, reason, worker, "
            "d.spent, d.progress, d.ended_at, how, result, failure, d.pid"
        ),
        {"events": "coalesce(j.events, 0)", "started_in": "0"},
        "dispatch_full d LEFT JOIN job_full j ON j.no = d.job_no",
    ),
)


def _copy_jobs(con: apsw.Connection, server: PipelineConnection, link: Database) -> None:
    for table, same, others, source in _JOB_TABLES:
        names = [name.rpartition(".")[2] for name in same.split(", ")] + list(others)
        read = ", ".join([same, *others.values()])
        _fill(server, link, table, names, con.execute(f"SELECT {read} FROM {source}"))


def _make_flights(server: PipelineConnection, link: Database) -> None:
    """
    Gather the live dispatches into flights, and the ended jobs. Their batches get new numbers and have no
    events.
    """
    for name in ("gather_flights", "gather_standalone_leases", "join_flights", "gather_ended_jobs"):
        server.execute(link.sql[name].text)


def _fill(
    server: PipelineConnection, link: Database, table: str, names: list[str], rows: Iterator[Any]
) -> None:
    statement = link.in_schema(f"COPY penstock.{table} ({', '.join(names)}) FROM STDIN")
    with server.cursor() as cursor, cursor.copy(statement) as into:
        for row in rows:
            into.write_row(row)


def _copy_events(con: apsw.Connection, server: PipelineConnection, link: Database) -> None:
    trail = con.execute("SELECT batch, size, batch + size - 1, events FROM trail")
    _fill(server, link, "trail", ["batch", "size", "until", "events"], trail)
    _fill(server, link, "mention", ["job_no", "batch"], con.execute(_MENTIONS))


#: In PostgreSQL the copied attempts name no batch of the trail, so the table `mention` names all batches with
#: their events.
_MENTIONS: Final = """SELECT job_no, batch FROM mention
UNION SELECT job_no, started_in FROM dispatch_full WHERE job_no IS NOT NULL AND started_in IS NOT NULL
UNION SELECT job_no, ended_in FROM dispatch_full WHERE job_no IS NOT NULL AND ended_in IS NOT NULL"""


def _set_counters(con: apsw.Connection, server: PipelineConnection, link: Database) -> None:
    """
    Let new rows get new numbers, and make each row of the ledger: a round locks them, so they must exist.
    """
    jobs, events = newest_numbers(con)
    server.execute(link.in_schema("UPDATE penstock.mark SET value = %s WHERE name = 'event'"), [events])
    classes = con.execute("SELECT max(no) FROM admission_class").get or 0
    sequence = link.in_schema("SELECT pg_get_serial_sequence('penstock.admission_class', 'no')")
    [(class_sequence,)] = server.execute(sequence).fetchall()
    for name, value in (
        (class_sequence, classes),
        (f"{link.quoted}.job_no", jobs),
        (f"{link.quoted}.group_no", con.execute("SELECT max(no) FROM job_group").get or FIRST_GROUP),
        (f"{link.quoted}.batch", events),
    ):
        server.execute("SELECT setval(%s::regclass, %s, false)", [name, value + 1])
    columns = (
        "addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels"
    )
    rows = con.execute(f"SELECT {columns} FROM admission_class")
    keys = sorted({key for row in rows for key in keys_of(class_from(row))})
    with server.cursor() as cursor:
        cursor.executemany(
            link.in_schema(
                "INSERT INTO penstock.ledger (scope, name) VALUES (%s, %s) ON CONFLICT DO NOTHING"
            ),
            keys,
        )


_COUNTS: Final = {
    "jobs": "SELECT 'jobs ' || state, count(*) FROM {}job_full GROUP BY state",
    "dispatches": "SELECT 'dispatches ' || phase, count(*) FROM {}dispatch_full GROUP BY phase",
    "events": "SELECT 'events ' || kind, count(*) FROM {}event GROUP BY kind",
    "queued": "SELECT 'queued', count(*) FROM {}queue",
    "checkpoints": "SELECT 'checkpoints', count(*) FROM {}checkpoint",
    "schedules": "SELECT 'schedules', count(*) FROM {}schedule",
    "arrays": "SELECT 'arrays', count(*) FROM {}job_array",
    "failed indices": "SELECT 'chunks of failed indices', count(*) FROM {}array_chunk",
    "groups": "SELECT 'groups', count(*) FROM {}job_group",
    "learned": "SELECT 'learned', count(*) FROM {}learned",
    "addons": "SELECT 'addons', count(*) FROM {}addon{}",
    "dependencies": "SELECT 'dependencies ' || status, count(*) FROM {}dependency GROUP BY status",
    "spent": "SELECT 'spent ' || addon_id, sum(spent) FROM {}budget GROUP BY addon_id",
}


def _compare(con: apsw.Connection, server: PipelineConnection, link: Database) -> Copied:
    in_file: dict[str, int] = {}
    in_copy: dict[str, int] = {}
    for sql in _COUNTS.values():
        in_file.update({name: int(count) for name, count in con.execute(sql.format("", "_totals"))})
        counts = server.execute(link.in_schema(sql.format("penstock.", ""))).fetchall()
        in_copy.update({name: int(count) for name, count in counts})
    if in_file != in_copy:
        names = in_file.keys() | in_copy.keys()
        differing = sorted(name for name in names if in_file.get(name) != in_copy.get(name))
        raise StoreFailed(
            f"the copy differs from the file in {', '.join(differing)}; nothing of it was kept", kind="copy"
        )
    return Copied(dict(sorted(in_file.items())))
