from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.jobs.admission import Account, FairShare
from penstock.core.jobs.types import MINUTE, SECOND

SHARING = FairShare(half_life=5 * MINUTE)
STEPS = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 90)), min_size=1, max_size=20)


def average(account, now):
    probe = Account(**{name: getattr(account, name) for name in Account.__slots__})
    probe.hold(0, now, SHARING)
    return probe.average


def test_after_one_half_life_half_of_what_is_held_counts():
    account = Account()
    account.hold(80, 0, SHARING)

    assert average(account, SHARING.half_life) == pytest.approx(40)
    assert average(account, 100 * SHARING.half_life) == pytest.approx(80)


def test_what_was_given_back_is_forgotten_by_halves():
    account = Account(average=64.0)

    assert average(account, 3 * SHARING.half_life) == pytest.approx(8)


def test_a_start_counts_at_once_though_no_time_has_passed():
    account = Account()
    before = account.key(0, SHARING)
    account.hold(10, 0, SHARING)

    assert account.key(0, SHARING) > before


def test_twice_the_weight_may_hold_twice_as_much():
    heavy, light = Account(weight=200), Account(weight=100)
    heavy.hold(60, 0, SHARING)
    light.hold(30, 0, SHARING)

    assert heavy.key(MINUTE, SHARING) == pytest.approx(light.key(MINUTE, SHARING))


@settings(deadline=None)
@given(STEPS, st.integers(1, 1_000))
def test_the_account_does_not_depend_on_how_often_it_was_looked_at(steps, gap):
    seldom, often, now = Account(), Account(), 0
    for wait, units in steps:
        seldom.hold(units - seldom.units, now, SHARING)
        often.hold(units - often.units, now, SHARING)
        for moment in range(now, now + wait * SECOND, gap * SECOND):
            often.hold(0, moment, SHARING)
        now += wait * SECOND

    assert average(often, now) == pytest.approx(average(seldom, now), abs=1e-9)
    assert 0 <= average(seldom, now) <= max(units for _, units in steps)


def test_a_clock_that_steps_back_changes_nothing():
    account = Account()
    account.hold(50, 10 * MINUTE, SHARING)
    account.hold(-50, 20 * MINUTE, SHARING)
    before = account.average
    account.hold(0, 5 * MINUTE, SHARING)

    assert account.average == before
    assert account.at == 20 * MINUTE
