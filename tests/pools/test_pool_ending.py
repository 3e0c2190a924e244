"""Ending calls: by key, by timeout, by signal, by Future, by asyncio; and what that does to workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import calls
import pytest

import penstock
from penstock.pools.workers.worker_process import WorkerProcess
from tests import SOURCES
from tests.pools.test_pool_calls import full_pool, gate, kind  # noqa: F401  # fixtures
from tests.waiting import alive, until


def lines(path):
    return path.read_text().split("\n")[:-1] if path.exists() else []


# Three phases


def test_a_call_cancelled_while_it_waits_is_removed_and_its_caller_told(kind, gate):
    with full_pool(gate, kind) as (pool, *_), ThreadPoolExecutor(2) as callers:
        by_key = pool.task(calls.echo, key_of=lambda value: value)
        first = callers.submit(by_key.submit, "first")
        until(lambda: pool.state.waiting == 1)
        second = callers.submit(by_key.submit, "second")
        until(lambda: pool.state.waiting == 2)

        assert 1 == pool.cancel("first", "changed my mind")
        with pytest.raises(penstock.CallCanceled, match="changed my mind") as caught:
            first.result(30)
        assert "waiting" == caught.value.phase
        assert 1 == pool.state.waiting

        gate.touch()
        assert "second" == second.result(30).result(30)


def test_a_call_cancelled_in_the_queue_gives_its_place_to_the_next_waiter(kind, gate, tmp_path):
    with full_pool(gate, kind) as (pool, running, pending), ThreadPoolExecutor(1) as caller:
        third = caller.submit(pool.submit, calls.echo, "third")
        until(lambda: pool.state.waiting == 1)

        assert pending.cancel()
        assert not third.result(30).done()
        assert (1, 0) == (pool.state.pending, pool.state.waiting)

        with pytest.raises(penstock.CallCanceled) as caught:
            pending.result(0)
        assert "queued" == caught.value.phase
        assert pending.cancelled()
        gate.touch()
        assert "ran" == running.result(30)


def test_a_running_call_sees_its_cancel_and_keeps_its_worker(kind, tmp_path):
    path = tmp_path / "log"
    with penstock.WorkerPool(1, kind=kind) as pool:
        before = pool.submit(calls.pid).result(30)
        call = pool.submit(calls.until_cancelled, str(path))
        until(lambda: lines(path) == ["began"])

        assert call.cancel("enough")
        with pytest.raises(penstock.CallCanceled, match="enough") as caught:
            call.result(0)
        assert "in-flight" == caught.value.phase
        until(lambda: lines(path) == ["began", "saw it"])
        assert before == pool.submit(calls.pid).result(30)
        assert 0 == pool.snapshot().totals["terminated"]


def test_the_caller_of_a_cancelled_call_is_released_at_once_but_the_slot_is_held(tmp_path, gate):
    with penstock.WorkerPool(1, max_queue_depth=1) as pool:
        running = pool.submit(calls.mark_and_wait, str(tmp_path / "log"), 1, str(gate))
        until((tmp_path / "log").exists)
        running.cancel()
        after = pool.submit(calls.echo, "after")

        assert running.done()
        assert (1, 1) == (pool.state.in_flight, pool.state.pending)
        gate.touch()
        assert "after" == after.result(30)


def test_a_function_can_leave_by_check(tmp_path):
    path = tmp_path / "log"
    with penstock.WorkerPool(1) as pool:
        call = pool.submit(calls.until_check_raises, str(path))
        until(lambda: lines(path) == ["began"])
        call.cancel()

        assert 1 == pool.submit(calls.echo, 1).result(30)


def test_a_call_that_does_not_stop_in_time_loses_its_worker_and_its_neighbours_are_requeued(tmp_path):
    path = tmp_path / "log"
    with penstock.WorkerPool(1, max_in_flight=4, grace=0.05) as pool:
        stubborn = pool.submit(calls.stubborn, str(path))
        neighbours = [pool.submit(calls.echo, n) for n in range(3)]
        until(lambda: lines(path) == ["began"])
        stubborn.cancel()

        assert [0, 1, 2] == [future.result(30) for future in neighbours]
        totals = pool.snapshot().totals
        assert (1, 0, 3) == (totals["terminated"], totals["crashed"], totals["requeued"])


def test_a_cancelled_call_that_has_not_begun_does_not_cost_its_neighbour_the_worker(tmp_path, gate):
    with penstock.WorkerPool(1, max_in_flight=2, grace=0.01) as pool:
        running = pool.submit(calls.mark_and_wait, str(tmp_path / "log"), "ran", str(gate))
        in_pipe = pool.submit(calls.mark, str(tmp_path / "never"), 1)
        until((tmp_path / "log").exists)
        in_pipe.cancel()
        threading.Event().wait(0.1)  # several graces
        gate.touch()

        assert "ran" == running.result(30)
        assert 1 == pool.submit(calls.echo, 1).result(30)
        assert not (tmp_path / "never").exists()
        assert 0 == pool.snapshot().totals["terminated"]


def test_ending_a_worker_ends_what_its_function_started(tmp_path):
    path = tmp_path / "child"
    with penstock.WorkerPool(1, grace=0.05) as pool:
        call = pool.submit(calls.spawn_child_and_wait, str(path))
        until(lambda: path.exists() and path.read_text())
        call.cancel()
        until(lambda: not alive(int(path.read_text())))


# Keys


def test_a_cancelled_key_stays_cancelled_until_cleared(kind):
    with penstock.WorkerPool(1, kind=kind, key_of=lambda value: value) as pool:
        pool.cancel("a")
        with pytest.raises(penstock.CallCanceled, match="until cleared"):
            pool.submit(calls.echo, "a")

        assert "b" == pool.submit(calls.echo, "b").result(30)
        assert pool.clear("a")
        assert not pool.clear("a")
        assert "a" == pool.submit(calls.echo, "a").result(30)


def test_a_key_ends_its_calls_in_every_phase_at_once(kind, tmp_path):
    log = tmp_path / "log"
    with penstock.WorkerPool(1, kind=kind, max_queue_depth=1) as pool, ThreadPoolExecutor(1) as caller:
        mine = pool.task(calls.until_cancelled, key_of=lambda path: "mine")
        running, queued = mine.submit(str(log)), mine.submit(str(log))
        waiting = caller.submit(mine.submit, str(log))
        until(lambda: pool.state.waiting == 1 and log.exists())

        assert 3 == pool.cancel("mine")
        phases = []
        for call in (running, queued, waiting):
            with pytest.raises(penstock.CallCanceled) as caught:
                call.result(30)
            phases.append(str(caught.value.phase))
        assert ["in-flight", "queued", "waiting"] == phases


def test_a_key_of_a_wrong_type_is_refused_by_name():
    with penstock.WorkerPool(1) as pool:
        with pytest.raises(TypeError, match=r"key is \['a'\]; it must be hashable"):
            pool.task(calls.echo, key_of=lambda value: [value]).submit("a")
        assert pool.state.idle


# Timeouts and signals


def test_a_timeout_runs_from_the_call_and_says_in_which_phase_it_struck(kind, gate):
    with full_pool(gate, kind) as (pool, running, _), ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(pool.task(calls.echo, timeout=0.05).submit, 1)

        with pytest.raises(penstock.CallTimeout, match="0.05 s") as caught:
            waiting.result(30)
        assert "waiting" == caught.value.phase
        assert isinstance(caught.value, TimeoutError)
        gate.touch()
        assert "ran" == running.result(30)


def test_a_call_that_runs_too_long_times_out_and_its_worker_is_replaced(tmp_path):
    with penstock.WorkerPool(1, timeout=60, grace=0.05) as pool:
        assert 0 == pool.submit(calls.echo, 0).result(30)  # its worker is up
        pool.internals.timeout = 0.5
        with pytest.raises(penstock.CallTimeout) as caught:
            pool.submit(calls.stubborn, str(tmp_path / "log")).result(30)
        assert "in-flight" == caught.value.phase
        pool.internals.timeout = None
        assert 1 == pool.submit(calls.echo, 1).result(30)
        assert 1 == pool.snapshot().totals["timed_out"]


def test_a_timeout_of_zero_ends_the_call_at_once():
    with penstock.WorkerPool(1) as pool:
        with pytest.raises(penstock.CallTimeout):
            pool.task(calls.sleep, timeout=0).submit(0.2).result(30)


def test_one_signal_ends_many_calls_and_every_later_one(kind, gate):
    stop = penstock.CancelSignal()
    with full_pool(gate, kind) as (pool, running, pending):
        pending.cancel()
        mine = pool.task(calls.echo, signal=stop).submit(1)
        stop.cancel("user left")

        with pytest.raises(penstock.CallCanceled, match="user left"):
            mine.result(30)
        with pytest.raises(penstock.CallCanceled, match="signal"):
            pool.task(calls.echo, signal=stop).submit(2)
        gate.touch()
        assert "ran" == running.result(30)
        assert not stop._calls  # noqa: SLF001  # a leak cannot be seen from outside


def test_keys_timeouts_and_signals_combine(gate):
    stop = penstock.CancelSignal()
    with full_pool(gate) as (pool, *_):
        for end in ("key", "timeout", "signal", "future"):
            task = pool.task(
                calls.echo, key_of=lambda v: v, timeout=0.05 if end == "timeout" else 60, signal=stop
            )
            pool.internals.call_queue.queue.max_queue_depth += 1
            call = task.submit(end)
            match end:
                case "key":
                    pool.cancel("key")
                case "signal":
                    stop.cancel()
                case "future":
                    call.cancel()
            with pytest.raises(penstock.CallTimeout if end == "timeout" else penstock.CallCanceled):
                call.result(30)
            stop = penstock.CancelSignal()
        assert 0 == len(pool.internals.call_queue.keys)
        gate.touch()


# Futures


def test_a_cancelled_call_is_a_cancelled_future_for_the_standard_library(gate):
    with full_pool(gate) as (pool, running, pending):
        pending.cancel()

        assert pending.cancelled()
        assert pending.done()
        with pytest.raises(CancelledError):
            pending.result(0)
        with pytest.raises(CancelledError):
            pending.exception(0)
        gate.touch()
        running.result(30)
        assert not running.cancel()


# Asyncio


async def test_cancelling_the_task_that_awaits_a_call_cancels_the_call(tmp_path):
    log = tmp_path / "log"
    async with penstock.WorkerPool(1) as pool:
        task = asyncio.ensure_future(pool.call(calls.until_cancelled, str(log)))
        while not log.exists():
            await asyncio.sleep(0.001)
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        while lines(log) != ["began", "saw it"]:
            await asyncio.sleep(0.001)


async def test_cancelling_a_waiting_coroutine_removes_the_waiter(gate):
    with full_pool(gate) as (pool, *_):
        task = asyncio.ensure_future(pool.call(calls.echo, [1]))
        await asyncio.sleep(0)
        assert 1 == pool.state.waiting

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 0 == pool.state.waiting
        gate.touch()
        await pool.aclose()


def test_ctrl_c_while_one_worker_gets_its_calls_keeps_none_from_the_others(monkeypatch):
    flush = WorkerProcess.flush

    def interrupted(worker):
        monkeypatch.setattr(WorkerProcess, "flush", flush)
        flush(worker)
        raise KeyboardInterrupt

    with penstock.WorkerPool(2, max_queue_depth=8, start="eager") as pool:
        list(pool.map(abs, range(20)))
        monkeypatch.setattr(WorkerProcess, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pool.map(abs, range(20)))

        until(lambda: (pool.state.in_flight, pool.state.pending) == (0, 0))


def test_ctrl_c_while_waiting_for_room_leaves_no_waiter(gate):
    with full_pool(gate) as (pool, *_):
        main = threading.main_thread().ident

        def interrupt():
            until(lambda: pool.state.waiting == 1)
            signal.pthread_kill(main, signal.SIGINT)

        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            pool.submit(calls.echo, [1])
        helper.join()

        assert 0 == pool.state.waiting
        gate.touch()


SYNC = """
    with penstock.WorkerPool(1, kind=sys.argv[1]) as pool:
        future = pool.submit(calls.mark_and_wait, *sys.argv[2:])
        {last}
