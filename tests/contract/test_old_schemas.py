"""
A database that an older Penstock wrote opens: its schema moves forward, and its jobs stay as they were.

The rows in `old/` were written by the code of commit 34feb69, which gave most tables other names: one job in each state.
"""

from __future__ import annotations

from contextlib import closing
from importlib.resources import files
from pathlib import Path

import pytest
from tests.contract.test_sqlite import tick

from penstock.core.jobs.arrays import advance, indices_in, retry_array
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.states import JobState
from penstock.stores.api import ChangeArray, Depth, Prune, Query, Submit, committed
from penstock.stores.common.rows import migrations, statements
from penstock.stores.sqlite import connection
from penstock.stores.sqlite.store import SqliteStore

NOW = 1_900_000_000_000_000
ROWS = Path(__file__).parent / "old"


def old_file(path, steps=6, rows=None):
    import apsw

    con = apsw.Connection(str(path))
    for script in (*migrations("sqlite")[:steps], rows or (ROWS / "sqlite_34feb69.sql").read_text("utf-8")):
        con.execute(script)
    con.execute(f"PRAGMA user_version = {steps}; PRAGMA application_id = {connection.APPLICATION_ID}")
    con.close()
    return SqliteStore(path, lambda: NOW)


def old_server(postgres, monkeypatch, steps=4, rows=None):
    psycopg = pytest.importorskip("psycopg")
    from penstock.stores.postgres import database as postgres_schema
    from penstock.stores.postgres.database import Database
    from penstock.stores.postgres.pipeline import ConnectionOptions
    from penstock.stores.postgres.store import PostgresStore

    link = Database(postgres.dsn, postgres.schema, ConnectionOptions(), None)
    with monkeypatch.context() as before:
        before.setattr(postgres_schema, "migrations", lambda _: migrations("postgres")[:steps])
        link.migrate()
    with psycopg.connect(postgres.dsn, autocommit=True) as con:
        con.execute(link.in_schema(rows or (ROWS / "postgres_34feb69.sql").read_text("utf-8")))
    link.close()
    return PostgresStore(postgres.dsn, lambda: NOW, schema=postgres.schema)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path, monkeypatch):
    if request.param == "sqlite":
        store = old_file(tmp_path / "jobs.db")
    else:
        store = old_server(request.getfixturevalue("postgres"), monkeypatch)
    yield store
    assert [] == store.audit()
    store.close()
    if request.param == "sqlite":
        assert (tmp_path / "jobs.db.v6.backup").exists()


def jobs_of(store):
    return {job.intent.job_type: job for job in store.find(Query())}


def test_every_job_of_an_older_database_is_as_it_was(store):
    jobs = jobs_of(store)

    assert [] == store.audit()
    assert {name: str(job.state) for name, job in jobs.items()} == {
        "done": "DONE",
        "failed": "FAILED",
        "blocked": "BLOCKED",
        "runs": "RUNNING",
        "reserved": "DISPATCHING",
        "waits": "QUEUED",
        "canceled": "CANCELED",
    }
    assert ['{"answer": 42}'] == [attempt.result for attempt in store.attempts(jobs["done"].job_id)]
    assert ["it broke"] == [attempt.error for attempt in store.attempts(jobs["failed"].job_id)]
    assert all(job.intent.preemptible for job in jobs.values())
    assert ("no_room", ("runs",)) == (jobs["waits"].denied, jobs["runs"].intent.tags)
    assert {jobs["runs"].job_id, jobs["reserved"].job_id} == {dispatch.job_id for dispatch in store.live()}
    assert [EventKind.SUBMITTED, EventKind.DISPATCHING, EventKind.RUNNING, EventKind.DONE] == [
        event.kind for event in store.events(0, 10, jobs["done"].job_id)
    ]


def test_an_older_database_goes_on(store):
    waits = jobs_of(store)["waits"]
    [same] = committed(store, Submit([waits.intent], Depth()))
    new = Intent(addon_id="a", job_type="new", cost_units=10, preemptible=False)
    [fresh] = committed(store, Submit([new], Depth()))

    assert (waits.job_id, False) == (same.job_id, same.created)
    assert (8, new) == (store.job(fresh.job_id).no, store.job(fresh.job_id).intent)
    assert [fresh.job_id] == [dispatch.job_id for dispatch in tick(store, capacity=30)]
    assert 3 == committed(store, Prune(NOW + 1, 10))
    assert {"blocked", "runs", "reserved", "waits", "new"} == set(jobs_of(store))


