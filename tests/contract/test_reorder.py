"""Turns that were reckoned under another aging setting are put right, in bounded steps."""

from __future__ import annotations

from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.types import MINUTE, SECOND
from penstock.stores.api import Reorder, committed

SLOW, QUICK = Aging(60 * MINUTE), Aging(1 * SECOND)


def order(kit):
    return [dispatch.job_id for dispatch in kit.tick(capacity=90)]


def reorder(kit, aging, step=2):
    steps, last = 0, committed(kit.store, Reorder(aging, 0, step))
    while last:
        steps, last = steps + 1, committed(kit.store, Reorder(aging, last, step))
    return steps


def test_under_quicker_aging_the_older_one_goes_first(kit):
    [old] = kit.submit(priority=50, cost_units=45)
    kit.later(60)
    [new] = kit.submit(priority=55, cost_units=45)
    reorder(kit, QUICK)

    assert order(kit) == [old, new]


def test_under_slower_aging_the_higher_priority_does(kit):
    [old] = kit.submit(priority=50, cost_units=45)
    kit.later(600)
    [new] = kit.submit(priority=55, cost_units=45)
    reorder(kit, SLOW)

    assert order(kit) == [new, old]


def test_what_is_not_in_line_yet_is_put_right_too(kit):
    [later] = kit.submit(priority=55, cost_units=45, earliest_start_at=kit.now + 60 * SECOND)
    [now] = kit.submit(priority=50, cost_units=45)
    reorder(kit, QUICK)
    kit.later(60)

    assert order(kit) == [now, later]


def test_it_goes_in_steps_and_past_what_is_not_queued(kit):
    kit.submit(n=3, cost_units=90)
    kit.start(priority=99, cost_units=90)
    kit.submit(n=3, cost_units=90)

    assert reorder(kit, QUICK) == 3


def test_nothing_else_is_changed_by_it(kit):
    kit.submit(n=3)
    before = kit.everything()
    reorder(kit, SLOW)

    assert kit.everything() == before
