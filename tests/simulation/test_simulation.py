"""What is played is what would have happened: the same rules, and a clock that jumps."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from tests.scheduler.conftest import make

from penstock.core.jobs.admission import AdmissionLimits, Budget, Caps
from penstock.core.jobs.dependencies import IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, AddonId, EndReason, HostId, Priority
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.arrivals import PlayedAttempt
from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.job_service import JobService
from penstock.scheduler.playing import PlayedHost
from penstock.scheduler.rules import SchedulerRules
from penstock.settings.settings import AddonSettings, Settings
from penstock.simulation import Arrival, curves, figures, made_up, play, recorded, unplayed
from penstock.simulation.plots import as_svg, in_terminal
from penstock.simulation.recorded import with_runner, without_runner
from penstock.simulation.unplayed import BY_LOAD, PLAYED, UNPLAYED
from penstock.stores.api import Depth
from penstock.stores.memory.store import MemoryStore

BEGAN = 1_900_000_000 * SECOND
RULES = SchedulerRules(capacity=Capacity(fixed=90))


def arrival(after=0, runs_for=10, addon="a", **fields):
    intent = Intent(**{"addon_id": addon, "job_type": "x", "cost_units": 90} | fields)
    return Arrival(BEGAN + round(after * SECOND), intent, runs_for * SECOND)


def waits(played):
    return [None if wait is None else wait // SECOND for wait in played.waits()]


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
        found = [
            played.player.started_at[job]
            for job, arrival in enumerate(played.load)
            if arrival.intent.addon_id == addon
        ]
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
    there_was = 90 * (one.at[-1] - one.at[0])

    assert list(one) == list(same) != list(other)
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
    load = recorded(store).load

    assert [(a.at - BEGAN) // SECOND for a in load] == [0, 20, 41, 41]
    assert [a.runs_for / SECOND for a in load] == [20, 21, 20.5, 7]
    assert {(a.intent.payload, a.intent.idempotency_key) for a in load} == {("null", None)}
    assert waits(play(load, RULES))[:2] == [0, 0]


def test_a_job_that_was_canceled_while_it_waited_leaves_the_queue_at_that_moment():
    load = [arrival(runs_for=100), arrival(1)._replace(canceled_at=BEGAN + 20 * SECOND), arrival(2)]
    played = play(load, replace(RULES, depth=Depth(total=1)))

    assert [played.state(job).name for job in range(3)] == ["DONE", "CANCELED", "REFUSED"]
    assert waits(play(load, RULES)) == [0, None, 98]


def test_spending_over_the_budget_of_a_day_holds_the_addon_until_midnight():
    midnight = BEGAN - BEGAN % (24 * HOUR) + 24 * HOUR
    rules = replace(RULES, limits=AdmissionLimits(budgets={AddonId("a"): Budget(day=100)}))
    load = [arrival()._replace(spends=100), arrival(60), arrival(60, addon="b")]
    played = play(load, rules)

    assert played.player.started_at[1] == midnight
    assert waits(played)[2] == 0


def test_a_job_waits_for_its_parents_and_goes_with_them():
    parents = ((0, ParentCondition.OK),)
    failed = (PlayedAttempt(5 * SECOND, EndReason.JOB_ERROR),)
    child = arrival(1)._replace(parents=parents)
    good = play([arrival(cost_units=10), child], RULES)
    bad = play([arrival(cost_units=10)._replace(attempts=failed), child], RULES)

    assert waits(good) == [0, 9]
    assert [bad.state(job).name for job in range(2)] == ["FAILED", "CANCELED"]


def test_with_any_the_first_parent_that_ends_as_it_must_is_enough():
    failed = (PlayedAttempt(5 * SECOND, EndReason.JOB_ERROR),)
    parents = ((0, ParentCondition.FAILED), (1, ParentCondition.FAILED), (2, ParentCondition.FAILED))
    child = arrival(1, cost_units=10, if_unmet=IfUnmet.ANY)._replace(parents=parents)
    good, bad = arrival(cost_units=10), arrival(cost_units=10)._replace(attempts=failed)
    one = play([good, bad, good, child], RULES)
    both = play([bad, bad, good, child], RULES)
    none = play([good, good, good, child], RULES)

    assert waits(one) == waits(both) == [0, 0, 0, 4]
    assert [played.state(3).name for played in (one, both, none)] == ["DONE", "DONE", "CANCELED"]


def test_a_busy_host_starts_less_and_a_quiet_job_waits_for_the_quiet():
    rules = SchedulerRules(capacity=Capacity(total=100, reserve=10))
    load = [arrival(1, cost_units=50), arrival(1, cost_units=10, run_when="quiet", quiet_for_sec=60)]
    scores = [(0, 5.0), (100, 0.0)]
    changes = [
        (BEGAN + at * SECOND, lambda player, score=score: player.set_load("host0", score))
        for at, score in scores
    ]
    played = play(load, rules, changes=changes)

    assert waits(played) == [99, 159]


def test_a_pause_holds_the_addon_until_it_is_resumed():
    changes = [
        (BEGAN, lambda player: player.set_addon("a", paused=True)),
        (BEGAN + 50 * SECOND, lambda player: player.set_addon("a", paused=False)),
    ]

    assert waits(play([arrival(1), arrival(1, addon="b")], RULES, changes=changes)) == [49, 0]


def test_hosts_are_used_by_their_labels_and_capacity():
    hosts = [
        PlayedHost(HostId("small"), capacity=Capacity(fixed=10)),
        PlayedHost(HostId("gpu"), labels=("gpu",), capacity=Capacity(fixed=20)),
    ]
    load = [arrival(cost_units=20, labels=("gpu",)), arrival(1, cost_units=10), arrival(2, cost_units=20)]
    played = play(load, RULES, hosts=hosts)

    assert waits(played) == [0, 0, 8]
    assert list(played.player.host) == [1, 0, 1]


def test_several_hosts_start_a_long_queue_without_leaving_one_idle():
    load = made_up(3_000, load=3, hosts=4)
    played = play(load, RULES, hosts=4)

    assert figures(played).used > 0.75
    assert figures(played).everything.stuck == 0


def test_the_workers_of_a_trail_are_those_that_ran_its_jobs():
    kit = make("memory", None)
    photos, text = WorkerKinds(AddonId("photos")), WorkerKinds(job_types=frozenset({"text"}))
    kit.submit(n=4, addon_id="photos", job_type="thumb")
    kit.submit(n=2, addon_id="a", job_type="text")
    kit.submit(n=1, addon_id="b", job_type="text")
    granted = kit.job_service.claim(photos, 3, "photos:1") + kit.job_service.claim(text, 9, "library:77")
    kit.later(5)
    for job in granted:
        kit.job_service.end(job.dispatch.dispatch_id)
    [again] = kit.job_service.claim(photos, 3, "photos:2")
    kit.later(5)
    kit.job_service.end(again.dispatch.dispatch_id)
    [host] = recorded(kit.store).hosts

    workers = {worker.name: (worker.kinds, worker.places) for worker in host.workers}
    assert workers == {
        "photos:1": (WorkerKinds(AddonId("photos"), frozenset({"thumb"})), 3),
        "library:77": (WorkerKinds(None, frozenset({"text"})), 3),
    }


def test_a_host_that_has_left_has_the_labels_of_the_jobs_that_it_ran():
    kit = make("memory", None).under(labels=("gpu", "ssd"))
    kit.submit(labels=("gpu",))
    kit.job_service.claim(WorkerKinds(AddonId("a")), 1, "a:1")
    [host] = recorded(kit.store).hosts

    assert host.labels == ("gpu",)


def test_the_workers_of_a_trail_claim_as_long_after_a_change_as_they_did():
    kit = make("memory", None)
    photos = WorkerKinds(AddonId("photos"), frozenset({"thumb"}))
    for delay in (0.02, 0.03, 0.5):
        kit.submit(n=2, addon_id="photos", job_type="thumb")
        kit.later(delay)
        [first] = kit.job_service.claim(photos, 1, "photos:1")
        kit.later(5)
        kit.job_service.end(first.dispatch.dispatch_id)
        [second] = kit.job_service.claim(photos, 1, "photos:1")  # with the report: no delay
        kit.later(5)
        kit.job_service.end(second.dispatch.dispatch_id)
    [host] = recorded(kit.store).hosts

    assert [worker.delay for worker in host.workers] == [30 * MILLISECOND]


def test_the_runner_of_a_trail_is_as_quick_as_it_was_and_as_large_as_the_settings_say():
    kit = make("memory", None)
    kit.submit(job_type="penstock.command")
    kit.later(0.02)
    [job] = kit.job_service.claim(WorkerKinds(own=True), 1, "runner")
    kit.later(5)
    kit.job_service.end(job.dispatch.dispatch_id)
    [host] = recorded(kit.store).hosts

    [runner] = with_runner(host, 8, 3).workers
    assert (runner.delay, runner.places, runner.functions) == (20 * MILLISECOND, 8, 3)
    assert without_runner(host).workers == ()


def test_a_trail_says_what_a_play_of_it_leaves_out():
    kit = make("memory", None)
    [job, canceled] = kit.submit(n=2, job_type="unseen")
    kit.job_service.edit(job, priority=99)
    kit.later(7)
    kit.job_service.cancel(canceled)
    recording = recorded(kit.store)

    assert recording.load[1].canceled_at == kit.now
    assert any("edit" in note for note in recording.notes)
    assert any("unseen" in note for note in recording.notes)


def test_every_setting_is_played_or_said_not_to_be():
    known = PLAYED | BY_LOAD | UNPLAYED.keys()
    names = [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Settings)
        for field in (msgspec.structs.fields(section.type) if _is_section(section.type) else ())
    ]
    names += [f"addons.{field.name}" for field in msgspec.structs.fields(AddonSettings)]

    missing = [name for name in names if name not in known and f"{name.split('.')[0]}.*" not in known]
    assert missing == []
    assert unplayed(["addons.mail.weight", "caps.types.x"], host_load=False, fixed=False) == []
    [(setting, why)] = unplayed(["leases.ttl"], host_load=False, fixed=False)
    assert setting == "leases.ttl"
    assert "never die" in why


def test_a_setting_of_an_addon_without_jobs_is_said_to_change_nothing():
    addons = made_up(20).addons()
    keys = [f"addons.{name}.weight" for name in (min(addons), "my.addon")]
    [(setting, why)] = unplayed(keys, host_load=False, fixed=False, addons=addons)

    assert setting == "addons.my.addon.weight"
    assert why == "the load has no job of addon my.addon"


def _is_section(kind):
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def test_plots_show_every_play(tmp_path):
    plays = {name: curves(play(made_up(50, load=load), RULES)) for name, load in (("calm", 0.5), ("full", 2))}
    as_svg(plays, tmp_path / "plays.svg")
    text, svg = in_terminal(plays, width=80, colors=False), (tmp_path / "plays.svg").read_text()

    assert "calm" in text
    assert "full" in text
    assert svg.lstrip().startswith("<?xml")
    assert "<svg" in svg
