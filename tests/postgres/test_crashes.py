"""
A PostgreSQL server that crashes gives out again what never reached its log, transaction ids among them. Only rows of
our own prove that a transaction was committed.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import psycopg
import pytest
from msgspec.structs import replace
from tests.postgres.conftest import JOB, tick
from tests.postgres_server import PostgresServer
from tests.waiting import LONG

from penstock.core.jobs import changes
from penstock.core.jobs.changes import Renewal
from penstock.core.jobs.types import SECOND
from penstock.stores.api import Apply, Complete, CompletedDispatch, Depth, Query, Renew, Submit, committed
from penstock.stores.postgres.database import DatabaseSession
from penstock.stores.postgres.store import PostgresStore

KEYED = replace(JOB, idempotency_key="once")


@pytest.fixture(scope="module")
def server():
    """A server of our own, with fsync: it is going to crash."""
    with PostgresServer(fsync=True) as server:
        yield server


@pytest.fixture
def store(server):
    store = PostgresStore(server.dsn)
    yield store
    assert [] == store.audit()
    store.close()
    server.run("DROP SCHEMA penstock CASCADE", "penstock")


def next_xid(server):
    return int(server.run("SELECT pg_snapshot_xmax(pg_current_snapshot())"))


@pytest.fixture(params=[True, False], ids=["its id is reused", "its id is in the future"])
def through_a_crash(request, server, monkeypatch):
    """
    A function: calls another one, whose COMMIT never reaches the server, which crashes instead. Then other transactions
    commit under the ids that the crash has made free, or do not.
    """

    def call(function):
        finish, reached, crashed = DatabaseSession.finish, Event(), Event()

        def lose(session):
            if not session.deferred or reached.is_set():
                return finish(session)
            session.finishing = True
            reached.set()
            assert crashed.wait(LONG)
            session._con.close()
            raise psycopg.OperationalError("the connection is lost")

        monkeypatch.setattr(DatabaseSession, "finish", lose)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(function)
            assert reached.wait(LONG)
            used = next_xid(server)
            server.restart(signal.SIGQUIT)  # here, because the server ends with the thread that started it
            while request.param and next_xid(server) < used:
                server.run("SELECT pg_current_xact_id()")
            crashed.set()
            return answer.result()

    return call


@pytest.mark.parametrize(
    ("intents", "depth"),
    [([KEYED], Depth()), ([JOB], Depth(total=100)), ([JOB] * 300, Depth())],
    ids=["with a key", "with a limit", "many"],
)
def test_a_submit_that_a_crash_took_back_is_not_acknowledged_without_a_row(
    store, through_a_crash, intents, depth
):
    committed(store, Submit([JOB], Depth()))
    receipts = through_a_crash(lambda: committed(store, Submit(intents, depth)))

    assert len(intents) == len(receipts)
    assert {r.job_id for r in receipts} <= {job.job_id for job in store.find(Query(limit=1_000))}


def test_a_start_that_a_crash_took_back_hands_out_no_dispatch_that_the_database_does_not_have(
    store, through_a_crash
):
    committed(store, Submit([JOB] * 3, Depth()))
    tick(store, capacity=10)
    started = through_a_crash(lambda: tick(store, capacity=20))

    assert 1 == len(started)
    assert all(store.dispatch(dispatch.dispatch_id) is not None for dispatch in started)


def test_a_completion_that_a_crash_took_back_is_not_answered_with_done(store, through_a_crash):
    committed(store, Submit([JOB], Depth()))
    [dispatch] = tick(store)
    [done] = through_a_crash(lambda: committed(store, Complete([CompletedDispatch(dispatch.dispatch_id)])))

    assert done
    assert "ended" == store.dispatch(dispatch.dispatch_id).phase


def test_a_change_that_a_crash_took_back_is_not_answered_with_success(store, through_a_crash):
    committed(store, Submit([JOB], Depth()))
    [dispatch] = tick(store)
    end = changes.completed(dispatch.dispatch_id, store.now())
    [changed] = through_a_crash(lambda: committed(store, Apply([end])))

    assert changed
    assert "ended" == store.dispatch(dispatch.dispatch_id).phase


def test_a_heartbeat_that_a_crash_took_back_does_not_promise_a_longer_lease(store, through_a_crash):
    committed(store, Submit([JOB], Depth()))
    [dispatch] = tick(store)
    beat = Renewal(dispatch_id=dispatch.dispatch_id, expires_at=store.now() + 500 * SECOND)
    [renewed] = through_a_crash(lambda: committed(store, Renew([beat])))

    assert renewed.expires_at == store.dispatch(dispatch.dispatch_id).expires_at
