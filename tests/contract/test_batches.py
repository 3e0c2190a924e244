"""
Batches and arrays as parents: when they end, what their ends release, and what takes an end back.

Every promise of `core/jobs/groups.py` on every store.
"""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace
from tests.contract.conftest import NO_LIMIT
from tests.contract.test_dependencies import cancel, child_of, complete, retry, start, started

from penstock.core.errors import BadIntent, IllegalMove, KeyConflict, NotFound
from penstock.core.jobs import arrays, groups
from penstock.core.jobs.arrays import JobArray
from penstock.core.jobs.dependencies import Dependency, ParentCondition, batch_of
from penstock.core.jobs.groups import JobGroup, batch_id
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import EndReason
from penstock.stores.api import (
    ChangeArray,
    ChangeBatch,
    Complete,
    CompletedDispatch,
    Prune,
    Query,
    Submit,
    SubmitBatch,
    committed,
)

WORK = Intent("a", "t")
NIGHTLY = batch_id("nightly")


def submit_batch(kit, members=2, *, name="nightly", is_open=False, depth=NO_LIMIT, digest=""):
    """The ids of the members, of the callback at the end, and of the callback at the first failure."""
    intents = [
        *[groups.member(WORK, name)] * members,
        groups.on_end(WORK, name),
        groups.on_failure(WORK, name),
    ]
    group = JobGroup(batch_id(name), "a", 0, is_open=is_open, digest=digest)
    receipts = committed(kit.store, SubmitBatch(group, intents, depth, "local"))
    *ids, end, failure = [receipt.job_id for receipt in receipts]
    return ids, end, failure


def add(kit, name="nightly", n=1):
    return [r.job_id for r in committed(kit.store, Submit([groups.member(WORK, name)] * n))]


def close(kit, name="nightly"):
    return committed(
        kit.store, ChangeBatch(batch_id(name), lambda g, now: groups.close_batch(g, now, "local"))
    )


def fail(kit, job_id):
    [dispatch] = [d for d in kit.store.live() if d.job_id == job_id] or [start(kit, job_id)]
    kit.end(dispatch, EndReason.JOB_ERROR)


def ready(kit):
    """The jobs that could start."""
    jobs = kit.store.find(Query(states=(JobState.QUEUED,)))
    return {job.job_id for job in jobs if not job.unmet}


def progress(kit, group_id=NIGHTLY):
    group = kit.store.group(group_id)
    return (group.total, group.done, group.failed, group.canceled), group.state


def batch_events(kit):
    return [e.kind.removeprefix("BATCH_") for e in kit.store.events(0, 1_000) if e.kind.startswith("BATCH_")]


def test_jobs_cannot_wait_for_their_own_batch(kit):
    """A ring through a batch would wait for ever, however many jobs and batches it goes through."""
    for name in ("nightly", "weekly"):
        submit_batch(kit, 1, name=name, is_open=True)
    [waits] = after_batch(kit, "nightly")
    child = child_of(kit, waits)
    [weekly] = add_after(kit, "weekly", child)
    before = kit.everything()
    own = Dependency(NIGHTLY, ParentCondition.DONE)
    local = [replace(WORK, after=(own,)), groups.member(replace(WORK, after=(Dependency("#0"),)), "nightly")]
    through_both = [
        groups.member(replace(WORK, after=(Dependency("#1"),)), "nightly"),
        replace(WORK, after=(Dependency(batch_id("weekly"), ParentCondition.DONE),)),
    ]

    for intents, words in (
        ([groups.member(replace(WORK, after=(own,)), "nightly")], "#0 -> batch:nightly -> #0"),
        ([groups.member(replace(WORK, after=(Dependency(waits),)), "nightly")], f"{waits} -> batch:nightly"),
        ([groups.member(replace(WORK, after=(Dependency(child),)), "nightly")], f"{child} -> batch:nightly"),
        (
            [groups.member(replace(WORK, after=(Dependency(weekly),)), "nightly")],
            f"{weekly} -> batch:nightly",
        ),
        (local, "batch:nightly"),
        (through_both, "batch:weekly -> batch:nightly"),
    ):
        with pytest.raises(BadIntent, match="wait for each other: .*") as error:
            committed(kit.store, Submit(intents))
        ring = str(error.value).partition("each other: ")[2].split(" -> ")
        assert words in " -> ".join([*ring, *ring[1:]])
        assert kit.everything() == before
    group = JobGroup(batch_id("new"), "a", 0)
    member = groups.member(replace(WORK, after=(Dependency("#1"),)), "new")
    with pytest.raises(BadIntent, match="wait for each other"):
        committed(kit.store, SubmitBatch(group, [member, groups.on_end(WORK, "new")], NO_LIMIT, "local"))
    assert kit.everything() == before


