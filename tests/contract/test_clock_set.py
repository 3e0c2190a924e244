"""
The wall clock is set by hours while jobs wait: spans of ours (leases, delays of retries, how long a job has waited) move with it, moments that a
user gave (earliest start, deadline) stay where the user put them.
"""

from __future__ import annotations

import pytest

from penstock.core.jobs.types import HOUR, SECOND, EndReason
from penstock.stores.api import Shift, committed

from .conftest import OF_ONE_HOST

pytestmark = OF_ONE_HOST
JUMPS = pytest.mark.parametrize("by", [-3 * HOUR, 3 * HOUR])


def set_clock(kit, by):
    kit.clock.now += by
    committed(kit.store, Shift(by))


def started(kit):
    return [dispatch.job_id for dispatch in kit.tick(lease=True)]


@JUMPS
def test_a_retry_is_due_as_many_seconds_later_as_before(kit, by):
    job, dispatch = kit.start(retry_delays_sec=(6,))
    kit.end(dispatch, EndReason.JOB_ERROR, error="no")
    set_clock(kit, by)
    due = kit.store.job(job.job_id)

    assert due.not_before == due.ready_at == kit.store.alarm() == kit.now + 6 * SECOND
    assert started(kit) == []
    kit.later(6)
    assert started(kit) == [job.job_id]


@JUMPS
def test_an_earliest_start_that_a_user_gave_stays(kit, by):
    moment = kit.now + 5 * HOUR
    [job_id] = kit.submit(earliest_start_at=moment)
    set_clock(kit, by)
    job = kit.store.job(job_id)

    assert (job.intent.earliest_start_at, job.ready_at) == (moment, moment)
    kit.clock.now = moment - 1
    assert started(kit) == []
    kit.clock.now = moment
    assert started(kit) == [job_id]


def test_an_earliest_start_that_lies_ahead_again_is_waited_for(kit):
    moment = kit.now + 60 * SECOND
    [job_id] = kit.submit(earliest_start_at=moment)
    kit.later(120)
    kit.tick(capacity=0)  # its time has come
    set_clock(kit, -HOUR)

    assert started(kit) == []
    kit.clock.now = moment
    assert started(kit) == [job_id]


def test_the_later_of_a_retry_and_an_earliest_start_counts(kit):
    job, dispatch = kit.start(retry_delays_sec=(600,))
    kit.end(dispatch, EndReason.JOB_ERROR, error="no")
    set_clock(kit, HOUR)
    after = kit.store.job(job.job_id)

    assert after.next_earliest_start_at == after.ready_at == kit.now + 600 * SECOND


@JUMPS
def test_the_order_of_jobs_stays_and_new_ones_come_behind(kit, by):
    old = kit.submit()
    kit.later(1)
    old += kit.submit()
    set_clock(kit, by)
    kit.later(1)
    new = kit.submit()

    assert [kit.tick(lease=True, limit=1)[0].job_id for _ in range(3)] == old + new


@JUMPS
def test_a_job_that_is_put_back_without_a_delay_may_start_at_once(kit, by):
    job, dispatch = kit.start(retry_delays_sec=(6,))
    kit.end(dispatch, EndReason.JOB_ERROR, error="no")
    kit.later(6)
    [again] = kit.tick(lease=True)
    set_clock(kit, by)
    kit.end(kit.store.dispatch(again.dispatch_id), EndReason.GRACEFUL_SHUTDOWN)

    assert kit.store.job(job.job_id).ready_at <= kit.now
    assert started(kit) == [job.job_id]


@JUMPS
def test_a_run_was_active_for_as_long_as_it_ran(kit, by):
    job, dispatch = kit.start()
    kit.later(7)
    set_clock(kit, by)
    kit.later(3)
    kit.end(kit.store.dispatch(dispatch.dispatch_id))

    assert kit.store.job(job.job_id).active == 10 * SECOND


@JUMPS
def test_a_deadline_stays_and_a_job_is_urgent_by_it(kit, by):
    deadline = kit.now + 30 * HOUR
    [job_id] = kit.submit(deadline_at=deadline, time_sensitive=True, expected_duration_sec=60)
    set_clock(kit, by)

    assert kit.store.job(job_id).intent.deadline_at == deadline
    kit.clock.now = deadline
    assert [item.job.job_id for item in kit.store.overdue(10)] == [job_id]
