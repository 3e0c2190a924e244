"""The player starts each job at the moment at which the real scheduler starts it."""

from __future__ import annotations

import json
import os
from random import Random

import pytest
from msgspec.structs import replace
from tests.simulation.reference import Scene

from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.dependencies import IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.preemption import Preemption
from penstock.core.jobs.schedules import Missed, Overlap, Schedule, ScheduleRecord, ScheduleState
from penstock.core.jobs.types import MILLISECOND, MINUTE, SECOND, AddonId, Constraint, EndReason, HostId
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.arrivals import (
    ArrayArrival,
    Arrival,
    BatchArrival,
    Load,
    PlayedAttempt,
    PlayedWork,
    ScheduleArrival,
    Works,
)
from penstock.scheduler.playing import PlayedHost, PlayedState, PlayedWorker, Player
from penstock.scheduler.rules import SchedulerRules

SOAK = "PENSTOCK_SOAK" in os.environ
T0 = 1_900_000_000 * SECOND
RULES = SchedulerRules(capacity=Capacity(fixed=40))
ONE_HOST = PlayedHost()
RUNNER = PlayedWorker("runner", WorkerKinds(job_types=frozenset({"penstock.command"})), 4)
ADDON = PlayedWorker("addon", WorkerKinds(AddonId("b")), 3, claims_when_full=False)
#: With functions of its own: it claims both kinds at once, as many as fit of either.
WHOLE_RUNNER = PlayedWorker(
    "runner", WorkerKinds(job_types=frozenset({"penstock.command", "penstock.function"})), 4, functions=2
)
EMBEDDED = PlayedWorker("library", WorkerKinds(job_types=frozenset({"t", "u"})), 5)


def arrival(after=0, runs_for=10, **fields):
    more = {name: fields.pop(name) for name in list(fields) if name in Arrival._fields}
    intent = Intent(**{"addon_id": "a", "job_type": "t", "cost_units": 40} | fields)
    return Arrival(T0 + round(after * SECOND), intent, round(runs_for * SECOND), **more)


def player(load, rules=RULES, hosts=(ONE_HOST,)):
    return Player(rules, hosts, now=T0, load=Load(load))


def starts(played):
    return [None if at < 0 else (at - T0) / SECOND for at in played.started_at]


def random_load(seed, jobs, types=("penstock.command", "t", "u")):
    """Everything that a job can have, in a queue that grows and shrinks."""
    random, after = Random(seed), 0.0
    for _ in range(jobs):
        after += random.expovariate(1 / 2.2)
        addon = random.choice("ab")
        job_type = random.choice(types) if addon == "a" else "t"
        length = random.choice([1, 4, 15, 40])
        fields = {"addon_id": addon, "job_type": job_type, "cost_units": random.choice([1, 5, 12, 30])}
        fields["priority"] = random.choice([10, 50, 52, 75, 95])
        fields["expected_duration_sec"] = random.choice([None, length * random.uniform(0.7, 1.4)])
        fields["constraints"] = random.choice([Constraint.NONE, Constraint.DISK_WRITE_HEAVY])
        if random.random() < 0.1:
            fields["earliest_start_at"] = T0 + round((after + 20) * SECOND)
        if random.random() < 0.1:
            fields |= {
                "deadline_at": T0 + round((after + 60) * SECOND),
                "time_sensitive": random.random() < 0.5,
            }
        if random.random() < 0.1:
            fields["max_runtime_sec"] = 3
        if random.random() < 0.1:
            fields["canceled_at"] = T0 + round((after + random.choice([1, 30])) * SECOND)
        if random.random() < 0.1:
            error = PlayedAttempt(
                round(length * SECOND / 2), random.choice([EndReason.JOB_ERROR, EndReason.UNAVAILABLE])
            )
            fields |= {"attempts": (error, PlayedAttempt(length * SECOND)), "retry_delays_sec": (5,)}
        if random.random() < 0.5:
            fields |= {"yields_after": 3 * SECOND, "resumes": random.random() < 0.5}
        yield arrival(after, length, **fields)


