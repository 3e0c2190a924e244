"""A server that goes away: what is said meanwhile, and that all comes back by itself."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from time import monotonic, sleep

import psycopg
import pytest
from msgspec.structs import replace
from tests.postgres.conftest import JOB, tick, until_there_is
from tests.postgres_server import PostgresServer
from tests.waiting import until

from penstock.core.errors import OutcomeUnknown, StoreFailed
from penstock.core.jobs import changes
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import SECOND
from penstock.stores.api import Apply, Depth, Prune, Query, Renew, Submit, committed
from penstock.stores.postgres import database
from penstock.stores.postgres.database import DatabaseSession
from penstock.stores.postgres.pipeline import ConnectionOptions, PipelineConnection
from penstock.stores.postgres.store import PostgresStore


@pytest.fixture(scope="module")
def server():
    """Of our own: it is going to be stopped."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def store(server):
    store = PostgresStore(server.dsn)
    yield store
    assert [] == store.audit()
    store.close()
    server.run("DROP SCHEMA penstock CASCADE", "penstock")


def test_while_the_server_is_away_everything_says_so_and_afterwards_goes_on(server, store):
    [receipt] = committed(store, Submit([JOB], Depth()))
    server.stop()

    for ask in (
        lambda: committed(store, Submit([JOB], Depth())),
        lambda: tick(store),
        lambda: store.job(receipt.job_id),
    ):
        with pytest.raises(StoreFailed, match="cannot be reached") as refusal:
            ask()
        assert "unreachable" == refusal.value.data["kind"]
    before = store.now()
    store.database._clock_read_at -= 10  # it is time to read the clock again
    assert before < store.now() < before + 60 * SECOND
    server.start()
    assert [receipt.job_id] == [dispatch.job_id for dispatch in tick(store)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_restart_between_two_calls_is_not_noticed(server, store, how):
    committed(store, Submit([JOB], Depth()))
    server.restart(how)
    committed(store, Submit([JOB], Depth()))

    assert 2 == len(tick(store))


def test_sessions_that_are_ended_under_us_are_begun_anew(server, store):
    for _ in range(5):
        committed(store, Submit([JOB], Depth()))
        server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'penstock'")

    assert 5 == len(store.find(Query()))


def test_under_sessions_that_keep_ending_every_answer_is_true(server, store):
    """Submitted or not: a receipt means a job, and a job that nobody got a receipt for was reported as unknown."""
    stop = monotonic() + 1.5

    def cut():
        while monotonic() < stop:
            server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'penstock'")

    def submit(name):
        receipts, unknown = [], 0
        while monotonic() < stop:
            try:
                receipts += committed(store, Submit([Intent(addon_id=name, job_type="t")], Depth()))
            except StoreFailed as failure:
                unknown += failure.data["kind"] == "unknown"
        return receipts, unknown

    cutting = Thread(target=cut)
    cutting.start()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(submit, "abcd"))
    cutting.join()
    told = {receipt.job_id for receipts, _ in answers for receipt in receipts}
    kept = {job.job_id for job in store.find(Query(limit=100_000))}

    assert told <= kept
    assert len(kept - told) <= sum(unknown for _, unknown in answers)
    assert told


def test_a_commit_whose_answer_was_lost_is_found_out(server, store, monkeypatch):
    """The connection breaks after the server has committed: the jobs are there, and the caller is told so."""
    committed(store, Submit([JOB], Depth()))
    finish, broken = DatabaseSession.finish, []

    def break_after_commit(session):
        finish(session)
        if not broken:
            broken.append(session)
            session._con.close()
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(DatabaseSession, "finish", break_after_commit)
    [receipt] = committed(store, Submit([JOB], Depth(total=100)))

    assert broken
    assert [receipt.job_id] == [job.job_id for job in store.find(Query())][1:]


@pytest.mark.parametrize("was_committed", [True, False])
def test_a_submit_whose_answer_was_lost_is_there_once(server, store, monkeypatch, was_committed):
    committed(store, Submit([JOB], Depth()))
    exchange, broken = PipelineConnection.exchange, []

    def break_once(con, calls, behind=()):
        if broken or "INSERT INTO" not in calls[0][0].text.decode():
            return exchange(con, calls, behind)
        broken.append(exchange(con, calls, behind) if was_committed else None)
        con.close()
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(PipelineConnection, "exchange", break_once)
    [receipt] = committed(store, Submit([JOB], Depth()))

    assert broken
    assert [receipt.job_id] == [job.job_id for job in store.find(Query())][1:]


