"""What a worker that comes with every tick need not ask again: whether anything of its own is in line."""

from __future__ import annotations

from penstock.core.jobs.types import SECOND, AddonId
from penstock.core.jobs.workers import WorkerKinds

A, B = WorkerKinds(AddonId("a")), WorkerKinds(AddonId("b"))


def test_before_the_first_round_anything_may_be_in_line(kit):
    assert kit.dispatcher.awaits(A)


def test_who_has_nothing_in_line_is_told_so_by_the_last_round(kit):
    kit.pulling_workers.came(WorkerKinds(), kit.now + 30 * SECOND)
    kit.submit()
    kit.step()

    assert (kit.dispatcher.awaits(A), kit.dispatcher.awaits(B)) == (True, False)


def test_what_may_not_start_yet_is_in_line_all_the_same(kit):
    kit.pulling_workers.came(WorkerKinds(), kit.now + 30 * SECOND)
    kit.machine.draining = True
    kit.submit()
    kit.step()

    assert kit.dispatcher.awaits(A)


def test_what_becomes_ready_is_in_line_from_the_round_of_that_moment_on(kit):
    kit.pulling_workers.came(WorkerKinds(), kit.now + 30 * SECOND)
    kit.submit(earliest_start_at=kit.now + 10 * SECOND)
    kit.step()
    before = kit.dispatcher.awaits(A)
    kit.later(10)
    kit.step()

    assert (before, kit.dispatcher.awaits(A)) == (False, True)


def test_where_others_dispatch_too_nothing_can_be_said(kit, monkeypatch):
    kit.step()
    monkeypatch.setattr(kit.store, "shared", True, raising=False)

    assert kit.dispatcher.awaits(A)
