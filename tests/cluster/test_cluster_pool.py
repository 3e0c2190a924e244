"""A pool on a cluster is a pool: bounds, results, errors, cancels, timeouts, as with every other kind of worker."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import calls
import pytest

import penstock
from penstock.cluster.actor import ActorLink
from tests.cluster.conftest import actors
from tests.pools.test_pool_ending import alive, lines
from tests.waiting import until


def test_calls_run_in_workers_of_the_cluster(make_pool, gate):
    with make_pool(2) as pool:
        first = pool.submit(calls.mark_and_wait, str(gate) + ".log", 1, str(gate))
        second = pool.submit(calls.mark_and_wait, str(gate) + ".log", 2, str(gate))
        until(lambda: pool.snapshot().load_by_worker == (1, 1))
        until(lambda: len(actors()) == 2)
        pids = {actor["Pid"] for actor in actors()}
        gate.touch()

        assert (1, 2) == (first.result(60), second.result(60))
        assert pool.submit(calls.pid).result(60) in pids
        assert "cluster" == pool.snapshot().kind
        assert {"running": 2} == pool.snapshot().workers


def test_no_more_is_in_flight_than_the_bounds_allow(make_pool, gate):
    with make_pool(1, max_in_flight=2, max_queue_depth=1, policy="reject") as pool:
        held = [pool.submit(calls.wait_for, str(gate), n) for n in range(3)]
        until(lambda: pool.snapshot().load_by_worker == (1,))

        with pytest.raises(penstock.QueueDropError):
            pool.submit(calls.echo, 3)
        assert (2, 1) == (pool.state.in_flight, pool.state.pending)

        gate.touch()
        assert [0, 1, 2] == [future.result(60) for future in held]


def test_submit_waits_for_room(make_pool, gate):
    with make_pool(1, max_queue_depth=0) as pool, ThreadPoolExecutor(1) as caller:
        held = pool.submit(calls.wait_for, str(gate), "held")
        waiter = caller.submit(pool.submit, calls.echo, "waited")
        until(lambda: pool.state.waiting == 1)
        gate.touch()

        assert "held" == held.result(60)
        assert "waited" == waiter.result(60).result(60)


def test_what_waits_goes_to_whoever_is_free(make_pool, gate):
    with make_pool(2, max_in_flight=8) as pool:
        held = pool.submit(calls.wait_for, str(gate), "held")
        others = [pool.submit(calls.echo, n) for n in range(7)]

        assert list(range(7)) == [future.result(60) for future in others]
        assert not held.done()
        gate.touch()


def test_an_exception_comes_back_with_the_workers_traceback(make_pool):
    with make_pool(1) as pool:
        with pytest.raises(ValueError, match="no such thing") as caught:
            pool.submit(calls.fail, "no such thing").result(60)
        assert "in fail" in str(caught.value.__cause__)

        with pytest.raises(penstock.RemoteError, match="Awkward: 1 and 2"):
            pool.submit(calls.raise_awkward).result(60)
        with pytest.raises(SystemExit):
            pool.submit(calls.leave_program).result(60)
        assert 1 == pool.snapshot().totals["spawned"]


def test_a_result_that_ray_cannot_bring_fails_its_call_and_leaves_the_worker(make_pool, monkeypatch):
    import ray

    @ray.remote(num_cpus=0)
    def no_room():
        raise OSError("no room for the result")

    with make_pool(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(
                ActorLink, "call", lambda self, message, answer: self._when(no_room.remote(), answer)
            )
            with pytest.raises(penstock.RemoteError, match="no room for the result"):
                pool.submit(calls.echo, 1).result(60)

        assert 3 == pool.submit(calls.add, 1, 2).result(60)
        assert {"spawned": 1, "crashed": 0, "failed": 1}.items() <= pool.snapshot().totals.items()


def test_an_error_that_cannot_be_described_fails_its_call_alone(make_pool):
    with make_pool(1) as pool:
        with pytest.raises(calls.Unspeakable):
            pool.submit(calls.raise_unspeakable).result(60)
        assert 1 == pool.submit(calls.echo, 1).result(60)


def test_what_cannot_be_pickled_fails_its_own_call_and_no_other(make_pool):
    with make_pool(1) as pool:
        with pytest.raises(penstock.NotPicklable, match="argument 1"):
            pool.submit(calls.echo, threading.Lock())
        with pytest.raises(penstock.NotPicklable, match="lock"):
            pool.submit(calls.make_lock).result(60)

        assert 7 == pool.submit(calls.echo, 7).result(60)
        assert 0 == pool.state.in_flight


def test_functions_without_a_module_travel_by_value(make_pool):
    base = 40
    with make_pool(1) as pool:
        assert 42 == pool.submit(lambda n: base + n, 2).result(60)


@pytest.mark.parametrize("size", [3, 300_000])
def test_arrays_arrive_whole_and_may_be_written_to(make_pool, size):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(float(size))
    with make_pool(1) as pool:
        doubled = pool.submit(double_in_place, array).result(60)
        doubled += 1  # ours, like any other result

    assert (2 * numpy.arange(float(size)) + 1 == doubled).all()
    assert (numpy.arange(float(size)) == array).all()


def test_long_bytes_and_long_lists_arrive_whole(make_pool):
    with make_pool(1) as pool:
        assert ("bytes", 500_000) == pool.submit(calls.type_and_length, bytes(500_000)).result(60)
        assert ("list", 100_000) == pool.submit(calls.type_and_length, list(range(100_000))).result(60)
        assert b"x" * 500_000 == pool.submit(calls.make_bytes, 500_000).result(60)


def test_a_function_knows_its_call(make_pool):
    with make_pool(1) as pool:
        task = pool.task(calls.about, key_of=lambda: ("a", 1), timeout=60)

        assert (True, ("a", 1), 1, True) == task()
        assert 50 < pool.task(time_left, timeout=60)() <= 60


def test_a_call_cancelled_before_it_begins_never_runs(make_pool, gate, tmp_path):
    with make_pool(1, max_in_flight=2, max_queue_depth=2) as pool, ThreadPoolExecutor(1) as caller:
        running = pool.submit(calls.wait_for, str(gate), "ran")
        handed_out, pending, other = (pool.submit(calls.mark, str(tmp_path / "log"), n) for n in range(3))
        waiter = caller.submit(pool.submit, calls.mark, str(tmp_path / "log"), 3)
        until(lambda: pool.state.waiting == 1)

        assert handed_out.cancel()
        assert pending.cancel()
        waiting = waiter.result(60)
        gate.touch()

        assert "ran" == running.result(60)
        assert (2, 3) == (other.result(60), waiting.result(60))
    assert ["2", "3"] == lines(tmp_path / "log")
    assert (3,) == pool.snapshot().settled_by_worker  # nor was a worker troubled with the others
    assert 1 == pool.snapshot().totals["spawned"]


def test_a_running_call_sees_its_cancel_and_keeps_its_worker(make_pool, tmp_path):
    log = tmp_path / "log"
    with make_pool(1) as pool:
        future = pool.submit(calls.until_cancelled, str(log))
        until(lambda: lines(log) == ["began"], 60)

        assert future.cancel("enough")
        with pytest.raises(penstock.CallCanceled, match="enough") as caught:
            future.result(0)
        assert "in-flight" == caught.value.phase
        until(lambda: lines(log) == ["began", "saw it"])
        until(lambda: pool.state.in_flight == 0)
        assert {"spawned": 1, "terminated": 0}.items() <= pool.snapshot().totals.items()


def test_a_call_that_does_not_stop_in_time_loses_its_worker_and_no_other_call(make_pool, tmp_path, gate):
    log = tmp_path / "log"
    with make_pool(2, max_in_flight=3, grace=0.1) as pool:
        other = pool.submit(calls.wait_for, str(gate), "untouched")
        stubborn = pool.submit(calls.mark_and_wait, str(log), os.getpid(), "never")
        until(lambda: lines(log), 60)
        behind = pool.submit(calls.echo, "next")

        assert stubborn.cancel()
        assert "next" == behind.result(60)
        gate.touch()
        assert "untouched" == other.result(60)
        assert {"terminated": 1, "crashed": 0, "requeued": 0}.items() <= pool.snapshot().totals.items()


def test_a_call_that_runs_too_long_times_out(make_pool, gate):
    with make_pool(1, timeout=0.2, grace=0.1) as pool:
        with pytest.raises(penstock.CallTimeout) as caught:
            pool.submit(calls.wait_for, str(gate)).result(60)
        assert 0.2 == caught.value.timeout


def test_a_singleton_keeps_its_object_on_the_cluster(machines):
    with penstock.SingletonWorker(calls.Counter, 5, kind="cluster", restart_delay=0.001) as counter:
        assert 6 == counter.add()
        assert 8 == counter.add(2)
        with pytest.raises(penstock.WorkerCrashedError):
            counter.die.submit().result(60)
        assert 6 == counter.add()


async def test_a_coroutine_can_await_a_call(make_pool):
    async with make_pool(1) as pool:
        assert 3 == await pool.call(calls.add, 1, b=2)


def test_closing_leaves_no_actor_and_no_process(make_pool):
    pool = make_pool(2, start="eager")
    until(lambda: len([a for a in actors() if a["State"] == "ALIVE"]) == 2, 60)
    pids = [actor["Pid"] for actor in actors()]
    assert 1 == pool.submit(calls.echo, 1).result(60)

    pool.shutdown()

    assert [] == actors()
    until(lambda: not any(map(alive, pids)))


def test_dispose_ends_what_runs(make_pool, gate):
    pool = make_pool(1, max_queue_depth=4)
    futures = [pool.submit(calls.wait_for, str(gate)) for _ in range(3)]
    until(lambda: pool.snapshot().load_by_worker == (1,))

    pool.dispose(timeout=30)

    for future in futures:
        with pytest.raises(penstock.PoolClosedError):
            future.result(0)
    assert [] == actors()


def test_more_workers_than_the_cluster_holds_hold_nobody_up(machines):
    terms = penstock.Cluster(cpus=3)
    with penstock.WorkerPool(4, kind="cluster", cluster=terms) as pool:
        futures = [pool.submit(calls.echo, n) for n in range(8)]

        assert list(range(8)) == [future.result(60) for future in futures]
        assert (8, 0) == tuple(sorted(pool.snapshot().settled_by_worker))[-1:-3:-1]


def test_a_pool_has_as_many_workers_as_the_cluster_could_hold(machines):
    with penstock.WorkerPool(kind="cluster", cluster=penstock.Cluster(cpus=2)) as pool:
        assert 2 == len(pool.snapshot().load_by_worker)


def double_in_place(array):
    array *= 2
    return array


def time_left():
    return penstock.current_call().remaining
