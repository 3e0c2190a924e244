"""Arrays, batches and schedules of a trail submit their jobs in the play, by the rules that they have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.scheduler.conftest import make

from penstock.core.errors import BadIntent
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.schedules import Missed, Overlap, Schedule
from penstock.core.jobs.types import MINUTE, SECOND
from penstock.scheduler.arrays import ArrayService
from penstock.scheduler.batches import BatchRequest, BatchService
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.scheduler.maintenance import recover
from penstock.scheduler.schedules import ScheduleFirer, ScheduleService
from penstock.simulation import change_schedules, figures, play, recorded
from penstock.stores.api import Depth, Prune, Query, committed

ANY = WorkerKinds()


class Life:
    """A scheduler in memory whose jobs run for as long as the test says."""

    def __init__(self):
        self.kit = kit = make("memory", None).under(lease_for=10**12)
        self.store, self.rules = kit.store, kit.rules
        self.schedules, self.arrays = (
            ScheduleService(kit.store, kit.rules),
            ArrayService(kit.store, kit.rules, kit.job_service),
        )
        self.batches = BatchService(kit.store, kit.rules, kit.job_service)
        self.firer = ScheduleFirer(kit.store, kit.rules, kit.job_service.cancel)
        self.began = kit.now

    def add(self, name="s", addon="a", units=10, **fields):
        intent = Intent(addon_id=addon, job_type="x", cost_units=units)
        self.schedules.add(Schedule(name, intent, **{"cron": "* * * * *"} | fields))

    def live(self, seconds, lasts=10, places=100, step=5):
        """Jobs that start run for so many seconds."""
        for _ in range(seconds // step):
            self.kit.later(step)
            self.firer.step(self.kit.now)
            for dispatch in self.store.live():
                if dispatch.phase == "ending" or self.kit.now - dispatch.started_at >= lasts * SECOND:
                    self.kit.job_service.end(dispatch.dispatch_id)
            self.firer.step(self.kit.now)
            free = places - len(self.store.live())
            if free > 0:
                self.kit.job_service.claim(ANY, free, "w")

    def fired(self):
        """The moments that became jobs, as minutes."""
        events = [
            e for e in self.store.events(0, 100_000) if e.kind == "SCHEDULE_FIRED" and e.reason == "due"
        ]
        return sorted(e.data["moment"] for e in events)

    def play(self, rules=None, **changes):
        recording = recorded(self.store)
        load = change_schedules(recording.load, changes, most_units=100) if changes else recording.load
        return play(load, rules or self.rules, hosts=recording.hosts)

    def minutes(self, played):
        return [round((at - self.began) / MINUTE, 2) for at in played.load.at]


def counts(played):
    [schedule] = figures(played).schedules
    return schedule.submitted, schedule.skipped, schedule.missed


@pytest.fixture
def life():
    return Life()


def test_the_moments_of_a_schedule_are_played_as_they_were(life):
    life.add()
    life.live(600, lasts=20)
    played = life.play()

    assert counts(played) == (len(life.fired()), 0, 0)
    assert figures(played).everything.jobs == len(life.store.find(Query(limit=1_000)))
    assert {round(wait / SECOND) for wait in played.waits()} == {0}


def test_fewer_units_make_overlap_skip_drop_more_and_queue_drop_none(life):
    """Two schedules of half a minute's work each minute: together they fit on 20 units, on 10 they do not."""
    life.add("a", overlap=Overlap.SKIP)
    life.add("b", addon="b")
    life.live(1_800, lasts=45)
    narrow = replace(life.rules, capacity=Capacity(fixed=10))
    wide, less = figures(life.play()).schedules, figures(life.play(narrow)).schedules
    queued = figures(life.play(narrow, a={"overlap": "queue"}, b={"overlap": "queue"})).schedules

    assert [schedule.skipped for schedule in wide] == [0, 0]
    assert all(schedule.skipped > 3 for schedule in less)
    assert [(schedule.submitted, schedule.skipped) for schedule in queued] == [
        (schedule.submitted, 0) for schedule in wide
    ]


