"""Code written for the standard executors, run with ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Executor, ThreadPoolExecutor, as_completed, wait
from concurrent.futures._base import FINISHED, PENDING
from pathlib import Path

import calls
import pytest

import penstock
from penstock.pools.future import Call, LazyFuture
from penstock.pools.workers.worker_process import WorkerProcess
from tests.pools.test_pool_calls import full_pool, gate, kind  # noqa: F401  # fixtures
from tests.waiting import until

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))


def test_it_is_an_executor(kind):
    with penstock.WorkerPool(max_workers=2, kind=kind) as pool:
        assert isinstance(pool, Executor)
        assert [0, 1, 4, 9] == list(pool.map(pow, range(4), [2] * 4))


@pytest.mark.parametrize("chunksize", [1, 7, 1000])
def test_map_gives_results_in_order_whatever_the_chunks(chunksize):
    with penstock.WorkerPool(2) as pool:
        assert [n + 1 for n in range(500)] == list(
            pool.map(calls.add, range(500), [1] * 500, chunksize=chunksize)
        )


def test_map_pulls_its_items_as_results_are_taken():
    pulled = []

    def items():
        for n in range(1000):
            pulled.append(n)
            yield n

    with penstock.WorkerPool(1, max_queue_depth=2) as pool:
        results = pool.map(calls.echo, items())
        for n in range(10):
            assert n == next(results)
        assert len(pulled) < 20
        results.close()


def test_a_map_with_much_room_keeps_the_bounds_and_the_order(kind):
    class Highest(penstock.QueueHooks):
        in_flight = pending = 0

        def on_state_change(self, state):
            self.in_flight = max(self.in_flight, state.in_flight)
            self.pending = max(self.pending, state.pending)

    highest = Highest()
    items = [[n] if n % 100 < 30 else n for n in range(2000)]  # some are pickled, some travel as they are
    with penstock.WorkerPool(2, kind=kind, max_in_flight=32, max_queue_depth=64, hooks=highest) as pool:
        assert items == list(pool.map(calls.echo, items))

    assert (32, 64) == (highest.in_flight, highest.pending)


def test_a_map_does_not_keep_a_result_back_for_a_slow_source():
    pulled = []

    def items():
        for n in range(200):
            if n >= 64:
                time.sleep(0.02)
            pulled.append(n)
            yield n

    with penstock.WorkerPool(1, max_in_flight=16, max_queue_depth=48) as pool:
        results = pool.map(calls.echo, items())
        assert list(range(40)) == [next(results) for _ in range(40)]
        assert len(pulled) < 64 + 40 / 4
        results.close()


def test_a_map_with_much_room_raises_what_one_of_its_calls_raised():
    with penstock.WorkerPool(1, max_in_flight=64) as pool:
        results = pool.map(calls.invert, [*range(1, 50), 0, *range(1, 50)])
        until(lambda: pool.state.idle)  # so that it is among those that can be taken together

        assert [1 / n for n in range(1, 50)] == [next(results) for _ in range(1, 50)]
        with pytest.raises(ZeroDivisionError):
            next(results)
        with pytest.raises(StopIteration):
            next(results)


def test_what_a_run_of_calls_finds_no_room_for_is_left_outside(gate):
    """As when another caller took the place after the map had looked."""
    with full_pool(gate) as (pool, _, _):
        some = [Call(pool.internals.call_queue, calls.echo) for _ in range(3)]

        assert 0 == pool.internals.call_queue.enter_run(some)
        assert 1 == pool.state.pending
        gate.touch()


def test_a_map_whose_source_fails_raises_that_and_ends():
    def items():
        yield from range(300)
        raise OSError("no more tape")

    with penstock.WorkerPool(1, max_in_flight=16) as pool, pytest.raises(OSError, match="no more tape"):
        list(pool.map(calls.echo, items()))


def test_a_map_with_much_room_is_refused_by_a_closed_pool():
    pool = penstock.WorkerPool(1, max_in_flight=64)
    pool.shutdown()
    with pytest.raises(penstock.PoolClosedError):
        pool.map(calls.echo, range(10))


def test_a_map_that_nobody_reads_still_runs_to_its_end(tmp_path):
    log = tmp_path / "log"
    with penstock.WorkerPool(1, max_queue_depth=2) as pool:
        pool.map(calls.mark, [str(log)] * 50, range(50))

    assert [str(n) for n in range(50)] == log.read_text().split()


@pytest.mark.parametrize("room", [{"max_queue_depth": 2}, {"max_in_flight": 32}])
def test_the_results_of_a_map_can_be_read_after_the_pool_is_shut_down(room):
    with penstock.WorkerPool(1, **room) as pool:
        results = pool.map(calls.echo, range(200))

    assert list(range(200)) == list(results)


def test_leaving_a_map_early_cancels_the_rest(tmp_path):
    log = tmp_path / "log"
    with penstock.WorkerPool(1, max_queue_depth=2) as pool:
        for _ in pool.map(calls.mark, [str(log)] * 1000, range(1000)):
            break

    assert len(log.read_text().split()) < 20


def test_map_raises_what_the_function_raised_and_times_out(gate):
    with penstock.WorkerPool(1) as pool:
        with pytest.raises(ValueError, match="no"):
            list(pool.map(calls.fail, ["no"]))
        with pytest.raises(TimeoutError):
            list(pool.map(calls.wait_for, [str(gate)], timeout=0.05))
        gate.touch()
        with pytest.raises(ValueError, match="chunksize"):
            pool.map(calls.echo, [1], chunksize=0)


def test_wait_and_as_completed_see_our_futures(kind, gate):
    with full_pool(gate, kind) as (pool, running, pending):
        assert not wait([running], timeout=0.01).done
        gate.touch()
        done = wait([running, pending], timeout=30)
        assert {running, pending} == done.done
        futures = [pool.submit(calls.echo, n) for n in range(30)]
        assert set(range(30)) == {future.result() for future in as_completed(futures, timeout=30)}
        assert wait(futures, return_when=FIRST_COMPLETED).done


def test_callbacks_run_once_even_if_added_late(kind):
    seen = []
    with penstock.WorkerPool(1, kind=kind) as pool:
        future = pool.submit(calls.echo, 1)
        future.add_done_callback(seen.append)
        future.result(30)
        until(lambda: seen == [future])
        future.add_done_callback(seen.append)

    assert [future, future] == seen


def test_the_initializer_runs_in_each_worker_before_its_calls():
    with penstock.WorkerPool(1, initializer=calls.initialize, initargs=("ready",)) as pool:
        assert "ready" == pool.submit(calls.read_initialized).result(30)


def test_what_is_too_much_for_a_pipe_reaches_the_worker_in_parts():
    much = "x" * 3_000_000

    with penstock.WorkerPool(1, initializer=calls.initialize, initargs=(much,)) as pool:
        assert much == pool.submit(calls.read_initialized).result(30)


def test_what_was_too_much_for_a_pipe_before_its_worker_was_there_reaches_it(monkeypatch):
    """In one order and no other: the pipe is full before the process is started, and what did not fit is sent all the same."""
    much, submitted, spawn = "x" * 3_000_000, threading.Event(), WorkerProcess.spawn

    def spawn_late(worker):
        assert submitted.wait(30)
        spawn(worker)

    monkeypatch.setattr(WorkerProcess, "spawn", spawn_late)
    with penstock.WorkerPool(1, initializer=calls.initialize, initargs=(much,)) as pool:
        future = pool.submit(calls.read_initialized)
        submitted.set()
        try:
            assert much == future.result(30)
        finally:
            pool.dispose()


def test_shutdown_runs_what_was_accepted_and_refuses_the_rest(kind, gate):
    with full_pool(gate, kind) as (pool, running, pending):
        pool.shutdown(wait=False)
        with pytest.raises(RuntimeError, match="shut down"):
            pool.submit(calls.echo, 1)
        gate.touch()

        assert ["ran", "pending"] == [running.result(30), pending.result(30)]


def test_shutdown_can_cancel_what_is_pending(kind, gate):
    with full_pool(gate, kind) as (pool, running, pending):
        pool.shutdown(wait=False, cancel_futures=True)
        assert pending.cancelled()
        gate.touch()
        assert "ran" == running.result(30)


def test_shutdown_of_a_paused_pool_runs_what_it_accepted(kind):
    with penstock.WorkerPool(1, kind=kind) as pool:
        pool.pause()
        future = pool.submit(calls.echo, 1)

    assert 1 == future.result(0)


def test_shutdown_twice_is_harmless(kind):
    pool = penstock.WorkerPool(1, kind=kind)
    pool.submit(calls.echo, 1).result(30)
    pool.shutdown()
    pool.shutdown()
    pool.dispose()


def test_a_pool_that_was_never_used_closes_at_once(kind):
    penstock.WorkerPool(2, kind=kind).shutdown()
    penstock.WorkerPool(2, kind=kind).dispose()


def test_a_pool_that_nobody_holds_lets_its_workers_go():
    pool = penstock.WorkerPool(1)
    future = pool.submit(calls.echo, 1)
    del pool

    assert 1 == future.result(30)  # and the fixture sees the process leave


def test_many_threads_can_share_a_pool():
    with penstock.WorkerPool(2, max_queue_depth=1) as pool, ThreadPoolExecutor(8) as threads:
        sums = threads.map(
            lambda base: sum(pool.submit(calls.echo, base + n).result(60) for n in range(50)), range(8)
        )

        assert [50 * base + 1225 for base in range(8)] == list(sums)


async def test_run_in_executor_works_and_cancels():
    loop = asyncio.get_running_loop()
    with penstock.WorkerPool(1) as pool:
        assert 3 == await loop.run_in_executor(pool, calls.add, 3)
        await pool.aclose()


async def test_calls_from_asyncio_are_bounded_and_never_block_the_loop(kind):
    async with penstock.WorkerPool(2, kind=kind, max_queue_depth=2) as pool:
        pool.pause()
        tasks = [asyncio.ensure_future(pool.call(calls.add, n, b=1)) for n in range(50)]
        await asyncio.sleep(0)

        assert (0, 2, 48) == (pool.state.in_flight, pool.state.pending, pool.state.waiting)
        pool.resume()
        assert [n + 1 for n in range(50)] == await asyncio.gather(*tasks)


async def test_an_error_comes_out_of_await(kind):
    async with penstock.WorkerPool(1, kind=kind) as pool:
        with pytest.raises(ValueError, match="no"):
            await pool.call(calls.fail, "no")
        with pytest.raises(penstock.CallTimeout):
            await pool.task(calls.sleep, timeout=0.01).call(1)


async def test_reserve_works_from_asyncio():
    async with penstock.WorkerPool(1, max_queue_depth=0) as pool:
        async with pool.reserve() as place:
            assert [1] == await place.call(calls.echo, [1])
        with pytest.raises(RuntimeError, match="async with"), pool.reserve():
            pass


def test_several_loops_in_several_threads_share_a_pool():
    with penstock.WorkerPool(2) as pool, ThreadPoolExecutor(4) as threads:

        async def some(base):
            return sum([await pool.call(calls.echo, base + n) for n in range(25)])

        assert [25 * b + 300 for b in range(4)] == list(threads.map(lambda b: asyncio.run(some(b)), range(4)))


async def test_a_loop_that_blocks_does_not_stop_the_pool():
    """The loop reads the workers' answers itself; while it is stuck, another thread must."""
    done = threading.Event()
    async with penstock.WorkerPool(1, max_queue_depth=50) as pool:
        first = asyncio.ensure_future(pool.call(calls.echo, 0))
        await asyncio.sleep(0)
        others = [pool.submit(calls.echo, n) for n in range(20)]
        others[-1].add_done_callback(lambda _: done.set())

        assert done.wait(20)  # blocks this loop
        assert 0 == await first