def sourced_load(seed, jobs=60):
    """Jobs with parents, batches with callbacks, arrays and schedules, all in one queue."""
    random = Random(seed)
    load = Load()
    arrivals = list(random_load(seed, jobs))
    span = arrivals[-1].at - T0
    batches = [[], []]
    # As the names come: arrays and batches before the jobs that wait for them.
    arrays = [load.group_of(f"array{number}") for number in range(3)]
    groups = [load.group_of(f"batch:b{number}") for number in range(2)]
    for number, each in enumerate(arrivals):
        parents, intent = (), each.intent
        if number and random.random() < 0.25:
            some = random.sample(range(number), min(number, random.choice([1, 2])))
            parents = tuple((one, random.choice(list(ParentCondition))) for one in some)
        elif number > jobs // 2 and random.random() < 0.25:
            parents = ((random.choice(arrays + groups), random.choice(list(ParentCondition))),)
        elif random.random() < 0.3:
            which = random.randrange(2)
            batches[which].append(number)
            intent = replace(intent, tags=(f"batch:b{which}",))
        if parents:
            intent = replace(intent, if_unmet=random.choice(list(IfUnmet)))
        load.append(each._replace(intent=intent, parents=parents))
    for number, members in enumerate(batches):
        last_at = max((arrivals[member].at for member in members), default=0)
        closed_at = max(last_at, T0 + round(span * random.uniform(0.9, 1.3)))  # no job enters a closed batch
        load.batches.append(BatchArrival(f"batch:b{number}", "a", tuple(members), closed_at))
    for number in range(3):
        at = T0 + round(span / 3 * random.random())
        canceled_at = at + round(random.uniform(20, 60) * SECOND) if number == 2 else None
        retried_at = (at + round(random.uniform(30, 90) * SECOND),) if number == 1 else ()
        limit = random.choice(["%1", "%3", ""])
        fields = intent_fields(random, f"array{number}")
        indices = f"1-{random.choice([4, 9])},20-22{limit}"
        load.arrays.append(
            ArrayArrival(
                f"array{number}", at, indices, Intent(**fields), works(random), canceled_at, retried_at
            )
        )
    for number, overlap in enumerate(Overlap):
        timing = {"every_sec": random.choice([7, 20])} if number else {"cron": "* * * * *"}
        missed = random.choice(list(Missed))
        intent = Intent(**intent_fields(random, f"schedule{number}"))
        schedule = Schedule(f"s{number}", intent, **timing, overlap=overlap, missed=missed, anchor=T0)
        record = ScheduleRecord(schedule, ScheduleState(T0), 1)
        load.schedules.append(ScheduleArrival(record, works(random), T0 + span))
    return load


def intent_fields(random, payload):
    return {
        "addon_id": random.choice("ab"),
        "job_type": "t",
        "cost_units": random.choice([5, 12, 30]),
        "priority": random.choice([50, 75]),
        "payload": json.dumps(payload),
        # Of two runs that began at one moment the store stops first which has the smaller id.
        "preemptible": False,
    }


def works(random):
    lengths = [round(random.uniform(0.5, 30) * SECOND) for _ in range(5)]
    failing = PlayedWork(lengths[0], (PlayedAttempt(lengths[1], EndReason.JOB_ERROR),))
    return Works([*map(PlayedWork, lengths), failing])


def submitted(load, jobs):
    """What arrays and schedules submitted: for each of them when each job came and started, and its state."""
    found = {}
    for job, started, state in jobs:
        found.setdefault(load[job].intent.payload, []).append((load[job].at, started, state))
    return found