def test_jobs_of_a_batch_can_wait_for_each_other_and_for_what_waits_for_no_batch(kit):
    [first], *_ = submit_batch(kit, 1, is_open=True)
    submit_batch(kit, 1, name="weekly", is_open=True)
    [after_weekly] = after_batch(kit, "weekly")

    [second] = add_after(kit, "nightly", first)
    [third] = add_after(kit, "nightly", after_weekly)

    assert ready(kit).isdisjoint({second, third})
    assert progress(kit) == ((3, 0, 0, 0), None)


def after_batch(kit, name):
    dependency = Dependency(batch_id(name), ParentCondition.DONE)
    return [r.job_id for r in committed(kit.store, Submit([replace(WORK, after=(dependency,))]))]


def add_after(kit, name, parent):
    intent = groups.member(replace(WORK, after=(Dependency(parent),)), name)
    return [r.job_id for r in committed(kit.store, Submit([intent]))]


def test_the_callback_becomes_ready_in_the_transaction_that_ends_the_last_member(kit):
    [a, b], end, failure = submit_batch(kit)
    assert started(kit) == {a, b}
    complete(kit, a)
    assert progress(kit) == ((2, 1, 0, 0), None)
    assert kit.store.job(end).unmet == 1

    complete(kit, b)

    assert progress(kit) == ((2, 2, 0, 0), "DONE")
    assert kit.store.job(end).unmet == 0
    assert kit.state(failure) == "CANCELED"
    assert ready(kit) == {end}
    assert batch_events(kit) == ["SUBMITTED", "ENDED"]


def test_the_first_failure_releases_its_callback_and_the_others_go_on(kit):
    [a, b, c], end, failure = submit_batch(kit, 3)
    started(kit)
    fail(kit, b)

    assert progress(kit) == ((3, 0, 1, 0), None)
    assert kit.store.job(failure).unmet == 0
    assert kit.store.job(end).unmet == 1
    assert ready(kit) == {failure}
    fail(kit, a)
    complete(kit, c)
    assert progress(kit) == ((3, 1, 2, 0), "FAILED")
    assert ready(kit) == {end, failure}


def test_a_job_that_waits_for_the_first_failure_is_ready_at_once_if_there_was_one(kit):
    [a, b], *_ = submit_batch(kit)
    started(kit)
    fail(kit, a)
    late = child_of(kit, Dependency(NIGHTLY, ParentCondition.FAILED), if_unmet="any")
    whole = child_of(kit, Dependency(NIGHTLY, ParentCondition.FAILED))

    assert kit.store.job(late).unmet == 0
    assert kit.store.job(whole).unmet == 1
    complete(kit, b)
    assert kit.store.job(whole).unmet == 0


@pytest.mark.parametrize(
    ("condition", "after_success", "after_failure"),
    [("ok", "QUEUED", "CANCELED"), ("done", "QUEUED", "QUEUED"), ("failed", "CANCELED", "QUEUED")],
)
def test_a_job_waits_for_a_whole_batch(kit, condition, after_success, after_failure):
    [good], *_ = submit_batch(kit, 1, name="good")
    [bad], *_ = submit_batch(kit, 1, name="bad")
    first = child_of(kit, Dependency(batch_id("good"), ParentCondition(condition)))
    second = child_of(kit, Dependency(batch_id("bad"), ParentCondition(condition)))
    started(kit)
    complete(kit, good)
    fail(kit, bad)

    assert (kit.state(first), kit.state(second)) == (after_success, after_failure)
    assert all(kit.store.job(job_id).unmet == 0 for job_id in (first, second))
    assert kit.state(child_of(kit, Dependency(batch_id("good"), ParentCondition(condition)))) == after_success