def test_functions_of_a_script_work_as_with_the_standard_pool(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import penstock

        class Point:
            def __init__(self, x): self.x = x

        def double(point): return Point(2 * point.x)

        if __name__ == "__main__":
            with penstock.WorkerPool(2) as pool:
                print([p.x for p in pool.map(double, [Point(n) for n in range(4)])])
        """)
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )

    assert "[0, 2, 4, 6]\n" == run.stdout, run.stderr


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import penstock\ndef f(): return 1\n"
        "pool = penstock.WorkerPool(1, restart_delay=0.001)\nprint(pool.submit(f).result())\npool.shutdown()\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )

    assert 0 != run.returncode
    assert 'if __name__ == "__main__":' in run.stderr


def test_functions_typed_at_a_prompt_travel_by_value():
    code = "import penstock\ndef f(x): return x + 1\nwith penstock.WorkerPool(1) as p: print(p.submit(f, 1).result())"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert "2\n" == run.stdout, run.stderr


def test_a_program_that_ends_without_shutdown_runs_what_it_submitted(tmp_path):
    code = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import calls, penstock
        pool = penstock.WorkerPool(1)
        for n in range(20): pool.submit(calls.mark, {str(tmp_path / "log")!r}, n)
        """)
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)

    assert 20 == len((tmp_path / "log").read_text().split())


