from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import KeyConflict, QueueFull
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, Constraint, EndReason, RunWhen
from penstock.stores.api import Depth, Query, Receipt, Submit, committed

PRINTABLE = st.characters(exclude_categories=("C", "Z"))
NAMES = st.text("abc:/-.", min_size=1, max_size=12)
MOMENTS = st.none() | st.integers(0, 4_000_000_000 * SECOND)
SECONDS = st.none() | st.integers(1, 10**6)
INTENTS = st.builds(
    Intent,
    addon_id=NAMES,
    job_type=NAMES,
    cost_units=st.integers(1, 90),
    priority=st.integers(1, 100),
    constraints=st.integers(0, 7).map(Constraint),
    run_when=st.sampled_from(RunWhen),
    quiet_for_sec=st.integers(0, 1_000),
    expected_duration_sec=st.none() | st.floats(0.1, 10**6),
    payload=st.sampled_from(["null", '{"path": "/x"}', '"é\\u0000\\"\'"', "[1, 2.5, true]"]),
    tags=st.lists(st.text(PRINTABLE, min_size=1, max_size=8), max_size=3).map(tuple),
    time_sensitive=st.booleans(),
    deadline_at=MOMENTS,
    earliest_start_at=MOMENTS,
    max_runtime_sec=SECONDS,
    max_active_sec=SECONDS,
    cost_limit=st.none() | st.integers(1, 10**15),
    unit=st.sampled_from(["USD", "EUR"]),
    idempotency_key=st.none(),
    retry_delays_sec=st.lists(st.integers(0, 1_000), max_size=3).map(tuple),
    preemptible=st.booleans(),
    labels=st.sets(st.sampled_from(["gpu", "arch=arm64", "a"])).map(sorted).map(tuple),
)


def test_jobs_that_are_alike_wait_each_from_when_it_came(kit):
    first, began = kit.submit(), kit.now
    kit.later(5)
    second = kit.submit()

    waiting = kit.store.jobs([*first, *second])
    assert [(job.created_at, job.ready_at) for job in waiting] == [(began, began), (kit.now, kit.now)]


def test_a_submitted_job_is_queued_and_its_trail_says_so(kit):
    [job_id] = kit.submit()

    assert kit.state(job_id) == "QUEUED"
    assert kit.kinds(job_id) == ["SUBMITTED"]
    assert kit.store.job(job_id).created_at == kit.now


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(intents=st.lists(INTENTS, min_size=1, max_size=5))
def test_a_job_comes_back_as_it_was_given(kit, intents):
    receipts = committed(kit.store, Submit(intents, Depth()))

    assert [kit.store.job(r.job_id).intent for r in receipts] == intents


def test_an_unknown_job_is_none(kit):
    assert kit.store.job("no-such-job") is None
    assert kit.store.dispatch("no-such-job.1") is None
    assert kit.store.checkpoint("no-such-job") is None


def test_the_same_key_and_body_is_the_same_job(kit):
    [first] = kit.submit(idempotency_key="k")
    kit.later(5)
    [again] = committed(kit.store, Submit([Intent(addon_id="a", job_type="t", idempotency_key="k")], Depth()))

    assert (again.job_id, again.created) == (first, False)
    assert len(kit.store.find(Query())) == 1


def test_twice_within_one_bulk_too(kit):
    first, second = kit.submit(n=2, idempotency_key="k")

    assert first == second


def test_the_same_key_with_another_body_is_refused_and_changes_nothing(kit):
    kit.submit(idempotency_key="k")
    before = kit.everything()

    with pytest.raises(KeyConflict):
        kit.submit(idempotency_key="k", cost_units=11)
    assert kit.everything() == before


def test_a_key_still_means_its_job_after_the_job_was_edited_and_done(kit):
    job, dispatch = kit.start(idempotency_key="k")
    kit.end(dispatch)
    [again] = committed(kit.store, Submit([Intent(addon_id="a", job_type="t", idempotency_key="k")], Depth()))

    assert again == Receipt(job.job_id, JobState.DONE, created=False)