def test_an_open_batch_does_not_end_before_it_is_closed(kit):
    [a], end, failure = submit_batch(kit, 1, is_open=True)
    started(kit)
    complete(kit, a)
    assert progress(kit) == ((1, 1, 0, 0), None)
    assert ready(kit) == set()

    [b] = add(kit)
    assert close(kit).is_open is False
    assert close(kit) == kit.store.group(NIGHTLY)  # once more changes nothing
    start(kit, b)
    complete(kit, b)
    assert progress(kit) == ((2, 2, 0, 0), "DONE")
    assert ready(kit) == {end}
    assert kit.state(failure) == "CANCELED"
    assert batch_events(kit) == ["SUBMITTED", "CLOSED", "ENDED"]


def test_closing_a_batch_whose_members_have_ended_ends_it(kit):
    [a], end, _ = submit_batch(kit, 1, is_open=True)
    started(kit)
    complete(kit, a)
    assert close(kit).state == "DONE"
    assert ready(kit) == {end}


def test_an_empty_batch_is_done_when_it_is_closed(kit):
    _, end, failure = submit_batch(kit, 0)
    assert progress(kit) == ((0, 0, 0, 0), "DONE")
    assert kit.state(failure) == "CANCELED"
    assert ready(kit) == {end}

    cancel(kit, end)
    _, end, failure = submit_batch(kit, 0, name="open", is_open=True)
    assert kit.state(failure) == "QUEUED"
    assert close(kit, "open").state == "DONE"
    assert ready(kit) == {end}


def test_a_closed_batch_takes_members_while_one_lives_and_none_after_its_end(kit):
    [a], end, _ = submit_batch(kit, 1)
    started(kit)
    [b] = add(kit)  # by a, say, which still runs
    complete(kit, a)
    assert kit.store.job(end).unmet == 1
    started(kit)
    complete(kit, b)
    assert progress(kit)[1] == "DONE"

    before = kit.store.newest()
    with pytest.raises(IllegalMove, match="nightly has ended .DONE. and takes no more jobs"):
        add(kit)
    assert kit.store.newest() == before


def test_a_retry_of_a_member_takes_the_end_back(kit):
    [a, b], end, failure = submit_batch(kit)
    waits = child_of(kit, Dependency(NIGHTLY, ParentCondition.OK), if_unmet="wait")
    started(kit)
    complete(kit, a)
    fail(kit, b)
    assert progress(kit) == ((2, 1, 1, 0), "FAILED")
    assert kit.state(waits) == "QUEUED"

    assert retry(kit, b) == [True]
    assert progress(kit) == ((2, 1, 0, 0), None)
    assert kit.store.group(NIGHTLY).ended_at is None
    assert ready(kit) == {b, end, failure}  # the callbacks were released once, and stay so
    start(kit, b)
    complete(kit, b)
    assert progress(kit) == ((2, 2, 0, 0), "DONE")
    assert kit.store.job(waits).unmet == 0


def test_a_retried_member_that_is_canceled_in_the_same_transaction_ends_the_batch_again(kit):
    [parent] = kit.submit()
    committed(
        kit.store,
        SubmitBatch(
            JobGroup(NIGHTLY, "a", 0),
            [replace(groups.member(WORK, "nightly"), after=(Dependency(parent),), if_unmet="fail")],
        ),
    )
    [member] = [d.parent for d in kit.store.dependencies(NIGHTLY)]
    cancel(kit, parent)
    assert kit.state(member) == "FAILED"
    assert progress(kit) == ((1, 0, 1, 0), "FAILED")
    assert retry(kit, member) == [True]
    assert kit.state(member) == "FAILED"  # its parent is still canceled
    assert progress(kit) == ((1, 0, 1, 0), "FAILED")


def test_a_cancel_of_every_member_ends_the_batch_as_canceled(kit):
    [a, b], end, failure = submit_batch(kit)
    started(kit)
    complete(kit, a)
    cancel(kit, b)
    kit.end(kit.store.live()[0], EndReason.CANCELED)
    assert progress(kit) == ((2, 1, 0, 1), "CANCELED")
    assert kit.state(failure) == "CANCELED"
    assert ready(kit) == {end}


def test_a_blocked_member_has_not_ended(kit):
    [a], end, _ = submit_batch(kit, 1)
    job = kit.store.job(a)
    for _ in range(10):
        kit.later(10_000)
        kit.end(start(kit, a), EndReason.UNAVAILABLE)
        if kit.state(a) == "BLOCKED":
            break
    assert kit.state(job.job_id) == "BLOCKED"
    assert progress(kit) == ((1, 0, 0, 0), None)
    assert retry(kit, a) == [True]
    started(kit)
    complete(kit, a)
    assert progress(kit) == ((1, 1, 0, 0), "DONE")


