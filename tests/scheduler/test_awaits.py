"""What a worker that comes with every tick need not ask again: whether anything of its own is in line."""

from __future__ import annotations

from penstock.core.jobs.types import SECOND, AddonId
from penstock.scheduler.dispatcher import WorkerKinds

A, B = WorkerKinds(AddonId("a")), WorkerKinds(AddonId("b"))


def test_before_the_first_round_anything_may_be_in_line(works):
    assert works.dispatcher.awaits(A)


def test_who_has_nothing_in_line_is_told_so_by_the_last_round(works):
    works.fetchers.came(WorkerKinds(), works.now + 30 * SECOND)
    works.submit()
    works.step()

    assert (works.dispatcher.awaits(A), works.dispatcher.awaits(B)) == (True, False)


def test_what_may_not_start_yet_is_in_line_all_the_same(works):
    works.fetchers.came(WorkerKinds(), works.now + 30 * SECOND)
    works.machine.draining = True
    works.submit()
    works.step()

    assert works.dispatcher.awaits(A)


def test_what_becomes_ready_is_in_line_from_the_round_of_that_moment_on(works):
    works.fetchers.came(WorkerKinds(), works.now + 30 * SECOND)
    works.submit(earliest_start_at=works.now + 10 * SECOND)
    works.step()
    before = works.dispatcher.awaits(A)
    works.later(10)
    works.step()

    assert (before, works.dispatcher.awaits(A)) == (False, True)


def test_where_others_dispatch_too_nothing_can_be_said(works, monkeypatch):
    works.step()
    monkeypatch.setattr(works.store, "shared", True, raising=False)

    assert works.dispatcher.awaits(A)
