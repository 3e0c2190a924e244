"""What becomes of the moments of a schedule: due, late, in each other's way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.errors import BadIntent
from penstock.core.jobs import schedules
from penstock.core.jobs.dependencies import Dependency
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.schedules import Missed, Overlap, Schedule
from penstock.core.jobs.types import HOUR, MINUTE, SECOND

T0 = 1_900_000_000 * SECOND
HOURLY = Schedule("hourly", Intent("a", "t"), every_sec=3_600)


class Played:
    """A schedule, and which of its jobs have ended."""

    def __init__(self, **fields):
        self.record = schedules.add(replace(HOURLY, **fields), T0, "me").target
        self.jobs, self.ended, self.notes = [], set(), []

    def look(self, hours):
        change = schedules.look(self.record, T0 + int(hours * HOUR), self.ended)
        if change is None:
            return None
        job_id = None
        if change.job is not None:
            job_id = f"job{len(self.jobs) + 1}"
            self.jobs.append((change.job.moment - T0) / HOUR)
        self.record = change.row(job_id)
        self.notes += [(note.kind.removeprefix("SCHEDULE_"), note.reason) for note in change.events(job_id)]
        return change

    def end(self):
        self.ended.update(self.record.state.active)


def test_a_moment_that_has_not_come_brings_nothing():
    played = Played()

    assert None is played.look(0.99)
    assert T0 + HOUR == played.record.due_at


def test_a_moment_becomes_one_job_with_its_schedule_and_moment_in_key_and_tags():
    played = Played()

    change = played.look(1)

    assert None is played.look(1)
    assert [1] == played.jobs
    intent = change.job.intent
    assert ("schedule:hourly", "moment:2030-03-17T18:46:40Z") == intent.tags
    assert intent.idempotency_key.startswith("schedule:hourly@2030-03-17T18:46:40Z/")
    assert [("FIRED", "due")] == played.notes


@pytest.mark.parametrize(
    ("missed", "jobs", "dropped"),
    [(Missed.SKIP, [], 5), (Missed.LATEST, [5], 4), (Missed.ALL, [3, 4, 5], 2)],
)
def test_moments_at_which_no_scheduler_ran_follow_the_policy(missed, jobs, dropped):
    played = Played(missed=missed, missed_limit=3)

    change = played.look(5.5)
    while played.record.state.pending:
        played.end()
        played.look(5.5)

    assert jobs == played.jobs
    [note] = [note for note in change.notes if note.kind is EventKind.SCHEDULE_MISSED]
    assert dropped == note.data["count"]
    assert T0 + 6 * HOUR == played.record.due_at


def test_a_moment_that_is_a_little_late_was_not_missed():
    played = Played(missed=Missed.SKIP)

    played.look(1 + 0.9 / 60)

    assert [1] == played.jobs


def test_years_without_a_scheduler_are_looked_at_from_their_end():
    played = Played(every_sec=60, missed=Missed.ALL, missed_limit=3)

    change = played.look(24 * 365 * 3)

    assert "more than 10000" == change.notes[0].data["count"]
    minutes = [moment - T0 for moment in (*[change.job.moment], *played.record.state.pending)]
    assert [24 * 365 * 3 * HOUR - n * MINUTE for n in (2, 1, 0)] == minutes


def test_skip_drops_a_moment_while_an_earlier_job_has_not_ended():
    played = Played(overlap=Overlap.SKIP)
    played.look(1)

    change = played.look(2)
    played.end()
    played.look(3)

    assert [1, 3] == played.jobs
    assert [("FIRED", "due"), ("SKIPPED", "overlap"), ("FIRED", "due")] == played.notes
    assert "job1" == change.notes[0].data["job_id"]


def test_queue_submits_one_job_after_the_other():
    played = Played(overlap=Overlap.QUEUE)
    played.look(1)
    played.look(2)
    played.look(3)

    assert [1] == played.jobs
    assert 0 == played.record.due_at
    assert None is played.look(3.1)
    played.end()
    played.look(3.2)
    assert [1, 2] == played.jobs
    assert None is played.look(3.3)
    played.end()
    played.look(3.4)
    assert [1, 2, 3] == played.jobs
    assert T0 + 4 * HOUR == played.record.due_at


def test_cancel_running_cancels_and_then_submits_the_newest():
    played = Played(overlap=Overlap.CANCEL_RUNNING)
    played.look(1)
    played.look(2)

    assert ["job1"] == schedules.to_cancel(played.record, ())
    played.look(3)
    assert [1] == played.jobs
    assert [("FIRED", "due"), ("SKIPPED", "overlap")] == played.notes
    played.end()
    assert [] == schedules.to_cancel(played.record, played.ended)
    played.look(3.1)
    assert [1, 3] == played.jobs


@pytest.mark.parametrize("overlap", [Overlap.SKIP, Overlap.QUEUE])
def test_no_other_policy_cancels_anything(overlap):
    played = Played(overlap=overlap)
    played.look(1)
    played.look(2)

    assert [] == schedules.to_cancel(played.record, ())


def test_what_waits_is_bounded():
    played = Played(overlap=Overlap.QUEUE, every_sec=60)
    for minute in range(1, schedules.MOST_PENDING + 5):
        played.look(minute / 60 + 1e-6)

    assert schedules.MOST_PENDING == len(played.record.state.pending)
    assert 3 == played.notes.count(("SKIPPED", "overlap"))


def test_a_paused_schedule_does_nothing_and_makes_up_for_nothing():
    played = Played(overlap=Overlap.QUEUE)
    played.look(1)
    played.look(2)
    change = schedules.pause(played.record, T0 + 2 * HOUR, "me")
    played.record = change.target

    assert ["SCHEDULE_SET", "SCHEDULE_SKIPPED"] == [str(note.kind) for note in change.notes]
    assert None is played.record.due_at
    assert None is played.look(4.5)
    assert None is schedules.pause(played.record, T0, "me")
    played.record = schedules.resume(played.record, T0 + 5 * HOUR + 1, "me").target
    assert None is schedules.resume(played.record, T0, "me")
    played.end()
    assert None is played.look(5.9)
    played.look(6)
    assert [1, 6] == played.jobs


def test_an_edit_of_the_times_counts_from_then_on():
    record = Played().record
    edited = schedules.edit(record, replace(record.schedule, every_sec=60), T0 + 5 * HOUR + 1, "you").target

    assert T0 + 5 * HOUR + 1 + MINUTE == edited.due_at
    assert ("me", "you") == (edited.schedule.created_by, edited.schedule.edited_by)
    assert None is schedules.edit(edited, edited.schedule, T0, "you")


def test_an_edit_of_the_template_keeps_the_moments():
    record = Played().record
    template = replace(record.schedule, intent=Intent("a", "other"))

    edited = schedules.edit(record, template, T0 + 5 * HOUR, "you")

    assert T0 + HOUR == edited.target.due_at
    assert ["intent"] == edited.notes[0].data["fields"]


def test_a_clock_that_was_set_back_brings_no_moment_twice():
    played = Played()
    played.look(5)
    played.end()

    assert None is played.look(3)
    assert None is played.look(5.5)
    assert T0 + 6 * HOUR == played.record.due_at


def test_after_a_wrong_clock_moments_count_from_the_right_one():
    played = Played()
    played.look(5_000)
    played.end()
    assert None is schedules.follow_clock(played.record, T0 + 4_997 * HOUR)

    change = schedules.follow_clock(played.record, T0 + 3 * HOUR)

    assert (T0 + 4 * HOUR, "clock_set_back") == (change.target.due_at, change.notes[0].reason)
    assert change.target.version > played.record.version


def test_a_run_by_hand_ignores_overlap_and_pause_and_counts_as_running():
    played = Played()
    played.record = schedules.pause(played.record, T0, "me").target

    change = schedules.run_now(played.record, T0 + 5, "me", ())

    record = change.row("job9")
    assert ("job9",) == record.state.active
    assert "me" == record.state.history[0].by
    assert [("SCHEDULE_FIRED", "run", "me")] == [
        (str(note.kind), note.reason, note.data["by"]) for note in change.events("job9")
    ]


def test_long_keys_of_two_runs_by_hand_stay_two():
    keys = ["k" * 199 + end for end in "abc"]
    record = Played(name="n" * 55).record

    used = [schedules.run_now(record, T0, "me", (), key).job.intent.idempotency_key for key in keys]

    assert len(set(used)) == 3
    assert max(map(len, used)) <= 200
    again = schedules.run_now(record, T0 + 5, "me", (), keys[0]).job.intent.idempotency_key
    assert again == used[0]


def test_every_version_is_above_all_that_came_before():
    record = Played().record
    again = schedules.add(HOURLY, T0 + 1, "me").target

    assert record.version < schedules.pause(record, T0, "me").target.version
    assert record.version < again.version


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"name": ""}, "name", "1..55"),
        ({"name": "a/b"}, "name", "1..55"),
        ({"name": "x" * 56}, "name", "1..55"),
        ({"every_sec": None}, "cron", "exactly one"),
        ({"cron": "* * * * *"}, "cron", "exactly one"),
        ({"every_sec": 0}, "every_sec", "1.."),
        ({"every_sec": None, "cron": "0 0 31 2 *"}, "cron", "never comes"),
        ({"every_sec": None, "at": T0}, "at", "passed"),
        ({"every_sec": None, "at": 10**18}, "at", "9999"),
        ({"zone": "Europe/Bärlin"}, "zone", "time zone"),
        ({"overlap": "sometimes"}, "overlap", "cancel-running"),
        ({"missed": "never"}, "missed", "latest"),
        ({"missed_limit": 0}, "missed_limit", "1.."),
        ({"missed_limit": 1_001}, "missed_limit", "1.."),
        ({"intent": Intent("a", "t", deadline_at=T0 + HOUR)}, "deadline_at", "schedule"),
        ({"intent": Intent("a", "t", earliest_start_at=T0 + HOUR)}, "earliest_start_at", "schedule"),
        ({"intent": Intent("a", "t", idempotency_key="k")}, "idempotency_key", "schedule"),
        ({"intent": Intent("a", "t", after=(Dependency("j"),))}, "after", "schedule"),
        ({"intent": Intent("a", "t", tags=tuple(map(str, range(31))))}, "tags", "30"),
        ({"intent": Intent("a", "t", cost_units=0)}, "cost_units", "1..100"),
        ({"intent": Intent("", "t")}, "addon_id", "1..128"),
    ],
)
def test_what_is_no_schedule_is_refused_by_the_name_of_its_field(fields, field, words):
    with pytest.raises(BadIntent) as refused:
        schedules.check(replace(HOURLY, **fields), T0, most_units=90)

    [problem] = [each for each in refused.value.problems if each["field"] == field]
    assert words in problem["message"]


def test_a_schedule_whose_one_moment_has_passed_can_still_be_edited():
    passed = replace(HOURLY, every_sec=None, at=T0 - 5)

    schedules.check(replace(passed, missed=Missed.SKIP), T0, most_units=90, before=passed)