def test_members_are_kept_until_the_batch_has_ended_and_counts_stay_when_they_are_pruned(kit):
    [a, b], *_ = submit_batch(kit)
    started(kit)
    complete(kit, a)
    kit.later(100)
    assert committed(kit.store, Prune(kit.now, 10)) == 0
    fail(kit, b)
    kit.later(100)
    waits = child_of(kit, Dependency(NIGHTLY, ParentCondition.OK), if_unmet="wait")

    assert committed(kit.store, Prune(kit.now, 10)) == 2
    assert kit.store.job(a) is None
    assert progress(kit) == ((2, 1, 1, 0), "FAILED")  # a job waits for it, so it stays
    cancel(kit, waits)
    kit.later(100)
    committed(kit.store, Prune(kit.now, 10))
    assert kit.store.group(NIGHTLY) is None
    submit_batch(kit)  # the name is free again
    assert progress(kit) == ((2, 0, 0, 0), None)


def test_a_name_is_free_again_when_all_jobs_of_the_batch_are_pruned(kit):
    submit_batch(kit)
    started(kit)
    for dispatch in kit.store.live():
        complete(kit, dispatch.job_id)
    kit.later(100)

    committed(kit.store, Prune(kit.now, 1))

    assert len(kit.store.find(Query(tag=NIGHTLY))) == 1
    with pytest.raises(KeyConflict):
        submit_batch(kit)
    committed(kit.store, Prune(kit.now, 100))
    submit_batch(kit)
    assert len(kit.store.find(Query(tag=NIGHTLY))) == 2


def test_a_name_means_one_batch_and_nothing_changes_for_a_second_one(kit):
    submit_batch(kit, digest="first")
    before = kit.store.newest()
    with pytest.raises(KeyConflict, match="there is a batch nightly already"):
        submit_batch(kit, 3, digest="second")
    assert kit.store.newest() == before
    assert progress(kit)[0][0] == 2
    assert kit.store.group(NIGHTLY).digest == "first"


def test_an_unknown_batch_is_refused_as_a_batch_and_as_a_parent(kit):
    before = kit.store.newest()
    with pytest.raises(NotFound, match="there is no batch 'other'"):
        add(kit, "other")
    with pytest.raises(NotFound, match="after: there is no batch other"):
        child_of(kit, batch_id("other"))
    assert kit.store.newest() == before


def test_a_refused_member_refuses_the_whole_batch(kit):
    before = kit.store.newest()
    bad = [groups.member(WORK, "nightly"), replace(WORK, after=(Dependency("nosuch"),))]
    with pytest.raises(NotFound):
        committed(kit.store, SubmitBatch(JobGroup(NIGHTLY, "a", 0), bad))
    assert (kit.store.group(NIGHTLY), kit.store.newest()) == (None, before)
    submit_batch(kit)


def test_a_batch_has_a_bound(kit, monkeypatch):
    monkeypatch.setattr(groups, "MOST_MEMBERS", 3)
    submit_batch(kit, 2, is_open=True)
    add(kit)
    with pytest.raises(BadIntent, match="would give batch nightly 4 jobs; it may have 3"):
        add(kit)


def test_batches_are_listed_the_newest_first(kit):
    for name in ("one", "two", "three"):
        submit_batch(kit, 1, name=name)
        kit.later(1)
    assert [group.name for group in kit.store.batches(2)] == ["three", "two"]
    assert kit.store.batches(2, "nobody") == []
    assert kit.store.group("nosuch") is None


def test_members_and_children_of_a_batch_are_its_dependencies(kit):
    [a, b], end, failure = submit_batch(kit)
    found = kit.store.dependencies(NIGHTLY)
    assert [d.parent for d in found if d.child == NIGHTLY] == [a, b]
    assert [(d.child, d.condition) for d in found if d.parent == NIGHTLY] == [
        (end, "done"),
        (failure, "failed"),
    ]
    assert [d.parent for d in kit.store.dependencies(end)] == [NIGHTLY]


def submit_array(kit, indices="1-3%1"):
    array = JobArray("x1", indices, WORK, kit.now)
    committed(kit.store, ChangeArray("x1", lambda *_: arrays.submit_array(array), intent=WORK))


