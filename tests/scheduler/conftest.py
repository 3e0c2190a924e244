from __future__ import annotations

from threading import Event

import pytest
from msgspec.structs import replace

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.types import SECOND

T0 = 1_900_000_000 * SECOND


class ManualClock:
    def __init__(self):
        self.now = T0

    def __call__(self):
        return self.now


class SchedulerKit:
    """The whole scheduler on one store, on a clock that the test moves."""

    def __init__(self, store, clock, rules):
        from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers
        from penstock.scheduler.hosts import HostLoad
        from penstock.scheduler.job_service import JobService
        from penstock.scheduler.maintenance import BudgetEnforcer, Maintenance
        from penstock.scheduler.waitlist import SubmitWaitlist

        self.store, self.clock, self.rules = store, clock, rules
        self.machine, self.pulling_workers = HostLoad(rules), PullingWorkers()
        self.dispatcher = Dispatcher(store, rules, self.machine, self.pulling_workers)
        self.maintenance, self.budgets = Maintenance(store, rules), BudgetEnforcer(store, rules)
        self.woken = Event()  # somebody waits for room
        self.waitlist = SubmitWaitlist(store, self.dispatcher.commit_submits, rules.depth, self.woken.set)
        self.job_service = JobService(store, rules, self.dispatcher, self.waitlist)

    @property
    def now(self):
        return self.clock.now

    def later(self, seconds):
        self.clock.now += int(seconds * SECOND)

    def step(self):
        self.waitlist.step(self.now)
        self.maintenance.step(self.now)
        self.budgets.step(self.now)
        return self.dispatcher.step(self.now)

    def under(self, **rules):
        """The same store and clock under other rules."""
        return type(self)(self.store, self.clock, replace(self.rules, **rules))

    def submit(self, n=1, **fields):
        receipts = self.job_service.submit([Intent(**{"addon_id": "a", "job_type": "t"} | fields)] * n)
        return [receipt.job_id for receipt in receipts]

    def state(self, job_id):
        return str(self.store.job(job_id).state)

    def kinds(self, job_id):
        return [str(event.kind) for event in self.store.events(0, 1_000, job_id)]


def memory(path, clock):
    from penstock.stores.memory.store import MemoryStore

    return MemoryStore(clock)


def sqlite(path, clock):
    from penstock.stores.sqlite.store import SqliteStore

    return SqliteStore(path / "jobs.db", clock)


STORES = {"memory": memory, "sqlite": sqlite}


def make(kind, path):
    from penstock.scheduler.rules import SchedulerRules

    clock = ManualClock()
    return SchedulerKit(
        STORES[kind](path, clock), clock, SchedulerRules(capacity=Capacity(fixed=90), ordering=Ordering())
    )


@pytest.fixture(params=STORES)
def kit(request, tmp_path):
    kit = make(request.param, tmp_path)
    yield kit
    problems = kit.store.audit()
    kit.store.close()
    assert problems == []


@pytest.fixture(params=[*STORES, "postgres"])
def every_kit(request, tmp_path):
    """`kit`, and the same on PostgreSQL, for what must hold on all stores."""
    if request.param == "postgres":
        kit = on_postgres(request.getfixturevalue("postgres_emptied")())
    else:
        kit = make(request.param, tmp_path)
    yield kit
    problems = kit.store.audit()
    kit.store.close()
    assert problems == []


def on_postgres(place):
    from penstock.scheduler.rules import SchedulerRules
    from penstock.stores.postgres.store import PostgresStore

    clock = ManualClock()
    store = PostgresStore(place.dsn, clock, schema=place.schema)
    return SchedulerKit(store, clock, SchedulerRules(capacity=Capacity(fixed=90)))


@pytest.fixture
def works_in_memory(tmp_path):
    """For what takes so many steps that one store must be enough."""
    return make("memory", tmp_path)