def agree_with_sources(load, rules, hosts):
    mine = load.copy_to_play()
    played, scene = Player(rules, hosts, now=load.began, load=mine), Scene(load, rules, hosts).play()
    played.run()

    first = len(load)
    started = [None if at < 0 else at for at in played.started_at]
    states = [PlayedState(state).name for state in played.state]
    real = scene.states()
    assert started[:first] == [scene.started.get(number) for number in range(first)]
    assert states[:first] == [real.get(number, "REFUSED") for number in range(first)]
    ours = submitted(mine, zip(range(first, len(mine)), started[first:], states[first:], strict=True))
    theirs = [(n, scene.started.get(n), real[n]) for n in range(first, len(scene.load))]
    assert ours == submitted(scene.load, theirs)
    return ours


def agree(load, rules, hosts):
    played, scene = player(load, rules, hosts), Scene(load, rules, hosts).play()
    played.run()

    real = [scene.started.get(number) for number in range(len(load))]
    assert [None if at < 0 else at for at in played.started_at] == real
    states = {number: PlayedState(played.state[number]).name for number in scene.jobs}
    assert states == scene.states()


@pytest.mark.parametrize("seed", range(40) if SOAK else [0, 1, 2, 3, 5, 18, 20, 29])
def test_one_worker_starts_every_job_when_the_real_scheduler_does(seed):
    caps = Caps(per_addon=3, constraints={"disk_write_heavy": 2}) if seed % 2 else Caps()
    agree(list(random_load(seed, 150)), replace(RULES, limits=AdmissionLimits(caps)), [PlayedHost()])


@pytest.mark.parametrize("seed", range(40) if SOAK else [0, 1, 2, 3, 4, 5, 8, 12, 16, 20, 31])
def test_three_kinds_of_workers_start_every_job_when_the_real_scheduler_does(seed):
    rules = replace(RULES, preemption=Preemption(threshold=None if seed % 2 else 20, patience=6 * SECOND))
    agree(list(random_load(seed, 150)), rules, [PlayedHost(workers=(RUNNER, ADDON, EMBEDDED))])


@pytest.mark.parametrize("seed", range(40) if SOAK else range(4))
def test_a_runner_with_functions_starts_every_job_when_the_real_scheduler_does(seed):
    rules = replace(RULES, preemption=Preemption(threshold=None if seed % 2 else 20, patience=6 * SECOND))
    load = list(random_load(seed, 150, ("penstock.command", "penstock.function", "t")))
    agree(load, rules, [PlayedHost(workers=(WHOLE_RUNNER, ADDON, EMBEDDED))])


@pytest.mark.parametrize("seed", range(40) if SOAK else [*range(8), 16, 110])
def test_arrays_schedules_and_children_start_when_the_real_scheduler_starts_them(seed):
    kinds = [PlayedHost()] if seed % 2 else [PlayedHost(workers=(RUNNER, ADDON, EMBEDDED))]
    caps = Caps(per_addon=3) if seed % 3 == 0 else Caps()
    ours = agree_with_sources(sourced_load(seed), replace(RULES, limits=AdmissionLimits(caps)), kinds)

    assert len(ours) == 6


def test_a_worker_that_learns_of_a_change_later_gets_what_the_quicker_one_leaves():
    load = [
        arrival(job_type="t", cost_units=20, runs_for=10),
        arrival(1, job_type="t", cost_units=20),
        arrival(1, job_type="u", cost_units=20),
        arrival(1, job_type="t", cost_units=20),
    ]
    quick, slow = (
        PlayedWorker(name, WorkerKinds(job_types=frozenset({kind})), 1, delay=delay)
        for name, kind, delay in (("quick", "t", 20 * MILLISECOND), ("slow", "u", 50 * MILLISECOND))
    )
    played = player(load, hosts=[PlayedHost(workers=(quick, slow))])
    played.run()

    # With its report a worker claims at once.
    assert starts(played) == [0.02, 10.02, 1.05, 20.02]


