"""What a heartbeat gives occasion to tell is written with it, in every store."""

from __future__ import annotations

from penstock.core.jobs.changes import Note, Renewal
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.types import SECOND
from penstock.stores.api import Renew, committed


def beats(kit, *dispatches, tell, **more):
    until = kit.now + 30 * SECOND
    return committed(
        kit.store,
        Renew([Renewal(dispatch_id=d.dispatch_id, expires_at=until, **more) for d in dispatches], tell),
    )


def test_it_stands_in_the_jobs_trail_or_in_nobodys(kit):
    job, dispatch = kit.start()
    notes = [Note(EventKind.ALERT, "mine", {"x": 1}), Note(EventKind.ALERT, "ours", {"y": 2}, of_job=False)]
    beats(kit, dispatch, tell=lambda _: notes, checkpoint="[1]")
    mine = [(e.reason, dict(e.data)) for e in kit.store.events(0, 100, job.job_id) if e.kind == "ALERT"]
    all_of_them = [(e.reason, e.job_id) for e in kit.store.events(0, 100) if e.kind == "ALERT"]

    assert mine == [("mine", {"x": 1})]
    assert all_of_them == [("mine", job.job_id), ("ours", None)]


def test_it_is_told_what_the_addon_has_spent_with_each_amount(kit):
    first, second = kit.start(cost_units=1)[1], kit.start(cost_units=1)[1]
    seen = []
    beats(kit, first, second, tell=lambda s: seen.append(dict(s.addon_spent)) or (), spent=300)
    beats(kit, first, tell=lambda s: seen.append(dict(s.addon_spent)) or (), spent=310)
    beats(kit, first, tell=lambda s: seen.append(dict(s.addon_spent)) or ())

    assert seen[-4:] == [
        {"day": 300, "month": 300},
        {"day": 600, "month": 600},
        {"day": 610, "month": 610},
        {},
    ]


def test_nothing_is_told_of_a_heartbeat_that_came_too_late(kit):
    _, dispatch = kit.start()
    kit.later(30)
    [renewed] = beats(kit, dispatch, tell=lambda _: [Note(EventKind.ALERT, "late")])

    assert renewed is None
    assert "late" not in [e.reason for e in kit.store.events(0, 100)]
