"""The forecaster: ranges from what the store has and the learner knows, on every store and over hosts."""

from __future__ import annotations

import pytest

from penstock.core.jobs.learning import Prediction
from penstock.core.jobs.load import Capacity, Host, QuietState
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, EndReason
from penstock.core.jobs.workers import WorkerKinds
from penstock.stores.api import RegisterHost, committed

ANY = WorkerKinds(own=True)


def taught(kit, *durations_sec, times=12, **fields):
    """Jobs of this type ran before, one after the other."""
    kit = kit.under(capacity=Capacity(fixed=30))
    kit.job_service.forecaster.budget_sec = None
    for number in range(times):
        kit.submit(**fields)
        [claimed] = kit.job_service.claim(ANY, 1, "w")
        kit.later(durations_sec[number % len(durations_sec)])
        kit.job_service.end(claimed.dispatch.dispatch_id, EndReason.COMPLETED)
    kit.job_service.learner.step(kit.now)
    return kit


def busy(kit, n=3):
    """As many runs as fit, and a worker that waits for more."""
    kit.submit(n)
    claimed = kit.job_service.claim(ANY, n, "w")
    assert len(claimed) == n
    return kit.pulling_workers.waiting("w", ANY, 10)


def range_sec(kit, job_id):
    one = kit.job_service.forecaster.ranges([job_id])[job_id]
    return [(moment - kit.now) / SECOND for moment in (one.low_at, one.middle_at, one.high_at)]


def test_explain_tells_a_range_from_what_was_learned(every_kit):
    kit = taught(every_kit, 8, 10, 12)
    with busy(kit):
        *_, last = kit.submit(4)
        said = kit.job_service.explain(last)
        low, middle, high = range_sec(kit, last)

    assert 10 < low <= middle <= high < 60
    assert f"Likely start in {int(low)} to {int(high)} s." in said.text
    assert said.likely_start_low_at == kit.now + round(low * SECOND)
    assert said.likely_start_at == kit.now + round(middle * SECOND)
    assert said.likely_start_high_at == kit.now + round(high * SECOND)


def test_while_nothing_was_learned_no_range_is_told(every_kit):
    kit = every_kit.under(capacity=Capacity(fixed=30))
    with busy(kit):
        [job_id] = kit.submit()
        said = kit.job_service.explain(job_id)

    assert kit.job_service.forecaster.ranges([job_id]) == {}
    assert (said.likely_start_at, said.likely_start_low_at) == (None, None)


def test_another_host_that_lives_makes_waits_shorter(every_kit):
    kit = taught(every_kit, 10)
    with busy(kit):
        *_, last = kit.submit(8)
        alone = range_sec(kit, last)
        committed(
            kit.store,
            RegisterHost(
                Host(
                    host="other", instance="x", capacity=60, quiet=QuietState.QUIET, labels=(), version="",
                    url="", started_at=kit.now, seen_at=kit.now, until=kit.now + 30 * SECOND,
                )
            ),
        )  # fmt: skip
        together = range_sec(kit, last)

    assert together[1] < 0.7 * alone[1]


def test_where_all_workers_are_busy_no_more_run_at_once_than_now(kit):
    kit = taught(kit, 10)
    kit.submit(1)
    kit.job_service.claim(ANY, 1, "w")  # the worker has one place, 20 units stay free
    kit.later(5)
    *_, last = kit.submit(3)

    assert range_sec(kit, last)[1] == pytest.approx(25, abs=4)


def test_sizes_count_in_the_queue_and_among_the_runs(kit):
    small, big = {"tags": ("size:small",)}, {"tags": ("size:big",)}
    taught(kit, 1, **small)
    kit = taught(kit, 25, **big)
    with busy(kit):
        *_, behind_big = kit.submit(3, **big)
        *_, last = kit.submit(1, **small)
        after_big = range_sec(kit, last)[1]

    assert after_big > 20
    assert behind_big != last


def test_a_job_that_is_not_ready_has_no_range(kit):
    kit = taught(kit, 10)
    with busy(kit):
        [later] = kit.submit(earliest_start_at=kit.now + 3_600 * SECOND)

    assert kit.job_service.forecaster.ranges([later]) == {}
    assert kit.job_service.explain(later).likely_start_at == kit.now + 3_600 * SECOND


def test_a_sample_of_those_that_wait_is_forecast_at_once(kit):
    kit = taught(kit, 10)
    with busy(kit):
        waiting = kit.submit(40)
        ranges = kit.job_service.forecaster.ranges(most=10)

    assert len(ranges) == 10
    middles = [ranges[job_id].middle_at for job_id in waiting if job_id in ranges]
    assert middles == sorted(middles)


def test_ranges_grow_where_past_starts_lay_outside_of_them(every_kit):
    """Something that plays leave out holds these jobs up: they start long after the ranges that were told."""
    kit = taught(every_kit, 8, 10, 12)
    learner = kit.job_service.learner
    with busy(kit):
        *late, last = kit.submit(41)
        before = range_sec(kit, last)
        middle, high = kit.now + 10 * SECOND, kit.now + 12 * SECOND
        for job_id in late:
            learner.predicted(Prediction(job_id, 0, "a t", kit.now, kit.now, middle, high, kit.now, high))
        kit.later(25)
        while kit.store.job(last).state is JobState.QUEUED:
            for run in kit.store.live():
                kit.job_service.end(run.dispatch_id, EndReason.COMPLETED)
            kit.job_service.claim(ANY, 3, "w")
        learner.changed.set()
        learner.step(kit.now)
        *_, last = kit.submit(41)
        made = []
        learner.predicted = made.append
        after = range_sec(kit, last)
        kit.job_service.forecaster.predict([last])
    [played] = made

    assert after[2] - after[1] > 2 * (before[2] - before[1])
    assert played.high_at - played.middle_at > 2 * (played.played_high_at - played.middle_at)