def test_ctrl_c_in_result_leaves_a_working_pool(gate):
    import signal

    with full_pool(gate) as (pool, running, _):
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            running.result(30)

        time.sleep(0)
        gate.touch()
        assert "ran" == running.result(30)


class _NoPool:
    """In place of the call queue, for calls without a pool: no thread reads replies."""

    class group:
        @staticmethod
        def read_while_waiting(call, timeout=None):
            return False


class _Waiter:
    """What `as_completed` leaves with a future, under its lock."""

    def __init__(self):
        self.notified = 0

    def add_result(self, future):
        self.notified += 1


def _someone_comes_when_it_is_done(make):
    """A future of this kind; as soon as its state is written, a thread reads it and then waits for the others."""

    class Watched(make):
        @property
        def _state(self):
            return self.__dict__.get("state", PENDING)

        @_state.setter
        def _state(self, state):
            self.__dict__["state"] = state
            if state is FINISHED:
                with self._condition:
                    self._waiters.append(waiter)

    waiter = _Waiter()
    return Watched, waiter


@pytest.mark.parametrize(("kind_of_future", "args"), [(Call, (_NoPool, abs)), (LazyFuture, ())])
def test_who_sees_that_a_future_is_done_is_not_told_again(kind_of_future, args):
    """The standard library counts what it is told: told twice, `wait` comes back early and `as_completed` breaks."""
    watched, waiter = _someone_comes_when_it_is_done(kind_of_future)

    watched(*args).set_outcome(1, None)

    assert 0 == waiter.notified


