from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.jobs.load import (
    BLIND,
    REPORTED,
    SCALES,
    Busy,
    Capacity,
    QuietState,
    Reading,
    Senses,
    Thresholds,
    busy,
    observe,
)
from penstock.core.jobs.types import SECOND

NOW = 1_000_000 * SECOND
SENSES = Senses()
EDGES = Thresholds()
SCORES = st.floats(0, 10)


def readings(at=NOW, **values):
    return [Reading(name, value, at) for name, value in values.items()]


def test_the_worst_signal_decides_and_is_named():
    score = busy(readings(cpu=0.05, memory=0.3, io_pressure=20), NOW, SENSES)

    assert score == Busy(7.0, "io_pressure")


@pytest.mark.parametrize(("name", "most"), [("cpu", 1.0), ("load_per_core", 50.0), ("cpu_pressure", 100.0)])
def test_a_busy_processor_alone_is_no_reason_to_admit_nothing(name, most):
    score = busy(readings(**{"cpu": 0.0, "memory": 0.0, name: most}), NOW, SENSES)

    blind = observe(None, Busy(BLIND, "no fresh cpu"), NOW, EDGES)
    assert score.by == name
    assert observe(blind, score, NOW, EDGES).state is QuietState.BUSY


def test_load_that_a_machine_always_has_leaves_it_normal_and_load_on_top_makes_it_busy():
    def state(value, usual, name="cpu"):
        told = [*readings(cpu=0.0, memory=0.0), Reading(name, value, NOW, usual=usual)]
        blind = observe(None, Busy(BLIND, "no fresh cpu"), NOW, EDGES)
        return observe(blind, busy(told, NOW, SENSES), NOW, EDGES).state

    assert state(1.0, usual=1.0) is QuietState.NORMAL
    assert state(1.0, usual=0.8) is QuietState.NORMAL
    assert state(1.0, usual=0.1) is QuietState.BUSY
    assert state(0.1, usual=1.0) is QuietState.QUIET
    assert state(7.0, usual=4.0, name="load_per_core") is QuietState.NORMAL
    assert state(7.0, usual=0.5, name="load_per_core") is QuietState.BUSY


def test_a_machine_without_memory_admits_nothing_however_usual_that_is():
    told = [Reading("cpu", 0.0, NOW), Reading("memory", 0.99, NOW, usual=0.99)]

    assert observe(None, busy(told, NOW, SENSES), NOW, EDGES).state is QuietState.PANIC


@pytest.mark.parametrize("missing", ["cpu", "memory"])
def test_without_a_needed_signal_nothing_is_admitted(missing):
    given_ = {"cpu": 0.0, "memory": 0.0}
    del given_[missing]
    score = busy(readings(**given_), NOW, SENSES)

    assert score == Busy(BLIND, f"no fresh {missing}")
    assert Capacity().units(score.score) == 0


@pytest.mark.parametrize("name", REPORTED)
def test_a_needed_signal_of_applications_is_there_as_long_as_one_of_them_reports_it(name):
    senses = Senses(needed=frozenset({"cpu", name}))
    host = readings(cpu=0.0)

    def with_report(value, at=NOW):
        return busy([*host, Reading(name, value, at, "shop")], NOW, senses)

    assert busy(host, NOW, senses) == Busy(BLIND, f"no fresh {name}")
    assert with_report(0, NOW - senses.fresh_for - 1) == Busy(BLIND, f"no fresh {name}")
    assert with_report(0).score == 0
    assert with_report(1e9) == Busy(10, f"{name} of shop")


def test_what_an_application_says_of_its_own_processor_does_not_stand_for_the_hosts():
    of_shop = [Reading("cpu", 0.0, NOW, "shop"), Reading("memory", 0.0, NOW, "shop")]

    assert busy(of_shop, NOW, SENSES).score == BLIND


@pytest.mark.parametrize("age", [SENSES.fresh_for + 1, -1])
def test_a_stale_signal_and_one_from_the_future_are_none(age):
    assert busy(readings(at=NOW - age, cpu=0.0, memory=0.0), NOW, SENSES).score == BLIND


def test_a_stale_report_of_an_application_is_forgotten():
    old = readings(at=NOW - 2 * SENSES.fresh_for, p95_ms=9_000)

    assert busy([*readings(cpu=0.0, memory=0.0), *old], NOW, SENSES).score == 0