def test_a_submit_that_is_still_under_way_when_its_connection_breaks_is_there_once(server, store):
    """Whoever looks for its job then finds none, and it comes all the same."""
    committed(store, Submit([JOB], Depth()))
    [con] = store.database._idle
    with ThreadPoolExecutor(1) as pool, psycopg.connect(server.dsn) as other:
        other.execute("LOCK TABLE penstock.job IN SHARE MODE")
        submitting = pool.submit(committed, store, Submit([JOB]))
        until_there_is(server, "pg_stat_activity WHERE wait_event_type = 'Lock'")
        with socket.socket(fileno=os.dup(con.fileno())) as cut:
            cut.shutdown(socket.SHUT_RD)
        until_there_is(
            server, "(SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' OFFSET 1) AS two"
        )
        other.rollback()
        [receipt] = submitting.result()

    assert [receipt.job_id] == [job.job_id for job in store.find(Query())][1:]


def test_a_transaction_that_is_still_under_way_when_its_connection_breaks_is_there_once(server, store):
    """It is made again at once, and the first one, when it gets that far, finds that it must not be committed any more."""
    committed(store, Submit([JOB], Depth(total=100)))
    [con] = store.database._idle
    with ThreadPoolExecutor(1) as pool, psycopg.connect(server.dsn) as other:
        other.execute("LOCK TABLE penstock.job IN SHARE MODE")
        submitting = pool.submit(committed, store, Submit([JOB], Depth(total=100)))
        until_there_is(server, "pg_stat_activity WHERE wait_event_type = 'Lock'")
        with socket.socket(fileno=os.dup(con.fileno())) as cut:
            cut.shutdown(socket.SHUT_RD)
        until_there_is(
            server, "(SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' OFFSET 1) AS two"
        )
        other.rollback()
        [receipt] = submitting.result()

    until(
        lambda: (
            "0"
            == server.run(
                "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid()"
            )
        )
    )
    assert [receipt.job_id] == [job.job_id for job in store.find(Query())][1:]


def test_proofs_of_commits_do_not_pile_up(server, store):
    for _ in range(20):
        committed(store, Submit([JOB], Depth(total=100)))

    assert "1" == server.run("SELECT count(*) FROM penstock.commit_marker", "penstock")


def test_proofs_that_a_process_left_behind_are_forgotten(server, store):
    committed(store, Submit([JOB], Depth(total=100)))
    server.run("UPDATE penstock.commit_marker SET at = 0", "penstock")
    store.database._answered.clear()  # as if that process were gone
    committed(store, Prune(0, 10))

    assert "0" == server.run("SELECT count(*) FROM penstock.commit_marker WHERE at = 0", "penstock")


def test_an_outcome_that_cannot_be_found_out_is_called_unknown(server, store, monkeypatch):
    """The server goes away with the COMMIT, and does not come back in time."""
    committed(store, Submit([JOB], Depth(total=100)))
    monkeypatch.setattr(database, "FIND_OUT_SEC", 0.1)
    exchange = PipelineConnection.exchange

    def lose(con, calls, behind=()):
        if b"COMMIT" != calls[-1][0].text:
            return exchange(con, calls, behind)
        monkeypatch.setattr(PipelineConnection, "exchange", exchange)
        server.stop(signal.SIGQUIT)
        con.close()
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(PipelineConnection, "exchange", lose)
    try:
        with pytest.raises(StoreFailed, match="may or may not have been written") as refusal:
            committed(store, Submit([JOB], Depth(total=100)))
    finally:
        server.start()
    assert "unknown" == refusal.value.data["kind"]
    [job_id] = refusal.value.data["job_ids"]
    assert f"Ask for job {job_id}" in str(refusal.value)


