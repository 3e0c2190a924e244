"""A tree of processes that ignores everything is gone in time, whatever ended it; and each end lands where SPEC TR-5 says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.jobs.states import Schedules
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import SECOND, EndReason
from penstock.runner.folder import RunnerFolder
from penstock.runner.process_tree import RUNNER_MARK, children, find_marked, read_process
from penstock.stores.api import SetAddon, committed
from tests import SOURCES
from tests.waiting import alive, until

from .plant import HERE, SOAK, TREE, Plant, pids_in

#: Before a lease of 30 s can end, which has 20 s left at least: nothing but the stop under test has ended a tree by then.
SOON = 15.0


@pytest.fixture
def bystanders():
    """Processes that look much like ours and are not: one with another runner's mark, one with none."""
    started = [
        subprocess.Popen(
            ["sleep", "300"], env={"PENSTOCK_RUNNER": "another", "PENSTOCK_DISPATCH": "another.1"}
        ),
        subprocess.Popen(["sleep", "300"], start_new_session=True),
    ]
    yield
    try:
        assert [process.poll() for process in started] == [None, None]
    finally:
        for process in started:
            process.kill()
            process.wait()


def reached(plant, job, pids, state, seconds=SOON):
    """The state, with all of the tree gone by then and its units back."""
    plant.until(job, state, seconds=seconds)
    left = [pid for pid in pids if alive(pid)]
    assert left == []


def test_after_a_cancel(plant, tmp_path, bystanders):
    job, path = plant.tree(tmp_path)
    pids = pids_in(path)
    plant.job_service.cancel(job)

    reached(plant, job, pids, "CANCELED")
    assert plant.units() == 0
    assert [e for e in plant.events(job) if e[0] in ("STOP_REQUESTED", "SIGNALED", "CANCELED")] == [
        ("STOP_REQUESTED", "canceled"),
        ("SIGNALED", "cancel"),
        ("SIGNALED", "term"),
        ("SIGNALED", "kill"),
        ("CANCELED", "canceled"),
    ]


def test_after_a_cancel_that_cannot_wait(plants, tmp_path):
    plant = plants(graces=Graces(cancel=60 * SECOND, term=60 * SECOND))
    job, path = plant.tree(tmp_path, listens=True)
    pids = pids_in(path)
    plant.job_service.cancel(job)
    plant.runner.kill(plant.store.job(job).dispatch_id)

    reached(plant, job, pids, "CANCELED")


@pytest.mark.parametrize(
    "reason", [EndReason.PREEMPTION_TIMEOUT, EndReason.COOPERATIVE_PREEMPTION, EndReason.GRACEFUL_SHUTDOWN]
)
def test_after_preemption(plant, tmp_path, reason, bystanders):
    job, path = plant.tree(tmp_path)
    pids = pids_in(path)
    committed(plant.store, SetAddon("a", paused=True))
    plant.job_service.stop(plant.store.job(job).dispatch_id, reason)

    reached(plant, job, pids, "QUEUED")
    assert plant.events(job)[-1] == ("REQUEUED", str(reason))
    assert plant.store.job(job).counters.crash == 0


def test_at_the_hard_cap(plant, tmp_path, bystanders):
    job, path = plant.tree(tmp_path, fields={"max_active_sec": 2})

    plant.until(job, "FAILED")
    assert [pid for pid in (path.read_text().split() if path.exists() else []) if alive(int(pid))] == []
    assert plant.events(job)[-2:] == [("FAILED", "hard_cap_exceeded"), ("ALERT", "hard_cap_exceeded")]


def test_at_the_runtime_limit_it_is_tried_again_and_then_fails(plants, tmp_path):
    """A tree that is ended while it still grows leaves nothing behind either: how many of them are up after a second is open."""
    plant = plants(rules={"schedules": Schedules(crash=(0,))})
    job, path = plant.tree(tmp_path, fields={"max_runtime_sec": 1})

    plant.until(job, "FAILED")
    assert [pid for pid in (path.read_text().split() if path.exists() else []) if alive(int(pid))] == []
    ends = [e for e in plant.events(job) if e[0] in ("TIMEOUT", "REQUEUED", "FAILED")]
    assert [kind for kind, _ in ends] == ["TIMEOUT", "REQUEUED", "TIMEOUT", "FAILED"]