def test_a_signal_that_is_not_a_number_fails_closed():
    assert busy(readings(cpu=math.nan, memory=0.0), NOW, SENSES).score == 10


@settings(deadline=None)
@given(st.sampled_from(sorted(SCALES)), st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_more_of_a_signal_never_makes_the_machine_less_busy(name, one, other):
    senses = Senses(needed=frozenset())
    low, high = (busy(readings(**{name: v}), NOW, senses).score for v in sorted((one, other)))

    assert 0 <= low <= high <= 10


@pytest.mark.parametrize(
    ("score", "state"),
    [
        (0, "QUIET"),
        (2, "QUIET"),
        (2.1, "NORMAL"),
        (5, "NORMAL"),
        (5.1, "BUSY"),
        (7, "BUSY"),
        (7.1, "PANIC"),
        (8, "PANIC"),
    ],
)
def test_the_first_look_takes_the_thresholds_as_they_are(score, state):
    assert observe(None, Busy(score, ""), NOW, EDGES).state == state


def test_worse_is_believed_at_once_and_better_only_when_clearly_better():
    quiet = observe(None, Busy(1, ""), NOW, EDGES)
    worse = observe(quiet, Busy(2.1, ""), NOW + 1, EDGES)
    edge = observe(worse, Busy(1.6, ""), NOW + 2, EDGES)
    clear = observe(edge, Busy(1.5, ""), NOW + 3, EDGES)

    assert [s.state for s in (worse, edge, clear)] == ["NORMAL", "NORMAL", "QUIET"]


def test_panic_that_is_over_is_left_by_as_many_steps_as_it_takes():
    panic = observe(None, Busy(10, ""), NOW, EDGES)

    assert observe(panic, Busy(0, ""), NOW + 1, EDGES).state is QuietState.QUIET
    assert observe(panic, Busy(4.8, ""), NOW + 1, EDGES).state is QuietState.BUSY


@settings(deadline=None)
@given(st.lists(st.floats(1.6, 2.0), min_size=1, max_size=30), st.sampled_from([0.0, 4.0]))
def test_a_score_that_trembles_within_the_margin_never_flaps(scores, first):
    state = observe(None, Busy(first, ""), NOW, EDGES)
    seen = set()
    for i, score in enumerate(scores):
        state = observe(state, Busy(score, ""), NOW + i, EDGES)
        seen.add(state.state)

    assert len(seen) == 1


@settings(deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=30))
def test_the_state_is_never_better_than_the_score_says(scores):
    state = None
    for i, score in enumerate(scores):
        state = observe(state, Busy(score, ""), NOW + i, EDGES)
        plain = observe(None, Busy(score, ""), NOW, EDGES)

        assert list(QuietState).index(state.state) >= list(QuietState).index(plain.state)


def test_the_streak_runs_from_when_it_became_quiet_and_breaks_with_it():
    first = observe(None, Busy(1, ""), NOW, EDGES)
    still = observe(first, Busy(0, ""), NOW + 50, EDGES)
    loud = observe(still, Busy(3, ""), NOW + 60, EDGES)

    assert still.streak(NOW + 70) == 70
    assert loud.streak(NOW + 70) == 0


@pytest.mark.parametrize(
    ("score", "units"),
    [(0, 90), (2, 90), (2.5, 81), (3, 72), (4, 58), (5, 45), (6, 31), (7, 22), (7.5, 11), (8, 0), (10, 0)],
)
def test_the_curve_of_the_specification(score, units):
    assert Capacity().units(score) == units


@settings(deadline=None)
@given(SCORES, SCORES)
def test_a_busier_machine_never_gives_more(one, other):
    low, high = sorted((one, other))

    assert 0 <= Capacity().units(high) <= Capacity().units(low) <= Capacity().most


def test_a_fixed_capacity_asks_nobody():
    assert Capacity(fixed=4).units(10) == 4
    assert Capacity(fixed=4).most == 4


def test_what_an_application_says_does_not_stand_in_for_the_hosts_own_signal():
    told = [Reading("cpu", 0.0, 100, source="shop"), Reading("memory", 0.0, 100)]

    assert busy(told, 100, Senses()) == Busy(8.0, "no fresh cpu")
