"""What is played is what would have happened: the same rules, and a clock that jumps."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import HOUR, MINUTE, SECOND, Priority
from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers, WorkerKinds
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.job_service import JobService
from penstock.scheduler.rules import SchedulerRules
from penstock.simulation import Arrival, figures, made_up, play, replayed
from penstock.stores.api import Depth
from penstock.stores.memory.store import MemoryStore

BEGAN = 1_900_000_000 * SECOND
RULES = SchedulerRules(capacity=Capacity(fixed=90))


def arrival(after=0, runs_for=10, addon="a", **fields):
    intent = Intent(**{"addon_id": addon, "job_type": "x", "cost_units": 90} | fields)
    return Arrival(BEGAN + after * SECOND, intent, runs_for * SECOND)


def waits(played):
    return [None if one.wait is None else one.wait // SECOND for one in played.outcomes]


def test_one_after_the_other_where_only_one_fits():
    played = play([arrival(), arrival(1), arrival(2)], RULES)

    assert waits(played) == [0, 9, 18]
    assert played.lasted == 30 * SECOND


def test_side_by_side_where_there_is_room_on_one_host_or_on_several():
    load = [arrival(), arrival(1), arrival(2)]

    assert waits(play([a._replace(intent=replace(a.intent, cost_units=30)) for a in load], RULES)) == [
        0,
        0,
        0,
    ]
    assert waits(play(load, RULES, hosts=3)) == [0, 0, 0]


def test_a_host_that_is_done_with_a_job_takes_the_next_one():
    assert waits(play([arrival(runs_for=100), arrival(1), arrival(20)], RULES, hosts=2)) == [0, 0, 0]


def test_who_is_in_a_hurry_goes_first_and_a_weight_counts():
    load = [
        arrival(),
        arrival(1, addon="b", priority=Priority.LOW),
        arrival(2, addon="c", priority=Priority.HIGH),
    ]
    fair = [arrival(n / 100, runs_for=60, addon="ab"[n % 2]) for n in range(40)]
    alike, weighed = (play(fair, RULES, weights=weights) for weights in ({}, {"b": 500}))

    def starts(played, addon):
        found = [one.started for one in played.outcomes if one.arrival.intent.addon_id == addon]
        return sum(found) / len(found)

    assert waits(play(load, RULES)) == [0, 19, 8]
    assert abs(starts(alike, "a") - starts(alike, "b")) < 5 * MINUTE
    assert starts(weighed, "a") - starts(weighed, "b") > 10 * MINUTE


def test_a_time_before_which_a_job_may_not_start_is_no_wait():
    played = play([arrival(earliest_start_at=BEGAN + HOUR)], RULES)

    assert waits(played) == [0]
    assert played.lasted == HOUR + 10 * SECOND


def test_a_deadline_that_passes_in_the_queue_is_late():
    played = play([arrival(runs_for=100), arrival(1, deadline_at=BEGAN + 50 * SECOND)], RULES)

    assert waits(played) == [0, None]
    assert figures(played).everything.late == 1


@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        (replace(RULES, depth=Depth(total=1)), 1),
        (replace(RULES, capacity=Capacity(fixed=50)), 3),
        (replace(RULES, limits=AdmissionLimits(Caps(concurrent=1))), 0),
    ],
)
def test_what_would_have_been_refused_is(rules, refused):
    told = figures(play([arrival(), arrival(1), arrival(2)], rules))

    assert told.everything.refused == refused


def test_figures_tell_waits_shares_and_use():
    load = [arrival(), arrival(addon="b", runs_for=30)]
    told = figures(play(load, RULES))
    shares = {one.addon_id: one.share for one in told.addons}

    assert shares == {"a": 0.25, "b": 0.75}
    assert (told.used, told.lasted_sec) == (1.0, 40.0)
    assert sorted((one.wait_p50, one.wait_max) for one in told.addons) == [(0.0, 0.0), (10.0, 10.0)]


def test_a_made_up_load_is_the_same_for_the_same_seed_and_as_heavy_as_asked():
    one, same, other = (made_up(2_000, load=0.5, seed=seed) for seed in (1, 1, 2))
    needed = sum(a.intent.cost_units * a.runs_for for a in one)
    there_was = 90 * (one[-1].at - one[0].at)

    assert one == same != other
    assert 0.4 < needed / there_was < 0.6


def test_a_trail_is_played_again_as_it_was():
    """Two that ran; one that did not, and is known by others of its type; one that said how long it would take."""
    now = [BEGAN]
    store = MemoryStore(lambda: now[0])
    machine = HostLoad(RULES)
    dispatcher = Dispatcher(store, RULES, machine, PullingWorkers())
    job_service = JobService(store, RULES, dispatcher)

    for number in range(2):
        job_service.submit(
            [Intent(addon_id="a", job_type="x", idempotency_key=str(number), payload='"large"')]
        )
        [(_, dispatch, *_)] = job_service.claim(WorkerKinds(), 1, "w")
        now[0] += (20 + number) * SECOND
        job_service.end(dispatch.dispatch_id)
    job_service.submit(
        [Intent(addon_id="a", job_type="x"), Intent(addon_id="a", job_type="y", expected_duration_sec=7.0)]
    )
    load = replayed(store)

    assert [(a.at - BEGAN) // SECOND for a in load] == [0, 20, 41, 41]
    assert [a.runs_for / SECOND for a in load] == [20, 21, 20.5, 7]
    assert {(a.intent.payload, a.intent.idempotency_key) for a in load} == {("null", None)}
    assert waits(play(load, RULES))[:2] == [0, 0]
