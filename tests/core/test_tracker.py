from __future__ import annotations

from itertools import product

import pytest

from penstock.core.jobs.states import DispatchPhase, JobState, resolve_end
from penstock.core.jobs.tracker import Effect, Graces, Step, Tracker, end_of_exit
from penstock.core.jobs.types import SECOND, EndReason

T0 = 1_000 * SECOND
GRACES = Graces(cancel=10 * SECOND, term=5 * SECOND, kill=8 * SECOND)


def tracker(*dispatches, listens=False):
    made = Tracker(GRACES)
    for dispatch in dispatches:
        made.register(dispatch, listens=listens)
    return made


def climb(made, until=60):
    """Every step and when it was due, in seconds, by looking at the moments that the tracker asks for."""
    taken = []
    while (at := made.alarm()) is not None and at <= T0 + until * SECOND:
        taken += [((at - T0) // SECOND, effect.step) for effect in made.advance(at)]
    return taken


def steps(effects):
    return [effect.step for effect in effects]


def test_who_listens_has_time_to_hear_before_term_and_to_obey_before_kill():
    made = tracker("d", listens=True)

    assert made.terminate("d", EndReason.CANCELED, T0) == [Effect("d", Step.CANCEL, EndReason.CANCELED)]
    assert climb(made) == [(10, Step.TERM), (15, Step.KILL), (17, Step.FORCE), (23, Step.LOST)]


def test_who_does_not_listen_is_not_given_time_to_hear():
    made = tracker("d")

    assert steps(made.terminate("d", EndReason.CANCELED, T0)) == [Step.CANCEL, Step.TERM]
    assert climb(made)[0] == (5, Step.KILL)


def test_who_has_looked_once_listens():
    made = tracker("d")
    made.hears("d")

    assert steps(made.terminate("d", EndReason.CANCELED, T0)) == [Step.CANCEL]


def test_the_first_reason_wins_and_a_second_terminate_takes_no_step_twice():
    made = tracker("d")
    made.terminate("d", EndReason.COST_LIMIT_REACHED, T0)

    assert made.terminate("d", EndReason.CANCELED, T0 + 1) == []
    assert made.settle("d", EndReason.COMPLETED) is EndReason.COST_LIMIT_REACHED


def test_a_run_that_ends_by_itself_ends_as_it_says():
    made = tracker("d")

    assert made.settle("d", EndReason.JOB_ERROR) is EndReason.JOB_ERROR
    assert "d" not in made


@pytest.mark.parametrize(
    "late",
    [
        lambda t: t.settle("d", EndReason.COMPLETED),
        lambda t: t.terminate("d", EndReason.CANCELED, T0),
        lambda t: t.terminate("d", EndReason.CANCELED, T0, at_once=True),
        lambda t: t.ask("d"),
        lambda t: t.hears("d"),
    ],
)
def test_a_late_word_changes_nothing(late):
    made = tracker("d", "e")
    made.settle("d", EndReason.WORKER_CRASHED)
    made.register("d2")

    assert not late(made)
    assert list(made) == ["e", "d2"]
    assert made.reason("d2") is None
    assert made.alarm() is None


def test_an_identity_is_used_once():
    made = tracker("d")

    with pytest.raises(ValueError, match="once"):
        made.register("d")


def test_hurrying_takes_what_is_left_of_the_ladder_at_once_and_keeps_the_reason():
    made = tracker("d", listens=True)
    made.terminate("d", EndReason.CANCELED, T0)

    hurried = made.terminate("d", EndReason.HARD_CAP_EXCEEDED, T0 + SECOND, at_once=True)
    assert steps(hurried) == [Step.TERM, Step.KILL]
    assert {effect.reason for effect in hurried} == {EndReason.CANCELED}
    assert climb(made) == [(3, Step.FORCE), (9, Step.LOST)]


def test_asking_to_yield_forces_nothing_and_may_be_repeated():
    made = tracker("d")

    assert steps(made.ask("d")) == steps(made.ask("d")) == [Step.YIELD]
    assert made.should_yield("d")
    assert made.alarm() is None
    assert made.settle("d", EndReason.COMPLETED) is EndReason.COMPLETED


def test_what_is_not_in_flight_should_have_stopped_long_ago():
    assert tracker().should_yield("d")
    assert not tracker("d").should_yield("d")


def test_a_drain_has_one_timeout_for_all():
    made = tracker(*(f"d{n}" for n in range(40)), listens=True)
    made.drain(T0, 4 * SECOND)
    ladder = climb(made)

    assert max(at for at, _ in ladder) == 4
    assert [step for _, step in ladder].count(Step.LOST) == 40
    assert made.settle("d7", EndReason.COMPLETED) is EndReason.GRACEFUL_SHUTDOWN


def test_a_drain_does_not_slow_down_who_is_on_the_ladder_already():
    made = tracker("d")
    made.terminate("d", EndReason.CANCELED, T0)
    made.drain(T0 + SECOND, 60 * SECOND)

    assert climb(made)[0] == (5, Step.KILL)
    assert made.settle("d", EndReason.COMPLETED) is EndReason.CANCELED


@pytest.mark.parametrize("reason", EndReason)
@pytest.mark.parametrize("listens", [True, False])
def test_every_step_is_taken_once_and_in_order_whenever_the_tracker_is_looked_at(reason, listens):
    made = tracker("d", listens=listens)
    taken = steps(made.terminate("d", reason, T0))
    for second in (0, 3, 3, 11, 11, 90, 90):
        taken += steps(made.advance(T0 + second * SECOND))

    assert taken == [Step.CANCEL, Step.TERM, Step.KILL, Step.FORCE, Step.LOST]


# INVARIANTS R1: every way a process can end, in every phase, with every reason to have been told to, lands in one state.
EXITS = [*range(256), *(-signum for signum in range(1, 65))]


@pytest.mark.parametrize("phase", [DispatchPhase.LEASED, DispatchPhase.ENDING])
def test_every_exit_lands_in_exactly_one_state_whatever_it_was_told_before(phase):
    for code, reason in product(EXITS, [None, *EndReason]):
        made = tracker("d")
        if reason is not None:
            made.terminate("d", reason, T0)
        how = made.settle("d", end_of_exit(code))
        end_result = resolve_end(how, phase, first_reason=reason if phase is DispatchPhase.ENDING else None)

        assert end_result.target in JobState
        assert end_result.end is (reason or end_of_exit(code))
        assert made.settle("d", how) is None


def test_the_exit_codes_have_their_meaning():
    assert end_of_exit(0) is EndReason.COMPLETED
    assert end_of_exit(75) is EndReason.UNAVAILABLE
    assert {end_of_exit(code) for code in range(1, 256) if code != 75} == {EndReason.JOB_ERROR}
    assert {end_of_exit(-signum) for signum in range(1, 65)} == {EndReason.WORKER_CRASHED}


@pytest.mark.parametrize(
    "first", [EndReason.MAX_RUNTIME_EXCEEDED, EndReason.PREEMPTION_TIMEOUT, EndReason.GRACEFUL_SHUTDOWN]
)
def test_a_cancel_wins_over_a_stop_that_would_run_the_job_again_and_takes_no_step_twice(first):
    made = tracker("d")
    made.terminate("d", first, T0)

    assert made.terminate("d", EndReason.CANCELED, T0 + 1) == []
    assert made.settle("d", EndReason.COMPLETED) is EndReason.CANCELED


def test_a_drain_after_a_cancel_keeps_the_cancel():
    made = tracker("d")
    made.terminate("d", EndReason.PREEMPTION_TIMEOUT, T0)
    made.terminate("d", EndReason.CANCELED, T0)
    made.drain(T0, SECOND)

    assert made.settle("d", EndReason.COMPLETED) is EndReason.CANCELED
