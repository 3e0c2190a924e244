"""Jobs that wait for other jobs: when they become ready, and what becomes of them if they cannot."""

from __future__ import annotations

import apsw
import pytest
from msgspec.structs import replace
from tests.contract.conftest import T0, ManualClock, StoreKit
from tests.contract.test_sqlite import steps_of

from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs import changes
from penstock.core.jobs.dependencies import Dependency, DependencyStatus, IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import outcome_of
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import (
    Apply,
    Complete,
    CompletedDispatch,
    Depth,
    Prune,
    ResolveDependencies,
    Submit,
    committed,
)
from penstock.stores.common import dependencies
from penstock.stores.sqlite.connection import SQL
from penstock.stores.sqlite.store import SqliteStore

OK, DONE, FAILED = ParentCondition.OK, ParentCondition.DONE, ParentCondition.FAILED


def after(*parents, condition=OK):
    return tuple(p if isinstance(p, Dependency) else Dependency(p, condition) for p in parents)


def child_of(kit, *parents, condition=OK, **fields):
    [job_id] = kit.submit(after=after(*parents, condition=condition), **fields)
    return job_id


def start(kit, job_id):
    """Start everything that can start, and return the dispatch of this job."""
    dispatches = {d.job_id: d for d in kit.tick(lease=True)} | {d.job_id: d for d in kit.store.live()}
    return dispatches[job_id]


def complete(kit, *job_ids):
    live = {d.job_id: d.dispatch_id for d in kit.store.live()}
    reports = [CompletedDispatch(live[job_id], '"result"') for job_id in job_ids]
    return committed(kit.store, Complete(reports))


def cancel(kit, job_id):
    store = kit.store
    job = store.job(job_id)
    dispatch = None if job.dispatch_id is None else store.dispatch(job.dispatch_id)
    change = changes.cancel(job, dispatch, kit.now, grace=SECOND, **kit.rules)
    return committed(store, Apply([change]))


def retry(kit, *job_ids):
    ordering = kit.rules["ordering"]
    retries = [changes.retry(kit.store.job(job_id), kit.now, ordering) for job_id in job_ids]
    return committed(kit.store, Apply(retries))


def started(kit):
    return {dispatch.job_id for dispatch in kit.tick(lease=True)}


def test_only_a_job_that_is_done_has_a_result(kit):
    [done, canceled, other, waiting] = [job_id for _ in range(4) for job_id in kit.submit()]
    start(kit, done)
    complete(kit, done, other)
    cancel(kit, canceled)
    kit.end(start(kit, waiting), EndReason.RELEASED)
    results = kit.store.job_results([waiting, done, "no such job", canceled, other])

    assert results == {
        done: (JobState.DONE, '"result"'),
        other: (JobState.DONE, '"result"'),
        canceled: (kit.store.job(canceled).state, None),
        waiting: (JobState.QUEUED, None),
    }


def test_a_child_waits_in_the_queue_and_in_no_line_until_its_parent_is_done(kit):
    [parent] = kit.submit()
    child = child_of(kit, parent)

    assert kit.state(child) == "QUEUED"
    assert kit.store.job(child).unmet == 1
    assert kit.store.job(child).intent.after == (Dependency(parent, OK),)
    assert started(kit) == {parent}
    kit.later(5)
    assert complete(kit, parent) == [True]
    assert kit.store.job(child).unmet == 0
    assert kit.store.job(child).ready_at == kit.now  # it ages from its release
    assert started(kit) == {child}
    assert kit.kinds(child) == ["SUBMITTED", "READY", "DISPATCHING", "RUNNING"]


def test_the_commit_that_completes_the_parent_can_start_the_child(kit):
    [parent] = kit.submit()
    child = child_of(kit, parent)
    dispatch = start(kit, parent)

    done, grants = kit.store.commit(
        Complete([CompletedDispatch(dispatch.dispatch_id)]), kit.round(lease=True), wait=True
    )

    assert done.result() == [True]
    assert {grant.dispatch.job_id for grant in grants.result()} == {child}


def test_a_child_of_several_parents_waits_for_the_last(kit):
    parents = kit.submit(3, cost_units=1)
    child = child_of(kit, *parents)
    kit.tick(lease=True)

    complete(kit, parents[1])
    assert kit.store.job(child).unmet == 2
    complete(kit, parents[0])
    assert started(kit) == set()
    complete(kit, parents[2])
    assert started(kit) == {child}