"""
AT_THE_END = """
    pool = penstock.WorkerPool(1, kind=sys.argv[1])
    pool.submit(calls.mark_and_wait, *sys.argv[2:]).result()
"""
ASYNC = """
    async def main():
        async with penstock.WorkerPool(1, kind=sys.argv[1]) as pool:
            future = pool.submit(calls.mark_and_wait, *sys.argv[2:])
            {last}
    asyncio.run(main())
"""
INTERRUPTED = {
    "in the block": SYNC.format(last="future.result()"),
    "at the end of the block": SYNC.format(last="pass"),
    "without a block": AT_THE_END,
    "in the async block": ASYNC.format(last="await asyncio.wrap_future(future)"),
    "in the async block, in other code": ASYNC.format(last="await asyncio.Event().wait()"),
    "at the end of the async block": ASYNC.format(last="pass"),
}


def until_its_main_thread_sleeps(pid):
    """CPython can miss a signal that comes just before a thread begins to wait for a lock. So look until it is not switched any more."""
    seen = []

    def unchanged():
        seen.append(Path(f"/proc/{pid}/status").read_text().partition("\nvoluntary_ctxt_switches")[2])
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    until(unchanged)


@pytest.mark.parametrize("where", INTERRUPTED)
def test_ctrl_c_does_not_wait_for_the_running_call(kind, where, tmp_path):
    """The call would run for ever, and so would the program if it waited."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        "import asyncio, sys\nimport penstock\nimport calls\n"
        f'if __name__ == "__main__":\n{INTERRUPTED[where]}'
    )
    args = [sys.executable, script, kind, log, "began", tmp_path / "never"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(SOURCES)])}
    with subprocess.Popen(args, env=environment, stderr=subprocess.PIPE, text=True) as program:
        until(lambda: lines(log) == ["began"])
        tasks = Path(f"/proc/{program.pid}/task").glob("*/children")
        workers = [child for task in tasks for child in task.read_text().split()]
        until_its_main_thread_sleeps(program.pid)
        program.send_signal(signal.SIGINT)
        try:
            _, stderr = program.communicate(timeout=60)
        finally:
            program.kill()  # a program that waits for its call would never end

    assert program.returncode == -signal.SIGINT, stderr
    assert stderr.rstrip().endswith("KeyboardInterrupt"), stderr
    assert not any(alive(worker) for worker in workers)


async def test_a_task_that_is_canceled_in_a_pools_block_ends_its_calls(kind, tmp_path):
    log, never = tmp_path / "log", tmp_path / "never"

    async def work():
        async with penstock.WorkerPool(1, kind=kind) as pool:
            calls_made.append(pool.submit(calls.mark_and_wait, str(log), "began", str(never)))
            await asyncio.Event().wait()

    calls_made = []
    task = asyncio.create_task(work())
    while not lines(log):
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert isinstance(calls_made[0].exception(), penstock.PoolClosedError)
    never.touch()  # lets the thread go
