"""An answered cancel means that the job does not run again (SPEC TR-3), in every store, whatever else is stopping it."""

from __future__ import annotations

import pytest

from penstock.core.jobs import changes
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.types import SECOND
from penstock.stores.api import Apply, committed

GRACE = 15 * SECOND
RUN_AGAIN = [EndReason.MAX_RUNTIME_EXCEEDED, EndReason.PREEMPTION_TIMEOUT, EndReason.GRACEFUL_SHUTDOWN]
SETTLE = [EndReason.HARD_CAP_EXCEEDED, EndReason.COST_LIMIT_REACHED]


def stopping(yard, reason):
    """A job whose run has been told to end, with its dispatch as it is then."""
    job, dispatch = yard.start()
    assert committed(yard.store, Apply([changes.stop(dispatch, job, reason, yard.now, grace=GRACE)])) == [
        True
    ]
    return yard.store.job(job.job_id), yard.store.dispatch(dispatch.dispatch_id)


def cancel(yard, job):
    dispatch = yard.store.dispatch(job.dispatch_id)
    change = changes.cancel(job, dispatch, yard.now, grace=GRACE, by="ann", **yard.rules)
    assert change is not None
    assert committed(yard.store, Apply([change])) == [True]


def requests(yard, job):
    events = yard.store.events(0, 1_000, job.job_id)
    return [(event.reason, dict(event.data)) for event in events if event.kind == "STOP_REQUESTED"]


@pytest.mark.parametrize("first", RUN_AGAIN)
def test_a_cancel_wins_over_a_stop_that_would_run_the_job_again(yard, first):
    job, dispatch = stopping(yard, first)
    cancel(yard, job)
    after = yard.store.dispatch(dispatch.dispatch_id)

    assert (after.phase, after.reason, after.expires_at) == (
        DispatchPhase.ENDING,
        EndReason.CANCELED,
        dispatch.expires_at,
    )
    assert requests(yard, job) == [(first, {}), ("canceled", {"by": "ann", "instead_of": first})]


@pytest.mark.parametrize("first", RUN_AGAIN)
@pytest.mark.parametrize(
    "how",
    [
        EndReason.COMPLETED,
        EndReason.RELEASED,
        EndReason.LEASE_EXPIRED,
        EndReason.SCHEDULER_RESTARTED,
        EndReason.WORKER_CRASHED,
    ],
)
def test_a_canceled_job_lands_as_canceled_however_its_run_ends(yard, first, how):
    job, dispatch = stopping(yard, first)
    cancel(yard, job)

    assert yard.end(yard.store.dispatch(dispatch.dispatch_id), how)
    assert yard.state(job.job_id) == "CANCELED"
    assert yard.kinds(job.job_id)[-1] == "CANCELED"


@pytest.mark.parametrize("first", RUN_AGAIN)
def test_an_end_that_was_decided_before_the_cancel_is_refused_after_it(yard, first):
    job, dispatch = stopping(yard, first)
    back = changes.end(job, dispatch, first, yard.now, **yard.rules)
    cancel(yard, job)
    before = yard.everything()

    assert committed(yard.store, Apply([back])) == [False]
    assert yard.everything() == before


@pytest.mark.parametrize("first", RUN_AGAIN)
def test_an_end_and_a_cancel_that_arrive_together_leave_no_job_in_the_queue(yard, first):
    job, dispatch = stopping(yard, first)
    told = changes.cancel(job, dispatch, yard.now, grace=GRACE, **yard.rules)
    back = changes.end(job, dispatch, first, yard.now, **yard.rules)

    assert committed(yard.store, Apply([told, back])) == [True, False]
    assert yard.store.dispatch(dispatch.dispatch_id).reason is EndReason.CANCELED


@pytest.mark.parametrize("first", SETTLE)
def test_a_stop_that_settles_the_job_keeps_its_reason_and_the_trail_has_the_cancel(yard, first):
    job, dispatch = stopping(yard, first)
    cancel(yard, job)

    assert yard.store.dispatch(dispatch.dispatch_id).reason is first
    assert requests(yard, job)[-1] == ("canceled", {"by": "ann", "too_late_for": first})
    assert yard.end(dispatch)
    assert yard.state(job.job_id) == {"hard_cap_exceeded": "FAILED", "cost_limit_reached": "BLOCKED"}[first]


def test_a_cancel_that_comes_twice_is_recorded_once(yard):
    job, dispatch = stopping(yard, EndReason.PREEMPTION_TIMEOUT)
    cancel(yard, job)
    told = yard.store.dispatch(dispatch.dispatch_id)

    assert changes.cancel(job, told, yard.now, grace=GRACE, **yard.rules) is None
