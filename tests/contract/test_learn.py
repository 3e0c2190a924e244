"""What is learned from the trail: kept by every store, and from each event once."""

from __future__ import annotations

from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import Learn, Learned, committed


def test_a_new_store_has_learned_nothing(kit):
    assert kit.store.learned() == Learned(0, {})
    assert kit.store.learned_upto() == 0


def test_what_was_learned_is_kept_by_name(kit):
    first = committed(kit.store, Learn(0, 10, {"a t": '{"seen_at":1}', "a u": '{"seen_at":2}'}))
    second = committed(kit.store, Learn(10, 12, {"a u": '{"seen_at":3}', "ä \n": '{"seen_at":4}'}, ["a t"]))

    assert (first, second) == (True, True)
    assert kit.store.learned() == Learned(12, {"a u": '{"seen_at":3}', "ä \n": '{"seen_at":4}'})
    assert kit.store.learned_upto() == 12


def test_an_event_is_learned_from_once(kit):
    committed(kit.store, Learn(0, 10, {"a t": '{"seen_at":1}'}))
    stale = committed(kit.store, Learn(0, 12, {"a t": '{"seen_at":9}', "a u": "{}"}, ["a t"]))

    assert stale is False
    assert kit.store.learned() == Learned(10, {"a t": '{"seen_at":1}'})


def test_learning_writes_no_event(kit):
    kit.submit()
    newest = kit.store.newest()
    committed(kit.store, Learn(0, newest, {"a t": "{}"}))

    assert kit.store.newest() == newest


def test_the_facts_of_a_job_that_waits_runs_and_is_done(kit):
    [job_id] = kit.submit(tags=("size:big", "x"), priority=70, expected_duration_sec=2.5)
    created = kit.now
    [waiting] = kit.store.observed_jobs([job_id])
    kit.later(3)
    [dispatch] = kit.tick(lease=True)
    [running] = kit.store.observed_jobs([job_id])
    kit.later(4)
    kit.beat(dispatch, spent=250_000)
    kit.end(dispatch)
    [done] = kit.store.observed_jobs([job_id, "no such job"])

    assert (waiting.created_at, waiting.fence, waiting.started_at, waiting.ended_at) == (
        created,
        0,
        None,
        None,
    )
    assert (waiting.priority, waiting.tags, waiting.size, waiting.expected_sec) == (
        70,
        ("size:big", "x"),
        "big",
        2.5,
    )
    assert waiting.admission_class == dispatch.admission_class
    assert (running.fence, running.started_at, running.ended_at) == (1, created + 3 * SECOND, None)
    assert (done.started_at, done.ended_at, done.end) == (created + 3 * SECOND, kit.now, EndReason.COMPLETED)
    assert done.spent == 250_000


def test_the_facts_of_a_failed_attempt_are_those_of_the_last_one(kit):
    job, dispatch = kit.start(retry_delays_sec=(60,))
    kit.later(5)
    kit.end(dispatch, EndReason.JOB_ERROR, error="no")
    [facts] = kit.store.observed_jobs([job.job_id])

    assert (facts.fence, facts.end) == (1, EndReason.JOB_ERROR)
    assert facts.ended_at - facts.started_at == 5 * SECOND
