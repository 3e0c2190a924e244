"""A claim looks for reservations where there can be some, and nowhere else: the look costs as much as the claim."""

from __future__ import annotations

import pytest

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import HOUR, SECOND, AddonId
from penstock.scheduler.clock import SteadyClock
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.memory.store import MemoryStore

A = WorkerKinds(AddonId("a"))


@pytest.fixture
def looks(works, monkeypatch):
    """How often the store was asked for what is in flight, by the one who alone dispatches."""
    works.dispatcher.begin()
    seen, live = [], works.store.live

    def counted(**asked):
        seen.append(asked)
        return live(**asked)

    monkeypatch.setattr(works.store, "live", counted)
    return seen


def test_who_alone_dispatches_does_not_look_where_nothing_was_reserved(works, looks):
    works.submit(3)
    [claimed] = works.job_service.claim(A)
    works.job_service.complete(claimed.dispatch.dispatch_id)
    works.job_service.exchange([], A)

    assert looks == []


def test_what_was_reserved_is_taken_up(works, looks):
    [job_id] = works.submit()
    works.step()

    assert [c.job.job_id for c in works.job_service.claim(A)] == [job_id]


def test_what_a_claim_reserved_because_it_stood_before_its_own_is_taken_up(works, looks):
    [first] = works.submit(addon_id="b", priority=90)
    works.submit()
    works.job_service.claim(A)

    assert [c.job.job_id for c in works.job_service.claim(WorkerKinds(AddonId("b")))] == [first]


def test_nobody_looks_for_a_reservation_that_it_could_not_take(works, looks):
    works.submit()
    works.step()
    works.job_service.claim(WorkerKinds(AddonId("b")))
    works.job_service.claim(WorkerKinds(AddonId("a"), frozenset({"other"})))

    assert looks == []


def test_looking_ends_when_the_time_of_the_last_reservation_is_over(works, looks):
    works.submit()
    works.step()
    works.later(31)
    works.maintenance.step(works.now)
    works.job_service.claim(A)

    assert looks == []


def test_what_was_reserved_before_a_restart_is_taken_up_after_it(works):
    [job_id] = works.submit()
    works.step()
    again = works.under()
    again.dispatcher.begin()

    assert [c.job.job_id for c in again.job_service.claim(A)] == [job_id]


def test_who_does_not_dispatch_finds_what_another_process_reserved(works):
    [job_id] = works.submit()
    elsewhere = works.under()
    works.step()

    assert [c.job.job_id for c in elsewhere.job_service.claim(A)] == [job_id]


def test_a_clock_that_is_set_forward_hides_no_reservation():
    wall, steady = [1_900_000_000 * SECOND], [0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])
    store = MemoryStore(clock)
    service = SchedulerService(store, SchedulerRules(capacity=Capacity(fixed=90)), clock=clock)
    service.dispatcher.begin()
    [receipt] = service.job_service.submit([Intent(addon_id=AddonId("a"), job_type="t")])
    service.dispatcher.step(store.now())
    wall[0] += HOUR
    service.maintenance.step(store.now())

    assert [c.job.job_id for c in service.job_service.claim(A)] == [receipt.job_id]


def test_who_has_given_the_right_to_dispatch_away_looks_again():
    store = MemoryStore(SteadyClock())
    service = SchedulerService(store, SchedulerRules(capacity=Capacity(fixed=90))).start()
    service.stop()
    [receipt] = service.job_service.submit([Intent(addon_id=AddonId("a"), job_type="t")])
    SchedulerService(store, service.rules).dispatcher.step(store.now())

    assert [c.job.job_id for c in service.job_service.claim(A)] == [receipt.job_id]
