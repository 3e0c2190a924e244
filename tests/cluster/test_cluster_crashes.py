"""Cluster workers and machines that die: only their own calls are touched, by the rules that every pool has."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import suppress

import calls
import pytest

import penstock
from penstock.pools.timers import clock
from tests.cluster.conftest import NODE, actors
from tests.pools.test_pool_ending import alive, lines
from tests.waiting import until

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))


def worker_of(call):
    """The pid of the worker that has this call now."""
    return call.worker.pid


def test_a_killed_worker_fails_the_call_that_it_ran_and_no_other(make_pool, gate):
    with make_pool(2, max_in_flight=4) as pool:
        dying, other, *behind = (pool.submit(calls.wait_for, str(gate), n) for n in range(4))
        until(lambda: pool.snapshot().load_by_worker == (1, 1))
        until(lambda: dying.worker.ready and other.worker.ready)
        os.kill(worker_of(dying), signal.SIGKILL)

        with pytest.raises(penstock.WorkerCrashedError) as caught:
            dying.result(60)
        assert (1, True) == (caught.value.attempt, caught.value.started)
        gate.touch()
        assert [1, 2, 3] == [future.result(60) for future in (other, *behind)]
        assert {"spawned": 3, "crashed": 1, "failed": 1}.items() <= pool.snapshot().totals.items()
        assert all(1 == future.attempt for future in (other, *behind))


def test_a_killed_worker_has_its_call_requeued_and_no_other(make_pool, gate, tmp_path):
    log = tmp_path / "log"
    with make_pool(2, crash_policy="restart-requeue-in-flight") as pool:
        futures = [pool.submit(calls.mark_and_wait, str(log), n, str(gate)) for n in range(2)]
        until(lambda: sorted(lines(log)) == ["0", "1"], 60)
        os.kill(worker_of(futures[0]), signal.SIGKILL)
        until(lambda: sorted(lines(log)) == ["0", "0", "1"], 60)
        gate.touch()

        assert [0, 1] == [future.result(60) for future in futures]
        assert [2, 1] == [future.attempt for future in futures]
        assert 1 == pool.snapshot().totals["requeued"]


def test_a_requeued_call_comes_before_those_that_never_began(make_pool, tmp_path):
    log = tmp_path / "log"
    with make_pool(1, max_in_flight=3, crash_policy="restart-requeue-in-flight") as pool:
        first = pool.submit(calls.die_until, str(log), 1)
        rest = [pool.submit(calls.mark, str(log), name) for name in ("second", "third", "fourth")]

        assert 2 == first.result(60)
        assert ["second", "third", "fourth"] == [future.result(60) for future in rest]
    assert ["1", "2", "second", "third", "fourth"] == lines(log)


def test_a_call_that_kills_its_worker_every_time_fails_after_max_attempts(make_pool, tmp_path):
    options = {"crash_policy": "restart-requeue-in-flight", "crash_max_retries": 10, "max_attempts": 2}
    with make_pool(1, max_in_flight=2, **options) as pool:
        killer = pool.submit(calls.die_until, str(tmp_path / "log"), 99)
        other = pool.submit(calls.echo, "other")

        with pytest.raises(penstock.WorkerCrashedError, match="crashed 2 workers"):
            killer.result(60)
        assert "other" == other.result(60)
    assert ["1", "2"] == lines(tmp_path / "log")


def test_fail_task_fails_everything_and_halts_until_restarted(make_pool):
    with make_pool(1, crash_policy="fail-task", max_in_flight=2, max_queue_depth=5) as pool:
        dying = pool.submit(calls.die)
        behind = [pool.submit(calls.echo, n) for n in range(3)]

        for future in (dying, *behind):
            with pytest.raises(penstock.WorkerCrashedError):
                future.result(60)
        until(lambda: pool.snapshot().workers == {"halted": 1})
        pool.restart()
        assert 1 == pool.submit(calls.echo, 1).result(60)


def test_a_worker_that_cannot_be_set_up_says_why(make_pool):
    with make_pool(1, crash_max_retries=1, initializer=calls.bad_initializer) as pool:
        with pytest.raises(penstock.WorkerCrashedError, match="RuntimeError: no weights") as caught:
            pool.submit(calls.echo, 1).result(60)
        assert "bad_initializer" in "".join(caught.value.__notes__)


def test_an_idle_worker_that_is_killed_is_noticed_at_once(make_pool):
    with make_pool(1) as pool:
        pid = pool.submit(calls.pid).result(60)
        os.kill(pid, signal.SIGKILL)
        until(lambda: pool.snapshot().totals["crashed"] == 1)

        assert pid != pool.submit(calls.pid).result(60)


def test_stopped_workers_give_back_what_they_ran_and_go_on_when_started(make_pool, gate, tmp_path):
    log = tmp_path / "log"
    with make_pool(1, max_in_flight=2) as pool:
        futures = [pool.submit(calls.mark_and_wait, str(log), n, str(gate)) for n in range(2)]
        until(lambda: lines(log) == ["0"], 60)
        pool.stop_workers()
        until(lambda: pool.state.in_flight == 0 and not actors())
        assert 2 == pool.state.pending

        gate.touch()
        pool.start_workers()
        assert [0, 1] == [future.result(60) for future in futures]
        assert ["0", "0", "1"] == lines(log)


def test_workers_are_recycled(make_pool):
    with make_pool(1, recycle_after_calls=2) as pool:
        pids = [pool.submit(calls.pid).result(60) for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]
    with make_pool(1, recycle_above_rss=1) as pool:
        assert pool.submit(calls.pid).result(60) != pool.submit(calls.pid).result(60)
    assert 0 == pool.snapshot().totals["crashed"]


def test_idle_workers_stop_and_start_again_when_needed(make_pool):
    with make_pool(1, idle_stop=0.05) as pool:
        assert 1 == pool.submit(calls.echo, 1).result(60)
        until(lambda: not actors())
        assert 2 == pool.submit(calls.echo, 2).result(60)


def test_a_lost_machine_has_its_calls_run_elsewhere(machines, gate, tmp_path):
    log = tmp_path / "log"
    machine = machines.add_node(**{**NODE, "num_cpus": 1}, resources={"far": 2})
    near = penstock.Cluster(cpus=1, lease=2)
    with (
        penstock.WorkerPool(
            1,
            kind="cluster",
            cluster=penstock.Cluster(cpus=0, resources={"far": 1}, lease=2),
            crash_policy="restart-requeue-in-flight",
        ) as far,
        penstock.WorkerPool(1, kind="cluster", cluster=near) as other,
    ):
        kept = other.submit(calls.wait_for, str(gate), "kept")
        moved = far.submit(calls.mark_and_wait, str(log), "moved", str(gate))
        until(lambda: lines(log) == ["moved"], 60)
        pid = worker_of(moved)

        machines.remove_node(machine, allow_graceful=False)
        until(lambda: far.snapshot().totals["requeued"] == 1, 60)
        assert not alive(pid)
        machine = machines.add_node(**{**NODE, "num_cpus": 1}, resources={"far": 2})
        gate.touch()

        assert "moved" == moved.result(60)
        assert "kept" == kept.result(60)
        assert (2, 1) == (moved.attempt, kept.attempt)
    machines.remove_node(machine)


def test_a_lost_machine_is_given_the_time_of_its_lease(machines, tmp_path):
    """Ray takes it for dead when it does not answer; it may be cut off, and at work."""
    log = tmp_path / "log"
    machine = machines.add_node(**{**NODE, "num_cpus": 0}, resources={"cut off": 1})
    terms = penstock.Cluster(cpus=0, resources={"cut off": 1}, lease=4)
    with penstock.WorkerPool(1, kind="cluster", cluster=terms) as pool:
        future = pool.submit(calls.mark_and_wait, str(log), "began", "never")
        until(lambda: lines(log), 60)
        link = future.worker.link
        machines.remove_node(machine, allow_graceful=False)

        with pytest.raises(penstock.WorkerCrashedError):
            future.result(60)
        assert clock() >= link.lease_over()


def test_a_worker_that_hears_nothing_ends_itself_before_its_call_is_run_elsewhere(machines, tmp_path):
    log = tmp_path / "log"
    terms = penstock.Cluster(lease=1)
    options = {"crash_policy": "restart-requeue-in-flight", "restart_delay": 0.001}
    with penstock.WorkerPool(1, kind="cluster", cluster=terms, **options) as pool:
        future = pool.submit(hold_the_first_time, str(log))
        until(lambda: lines(log), 60)
        pid = worker_of(future)
        os.kill(pid, signal.SIGSTOP)  # like a machine that cannot be reached

        until(lambda: pool.snapshot().totals["requeued"] == 1, 60)
        os.kill(pid, signal.SIGCONT)
        until(lambda: not alive(pid))
        assert 2 == future.result(60)
        assert pool.snapshot().last_crash  # the lease, or Ray, which may notice the end of the process first


def test_a_program_that_is_killed_leaves_no_actor(machines, tmp_path):
    program = f"""
        import calls, penstock, time
        terms = penstock.Cluster(address={machines.address!r}, cpus=0.5)
        pool = penstock.WorkerPool(2, kind="cluster", cluster=terms)
        for n in range(2):
            pool.submit(calls.mark_and_wait, {str(tmp_path / "log")!r}, n, "never")
        time.sleep(60)
    """
    child = run_program(program)
    try:
        until(lambda: len(lines(tmp_path / "log")) == 2, 60)
        pids = [actor["Pid"] for actor in actors()]
        assert 2 == len(pids)
    finally:
        child.kill()
        child.communicate()

    until(lambda: not actors(), 30)
    until(lambda: not any(map(alive, pids)))


def test_a_worker_whose_pool_has_fallen_silent_ends_itself(machines, gate, monkeypatch):
    monkeypatch.setattr(
        "penstock.cluster.workers._HEARTBEATS_PER_LEASE", 0.001
    )  # one when it comes, and no other
    with penstock.WorkerPool(1, kind="cluster", cluster=penstock.Cluster(lease=1)) as pool:
        with pytest.raises(penstock.WorkerCrashedError):
            pool.submit(calls.wait_for, str(gate)).result(60)
        assert pool.snapshot().totals["terminated"] == 0


def test_beats_keep_a_worker_alive_past_its_lease(machines):
    with penstock.WorkerPool(1, kind="cluster", cluster=penstock.Cluster(lease=1)) as pool:
        assert 2.5 == pool.submit(calls.sleep, 2.5).result(60)


@pytest.mark.parametrize("policy", ["restart-fail-in-flight", "restart-requeue-in-flight"])
def test_workers_killed_at_random_lose_no_call_and_run_none_twice_unasked(make_pool, tmp_path, policy):
    journal, kills = tmp_path / "journal", 3 * SOAK
    options = {"crash_policy": policy, "crash_max_retries": 10**6, "max_attempts": 10**6}
    with make_pool(2, max_in_flight=6, max_queue_depth=10**6, **options) as pool:
        futures = [pool.submit(mark_and_pause, str(journal), n) for n in range(60 * SOAK)]
        for kill in range(1, kills + 1):
            until(lambda enough=8 * kill: len(lines(journal)) > enough, 60)
            kill_some_worker(pool)
        errors = [future.exception(60) for future in futures]
    runs = Counter(lines(journal))

    assert {None, penstock.WorkerCrashedError} >= {
        error if error is None else type(error) for error in errors
    }
    assert sum(error is not None for error in errors) <= (kills if "fail" in policy else 0)
    assert all(futures[n].result() == n for n, error in enumerate(errors) if error is None)
    most = 1 if "fail" in policy else 1 + kills
    assert all(1 <= runs[str(n)] <= most for n, error in enumerate(errors) if error is None)


def kill_some_worker(pool):
    pids = [worker.pid for worker in pool.internals.group.workers if worker.ready]
    if pids:
        with suppress(ProcessLookupError):
            os.kill(random.choice(pids), signal.SIGKILL)


def test_a_program_that_disconnects_is_told_so(machines):
    program = f"""
        import calls, penstock, ray
        terms = penstock.Cluster(address={machines.address!r})
        pool = penstock.WorkerPool(1, kind="cluster", cluster=terms, crash_max_retries=0)
        pool.submit(calls.echo, 1).result()
        ray.shutdown()
        try:
            pool.submit(calls.echo, 2).result()
        except penstock.WorkerCrashedError as error:
            print(error)
        pool.shutdown()
    """

    output = run_program(program).communicate(timeout=60)[0]

    # Its actor goes with it, and the news of that may be here before anything is asked of Ray.
    assert "disconnected from Ray" in output or "INTENDED_USER_EXIT" in output


def test_functions_of_a_script_travel_by_value(machines, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import penstock

        class Refused(Exception):
            pass

        class Point:
            def __init__(self, x):
                self.x = x

        def double(point):
            if point.x < 0:
                raise Refused(point.x)
            return Point(2 * point.x)

        if __name__ == "__main__":
            terms = penstock.Cluster(address={machines.address!r})
            with penstock.WorkerPool(1, kind="cluster", cluster=terms) as pool:
                made = pool.submit(double, Point(21)).result()
                print(made.x, type(made) is Point)
                print(type(pool.submit(double, Point(-1)).exception()) is Refused)
        """)
    )

    assert ["42 True", "True"] == run_program(script).communicate(timeout=60)[0].splitlines()


def hold_the_first_time(path):
    attempt = penstock.current_call().attempt
    calls.mark(path, attempt)
    if attempt == 1:
        calls.wait_for("never")
    return attempt


def mark_and_pause(path, value):
    calls.mark(path, value)
    time.sleep(0.02)
    return value


def run_program(program):
    """A text, or the path of a script."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    what = ["-c", textwrap.dedent(program)] if isinstance(program, str) else [program]
    return subprocess.Popen([sys.executable, *what], env=env, stdout=subprocess.PIPE, text=True)
