"""A submit at the depth limit that waits for room: its turn, its time, and what it costs the others."""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from threading import active_count

import pytest

from penstock.core.errors import QueueFull, Unavailable
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import SECOND
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Depth, Query
from penstock.stores.memory.store import MemoryStore
from penstock.stores.sqlite.store import SqliteStore


def job(addon_id="a", **fields):
    return Intent(addon_id=addon_id, job_type="t", **fields)


@pytest.fixture
def full(kit):
    """Room for two, both places taken."""
    kit = kit.under(depth=Depth(total=2))
    kit.ids = kit.submit(n=2)
    return kit


def waits(kit, *intents, wait_sec=10):
    kit.woken.clear()
    answer = kit.job_service.submit_soon(intents or [job()], wait_sec)
    while not answer.done() and not kit.woken.wait(0.01):
        pass
    kit.waitlist.step(kit.now)
    return answer


def make_room(kit):
    kit.job_service.cancel(kit.ids.pop())
    kit.waitlist.step(kit.now)


def test_room_that_appears_in_time_lets_it_in(full):
    answer = waits(full)
    assert not answer.done()

    make_room(full)
    [receipt] = answer.result(0)
    assert receipt.created
    assert full.state(receipt.job_id) == "QUEUED"


def test_after_its_time_it_is_refused_with_the_limit_and_when_to_come_again(full):
    answer = waits(full, wait_sec=10)
    full.later(9)
    assert full.waitlist.step(full.now) <= full.now + SECOND
    assert not answer.done()

    full.later(1)
    full.waitlist.step(full.now)
    refusal = answer.exception(0)
    assert isinstance(refusal, QueueFull)
    assert (refusal.limit, refusal.queued, refusal.retry_after_sec) == (2, 2, 5)
    assert len(full.store.find(Query())) == 2


def test_without_wait_it_is_refused_at_once(full):
    with pytest.raises(QueueFull):
        full.job_service.submit([job()])
    with pytest.raises(QueueFull):
        full.job_service.submit_soon([job()]).result(60)


def test_who_came_first_is_served_first(full):
    first, second = waits(full), waits(full)
    make_room(full)

    assert (first.done(), second.done()) == (True, False)


def test_a_newcomer_does_not_go_past_who_waits(full):
    bulk = waits(full, job(), job())
    make_room(full)
    with pytest.raises(QueueFull):
        full.job_service.submit([job()])
    behind = waits(full)

    assert (bulk.done(), behind.done()) == (False, False)
    make_room(full)
    assert (bulk.done(), behind.done()) == (True, False)


def test_who_waits_for_room_in_an_addon_holds_up_nobody_of_another(kit):
    kit = kit.under(depth=Depth(per_addon=1))
    kit.ids = kit.submit()
    mine = waits(kit)
    other = kit.job_service.submit([job("b")])
    also = waits(kit, job("c"))

    assert other[0].created
    assert (mine.done(), also.done()) == (False, True)


def test_one_that_gave_up_leaves_its_place_to_the_next(full):
    first, second = waits(full), waits(full)
    assert first.cancel()
    make_room(full)

    assert second.done()
    assert len(full.store.find(Query())) == 3


def test_a_key_that_was_used_is_answered_even_while_others_wait(kit):
    kit = kit.under(depth=Depth(total=1))
    [known] = kit.job_service.submit([job(idempotency_key="k")])
    waits(kit)

    assert kit.job_service.submit([job(idempotency_key="k")])[0].job_id == known.job_id
    assert waits(kit, job(idempotency_key="k")).result(0)[0].job_id == known.job_id


def test_a_bulk_that_could_never_fit_does_not_wait(full):
    assert isinstance(waits(full, job(), job(), job()).exception(0), QueueFull)


def test_bad_input_is_refused_before_it_waits(full):
    with pytest.raises(ValueError, match="priority"):
        full.job_service.submit_soon([job(priority=0)], 10)


def test_a_requeue_may_take_the_room_and_the_waiter_keeps_its_place(full):
    full.step()
    full.submit(n=2)
    first, second = waits(full), waits(full)
    for dispatch in full.job_service.dispatchable():
        full.job_service.lease(dispatch.job_id)
    for dispatch in full.store.live():
        full.job_service.release(dispatch.dispatch_id)
    full.waitlist.step(full.now)
    assert not first.done()

    for found in full.store.find(Query())[:3]:
        full.job_service.cancel(found.job_id)
    full.waitlist.step(full.now)
    assert (first.done(), second.done()) == (True, False)


# for real: threads, an event loop, another process's view of the same file

RULES = SchedulerRules(capacity=Capacity(fixed=90), depth=Depth(total=1))


@pytest.fixture
def service():
    service = SchedulerService(MemoryStore(SteadyClock()), RULES)
    yield service
    service.stop()


@pytest.mark.parametrize("dispatches", [True, False])
def test_many_wait_without_a_thread_for_any_of_them(service, dispatches):
    if dispatches:
        service.start()
    service.job_service.pause()
    service.job_service.submit([job()])
    before = active_count()
    answers = [service.job_service.submit_soon([job()], 30) for _ in range(50)]
    threads = active_count() - before
    while pending := [answer for answer in answers if not answer.done()]:
        for found in service.store.find(Query(states=["QUEUED"])):
            service.job_service.cancel(found.job_id)
        wait(pending, 5, "FIRST_COMPLETED")

    assert threads <= 1
    assert len({answer.result()[0].job_id for answer in answers}) == 50


async def test_an_event_loop_waits_for_room_without_blocking(service):
    service.start()
    service.job_service.pause()
    [held] = service.job_service.submit([job()])
    waiting = asyncio.ensure_future(asyncio.wrap_future(service.job_service.submit_soon([job()], 30)))
    await asyncio.sleep(0.05)
    assert not waiting.done()

    service.job_service.cancel(held.job_id)
    async with asyncio.timeout(60):
        assert (await waiting)[0].created


def test_a_house_that_stops_tells_who_waits(service):
    service.start()
    service.job_service.pause()
    service.job_service.submit([job()])
    answer = service.job_service.submit_soon([job()], 600)
    service.stop()

    assert isinstance(answer.exception(60), Unavailable)


def test_a_process_that_does_not_dispatch_is_woken_by_the_one_that_does(tmp_path):
    here, there = (SqliteStore(tmp_path / "jobs.db", SteadyClock()) for _ in range(2))
    dispatching = SchedulerService(here, RULES).start()
    dispatching.job_service.pause()
    submitting = SchedulerService(there, RULES)
    [held] = submitting.job_service.submit([job()])
    answer = submitting.job_service.submit_soon([job()], 60)
    dispatching.job_service.cancel(held.job_id)
    [receipt] = answer.result(60)
    submitting.stop()
    dispatching.stop()
    there.close()
    here.close()

    assert receipt.created
