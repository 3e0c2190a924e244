"""Several processes prune at once: of a job that is pruned no event stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
from tests.postgres.conftest import JOB, exchange, tick, until_there_is

from penstock.core.jobs.job import EventKind
from penstock.core.jobs.types import SECOND
from penstock.stores.api import Prune, Query, Submit, committed

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
