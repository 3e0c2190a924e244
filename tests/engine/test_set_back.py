"""A wall clock that is set back by an hour must not put anybody to sleep for an hour."""

from __future__ import annotations

import pytest

from penstock.core.words import SECOND

T0 = 1_900_000_000 * SECOND


class Times:
    """A wall that can be set, and the clock that goes on beside it."""

    def __init__(self):
        self.wall, self.steady = T0, 0

    def later(self, seconds):
        self.wall, self.steady = self.wall + seconds * SECOND, self.steady + seconds * SECOND


@pytest.fixture
def times():
    return Times()


@pytest.mark.parametrize("by", [-3600, 3600])
def test_the_keeper_goes_on_when_the_clock_is_set(times, by):
    from penstock.engine.clock import SteadyClock
    from penstock.engine.keeper import Keeper
    from penstock.engine.rules import Rules
    from penstock.stores.memory import MemoryStore

    clock = SteadyClock(lambda: times.wall, lambda: times.steady)
    store, rules = MemoryStore(clock), Rules()
    looks = []
    overdue, store.overdue = store.overdue, lambda most: looks.append(clock()) or overdue(most)
    keeper = Keeper(store, rules, clock)
    keeper.step(clock())
    times.later(1)
    times.wall += by * SECOND
    keeper.step(clock())
    times.later(1)

    wish = keeper.step(clock())
    assert len(looks) == 3
    assert wish <= clock() + rules.prune_every


@pytest.mark.parametrize(
    ("ahead", "later"),
    [(-1, False), (0, False), (1, True), (10, True), (11, False), (3600, False)],
)
def test_a_moment_that_is_too_far_away_is_from_before_the_clock_was_set_back(ahead, later):
    from penstock.engine.clock import comes_later

    assert comes_later(T0 + ahead, T0, 10) is later


def test_a_pulse_goes_on_when_the_clock_is_set_back(works):
    from penstock.engine.pulse import Pulse

    pulse = Pulse(works.store, works.machine, works.rules.host)
    pulse.step(works.now)
    works.later(-3600)
    pulse.step(works.now)

    assert [second.at for second in pulse.history()][-1] == works.now
