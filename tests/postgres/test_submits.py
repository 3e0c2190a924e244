"""A submit with nothing to ask first: one statement, which is a transaction, in the thread of who submits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import psycopg
import pytest
from msgspec.structs import replace
from tests.postgres.conftest import JOB

from penstock.stores.api import Depth, Query, Submit, committed
from penstock.stores.common.group_commit import GroupCommit
from penstock.stores.postgres import submit as postgres_submit
from penstock.stores.postgres.pipeline import PipelineConnection


@pytest.fixture
def trips(store, monkeypatch):
    """How many statements each round trip had, without what is behind it."""
    committed(store, Submit([JOB], Depth()))
    exchange, seen = PipelineConnection.exchange, []
    # Those that other threads ask when it is time.
    apart = {store.database.sql[name].text for name in ("notify_unsynced", "committed_events", "now")}

    def count(con, calls, behind=()):
        texts = [statement.text for statement, _ in calls]
        if not (apart & {*texts} or any(text.startswith(b"LISTEN") for text in texts)):
            seen.append(len(calls))
        return exchange(con, calls, behind)

    monkeypatch.setattr(PipelineConnection, "exchange", count)
    return seen


def test_it_is_one_statement_and_one_round_trip(store, trips):
    committed(store, Submit([JOB] * 3, Depth()))

    assert [1] == trips


def test_with_a_key_or_a_limit_it_asks_first(store, trips):
    committed(store, Submit([replace(JOB, idempotency_key="k")], Depth()))
    committed(store, Submit([JOB], Depth(total=100)))
    [again] = committed(store, Submit([replace(JOB, idempotency_key="k")], Depth()))

    assert len(trips) >= 5
    assert not again.created


def test_far_from_its_limits_it_asks_now_and_then_only(store, trips, monkeypatch):
    monkeypatch.setattr(postgres_submit, "FRESH_SEC", 1e9)
    far = Depth(total=1_000_000, per_addon=500_000)
    committed(store, Submit([JOB], far))
    trips.clear()
    committed(store, Submit([JOB], far))
    assert trips == [1]

    monkeypatch.setattr(postgres_submit, "FRESH_SEC", -1.0)
    committed(store, Submit([JOB], far))
    assert len(trips) >= 3


def test_near_its_limit_it_asks_each_time(store, trips, monkeypatch):
    monkeypatch.setattr(postgres_submit, "FRESH_SEC", 1e9)
    for _ in range(2):
        committed(store, Submit([JOB], Depth(per_addon=postgres_submit.FAR)))
    assert len(trips) >= 4


def test_a_bulk_of_several_pieces_is_told_once_and_all_of_it(store):
    receipts = committed(store, Submit([replace(JOB, payload=str(n)) for n in range(700)], Depth()))
    events = store.events(0, 1_000)

    assert [receipt.job_id for receipt in receipts] == [event.job_id for event in events]
    assert [str(n) for n in range(700)] == [job.intent.payload for job in store.find(Query(limit=1_000))]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"payload": 'a "b" \\ c\nd\u2028 {e,f} \N{SNOWMAN} null'},
        {"tags": ("x", 'y"z'), "unit": "EUR", "cost_limit": 7, "retry_delays_sec": (1, 2)},
        {"expected_duration_sec": 1.5, "max_runtime_sec": 60, "max_active_sec": 120, "time_sensitive": True},
        {"preemptible": False},
        {"priority": 90, "deadline_at": 9_000_000, "earliest_start_at": 3_000_000, "labels": ("gpu",)},
        {"idempotency_key": "k", "payload": "p"},
    ],
)
def test_one_alone_is_written_as_one_of_several(opened, said):
    store = opened(lambda: 1_000_000)
    committed(store, Submit([replace(JOB, **said)], Depth()))
    other = said | ({"idempotency_key": "other"} if "idempotency_key" in said else {})
    committed(store, Submit([JOB, replace(JOB, **other)], Depth()))
    with store.database.connection() as con:
        rows = con.execute("""
            SELECT to_jsonb(job) - '{no,job_id,submitted_in,idempotency_key,body_hash}'::text[],
                   to_jsonb(queue) - '{no,job_id}'::text[], body_hash IS NULL
            FROM emptied.job JOIN emptied.queue USING (no) ORDER BY no""").fetchall()

    assert rows[0] == rows[2]


def test_the_character_nul_is_replaced_wherever_it_stands(store):
    odd = replace(JOB, payload="a\0b", unit="c\0d")
    committed(store, Submit([odd], Depth()))
    committed(store, Submit([JOB, odd], Depth()))
    first, _, last = store.find(Query())

    for job in (first, last):
        assert ("a\N{SYMBOL FOR NULL}b", "c\N{SYMBOL FOR NULL}d") == (job.intent.payload, job.intent.unit)


def test_what_is_kept_of_a_kind_is_not_its_moment(opened):
    clock = [0]
    store = opened(lambda: clock[0])
    soon = replace(JOB, earliest_start_at=2_500_000)
    for clock[0] in (1_000_000, 3_000_000):
        committed(store, Submit([JOB], Depth()))
        committed(store, Submit([soon], Depth()))
    jobs = store.find(Query())

    assert [1_000_000, 1_000_000, 3_000_000, 3_000_000] == [job.created_at for job in jobs]
    assert [1_000_000, 2_500_000, 3_000_000, 3_000_000] == [job.ready_at for job in jobs]
    with store.database.connection() as con:
        lines = con.execute("SELECT line, turn - ready_at FROM emptied.queue ORDER BY no").fetchall()
    assert [1, 0, 1, 1] == [line for line, _ in lines]
    assert 1 == len({gap for _, gap in lines})


def test_no_more_kinds_are_kept_than_come_again(store, monkeypatch):
    monkeypatch.setattr(postgres_submit, "MOST_KINDS", 3)
    for n in range(5):
        committed(store, Submit([replace(JOB, tags=(str(n),))], Depth()))
        committed(store, Submit([replace(JOB, idempotency_key=str(n), payload=str(n))], Depth()))

    assert 2 == len(store.submits.rows.kinds)
    assert not committed(store, Submit([replace(JOB, idempotency_key="4", payload="4")], Depth()))[0].created


def test_pieces_of_one_kind_and_of_several_are_counted_alike(store, monkeypatch):
    monkeypatch.setattr(postgres_submit, "PIECE", 4)
    b, c = replace(JOB, addon_id="b"), replace(JOB, addon_id="c")
    committed(store, Submit([JOB] * 4 + [JOB, b, JOB, b] + [b] * 4 + [c], Depth()))

    assert {"a": 6, "b": 6, "c": 1} == {addon.addon_id: sum(addon.jobs.values()) for addon in store.addons()}
    assert ["a"] * 5 + ["b", "a"] + ["b"] * 5 + ["c"] == [job.intent.addon_id for job in store.find(Query())]


def test_whoever_submits_alone_wakes_no_other_thread(store, monkeypatch):
    monkeypatch.setattr(GroupCommit, "commit", None)
    committed(store, Submit([JOB], Depth()))

    assert 1 == len(store.find(Query()))


def test_a_submit_does_not_overtake_what_its_thread_handed_in_before(store):
    for _ in range(20):
        soon = store.commit(Submit([replace(JOB, job_type="first")], Depth()))[0]
        committed(store, Submit([replace(JOB, job_type="second")], Depth()))
        assert soon.done()

    assert ["first", "second"] * 20 == [job.intent.job_type for job in store.find(Query())]


def test_many_at_once_go_out_together(store, trips):
    """One of them by itself, and all that come meanwhile behind it."""
    ready = Barrier(30)

    def submit(_):
        ready.wait()
        return committed(store, Submit([JOB], Depth()))

    with ThreadPoolExecutor(30) as pool:
        receipts = list(pool.map(submit, range(30)))

    assert 31 == len(store.find(Query()))
    assert len({receipt.job_id for [receipt] in receipts}) == 30
    assert len(trips) < 30


def test_what_the_commit_refuses_was_not_submitted(store):
    """The statement itself is answered before its transaction is over."""
    committed(store, Submit([JOB], Depth()))
    with store.database.connection() as con:
        con.execute("""
            CREATE FUNCTION emptied.late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'too late'; END $$;
            CREATE CONSTRAINT TRIGGER late AFTER INSERT ON emptied.job DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION emptied.late()""")

    for told in (True, False):
        if not told:
            store.database.notice = lambda: None
        with pytest.raises(psycopg.errors.RaiseException, match="too late"):
            committed(store, Submit([JOB], Depth()))
    assert 1 == len(store.find(Query()))
    with store.database.connection() as con:
        con.execute("DROP FUNCTION emptied.late() CASCADE")
