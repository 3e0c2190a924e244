"""
One suite of promises for every store. A further store needs one line in STORES.

`kit` is a store with a clock that the test moves, and a method for each thing that a scheduler does with a store.
"""

from __future__ import annotations

import pytest

from penstock.core.jobs import changes
from penstock.core.jobs.admission import AdmissionLimits, Caps, Conditions
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, run_round
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import Admit, Apply, Depth, Query, Renew, Submit, Terms, committed

T0 = 1_900_000_000 * SECOND
NO_LIMIT = Depth()
RULES = {"schedules": Schedules(), "ordering": Ordering()}


class ManualClock:
    """A clock that moves only when the test moves it."""

    def __init__(self):
        self.now = T0

    def __call__(self):
        return self.now


class StoreKit:
    rules = RULES

    def __init__(self, store, clock):
        self.store, self.clock = store, clock

    @property
    def now(self):
        return self.clock.now

    def later(self, seconds):
        self.clock.now += int(seconds * SECOND)

    def submit(self, n=1, depth=NO_LIMIT, **fields):
        intents = [Intent(**{"addon_id": "a", "job_type": "t"} | fields)] * n
        return [receipt.job_id for receipt in committed(self.store, Submit(intents, depth))]

    def tick(self, capacity=90, **fields):
        return [grant.dispatch for grant in committed(self.store, self.round(capacity, **fields))]

    def round(
        self,
        capacity=90,
        *,
        lease=False,
        caps=None,
        host="here",
        limit=None,
        worker="",
        labels=(),
        conditions=None,
    ):
        offer = Placement.LEASE if lease else Placement.RESERVE

        def decide(admission_view):
            limits = AdmissionLimits(caps or Caps())
            present = conditions or Conditions(capacity, labels=frozenset(labels))
            return run_round(
                RoundInputs(admission_view, present, limits, Ordering(), lambda _: offer),
                most_leases=limit,
            )

        return Admit(host, decide, Terms(worker=worker))

    def start(self, **fields):
        """A job that runs: its job and its dispatch."""
        [job_id] = self.submit(**fields)
        dispatch = next(d for d in self.tick(lease=True) if d.job_id == job_id)
        return self.store.job(job_id), dispatch

    def end(self, dispatch, how=EndReason.COMPLETED, **more):
        job = self.store.job(dispatch.job_id)
        return committed(self.store, Apply([changes.end(job, dispatch, how, self.now, **RULES, **more)]))[0]

    def beat(self, dispatch, seconds=30, **more):
        beat = changes.Renewal(
            dispatch_id=dispatch.dispatch_id, expires_at=self.now + seconds * SECOND, **more
        )
        return committed(self.store, Renew([beat]))[0]

    def state(self, job_id):
        return str(self.store.job(job_id).state)

    def kinds(self, job_id):
        return [str(event.kind) for event in self.store.events(0, 1_000, job_id)]

    def everything(self):
        """All that a store knows, to be compared before and after."""
        store = self.store
        jobs = store.find(Query(limit=10_000))
        attempts = [attempt for job in jobs for attempt in store.attempts(job.job_id)]
        ledger = store.ledger("here")
        return (
            jobs,
            attempts,
            store.live(),
            store.events(0, 10_000),
            (ledger.units, ledger.counts),
            store.addons(),
        )


def memory(request, clock):
    from penstock.stores.memory.store import MemoryStore

    return MemoryStore(clock)


def sqlite(request, clock):
    from penstock.stores.sqlite.store import SqliteStore

    return SqliteStore(request.getfixturevalue("tmp_path") / "jobs.db", clock)


def postgres(request, clock):
    place = request.getfixturevalue("postgres_emptied")()
    from penstock.stores.postgres.store import PostgresStore

    return PostgresStore(place.dsn, clock, schema=place.schema)


STORES = {"memory": memory, "sqlite": sqlite, "postgres": postgres}


#: Memory and a file belong to one dispatcher, whose clock they go by. A server has its own clock, and serves many.
OF_ONE_HOST = pytest.mark.parametrize("kit", ["memory", "sqlite"], indirect=True)


@pytest.fixture(params=STORES)
def kit(request):
    clock = ManualClock()
    store = STORES[request.param](request, clock)
    yield StoreKit(store, clock)
    problems = store.audit()
    store.close()
    assert problems == []
