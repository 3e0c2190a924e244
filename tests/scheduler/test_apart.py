"""One operation that the database refuses fails alone: what was written with it stands, and its job has a stated failure."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import apsw
import psycopg
import pytest

from penstock.core.errors import NotWritten
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import EndReason
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.job_service import EndReport
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sqlite.store import SqliteStore

ALL = WorkerKinds()
#: The table and the column, in SQLite and in PostgreSQL.
PLACES = {
    "result": ("ended_dispatch", "dispatch"),
    "failure": ("ended_dispatch", "dispatch"),
    "data": ("checkpoint", "checkpoint"),
    "payload": ("intent", "job"),
}


class OnSqlite:
    def __init__(self, folder):
        self._path = folder / "jobs.db"
        self.store = SqliteStore(self._path, SteadyClock())
        self.store._con.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 1)  # the store turns them off

    def refuse(self, column):
        # By a connection of its own: the scheduler may be writing by the store's.
        con = apsw.Connection(str(self._path))
        con.set_busy_timeout(30_000)
        con.execute(
            f"CREATE TRIGGER refuse_{column} BEFORE INSERT ON {PLACES[column][0]} "
            f"WHEN NEW.{column} LIKE '%poison%' BEGIN SELECT RAISE(ABORT, 'no poison here'); END"
        )
        con.close()


class OnPostgres:
    def __init__(self, place):
        self._place = place
        self.store = PostgresStore(place.dsn, schema=place.schema)

    def refuse(self, column):
        with psycopg.connect(self._place.dsn, autocommit=True) as con:
            table = f'"{self._place.schema}".{PLACES[column][1]}'
            con.execute(f"ALTER TABLE {table} ADD CHECK ({column} NOT LIKE '%poison%')")


@pytest.fixture(params=["sqlite", "postgres"])
def ground(request, tmp_path):
    made = (
        OnSqlite(tmp_path) if request.param == "sqlite" else OnPostgres(request.getfixturevalue("postgres"))
    )
    service = SchedulerService(made.store, SchedulerRules(capacity=Capacity(fixed=90)), reserves=False)
    service.start("the test")
    made.job_service = service.job_service
    yield made
    service.stop()
    assert made.store.audit() == []
    made.store.close()


def started(ground, n):
    intents = [Intent(addon_id="a", job_type="t", cost_units=1)] * n
    ground.job_service.submit(intents)
    return [claimed.dispatch.dispatch_id for claimed in ground.job_service.claim(ALL, n)]


def reports_of(ids, word):
    """The third cannot be written."""
    return [EndReport(one, result=f'"{word if n == 2 else n}"') for n, one in enumerate(ids)]


def states_of(ground, ids):
    return [str(ground.store.job(one.rpartition(".")[0]).state) for one in ids]


@pytest.mark.parametrize("claims", [False, True])
def test_a_result_that_cannot_be_written_is_the_failure_of_its_own_job(ground, claims):
    ground.refuse("result")
    ids = started(ground, 5)
    reports = reports_of(ids, "poison")

    answers = (
        ground.job_service.exchange(reports, ALL, 5)[0] if claims else ground.job_service.end_many(reports)
    )

    assert (
        ["DONE", "DONE", "FAILED", "DONE", "DONE"]
        == [str(answer) for answer in answers]
        == states_of(ground, ids)
    )
    assert "cannot be written to the database" in ground.store.dispatch(ids[2]).error


def test_what_cannot_even_be_said_to_have_failed_is_answered_and_tried_no_more(ground):
    ground.refuse("result")
    ground.refuse("failure")
    ids = started(ground, 3)
    reports = [
        EndReport(ids[0]),
        EndReport(ids[1], EndReason.JOB_ERROR, error="poison"),
        EndReport(ids[2], result='"poison"'),
    ]

    answers = ground.job_service.end_many(reports)

    assert [JobState.DONE, JobState.FAILED, JobState.FAILED] == answers


def test_a_checkpoint_that_cannot_be_written_leaves_the_other_leases_alone(ground):
    ground.refuse("data")
    ids = started(ground, 8)

    def beat(n):
        try:
            return ground.job_service.heartbeat(ids[n], checkpoint='"poison"' if n == 2 else f"{n}").stop
        except Exception as error:
            return type(error).__name__

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(beat, range(8)))

    assert [None] * 7 == answers[:2] + answers[3:]
    assert answers[2] is not None
    saved = [ground.store.checkpoint(one.rpartition(".")[0]) for one in ids]
    assert [None if n == 2 else f"{n}" for n in range(8)] == saved


def test_a_submit_that_cannot_be_written_is_refused_alone(ground):
    ground.refuse("payload")

    def submit(n):
        try:
            payload = '"poison"' if n == 2 else f"{n}"
            return ground.job_service.submit([Intent(addon_id="a", job_type="t", payload=payload)])[0].created
        except Exception as error:
            return type(error).__name__

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(submit, range(8)))

    assert [True] * 7 == answers[:2] + answers[3:]
    assert answers[2] is not True


def test_whatever_a_worker_says_can_be_written(ground):
    ids = started(ground, 2)

    ground.job_service.heartbeat(ids[0], checkpoint='"caf\udce9"')
    ground.job_service.end_many(
        [
            EndReport(ids[0], EndReason.JOB_ERROR, error="caf\udce9\0" * 9_000),
            EndReport(ids[1], result='"\udce9"'),
        ]
    )

    failed, done = (ground.store.dispatch(one) for one in ids)
    assert failed.error.startswith("caf\ufffd\u2400caf")
    assert len(failed.error) <= 20_000
    assert ('"caf\ufffd"', '"\ufffd"') == (ground.store.checkpoint(ids[0].rpartition(".")[0]), done.result)


def test_a_refusal_of_the_database_is_answered_over_http_with_its_own_code():
    assert (422, "not_written") == (NotWritten.status, NotWritten.code)
