"""The batching machine: what one commit reports and claims, and when the next plan is due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.jobs.batching import (
    AHEAD,
    EXPENSIVE,
    FEW,
    HELD,
    MOST_AHEAD,
    MOST_AT_ONCE,
    SOON,
    Batching,
    BatchPlan,
)
from penstock.core.jobs.types import MILLISECOND, SECOND

NOW = 10**9
BRIEF_RUN, SHORT_RUN, LONG_RUN = 10, 2 * MILLISECOND, SECOND


def plan(
    batching=None, *, free=0, waiting=0, ended=0, mean_run=SHORT_RUN, commit_cost=0, taken_at=0, now=NOW
):
    return (batching or Batching(4)).plan(
        now,
        free=free,
        waiting=waiting,
        ended=ended,
        mean_run=mean_run,
        commit_cost=commit_cost,
        taken_at=taken_at,
    )


def test_an_idle_worker_claims_for_each_free_place():
    assert plan(free=3, mean_run=LONG_RUN) == BatchPlan(claim=3)


def test_an_ended_attempt_makes_room_for_a_claim_in_the_same_commit():
    assert plan(ended=2, mean_run=LONG_RUN) == BatchPlan(report=2, claim=2)


def test_short_functions_are_claimed_ahead():
    assert plan(mean_run=SHORT_RUN).claim == 4 * AHEAD // SHORT_RUN
    assert plan(mean_run=BRIEF_RUN).claim == MOST_AHEAD
    assert plan(mean_run=AHEAD).claim == 0


def test_nothing_is_claimed_ahead_for_worker_processes():
    assert plan(Batching(4, ahead=0), free=1, mean_run=BRIEF_RUN).claim == 1


def test_half_of_a_large_batch_is_reported_while_the_other_half_runs():
    assert plan(Batching(200), ended=200).report == 100
    assert plan(Batching(200), ended=200, mean_run=BRIEF_RUN).report == 200
    assert plan(Batching(200), ended=200, commit_cost=EXPENSIVE).report == 200


def test_few_attempts_are_reported_together():
    assert plan(Batching(4), ended=4).report == 4
    assert plan(Batching(60), ended=60).report == FEW


def test_a_batch_that_is_half_through_is_not_reported_in_two():
    half = {"waiting": 2, "ended": 2, "mean_run": BRIEF_RUN, "taken_at": NOW}

    assert plan(**half) == BatchPlan(again_at=NOW + SOON)
    assert plan(**half, now=NOW + SOON).report == 2
    assert plan(**half, commit_cost=EXPENSIVE, now=NOW + SOON) == BatchPlan(wake=2, again_at=NOW + 2 * SOON)
    assert plan(**half, commit_cost=EXPENSIVE, now=NOW + HELD).report == 2


def test_sleeping_workers_are_woken_for_attempts_that_wait_for_a_while():
    assert plan(waiting=6, taken_at=NOW).wake == 0
    assert plan(waiting=6, taken_at=NOW, now=NOW + SOON).wake == 4


def test_an_end_fills_a_batch_when_nothing_waits_behind_it():
    batching = Batching(4)

    assert batching.is_full(0, 1, SHORT_RUN, 0)
    assert batching.is_full(2, 2, SHORT_RUN, 0)
    assert not batching.is_full(2, 2, BRIEF_RUN, 0)
    assert not batching.is_full(2, 2, SHORT_RUN, EXPENSIVE)


@given(
    workers=st.integers(1, 500),
    ahead=st.integers(0, 1),
    waiting=st.integers(0, 700),
    running=st.integers(0, 500),
    ended=st.integers(0, 2_000),
    mean_run=st.integers(0, 10 * SECOND),
    commit_cost=st.integers(0, SECOND),
    age=st.integers(0, SECOND),
)
def test_a_plan_is_within_its_bounds(workers, ahead, waiting, running, ended, mean_run, commit_cost, age):
    free = workers - running - waiting
    made = plan(
        Batching(workers, ahead),
        free=free,
        waiting=waiting,
        ended=ended,
        mean_run=mean_run,
        commit_cost=commit_cost,
        taken_at=NOW - age,
    )

    assert 0 <= made.report <= min(ended, MOST_AT_ONCE)
    assert 0 <= made.claim
    assert running + waiting - made.report + made.claim <= max(
        workers + MOST_AHEAD * ahead, running + waiting
    )
    assert made.wake <= min(waiting, workers)
    if made.again_at is not None:
        assert NOW < made.again_at <= NOW + HELD
    if age >= HELD and ended:
        assert made.report
