"""What is done with the jobs of a turn while the server still writes it."""

from __future__ import annotations

import gc

import psycopg
import pytest
from tests.postgres.conftest import JOB, exchange, tick

from penstock.stores.protocol import Depth


@pytest.fixture
def at_commit(store):
    """A function: from now on the server does this when it commits an attempt that begins."""

    def run(sql):
        with store._link.connect() as con:
            con.execute(store._link.in_schema(sql))

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
    store.submit([JOB], Depth())
    at_commit("PERFORM pg_advisory_xact_lock(7)")
    with store._link.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(7)")
        keep = store._turns.admitting.keep

        def ready(rows):
            holder.execute("SELECT pg_advisory_unlock(7)")  # the commit waits for this
            return keep(rows)

        store._turns.admitting.keep = ready
        [dispatch] = tick(store)

    assert [dispatch.job_id] == [job.job_id for job in store.claimed([dispatch])]


def test_what_was_made_ready_is_forgotten_when_its_start_is_not_committed(store, at_commit):
    store.submit([JOB], Depth())
    at_commit("RAISE EXCEPTION 'no'")
    with pytest.raises(psycopg.errors.RaiseException):
        tick(store)

    assert {} == store._just_leased


def test_a_turn_leaves_nothing_to_the_garbage_collector(store):
    """What knows of itself in a circle stays until it is looked for, and to look through all that a turn has read costs more than to read it."""
    store.submit([JOB] * 6, Depth())
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
