"""The learner: what it reads from the trail, keeps in the store, and shares between hosts."""

from __future__ import annotations

import pytest

from penstock.core.jobs.learning import Prediction, decode
from penstock.core.jobs.types import SECOND, EndReason
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.learning import EVERY, MOST_EVENTS, MOST_OPEN, SAMPLE_JOBS, Learner
from penstock.scheduler.service import SchedulerService


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
    assert (stats["a", "t", ""].attempts, stats["a", "t", ""].arrivals_per_hour > 0) == (6, True)


def test_what_was_learned_outlives_the_scheduler(every_kit):
    kit = every_kit
    ran(kit, 5)
    Learner(kit.store).step(kit.now)
    ran(kit, 5)
    successor = Learner(kit.store)
    before = stats_of(successor)["a", "t", ""].attempts
    successor.step(kit.now)

    assert before == 1
    assert stats_of(successor)["a", "t", ""].attempts == 2


def test_two_hosts_learn_from_each_event_once(every_kit):
    kit, one, two = every_kit, Learner(every_kit.store), Learner(every_kit.store)
    for _ in range(5):
        ran(kit, 3)
        for learner in (one, two):
            learner.changed.set()
            learner.step(kit.now)
        kit.later(10)

    assert stats_of(one)["a", "t", ""].attempts == stats_of(two)["a", "t", ""].attempts == 5


def test_a_host_that_was_overtaken_while_it_learned_drops_what_it_learned(kit):
    [job_id] = kit.submit()
    slow, fast = Learner(kit.store), Learner(kit.store)
    slow.saw_peak(job_id, 1_000_000)
    events = kit.store.events

    def overtaken(*args):
        kit.store.events = events
        page = events(*args)
        fast.step(kit.now)
        return page

    kit.store.events = overtaken
    slow.step(kit.now)
    slow.step(kit.now)

    record = decode(kit.store.learned().records["a t"])
    assert kit.store.learned_upto() == kit.store.newest()
    assert (record.memory.count, record.arrivals.jobs) == (1, 1.0)


def test_another_host_goes_on_when_the_learning_one_stops(kit):
    first, second = Learner(kit.store), Learner(kit.store)
    second.step(kit.now)
    ran(kit, 3)
    first.changed.set()
    first.step(kit.now)
    second.changed.set()
    second.step(kit.now)  # sees that the first one reads
    ran(kit, 3)
    second.changed.set()
    second.step(kit.now)

    assert stats_of(second)["a", "t", ""].attempts == 2


