from __future__ import annotations

from time import monotonic

import pytest
from tests.waiting import LONG

from penstock.core.jobs.admission import AdmissionLimits, Caps, Conditions
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, run_round
from penstock.stores.api import Admit, Complete, CompletedDispatch, Terms, committed
from penstock.stores.postgres import wakeups
from penstock.stores.postgres.store import PostgresStore

JOB = Intent(addon_id="a", job_type="t")


def tick(store, capacity=90, *, offer=Placement.LEASE, host="here", caps=None, limit=None, terms=None):
    return [
        grant.dispatch
        for grant in committed(store, Admit(host, decider(capacity, offer, caps, limit), terms or Terms()))
    ]


def exchange(store, ended, capacity=90):
    """All of these are done, and what there is room for then starts."""
    done = [CompletedDispatch(dispatch.dispatch_id) for dispatch in ended]
    ended, started = store.commit(Complete(done), Admit("here", decider(capacity)), wait=True)
    assert all(ended.result())
    return [grant.dispatch for grant in started.result()]


def decider(capacity, offer=Placement.LEASE, caps=None, limit=None):
    limits = AdmissionLimits(caps or Caps())
    return lambda admission_view: run_round(
        RoundInputs(admission_view, Conditions(capacity), limits, Ordering(), lambda _: offer),
        most_leases=limit,
    )


def until_there_is(server, rows, seconds=LONG):
    until = monotonic() + seconds
    while "0" == server.run(f"SELECT count(*) FROM {rows}"):
        assert monotonic() < until


@pytest.fixture
def opened(postgres_emptied):
    """A function that opens one more store at the same place: another process, as far as the server can tell."""
    place = postgres_emptied()
    stores = []

    def one_more(clock=None, **options):
        stores.append(PostgresStore(place.dsn, clock, schema=place.schema, **options))
        return stores[-1]

    yield one_more
    problems = stores[-1].audit() if stores else []
    for store in stores:
        store.close()
    assert problems == []


@pytest.fixture
def store(opened):
    return opened()


@pytest.fixture
def listens(postgres_server, monkeypatch):
    """A function: from now on this store hears what it is told, and does not look by itself."""
    monkeypatch.setattr(wakeups, "POLL_SEC", 1_000)

    def listen(store):
        store.listen()
        try:
            until_there_is(postgres_server, "pg_stat_activity WHERE query LIKE 'LISTEN%'")
        except AssertionError:  # it would wait for a notice until the time limit of the test
            postgres_server.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'penstock'"
            )
            raise

    return listen
