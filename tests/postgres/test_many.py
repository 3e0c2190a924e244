"""Many at once on one database: what the locks are for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Thread

import psycopg
import pytest
from msgspec.structs import replace
from tests.postgres.conftest import JOB, exchange, tick, until_there_is

from penstock.core.errors import KeyConflict, QueueFull
from penstock.core.jobs import changes
from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Caps, Conditions, keys_of
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, RoundResult, run_round
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import Admit, Apply, Depth, Query, Submit, Terms, committed
from penstock.stores.postgres import admission_view
from penstock.stores.postgres.changes import Completions
from penstock.stores.postgres.rounds import RoundAttempt

RULES = {"schedules": Schedules(), "ordering": Ordering()}


def test_a_cap_holds_across_hosts_that_start_the_first_job_of_a_kind_at_once(opened):
    """There is no row to count in before the first: it must be made before it can be locked."""
    stores = [opened() for _ in range(4)]
    for round_ in range(5):
        committed(stores[0], Submit([Intent(addon_id=f"new-{round_}", job_type="t")] * 8, Depth()))
        with ThreadPoolExecutor(4) as pool:
            granted = pool.map(
                lambda pair: tick(pair[1], host=f"host-{pair[0]}", caps=Caps(per_addon=1)), enumerate(stores)
            )
            assert 1 == sum(len(dispatches) for dispatches in granted)


def test_units_that_one_host_gives_back_are_not_lost_beside_another_that_takes(opened):
    one, other = opened(), opened()
    committed(one, Submit([Intent(addon_id="a", job_type="t", cost_units=1)] * 200, Depth()))

    def churn(store, host):
        for _ in range(10):
            ended = [
                changes.completed(d.dispatch_id, store.now()) for d in tick(store, capacity=10, host=host)
            ]
            assert all(committed(store, Apply(ended)))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(churn, (one, other), ("one", "other")))

    assert [] == one.audit()
    assert 200 == sum(job.state == "DONE" for job in one.find(Query(limit=1_000)))


def test_one_key_submitted_by_many_at_once_is_one_job(opened):
    stores = [opened() for _ in range(4)]
    keyed = Intent(addon_id="a", job_type="t", idempotency_key="k")

    with ThreadPoolExecutor(8) as pool:
        receipts = [
            r for [r] in pool.map(lambda i: committed(stores[i % 4], Submit([keyed], Depth())), range(16))
        ]

    assert 1 == len({receipt.job_id for receipt in receipts})
    assert 1 == sum(receipt.created for receipt in receipts)


def test_a_key_that_another_commits_after_we_looked_is_looked_up_again(opened, postgres_server):
    """In one order and no other: both have found the key unused when the first of them commits."""
    store = opened()
    keyed = Intent(addon_id="a", job_type="t", idempotency_key="k")
    with psycopg.connect(postgres_server.dsn) as other, ThreadPoolExecutor(1) as pool:
        [first] = store.submit_within(other, [keyed], Depth())
        answer = pool.submit(lambda: committed(store, Submit([keyed], Depth())))
        until_there_is(postgres_server, "pg_locks WHERE NOT granted")
        other.commit()

        assert [(first.job_id, False)] == [(r.job_id, r.created) for r in answer.result(60)]


def test_one_key_with_two_bodies_at_once_is_one_job_and_one_conflict(opened):
    stores = [opened() for _ in range(2)]

    def submit(i):
        intent = Intent(addon_id="a", job_type=f"t{i}", idempotency_key="k")
        try:
            return committed(stores[i], Submit([intent], Depth()))[0].job_id
        except KeyConflict as conflict:
            return conflict.data["job_id"]

    with ThreadPoolExecutor(2) as pool:
        assert 1 == len(set(pool.map(submit, range(2))))


def test_a_depth_limit_is_exact_however_many_submit(opened):
    stores = [opened() for _ in range(4)]

    def submit(store, limit):
        try:
            return len(committed(store, Submit([JOB] * 3, Depth(total=limit))))
        except QueueFull:
            return 0

    with ThreadPoolExecutor(4) as pool:
        for limit in range(3, 46, 3):  # each time there is room for one of the four
            assert 3 == sum(pool.map(submit, stores, [limit] * 4))


def test_a_round_does_not_wait_for_a_job_that_somebody_is_at(opened, postgres_server):
    store = opened()
    [first, second] = committed(store, Submit([JOB] * 2, Depth()))
    with psycopg.connect(postgres_server.dsn) as other:
        other.execute("SELECT 1 FROM emptied.queue WHERE job_id = %s FOR UPDATE", [first.job_id])

        assert [second.job_id] == [dispatch.job_id for dispatch in tick(store)]


def cancel(job, now):
    return changes.cancel(job, None, now, grace=SECOND, **RULES)


def postpone(job, now):
    return changes.edit(job, replace(JOB, earliest_start_at=now + 3_600 * SECOND), now, Ordering())


@pytest.mark.parametrize("change", [cancel, postpone])
def test_a_job_that_changed_while_the_round_was_weighing_is_not_started(opened, change):
    """A canceled job is gone from the queue; a postponed one is still there, and only its row tells that it changed."""
    store, other = opened(), opened()
    [first, second] = committed(store, Submit([JOB] * 2, Depth()))
    weighed = []

    def decide(admission_view):
        verdict = run_round(
            RoundInputs(
                admission_view, Conditions(90), AdmissionLimits(), Ordering(), lambda _: Placement.LEASE
            )
        )
        if not weighed:
            job = other.job(first.job_id)
            assert [True] == committed(other, Apply([change(job, other.now())]))
        weighed.append([pick.waiting.job_id for pick in verdict.picks])
        return verdict

    granted = [grant.dispatch for grant in committed(store, Admit("here", decide, Terms()))]

    assert [second.job_id] == [dispatch.job_id for dispatch in granted]
    assert [[first.job_id, second.job_id], [second.job_id]] == weighed


def test_who_waits_for_the_ledger_in_a_circle_is_tried_again(opened, postgres_server):
    """We lock in one order, but a person at a prompt may not."""
    store = opened()
    committed(store, Submit([JOB], Depth()))
    [dispatch] = tick(store)
    job = store.job(dispatch.job_id)
    change = changes.end(job, dispatch, EndReason.COMPLETED, store.now(), **RULES)
    with psycopg.connect(postgres_server.dsn) as other, ThreadPoolExecutor(1) as pool:
        other.execute("SELECT 1 FROM emptied.ledger FOR UPDATE")
        answer = pool.submit(committed, store, Apply([change]))
        until_there_is(postgres_server, "pg_locks WHERE NOT granted")
        with suppress(psycopg.errors.DeadlockDetected):  # one of the two is shot
            other.execute("SELECT 1 FROM emptied.job FOR UPDATE")
        other.rollback()

        assert [True] == answer.result(60)


def test_numbers_of_events_never_appear_behind_a_reader(opened):
    """Writers overlap and finish in any order; what the reader collects with its cursor is everything, once."""
    stores = [opened() for _ in range(3)]
    reader, stop = opened(), Event()
    collected = []

    def read():
        after = 0
        while True:
            last = stop.is_set()
            events = reader.events(after, 50)
            collected.extend(events)
            after = events[-1].seq if events else after
            if last and not events:
                return

    thread = Thread(target=read)
    thread.start()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: committed(stores[i % 3], Submit([JOB] * (1 + i % 3), Depth())), range(90)))
    stop.set()
    thread.join()

    assert list(range(1, 181)) == [event.seq for event in collected]
    assert 180 == len({event.job_id for event in collected})


def test_the_tally_is_right_while_it_is_added_up(opened):
    store, other = opened(), opened()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: (committed(store, Submit([JOB], Depth())), other.events(0, 1)), range(260)))

    assert [] == store.audit()
    assert 260 == store.addons()[0].jobs["QUEUED"]
    with store.database.connection() as con:
        assert con.execute("SELECT count(*) FROM emptied.tally").fetchone()[0] < 260


def test_a_lease_without_a_job_obeys_a_cap_across_hosts(opened):
    from penstock.core.jobs.round import decide_standalone_lease

    stores = [opened() for _ in range(4)]

    def borrow(pair):
        i, store = pair

        def decide(admission_view):
            limits = AdmissionLimits(Caps(per_addon=1))
            inputs = RoundInputs(
                admission_view, Conditions(90), limits, Ordering(), lambda _: Placement.RESERVE
            )
            return decide_standalone_lease(inputs, AdmissionClass("guest", "t", 10), 50)[0]

        return [grant.dispatch for grant in committed(store, Admit(f"host-{i}", decide, Terms()))]

    with ThreadPoolExecutor(4) as pool:
        assert 1 == sum(map(len, pool.map(borrow, enumerate(stores))))


def test_a_round_that_starts_nothing_and_refuses_nothing_new_writes_no_row(opened, postgres_server):
    store = opened()
    committed(store, Submit([Intent(addon_id="a", job_type="t", cost_units=50)], Depth()))
    tick(store, capacity=40)

    def written(session):
        return session.execute_sql(
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_xact_user_tables"
        )

    def before_and_after(session):
        before = written(session)
        keys = {("host", "here"), *keys_of(AdmissionClass("a", "t", 50))}
        nothing_ended = Completions(store.database, store.classes, [], expect_children=False)
        RoundAttempt(store.rounds, keys, careful=False).run(
            session, nothing_ended, [Admit("here", lambda _: RoundResult())]
        )
        return before, written(session)

    before, after = store.database.transact(before_and_after)
    assert before == after


@pytest.mark.parametrize(
    "text", ["plain", 'quo"te', "back\\slash", "new\nline\ttab", "{brace},NULL", "nul\0", "é😀", ""]
)
def test_text_comes_back_as_it_was_given(opened, text):
    store = opened()
    committed(store, Submit([JOB], Depth()))
    [dispatch] = tick(store)
    job = store.job(dispatch.job_id)
    end = changes.end(job, dispatch, EndReason.JOB_ERROR, store.now(), error=text, **RULES)
    committed(store, Apply([end]))

    assert text.replace("\0", "\N{SYMBOL FOR NULL}") == store.dispatch(dispatch.dispatch_id).error


def test_where_looking_has_become_slow_a_round_begins_where_the_last_one_did_and_looks_around_once_in_a_while(
    opened, monkeypatch
):
    """As behind a transaction of somebody else's that has been open for an hour. What nobody knew of is found all the same."""
    store = opened()
    monkeypatch.setattr(admission_view, "SLOW_SEC", 0)
    monkeypatch.setattr(admission_view, "REST", 1e9)
    jobs = [receipt.job_id for receipt in committed(store, Submit([JOB] * 9, Depth()))]
    started = [d.job_id for d in tick(store, capacity=30)]
    [first] = committed(store, Submit([replace(JOB, priority=60)], Depth()))
    others = [Intent(addon_id=f"other-{n}", job_type="t", cost_units=10) for n in range(2)]
    of_other_kinds = [receipt.job_id for receipt in committed(store, Submit(others, Depth()))]
    started += [d.job_id for d in tick(store, capacity=80)]

    assert {*jobs[:6], *of_other_kinds} == set(started)
    store.rounds.scan_hint._read_all_at = 0
    assert {first.job_id, jobs[6]} == {d.job_id for d in tick(store, capacity=100)}


