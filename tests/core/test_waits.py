"""The account of a wait, and the clause of a list: from the trail and from the row of a job."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.jobs.dependencies import Dependency
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Event, EventKind, Job
from penstock.core.jobs.reason_base import SHORT
from penstock.core.jobs.standing import recorded_reason, recorded_standing, standing
from penstock.core.jobs.states import DEFAULT, Counters, JobState
from penstock.core.jobs.types import SECOND
from penstock.core.jobs.waits import wait_words, waits_of

T0 = 1_900_000_000 * SECOND
JOB = Job(1, "job-00000001", Intent(addon_id="a", job_type="t"), JobState.QUEUED, T0, T0)


def trail(*events):
    """Each is a second, a kind, and perhaps a reason and data."""
    return [
        Event(
            n,
            T0 + second * SECOND,
            EventKind(kind),
            JOB.job_id,
            reason=(more or [""])[0],
            data=(more[1:] or [{}])[0],
        )
        for n, (second, kind, *more) in enumerate(events)
    ]


def waited(job, now, *events):
    return {wait.reason: wait.sec for wait in waits_of(job, trail(*events), T0 + now * SECOND)}


def test_a_wait_belongs_to_the_reason_that_was_recorded_last():
    events = [
        (0, "SUBMITTED"), (5, "DENIED", "no_room"), (25, "EDITED", "", {"priority": 60}), (65, "DENIED", "paused"),
        (95, "DISPATCHING"), (97, "RUNNING"), (120, "CHECKPOINT"), (200, "DONE"),
    ]  # fmt: skip

    assert waited(JOB, 300, *events) == {"turn": 5, "no_room": 60, "paused": 30, "reserved": 2}


def test_a_delay_is_told_from_the_wait_behind_it():
    retried = [
        (0, "SUBMITTED"),
        (0, "DISPATCHING"),
        (0, "RUNNING"),
        (10, "REQUEUED", "job_error", {"not_before": T0 + 70 * SECOND}),
    ]

    assert waited(JOB, 40, *retried) == {"retry_delay": 30}
    assert waited(JOB, 100, *retried) == {"retry_delay": 60, "turn": 30}
    assert waited(JOB, 100, *retried, (80, "DENIED", "no_room")) == {
        "retry_delay": 60,
        "turn": 10,
        "no_room": 20,
    }
    assert waited(JOB, 100, *retried, (30, "CANCELED", "canceled")) == {"retry_delay": 20}


def test_a_job_that_no_worker_took_up_waited_for_that():
    late = [
        (0, "SUBMITTED"),
        (0, "DISPATCHING"),
        (30, "REQUEUED", "start_timeout", {"not_before": T0 + 60 * SECOND}),
    ]

    assert waited(JOB, 60, *late) == {"reserved": 30, "start_delay": 30}


def test_the_earliest_start_is_waited_for_before_the_turn():
    job = replace(JOB, intent=replace(JOB.intent, earliest_start_at=T0 + 30 * SECOND))

    assert waited(job, 50, (0, "SUBMITTED")) == {"not_ready": 30, "turn": 20}
    assert waited(job, 50, (0, "SUBMITTED"), (10, "EDITED", "", {"earliest_start_at": None})) == {
        "not_ready": 10,
        "turn": 40,
    }


def test_a_job_waits_for_its_parents_only_if_one_had_not_ended():
    job = replace(JOB, intent=replace(JOB.intent, after=(Dependency("job-00000000"),)))

    assert waited(job, 50, (0, "SUBMITTED"), (30, "DISPATCHING"), (30, "RUNNING")) == {"turn": 30}
    assert waited(job, 50, (0, "SUBMITTED")) == {"turn": 50}
    assert waited(replace(job, unmet=1), 50, (0, "SUBMITTED")) == {"waits_for_parents": 50}
    assert waited(job, 50, (0, "SUBMITTED"), (20, "READY"), (30, "RUNNING")) == {
        "waits_for_parents": 20,
        "turn": 10,
    }


def test_the_words_name_the_longest_first_and_leave_out_what_took_no_time():
    waits = waits_of(
        JOB, trail((0, "SUBMITTED"), (5, "DENIED", "no_room"), (300, "RUNNING")), T0 + 400 * SECOND
    )

    assert wait_words(waits) == "It waited 5 min: 4 min for units, 5 s for its turn or a worker."
    assert wait_words(()) == ""


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 100), st.sampled_from(EventKind), st.sampled_from(["", "no_room", "paused"])
        ),
        max_size=12,
    )
)
def test_no_moment_is_counted_twice(events):
    events = sorted(events, key=lambda event: event[0])

    total = sum(wait.sec for wait in waits_of(JOB, trail(*events), T0 + 100 * SECOND))
    assert 0 <= total <= 100


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "waits for its turn"),
        ({"denied": "no_room", "denied_data": '{"needs": 8, "free": 5, "capacity": 90}'}, "needs 8 units; 5 of 90 are free"),
        ({"intent": replace(JOB.intent, labels=("gpu",))}, "waits for a host with the label gpu"),
        ({"denied": "no_such_reason"}, "waits for its turn"),
        ({"denied": "no_room", "denied_data": '{"needs": "many"}'}, "waits for its turn"),
        ({"ready_at": T0 + 90 * SECOND, "denied": "paused", "denied_data": '{"scope": "*"}'}, "starts in 90 s at the earliest"),
        ({"ready_at": T0 + 90 * SECOND, "counters": Counters(crash=2)}, "attempt 2 of 6 failed; next in 90 s"),
        ({"ready_at": T0 + 90 * SECOND, "counters": Counters(start=2)}, "no worker took it up; next in 90 s"),
        ({"state": JobState.RUNNING, "progress": 0.42}, "42%"),
        ({"state": JobState.DISPATCHING}, "reserved; waits for its worker"),
        ({"state": JobState.FAILED, "ended_at": T0}, "its deadline passed while it waited in the queue"),
        ({"state": JobState.DONE}, ""),
    ],
)  # fmt: skip
def test_the_clause_of_a_list_comes_from_the_row(fields, why):
    job = replace(JOB, **fields)
    clause = standing(job, T0, recorded_reason(job, T0))

    assert clause == why
    assert len(clause) <= SHORT


@pytest.mark.parametrize("state", [JobState.CANCELED, JobState.FAILED, JobState.DONE, JobState.RUNNING])
def test_the_last_denial_is_not_told_of_a_job_that_waits_no_more(state):
    denied = {"denied": "no_room", "denied_data": '{"needs": 8, "free": 5, "capacity": 90}'}
    job = replace(JOB, state=state, ended_at=T0, **denied)

    assert "needs 8 units" not in recorded_standing(job, T0, None, DEFAULT)