def test_at_the_spending_limit(plant, tmp_path, bystanders):
    path = tmp_path / "pids"
    spend = f"PYTHONPATH={SOURCES} {sys.executable} -m penstock.runner.job spend 2"
    script = f"{sys.executable} {TREE} {path} & until [ $(wc -l < {path}) = 5 ]; do sleep 0.05; done; {spend}; wait"
    job = plant.submit("shell", {"script": script}, cost_limit=1_000_000)
    pids = pids_in(path)

    reached(plant, job, pids, "BLOCKED")
    attempt = plant.last(job)
    assert (str(attempt.end), attempt.spent) == ("cost_limit_reached", 2_000_000)
    assert ("ALERT", "cost_limit_reached") in plant.events(job)


def test_when_a_lease_cannot_be_renewed_the_warden_ends_the_tree_by_itself(plants, tmp_path):
    """The runner's thread is stuck, as if the whole scheduler were stopped: nobody renews, and nobody says so."""
    plant = plants(rules={"lease_for": 2 * SECOND})
    job, path = plant.tree(tmp_path)
    pids = pids_in(path)
    freed = threading.Event()
    plant.runner.call_soon(freed.wait)
    try:
        until(lambda: not any(map(alive, pids)))
    finally:
        freed.set()
    plant.until(job, "RUNNING", "FAILED")
    plant.job_service.cancel(job)


def test_a_job_that_takes_many_leases_and_hears_nobody_runs_once(plants, tmp_path):
    """It holds its interpreter the whole time: heartbeats come from where nobody's code runs."""
    plant = plants(rules={"lease_for": 2 * SECOND})
    job = plant.function("compute", 5)

    assert plant.settled(job).result == '"computed"'
    assert len(plant.store.attempts(job)) == 1


def test_with_the_runner(plants, tmp_path, bystanders):
    plant = plants()
    job, path = plant.tree(tmp_path)
    pids = pids_in(path)
    began = time.monotonic()
    plant.runner.stop(2)

    assert SOAK == 1 or time.monotonic() - began < 3
    until(lambda: not any(map(alive, pids)), what="the end of the tree")
    assert plant.state(job) == "QUEUED"
    assert plant.events(job)[-1] == ("REQUEUED", "graceful_shutdown")


@pytest.fixture
def daemon(tmp_path):
    """A scheduler as a program of its own."""
    data = tmp_path / "data"
    data.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "daemon_for_tests.py"), str(data)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process, data
    process.kill()
    process.wait()
    process.stdout.close()