def test_a_host_reserves_no_job_whose_worker_is_on_another_host():
    daemon = PlayedHost(HostId("daemon"), workers=(RUNNER,))
    program = PlayedHost(HostId("program"), workers=(EMBEDDED,), capacity=Capacity(fixed=40), reserves=False)
    played = player([arrival(), arrival(), arrival(addon_id="b", job_type="v")], hosts=[daemon, program])
    played.run(until=T0 + 25 * SECOND)

    assert starts(played) == [0, 10, None]
    assert list(played.host) == [1, 1, 0]  # no worker is known for the last one, so the daemon reserves it


def test_no_run_yields_to_a_job_without_a_present_worker():
    load = [
        arrival(runs_for=50, priority=10, yields_after=SECOND),
        arrival(1, job_type="nobody", priority=95),
    ]
    hosts = [PlayedHost(workers=(RUNNER, ADDON, EMBEDDED))]
    played, scene = player(load, hosts=hosts), Scene(load, RULES, hosts).play()
    played.run()

    assert scene.states()[0] == "DONE"
    assert played.preemptions == 0


def test_no_run_yields_to_a_job_whose_worker_is_on_another_host():
    load = [
        arrival(runs_for=50, job_type="penstock.command", priority=10, yields_after=SECOND),
        arrival(runs_for=50, priority=80),
        arrival(1, priority=95),
    ]
    hosts = [PlayedHost(workers=(RUNNER,)), PlayedHost(HostId("other"), workers=(EMBEDDED,))]
    played = player(load, hosts=hosts)
    played.run()

    assert starts(played) == [0, 0, 50]
    assert played.preemptions == 0


def test_other_rounds_keep_units_for_the_places_that_a_worker_claims_for_later():
    runner = PlayedWorker("runner", WHOLE_RUNNER.kinds, 4, delay=50 * MILLISECOND, functions=1)
    other = PlayedWorker("other", WorkerKinds(job_types=frozenset({"t"})), 4, delay=20 * MILLISECOND)
    jobs = [
        ("penstock.command", 40, 10),
        ("penstock.command", 10, 10),
        ("penstock.command", 10, 10),
        ("t", 30, 10),
    ]
    load = [arrival(job_type=job_type, cost_units=cost, runs_for=length) for job_type, cost, length in jobs]
    played = player(load, hosts=[PlayedHost(workers=(runner, other))])
    played.run()

    assert starts(played) == [0.05, 10.05, 10.1, 20.07]


def test_a_job_that_runs_past_its_deadline_and_waits_again_is_too_late():
    first = arrival(
        runs_for=30, cost_units=40, priority=10, deadline_at=T0 + 5 * SECOND, yields_after=4 * SECOND
    )
    played = player([first, arrival(1, priority=95, runs_for=3)])
    played.run()

    assert [PlayedState(state).name for state in played.state] == ["FAILED", "DONE"]
    assert starts(played) == [0, 6]


def test_what_runs_and_waits_already_is_played_on():
    waiting = player([])
    running = waiting.add_running(
        arrival(-50), HostId("local"), started_at=T0 - 50 * SECOND, over_at=T0 + 7 * SECOND
    )
    first = waiting.add(arrival(-5, cost_units=30), ready_at=T0 - 20 * MINUTE)
    second = waiting.add(arrival(-9, cost_units=30))
    waiting.run(until_started=[first])

    assert waiting.state[running] == PlayedState.DONE
    assert (waiting.started_at[first] - T0) // SECOND == 7
    assert waiting.state[second] == PlayedState.QUEUED

    waiting.run()
    assert (waiting.started_at[second] - T0) // SECOND == 17


def test_a_play_goes_on_from_where_it_stopped():
    played = player([arrival(), arrival(1), arrival(2)])
    played.run(T0 + 15 * SECOND)
    assert starts(played) == [0, 10, None]

    played.add(arrival(16, cost_units=10, priority=95))
    played.run()
    assert starts(played) == [0, 10, 30, 20]