@pytest.mark.parametrize(
    ("condition", "if_unmet", "end", "state"),
    [
        (OK, IfUnmet.CANCEL, EndReason.JOB_ERROR, "CANCELED"),
        (OK, IfUnmet.FAIL, EndReason.JOB_ERROR, "FAILED"),
        (OK, IfUnmet.WAIT, EndReason.JOB_ERROR, "QUEUED"),
        (OK, IfUnmet.WAIT, EndReason.CANCELED, "CANCELED"),
        (OK, IfUnmet.FAIL, EndReason.CANCELED, "FAILED"),
        (FAILED, IfUnmet.CANCEL, EndReason.COMPLETED, "CANCELED"),
        (FAILED, IfUnmet.WAIT, EndReason.COMPLETED, "CANCELED"),
        (FAILED, IfUnmet.CANCEL, EndReason.CANCELED, "CANCELED"),
    ],
)
def test_a_child_whose_condition_does_not_hold_goes_where_the_table_says(
    kit, condition, if_unmet, end, state
):
    parent, dispatch = kit.start()
    child = child_of(kit, parent.job_id, condition=condition, if_unmet=if_unmet)

    assert kit.end(dispatch, end)

    assert kit.state(child) == state
    assert started(kit) == set()
    if state != "QUEUED":
        [*_, last] = kit.store.events(0, 100, child)
        assert (str(last.kind), last.reason) == (state, "dependency_unmet")
        assert last.data["parent"] == parent.job_id
        outcome = outcome_of(kit.store.job(child), None)
        assert outcome.end == "dependency_unmet"
        assert parent.job_id[-8:] in outcome.error


@pytest.mark.parametrize(
    ("condition", "end"),
    [
        (DONE, EndReason.COMPLETED), (DONE, EndReason.JOB_ERROR), (DONE, EndReason.CANCELED),
        (FAILED, EndReason.JOB_ERROR), (OK, EndReason.COMPLETED),
    ],
)  # fmt: skip
def test_a_child_whose_condition_holds_starts(kit, condition, end):
    parent, dispatch = kit.start()
    child = child_of(kit, parent.job_id, condition=condition)

    kit.end(dispatch, end)

    assert started(kit) == {child}


def test_a_blocked_parent_has_not_ended(kit):
    parent, dispatch = kit.start()
    child = child_of(kit, parent.job_id, condition=DONE)

    kit.end(dispatch, EndReason.COST_LIMIT_REACHED)

    assert kit.state(parent.job_id) == "BLOCKED"
    assert kit.state(child) == "QUEUED"
    assert started(kit) == set()
    cancel(kit, parent.job_id)
    assert started(kit) == {child}


def test_a_parent_that_is_requeued_has_not_ended(kit):
    parent, dispatch = kit.start(retry_delays_sec=(60,))
    child = child_of(kit, parent.job_id, condition=DONE)

    kit.end(dispatch, EndReason.JOB_ERROR)

    assert (kit.state(parent.job_id), kit.state(child)) == ("QUEUED", "QUEUED")
    assert kit.store.job(child).unmet == 1


def test_a_canceled_child_stays_so_when_its_parent_is_retried(kit):
    parent, dispatch = kit.start()
    canceled = child_of(kit, parent.job_id)
    waiting = child_of(kit, parent.job_id, if_unmet=IfUnmet.WAIT)
    kit.end(dispatch, EndReason.JOB_ERROR)

    retry(kit, parent.job_id)
    complete(kit, start(kit, parent.job_id).job_id)

    assert kit.state(canceled) == "CANCELED"
    assert started(kit) == {waiting}


def test_a_dependency_that_was_met_stays_met_when_its_parent_is_retried(kit):
    failed, dispatch = kit.start(cost_units=1)
    [other] = kit.submit(cost_units=1)
    child = child_of(kit, Dependency(failed.job_id, FAILED), Dependency(other, OK))
    kit.end(dispatch, EndReason.JOB_ERROR)

    retry(kit, failed.job_id)
    start(kit, other)
    complete(kit, failed.job_id, other)

    assert started(kit) == {child}


def test_cancels_cascade_in_the_same_transaction(kit):
    [first] = kit.submit()
    chain = [first]
    for _ in range(30):
        chain.append(child_of(kit, chain[-1]))
    cleanup = child_of(kit, chain[-1], condition=DONE)

    cancel(kit, first)

    assert {kit.state(job_id) for job_id in chain} == {"CANCELED"}
    assert started(kit) == {cleanup}


