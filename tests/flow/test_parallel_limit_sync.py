from __future__ import annotations

import contextvars
import gc
import logging
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from time import sleep
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flow import parallel
from penstock.flow.parallel import SyncCall, ThreadCalls, parallel_limit_sync

WAIT = 20  # seconds for what takes microseconds: only a test that fails gets there


@pytest.fixture(autouse=True)
def no_slow_source(monkeypatch):
    """On a busy machine every source is slow at times, and fewer calls start at once."""
    monkeypatch.setattr(parallel, "_SLOW", float("inf"))


@pytest.fixture(params=["threads", "executor"])
def limit(request):
    """parallel_limit_sync, on threads of its own and through an executor."""
    if request.param == "threads":
        yield parallel_limit_sync
    else:
        with ThreadPoolExecutor(16) as pool:
            yield partial(parallel_limit_sync, executor=pool)


class Gates:
    """Calls that end when the test says so."""

    def __init__(self):
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.open = set()
        self.started = []
        self.running = 0
        self.most = 0

    def call(self, item):
        with self.changed:
            self.started.append(item)
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: item in self.open, WAIT)
            self.running -= 1
        return item

    def end(self, *items):
        with self.changed:
            self.open.update(items)
            self.changed.notify_all()

    def end_once(self, count, *items):
        """End these as soon as so many have started."""
        threading.Thread(target=lambda: (self.wait_for_starts(count), self.end(*items))).start()

    def wait_for_starts(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.started) >= count, WAIT)


@pytest.fixture
def gates():
    gates = Gates()
    yield gates
    gates.end(*range(100))


def and_then(notify):
    def call(item):
        notify()
        return item

    return call


def odd_ones_fail(x):
    if x % 2:
        raise ValueError(x)
    return x


# What comes out


def test_every_item_gives_one_result(limit):
    assert list(range(200)) == sorted(limit(range(200), 7, abs))


def test_ordered_results_come_in_the_order_of_the_items(limit, gates):
    gates.end(0, 2)
    flow = limit(range(3), 3, gates.call, ordered=True)
    first = next(flow)
    gates.end(1)

    assert [first, *flow] == [0, 1, 2]


def test_results_come_in_the_order_in_which_the_calls_end(limit, gates):
    gates.end(2)
    flow = limit(range(3), 3, gates.call)
    results = [next(flow)]
    gates.end(0)
    results.append(next(flow))
    gates.end(1)

    assert [*results, *flow] == [2, 0, 1]


def test_no_items_give_no_results(limit):
    assert list(limit([], 3, abs)) == []


def test_a_call_sees_the_callers_context_and_not_that_of_another_call():
    name = contextvars.ContextVar("name", default="nobody")
    name.set("caller")

    def rename(x):
        seen = name.get()
        name.set(f"call {x}")
        return seen

    assert list(parallel_limit_sync(range(20), 3, rename)) == ["caller"] * 20


# What n bounds


@pytest.mark.parametrize("ordered", [False, True])
def test_never_more_than_n_calls_are_in_progress_and_n_are_if_there_are_items(limit, gates, ordered):
    gates.end_once(4, *range(20))

    assert list(range(20)) == sorted(limit(range(20), 4, gates.call, ordered=ordered))
    assert gates.most == 4


@pytest.mark.parametrize("ordered", [False, True])
def test_items_are_pulled_on_the_callers_thread_and_never_more_than_n_ahead(limit, ordered):
    pulled = []

    def source():
        for item in range(50):
            pulled.append(threading.current_thread())
            yield item

    flow = limit(source(), 4, abs, ordered=ordered)
    assert pulled == []
    for taken, _ in enumerate(flow):
        assert len(pulled) - taken <= 4

    assert {threading.current_thread()} == set(pulled)


def test_a_finished_result_does_not_wait_for_a_slow_source_to_give_n_items(limit, monkeypatch):
    monkeypatch.setattr(parallel, "_SLOW", 0.001)
    ended = threading.Semaphore(0)
    pulled = []

    def source():
        for item in range(8):
            pulled.append(item)
            yield item
            assert ended.acquire(timeout=WAIT)
            sleep(0.005)

    with limit(source(), 8, and_then(ended.release)) as flow:
        assert next(flow) == 0
        assert len(pulled) < 8


def test_reserve_then_build_keeps_n_payloads_alive_for_1000_items(limit, alive):
    def build_and_use(x):
        payload = alive.payload()
        assert payload is not None
        return x

    assert len(list(limit(range(1000), 8, build_and_use))) == 1000
    assert alive.most <= 8
    assert alive.now == 0


def test_payloads_that_are_results_are_n_besides_the_one_in_hand(alive):
    for payload in parallel_limit_sync(range(1000), 8, lambda _: alive.payload()):
        del payload

    assert alive.most <= 8 + 1
    assert alive.now == 0


# Errors


def test_the_first_error_is_raised_and_nothing_runs_any_more(limit, gates):
    def call(item):
        if item == 1:
            gates.wait_for_starts(2)
            threading.Timer(0.05, gates.end, [0, 2]).start()
            raise ValueError(item)
        return gates.call(item)

    with pytest.raises(ValueError):
        list(limit(range(50), 3, call))

    assert gates.running == 0
    assert sorted(gates.started) == [0, 2]


