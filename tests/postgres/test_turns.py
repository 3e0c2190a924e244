"""What is done with the jobs of a turn while the server still writes it."""

from __future__ import annotations

import gc
import os

import pytest
from msgspec.structs import replace
from tests.postgres.conftest import JOB, decider, exchange, tick
from tests.waiting import until

from penstock.core.jobs import changes
from penstock.core.jobs.arrays import WINDOW
from penstock.core.jobs.dependencies import Dependency
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.states import JobState, Schedules
from penstock.core.jobs.types import SECOND
from penstock.scheduler.arrays import ArrayService
from penstock.scheduler.dispatcher import Dispatcher, HostLoad, PullingWorkers
from penstock.scheduler.job_service import JobService
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import (
    Admit,
    Apply,
    Complete,
    CompletedDispatch,
    Depth,
    Query,
    Submit,
    Terms,
    committed,
)
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import PipelineConnection
from penstock.stores.postgres.store import PostgresStore

SOAK = "PENSTOCK_SOAK" in os.environ

RULES = {"schedules": Schedules(), "ordering": Ordering()}


@pytest.fixture
def at_commit(store):
    """A function: from now on the server does this when it commits an attempt that begins."""

    def run(sql):
        with store.database.connect() as con:
            con.execute(store.database.in_schema(sql))

    def do(what):
        run(
            f"CREATE FUNCTION penstock.at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {what}; RETURN NULL; END $$"
        )
        run(
            "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON penstock.dispatch DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION penstock.at_commit()"
        )

    yield do
    run("DROP FUNCTION penstock.at_commit() CASCADE")


def test_jobs_are_made_ready_while_their_start_is_being_committed(store, at_commit):
    committed(store, Submit([JOB], Depth()))
    at_commit("PERFORM pg_advisory_xact_lock(7)")
    with store.database.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(7)")
        jobs_from_rows = store.classes.jobs

        def ready(session, rows):
            holder.execute("SELECT pg_advisory_unlock(7)")  # the commit waits for this
            return jobs_from_rows(session, rows)

        store.classes.jobs = ready
        [grant] = committed(store, Admit("here", decider(90)))

    assert grant.dispatch.job_id == grant.job.job_id