def test_work_beyond_the_bound_goes_on_in_the_next_transactions(kit, monkeypatch):
    monkeypatch.setattr(dependencies, "MOST_RESOLVED", 120)
    [first, wide] = kit.submit(2, cost_units=1)
    chain = [first]
    for _ in range(9):
        chain.append(child_of(kit, chain[-1]))
    fan = [child_of(kit, wide, cost_units=1) for _ in range(200)]
    kit.tick(lease=True)
    assert started(kit) == set()
    kit.submit()  # something that is not concerned

    cancel(kit, first)
    complete(kit, wide)
    kit.end(kit.store.dispatch(kit.store.job(first).dispatch_id), EndReason.CANCELED)

    assert kit.store.alarm() == 0
    waiting = [job_id for job_id in fan if kit.store.job(job_id).unmet]
    assert 0 < len(waiting) < 200
    rounds = 0
    while committed(kit.store, ResolveDependencies()):
        rounds += 1
    assert rounds > 2
    assert kit.store.alarm() != 0
    assert not [job_id for job_id in fan if kit.store.job(job_id).unmet]
    assert {kit.state(job_id) for job_id in chain} == {"CANCELED"}


@pytest.mark.parametrize("if_unmet", IfUnmet)
def test_a_child_of_a_parent_that_has_ended_is_judged_at_once(kit, if_unmet):
    parent, dispatch = kit.start()
    kit.end(dispatch, EndReason.JOB_ERROR)

    intent = Intent("a", "t", after=after(parent.job_id), if_unmet=if_unmet)
    [receipt] = committed(kit.store, Submit([intent]))
    runs = child_of(kit, parent.job_id, condition=FAILED)

    expected = {"cancel": "CANCELED", "fail": "FAILED", "wait": "QUEUED", "any": "CANCELED"}[if_unmet]
    assert (receipt.state, kit.state(receipt.job_id)) == (expected, expected)
    assert started(kit) == {runs}


def test_a_failed_child_is_judged_again_when_it_is_retried(kit):
    parent, dispatch = kit.start()
    child = child_of(kit, parent.job_id, if_unmet=IfUnmet.FAIL)
    kit.end(dispatch, EndReason.JOB_ERROR)
    assert kit.state(child) == "FAILED"

    retry(kit, child)
    assert kit.state(child) == "FAILED"  # its parent has not changed
    retry(kit, child, parent.job_id)
    assert kit.state(child) == "QUEUED"
    assert kit.store.job(child).unmet == 1
    assert kit.store.job(child).denied == ""

    complete(kit, start(kit, parent.job_id).job_id)
    assert started(kit) == {child}


def test_a_child_fails_at_its_deadline_and_may_wait_again(kit):
    [parent] = kit.submit()
    child = child_of(kit, parent, deadline_at=kit.now + 10 * SECOND)
    kit.later(11)

    [overdue] = kit.store.overdue(10)
    committed(kit.store, Apply([changes.miss_deadline(overdue.job, kit.now)]))
    assert kit.state(child) == "FAILED"
    assert outcome_of(kit.store.job(child), None).end == "deadline_passed"
    retry(kit, child)

    assert kit.store.job(child).unmet == 1
    assert started(kit) == {parent}
    complete(kit, parent)
    assert started(kit) == {child}


def test_a_child_can_be_canceled_and_edited_while_it_waits(kit):
    [parent] = kit.submit()
    child, other = child_of(kit, parent), child_of(kit, parent)
    job = kit.store.job(child)

    edited = changes.edit(job, replace(job.intent, priority=80), kit.now, kit.rules["ordering"])
    assert committed(kit.store, Apply([edited])) == [True]
    cancel(kit, other)

    assert kit.store.job(child).intent.priority == 80
    assert started(kit) == {parent}
    complete(kit, parent)
    assert started(kit) == {child}
    assert [dependency.status for dependency in kit.store.dependencies(other)] == [DependencyStatus.VOID]


def test_a_child_counts_in_the_depth(kit):
    [parent] = kit.submit()
    child_of(kit, parent)

    with pytest.raises(Exception, match="2 jobs are queued"):
        kit.submit(depth=Depth(total=2))


def test_jobs_of_one_submit_name_each_other_by_position(kit):
    intents = [
        Intent("a", "join", after=after("#1", "#2")),
        Intent("a", "left", after=after("#3")),
        Intent("a", "right", after=after("#3", condition=DONE)),
        Intent("a", "first"),
    ]
    join, left, right, first = [receipt.job_id for receipt in committed(kit.store, Submit(intents))]

    assert kit.store.job(join).intent.after == after(left, right)
    assert started(kit) == {first}
    complete(kit, first)
    assert started(kit) == {left, right}
    complete(kit, left, right)
    assert started(kit) == {join}