def test_when_nobody_knows_what_became_of_several_submits_all_are_told_and_none_is_made_again(
    server, store, monkeypatch
):
    committed(store, Submit([JOB], Depth()))
    once, sent = store.database.once, []

    def lose(name, values):
        once(name, values)
        sent.append(name)
        raise OutcomeUnknown("lost", kind="unknown")

    monkeypatch.setattr(store.database, "once", lose)
    with store.submits._writing:
        answers = [store.commit(Submit([JOB], Depth()))[0] for _ in range(3)]

    assert ["unknown"] * 3 == [answer.exception().data["kind"] for answer in answers]
    assert 1 == len(sent)
    named = [job_id for answer in answers for job_id in answer.exception().data["job_ids"]]
    assert 3 == len(set(named)) == len(store.jobs(named))


@pytest.mark.parametrize("keys", [[None, None], ["one", "two"]])
def test_a_submit_whose_outcome_is_unknown_is_told_which_jobs_to_ask_for(server, store, monkeypatch, keys):
    link, told = store.database, []

    def losing(write):
        def lose(*args):
            write(*args)
            raise OutcomeUnknown("lost", kind="unknown")

        return lose

    committed(store, Submit([JOB], Depth()))
    with monkeypatch.context() as patch:
        patch.setattr(link, "once", losing(link.once))
        patch.setattr(link, "transact", losing(link.transact))
        for key in keys:
            with pytest.raises(OutcomeUnknown, match="Ask for job") as unknown:
                committed(store, Submit([replace(JOB, idempotency_key=key)] * 2, Depth()))
            told.append(unknown.value.data["job_ids"])

    # One key in both intents means one job.
    assert [2 if key is None else 1 for key in keys] == [len(jobs) for jobs in told]
    assert all(jobs == [job.job_id for job in store.jobs(jobs)] for jobs in told)


def test_a_lease_is_judged_by_the_servers_clock(server, store):
    committed(store, Submit([JOB], Depth()))
    [dispatch] = tick(store)
    [renewed] = committed(
        store, Renew([changes.Renewal(dispatch_id=dispatch.dispatch_id, expires_at=store.now() + 100_000)])
    )
    assert renewed is not None
    sleep(0.15)

    assert committed(
        store, Renew([changes.Renewal(dispatch_id=dispatch.dispatch_id, expires_at=store.now() + 10**9)])
    ) == [None]
    assert [False] == committed(store, Apply([changes.completed(dispatch.dispatch_id, store.now())]))
    assert [dispatch.dispatch_id] == [item.dispatch.dispatch_id for item in store.overdue(10)]


def test_the_clock_is_the_servers_and_never_goes_back(server, store):
    moments = [store.now() for _ in range(2_000)]
    asked = int(server.run("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"))

    assert sorted(moments) == moments
    assert abs(asked - moments[-1]) < 60_000_000


def test_a_lock_that_is_not_let_go_ends_in_a_clear_refusal(server, store):
    impatient = PostgresStore(server.dsn, options=ConnectionOptions(lock_timeout_ms=200))
    committed(impatient, Submit([JOB], Depth()))
    tick(impatient, capacity=0)
    with psycopg.connect(server.dsn) as other:
        other.execute("SELECT 1 FROM penstock.ledger FOR UPDATE")
        with pytest.raises(StoreFailed, match="busy"):
            tick(impatient)
    assert 1 == len(tick(impatient))
    impatient.close()


def test_a_server_that_was_never_there_is_named_without_its_password():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    with pytest.raises(StoreFailed, match="cannot be reached") as refusal:
        PostgresStore(f"postgresql://me:secret@127.0.0.1:{port}/x")
    assert "secret" not in str(refusal.value)


def test_a_role_that_may_only_read_is_told_so(server, store):
    server.run("CREATE ROLE reader LOGIN")
    server.run(
        "GRANT USAGE ON SCHEMA penstock TO reader; GRANT SELECT ON ALL TABLES IN SCHEMA penstock TO reader",
        "penstock",
    )
    reader = PostgresStore(server.address("reader"))

    with pytest.raises(StoreFailed, match="does not let us write"):
        committed(reader, Submit([JOB], Depth()))
    assert [] == reader.find(Query())
    reader.close()


def test_a_closed_store_says_so(server, store):
    other = PostgresStore(server.dsn)
    other.close()

    with pytest.raises(StoreFailed, match="closed"):
        committed(other, Submit([JOB], Depth()))
    with pytest.raises(StoreFailed, match="closed"):
        other.job("x")