def test_a_moment_does_what_its_recorded_job_did_and_another_one_what_one_of_them_did(life):
    life.add()
    life.live(300, lasts=20)
    life.live(300, lasts=40)
    played = life.play(s={"every_sec": "30"})
    lengths = {runs_for // SECOND for runs_for in played.load.runs_for}

    assert len(played.load) > 11
    assert lengths <= {20, 40}
    assert list(played.load.runs_for) == list(life.play(s={"every_sec": "30"}).load.runs_for)


def test_a_job_that_its_schedule_canceled_is_canceled_only_where_it_overlaps(life):
    """Each job is canceled after a minute. Every five minutes it has two minutes, twice as long as it was seen."""
    life.add(overlap=Overlap.CANCEL_RUNNING)
    life.live(600, lasts=1_000)
    often, seldom = life.play(), life.play(s={"cron": "*/5 * * * *"})

    assert figures(often).everything.canceled > 5
    assert figures(seldom).everything.canceled == 0


def test_a_job_that_its_schedule_canceled_before_an_edit_runs_on(life):
    life.add(overlap=Overlap.CANCEL_RUNNING)
    life.live(300, lasts=1_000)
    canceled = [job for job in life.store.find(Query(limit=100)) if job.state == "CANCELED"]
    life.schedules.edit("s", cron="0 0 1 1 *")
    played, notes = life.play(), recorded(life.store).notes

    assert len(canceled) > 2
    assert figures(played).everything.canceled == 0
    assert any("edited or removed" in note for note in notes)


def test_a_run_by_hand_is_in_the_way_of_the_next_moment(life):
    life.add(cron="0 * * * *")
    life.live(60)
    life.schedules.run_now("s", by="me")
    life.live(7_200, lasts=4_000)
    played = life.play()

    assert counts(played)[:2] == (1, 1)
    assert len(played.load) == 2


def test_a_pause_stops_the_moments_until_it_is_resumed(life):
    life.add()
    life.live(300)
    before = len(life.fired())
    life.schedules.pause("s")
    life.live(600)
    life.schedules.resume("s")
    life.live(300)
    played = life.play()

    assert before < len(life.fired()) < 13
    assert counts(played) == (len(life.fired()), 0, 0)


@pytest.mark.parametrize(("missed", "lost"), [(Missed.SKIP, 9), (Missed.LATEST, 9), (Missed.ALL, 0)])
def test_moments_at_which_no_scheduler_ran_are_missed_in_the_play_too(life, missed, lost):
    life.add(missed=missed)
    life.live(60, lasts=10)
    life.kit.later(1)
    before = len(life.fired())
    life.kit.later(599)
    recover(life.store, life.rules)
    life.live(300, lasts=5)
    played = life.play()

    assert counts(played)[0] == len(life.fired())
    assert counts(played)[2] == lost
    assert before == 1


def test_a_moment_waits_while_the_queue_is_full(life):
    life.add(cron="0 * * * *")
    life.kit.submit(n=2, cost_units=90)
    life.live(7_200, lasts=4_000)
    played = life.play(replace(life.rules, depth=Depth(total=1), capacity=Capacity(fixed=90)))

    assert counts(played)[0] >= 1
    assert figures(played).everything.refused == 1


def test_moments_of_which_jobs_were_forgotten_are_not_played(life):
    life.add()
    life.live(600, lasts=5)
    committed(life.store, Prune(life.kit.now - 300 * SECOND, 1_000))
    life.live(60, lasts=5)
    played = life.play()

    assert counts(played)[0] <= len(life.fired()) < 8


def test_a_schedule_that_cannot_be_is_refused(life):
    life.add("a.b")
    life.live(120)
    load = recorded(life.store).load

    with pytest.raises(ValueError, match="has no schedule 'c'; there are a.b"):
        change_schedules(load, {"c": {"cron": "* * * * *"}}, most_units=90)
    with pytest.raises(ValueError, match=r"schedules.a.b.name: must be one of cron"):
        change_schedules(load, {"a.b": {"name": "x"}}, most_units=90)
    with pytest.raises(ValueError, match="is not a whole number"):
        change_schedules(load, {"a.b": {"every_sec": "x"}}, most_units=90)
    with pytest.raises(BadIntent, match="overlap"):
        change_schedules(load, {"a.b": {"overlap": "sometimes"}}, most_units=90)


# arrays and batches


def test_an_array_plays_all_of_its_indices_and_at_most_so_many_at_once(life):
    """When the trail ends, four of ten have run and two run."""
    life.arrays.submit(Intent(addon_id="a", job_type="x", cost_units=10), "0-9%2")
    life.live(60, lasts=20)
    played = life.play()

    assert figures(played).everything.jobs == 10
    assert played.lasted // SECOND in range(100, 116)
    assert max(running(played)) == 2


def running(played):
    """How many run when each begins."""
    spans = list(zip(played.player.started_at, played.player.ended_at, strict=True))
    return [sum(began <= at < ended for began, ended in spans) for at, _ in spans]


def test_more_units_play_an_array_wider_than_it_was(life):
    life.arrays.submit(Intent(addon_id="a", job_type="x", cost_units=30), "0-11%6")
    life.live(300, lasts=20)
    narrow = life.play(replace(life.rules, capacity=Capacity(fixed=30)))

    assert max(running(life.play())) == 3
    assert max(running(narrow)) == 1
    assert figures(narrow).everything.jobs == 12


def test_an_array_that_was_canceled_makes_no_more_jobs(life):
    record, _ = life.arrays.submit(Intent(addon_id="a", job_type="x", cost_units=10), "0-9%2")
    life.live(60, lasts=20)
    life.arrays.cancel(record.array.array_id)
    life.live(60, lasts=20)
    everything = figures(life.play()).everything

    assert 4 <= everything.jobs <= 6
    assert everything.canceled == 2


def test_indices_whose_jobs_were_forgotten_are_not_played_again(life):
    life.arrays.submit(Intent(addon_id="a", job_type="x", cost_units=10), "0-9%2")
    life.live(60, lasts=20)
    done = len([job for job in life.store.find(Query(limit=100)) if job.state == "DONE"])
    committed(life.store, Prune(life.kit.now, 1_000))

    assert done > 0
    assert figures(life.play()).everything.jobs == 10 - done


def test_an_array_that_no_host_can_run_is_refused_as_a_whole(life):
    life.arrays.submit(Intent(addon_id="a", job_type="x", cost_units=30), "0-9%2")
    life.live(60, lasts=20)

    assert figures(life.play(replace(life.rules, capacity=Capacity(fixed=20)))).everything.refused == 10


def test_a_job_waits_for_a_whole_array_and_a_callback_for_its_batch(life):
    from penstock.core.jobs.dependencies import parse

    work = Intent(addon_id="a", job_type="x", cost_units=10)
    record, _ = life.arrays.submit(work, "0-5%2")
    life.kit.submit(after=(parse(f"{record.array.array_id}:done"),), cost_units=10)
    life.batches.submit(BatchRequest("b", "a", [work] * 3, on_end=work, on_failure=work, is_open=True))
    life.live(300, lasts=20)
    life.batches.close("b")
    life.live(60, lasts=20)
    played = life.play()
    load, player = played.load, played.player
    callbacks = [job for job in range(len(load)) if load.extras.get(job) and load.extras[job].parents]
    after_array, on_end, on_failure = callbacks

    assert len(load) == 6 + 6
    assert player.started_at[after_array] == max(player.ended_at[job] for job in range(6, 12))
    assert player.started_at[on_end] - life.began == 300 * SECOND
    assert played.state(on_failure).name == "CANCELED"


def test_children_of_a_job_that_is_refused_are_refused(life):
    work = Intent(addon_id="a", job_type="x", cost_units=60)
    life.batches.submit(BatchRequest("b", "a", [work] * 2, on_end=replace(work, cost_units=1)))
    life.live(300, lasts=20)
    everything = figures(life.play(replace(life.rules, capacity=Capacity(fixed=30)))).everything

    assert (everything.jobs, everything.refused, everything.stuck) == (3, 3, 0)
