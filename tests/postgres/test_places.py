"""From the schema in which a job was one row to the one in which it has a place: what was there is there, and goes on."""

from __future__ import annotations

import psycopg
import pytest
from tests.postgres.conftest import JOB, tick

from penstock.core.jobs import changes
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import SECOND
from penstock.stores.api import Apply, Complete, CompletedDispatch, Depth, Prune, Query, Submit, committed
from penstock.stores.common.rows import migrations
from penstock.stores.postgres import database as postgres_schema
from penstock.stores.postgres.database import Database
from penstock.stores.postgres.pipeline import ConnectionOptions
from penstock.stores.postgres.store import PostgresStore

#: Queued, told to wait for a reason; running; done; and failed, the last two a day ago. And a lease without a job.
BEFORE = """
INSERT INTO penstock.demand (key, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class)
VALUES ('k', 'a', 't', 10, 0, 'any', 0, 0, 0);
INSERT INTO penstock.job (no, job_id, addon_id, state, demand, line, turn, ready_at, priority, fence, events, created_at, submitted_in,
                          active, crash, error, denied, denied_at, ended_at)
VALUES (1, 'waits', 'a', 'QUEUED', 1, 1, 5, 5, 5, 1, 5, 1, 1, 7, 1, 0, 'capacity', 9, NULL),
       (2, 'runs', 'a', 'RUNNING', 1, NULL, 5, 5, 5, 2, 3, 1, 1, 0, 0, 0, '', NULL, NULL),
       (3, 'done', 'a', 'DONE', 1, NULL, 5, 5, 5, 1, 4, 1, 1, 8, 0, 0, '', NULL, 3600000020),
       (4, 'failed', 'a', 'FAILED', 1, NULL, 5, 5, 5, 3, 4, 1, 1, 8, 0, 3, '', NULL, 7200000030);
INSERT INTO penstock.intent (no, payload, unit, time_sensitive) SELECT no, '{"no": ' || no || '}', 'USD', 0 FROM penstock.job;
INSERT INTO penstock.dispatch (dispatch_id, job_no, demand, addon_id, host, fence, cost_units, phase, admitted_at, started_at, expires_at, ended_at, how, result)
VALUES ('runs.1', 2, 1, 'a', 'local', 1, 10, 'ended', 1, 1, 2, 2, 'worker_crashed', NULL),
       ('runs.2', 2, 1, 'a', 'local', 2, 10, 'leased', 1, 1, {until}, NULL, NULL, NULL),
       ('done.1', 3, 1, 'a', 'local', 1, 10, 'ended', 1, 3600000012, 2, 3600000020, 'completed', '7'),
       ('loan.0', NULL, 1, 'a', 'local', 0, 10, 'leased', 1, 1, {until}, NULL, NULL, NULL);
INSERT INTO penstock.ledger (scope, name, units, running) VALUES ('host', 'local', 20, 2), ('addon', 'a', 20, 2), ('type', 'a/t', 20, 2);
INSERT INTO penstock.addon (addon_id, units) VALUES ('a', 20);
INSERT INTO penstock.tally VALUES ('a', 'QUEUED', 1), ('a', 'RUNNING', 1), ('a', 'DONE', 1), ('a', 'FAILED', 1);
INSERT INTO penstock.trail (batch, size, until, events) SELECT 1, 16, 16, json_agg(json_build_array(1, 'SUBMITTED', job_id, n,
       CASE WHEN n = events THEN state ELSE 'QUEUED' END, '', NULL, NULL))::text
FROM penstock.job CROSS JOIN LATERAL generate_series(1, events) AS n;
UPDATE penstock.mark SET value = 16 WHERE name = 'event';
SELECT setval('penstock.job_no', 4), setval('penstock.batch', 1);
"""


@pytest.fixture
def brought_forward(postgres, monkeypatch):
    steps = migrations("postgres")
    link = Database(postgres.dsn, postgres.schema, ConnectionOptions(), None)
    until = link.now() + 600 * SECOND
    with monkeypatch.context() as before:
        before.setattr(postgres_schema, "migrations", lambda _: steps[:3])
        link.migrate()
    with psycopg.connect(postgres.dsn, autocommit=True) as con:
        con.execute(link.in_schema(BEFORE.replace("{until}", str(until))).encode())
    link.close()
    store = PostgresStore(postgres.dsn, schema=postgres.schema)
    yield store
    store.close()


def test_every_job_and_every_attempt_is_as_it_was(brought_forward):
    store = brought_forward

    assert [] == store.audit()
    found = {job.job_id: job for job in store.find(Query())}
    assert {
        "waits": JobState.QUEUED,
        "runs": JobState.RUNNING,
        "done": JobState.DONE,
        "failed": JobState.FAILED,
    } == {job_id: job.state for job_id, job in found.items()}
    assert {"waits": 1, "runs": 2, "done": 1, "failed": 3} == {k: job.fence for k, job in found.items()}
    waits = found["waits"]
    assert ("capacity", 9, 7, '{"no": 1}') == (
        waits.denied,
        waits.denied_at,
        waits.active,
        waits.intent.payload,
    )
    assert [DispatchPhase.ENDED, DispatchPhase.LEASED] == [
        attempt.phase for attempt in store.attempts("runs")
    ]
    assert ["7"] == [attempt.result for attempt in store.attempts("done")]
    assert {"runs.2", "loan.0"} == {dispatch.dispatch_id for dispatch in store.live()}
    assert [1, 2, 3] == [event.n for event in store.events(0, 10, "runs")]


def test_what_waited_starts_what_ran_is_done_and_what_failed_is_tried_again(brought_forward):
    store = brought_forward
    rules = {"ordering": Ordering()}
    [(done,), again, started] = (
        committed(store, Complete([CompletedDispatch("runs.2")])),
        committed(store, Apply([changes.retry(store.job("failed"), store.now(), **rules)])),
        tick(store),
    )

    assert [True, [True]] == [done, again]
    assert {"waits.2", "failed.4"} == {dispatch.dispatch_id for dispatch in started}
    assert store.job("runs").state is JobState.DONE
    assert [] == store.audit()


def test_what_ended_long_ago_can_be_forgotten(brought_forward):
    store = brought_forward

    assert 1 == committed(store, Prune(3_600_000_021, 10))
    assert 1 == committed(store, Prune(7_200_000_031, 10))
    assert {"waits", "runs"} == {job.job_id for job in store.find(Query())}
    assert [] == store.audit()


def test_an_older_penstock_must_not_come_any_more(brought_forward, postgres, monkeypatch):
    steps = migrations("postgres")
    monkeypatch.setattr(postgres_schema, "migrations", lambda _: steps[:3])

    with pytest.raises(Exception, match=r"needs a Penstock that knows \d+, this one knows 3"):
        PostgresStore(postgres.dsn, schema=postgres.schema)


def test_new_jobs_have_new_numbers(brought_forward):
    store = brought_forward
    [receipt] = committed(store, Submit([JOB], Depth()))

    assert 5 == store.job(receipt.job_id).no