def test_rounds_that_follow_upon_each_other_see_what_was_put_first_meanwhile_from_here(opened, monkeypatch):
    store = opened()
    monkeypatch.setattr(admission_view, "REST", 1e9)
    monkeypatch.setattr(admission_view, "SLOW_SEC", 1e9)  # a busy server is no slow one here
    committed(store, Submit([JOB] * 9, Depth()))
    started = exchange(store, tick(store, capacity=20), capacity=20)
    [first] = committed(store, Submit([replace(JOB, priority=60)], Depth()))

    assert first.job_id == exchange(store, started, capacity=20)[0].job_id


def test_a_turn_that_gives_back_as_much_as_it_takes_writes_no_sum_anew(opened):
    """Behind a long reader every version of a row stays, and whoever comes for the row steps over all of them."""
    store = opened()
    sums = store.database.in_schema(
        "SELECT xmin::text FROM penstock.ledger UNION ALL SELECT xmin::text FROM penstock.addon"
    )

    def versions():
        return store.database.transact(lambda session: session.execute_sql(sums))

    committed(store, Submit([JOB] * 8, Depth()))
    started = tick(store, capacity=20)
    before = versions()
    started = exchange(store, started, capacity=20)

    assert before == versions()
    assert [] == exchange(store, started, capacity=0)
    assert before != versions()


def test_a_turn_that_takes_two_jobs_for_the_units_of_one_counts_two(opened):
    store = opened()
    committed(store, Submit([replace(JOB, cost_units=20)], Depth()))
    [large] = tick(store, capacity=20)
    committed(store, Submit([replace(JOB, cost_units=10)] * 2, Depth()))

    assert 2 == len(exchange(store, [large], capacity=20))
    assert [] == store.audit()