def test_who_asks_for_the_lock_while_it_is_settled_gets_it_after():
    """A thread that comes between the look for a lock and the writing of the state would never be notified."""
    came, seen = threading.Event(), []

    class Slow(Call):
        @property
        def _state(self):
            return self.__dict__.get("state", PENDING)

        @_state.setter
        def _state(self, state):
            if state is FINISHED:
                asker.start()
                came.wait(0.05)  # without the rule, it comes in now
            self.__dict__["state"] = state

    def ask():
        with call._condition:  # noqa: SLF001  # as `concurrent.futures.wait` does
            seen.append(call._state)  # noqa: SLF001  # as above
            came.set()

    asker = threading.Thread(target=ask)
    call = Slow(_NoPool, abs)

    call.set_outcome(1, None)

    asker.join()
    assert [FINISHED] == seen


@pytest.mark.parametrize(("kind_of_future", "args"), [(Call, (_NoPool, abs)), (LazyFuture, ())])
def test_who_comes_while_futures_are_settled_misses_none(kind_of_future, args):
    def settle_all(futures):
        for future in futures:
            future.set_outcome(1, None)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(100 * SOAK):
            futures = [kind_of_future(*args) for _ in range(30)]
            settler = threading.Thread(target=settle_all, args=(futures,))
            settler.start()
            if turn % 2:
                assert 30 == len(list(as_completed(futures, timeout=20)))
            else:
                assert not wait(futures, timeout=20).not_done
            settler.join()
    finally:
        sys.setswitchinterval(switch)
