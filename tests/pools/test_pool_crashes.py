"""Workers that die: what becomes of their calls, of everybody else's, and of the pool."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import calls
import pytest

import penstock
from tests.pools.conftest import children, descriptors
from tests.pools.test_pool_calls import gate  # noqa: F401  # a fixture
from tests.pools.test_pool_ending import lines
from tests.waiting import alive, until

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
QUICK = {"restart_delay": 0.001}


def test_a_dead_worker_fails_the_call_that_it_ran_and_says_how_it_died():
    with penstock.WorkerPool(1, **QUICK) as pool:
        with pytest.raises(penstock.WorkerCrashedError, match="SIGKILL") as caught:
            pool.submit(calls.die).result(30)

        assert (0, 1, True) == (caught.value.worker, caught.value.attempt, caught.value.started)
        assert 1 == pool.submit(calls.echo, 1).result(30)
        assert {"spawned": 2, "crashed": 1, "failed": 1}.items() <= pool.snapshot().totals.items()
        assert "SIGKILL" in pool.snapshot().last_crash


def test_calls_that_the_dead_worker_had_not_begun_are_not_failed():
    with penstock.WorkerPool(1, max_in_flight=4, **QUICK) as pool:
        dying = pool.submit(calls.die)
        behind = [pool.submit(calls.echo, n) for n in range(3)]

        with pytest.raises(penstock.WorkerCrashedError):
            dying.result(30)
        assert [0, 1, 2] == [future.result(30) for future in behind]


def test_only_the_dead_workers_calls_are_touched(gate):
    with penstock.WorkerPool(2, **QUICK) as pool:
        other = pool.submit(calls.wait_for, str(gate), "untouched")
        with pytest.raises(penstock.WorkerCrashedError):
            pool.submit(calls.leave, 7).result(30)
        gate.touch()

        assert "untouched" == other.result(30)
        assert 0 == pool.snapshot().totals["requeued"]


def test_requeued_calls_run_again_in_their_old_order(tmp_path):
    log = tmp_path / "log"
    with penstock.WorkerPool(1, max_in_flight=3, crash_policy="restart-requeue-in-flight", **QUICK) as pool:
        first = pool.submit(calls.die_until, str(tmp_path / "attempts"), 1)
        rest = [pool.submit(calls.mark, str(log), n) for n in range(6)]

        assert 2 == first.result(30)
        assert list(range(6)) == [future.result(30) for future in rest]
    assert [str(n) for n in range(6)] == lines(log)
    assert 2 == first.attempt


def test_a_call_that_kills_its_worker_every_time_fails_after_max_attempts_and_others_go_on(tmp_path):
    log = tmp_path / "attempts"
    options = {
        "crash_policy": "restart-requeue-in-flight",
        "crash_max_retries": 10,
        "max_attempts": 3,
        **QUICK,
    }
    with penstock.WorkerPool(1, max_in_flight=3, **options) as pool:
        killer = pool.submit(calls.die_until, str(log), 99)
        others = [pool.submit(calls.echo, n) for n in range(4)]

        with pytest.raises(penstock.WorkerCrashedError, match="crashed 3 workers") as caught:
            killer.result(30)
        assert 3 == caught.value.attempt
        assert [0, 1, 2, 3] == [future.result(30) for future in others]
    assert ["1", "2", "3"] == lines(log)


def test_fail_task_fails_everything_and_halts_until_restarted():
    with penstock.WorkerPool(1, crash_policy="fail-task", max_queue_depth=5) as pool:
        dying = pool.submit(calls.die)
        behind = [pool.submit(calls.echo, n) for n in range(3)]

        for future in (dying, *behind):
            with pytest.raises(penstock.WorkerCrashedError):
                future.result(30)
        until(lambda: pool.snapshot().workers == {"halted": 1})
        with pytest.raises(penstock.WorkerCrashedError, match=r"restart\(\)"):
            pool.submit(calls.echo, 1)

        pool.restart()
        assert 1 == pool.submit(calls.echo, 1).result(30)


def test_a_pool_that_crashes_too_often_in_a_row_halts_and_says_why():
    with penstock.WorkerPool(1, crash_max_retries=2, initializer=calls.bad_initializer, **QUICK) as pool:
        future = pool.submit(calls.echo, 1)

        with pytest.raises(penstock.WorkerCrashedError, match="RuntimeError: no weights") as caught:
            future.result(30)
        assert "bad_initializer" in "".join(caught.value.__notes__)
        assert 3 == pool.snapshot().totals["crashed"]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_each_refusal_of_a_halted_pool_is_an_error_of_its_own(kind):
    options = {"crash_policy": "fail-task", "initializer": calls.fail, "initargs": ("no luck",)}
    with penstock.WorkerPool(1, kind=kind, **options) as pool:
        pool.submit(calls.pid).exception(30)
        until(lambda: pool.internals.call_queue.dead)
        refusals = []
        for _ in range(3):
            with pytest.raises(penstock.WorkerCrashedError, match="no luck") as refused:
                pool.submit(calls.pid)
            refusals.append(refused.value)

    assert 3 == len({id(refusal) for refusal in refusals})
    assert 1 == len({len(traceback.extract_tb(refusal.__traceback__)) for refusal in refusals})
    assert refusals[0].data == refusals[2].data
    assert isinstance(refusals[2].__cause__, ValueError) if kind == "thread" else refusals[2].__notes__


@pytest.mark.parametrize("close", ["shutdown", "dispose"])
def test_each_refusal_of_a_closed_pool_is_an_error_of_its_own(close):
    pool = penstock.WorkerPool(1)
    getattr(pool, close)()
    refusals = []
    for _ in range(2):
        with pytest.raises(penstock.PoolClosedError) as refused:
            pool.submit(calls.pid)
        refusals.append(refused.value)

    assert refusals[0] is not refusals[1]


def test_threads_whose_initializer_raises_fail_their_calls_until_the_pool_is_restarted(tmp_path):
    weights = tmp_path / "weights"

    with penstock.WorkerPool(2, kind="thread", initializer=lambda: weights.read_text("utf-8")) as pool:
        with pytest.raises(penstock.WorkerCrashedError, match="FileNotFoundError") as caught:
            pool.submit(calls.echo, 1).result(30)
        with pytest.raises(penstock.WorkerCrashedError, match="halted"):
            pool.submit(calls.echo, 1)
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert {"halted": 2} == pool.snapshot().workers

        weights.touch()
        pool.restart()

        assert 1 == pool.submit(calls.echo, 1).result(30)


def test_a_success_forgives_the_crashes_before_it():
    with penstock.WorkerPool(1, crash_max_retries=1, **QUICK) as pool:
        for _ in range(4):
            with pytest.raises(penstock.WorkerCrashedError):
                pool.submit(calls.die).result(30)
            assert 1 == pool.submit(calls.echo, 1).result(30)


def test_stopped_workers_give_back_what_they_ran_and_go_on_when_started(tmp_path, gate):
    log = tmp_path / "log"
    with penstock.WorkerPool(1) as pool:
        future = pool.submit(calls.mark_and_wait, str(log), "x", str(gate))
        until(lambda: lines(log) == ["x"])
        pool.stop_workers()
        until(lambda: not children() and pool.state.pending == 1)

        assert (0, {"stopped": 1}) == (pool.state.in_flight, pool.snapshot().workers)
        gate.touch()
        pool.start_workers()
        assert "x" == future.result(30)
        assert 0 == pool.snapshot().totals["crashed"]


def test_workers_are_recycled_after_so_many_calls():
    with penstock.WorkerPool(1, recycle_after_calls=3) as pool:
        pids = [pool.submit(calls.pid).result(30) for _ in range(9)]

    assert [3, 3, 3] == [pids.count(pid) for pid in dict.fromkeys(pids)]


def test_workers_that_have_grown_too_large_are_recycled():
    with penstock.WorkerPool(1, recycle_above_rss=150_000_000) as pool:
        first = pool.submit(calls.grow, 1).result(30)
        time.sleep(0.06)  # its memory is looked at so often at most
        assert first == pool.submit(calls.grow, 200).result(30)
        until(lambda: pool.submit(calls.pid).result(30) != first)


def test_idle_workers_stop_and_start_again_when_needed():
    with penstock.WorkerPool(2, idle_stop=0.02) as pool:
        assert 1 == pool.submit(calls.echo, 1).result(30)
        until(lambda: not children())

        assert {"stopped": 2} == pool.snapshot().workers
        assert 2 == pool.submit(calls.echo, 2).result(30)


def test_nothing_starts_after_close(gate):
    pool = penstock.WorkerPool(1)
    running = pool.submit(calls.wait_for, str(gate))
    pending = pool.submit(calls.echo, 1)
    pool.dispose()

    for future in (running, pending):
        with pytest.raises(penstock.PoolClosedError):
            future.result(0)
    with pytest.raises(penstock.PoolClosedError):
        pool.submit(calls.echo, 1)
    assert not children()
    with pytest.raises(penstock.PoolClosedError):
        pool.start_workers()


# Kills at random instants


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.parametrize("part", range(SOAK))
@pytest.mark.parametrize("policy", ["restart-requeue-in-flight", "restart-fail-in-flight"])
def test_workers_killed_at_random_instants_lose_no_call_and_settle_none_twice(policy, part):
    kills = 100
    random.seed(7 + part)
    settled: list[int] = []
    lock = threading.Lock()
    before = descriptors()
    options = {"crash_policy": policy, "crash_max_retries": 10**6, "max_attempts": 10**6, **QUICK}
    with penstock.WorkerPool(2, max_in_flight=8, max_queue_depth=16, **options) as pool:
        stop = threading.Event()
        futures: list[penstock.Call[int]] = []

        def note(number):
            def done(_):
                with lock:
                    settled.append(number)

            return done

        def feed():
            while not stop.is_set():
                future = pool.submit(calls.slow_echo, len(futures))
                future.add_done_callback(note(len(futures)))
                futures.append(future)

        feeder = threading.Thread(target=feed)
        feeder.start()
        killed = 0
        while killed < kills:
            if (
                random.random() < 0.9
            ):  # else it may be hit before it was any use, and the next one starts later
                seen = len(settled)
                until(lambda seen=seen: len(settled) > seen)
            time.sleep(random.uniform(0, 0.01))
            victims = children()
            if victims:
                try:
                    os.kill(random.choice(victims), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    continue
        stop.set()
        feeder.join(60)
        outcomes = [future.exception(60) for future in futures]
        crashed = [n for n, error in enumerate(outcomes) if error is not None]

        assert 0 < len(futures)
        assert all(isinstance(outcomes[n], penstock.WorkerCrashedError) for n in crashed)
        assert all(future.result() == n for n, future in enumerate(futures) if outcomes[n] is None)
        assert not crashed or policy == "restart-fail-in-flight"
        assert "alive" == pool.submit(calls.echo, "alive").result(60)
        until(lambda: pool.state.idle)
        until(lambda: sorted(settled) == list(range(len(futures))))
    assert not children()
    assert descriptors() <= before + 1


# The parent dies


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = {[str(Path(__file__).parent)]!r}
        import calls, penstock

        if __name__ == "__main__":
            pool = penstock.WorkerPool(2, start="eager")
            pool.submit(calls.spawn_child_and_wait, {str(tmp_path / "child")!r})
            pids = {{w.pid for w in pool.internals.group.workers}}
            while None in pids:
                time.sleep(0.01)
                pids = {{w.pid for w in pool.internals.group.workers}}
            while not __import__("os").path.exists({str(tmp_path / "child")!r}):
                time.sleep(0.01)
            print(*pids, flush=True)
            time.sleep(60)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    until(lambda: (tmp_path / "child").read_text())
    child = int((tmp_path / "child").read_text())
    assert 2 == len([pid for pid in workers if alive(pid)])

    parent.kill()
    parent.wait()
    parent.stdout.close()

    until(lambda: not any(alive(pid) for pid in (*workers, child)), 30)


def test_a_forked_child_cannot_use_its_parents_pool_and_does_not_hurt_it():
    with penstock.WorkerPool(1) as pool:
        assert 1 == pool.submit(calls.echo, 1).result(30)
        pid = os.fork()
        if pid == 0:
            try:
                pool.submit(calls.echo, 2)
            except penstock.PenstockError:
                os._exit(42)
            os._exit(1)

        assert 42 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert 3 == pool.submit(calls.echo, 3).result(30)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_function_that_forks_and_returns_in_the_copy_takes_no_calls_there(kind, tmp_path):
    copies, log = tmp_path / "copy", tmp_path / "log"
    with penstock.WorkerPool(1, kind=kind, max_in_flight=8, max_queue_depth=200) as pool:
        assert "original" == pool.submit(calls.fork, str(copies)).result(60)
        copy = int(copies.read_text())
        for number in range(100):
            pool.submit(calls.mark, str(log), number)
        if kind == "thread":
            os.waitpid(copy, 0)
        else:
            until(lambda: not alive(copy))

    assert [str(number) for number in range(100)] == lines(log)


@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize(("then", "code"), [("return", 0), ("look", 0), ("raise", 1), ("exit", 3)])
def test_a_copy_exits_as_a_program_that_returned_or_raised(kind, then, code, tmp_path):
    with penstock.WorkerPool(1, kind=kind) as pool:
        assert code == pool.submit(calls.fork_and_wait, str(tmp_path / "copy"), then).result(60)
        assert 1 == pool.submit(calls.echo, 1).result(60)


@pytest.mark.parametrize("policy", ["restart-fail-in-flight", "restart-requeue-in-flight"])
def test_a_worker_killed_after_it_sent_a_large_result_has_crashed_with_its_call(policy, gate, tmp_path):
    log, held, read_on = tmp_path / "log", threading.Event(), threading.Event()

    def block(_):
        held.set()
        read_on.wait(60)

    with penstock.WorkerPool(2, crash_policy=policy, start="eager", **QUICK) as pool:
        pool.submit(calls.wait_for, str(gate)).add_done_callback(block)
        gate.touch()
        try:
            assert held.wait(60)  # from here on no thread reads answers
            lost = pool.submit(calls.large, str(log), 1_000_000)
            until(lambda: lines(log) == ["made"])
            worker = lost.worker
            until(lambda: worker.running == 0)
            os.kill(worker.pid, signal.SIGKILL)
            until(lambda: not alive(worker.pid))
        finally:
            read_on.set()

        if policy == "restart-requeue-in-flight":
            assert 1_000_000 == len(lost.result(60))
            assert 2 == lost.attempt
            assert 1 == lost.crashes
        else:
            with pytest.raises(
                penstock.WorkerCrashedError, match="before the result of this call was read"
            ) as crashed:
                lost.result(60)
            assert crashed.value.started