def test_a_flood_is_learned_from_its_newest_part(kit):
    learner = Learner(kit.store)
    learner.step(kit.now)
    for _ in range(20):
        kit.submit(3 * MOST_EVENTS // 20)
        kit.later(3)
    learner.changed.set()
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
    learner.changed.set()
    learner.step(kit.now + 2 * EVERY)
    learner.changed.set()
    learner.step(kit.now + 4 * EVERY)

    assert before < kit.store.learned_upto() < 10_000


# predictions and their scores


def predicted(job_id, made_at, low_sec, middle_sec, high_sec, fence=0):
    moments = [made_at + round(sec * SECOND) for sec in (low_sec, middle_sec, high_sec)]
    return Prediction(job_id, fence, "a t", made_at, *moments)


def stepped(learner, kit):
    learner.changed.set()
    learner.step(kit.now)


def test_a_prediction_is_scored_when_its_job_starts(every_kit):
    kit, learner = every_kit, Learner(every_kit.store)
    [inside, outside] = kit.submit(2)
    learner.predicted(predicted(inside, kit.now, 5, 8, 12))
    learner.predicted(predicted(outside, kit.now, 1, 2, 3))
    stepped(learner, kit)
    waiting = stats_of(learner)["a", "t", ""]
    kit.later(10)
    kit.job_service.claim(WorkerKinds(), 2, "w")
    stepped(learner, kit)

    stats = stats_of(learner)["a", "t", ""]
    assert (waiting.predictions, waiting.coverage) == (0, None)
    assert (stats.predictions, stats.coverage) == (2, pytest.approx(0.5, abs=0.01))
    assert 1.8 <= stats.error_sec <= 8.5
    assert [name for name in kit.store.learned().records if name.startswith("?")] == []


def test_predictions_outlive_the_scheduler_and_pass_to_other_hosts(every_kit):
    kit, learner = every_kit, Learner(every_kit.store)
    [job_id] = kit.submit()
    learner.predicted(predicted(job_id, kit.now, 5, 8, 12))
    stepped(learner, kit)
    kit.later(10)
    kit.job_service.claim(WorkerKinds(), 1, "w")
    successor = Learner(kit.store)
    stepped(successor, kit)

    assert stats_of(successor)["a", "t", ""].predictions == 1


def test_a_job_that_started_before_its_prediction_was_stored_is_scored_all_the_same(kit):
    [job_id] = kit.submit()
    one, other = Learner(kit.store), Learner(kit.store)
    one.predicted(predicted(job_id, kit.now, 0, 1, 2))
    kit.later(1)
    kit.job_service.claim(WorkerKinds(), 1, "w")
    stepped(other, kit)  # has read the start
    stepped(one, kit)

    assert stats_of(one)["a", "t", ""].predictions == 1


def test_the_first_prediction_of_an_attempt_counts(kit):
    learner = Learner(kit.store)
    [job_id] = kit.submit()
    learner.predicted(predicted(job_id, kit.now, 5, 8, 12))
    stepped(learner, kit)
    kit.later(9)
    learner.predicted(predicted(job_id, kit.now, 0, 1, 1.5))
    kit.later(1)
    kit.job_service.claim(WorkerKinds(), 1, "w")
    stepped(learner, kit)

    stats = stats_of(learner)["a", "t", ""]
    assert (stats.predictions, stats.error_sec) == (1, pytest.approx(2, rel=0.1))


def test_a_job_that_never_starts_leaves_no_score(kit):
    learner = Learner(kit.store)
    [job_id] = kit.submit()
    learner.predicted(predicted(job_id, kit.now, 5, 8, 12))
    stepped(learner, kit)
    before = [*kit.store.learned().records]
    kit.job_service.cancel(job_id)
    stepped(learner, kit)

    assert before == [f"?{job_id}", "a t"]
    assert [*kit.store.learned().records] == ["a t"]
    assert stats_of(learner)["a", "t", ""].predictions == 0


def test_open_predictions_are_bounded(works_in_memory):
    kit = works_in_memory
    learner = Learner(kit.store)
    for _ in range(3):
        for job_id in kit.submit(MOST_OPEN):
            learner.predicted(predicted(job_id, kit.now, 5, 8, 12))
        stepped(learner, kit)

    assert sum(name.startswith("?") for name in kit.store.learned().records) == MOST_OPEN


def test_some_jobs_that_wait_are_predicted_and_scored_unasked(kit):
    service = SchedulerService(kit.store, kit.rules)
    learner = service.learner
    for _ in range(5):
        ran(kit, 5)
    stepped(learner, kit)
    kit.submit(60)
    kit.step()
    kit.later(60)
    stepped(learner, kit)  # samples
    stepped(learner, kit)  # stores what it sampled

    open_ones = [name for name in kit.store.learned().records if name.startswith("?")]
    assert 0 < len(open_ones) <= SAMPLE_JOBS


def test_explain_and_a_submit_with_a_deadline_are_predictions(kit):
    for _ in range(5):
        ran(kit, 5)
    kit.job_service.learner.step(kit.now)
    kit.submit(9)
    kit.job_service.claim(WorkerKinds(), 9, "w")
    with kit.pulling_workers.waiting("w", WorkerKinds(), 10):
        [explained] = kit.submit()
        kit.job_service.explain(explained)
        [due] = kit.submit(deadline_at=kit.now + 3_600 * SECOND)
    kit.job_service.learner.step(kit.now)

    names = {name for name in kit.store.learned().records if name.startswith("?")}
    assert names == {f"?{explained}", f"?{due}"}
