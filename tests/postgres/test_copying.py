"""Moving up from a file to a server: everything is there, numbers go on, and what cannot be done changes nothing."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from tests.postgres.conftest import tick

from penstock.cli.main import cli
from penstock.core.errors import DispatcherHeld, KeyConflict, StoreFailed
from penstock.core.jobs import changes
from penstock.core.jobs.changes import Renewal
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores import copying
from penstock.stores.api import Apply, Depth, Prune, Query, Renew, SetAddon, Submit, committed
from penstock.stores.copying import copy_to_postgres
from penstock.stores.opening import SharedOptions
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sqlite.store import SqliteStore

T0 = 1_900_000_000 * SECOND
JOB = Intent(addon_id="a", job_type="t", payload='{"umlaut": "ä\\n\\t"}', tags=("x",))
KEYED = Intent(
    addon_id="b", job_type="u", idempotency_key="once", cost_limit=5, labels=("gpu",), preemptible=False
)


@pytest.fixture
def file(tmp_path):
    """With jobs in several states, a checkpoint, spending, a weight, and a gap in the numbers of its events."""
    path = tmp_path / "jobs.db"
    store = SqliteStore(path, lambda: T0)
    committed(store, Submit([JOB] * 5 + [KEYED], Depth()))
    committed(store, SetAddon("a", weight=250))
    first, second, *_ = tick(store, 40)
    committed(
        store,
        Renew(
            [
                Renewal(
                    dispatch_id=second.dispatch_id,
                    expires_at=T0 + 30 * SECOND,
                    spent=3,
                    checkpoint='{"at": 1}',
                )
            ]
        ),
    )
    done = changes.end(
        store.job(first.job_id),
        first,
        EndReason.COMPLETED,
        T0,
        schedules=Schedules(),
        ordering=Ordering(),
        result="7",
    )
    assert committed(store, Apply([done])) == [True]
    committed(store, Prune(T0 + 1, 1))
    store.close()
    return path


def everything(store):
    jobs = store.find(Query(limit=100))
    dispatches = [store.attempts(job.job_id) for job in jobs]
    return (
        jobs,
        dispatches,
        store.events(0, 1_000),
        store.addons(),
        [store.checkpoint(j.job_id) for j in jobs],
    )


def read(path):
    store = SqliteStore(path, lambda: T0)
    found = everything(store)
    store.close()
    return found


def test_all_that_the_file_holds_is_on_the_server_and_numbers_go_on(file, postgres):
    before = read(file)

    copied = copy_to_postgres(file, postgres.dsn, SharedOptions(postgres.schema))

    store = PostgresStore(postgres.dsn, lambda: T0, schema=postgres.schema)
    after, newest = everything(store), store.newest()
    [again, new] = [committed(store, Submit([intent], Depth()))[0] for intent in (KEYED, JOB)]
    with pytest.raises(KeyConflict):
        committed(store, Submit([Intent(addon_id="b", job_type="other", idempotency_key="once")], Depth()))
    told = store.events(newest, 10)
    numbers = [job.no for job in store.find(Query(limit=100))]
    problems = store.audit()
    store.close()
    assert before == after
    assert len(before[2]) == sum(count for name, count in copied.counts.items() if name.startswith("events"))
    assert (False, True) == (again.created, new.created)
    assert [newest + 1] == [event.seq for event in told]
    assert numbers == sorted(set(numbers))
    assert [] == problems


def test_a_file_that_somebody_dispatches_from_is_not_copied(file, postgres):
    store = SqliteStore(file, lambda: T0)
    store.acquire_dispatch("somebody")

    with pytest.raises(DispatcherHeld, match="somebody"):
        copy_to_postgres(file, postgres.dsn, SharedOptions(postgres.schema))
    store.close()


def test_a_target_that_holds_something_is_left_alone(file, postgres):
    store = PostgresStore(postgres.dsn, schema=postgres.schema)
    committed(store, Submit([JOB], Depth()))

    with pytest.raises(StoreFailed, match="is not empty"):
        copy_to_postgres(file, postgres.dsn, SharedOptions(postgres.schema))

    assert 1 == len(store.find(Query()))
    store.close()


def test_a_copy_that_is_not_the_same_is_not_kept(file, postgres, monkeypatch):
    monkeypatch.setattr(
        copying, "TABLES", {table: mine for table, mine in copying.TABLES.items() if table != "checkpoint"}
    )

    with pytest.raises(StoreFailed, match="differs from the file in checkpoints"):
        copy_to_postgres(file, postgres.dsn, SharedOptions(postgres.schema))

    store = PostgresStore(postgres.dsn, schema=postgres.schema)
    assert [] == store.find(Query())
    store.close()


def test_the_command_prints_what_it_compared(file, postgres, monkeypatch):
    monkeypatch.setenv("PENSTOCK_POSTGRES_SCHEMA", postgres.schema)
    user, _, rest = postgres.dsn.partition("@")

    done = CliRunner().invoke(cli, ["db", "copy", str(file), f"{user}:hunter2@{rest}"])

    assert 0 == done.exit_code, done.output
    assert "3  jobs RUNNING" in done.output
    assert "postgresql://penstock:***@" in done.output
    assert "hunter2" not in done.output


def test_the_command_refuses_a_target_that_is_a_file(file):
    done = CliRunner().invoke(cli, ["db", "copy", str(file), "other.db"])

    assert 2 == done.exit_code
    assert "must be postgresql://" in done.output