def test_a_submit_with_a_cycle_or_an_unknown_parent_changes_nothing(kit):
    [parent] = kit.submit()
    before = kit.everything()
    loop = [Intent("a", "t", after=after("#1")), Intent("a", "t", after=after("#0"))]
    unknown = [
        Intent("a", "t"),
        Intent("a", "t", after=after(parent, "01900000-0000-7000-8000-000000000000")),
    ]
    outside = [Intent("a", "t", after=after("#1"))]

    for intents, error, words in (
        (loop, BadIntent, "wait for each other: #"),
        ([Intent("a", "t", after=after("#0"))], BadIntent, "wait for each other"),
        (unknown, NotFound, "no job 01900000-0000-7000-8000-000000000000"),
        (outside, BadIntent, "names #1, but the submit has 1 jobs"),
    ):
        with pytest.raises(error, match=words):
            committed(kit.store, Submit(intents))

    assert kit.everything() == before


def test_a_parent_is_kept_while_a_child_waits_for_it(kit):
    parent, dispatch = kit.start(cost_units=1)
    other, unneeded = kit.start(cost_units=1)
    [last] = kit.submit(cost_units=1)
    child = child_of(kit, parent.job_id, Dependency(last, OK), if_unmet=IfUnmet.WAIT)
    kit.end(dispatch, EndReason.JOB_ERROR)
    kit.end(unneeded)
    kit.later(100)

    assert committed(kit.store, Prune(kit.now, 10)) == 1
    assert kit.store.job(other.job_id) is None
    assert kit.store.job(parent.job_id) is not None
    cancel(kit, child)
    kit.later(1)
    assert committed(kit.store, Prune(kit.now, 10)) == 2
    assert kit.store.job(parent.job_id) is None
    with pytest.raises(NotFound):
        child_of(kit, parent.job_id)


def test_a_repeated_submit_with_a_key_gives_the_same_family(kit):
    intents = [
        Intent("a", "t", idempotency_key="parent"),
        Intent("a", "t", idempotency_key="child", after=after("#0")),
    ]
    first = committed(kit.store, Submit(intents))
    second = committed(kit.store, Submit(intents))

    assert [r.job_id for r in first] == [r.job_id for r in second]
    assert [r.created for r in second] == [False, False]
    assert [
        (dependency.parent, dependency.child) for dependency in kit.store.dependencies(first[0].job_id)
    ] == [(first[0].job_id, first[1].job_id)]


def test_a_child_that_names_one_parent_twice_by_a_key_is_refused(kit):
    known = Intent("a", "t", idempotency_key="known")
    [receipt] = committed(kit.store, Submit([known]))
    new = Intent("a", "t", idempotency_key="new")
    before = kit.everything()

    for intents, words in (
        ([new, new, Intent("a", "t", after=after("#0", "#1"))], "of job #2 names one job twice: #0 and #1"),
        (
            [Intent("a", "t", after=after("#1", receipt.job_id)), known],
            "of job #0 names one job twice: #1 and",
        ),
        ([known, new, known, Intent("a", "t", after=after("#2", "#1", "#0"))], "twice: #2 and #0"),
    ):
        with pytest.raises(BadIntent, match=words):
            committed(kit.store, Submit(intents))

    assert kit.everything() == before


def test_a_key_that_comes_twice_in_a_submit_gets_the_state_of_its_job(kit):
    [parent] = kit.submit()
    cancel(kit, parent)
    child = Intent(addon_id="a", job_type="t", idempotency_key="k", after=after(parent))

    receipts = committed(kit.store, Submit([child, child], Depth()))

    assert [(each.created, each.state) for each in receipts] == [(True, "CANCELED"), (False, "CANCELED")]


def test_an_end_and_a_retry_in_one_operation_are_both_followed(kit):
    parent, dispatch = kit.start(cost_units=1)
    [other] = kit.submit(cost_units=1)
    child = child_of(kit, parent.job_id, other, if_unmet=IfUnmet.FAIL)
    cancel(kit, other)
    assert kit.state(child) == "FAILED"

    end = changes.end(kit.store.job(parent.job_id), dispatch, EndReason.COMPLETED, kit.now, **kit.rules)
    again = changes.retry(kit.store.job(child), kit.now, kit.rules["ordering"])
    assert committed(kit.store, Apply([again, end])) == [True, True]

    assert kit.state(child) == "FAILED"  # the other parent is still canceled
    assert str(kit.store.job(parent.job_id).state) == JobState.DONE