#: As the schema before had it: which indices failed stood in the row of the array.
ARRAYS = f"""
INSERT INTO penstock.job_array (array_id, addon_id, created_at, ended_at, body, state) VALUES
('x', 'a', 1, {NOW}, '{{"array_id":"x","indices":"0-300","intent":{{"addon_id":"a","job_type":"t"}},"created_at":1}}',
 '{{"made":301,"live":[],"done":234,"failed":[[0,0],[3,3],[59,121]],"canceled":2,"again":[],"turn":1,"stopped":false,"ended_at":{NOW}}}'),
('y', 'a', 2, NULL, '{{"array_id":"y","indices":"1-300%1","intent":{{"addon_id":"a","job_type":"t"}},"created_at":2}}',
 '{{"made":300,"live":[[7,2]],"done":294,"failed":[[1,1]],"canceled":0,"again":[[119,121],[240,240]],"turn":2,"stopped":false,"ended_at":null}}'),
('z', 'a', 3, NULL, '{{"array_id":"z","indices":"1-300%1","intent":{{"addon_id":"a","job_type":"t"}},"created_at":3}}',
 '{{"made":1,"live":[[1,1]],"done":0,"failed":[],"canceled":0,"again":[],"turn":1,"stopped":false,"ended_at":null}}')
"""


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_the_failed_indices_of_older_arrays_are_as_they_were(dialect, request, tmp_path, monkeypatch):
    if dialect == "sqlite":
        store = old_file(tmp_path / "jobs.db", 16, ARRAYS.replace("penstock.", ""))
    else:
        store = old_server(request.getfixturevalue("postgres"), monkeypatch, 17, ARRAYS)
    with closing(store):
        ended, waits, new = (store.array(name).progress for name in "xyz")
        assert (ended.failed, ended.again, ended.done) == (65, 0, 234)
        assert indices_in(store.failed_indices("x")) == [0, 3, *range(59, 122)]
        assert (waits.failed, waits.again, new.failed, new.again) == (1, 4, 0, 0)
        assert indices_in(store.failed_indices("y")) == [1]

        def go_on(record, _, now, first_again):
            return advance(record, {"y_7_2": JobState.DONE}, now, first_again)

        intent = store.array("y").array.member_intent
        assert committed(store, ChangeArray("y", go_on, intent=intent)).progress.live == ((119, 2),)
        assert (
            committed(store, ChangeArray("x", lambda r, *_: retry_array(r), intent=intent)).progress.again
            == 0
        )
        assert [r.progress.live[-1] for r in store.arrays(9) if r.array.array_id == "x"] == [(121, 2)]


def test_a_table_or_view_of_both_dialects_has_one_name_and_one_kind(postgres, tmp_path):
    psycopg = pytest.importorskip("psycopg")
    import apsw

    from penstock.stores.postgres.store import PostgresStore

    SqliteStore(tmp_path / "jobs.db", lambda: NOW).close()
    PostgresStore(postgres.dsn, schema=postgres.schema).close()
    file = dict(apsw.Connection(str(tmp_path / "jobs.db")).execute("SELECT name, type FROM sqlite_schema"))
    with psycopg.connect(postgres.dsn) as con:
        server = dict(
            con.execute(
                "SELECT table_name, CASE table_type WHEN 'VIEW' THEN 'view' ELSE 'table' END "
                "FROM information_schema.tables WHERE table_schema = %s",
                [postgres.schema],
            ).fetchall()
        )
    both = file.keys() & server.keys()

    assert {
        "job",
        "queue",
        "job_full",
        "dispatch_full",
        "event_batch",
        "ended_jobs",
        "admission_class",
    } <= both
    assert {name: file[name] for name in both} == {name: server[name] for name in both}


def test_a_statement_of_both_dialects_has_one_name():
    file, server = statements("sqlite"), statements("postgres")
    twins = [
        (a, b)
        for a in file.keys() - server.keys()
        for b in server.keys() - file.keys()
        if a.rstrip("s") == b.rstrip("s")
    ]

    assert [] == twins


def test_a_statement_of_both_dialects_reads_in_both_or_writes_in_both():
    file, server = statements("sqlite"), statements("postgres")

    def writes(sql):
        sql = sql.replace("FOR UPDATE", "")
        return any(word in sql for word in ("INSERT INTO", "UPDATE ", "DELETE FROM"))

    both = file.keys() & server.keys()
    assert [] == [name for name in sorted(both) if writes(file[name]) != writes(server[name])]


def test_no_statement_divides_by_zero_on_purpose():
    for dialect in ("sqlite", "postgres"):
        assert [] == [name for name, sql in statements(dialect).items() if "1 / " in sql]


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_no_two_schema_steps_have_the_same_number(dialect):
    names = sorted(step.name for step in files("penstock.stores").joinpath("sql", dialect).iterdir())

    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
