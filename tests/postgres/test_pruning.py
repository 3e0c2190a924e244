"""Several processes prune at once: of a job that is pruned no event stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
from tests.postgres.conftest import JOB, exchange, tick, until_there_is

from penstock.core.jobs import schedules
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.schedules import Schedule
from penstock.core.jobs.types import SECOND
from penstock.stores.api import ChangeSchedule, Prune, Query, Submit, committed
from penstock.stores.common.rows import migrations
from penstock.stores.postgres.store import PostgresStore

T0 = 1_773_500_000 * SECOND


def test_two_that_prune_jobs_of_the_same_batches_leave_no_event_of_either(
    opened, postgres_emptied, postgres_server
):
    """
    Two jobs are submitted together and start together, and each ends by itself. One process prunes the first job,
    and waits for a lock when it has rewritten the batches; another prunes the second job meanwhile.
    """
    place, now = postgres_emptied.place, [T0]
    first, second = opened(lambda: now[0]), opened(lambda: now[0])
    committed(first, Submit([JOB, JOB]))
    for dispatch in tick(first):
        now[0] += SECOND
        exchange(first, [dispatch])
    first.events(0, 100)  # numbers them: neither has to before it prunes
    prune = Prune(now[0] + SECOND, 1)
    waiting = "(SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' OFFSET {}) AS waiting"

    with ThreadPoolExecutor(2) as pool, psycopg.connect(place.dsn) as other:
        other.execute(f"LOCK TABLE {place.schema}.tally IN SHARE MODE".encode())
        one = pool.submit(committed, first, prune)
        until_there_is(postgres_server, waiting.format(0))
        two = pool.submit(committed, second, prune)
        until_there_is(postgres_server, waiting.format(1))
        other.rollback()

    assert [1, 1] == [one.result(), two.result()]
    assert [] == second.find(Query())
    assert [EventKind.PRUNED] * 2 == [event.kind for event in second.events(0, 100)]
    assert [] == second.audit()


def test_a_database_that_kept_events_of_pruned_jobs_loses_them_when_it_is_opened(postgres):
    """The events that an older Penstock left: those of a job without a row, also its part of a shared batch."""
    store = PostgresStore(postgres.dsn, lambda: T0, schema=postgres.schema)
    committed(store, ChangeSchedule(schedules.add(Schedule("s", JOB, every_sec=60), T0, "test")))
    fired = committed(
        store, ChangeSchedule(schedules.run_now(store.schedule("s"), T0, "test", set()))
    ).receipt
    kept, gone = committed(store, Submit([JOB, JOB]))
    exchange(store, tick(store))
    everything = store.events(0, 100)
    store.close()
    with psycopg.connect(postgres.dsn, autocommit=True, options=f"-c search_path={postgres.schema}") as con:
        con.execute(
            """
            WITH gone AS (DELETE FROM job WHERE job_id = ANY(%s) RETURNING no, job_id)
            DELETE FROM dispatch WHERE job_no IN (SELECT no FROM gone)
            """,
            [[gone.job_id, fired.job_id]],
        )
        con.execute("UPDATE tally SET jobs = 1 WHERE state = 'DONE'")
        # The step alone: later steps make tables, and this database has them.
        con.execute(migrations("postgres")[16].replace("penstock.", f'"{postgres.schema}".'))

    store = PostgresStore(postgres.dsn, lambda: T0, schema=postgres.schema)
    events = store.events(0, 100)

    assert [
        event for event in everything if event.job_id == kept.job_id or event.kind == "SCHEDULE_SET"
    ] == events
    assert [] == store.audit()
    store.close()