def test_a_flow_is_over_once_it_has_raised(limit):
    flow = limit(range(50), 1, odd_ones_fail)
    with pytest.raises(ValueError):
        list(flow)

    assert list(flow) == []


@pytest.mark.parametrize("ordered", [False, True])
def test_skip_leaves_failures_out_and_counts_them(limit, ordered, caplog):
    caplog.set_level(logging.DEBUG, logger="penstock.flow")
    flow = limit(range(20), 3, odd_ones_fail, errors="skip", ordered=ordered)

    assert list(range(0, 20, 2)) == sorted(flow)
    assert flow.skipped == 10
    assert len([record for record in caplog.records if record.name == "penstock.flow"]) == 10


def test_settled_tells_the_outcome_of_every_item(limit):
    outcomes = list(limit(range(4), 2, odd_ones_fail, errors="settled", ordered=True))

    assert [(o.item, o.ok, o.value) for o in outcomes] == [
        (0, True, 0),
        (1, False, None),
        (2, True, 2),
        (3, False, None),
    ]
    assert [o.error.args[0] for o in outcomes if not o.ok] == [1, 3]


@pytest.mark.parametrize("errors", ["raise", "skip", "settled"])
def test_an_error_of_the_source_comes_after_what_was_ready(limit, errors):
    ready = threading.Event()

    def source():
        yield 1
        assert ready.wait(WAIT)
        raise LookupError

    flow = limit(source(), 3, and_then(ready.set), errors=errors)

    first = next(flow)
    assert (first.value if errors == "settled" else first) == 1
    with pytest.raises(LookupError):
        next(flow)


@pytest.mark.parametrize("errors", ["raise", "skip", "settled"])
def test_what_is_no_exception_is_raised_whatever_becomes_of_calls(errors):
    def leave(item):
        sys.exit("now")

    with pytest.raises(SystemExit):
        list(parallel_limit_sync(range(5), 2, leave, errors=errors))


def test_an_interrupt_while_items_are_pulled_ends_the_flow(limit):
    def source():
        yield 1
        raise KeyboardInterrupt
        yield 2

    flow = limit(source(), 3, abs, errors="skip")
    with pytest.raises(KeyboardInterrupt):
        list(flow)

    assert not [t for t in threading.enumerate() if t.name.startswith("parallel_limit")]
    assert list(flow) == []


def test_a_call_cannot_end_the_loop_by_raising_what_ends_loops(limit):
    with pytest.raises(RuntimeError, match="a call raised StopIteration") as caught:
        list(limit([()], 1, lambda x: next(iter(x))))

    assert isinstance(caught.value.__cause__, StopIteration)


# Leaving


def test_break_starts_nothing_more_and_waits_for_what_runs(limit, gates):
    gates.end_once(3, 0)
    for _ in limit(range(50), 3, gates.call):
        threading.Timer(0.05, gates.end, [1, 2]).start()
        break

    assert gates.running == 0
    assert sorted(gates.started) == [0, 1, 2]


def test_leaving_a_context_waits_for_what_runs(limit, gates):
    gates.end_once(3, 0)
    with limit(range(50), 3, gates.call) as flow:
        next(flow)
        threading.Timer(0.05, gates.end, [1, 2]).start()

    assert gates.running == 0
    assert list(flow) == []


def test_a_source_is_closed_on_leaving(limit):
    closed = []

    def source():
        try:
            yield from range(50)
        finally:
            closed.append(True)

    flow = limit(source(), 3, abs)
    next(flow)
    flow.close()

    assert closed == [True]


def test_calls_that_an_executor_has_not_started_are_cancelled(gates):
    gates.end(0)
    with ThreadPoolExecutor(1) as pool:
        flow = parallel_limit_sync(range(50), 8, gates.call, executor=pool)
        next(flow)
        gates.wait_for_starts(2)
        threading.Timer(0.05, gates.end, [1]).start()
        flow.close()

    assert gates.started == [0, 1]


def test_an_executor_stays_open_and_sees_at_most_n_calls_at_a_time():
    class Counting(ThreadPoolExecutor):
        out = most = 0

        def submit(self, fn, /, *args, **kwargs):
            self.out += 1
            self.most = max(self.most, self.out)
            return super().submit(fn, *args, **kwargs)

    with Counting(8) as pool:
        for _ in parallel_limit_sync(range(100), 3, abs, executor=pool):
            pool.out -= 1

        assert pool.most == 3
        assert pool.submit(abs, -1).result() == 1


def test_a_call_that_its_executor_refuses_has_failed_like_any_other():
    class Full(Executor):
        def submit(self, fn, /, *args, **kwargs):
            if args[0] % 2:
                raise RuntimeError("full")
            future: Future[int] = Future()
            future.set_result(fn(*args, **kwargs))
            return future

    flow = parallel_limit_sync(range(10), 3, abs, executor=Full(), errors="settled", ordered=True)

    assert [not item % 2 for item in range(10)] == [o.ok for o in flow]