def test_when_the_scheduler_is_killed(daemon, tmp_path, bystanders):
    process, data = daemon
    submitter = Plant(data, dispatch=False)
    job, path = submitter.tree(tmp_path)
    pids = pids_in(path)
    process.kill()
    process.wait()

    until(lambda: not any(map(alive, pids)), SOON, "the end of the tree")
    until(lambda: not submitter.ours(), what="the end of the launcher and the warden")
    assert submitter.state(job) == "RUNNING"
    submitter.store.close()
    again = Plant(data, rules={"schedules": Schedules(crash=(SECOND // 10,))})
    again.until(job, "RUNNING")
    assert [e for e in again.events(job) if e[0] == "REQUEUED"] == [("REQUEUED", "scheduler_restarted")]
    assert again.store.job(job).counters.crash == 1
    again.stop(2)


@pytest.mark.parametrize("stopped", ["warden", "launcher"])
def test_when_the_scheduler_is_killed_either_the_launcher_or_the_warden_is_enough(daemon, tmp_path, stopped):
    process, data = daemon
    submitter = Plant(data, dispatch=False)
    _, path = submitter.tree(tmp_path)
    pids = pids_in(path)
    [launcher] = [
        p.pid for p, _ in find_marked(RUNNER_MARK, {RunnerFolder(data).mark}) if p.parent == process.pid
    ]
    for pid in children(launcher) if stopped == "warden" else [launcher]:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()

    try:
        until(lambda: not any(map(alive, pids)), SOON, "the end of the tree")
    finally:
        if stopped == "launcher":
            os.kill(launcher, signal.SIGCONT)
    until(lambda: not submitter.ours(), what="the end of the launcher and the warden")
    submitter.store.close()


def test_a_new_scheduler_first_ends_what_the_killed_one_left(daemon, tmp_path, bystanders):
    """With the launcher and the warden killed too there is nobody to do it but the next one."""
    process, data = daemon
    submitter = Plant(data, dispatch=False)
    job, path = submitter.tree(tmp_path)
    pids = pids_in(path)
    launcher = [
        p.pid for p, _ in find_marked(RUNNER_MARK, {RunnerFolder(data).mark}) if p.parent == process.pid
    ]
    wardens = children(launcher[0])
    roots = [pid for warden in wardens for pid in children(warden) if read_process(pid).group == pid]
    for number in (
        signal.SIGSTOP,
        signal.SIGKILL,
    ):  # stopped first: nobody hears of the others' death, or takes note of it
        for pid in (*wardens, *launcher, process.pid):
            os.kill(pid, number)
    process.wait()
    submitter.store.close()

    until(lambda: not any(map(alive, roots)), SOON, "the end of the root with its warden")
    again = Plant(data, rules={"schedules": Schedules(crash=(60 * SECOND,))})
    # The one without an environment is known to nobody any more.
    bare = [pid for pid in pids if alive(pid)]
    assert len(bare) <= 1
    assert again.state(job) == "QUEUED"
    for pid in bare:
        os.kill(pid, signal.SIGKILL)
    again.stop(2)


@pytest.mark.parametrize("victim", ["warden", "launcher", "root"])
def test_when_one_of_our_processes_is_killed_nothing_is_left_and_the_job_lands(
    plant, tmp_path, victim, bystanders
):
    job, path = plant.tree(tmp_path)
    pids = pids_in(path)
    [root] = plant.runner.pids()
    [launcher] = [
        p.pid for p, _ in find_marked(RUNNER_MARK, {RunnerFolder(plant.data).mark}) if p.parent == os.getpid()
    ]
    [warden] = [child for child in children(launcher) if root in children(child)]
    committed(plant.store, SetAddon("a", paused=True))
    os.kill({"warden": warden, "launcher": launcher, "root": root}[victim], signal.SIGKILL)

    if victim == "launcher":
        # What runs goes on, and the next one starts.
        committed(plant.store, SetAddon("a", paused=False))
        assert plant.settled(plant.command("true")).end == "completed"
        assert plant.state(job) == "RUNNING"
        plant.job_service.cancel(job)
        reached(plant, job, pids, "CANCELED")
    else:
        reached(plant, job, pids, "QUEUED")
        assert plant.events(job)[-1] == ("REQUEUED", "worker_crashed")
    assert plant.units() == 0


@pytest.mark.parametrize(("how", "state"), [((), "CANCELED"), (("--leave",), "DONE")])
def test_a_warden_needs_no_help_to_end_its_tree(plant, tmp_path, how, state):
    """The launcher, which would end what a warden forgets, is stopped meanwhile."""
    job, path = plant.tree(tmp_path, *how)
    until(plant.runner.pids)
    [launcher] = [
        p.pid for p, _ in find_marked(RUNNER_MARK, {RunnerFolder(plant.data).mark}) if p.parent == os.getpid()
    ]
    os.kill(launcher, signal.SIGSTOP)
    try:
        pids = pids_in(path, 4 if how else 5)
        if not how:
            plant.job_service.cancel(job)
        reached(plant, job, pids, state)
    finally:
        os.kill(launcher, signal.SIGCONT)


def test_a_warden_that_is_stopped_does_not_save_its_tree(plant, tmp_path):
    job, path = plant.tree(tmp_path)
    pids = pids_in(path)
    [root] = plant.runner.pids()
    os.kill(read_process(root).parent, signal.SIGSTOP)
    plant.job_service.cancel(job)

    reached(plant, job, pids, "CANCELED")


def test_a_function_that_listens_yields_and_its_worker_stays_warm(plant, tmp_path):
    job, heard = plant.function("listen", str(tmp_path / "n")), tmp_path / "n"
    until(lambda: heard.exists() and int(heard.read_text() or 0) > 1)  # it has asked once
    [pid] = plant.runner.pids()
    plant.job_service.cancel(job)

    plant.until(job, "CANCELED")
    assert ("SIGNALED", "term") not in plant.events(job)
    assert plant.settled(plant.function("pid")).result == str(pid)


def test_a_function_that_does_not_listen_is_ended_with_its_worker(plant, tmp_path):
    job = plant.function("sleep", str(tmp_path / "pid"))
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    plant.job_service.cancel(job)

    reached(plant, job, [pid], "CANCELED")
    assert plant.settled(plant.function("add", 1, 1)).result == "2"


@pytest.mark.parametrize("round_", range(5 if SOAK == 1 else 10 * SOAK))
def test_forty_jobs_that_ignore_everything_delay_a_shutdown_by_no_more_than_its_timeout(tmp_path, round_):
    """Ten of ten: two beside each other in each round, for most of it is waiting."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(stop_forty, [tmp_path / "one", tmp_path / "two"]))


def stop_forty(data):
    data.mkdir()
    plant = Plant(data)
    script = "trap '' TERM INT HUP; echo up; exec sleep 300"
    jobs = [plant.submit("shell", {"script": script}) for _ in range(40)]
    until(lambda: all(plant.last(j) and plant.output(j)["stdout"] for j in jobs), what="forty jobs")
    pids = plant.runner.pids()
    began = time.monotonic()
    plant.runner.stop(2)

    # Seconds count only where the machine is ours: elsewhere `tests/runner/test_stop.py` shows the bound without a clock.
    assert SOAK == 1 or time.monotonic() - began <= 3
    until(lambda: not any(map(alive, pids)), what="the end of forty trees")
    assert {plant.state(job) for job in jobs} == {"QUEUED"}
    assert {plant.events(job)[-1] for job in jobs} == {("REQUEUED", "graceful_shutdown")}
    assert plant.units() == 0
    plant.stop()
    until(lambda: not plant.ours(), what="the end of all processes")


@pytest.mark.parametrize("reason", [EndReason.MAX_RUNTIME_EXCEEDED, EndReason.PREEMPTION_TIMEOUT])
def test_a_cancel_while_another_stop_is_under_way_is_the_end_of_the_job(plants, tmp_path, reason):
    plant = plants(graces=Graces(cancel=60 * SECOND, term=60 * SECOND))
    job, path = plant.tree(tmp_path)
    pids = pids_in(path)
    dispatch_id = plant.store.job(job).dispatch_id
    plant.job_service.stop(dispatch_id, reason)
    until(lambda: ("SIGNALED", "term") in plant.events(job))
    plant.job_service.cancel(job)
    plant.runner.kill(dispatch_id)

    reached(plant, job, pids, "CANCELED")
    assert ("STOP_REQUESTED", "canceled") in plant.events(job)
    assert plant.units() == 0


def test_a_cancel_during_a_shutdown_is_the_end_of_the_job(tmp_path):
    (tmp_path / "data").mkdir()
    plant = Plant(tmp_path / "data")
    job, path = plant.tree(tmp_path)
    pids_in(path)
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(plant.runner.stop, 4)
        until(lambda: ("STOP_REQUESTED", "graceful_shutdown") in plant.events(job))
        plant.job_service.cancel(job)
        stopping.result()

    assert plant.state(job) == "CANCELED"
    plant.stop()