def test_another_addon_may_use_the_same_key(kit):
    assert kit.submit(idempotency_key="k") != kit.submit(idempotency_key="k", addon_id="b")


def test_a_bulk_is_taken_whole_or_not_at_all(kit):
    kit.submit(idempotency_key="k")
    before = kit.everything()
    good = Intent(addon_id="a", job_type="t")

    with pytest.raises(KeyConflict):
        committed(
            kit.store,
            Submit([good, Intent(addon_id="a", job_type="other", idempotency_key="k"), good], Depth()),
        )
    assert kit.everything() == before


@pytest.mark.parametrize("depth", [Depth(total=3), Depth(per_addon=3)])
def test_at_the_depth_limit_a_submit_is_refused_with_a_hint(kit, depth):
    kit.submit(n=3, depth=depth)

    with pytest.raises(QueueFull) as refusal:
        kit.submit(depth=depth)
    assert refusal.value.data["retry_after_sec"] > 0
    assert len(kit.store.find(Query())) == 3


def test_one_addons_depth_is_not_anothers(kit):
    kit.submit(n=3, depth=Depth(per_addon=3))

    assert kit.submit(addon_id="b", depth=Depth(per_addon=3))


def test_what_has_started_leaves_room_in_the_queue(kit):
    kit.submit(n=3)
    kit.tick(capacity=10)

    assert kit.submit(depth=Depth(total=3))


def test_a_requeue_is_never_refused_and_its_excess_holds_back_submits(kit):
    _, dispatch = kit.start()
    kit.submit(n=2, depth=Depth(total=2))
    kit.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)

    assert len(kit.store.find(Query(states=[JobState.QUEUED]))) == 3
    with pytest.raises(QueueFull):
        kit.submit(depth=Depth(total=3))


def test_many_threads_submit_at_once_and_every_one_is_kept_and_numbered_apart(kit):
    with ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(lambda _: kit.submit()[0], range(200)))

    jobs = kit.store.find(Query(limit=1_000))
    assert {job.job_id for job in jobs} == set(ids)
    assert len({job.no for job in jobs}) == 200
    assert [event.seq for event in kit.store.events(0, 1_000)] == list(range(1, 201))


def test_one_bad_submit_among_many_at_once_harms_nobody_else(kit):
    kit.submit(idempotency_key="k")

    def submit(i):
        try:
            return kit.submit(**({"idempotency_key": "k", "cost_units": 11} if i % 10 == 0 else {}))[0]
        except KeyConflict:
            return None

    with ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(submit, range(100)))
    assert [i for i, job_id in enumerate(ids) if job_id is None] == list(range(0, 100, 10))
    assert len(kit.store.find(Query(limit=1_000))) == 91


def test_a_list_is_filtered_and_paged_in_both_directions(kit):
    ids = [kit.submit(addon_id=a, job_type=t)[0] for a in "ab" for t in "xyz"]

    def found(**query):
        return [job.job_id for job in kit.store.find(Query(**query))]

    assert found(addon_id="b") == ids[3:]
    assert found(job_type="y") == [ids[1], ids[4]]
    assert found(states=[JobState.DONE]) == []
    assert found(states=[JobState.QUEUED, JobState.DONE], limit=2) == ids[:2]
    assert found(after=kit.store.job(ids[1]).no, limit=2) == ids[2:4]
    assert found(newest_first=True, limit=2) == [ids[5], ids[4]]
    assert found(newest_first=True, after=kit.store.job(ids[4]).no, limit=2) == [ids[3], ids[2]]


def test_a_list_finds_by_tag_and_by_any_part_of_an_id(kit):
    [tagged] = kit.submit(tags=("nightly", "o'hare"))
    [other] = kit.submit(tags=("night",))
    kit.submit()

    def found(**query):
        return [job.job_id for job in kit.store.find(Query(**query))]

    assert found(tag="nightly") == [tagged]
    assert found(tag="o'hare") == [tagged]
    assert found(tag="night") == [other]
    assert found(tag="n%") == []
    assert found(part=tagged[-8:]) == [tagged]
    assert found(part="%") == []
