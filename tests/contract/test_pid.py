"""Which process runs a job: told by its worker, kept by every store."""

from __future__ import annotations

from penstock.core.jobs.end_rules import EndReason
from penstock.stores.api import Query


def test_a_job_shows_the_process_that_its_worker_told(yard):
    job, dispatch = yard.start()
    before = job.pid
    yard.beat(dispatch, pid=4711)
    yard.beat(dispatch)  # a heartbeat without one takes nothing away

    assert (before, yard.store.job(job.job_id).pid) == (None, 4711)
    assert [found.pid for found in yard.store.find(Query())] == [4711]
    assert [lease.pid for lease in yard.store.live()] == [4711]


def test_an_attempt_keeps_its_process_when_it_is_done(yard):
    job, dispatch = yard.start()
    yard.beat(dispatch, pid=4711)
    yard.end(dispatch, result="1")

    assert yard.store.job(job.job_id).pid is None
    assert [attempt.pid for attempt in yard.store.attempts(job.job_id)] == [4711]


def test_the_next_attempt_has_a_process_of_its_own(yard):
    job, dispatch = yard.start(retry_delays_sec=(0,))
    yard.beat(dispatch, pid=4711)
    yard.end(dispatch, EndReason.JOB_ERROR, error="no")
    between = yard.store.job(job.job_id).pid
    [again] = yard.tick(lease=True)
    started = yard.store.job(job.job_id).pid
    yard.beat(again, pid=4712)

    assert (between, started, yard.store.job(job.job_id).pid) == (None, None, 4712)
    assert [attempt.pid for attempt in yard.store.attempts(job.job_id)] == [4711, 4712]
