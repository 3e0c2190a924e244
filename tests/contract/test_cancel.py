"""An answered cancel means that the job does not run again (SPEC TR-3), in every store, whatever else is stopping it."""

from __future__ import annotations

import pytest

from penstock.core.jobs import changes
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import Apply, committed

GRACE = 15 * SECOND
RUN_AGAIN = [EndReason.MAX_RUNTIME_EXCEEDED, EndReason.PREEMPTION_TIMEOUT, EndReason.GRACEFUL_SHUTDOWN]
SETTLE = [EndReason.HARD_CAP_EXCEEDED, EndReason.COST_LIMIT_REACHED]


def stopping(kit, reason):
    """A job whose run has been told to end, with its dispatch as it is then."""
    job, dispatch = kit.start()
    assert committed(kit.store, Apply([changes.stop(dispatch, job, reason, kit.now, grace=GRACE)])) == [True]
    return kit.store.job(job.job_id), kit.store.dispatch(dispatch.dispatch_id)


def cancel(kit, job):
    dispatch = kit.store.dispatch(job.dispatch_id)
    change = changes.cancel(job, dispatch, kit.now, grace=GRACE, by="ann", **kit.rules)
    assert change is not None
    assert committed(kit.store, Apply([change])) == [True]


def requests(kit, job):
    events = kit.store.events(0, 1_000, job.job_id)
    return [(event.reason, dict(event.data)) for event in events if event.kind == "STOP_REQUESTED"]


@pytest.mark.parametrize("first", RUN_AGAIN)
def test_a_cancel_wins_over_a_stop_that_would_run_the_job_again(kit, first):
    job, dispatch = stopping(kit, first)
    cancel(kit, job)
    after = kit.store.dispatch(dispatch.dispatch_id)

    assert (after.phase, after.reason, after.expires_at) == (
        DispatchPhase.ENDING,
        EndReason.CANCELED,
        dispatch.expires_at,
    )
    assert requests(kit, job) == [(first, {}), ("canceled", {"by": "ann", "instead_of": first})]


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
def test_a_canceled_job_lands_as_canceled_however_its_run_ends(kit, first, how):
    job, dispatch = stopping(kit, first)
    cancel(kit, job)

    assert kit.end(kit.store.dispatch(dispatch.dispatch_id), how)
    assert kit.state(job.job_id) == "CANCELED"
    assert kit.kinds(job.job_id)[-1] == "CANCELED"


@pytest.mark.parametrize("first", RUN_AGAIN)
def test_an_end_that_was_decided_before_the_cancel_is_refused_after_it(kit, first):
    job, dispatch = stopping(kit, first)
    back = changes.end(job, dispatch, first, kit.now, **kit.rules)
    cancel(kit, job)
    before = kit.everything()

    assert committed(kit.store, Apply([back])) == [False]
    assert kit.everything() == before


@pytest.mark.parametrize("first", RUN_AGAIN)
def test_an_end_and_a_cancel_that_arrive_together_leave_no_job_in_the_queue(kit, first):
    job, dispatch = stopping(kit, first)
    told = changes.cancel(job, dispatch, kit.now, grace=GRACE, **kit.rules)
    back = changes.end(job, dispatch, first, kit.now, **kit.rules)

    assert committed(kit.store, Apply([told, back])) == [True, False]
    assert kit.store.dispatch(dispatch.dispatch_id).reason is EndReason.CANCELED


@pytest.mark.parametrize("first", SETTLE)
def test_a_stop_that_settles_the_job_keeps_its_reason_and_the_trail_has_the_cancel(kit, first):
    job, dispatch = stopping(kit, first)
    cancel(kit, job)

    assert kit.store.dispatch(dispatch.dispatch_id).reason is first
    assert requests(kit, job)[-1] == ("canceled", {"by": "ann", "too_late_for": first})
    assert kit.end(dispatch)
    assert kit.state(job.job_id) == {"hard_cap_exceeded": "FAILED", "cost_limit_reached": "BLOCKED"}[first]


def test_a_cancel_that_comes_twice_is_recorded_once(kit):
    job, dispatch = stopping(kit, EndReason.PREEMPTION_TIMEOUT)
    cancel(kit, job)
    told = kit.store.dispatch(dispatch.dispatch_id)

    assert changes.cancel(job, told, kit.now, grace=GRACE, **kit.rules) is None
