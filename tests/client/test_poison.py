"""Odd ends of functions in an SDK worker: each lands in a stated state, the worker goes on fetching, and the neighbours notice nothing."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from tests.client.conftest import RULES
from tests.poison import (
    NOT_FINITE,
    POISONS,
    RETURNING,
    STATES,
    STORED,
    AsyncHandler,
    Handler,
    handled_neighbour,
)

import penstock
from penstock import Client
from penstock.client.worker import JobHandler
from penstock.core.errors import BadIntent
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import SECOND
from penstock.scheduler.service import SchedulerService
from penstock.server.listener import Config, serve
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sqlite.store import SqliteStore
from penstock.work.context import JobFacts, NoChannel
from penstock.work.outcome import CurrentJob, run

#: Where a server is asked for each of them, a few of each kind are enough.
SOME = (
    "surrogate_in_the_message", "nul_in_the_message", "huge_message", "str_raises", "canceled_error", "keyboard_interrupt",
    "own_base_exception", "nan", "infinity_inside", "too_large", "not_serialisable", "surrogate_in_the_result", "nul_in_the_result",
)  # fmt: skip


@contextmanager
def served(store, folder):
    rules = replace(RULES, schedules=Schedules(crash=(), unavailable=()), lease_for=60 * SECOND)
    service = SchedulerService(store, rules, preempts=True)
    service.start("the test")
    server = serve(service, Config(directory=folder / "data", socket=folder / "data" / "penstock.sock"))
    try:
        with Client(server.url, token=server.token_file.read_text().strip()) as client:
            yield client
    finally:
        server.stop()
        service.stop()
        store.close()


def run_all(client, names, handler=Handler, **options):
    """The state of each, and its error or its result; every second job is an innocent one."""
    worker = penstock.Worker(client.url, token=client.token, addon="photos")
    worker.job("neighbour")(handled_neighbour)
    jobs, beside = {}, {}
    for n, name in enumerate(names):
        worker.job(name)(handler(name))
        jobs[name] = client.submit("photos", name, cost_units=1).job_id
        beside[n + 1] = client.submit("photos", "neighbour", [n], cost_units=1).job_id
    worker.run(3, until_idle=True, **options)
    worker.client.close()
    worker.fetcher.close()
    assert list(beside) == [json.loads(bytes(client.job(job_id).result)) for job_id in beside.values()]
    assert {1} == {client.job(job_id).fence for job_id in beside.values()}
    ended = {name: client.job(job_id) for name, job_id in jobs.items()}
    return {name: (str(job.state), job.error or json.loads(bytes(job.result))) for name, job in ended.items()}


def check(ended):
    assert {name: STATES[name] for name in ended} == {name: state for name, (state, _) in ended.items()}
    for name, words in NOT_FINITE.items():
        assert words in ended[name][1]
    assert all(ended[name][1] == result for name, result in STORED.items())


@pytest.mark.long
@pytest.mark.parametrize("handler", [Handler, AsyncHandler])
def test_on_threads(folder, handler):
    with served(SqliteStore(folder / "jobs.db", lambda: time.time_ns() // 1_000), folder) as client:
        check(run_all(client, POISONS, handler))


@pytest.mark.long
def test_on_processes(folder):
    with served(SqliteStore(folder / "jobs.db", lambda: time.time_ns() // 1_000), folder) as client:
        ended = run_all(client, [*POISONS, "leave_at_once"], processes=True)

        assert "its process died" in ended.pop("leave_at_once")[1]
        check(ended)


def test_on_postgresql(folder, postgres):
    with served(PostgresStore(postgres.dsn, schema=postgres.schema), folder) as client:
        check(run_all(client, SOME))


@pytest.mark.parametrize("name", POISONS)
def test_a_call_comes_to_an_ending_and_never_raises(name):
    outcome = run(JobHandler(Handler(name)).invoke, CurrentJob(JobFacts("1", name), NoChannel()))

    assert outcome.end == ("completed" if name in STORED else "job_error")
    if name in RETURNING and name not in STORED:
        assert "it returned " in outcome.error


@pytest.mark.parametrize("fields", [{"tags": ("caf\udce9",)}, {"idempotency_key": "caf\udce9"}])
def test_a_name_that_is_not_utf8_is_refused_by_its_field(client, fields):
    with pytest.raises(BadIntent, match=f"{next(iter(fields))} is not valid UTF-8"):
        client.submit("photos", "neighbour", **fields)


def test_a_payload_with_nan_is_refused_by_its_place(client):
    with pytest.raises(BadIntent, match=r"payload .* holds NaN at \['loss'\]"):
        client.submit("photos", "neighbour", {"loss": float("nan")})