@pytest.mark.parametrize("condition", ParentCondition)
@pytest.mark.parametrize("parent_first", [True, False])
def test_a_parent_and_its_child_are_canceled_in_one_operation(kit, condition, parent_first):
    [parent] = kit.submit()
    child = child_of(kit, parent, condition=condition)
    grandchild = child_of(kit, child, condition=DONE)
    both = [parent, child] if parent_first else [child, parent]
    canceled = [
        changes.cancel(kit.store.job(job_id), None, kit.now, grace=SECOND, **kit.rules) for job_id in both
    ]

    assert committed(kit.store, Apply(canceled)) == [True, True]

    assert [kit.state(job_id) for job_id in both] == ["CANCELED", "CANCELED"]
    assert kit.kinds(child) == ["SUBMITTED", "CANCELED"]
    assert [d.job_id for d in kit.tick(lease=True)] == [grandchild]
    assert kit.store.audit() == []


def test_one_parent_can_be_enough(kit):
    parents = kit.submit(4, cost_units=1)
    alarm = child_of(kit, *parents, condition=FAILED, if_unmet=IfUnmet.ANY, cost_units=1)
    kit.tick(lease=True)

    complete(kit, parents[0])
    assert kit.store.job(alarm).unmet == 3
    dispatches = {d.job_id: d for d in kit.store.live()}
    kit.end(dispatches[parents[1]], EndReason.JOB_ERROR)

    assert started(kit) == {alarm}
    assert [str(dependency.status) for dependency in kit.store.dependencies(alarm)] == [
        "void",
        "met",
        "void",
        "void",
    ]
    complete(kit, parents[2])
    kit.end(dispatches[parents[3]], EndReason.JOB_ERROR)
    assert kit.state(alarm) == "RUNNING"


def test_a_child_for_which_one_parent_is_enough_is_canceled_when_none_is_left(kit):
    parents = kit.submit(3, cost_units=1)
    alarm = child_of(kit, *parents, condition=FAILED, if_unmet=IfUnmet.ANY)
    kit.tick(lease=True)

    complete(kit, *parents[:2])
    assert kit.state(alarm) == "QUEUED"
    complete(kit, parents[2])

    assert kit.state(alarm) == "CANCELED"


# what it costs


def waiting_file(path, waiting, parents):
    """A file with a parent of one child that runs, and beside it `waiting` children of other parents."""
    store = SqliteStore(path, lambda: T0)
    kit = StoreKit(store, ManualClock())
    [first] = kit.submit(cost_units=1)
    child_of(kit, first)
    others = kit.submit(parents, cost_units=1, earliest_start_at=T0 + 3_600 * SECOND)
    for other in others:
        kit.submit(waiting // parents, after=after(other))
    kit.tick(lease=True)
    return kit, first


def test_the_cost_of_a_release_follows_what_is_released_and_not_what_waits(tmp_path):
    costs = []
    for waiting in (10, 5_000):
        kit, first = waiting_file(tmp_path / f"{waiting}.db", waiting, 10)
        costs.append(steps_of(kit.store, lambda: complete(kit, first)))  # noqa: B023 - called at once
        kit.store.close()

    assert costs[1] <= costs[0] * 1.2 + 1


def test_the_end_of_one_parent_of_many_does_not_look_at_the_others(tmp_path):
    costs = []
    for parents in (2, 900):
        store = SqliteStore(tmp_path / f"{parents}.db", lambda: T0)
        kit = StoreKit(store, ManualClock())
        first, *_ = others = kit.submit(parents, cost_units=1)
        child_of(kit, *others)
        kit.tick(lease=True, limit=1)
        costs.append(steps_of(store, lambda: complete(kit, first)))  # noqa: B023 - called at once
        store.close()

    assert costs[1] <= costs[0] * 1.2 + 1


def test_plain_jobs_pay_one_statement_for_a_transaction_that_ends_jobs(tmp_path):
    store = SqliteStore(tmp_path / "jobs.db", lambda: T0)
    kit = StoreKit(store, ManualClock())
    jobs = kit.submit(50, cost_units=1)
    kit.tick(lease=True)
    statements = []
    store._con.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: statements.append(event["sql"]))

    complete(kit, *jobs)

    store._con.trace_v2(0)
    [about_dependencies] = [sql for sql in statements if "dependency" in sql or "pending_end" in sql]
    assert about_dependencies in SQL["dependencies_exist"]
    store.close()
