"""A claim looks for reservations where there can be some, and nowhere else: the look costs as much as the claim."""

from __future__ import annotations

import pytest

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import HOUR, SECOND, AddonId
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.memory.store import MemoryStore

A = WorkerKinds(AddonId("a"))


@pytest.fixture
def looks(kit, monkeypatch):
    """How often the store was asked for what is in flight, by the one who alone dispatches."""
    kit.dispatcher.begin()
    seen, live = [], kit.store.live

    def counted(**asked):
        seen.append(asked)
        return live(**asked)

    monkeypatch.setattr(kit.store, "live", counted)
    return seen


def test_who_alone_dispatches_does_not_look_where_nothing_was_reserved(kit, looks):
    kit.submit(3)
    [claimed] = kit.job_service.claim(A)
    kit.job_service.end(claimed.dispatch.dispatch_id)
    kit.job_service.exchange([], A)

    assert looks == []


def test_what_was_reserved_is_taken_up(kit, looks):
    [job_id] = kit.submit()
    kit.step()

    assert [c.job.job_id for c in kit.job_service.claim(A)] == [job_id]


def test_what_a_claim_reserved_because_it_stood_before_its_own_is_taken_up(kit, looks):
    [first] = kit.submit(addon_id="b", priority=90)
    kit.submit()
    kit.job_service.claim(A)

    assert [c.job.job_id for c in kit.job_service.claim(WorkerKinds(AddonId("b")))] == [first]


def test_nobody_looks_for_a_reservation_that_it_could_not_take(kit, looks):
    kit.submit()
    kit.step()
    kit.job_service.claim(WorkerKinds(AddonId("b")))
    kit.job_service.claim(WorkerKinds(AddonId("a"), frozenset({"other"})))

    assert looks == []


def test_looking_ends_when_the_time_of_the_last_reservation_is_over(kit, looks):
    kit.submit()
    kit.step()
    kit.later(31)
    kit.maintenance.step(kit.now)
    kit.job_service.claim(A)

    assert looks == []


def test_what_was_reserved_before_a_restart_is_taken_up_after_it(kit):
    [job_id] = kit.submit()
    kit.step()
    again = kit.under()
    again.dispatcher.begin()

    assert [c.job.job_id for c in again.job_service.claim(A)] == [job_id]


def test_who_does_not_dispatch_finds_what_another_process_reserved(kit):
    [job_id] = kit.submit()
    elsewhere = kit.under()
    kit.step()

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