def test_a_turn_leaves_nothing_to_the_garbage_collector(store):
    """What knows of itself in a circle stays until it is looked for, and to look through all that a turn has read costs more than to read it."""
    committed(store, Submit([JOB] * 6, Depth()))
    started = exchange(store, tick(store, capacity=20), capacity=20)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        started = exchange(store, started, capacity=20)
        gc.collect()
        left = {
            type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("penstock")
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert 2 == len(started)
    assert set() == left


# What a round trip carries


@pytest.fixture
def asked(monkeypatch):
    """
    The names of what is asked, a list for each round trip before that of the COMMIT. How far it looks (`_from`) depends on
    how long looks have taken.
    """
    trips = []
    together, flush = DatabaseSession.execute_many, DatabaseSession.flush

    def note(calls):
        names = [name.removesuffix("_from") for name, _ in calls]
        if not {"notify_unsynced", "committed_events"} & {*names}:  # the bell's, which come when they come
            trips.append(names)

    def noted(session, *calls):
        note(calls)
        return together(session, *calls)

    def noted_flush(session, *calls):
        note([*session.deferred, *calls])
        return flush(session, *calls)

    monkeypatch.setattr(DatabaseSession, "execute_many", noted)
    monkeypatch.setattr(DatabaseSession, "flush", noted_flush)
    return trips


def test_what_is_due_steps_into_line_in_the_round_that_sees_it(opened, asked):
    now = [1_000_000_000]
    store = opened(lambda: now[0])
    later = replace(JOB, earliest_start_at=now[0] + 10)
    committed(store, Submit([JOB], Depth()))
    tick(store)
    [receipt], _ = committed(store, Submit([later], Depth())), tick(store)
    now[0] += 10
    asked.clear()
    [dispatch] = tick(store)

    assert receipt.job_id == dispatch.job_id
    assert [["lock_ledger", "accounts", "step_into_line", "heads", "spent", "opening"]] == asked


def test_a_round_that_looks_at_no_budget_does_not_read_them(store, asked):
    committed(store, Submit([JOB], Depth()))
    asked.clear()
    committed(store, Admit("here", decider(90), spending=False))

    assert "spent" not in [name for names in asked for name in names]


def test_ends_without_a_round_lock_the_ledger_in_the_round_trip_that_ends_them(store, asked):
    committed(store, Submit([JOB] * 2, Depth()))
    started = tick(store)
    asked.clear()

    assert [[True], [True]] == [
        committed(store, Complete([CompletedDispatch(dispatch.dispatch_id)])) for dispatch in started
    ]
    assert [["complete", "lock_ledger", "accounts", "opening"]] * 2 == asked
    assert [] == store.audit()


def family(store, waiting):
    """A parent that runs and has one child, beside as many children of another job that is not due."""
    later = replace(JOB, cost_units=1, earliest_start_at=store.now() + 3_600 * SECOND)
    parent, other = committed(store, Submit([replace(JOB, cost_units=1), later]))
    [child] = committed(store, Submit([replace(JOB, cost_units=1, after=(Dependency(parent.job_id),))]))
    committed(store, Submit([replace(JOB, cost_units=1, after=(Dependency(other.job_id),))] * waiting))
    [dispatch] = tick(store)
    return dispatch, child.job_id


def test_only_while_a_job_waits_for_another_are_the_children_of_completed_jobs_looked_for(store, asked):
    plain = replace(JOB, cost_units=1)
    committed(store, Submit([plain] * 3))
    first, second, third = tick(store)
    family(store, waiting=1)
    store.rounds.has_dependencies = False  # as if another host had submitted the family since the last round
    looks = []
    for dispatch in (first, second):
        asked.clear()
        committed(store, Complete([CompletedDispatch(dispatch.dispatch_id)]))
        looks.append([at for at, names in enumerate(asked) if "children" in names])

    assert looks == [[1], [0]]  # the first is surprised, and needs another round trip

    for job in store.find(Query(states=[JobState.QUEUED])):
        change = changes.cancel(store.job(job.job_id), None, store.now(), grace=SECOND, **RULES)
        if change is not None:  # else it was canceled with its parent
            committed(store, Apply([change]))
    committed(store, Complete([CompletedDispatch(third.dispatch_id)]))
    committed(store, Submit([plain]))
    [last] = tick(store)
    asked.clear()
    committed(store, Complete([CompletedDispatch(last.dispatch_id)]))
    assert "children" not in [name for names in asked for name in names]


def test_a_child_starts_two_round_trips_after_the_end_of_its_parent(store, asked):
    """The second is that of the release, the start and the COMMIT."""
    dispatch, child = family(store, waiting=1)
    asked.clear()
    [started] = exchange(store, [dispatch])

    assert child == started.job_id
    assert asked == [
        [
            *("complete", "lock_ledger", "accounts", "step_into_line", "heads", "spent"),
            *("lock_children", "lock_groups_of", "children", "opening"),
        ]
    ]


def test_the_results_of_parents_come_with_the_start_of_a_released_child(store):
    dispatch, child = family(store, waiting=1)
    done = Complete([CompletedDispatch(dispatch.dispatch_id, "[1, 2]")])
    _, granted = store.commit(done, Admit("here", decider(90)), wait=True)
    [grant] = granted.result()

    assert child == grant.dispatch.job_id
    assert {dispatch.job_id: (JobState.DONE, "[1, 2]")} == grant.parents


@pytest.mark.parametrize("waiting", [1, 20])
def test_released_children_start_in_the_order_of_the_queue(store, asked, waiting):
    """With many waiting jobs, the last child stands behind those that the round has read when it releases it."""
    plain = replace(JOB, cost_units=1)
    [parent] = committed(store, Submit([plain]))
    after = (Dependency(parent.job_id),)
    first, last = committed(
        store, Submit([replace(plain, priority=priority, after=after) for priority in (55, 45)])
    )
    between = committed(store, Submit([plain] * waiting))
    [dispatch] = tick(store, capacity=1)
    asked.clear()
    started = exchange(store, [dispatch], capacity=90)

    in_order = [first, *between, last]
    assert [receipt.job_id for receipt in in_order] == [dispatch.job_id for dispatch in started]
    assert (waiting > 1) == ("in_line" in [name for names in asked for name in names])


def test_a_round_that_is_run_again_starts_the_children_that_it_releases(store):
    dispatch, child = family(store, waiting=1)
    [other] = committed(store, Submit([replace(JOB, cost_units=1)]))
    with store.database.connect() as holder, holder.transaction():
        held = store.database.in_schema("SELECT FROM penstock.queue WHERE job_id = %s FOR UPDATE")
        holder.execute(held, [other.job_id])
        started = exchange(store, [dispatch])

    assert [child] == [dispatch.job_id for dispatch in started]


def test_the_children_of_a_job_whose_completion_is_refused_wait(opened):
    now = [1_000_000_000]
    store = opened(lambda: now[0])
    late, waits = family(store, waiting=0)
    now[0] += Terms().lease_for
    in_time, starts = family(store, waiting=0)
    done = Complete([CompletedDispatch(late.dispatch_id), CompletedDispatch(in_time.dispatch_id)])
    started = committed(store, done), tick(store)

    assert ([False, True], [starts]) == (started[0], [dispatch.job_id for dispatch in started[1]])
    assert JobState.QUEUED is store.job(waits).state


def test_the_next_jobs_of_an_array_cost_no_round_trip_while_others_of_it_wait(store, asked):
    rules = SchedulerRules(capacity=Capacity(fixed=20))
    dispatcher = Dispatcher(store, rules, HostLoad(rules), PullingWorkers())
    arrays = ArrayService(store, rules, JobService(store, rules, dispatcher))
    arrays.submit(replace(JOB, cost_units=1), f"1-{WINDOW + 20}")
    started = tick(store, capacity=20)
    for _ in range(2):
        asked.clear()
        started = exchange(store, started, capacity=20)

    assert 20 == len(started)
    assert [
        ["complete", "lock_arrays", "lock_ledger", "accounts", "step_into_line", "heads", "spent", "opening"]
    ] == asked


@pytest.fixture
def trips(store, monkeypatch):
    """How many statements each round trip had, without those that other threads send when it is time."""
    exchange, trips = PipelineConnection.exchange, []
    apart = {store.database.sql[name].text for name in ("notify_unsynced", "committed_events", "now")}

    def count(con, calls, behind=()):
        if calls and not apart & {statement.text for statement, _ in calls}:
            trips.append(len(calls))
        return exchange(con, calls, behind)

    monkeypatch.setattr(PipelineConnection, "exchange", count)
    return trips


def test_a_read_is_one_round_trip(store, trips):
    [receipt] = committed(store, Submit([JOB]))
    store.job(receipt.job_id)  # reads the admission class, which stays known
    trips.clear()
    for _ in range(3):
        assert receipt.job_id == store.job(receipt.job_id).job_id

    assert 3 == len(trips)


def test_a_round_that_starts_nothing_is_one_round_trip(store, trips):
    tick(store)
    trips.clear()

    assert [] == tick(store)
    assert 1 == len(trips)


def test_no_transaction_is_left_open_by_a_read(postgres_server, store):
    store.job("unknown")
    [con] = store.database._idle
    state = f"SELECT state FROM pg_stat_activity WHERE pid = {con.info.backend_pid}"

    until(lambda: "idle" == postgres_server.run(state))


@pytest.fixture
def cost_of(asked, monkeypatch):
    """A function that does something, and counts the statements, and the rows that the server fetched in the transaction."""
    rows, lock, finish = [], Database.lock, DatabaseSession.finish

    def count(session):
        fetched = "sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))"
        sql = f"SELECT {fetched} FROM pg_stat_xact_user_tables WHERE schemaname = 'emptied'"
        rows.append(int(session.execute_sql(sql)[0][0] or 0))

    def counted_lock(database, session, *calls):
        count(session)  # the view has what earlier transactions of the connection fetched
        return lock(database, session, *calls)

    def counted_finish(session):
        session.flush()
        count(session)
        finish(session)

    def cost_of(act):
        asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Database, "lock", counted_lock)
            patch.setattr(DatabaseSession, "finish", counted_finish)
            rows.clear()
            act()
            return len([name for names in asked for name in names]), rows[1] - rows[0]

    return cost_of


