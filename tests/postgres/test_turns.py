"""What is done with the jobs of a turn while the server still writes it."""

from __future__ import annotations

import psycopg
import pytest
from tests.postgres.conftest import JOB, tick

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
