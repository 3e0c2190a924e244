from __future__ import annotations

from itertools import product

import pytest

from penstock.core.errors import IllegalMove
from penstock.core.jobs.states import (
    END_RULES,
    Counters,
    DispatchPhase,
    JobState,
    Schedules,
    replaces,
    resolve_end,
)
from penstock.core.jobs.types import EndReason

LIVE = [DispatchPhase.RESERVED, DispatchPhase.LEASED, DispatchPhase.ENDING]
SPENT = Counters(crash=5, unavailable=5, error=0, start=0)

# SPEC TR-5, leased, first with a fresh job and then with one whose schedules are used up.
TR_5 = {
    EndReason.COOPERATIVE_PREEMPTION: ("QUEUED", "QUEUED"),
    EndReason.PREEMPTION_TIMEOUT: ("QUEUED", "QUEUED"),
    EndReason.GRACEFUL_SHUTDOWN: ("QUEUED", "QUEUED"),
    EndReason.LEASE_EXPIRED: ("QUEUED", "FAILED"),
    EndReason.WORKER_CRASHED: ("QUEUED", "FAILED"),
    EndReason.UNAVAILABLE: ("QUEUED", "BLOCKED"),
    EndReason.START_TIMEOUT: ("QUEUED", "QUEUED"),
    EndReason.MAX_RUNTIME_EXCEEDED: ("QUEUED", "FAILED"),
    EndReason.HARD_CAP_EXCEEDED: ("FAILED", "FAILED"),
    EndReason.COST_LIMIT_REACHED: ("BLOCKED", "BLOCKED"),
    EndReason.CANCELED: ("CANCELED", "CANCELED"),
}


@pytest.mark.parametrize("end", TR_5)
def test_each_end_lands_where_the_specification_says(end):
    fresh = resolve_end(end, DispatchPhase.LEASED)
    used_up = resolve_end(end, DispatchPhase.LEASED, counters=SPENT)

    assert (str(fresh.target), str(used_up.target)) == TR_5[end]


def test_every_end_in_every_phase_lands_in_exactly_one_state_or_is_refused():
    for end, phase, first in product(EndReason, LIVE, [None, *EndReason]):
        try:
            end_result = resolve_end(end, phase, first_reason=first)
        except IllegalMove:
            assert (phase, END_RULES[end][0]) == (DispatchPhase.RESERVED, None)
        else:
            assert end_result.target in JobState


@pytest.mark.parametrize("end", EndReason)
def test_the_first_reason_wins_over_whatever_the_run_reports_later(end):
    end_result = resolve_end(end, DispatchPhase.ENDING, first_reason=EndReason.CANCELED)

    assert end_result.target is JobState.CANCELED
    assert end_result.end is EndReason.CANCELED


@pytest.mark.parametrize("end", EndReason)
def test_a_dispatch_ends_once(end):
    with pytest.raises(IllegalMove):
        resolve_end(end, DispatchPhase.ENDED)


def test_a_dispatch_that_never_started_cannot_complete():
    with pytest.raises(IllegalMove, match="lease"):
        resolve_end(EndReason.COMPLETED, DispatchPhase.RESERVED)


def test_an_interruption_that_is_not_the_jobs_fault_costs_it_no_attempt():
    before = Counters(crash=2, unavailable=1)

    for end in (
        EndReason.GRACEFUL_SHUTDOWN,
        EndReason.COOPERATIVE_PREEMPTION,
        EndReason.PREEMPTION_TIMEOUT,
        EndReason.RELEASED,
    ):
        assert resolve_end(end, DispatchPhase.LEASED, counters=before).counters == before


def test_success_clears_the_counters():
    assert resolve_end(EndReason.COMPLETED, DispatchPhase.LEASED, counters=SPENT).counters == Counters()


def test_the_hard_cap_raises_an_alert_as_it_lands_and_a_spent_limit_has_raised_its_own_before():
    assert resolve_end(EndReason.HARD_CAP_EXCEEDED, DispatchPhase.LEASED).rule.alert
    assert not resolve_end(EndReason.COST_LIMIT_REACHED, DispatchPhase.LEASED).rule.alert
    assert resolve_end(EndReason.MAX_RUNTIME_EXCEEDED, DispatchPhase.LEASED).rule.mark == "TIMEOUT"


def test_a_job_whose_worker_never_comes_pauses_longer_each_time_but_never_fails():
    delays, counters = [], Counters()
    for _ in range(8):
        end_result = resolve_end(EndReason.START_TIMEOUT, DispatchPhase.RESERVED, counters=counters)
        counters = end_result.counters
        delays.append(end_result.delay)

    assert end_result.target is JobState.QUEUED
    assert delays == sorted(delays)
    assert delays[0] > 0
    assert delays[-1] == Schedules().start[-1]


@pytest.mark.parametrize("first", EndReason)
def test_a_cancel_replaces_exactly_the_reasons_that_could_run_the_job_again(first):
    runs_again = resolve_end(first, DispatchPhase.LEASED, own_delays_sec=(1,)).target is JobState.QUEUED

    assert replaces(EndReason.CANCELED, first) is runs_again
    assert not any(replaces(reason, first) for reason in EndReason if reason is not EndReason.CANCELED)
