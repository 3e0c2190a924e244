from __future__ import annotations

from itertools import product

import pytest

from penstock.core.landing import LANDINGS, End, Phase, land, replaces
from penstock.core.refusals import IllegalMove
from penstock.core.retry import Counters, Schedules
from penstock.core.states import State

LIVE = [Phase.RESERVED, Phase.LEASED, Phase.ENDING]
SPENT = Counters(crash=5, unavailable=5, error=0, start=0)

# SPEC TR-5, leased, first with a fresh job and then with one whose schedules are used up.
TR_5 = {
    End.COOPERATIVE_PREEMPTION: ("QUEUED", "QUEUED"),
    End.PREEMPTION_TIMEOUT: ("QUEUED", "QUEUED"),
    End.GRACEFUL_SHUTDOWN: ("QUEUED", "QUEUED"),
    End.LEASE_EXPIRED: ("QUEUED", "FAILED"),
    End.WORKER_CRASHED: ("QUEUED", "FAILED"),
    End.UNAVAILABLE: ("QUEUED", "BLOCKED"),
    End.START_TIMEOUT: ("QUEUED", "QUEUED"),
    End.MAX_RUNTIME_EXCEEDED: ("QUEUED", "FAILED"),
    End.HARD_CAP_EXCEEDED: ("FAILED", "FAILED"),
    End.COST_LIMIT_REACHED: ("BLOCKED", "BLOCKED"),
    End.CANCELED: ("CANCELED", "CANCELED"),
}


@pytest.mark.parametrize("end", TR_5)
def test_each_end_lands_where_the_specification_says(end):
    fresh = land(end, Phase.LEASED)
    used_up = land(end, Phase.LEASED, counters=SPENT)

    assert (str(fresh.target), str(used_up.target)) == TR_5[end]


def test_every_end_in_every_phase_lands_in_exactly_one_state_or_is_refused():
    for end, phase, first in product(End, LIVE, [None, *End]):
        try:
            landed = land(end, phase, first_reason=first)
        except IllegalMove:
            assert (phase, LANDINGS[end][0]) == (Phase.RESERVED, None)
        else:
            assert landed.target in State


@pytest.mark.parametrize("end", End)
def test_the_first_reason_wins_over_whatever_the_run_reports_later(end):
    landed = land(end, Phase.ENDING, first_reason=End.CANCELED)

    assert landed.target is State.CANCELED
    assert landed.end is End.CANCELED


@pytest.mark.parametrize("end", End)
def test_a_dispatch_ends_once(end):
    with pytest.raises(IllegalMove):
        land(end, Phase.ENDED)


def test_a_dispatch_that_never_started_cannot_complete():
    with pytest.raises(IllegalMove, match="lease"):
        land(End.COMPLETED, Phase.RESERVED)


def test_an_interruption_that_is_not_the_jobs_fault_costs_it_no_attempt():
    before = Counters(crash=2, unavailable=1)

    for end in (End.GRACEFUL_SHUTDOWN, End.COOPERATIVE_PREEMPTION, End.PREEMPTION_TIMEOUT, End.RELEASED):
        assert land(end, Phase.LEASED, counters=before).counters == before


def test_success_clears_the_counters():
    assert land(End.COMPLETED, Phase.LEASED, counters=SPENT).counters == Counters()


def test_the_hard_cap_raises_an_alert_as_it_lands_and_a_spent_limit_has_raised_its_own_before():
    assert land(End.HARD_CAP_EXCEEDED, Phase.LEASED).alert
    assert not land(End.COST_LIMIT_REACHED, Phase.LEASED).alert
    assert land(End.MAX_RUNTIME_EXCEEDED, Phase.LEASED).mark == "TIMEOUT"


def test_a_job_whose_worker_never_comes_pauses_longer_each_time_but_never_fails():
    delays, counters = [], Counters()
    for _ in range(8):
        landed = land(End.START_TIMEOUT, Phase.RESERVED, counters=counters)
        counters = landed.counters
        delays.append(landed.delay)

    assert landed.target is State.QUEUED
    assert delays == sorted(delays)
    assert delays[0] > 0
    assert delays[-1] == Schedules().start[-1]


@pytest.mark.parametrize("first", End)
def test_a_cancel_replaces_exactly_the_reasons_that_could_run_the_job_again(first):
    runs_again = land(first, Phase.LEASED, own_delays_sec=(1,)).target is State.QUEUED

    assert replaces(End.CANCELED, first) is runs_again
    assert not any(replaces(reason, first) for reason in End if reason is not End.CANCELED)
