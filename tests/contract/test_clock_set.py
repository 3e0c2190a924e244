"""
The wall clock is set by hours while jobs wait: spans of ours (leases, delays of retries, how long a job has waited) move with it, moments that a
user gave (earliest start, deadline) stay where the user put them.
"""

from __future__ import annotations

import pytest

from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.types import HOUR, SECOND
from penstock.stores.api import Shift, committed

from .conftest import OF_ONE_HOST

pytestmark = OF_ONE_HOST
JUMPS = pytest.mark.parametrize("by", [-3 * HOUR, 3 * HOUR])


def set_clock(yard, by):
    yard.clock.now += by
    committed(yard.store, Shift(by))


def started(yard):
    return [dispatch.job_id for dispatch in yard.tick(lease=True)]


@JUMPS
def test_a_retry_is_due_as_many_seconds_later_as_before(yard, by):
    job, dispatch = yard.start(retry_delays_sec=(6,))
    yard.end(dispatch, EndReason.JOB_ERROR, error="no")
    set_clock(yard, by)
    due = yard.store.job(job.job_id)

    assert due.not_before == due.ready_at == yard.store.alarm() == yard.now + 6 * SECOND
    assert started(yard) == []
    yard.later(6)
    assert started(yard) == [job.job_id]


@JUMPS
def test_an_earliest_start_that_a_user_gave_stays(yard, by):
    moment = yard.now + 5 * HOUR
    [job_id] = yard.submit(earliest_start_at=moment)
    set_clock(yard, by)
    job = yard.store.job(job_id)

    assert (job.intent.earliest_start_at, job.ready_at) == (moment, moment)
    yard.clock.now = moment - 1
    assert started(yard) == []
    yard.clock.now = moment
    assert started(yard) == [job_id]


def test_an_earliest_start_that_lies_ahead_again_is_waited_for(yard):
    moment = yard.now + 60 * SECOND
    [job_id] = yard.submit(earliest_start_at=moment)
    yard.later(120)
    yard.tick(capacity=0)  # its time has come
    set_clock(yard, -HOUR)

    assert started(yard) == []
    yard.clock.now = moment
    assert started(yard) == [job_id]


def test_the_later_of_a_retry_and_an_earliest_start_counts(yard):
    job, dispatch = yard.start(retry_delays_sec=(600,))
    yard.end(dispatch, EndReason.JOB_ERROR, error="no")
    set_clock(yard, HOUR)
    after = yard.store.job(job.job_id)

    assert after.next_earliest_start_at == after.ready_at == yard.now + 600 * SECOND


@JUMPS
def test_the_order_of_jobs_stays_and_new_ones_come_behind(yard, by):
    old = yard.submit()
    yard.later(1)
    old += yard.submit()
    set_clock(yard, by)
    yard.later(1)
    new = yard.submit()

    assert [yard.tick(lease=True, limit=1)[0].job_id for _ in range(3)] == old + new


@JUMPS
def test_a_job_that_is_put_back_without_a_delay_may_start_at_once(yard, by):
    job, dispatch = yard.start(retry_delays_sec=(6,))
    yard.end(dispatch, EndReason.JOB_ERROR, error="no")
    yard.later(6)
    [again] = yard.tick(lease=True)
    set_clock(yard, by)
    yard.end(yard.store.dispatch(again.dispatch_id), EndReason.GRACEFUL_SHUTDOWN)

    assert yard.store.job(job.job_id).ready_at <= yard.now
    assert started(yard) == [job.job_id]


@JUMPS
def test_a_run_was_active_for_as_long_as_it_ran(yard, by):
    job, dispatch = yard.start()
    yard.later(7)
    set_clock(yard, by)
    yard.later(3)
    yard.end(yard.store.dispatch(dispatch.dispatch_id))

    assert yard.store.job(job.job_id).active == 10 * SECOND


@JUMPS
def test_a_deadline_stays_and_a_job_is_urgent_by_it(yard, by):
    deadline = yard.now + 30 * HOUR
    [job_id] = yard.submit(deadline_at=deadline, time_sensitive=True, expected_duration_sec=60)
    set_clock(yard, by)

    assert yard.store.job(job_id).intent.deadline_at == deadline
    yard.clock.now = deadline
    assert [item.job.job_id for item in yard.store.overdue(10)] == [job_id]
