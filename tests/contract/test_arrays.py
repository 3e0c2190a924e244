"""Arrays in every store: what is made when, and that nothing is made twice or lost, whatever ends how."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier

import pytest
from msgspec.structs import replace

from penstock.core.errors import BadIntent, IllegalMove, KeyConflict, NotFound, QueueFull
from penstock.core.jobs import changes
from penstock.core.jobs.arrays import CHUNK, WINDOW, indices_in
from penstock.core.jobs.dependencies import Dependency
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind, outcome_of
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import ENDED, JobState, Schedules
from penstock.core.jobs.types import SECOND, EndReason, member_of
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.arrays import ArrayAdvancer, ArrayService
from penstock.scheduler.dispatcher import Dispatcher, HostLoad, PullingWorkers
from penstock.scheduler.job_service import JobService
from penstock.scheduler.maintenance import Maintenance
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Apply, Complete, CompletedDispatch, Depth, Prune, Query, committed
from penstock.stores.common.rows import array_progress
from penstock.stores.memory import store as memory_store
from penstock.stores.postgres import groups as postgres_groups
from penstock.stores.postgres import rounds
from penstock.stores.sqlite import groups as sqlite_groups
from penstock.stores.sqlite import store as sqlite_store

RULES = SchedulerRules(capacity=Capacity(fixed=100), schedules=Schedules(crash=(), unavailable=()))
JOB = Intent("a", "t", cost_units=1, payload='{"x": 1}')
DONE, FAILED, CANCELED = JobState.DONE, JobState.FAILED, JobState.CANCELED
END_SETTINGS = {"schedules": RULES.schedules, "ordering": RULES.ordering}
HOW = {DONE: EndReason.COMPLETED, FAILED: EndReason.JOB_ERROR}


class ArrayKit:
    """The scheduler on a store, without threads. A worker runs what it claims until the test ends it."""

    def __init__(self, kit):
        self.kit, self.store, self.running = kit, kit.store, {}
        self.begin()

    def begin(self):
        """As a scheduler that starts on the store: it knows nothing but what is there."""
        dispatcher = Dispatcher(self.store, RULES, HostLoad(RULES), PullingWorkers())
        self.jobs = JobService(self.store, RULES, dispatcher)
        self.arrays = ArrayService(self.store, RULES, self.jobs)
        self.advancer = ArrayAdvancer(self.arrays)

    def submit(self, indices, intent=JOB):
        record, _ = self.arrays.submit(intent, indices)
        return record.array.array_id

    def work(self):
        """Claim what there is: the indices that run."""
        for granted in self.jobs.claim(WorkerKinds(), 100, "w"):
            self.running[granted.job.job_id] = granted.dispatch.dispatch_id
        return sorted(member_of(job_id)[1] for job_id in self.running)

    def end(self, *job_ids, how=DONE):
        for job_id in job_ids:
            self.jobs.end(self.running.pop(job_id), HOW[how], error=None if how is DONE else "it failed")

    def names(self, array_id):
        return sorted(
            job.job_id for job in self.store.find(Query(limit=5_000)) if job.job_id.startswith(array_id)
        )


@pytest.fixture
def scene(kit):
    return ArrayKit(kit)


def test_only_so_many_jobs_exist_as_may_run_at_once(scene):
    array_id = scene.submit("1-100000%3")

    assert scene.names(array_id) == [f"{array_id}_{n}" for n in (1, 2, 3)]
    assert scene.work() == [1, 2, 3]
    assert scene.store.job(f"{array_id}_2").intent == JOB


def test_the_end_of_one_makes_the_next_without_another_step(scene):
    array_id = scene.submit("1-5%2")
    scene.work()

    scene.end(f"{array_id}_2")

    assert scene.work() == [1, 3]
    assert scene.arrays.get(array_id).progress.done == 1


def test_without_a_limit_a_window_exists(scene):
    assert len(scene.names(scene.submit("1-1000"))) == WINDOW


def test_an_array_ends_with_its_last_index_and_says_so_in_the_trail(scene):
    array_id = scene.submit("7,9")
    scene.work()
    scene.end(f"{array_id}_7")
    assert scene.arrays.get(array_id).state is JobState.RUNNING
    scene.end(f"{array_id}_9")

    assert scene.arrays.get(array_id).state is DONE
    [event] = scene.store.events_of({EventKind.ARRAY_ENDED}, 0, 10)
    assert (event.reason, event.data) == (
        "DONE",
        {"array_id": array_id, "addon_id": "a", "done": 2, "failed": 0, "canceled": 0},
    )
    assert scene.store.arrays(10, only_open=True) == []
    assert [record.array.array_id for record in scene.store.arrays(10)] == [array_id]


def test_failed_indices_run_again_and_no_others(scene):
    array_id = scene.submit("1-4%2")
    while scene.work():
        for job_id in sorted(scene.running):
            scene.end(job_id, how=FAILED if member_of(job_id)[1] % 2 else DONE)
    before, failed = scene.arrays.get(array_id), indices_in(scene.store.failed_indices(array_id))

    scene.arrays.retry(array_id)

    assert (before.state, before.progress.failed, failed) == (FAILED, 2, [1, 3])
    assert scene.work() == [1, 3]
    assert scene.arrays.job_of(array_id, 3) == f"{array_id}_3_2"
    assert scene.arrays.job_of(array_id, 2) == f"{array_id}_2"
    scene.end(*sorted(scene.running))
    assert scene.arrays.get(array_id).state is DONE
    with pytest.raises(IllegalMove, match="no index"):
        scene.arrays.retry(array_id)


def test_a_job_of_an_array_is_retried_with_the_array(scene):
    array_id = scene.submit("1")
    scene.work()
    scene.end(f"{array_id}_1", how=FAILED)

    with pytest.raises(IllegalMove, match=f"retry the failed indices of array {array_id}"):
        scene.jobs.retry(f"{array_id}_1")


def test_a_canceled_array_makes_no_more_jobs_and_cancels_those_that_wait(scene):
    array_id = scene.submit("1-100000%4")
    started = scene.jobs.claim(WorkerKinds(), 1, "w")[0].job.job_id

    record = scene.arrays.cancel(array_id)

    assert (record.state, record.progress.canceled) == (JobState.RUNNING, 99_999)
    assert scene.store.job(started).state is JobState.RUNNING  # it was told to stop
    assert sum(scene.store.job(name).state is CANCELED for name in scene.names(array_id)) == 3
    scene.kit.later(60)
    Maintenance(scene.store, RULES).step(scene.store.now())
    scene.advancer.step(scene.store.now())
    assert (scene.arrays.get(array_id).state, len(scene.names(array_id))) == (CANCELED, 4)
    assert scene.arrays.cancel(array_id).state is CANCELED  # again: the first answer may have been lost
    with pytest.raises(IllegalMove, match="CANCELED"):
        scene.arrays.retry(array_id)


@pytest.mark.parametrize("how", [*HOW.values(), EndReason.LEASE_EXPIRED, None], ids=str)
def test_the_commit_of_an_end_makes_the_next_job_whatever_ended_it(scene, how):
    """One operation, and no service beside the store: what is there afterwards came with the same transaction."""
    array_id = scene.submit("1-3%1")
    kit, first = scene.kit, f"{array_id}_1"
    if how is None:
        change = changes.cancel(scene.store.job(first), None, kit.now, grace=SECOND, **END_SETTINGS)
    else:
        [dispatch] = kit.tick(lease=True)
        change = changes.end(scene.store.job(first), dispatch, how, kit.now, **END_SETTINGS)

    assert committed(scene.store, Apply([change])) == [True]

    assert scene.names(array_id) == [first, f"{array_id}_2"]
    progress = scene.arrays.get(array_id).progress
    assert progress.live == ((2, 1),)
    assert (progress.done, progress.failed, progress.canceled) == {
        EndReason.COMPLETED: (1, 0, 0),
        None: (0, 0, 1),
    }.get(how, (0, 1, 0))


def test_a_round_starts_the_next_index_in_the_commit_that_ends_the_one_before(scene):
    array_id = scene.submit("1-3%1")
    [dispatch] = scene.kit.tick(lease=True)

    done = Complete([CompletedDispatch(dispatch.dispatch_id)])
    ended, started = scene.store.commit(done, scene.kit.round(lease=True), wait=True)

    assert ended.result() == [True]
    assert [grant.dispatch.job_id for grant in started.result()] == [f"{array_id}_2"]
    assert scene.kit.kinds(f"{array_id}_2") == ["SUBMITTED", "DISPATCHING", "RUNNING"]


def test_an_end_of_an_earlier_version_is_seen_by_the_next_look(scene, monkeypatch):
    """It ended jobs without their array, which followed in the next commit."""
    array_id = scene.submit("1-3%1")
    with monkeypatch.context() as patch:
        for module in (memory_store, sqlite_store, rounds):
            patch.setattr(module, "advance_arrays", lambda *_: [])
        scene.jobs.cancel(f"{array_id}_1")
    assert scene.names(array_id) == [f"{array_id}_1"]

    scene.advancer.step(scene.store.now())

    assert scene.names(array_id) == [f"{array_id}_1", f"{array_id}_2"]
    assert scene.arrays.get(array_id).progress.canceled == 1


def test_the_key_of_an_array_covers_the_whole_array(scene):
    keyed = Intent("a", "t", idempotency_key="k")
    first, is_new = scene.arrays.submit(keyed, "1-9%2")
    again, is_new_again = scene.arrays.submit(keyed, "1-9%2")

    assert (first, is_new, is_new_again) == (again, True, False)
    with pytest.raises(KeyConflict):
        scene.arrays.submit(keyed, "1-9%3")
    assert len(scene.names(first.array.array_id)) == 2


@pytest.mark.parametrize("indices", ["1-1000000000", "", "9-1", "1-9%0"])
def test_a_bad_array_is_refused_by_name_and_changes_nothing(scene, indices):
    before = scene.kit.everything()
    with pytest.raises(BadIntent) as refused:
        scene.arrays.submit(JOB, indices)

    assert [problem["field"] for problem in refused.value.problems] == ["array"]
    assert (scene.kit.everything(), scene.store.arrays(10)) == (before, [])


def test_a_full_queue_refuses_an_array_whose_first_jobs_it_has_no_room_for(scene):
    rules = replace(RULES, depth=Depth(total=5, per_addon=3))
    scene.arrays = ArrayService(scene.store, rules, scene.jobs)
    keyed = replace(JOB, idempotency_key="k")
    array_id = scene.submit("1-100%3", keyed)
    before = scene.kit.everything()

    with pytest.raises(QueueFull, match="for addon a, the limit is 3"):
        scene.submit("1-100%1")
    with pytest.raises(QueueFull, match="in all, the limit is 5"):
        scene.submit("1-3", replace(JOB, addon_id="b"))

    assert scene.kit.everything() == before
    assert scene.submit("1-100%3", keyed) == array_id
    assert scene.submit("1-100%2", replace(JOB, addon_id="b"))


def test_a_job_that_an_array_ends_names_the_array(scene):
    array_id = scene.submit("1-1%1")
    [child] = scene.kit.submit(after=(Dependency(array_id),))
    scene.work()
    scene.end(f"{array_id}_1", how=FAILED)

    job = scene.store.job(child)
    assert CANCELED == job.state
    assert f"it was to run after array {array_id[-8:]}:ok, which is FAILED" == outcome_of(job, None).error


def test_arrays_that_are_submitted_at_once_do_not_exceed_the_depth(scene):
    service = ArrayService(scene.store, replace(RULES, depth=Depth(total=10)), scene.jobs)
    at_once = Barrier(8)

    def submit(_):
        at_once.wait()
        try:
            service.submit(JOB, "1-100%3")
        except QueueFull:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(submit, range(8)))

    assert 3 == sum(taken)
    assert 9 == len(scene.store.find(Query()))


def test_the_result_of_an_array_outlives_its_jobs(scene):
    array_id = scene.submit("1-6%2")
    for _ in range(2):
        scene.work()
        for job_id in sorted(scene.running):
            scene.end(job_id, how=FAILED if member_of(job_id)[1] == 2 else DONE)
    scene.kit.later(10)
    committed(scene.store, Prune(scene.store.now() - SECOND, 100))

    record = scene.arrays.get(array_id)
    assert (record.progress.done, indices_in(scene.store.failed_indices(array_id))) == (3, [2])
    assert scene.names(array_id) == [f"{array_id}_5", f"{array_id}_6"]
    with pytest.raises(NotFound, match="index 1"):
        scene.arrays.job_of(array_id, 1)
    with pytest.raises(NotFound, match="is not in 1-6%2"):
        scene.arrays.job_of(array_id, 7)


def test_an_index_that_waits_says_for_what(scene):
    array_id = scene.submit("1-30%8")

    with pytest.raises(NotFound, match=f"index 17 of array {array_id} waits: 8 of 8 at once, 22 to come"):
        scene.arrays.job_of(array_id, 17)


def test_each_end_writes_as_much_however_many_indices_failed_before(scene, monkeypatch):
    """Every second one fails, so there are as many ranges of failed indices as failures."""
    written = []
    for module in (sqlite_groups, postgres_groups):
        monkeypatch.setattr(module, "array_progress", lambda r: written.append(r) or array_progress(r))
    size = 8 * CHUNK
    array_id = scene.submit(f"0-{size - 1}%8")
    while running := scene.work():
        assert len(running) <= 8
        scene.end(*sorted(scene.running)[1::2])
        scene.end(*sorted(scene.running), how=FAILED)
    record = scene.arrays.get(array_id)
    assert record.progress.failed == size / 2

    scene.arrays.retry(array_id)
    assert len(scene.arrays.get(array_id).progress.live) == 8
    while scene.work():
        scene.end(*sorted(scene.running))

    record = scene.arrays.get(array_id)
    assert (record.state, record.progress.done, record.progress.failed) == (DONE, size, 0)
    assert scene.store.failed_indices(array_id) == []
    assert all(len(array_progress(record)["state"]) < 500 for record in written)
    assert scene.store.audit() == []


def test_indices_that_fail_again_while_others_wait_are_not_lost(scene):
    """In chunks far apart, some of which are behind those that wait."""
    indices = [0, 1, CHUNK, 3 * CHUNK + 5, 10 * CHUNK]
    array_id = scene.submit(",".join(map(str, indices)) + "%1")
    while scene.work():
        scene.end(*scene.running, how=FAILED)
    scene.arrays.retry(array_id)
    ran = []
    for how in (FAILED, DONE, FAILED):
        ran += scene.work()
        scene.end(*scene.running, how=how)

    scene.arrays.retry(array_id)
    for _ in range(4):
        ran += scene.work()
        scene.end(*scene.running)

    assert ran == [0, 1, CHUNK, 3 * CHUNK + 5, 0, CHUNK, 10 * CHUNK]
    assert scene.arrays.get(array_id).state is DONE


def test_which_indices_failed_is_pruned_with_their_array(scene):
    array_id = scene.submit("1-3")
    scene.work()
    scene.end(*sorted(scene.running), how=FAILED)
    assert indices_in(scene.store.failed_indices(array_id)) == [1, 2, 3]
    scene.kit.later(10)

    committed(scene.store, Prune(scene.store.now() - SECOND, 100))

    assert (scene.store.array(array_id), scene.store.failed_indices(array_id)) == (None, [])


def test_a_key_is_free_again_when_the_array_is_pruned_with_all_of_its_jobs(scene):
    keyed = replace(JOB, idempotency_key="nightly")
    array_id = scene.submit("1-5", keyed)
    scene.work()
    scene.end(*sorted(scene.running))
    scene.kit.later(10)

    for left in (3, 1, 0):
        committed(scene.store, Prune(scene.store.now() - SECOND, 2))
        assert len(scene.names(array_id)) == left
        assert (scene.store.array(array_id) is None) == (left == 0)
        if left:
            assert scene.submit("1-5", keyed) == array_id  # the same array, which has ended
            assert scene.work() == []

    assert scene.submit("1-5", keyed) == array_id
    assert scene.work() == [1, 2, 3, 4, 5]


def play(scene, seed):
    """Random arrays with random ends, cancels, retries and new schedulers, beside a plain model of each."""
    dice = Random(seed)
    models = {}
    for _ in range(dice.randint(1, 3)):
        size, at_once = dice.randint(1, 12), dice.choice([None, 1, 2, 5])
        array_id = scene.submit(f"1-{size}" + (f"%{at_once}" if at_once else ""))
        models[array_id] = {
            "most": at_once or WINDOW,
            "wait": list(range(1, size + 1)),
            "ends": {},
            "stopped": False,
        }
    for _ in range(60):
        scene.work()
        array_id = dice.choice(sorted(models))
        model = models[array_id]
        match dice.choice(["end", "end", "end", "end", "retry", "cancel", "restart"]):
            case "end" if mine := sorted(name for name in scene.running if name.startswith(array_id)):
                job_id, how = dice.choice(mine), dice.choice([DONE, DONE, FAILED])
                scene.end(job_id, how=how)
                model["ends"][member_of(job_id)[1]] = how
            case "retry":
                failed = sorted(index for index, end in model["ends"].items() if end is FAILED)
                if model["stopped"] or not failed:
                    with pytest.raises(IllegalMove):
                        scene.arrays.retry(array_id)
                    continue
                scene.arrays.retry(array_id)
                for index in failed:
                    del model["ends"][index]
            case "cancel" if dice.random() < 0.2:
                if scene.arrays.get(array_id).state is JobState.RUNNING:
                    scene.arrays.cancel(array_id)
                    model["stopped"] = True
                    for job_id in [name for name in scene.running if name.startswith(array_id)]:
                        scene.end(job_id)  # it was told to stop: its first reason counts
                    for index in model["wait"]:
                        model["ends"].setdefault(index, CANCELED)
            case "restart":
                scene.begin()
        check(scene, array_id, model)


def check(scene, array_id, model):
    record = scene.arrays.get(array_id)
    counts, progress = Counter(model["ends"].values()), record.progress
    living = [name for name in record.live_jobs() if scene.store.job(name).state not in ENDED]
    assert len(living) == len(progress.live) <= model["most"]
    open_indices = [index for index in model["wait"] if index not in model["ends"]]
    assert len(living) == min(model["most"], len(open_indices))
    assert (
        progress.done,
        progress.failed,
        progress.canceled,
    ) == (
        counts[DONE],
        counts[FAILED],
        counts[CANCELED],
    )
    failed = sorted(i for i, e in model["ends"].items() if e is FAILED)
    assert indices_in(scene.store.failed_indices(array_id)) == failed
    assert (progress.ended_at is None) == bool(open_indices)


@pytest.mark.parametrize("seed", range(6))
def test_random_arrays_do_what_a_plain_model_does(scene, seed):
    play(scene, seed)
    assert scene.store.audit() == []
