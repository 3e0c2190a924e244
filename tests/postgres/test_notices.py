"""Being told of what another process did; and finding out without being told."""

from __future__ import annotations

from threading import Event

import psycopg
import pytest
from tests.postgres.conftest import JOB, until_there_is
from tests.waiting import until

from penstock.stores.api import Depth, Query, Submit, committed
from penstock.stores.postgres import wakeups
from penstock.stores.postgres.pipeline import ConnectionOptions, statement


def wakeup_client(store):
    heard = Event()
    store.on_change(heard.set)
    store.acquire_dispatch("somebody")
    assert heard.wait(60)  # that it listens is the first it hears
    heard.clear()
    return heard


def test_one_process_hears_of_the_commits_of_another(opened, listens):
    store, heard = opened(), Event()
    store.on_change(heard.set)
    listens(store)
    committed(opened(), Submit([JOB], Depth()))

    assert heard.wait(60)


@pytest.mark.parametrize("writes_behind_pooler", [True, False])
def test_behind_a_pooler_it_finds_out_by_looking(opened, writes_behind_pooler):
    heard = wakeup_client(opened(options=ConnectionOptions(pooler=True)))
    committed(opened(options=ConnectionOptions(pooler=writes_behind_pooler)), Submit([JOB], Depth()))

    assert heard.wait(60)


def test_while_nothing_happens_nothing_is_heard(opened):
    quiet = wakeup_client(opened())

    assert not quiet.wait(2.5)


def test_any_number_may_dispatch(opened):
    stores = [opened(), opened()]
    for store in stores:
        store.acquire_dispatch("the same holder")
    for store in stores:
        store.release_dispatch()
        store.release_dispatch()


def test_the_ear_hears_again_after_the_server_cut_it_off(opened, postgres_server):
    store = opened()
    heard = wakeup_client(store)
    postgres_server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
    committed(opened(), Submit([JOB], Depth()))

    assert heard.wait(60)


def test_a_notice_that_fails_takes_nothing_back(opened):
    store = opened()
    store.database.notice = lambda: ("settle_commit", {"token": "not a token"})
    receipts = committed(store, Submit([JOB], Depth()))

    assert [receipt.job_id for receipt in receipts] == [job.job_id for job in store.find(Query())]


def test_no_later_commit_fails_because_a_notice_did(opened):
    """The statement is prepared by then, so the answer to the notice comes together with those of the next commit."""
    store = opened()
    store.wakeups._by_notice = False  # its thread would use the connection next
    store.database.sql["divide"] = statement("SELECT 1 / %(by)s::integer")
    for by in (1, 0, 0):
        store.database.notice = lambda by=by: ("divide", {"by": by})
        committed(store, Submit([JOB], Depth()))
    store.database.notice = lambda: None
    committed(store, Submit([JOB], Depth()))

    assert 4 == len(store.find(Query()))


def test_a_notice_goes_out_with_the_commit_and_those_close_behind_it_are_one(opened, monkeypatch):
    store, sent = opened(), []
    monkeypatch.setattr(wakeups, "GAP_SEC", 600)
    along = store.database.notice
    monkeypatch.setattr(store.database, "notice", lambda: sent.append(along()) or sent[-1])
    for _ in range(3):
        committed(store, Submit([JOB], Depth()))

    assert sent[0] is not None
    assert [None, None] == sent[1:]


def test_no_commit_waits_for_its_notice(opened, postgres, postgres_server):
    """The statement of the notice waits for a lock, so a commit that waited for it would wait for the lock."""
    store = opened()
    committed(store, Submit([JOB], Depth()))
    store.wakeups._by_notice = False  # its thread would use the connection next
    store.database.sql["slow"] = statement("SELECT pg_catalog.pg_advisory_xact_lock(4711)")
    with psycopg.connect(postgres.dsn) as other:
        other.execute("SELECT pg_advisory_xact_lock(4711)")
        store.database.notice = lambda: ("slow", None)
        committed(store, Submit([JOB], Depth()))
        until_there_is(postgres_server, "pg_stat_activity WHERE wait_event = 'advisory'")  # it still waits
        store.database.notice = lambda: None
    committed(store, Submit([JOB], Depth()))

    assert 3 == len(store.find(Query()))


def test_what_was_not_told_goes_along_with_the_next_commit(opened, monkeypatch):
    store, due = opened(), []
    monkeypatch.setattr(store.wakeups, "_start", lambda *_: None)  # no thread tells of it alone
    for gap in (600, 600, 0, 600):
        monkeypatch.setattr(wakeups, "GAP_SEC", gap)
        committed(store, Submit([JOB], Depth()))
        due.append(store.wakeups.due)

    # The last one came too soon behind the third, which had told of the second.
    assert [False, True, False, True] == due


def test_what_no_commit_takes_along_is_told_alone(opened, monkeypatch):
    store, alone = opened(), []
    monkeypatch.setattr(wakeups, "GAP_SEC", 0.5)
    tell = store.wakeups.send
    monkeypatch.setattr(store.wakeups, "send", lambda: alone.append(tell()))
    until(lambda: committed(store, Submit([JOB], Depth())) and (store.wakeups.due or alone))

    until(lambda: alone)
    assert not store.wakeups.due
