"""The learner: what it reads from the trail, keeps in the store, and shares between hosts."""

from __future__ import annotations

import pytest

from penstock.core.jobs.types import EndReason
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.scheduler.learning import EVERY, MOST_EVENTS, Learner


def ran(kit, duration_sec, n=1, **fields):
    kit.submit(n, **fields)
    claims = kit.job_service.claim(WorkerKinds(), n, "w")
    kit.later(duration_sec)
    for claimed in claims:
        kit.job_service.end(claimed.dispatch.dispatch_id, EndReason.COMPLETED)


def stats_of(learner):
    return {(one.addon_id, one.job_type, one.size): one for one in learner.stats()}


def test_durations_are_learned_from_the_trail(every_kit):
    kit, learner = every_kit, Learner(every_kit.store)
    for _ in range(6):
        ran(kit, 5)
        ran(kit, 20, addon_id="b", job_type="u", tags=("size:big",))
    learner.step(kit.now)

    stats = stats_of(learner)
    assert sorted(stats) == [("a", "t", ""), ("b", "u", ""), ("b", "u", "big")]
    assert stats["a", "t", ""].duration_sec == pytest.approx(5, rel=0.1)
    assert stats["b", "u", "big"].duration_sec == pytest.approx(20, rel=0.1)
    assert (stats["a", "t", ""].runs, stats["a", "t", ""].arrivals_per_hour > 0) == (6, True)


def test_what_was_learned_outlives_the_scheduler(every_kit):
    kit = every_kit
    ran(kit, 5)
    Learner(kit.store).step(kit.now)
    ran(kit, 5)
    successor = Learner(kit.store)
    before = stats_of(successor)["a", "t", ""].runs
    successor.step(kit.now)

    assert before == 1
    assert stats_of(successor)["a", "t", ""].runs == 2


def test_two_hosts_learn_from_each_event_once(every_kit):
    kit, one, two = every_kit, Learner(every_kit.store), Learner(every_kit.store)
    for _ in range(5):
        ran(kit, 3)
        for learner in (one, two):
            learner.notice()
            learner.step(kit.now)
        kit.later(10)

    assert stats_of(one)["a", "t", ""].runs == stats_of(two)["a", "t", ""].runs == 5


def test_a_host_that_was_overtaken_while_it_learned_drops_what_it_learned(kit):
    ran(kit, 3)
    slow, fast = Learner(kit.store), Learner(kit.store)
    events = kit.store.events

    def overtaken(*args):
        kit.store.events = events
        page = events(*args)
        fast.step(kit.now)
        return page

    kit.store.events = overtaken
    slow.step(kit.now)

    assert kit.store.learned_upto() == kit.store.newest()
    assert stats_of(slow)["a", "t", ""].runs == 1


def test_another_host_goes_on_when_the_learning_one_stops(kit):
    first, second = Learner(kit.store), Learner(kit.store)
    second.step(kit.now)
    ran(kit, 3)
    first.notice()
    first.step(kit.now)
    second.notice()
    second.step(kit.now)  # sees that the first one reads
    ran(kit, 3)
    second.notice()
    second.step(kit.now)

    assert stats_of(second)["a", "t", ""].runs == 2


def test_a_flood_is_learned_from_its_newest_part(kit):
    learner = Learner(kit.store)
    learner.step(kit.now)
    kit.submit(3 * MOST_EVENTS)
    kit.later(60)
    learner.notice()
    learner.step(kit.now)

    stats = stats_of(learner)["a", "t", ""]
    assert kit.store.learned_upto() == kit.store.newest()
    assert stats.arrivals_per_hour / 60 == pytest.approx(3 * MOST_EVENTS, rel=0.1)


def test_without_a_commit_nothing_is_read(kit):
    learner = Learner(kit.store)
    learner.step(kit.now)
    kit.store.newest = kit.store.events = None  # a call would raise

    assert learner.step(kit.now) == kit.now + EVERY


def test_the_peak_memory_of_a_run_is_learned_where_it_is_reported(kit):
    learner = Learner(kit.store)
    [job_id] = kit.submit()
    learner.saw_peak(job_id, 80_000_000)
    learner.saw_peak("no such job", 1)
    learner.step(kit.now)

    assert stats_of(learner)["a", "t", ""].memory_bytes == pytest.approx(80_000_000, rel=0.1)


def test_spending_is_learned(kit):
    kit.submit()
    [claimed] = kit.job_service.claim(WorkerKinds(), 1, "w")
    kit.job_service.heartbeat(claimed.dispatch.dispatch_id, spent=2_500_000)
    kit.later(1)
    kit.job_service.end(claimed.dispatch.dispatch_id, EndReason.COMPLETED)
    learner = Learner(kit.store)
    learner.step(kit.now)

    assert stats_of(learner)["a", "t", ""].spend == pytest.approx(2.5, rel=0.1)


def test_a_trail_that_went_back_is_read_from_where_it_is(works_in_memory):
    kit = works_in_memory
    learner = Learner(kit.store)
    ran(kit, 3)
    learner.step(kit.now)
    before, kit.store._learned_upto = kit.store.learned_upto(), 10_000
    ran(kit, 3)
    learner.notice()
    learner.step(kit.now + 2 * EVERY)
    learner.notice()
    learner.step(kit.now + 4 * EVERY)

    assert before < kit.store.learned_upto() < 10_000
