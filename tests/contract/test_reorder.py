"""Turns that were reckoned under another aging setting are put right, in bounded steps."""

from __future__ import annotations

from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.types import MINUTE, SECOND
from penstock.stores.api import Reorder, committed

SLOW, QUICK = Aging(60 * MINUTE), Aging(1 * SECOND)


def order(yard):
    return [dispatch.job_id for dispatch in yard.tick(capacity=90)]


def reorder(yard, aging, step=2):
    steps, last = 0, committed(yard.store, Reorder(aging, 0, step))
    while last:
        steps, last = steps + 1, committed(yard.store, Reorder(aging, last, step))
    return steps


def test_under_quicker_aging_the_older_one_goes_first(yard):
    [old] = yard.submit(priority=50, cost_units=45)
    yard.later(60)
    [new] = yard.submit(priority=55, cost_units=45)
    reorder(yard, QUICK)

    assert order(yard) == [old, new]


def test_under_slower_aging_the_higher_priority_does(yard):
    [old] = yard.submit(priority=50, cost_units=45)
    yard.later(600)
    [new] = yard.submit(priority=55, cost_units=45)
    reorder(yard, SLOW)

    assert order(yard) == [new, old]


def test_what_is_not_in_line_yet_is_put_right_too(yard):
    [later] = yard.submit(priority=55, cost_units=45, earliest_start_at=yard.now + 60 * SECOND)
    [now] = yard.submit(priority=50, cost_units=45)
    reorder(yard, QUICK)
    yard.later(60)

    assert order(yard) == [now, later]


def test_it_goes_in_steps_and_past_what_is_not_queued(yard):
    yard.submit(n=3, cost_units=90)
    yard.start(priority=99, cost_units=90)
    yard.submit(n=3, cost_units=90)

    assert reorder(yard, QUICK) == 3


def test_nothing_else_is_changed_by_it(yard):
    yard.submit(n=3)
    before = yard.everything()
    reorder(yard, SLOW)

    assert yard.everything() == before