def test_the_cost_of_a_release_follows_what_is_released_and_not_what_waits(postgres_emptied, cost_of):
    costs = []
    for waiting in (5, 2_000):
        place = postgres_emptied()
        store = PostgresStore(place.dsn, schema=place.schema)
        dispatch, child = family(store, waiting)
        done = Complete([CompletedDispatch(dispatch.dispatch_id)])
        costs.append(cost_of(lambda: committed(store, done)))  # noqa: B023 - called at once
        assert [d.job_id for d in tick(store)] == [child]
        store.close()

    assert costs[0][0] == costs[1][0]
    assert costs[1][1] <= costs[0][1] + 5


@pytest.mark.timeout(900)
def test_the_cost_of_a_round_follows_what_it_starts_and_not_what_waits(postgres_emptied, cost_of):
    kinds = [replace(JOB, job_type=job_type, cost_units=cost) for job_type in "tu" for cost in (10, 20, 40)]
    costs = []
    for waiting in (1_000, 1_000_000) if SOAK else (100, 5_000):
        place = postgres_emptied()
        store = PostgresStore(place.dsn, schema=place.schema)
        for _ in range(0, waiting, 6_000):
            committed(store, Submit(kinds * (min(waiting, 6_000) // len(kinds)), Depth()))
        started = exchange(store, tick(store))
        costs.append(cost_of(lambda: exchange(store, started)))  # noqa: B023 - called at once
        store.close()

    assert costs[0][0] == costs[1][0]
    assert costs[1][1] <= 2 * costs[0][1]


def test_a_round_that_starts_one_and_refuses_another_tells_of_both(store):
    """The short way to write a start has no place for mentions."""
    one, other = committed(store, Submit([JOB, replace(JOB, job_type="big", cost_units=80)], Depth()))
    tick(store, capacity=50)

    kinds = [[event.kind for event in store.events(0, 10, receipt.job_id)] for receipt in (one, other)]
    assert [
        [EventKind.SUBMITTED, EventKind.DISPATCHING, EventKind.RUNNING],
        [EventKind.SUBMITTED, EventKind.DENIED],
    ] == kinds