def end_index(kit, how):
    [dispatch] = kit.store.live() or kit.tick(lease=True)
    if how == "DONE":
        committed(kit.store, Complete([CompletedDispatch(dispatch.dispatch_id, None)]))
    else:
        kit.end(dispatch, EndReason.JOB_ERROR)


def test_a_job_waits_for_a_whole_array(kit):
    submit_array(kit)
    ok = child_of(kit, "x1")
    retried = child_of(kit, "x1", if_unmet="wait")
    ended = child_of(kit, Dependency("x1", ParentCondition.DONE))
    first = child_of(kit, Dependency("x1", ParentCondition.FAILED), if_unmet="any")
    end_index(kit, "DONE")
    assert kit.store.job(first).unmet == 1
    end_index(kit, "FAILED")
    assert [kit.store.job(job).unmet for job in (ok, retried, ended, first)] == [1, 1, 1, 0]
    cancel(kit, first)
    end_index(kit, "DONE")

    assert kit.store.group("x1").state == "FAILED"
    assert (kit.state(ok), kit.state(ended)) == ("CANCELED", "QUEUED")
    assert [kit.store.job(job).unmet for job in (retried, ended)] == [1, 0]
    cancel(kit, ended)
    committed(kit.store, ChangeArray("x1", lambda r, *_: arrays.retry_array(r), intent=WORK))
    assert kit.store.group("x1").state is None
    end_index(kit, "DONE")
    assert kit.store.job(retried).unmet == 0


def test_an_array_that_a_job_waits_for_is_kept(kit):
    submit_array(kit, "1")
    end_index(kit, "FAILED")
    waits = child_of(kit, "x1", if_unmet="wait")
    kit.later(100)
    committed(kit.store, Prune(kit.now, 10))
    assert kit.store.array("x1") is not None
    cancel(kit, waits)
    kit.later(100)
    committed(kit.store, Prune(kit.now, 10))
    assert (kit.store.array("x1"), kit.store.group("x1")) == (None, None)


@pytest.mark.parametrize("seed", range(6))
def test_random_members_ends_retries_and_closes_agree_with_a_plain_count(kit, seed):
    """Whatever happens in whatever order: the row says what the jobs say, and the callbacks come when they must."""
    rng = Random(seed)
    names = [f"b{n}" for n in range(3)]
    callbacks = {
        name: submit_batch(kit, rng.randrange(3), name=name, is_open=rng.random() < 0.5)[1:] for name in names
    }
    released = set()
    for _ in range(60):
        live = [d for d in kit.store.live() if batch_of(kit.store.job(d.job_id).intent)]
        failed = [
            job.job_id
            for name in names
            for job in kit.store.find(Query(tag=f"batch:{name}", states=(JobState.FAILED,)))
        ]
        move = rng.choice(["add", "start", "end", "end", "cancel", "retry", "close"])
        if move == "add":
            name = rng.choice(names)
            ended = kit.store.group(batch_id(name)).state is not None
            try:
                add(kit, name, rng.randrange(1, 3))
                assert not ended
            except IllegalMove:
                assert ended
        elif move == "start":
            kit.tick(lease=True, limit=2)
        elif move == "end" and live:
            how = rng.choice([EndReason.COMPLETED, EndReason.COMPLETED, EndReason.JOB_ERROR])
            kit.end(rng.choice(live), how)
        elif move == "cancel" and (leased := [d for d in live if d.phase == "leased"]):
            cancel(kit, rng.choice(leased).job_id)
        elif move == "retry" and failed:
            retry(kit, rng.choice(failed))
        elif move == "close":
            close(kit, rng.choice(names))
        kit.later(1)
        for name in names:
            group = kit.store.group(batch_id(name))
            counts = kit.store.count(Query(tag=group.group_id))
            ends = [counts.get(state, 0) for state in (JobState.DONE, JobState.FAILED, JobState.CANCELED)]
            assert [group.total, group.done, group.failed, group.canceled] == [sum(counts.values()), *ends]
            assert (group.state is None) == (group.is_open or sum(counts.values()) > sum(ends))
            end, failure = map(kit.store.job, callbacks[name])
            if group.state is not None:
                released |= {end.job_id}
            if group.failed:
                released |= {failure.job_id}
            assert (end.unmet == 0) == (end.job_id in released)
            assert (failure.unmet == 0 and failure.state != "CANCELED") == (
                failure.job_id in released and failure.state != "CANCELED"
            )
    assert kit.store.audit() == []