def test_a_call_that_its_executor_cancels_has_failed_like_any_other():
    class Canceling(Executor):
        def submit(self, fn, /, *args, **kwargs):
            future: Future[int] = Future()
            future.cancel()
            return future

    [outcome] = parallel_limit_sync([1], 3, abs, executor=Canceling(), errors="settled")

    assert isinstance(outcome.error, CancelledError)


def test_a_call_that_waits_for_a_thread_never_starts_once_its_flow_is_left(gates):
    workers = ThreadCalls(1, gates.call)
    workers.start(SyncCall(0))
    gates.wait_for_starts(1)
    workers.start(SyncCall(1))
    threading.Timer(0.05, gates.end, [0, 1]).start()
    workers.stop()

    assert gates.started == [0]


def test_a_flow_in_a_cycle_ends_its_threads_when_it_is_collected():
    holder: list[Any] = [parallel_limit_sync(range(9), 2, abs)]
    holder.append(holder)
    next(holder[0])
    threads = [t for t in threading.enumerate() if t.name.startswith("parallel_limit")]
    assert threads
    del holder
    gc.collect()

    assert not any(thread.is_alive() for thread in threads)


def test_a_program_that_ends_in_the_middle_waits_for_the_calls_that_run():
    program = """
import threading, time
from penstock.flow.parallel import parallel_limit_sync
running = threading.Event()
def call(item):
    if item == 0:
        running.wait(20)
        return
    running.set()
    time.sleep(0.2)
    print("ended", flush=True)
flow = parallel_limit_sync(range(2), 2, call)
next(flow)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert (done.stdout, done.stderr) == ("ended\n", "")


# At the call


@pytest.mark.parametrize(
    ("n", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError), ("2", TypeError)]
)
def test_a_wrong_n_is_an_error_at_the_call(n, error):
    with pytest.raises(error, match="n must be"):
        parallel_limit_sync([1], n, abs)


def test_other_wrong_arguments_are_errors_at_the_call():
    limit: Any = parallel_limit_sync

    async def source():
        yield 1

    async def call(item):
        return item

    class AsyncCall:
        async def __call__(self, item):
            return item

    with pytest.raises(TypeError, match="fn must be callable"):
        limit([1], 1, None)
    with pytest.raises(TypeError, match="fn must be a plain function"):
        limit([1], 1, call)
    with pytest.raises(TypeError, match="fn must be a plain function"):
        limit([1], 1, AsyncCall())
    with pytest.raises(TypeError, match="items must be an iterable, not int"):
        limit(1, 1, abs)
    with pytest.raises(TypeError, match="items must be a sync iterable"):
        limit(source(), 1, abs)
    with pytest.raises(ValueError, match="errors must be"):
        limit([1], 1, abs, errors="ignore")
    with pytest.raises(TypeError, match="executor must be"):
        limit([1], 1, abs, executor=4)


# Any schedule


class Shuffled(Executor):
    """
    An executor without threads: a call ends, in random order, when the flow waits for one, and sometimes
    before.
    """

    def __init__(self, random):
        self.random = random
        self.pending = []
        self.most = 0

    def submit(self, fn, /, *args, **kwargs):
        self.pending.append((Future(), fn, *args))
        self.most = max(self.most, len(self.pending))
        return self.pending[-1][0]

    def end_one(self):
        future, fn, item = self.pending.pop(self.random.randrange(len(self.pending)))
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(fn(item))
        except ValueError as error:
            future.set_exception(error)


class Endings(SimpleQueue):
    """The queue of ended calls that a flow waits on; waiting makes the executor end a call."""

    executor: Shuffled

    def empty(self):
        if self.executor.pending and self.executor.random.random() < 0.5:
            self.executor.end_one()
        return super().empty()

    def get(self, block=True, timeout=None):
        while super().empty():
            self.executor.end_one()
        return super().get()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.booleans(), max_size=15),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["raise", "skip", "settled"]),
    st.randoms(use_true_random=False),
    st.integers(0, 20),
)
def test_whatever_the_order_of_completion_the_outcomes_are_those_of_a_plain_loop(
    failing, n, ordered, errors, random, leave_after
):
    def call(item):
        if failing[item]:
            raise ValueError(item)
        return item

    executor = Shuffled(random)
    endings = Endings()
    endings.executor = executor
    with mock.patch.object(parallel, "SimpleQueue", return_value=endings):
        flow = parallel_limit_sync(
            range(len(failing)), n, call, ordered=ordered, errors=errors, executor=executor
        )
    taken = []
    raised = None
    try:
        for result in flow:
            taken.append(result.item if errors == "settled" else result)
            if len(taken) == leave_after:
                break
    except ValueError as error:
        raised = error
    flow.close()

    assert all(future.cancelled() for future, _, _ in executor.pending)
    assert executor.most <= n
    assert len(set(taken)) == len(taken)
    if ordered:
        assert sorted(taken) == taken
    if raised:
        assert errors == "raise"
        assert failing[raised.args[0]]
    elif len(taken) != leave_after:
        assert [i for i in range(len(failing)) if errors == "settled" or not failing[i]] == sorted(taken)
        assert errors != "raise" or not any(failing)
