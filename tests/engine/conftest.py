from __future__ import annotations

from dataclasses import replace
from threading import Event

import pytest

from penstock.core.intent import Intent
from penstock.core.order import Ordering
from penstock.core.quiet import Capacity
from penstock.core.words import SECOND

T0 = 1_900_000_000 * SECOND


class Hands:
    def __init__(self):
        self.now = T0

    def __call__(self):
        return self.now


class Works:
    """The whole scheduler on one store, on a clock that the test moves."""

    def __init__(self, store, clock, rules):
        from penstock.engine.desk import Desk
        from penstock.engine.dispatcher import Dispatcher, Fetchers
        from penstock.engine.keeper import Keeper
        from penstock.engine.machine import Machine
        from penstock.engine.purse import Purse
        from penstock.engine.room import Room

        self.store, self.clock, self.rules = store, clock, rules
        self.machine, self.fetchers = Machine(rules), Fetchers()
        self.dispatcher = Dispatcher(store, rules, self.machine, self.fetchers)
        self.keeper, self.purse = Keeper(store, rules), Purse(store, rules)
        self.woken = Event()  # somebody waits for room
        self.room = Room(store, rules.depth, self.woken.set)
        self.desk = Desk(store, rules, self.machine, self.dispatcher, self.room)

    @property
    def now(self):
        return self.clock.now

    def later(self, seconds):
        self.clock.now += int(seconds * SECOND)

    def step(self):
        self.room.step(self.now)
        self.keeper.step(self.now)
        self.purse.step(self.now)
        return self.dispatcher.step(self.now)

    def under(self, **rules):
        """The same store and clock under other rules."""
        return type(self)(self.store, self.clock, replace(self.rules, **rules))

    def submit(self, n=1, **fields):
        receipts = self.desk.submit([Intent(**{"addon_id": "a", "job_type": "t"} | fields)] * n)
        return [receipt.job_id for receipt in receipts]

    def state(self, job_id):
        return str(self.store.job(job_id).state)

    def kinds(self, job_id):
        return [str(event.kind) for event in self.store.events(0, 1_000, job_id)]


def memory(path, clock):
    from penstock.stores.memory import MemoryStore

    return MemoryStore(clock)


def sqlite(path, clock):
    from penstock.stores.sqlite import SqliteStore

    return SqliteStore(path / "jobs.db", clock)


STORES = {"memory": memory, "sqlite": sqlite}


def make(kind, path):
    from penstock.engine.rules import Rules

    clock = Hands()
    return Works(STORES[kind](path, clock), clock, Rules(capacity=Capacity(fixed=90), ordering=Ordering()))


@pytest.fixture(params=STORES)
def works(request, tmp_path):
    works = make(request.param, tmp_path)
    yield works
    problems = works.store.audit()
    works.store.close()
    assert problems == []


@pytest.fixture
def works_in_memory(tmp_path):
    """For what takes so many steps that one store must be enough."""
    return make("memory", tmp_path)
