"""A schedule in every store: one row that changes by its version, and the job of a moment in the same transaction."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from msgspec.structs import replace
from tests.contract.conftest import T0

from penstock.core.errors import BadIntent, QueueFull, Unavailable
from penstock.core.jobs import changes, moments, schedules
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.schedules import Overlap, Schedule
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import HOUR, SECOND, Constraint
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.schedules import ScheduleFirer, ScheduleService
from penstock.stores.api import Apply, ChangeSchedule, Depth, Query, RecordLoad, committed

NIGHTLY = Schedule(
    "nightly",
    Intent(
        "reports",
        "report",
        payload='{"a": "\\u0000"}',
        constraints=Constraint(5),
        tags=("x",),
        labels=("gpu",),
    ),
    every_sec=3_600,
)


def write(kit, change, depth=None):
    return committed(kit.store, ChangeSchedule(change, depth or Depth()))


def add(kit, schedule=NIGHTLY):
    return write(kit, schedules.add(schedule, kit.now, "me")).record


def trail(kit):
    kinds = [kind for kind in EventKind if kind.startswith("SCHEDULE_")]
    return [(str(event.kind), event.reason) for event in kit.store.events_of(kinds, 0, 1_000)]


def test_a_schedule_is_read_as_it_was_written(kit):
    record = add(kit)

    assert [record] == kit.store.schedules()
    assert record == kit.store.schedule("nightly")
    assert record.schedule == replace(
        NIGHTLY, anchor=T0, created_at=T0, created_by="me", edited_at=T0, edited_by="me"
    )
    assert None is kit.store.schedule("Nightly")
    assert [("SCHEDULE_SET", "added")] == trail(kit)


def test_the_alarm_is_the_first_moment_of_all_schedules(kit):
    assert None is kit.store.schedule_alarm()
    add(kit)
    add(kit, replace(NIGHTLY, name="often", every_sec=60))

    assert T0 + 60 * SECOND == kit.store.schedule_alarm()
    assert [] == kit.store.schedules(due_by=T0 + 59 * SECOND)
    assert ["often"] == [record.name for record in kit.store.schedules(due_by=T0 + 60 * SECOND)]


def test_a_schedule_is_added_once(kit):
    add(kit)
    before = kit.everything(), kit.store.schedules()

    assert None is write(kit, schedules.add(NIGHTLY, kit.now, "other"))
    assert before == (kit.everything(), kit.store.schedules())


def test_a_moment_and_its_job_are_one_write(kit):
    record = add(kit)
    kit.later(3_600)

    written = write(kit, schedules.look(record, kit.now, ()))

    [job] = kit.store.find(Query(tag="schedule:nightly"))
    assert written.receipt.created
    assert job.job_id == written.receipt.job_id == written.record.state.history[0].job_id
    assert (job.job_id,) == written.record.state.active
    assert T0 + HOUR == written.record.state.last_moment
    assert written.record == kit.store.schedule("nightly")
    assert T0 + 2 * HOUR == kit.store.schedule_alarm()
    assert job.intent.payload == NIGHTLY.intent.payload
    assert job.intent.labels == ("gpu",)
    fired = kit.store.events_of([EventKind.SCHEDULE_FIRED], 0, 10)
    assert [(job.job_id, "nightly", "reports")] == [
        (event.data["job_id"], event.data["schedule"], event.data["addon_id"]) for event in fired
    ]


def test_a_decision_on_an_older_version_changes_nothing(kit):
    record = add(kit)
    kit.later(3_600)
    fired = write(kit, schedules.look(record, kit.now, ())).record
    before = kit.everything(), kit.store.schedules()

    assert None is write(kit, schedules.look(record, kit.now, ()))
    assert None is write(kit, schedules.pause(record, kit.now, "me"))
    assert None is write(kit, schedules.remove(record, kit.now, "me"))
    assert before == (kit.everything(), kit.store.schedules())
    assert fired == kit.store.schedule("nightly")


@pytest.mark.parametrize("overlap", [Overlap.QUEUE, Overlap.CANCEL_RUNNING])
def test_a_moment_that_a_dead_scheduler_left_waiting_is_seen_without_a_wake_up(kit, monkeypatch, overlap):
    """
    Two schedulers decide on a moment. One finds the earlier job running, writes that the moment waits, which is no
    event, and dies. The other one was slower; its next moment is hours away.
    """
    add(kit, replace(NIGHTLY, overlap=overlap))
    kit.later(3_600)
    canceled = []
    firer = ScheduleFirer(kit.store, SchedulerRules(), lambda job_id, _: canceled.append(job_id))
    firer.step(kit.now)
    [record] = kit.store.schedules()
    [running] = record.state.active
    kit.later(3_600)
    read = kit.store.jobs

    def read_slowly(job_ids):
        jobs = read(job_ids)
        monkeypatch.undo()
        assert write(kit, schedules.look(record, kit.now, ())).record.state.pending
        return jobs

    monkeypatch.setattr(kit.store, "jobs", read_slowly)
    due = firer.step(kit.now)
    assert due <= kit.now + 5 * SECOND
    if overlap == Overlap.QUEUE:
        cancel = changes.cancel(
            kit.store.job(running), None, kit.now, grace=SECOND, schedules=Schedules(), ordering=Ordering()
        )
        committed(kit.store, Apply([cancel]))

    kit.later(5)
    firer.step(kit.now)

    assert canceled == ([] if overlap == Overlap.QUEUE else [running])
    assert len(kit.store.find(Query(tag="schedule:nightly"))) == (2 if overlap == Overlap.QUEUE else 1)


def forget_zone(monkeypatch, zone):
    """From now on this host does not know the zone, as after an update that dropped its name."""
    known = moments._known_zone
    monkeypatch.setattr(moments, "_known_zone", lambda name: None if name == zone else known(name))


def test_a_schedule_whose_zone_this_host_does_not_know_stops_no_other(kit, monkeypatch):
    hourly = replace(NIGHTLY, every_sec=None, cron="0 * * * *")
    add(kit, replace(hourly, name="kyiv", zone="Europe/Kyiv"))
    add(kit, hourly)
    forget_zone(monkeypatch, "Europe/Kyiv")
    firer = ScheduleFirer(kit.store, SchedulerRules(), None)
    kit.later(3_600)

    due = firer.step(kit.now)

    [job] = kit.store.find(Query())
    assert "schedule:nightly" in job.intent.tags
    assert kit.now < due <= kit.now + 5 * SECOND


def test_the_owner_is_told_once_of_a_schedule_that_does_not_fire(kit, monkeypatch):
    add(kit, replace(NIGHTLY, every_sec=None, cron="0 * * * *", zone="Europe/Kyiv"))
    forget_zone(monkeypatch, "Europe/Kyiv")
    firer = ScheduleFirer(kit.store, SchedulerRules(), None)
    kit.later(3_600)

    for _ in range(30):
        firer.step(kit.now)
        kit.later(5)

    [alert] = kit.store.events_of([EventKind.ALERT], 0, 10)
    assert ("schedule_stuck", "nightly", "reports") == (
        alert.reason,
        alert.data["schedule"],
        alert.data["addon_id"],
    )
    assert (
        "schedule nightly does not fire: this host does not know the time zone 'Europe/Kyiv': update its package tzdata"
        == alert.data["text"]
    )


def test_a_host_that_does_not_know_a_zone_says_nothing_while_another_fires(kit, monkeypatch):
    add(kit, replace(NIGHTLY, every_sec=None, cron="* * * * *", zone="Europe/Kyiv"))
    without_zone, with_zone = (ScheduleFirer(kit.store, SchedulerRules(), None) for _ in range(2))

    for _ in range(30):
        kit.later(60)
        with monkeypatch.context() as here:
            forget_zone(here, "Europe/Kyiv")
            without_zone.step(kit.now)
        with_zone.step(kit.now)

    assert [] == kit.store.events_of([EventKind.ALERT], 0, 10)
    assert 1 == len(kit.store.find(Query(tag="schedule:nightly")))


def test_a_schedule_of_an_unknown_zone_can_be_paused_and_edited_but_not_run(kit, monkeypatch):
    service = ScheduleService(kit.store, SchedulerRules())
    add(kit, replace(NIGHTLY, every_sec=None, cron="0 * * * *", zone="Europe/Kyiv"))
    forget_zone(monkeypatch, "Europe/Kyiv")

    before = kit.everything(), kit.store.schedules()
    for refused in (service.run_now, partial(service.edit, missed="all")):
        with pytest.raises((Unavailable, BadIntent), match="zone"):
            refused("nightly")
    assert before == (kit.everything(), kit.store.schedules())

    service.pause("nightly")
    assert None is kit.store.schedule_alarm()
    with pytest.raises(Unavailable, match="does not know the time zone 'Europe/Kyiv'"):
        service.resume("nightly")
    service.edit("nightly", zone="Europe/Kiev")
    service.resume("nightly")
    assert None is not kit.store.schedule_alarm()


@pytest.mark.parametrize("restarted", [True, False])
def test_a_clock_that_was_a_year_ahead_silences_no_schedule(kit, restarted):
    add(kit)
    right, firer = kit.now, ScheduleFirer(kit.store, SchedulerRules(), None)
    firer.step(kit.now)
    kit.later(365 * 86_400)
    firer.step(kit.now)
    [early] = kit.store.find(Query())
    kit.clock.now = right
    cancel(kit, early.job_id)

    firer = ScheduleFirer(kit.store, SchedulerRules(), None) if restarted else firer
    assert right + HOUR == firer.step(kit.now)
    kit.later(3_600)
    firer.step(kit.now)

    assert 2 == len(kit.store.find(Query(tag="schedule:nightly")))
    assert ("SCHEDULE_SET", "clock_set_back") in trail(kit)


def cancel(kit, job_id):
    change = changes.cancel(
        kit.store.job(job_id), None, kit.now, grace=SECOND, schedules=Schedules(), ordering=Ordering()
    )
    committed(kit.store, Apply([change]))


def test_schedulers_that_race_for_a_moment_submit_one_job(kit):
    record = add(kit)
    kit.later(3_600)
    change = schedules.look(record, kit.now, ())

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda _: write(kit, change), range(16)))

    assert 1 == sum(answer is not None for answer in written)
    assert 1 == len(kit.store.find(Query()))
    assert [("SCHEDULE_SET", "added"), ("SCHEDULE_FIRED", "due")] == trail(kit)


def test_a_removed_schedule_is_gone_and_an_older_decision_does_not_touch_its_successor(kit):
    record = add(kit)
    write(kit, schedules.remove(record, kit.now, "me"))
    again = add(kit)

    assert [again] == kit.store.schedules()
    assert again.version > 0
    kit.later(1)
    assert None is not write(kit, schedules.pause(again, kit.now, "me"))
    assert None is kit.store.schedule_alarm()
    assert None is write(kit, schedules.remove(again, kit.now, "me"))


def test_a_full_queue_leaves_the_moment_due(kit):
    record = add(kit)
    kit.submit()
    kit.later(3_600)
    before = kit.everything(), kit.store.schedules()
    change = schedules.look(record, kit.now, ())

    with pytest.raises(QueueFull):
        write(kit, change, Depth(total=1))

    assert before == (kit.everything(), kit.store.schedules())
    assert None is not write(kit, change, Depth(total=2))


def test_a_run_by_hand_that_is_repeated_with_its_key_is_one_job(kit):
    record = add(kit)
    first = write(kit, schedules.run_now(record, kit.now, "me", (), "k1"))
    kit.later(5)

    again = write(kit, schedules.run_now(first.record, kit.now, "me", (), "k1"))

    assert first.receipt.created
    assert not again.receipt.created
    assert first.receipt.job_id == again.receipt.job_id
    assert first.record.state == again.record.state
    assert [("SCHEDULE_SET", "added"), ("SCHEDULE_FIRED", "run")] == trail(kit)


def test_a_pruned_job_leaves_its_schedule_alone(kit):
    from penstock.stores.api import Prune

    record = add(kit, replace(NIGHTLY, intent=Intent("a", "t")))
    kit.later(3_600)
    record = write(kit, schedules.look(record, kit.now, ())).record
    [dispatch] = kit.tick(lease=True)
    kit.end(dispatch)
    kit.later(60)

    assert [("SCHEDULE_SET", "added"), ("SCHEDULE_FIRED", "due")] == trail(kit)
    assert 1 == committed(kit.store, Prune(kit.now, 10))
    assert [record] == kit.store.schedules()
    assert [("SCHEDULE_SET", "added")] == trail(kit)  # else the trail would grow for ever
    kit.later(3_600)
    assert None is not write(kit, schedules.look(record, kit.now, record.state.active))


def test_the_load_of_an_hour_is_blended_with_the_weeks_before(kit):
    for busy in (4.0, 8.0):
        committed(kit.store, RecordLoad("here", 5, busy))
    committed(kit.store, RecordLoad("there", 5, 2.0))
    committed(kit.store, RecordLoad("there", 167, 1.0))

    assert {5: pytest.approx((5.2 + 2) / 2), 167: 1.0} == kit.store.load_hours()
