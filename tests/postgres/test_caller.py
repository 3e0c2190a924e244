"""Jobs that are part of the caller's own transaction: there with its commit, gone with its rollback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import psycopg
import pytest
from psycopg.rows import dict_row
from tests.postgres.conftest import JOB, tick, until_there_is

import penstock
from penstock.core.errors import KeyConflict, QueueFull
from penstock.core.jobs.intent import Intent
from penstock.stores.api import Depth, Query, Submit, committed


@pytest.fixture
def con(postgres_server, store):
    with psycopg.connect(postgres_server.dsn) as con:
        con.execute("CREATE TABLE IF NOT EXISTS orders (id INT)")
        con.commit()
        yield con
        con.rollback()
        con.execute("DROP TABLE orders")


def known(store):
    return {job.job_id for job in store.find(Query())}


def test_a_job_is_there_after_the_callers_commit_and_not_before(store, con):
    con.execute("INSERT INTO orders VALUES (1)")
    [receipt] = store.submit_within(con, [JOB], Depth())

    assert set() == known(store)
    assert [] == tick(store)
    con.commit()
    assert {receipt.job_id} == known(store)
    assert [receipt.job_id] == [dispatch.job_id for dispatch in tick(store)]


def test_it_is_gone_after_the_callers_rollback_with_what_the_caller_wrote(store, con):
    con.execute("INSERT INTO orders VALUES (1)")
    store.submit_within(con, [JOB], Depth())
    con.rollback()

    assert set() == known(store)
    assert [] == store.events(0, 10)
    assert [(0,)] == con.execute("SELECT count(*) FROM orders").fetchall()


def test_a_connection_without_a_transaction_gets_one_that_the_caller_ends(store, con):
    store.submit_within(con, [JOB], Depth())

    assert set() == known(store)
    con.rollback()
    assert set() == known(store)


def test_in_autocommit_it_is_there_at_once(store, con):
    con.autocommit = True
    [receipt] = store.submit_within(con, [JOB], Depth())

    assert {receipt.job_id} == known(store)


def test_a_refusal_takes_back_ours_and_leaves_the_callers(store, con):
    committed(store, Submit([Intent(addon_id="a", job_type="t", idempotency_key="k")], Depth()))
    con.execute("INSERT INTO orders VALUES (1)")

    with pytest.raises(KeyConflict):
        other = Intent(addon_id="a", job_type="other", idempotency_key="k")
        store.submit_within(con, [JOB, other], Depth())
    with pytest.raises(QueueFull):
        store.submit_within(con, [JOB] * 2, Depth(total=2))
    con.commit()
    assert [(1,)] == con.execute("SELECT count(*) FROM orders").fetchall()
    assert 1 == len(known(store))


def test_the_callers_ways_of_reading_rows_and_of_finding_tables_do_not_matter(store, con):
    con.row_factory = dict_row
    con.execute("SET LOCAL search_path = nowhere")
    [receipt] = store.submit_within(con, [JOB], Depth(total=10))

    assert {"search_path": "nowhere"} == con.execute("SHOW search_path").fetchone()
    con.commit()
    assert {receipt.job_id} == known(store)


def test_a_transaction_that_stays_open_holds_up_nobody(store, con):
    """Not submits of the same kind, not a round, not an end: the caller may be slow."""
    store.submit_within(con, [JOB], Depth(total=1))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            lambda: (committed(store, Submit([JOB], Depth(total=1))), tick(store), store.events(0, 10))
        )
        [receipt], [dispatch], events = done.result(60)

    assert receipt.job_id == dispatch.job_id
    assert 3 == len(events)


def test_what_it_told_comes_behind_what_was_seen_meanwhile(store, con):
    """A cursor is one number: what becomes visible late must not have an early one."""
    [late] = store.submit_within(con, [JOB], Depth())
    committed(store, Submit([JOB] * 3, Depth()))
    seen = store.events(0, 10)
    con.commit()
    rest = store.events(seen[-1].seq, 10)

    assert [1, 2, 3] == [event.seq for event in seen]
    assert [(4, late.job_id)] == [(event.seq, event.job_id) for event in rest]


def test_a_key_that_another_commits_meanwhile_costs_the_caller_nothing(store, con, postgres_server):
    keyed = Intent(addon_id="a", job_type="t", idempotency_key="k")
    con.execute("INSERT INTO orders VALUES (1)")
    with psycopg.connect(postgres_server.dsn) as other, ThreadPoolExecutor(1) as pool:
        [first] = store.submit_within(other, [keyed], Depth())
        answer = pool.submit(lambda: store.submit_within(con, [keyed], Depth()))
        until_there_is(postgres_server, "pg_locks WHERE NOT granted")
        other.commit()

        assert [(first.job_id, False)] == [(r.job_id, r.created) for r in answer.result(60)]
    con.commit()
    assert [(1,)] == con.execute("SELECT count(*) FROM orders").fetchall()


def test_workers_are_told_after_the_commit(store, con, listens):
    told = Event()
    store.on_change(told.set)
    listens(store)
    store.submit_within(con, [JOB], Depth())
    early = told.wait(0.3)
    con.commit()

    assert not early
    assert told.wait(60)


def test_what_is_no_connection_is_refused_by_its_name(store):
    with pytest.raises(TypeError, match="psycopg Connection.*builtins.str"):
        store.submit_within("postgresql://", [JOB], Depth())


def test_a_session_of_sqlalchemy_will_do(store, postgres_server):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine(postgres_server.dsn.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session:
        store.submit_within(session, [JOB], Depth())
        session.rollback()
        [kept] = store.submit_within(session, [JOB], Depth())
        session.commit()
    with engine.connect() as connection:
        store.submit_within(connection, [JOB], Depth())
        connection.rollback()
    engine.dispose()

    assert {kept.job_id} == known(store)


@pytest.fixture
def scheduler(postgres_server):
    scheduler = penstock.Scheduler(postgres_server.dsn)
    yield scheduler
    scheduler.close()


def test_a_program_enqueues_in_its_own_transaction_and_the_job_runs_after_the_commit(scheduler, con):
    ran = []

    @scheduler.job(name="receipt")
    def receipt(order: int) -> int:
        ran.append((order, con.info.transaction_status))
        return order

    con.execute("INSERT INTO orders VALUES (7)")
    handles = [receipt.within(con).enqueue(7), *receipt.within(con).enqueue_many([8, 9])]
    with scheduler:
        assert [] == scheduler.find(name="receipt", state="QUEUED")
        con.commit()
        assert [7, 8, 9] == [handle.result(timeout=60) for handle in handles]

    # ACTIVE: the server has committed, and its answer is still on its way.
    committed = {psycopg.pq.TransactionStatus.IDLE, psycopg.pq.TransactionStatus.ACTIVE}
    assert {status for _, status in ran} <= committed


def test_a_program_that_rolls_back_has_enqueued_nothing(scheduler, con):
    @scheduler.job(name="receipt")
    def receipt(order: int) -> int:
        return order

    con.execute("INSERT INTO orders VALUES (7)")
    receipt.within(con).enqueue(7)
    con.rollback()

    assert [] == scheduler.find(name="receipt", state="QUEUED")
    assert [(0,)] == con.execute("SELECT count(*) FROM orders").fetchall()


def test_jobs_on_a_file_cannot_be_part_of_a_transaction(tmp_path, con):
    with penstock.Scheduler(tmp_path / "jobs.db") as scheduler:
        job = scheduler.job(lambda: None, name="t")

        with pytest.raises(TypeError, match="needs a scheduler on postgresql://"):
            job.within(con).enqueue()
