"""Which process runs a job: told by its worker, kept by every store."""

from __future__ import annotations

from penstock.core.jobs.types import EndReason
from penstock.stores.api import Query


def test_a_job_shows_the_process_that_its_worker_told(kit):
    job, dispatch = kit.start()
    before = job.pid
    kit.beat(dispatch, pid=4711)
    kit.beat(dispatch)  # a heartbeat without one takes nothing away

    assert (before, kit.store.job(job.job_id).pid) == (None, 4711)
    assert [found.pid for found in kit.store.find(Query())] == [4711]
    assert [lease.pid for lease in kit.store.live()] == [4711]


def test_an_attempt_keeps_its_process_when_it_is_done(kit):
    job, dispatch = kit.start()
    kit.beat(dispatch, pid=4711)
    kit.end(dispatch, result="1")

    assert kit.store.job(job.job_id).pid is None
    assert [attempt.pid for attempt in kit.store.attempts(job.job_id)] == [4711]


def test_the_next_attempt_has_a_process_of_its_own(kit):
    job, dispatch = kit.start(retry_delays_sec=(0,))
    kit.beat(dispatch, pid=4711)
    kit.end(dispatch, EndReason.JOB_ERROR, error="no")
    between = kit.store.job(job.job_id).pid
    [again] = kit.tick(lease=True)
    started = kit.store.job(job.job_id).pid
    kit.beat(again, pid=4712)

    assert (between, started, kit.store.job(job.job_id).pid) == (None, None, 4712)
    assert [attempt.pid for attempt in kit.store.attempts(job.job_id)] == [4711, 4712]
