"""Calling functions on workers: results, errors, bounds, policies."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import calls
import pytest

import penstock
from penstock.pools.child.protocol import RemoteTraceback
from penstock.pools.context import may_block
from penstock.pools.timers import call_at, clock
from tests.waiting import until

KINDS = ["process", "thread"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def gate(tmp_path):
    """A file that lets `calls.wait_for` go on."""
    return tmp_path / "gate"


@contextmanager
def full_pool(gate, kind="process", **options):
    """One worker busy until the gate opens, one call pending behind it. A test that fails opens it too."""
    with penstock.WorkerPool(1, kind=kind, max_queue_depth=1, **options) as pool:
        try:
            running = pool.submit(calls.wait_for, str(gate), "ran")
            yield pool, running, pool.submit(calls.echo, "pending")
        finally:
            gate.touch()


def test_a_call_gives_the_result_of_its_function(kind):
    with penstock.WorkerPool(2, kind=kind) as pool:
        assert 3 == pool.submit(calls.add, 1, b=2).result(30)
        assert {"a": [1, (2.5, None)]} == pool.submit(calls.echo, {"a": [1, (2.5, None)]}).result(30)


def test_an_exception_reaches_the_caller_as_itself_with_the_workers_traceback():
    with penstock.WorkerPool(1) as pool, pytest.raises(ValueError, match="bad weights") as caught:
        pool.submit(calls.fail, "bad weights").result(30)

    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fail" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_described_hurts_nobody_else():
    with penstock.WorkerPool(1) as pool:
        with pytest.raises(calls.Unspeakable):
            pool.submit(calls.raise_unspeakable).result(30)
        assert {"spawned": 1, "crashed": 0}.items() <= pool.snapshot().totals.items()


def test_an_exception_that_cannot_be_rebuilt_is_told_in_words_and_hurts_nobody_else():
    with penstock.WorkerPool(1) as pool:
        with pytest.raises(penstock.RemoteError, match="Awkward: 1 and 2") as caught:
            pool.submit(calls.raise_awkward).result(30)

        assert "calls.Awkward" == caught.value.type_name
        assert 1 == pool.submit(calls.echo, 1).result(30)


@pytest.mark.parametrize(
    ("fn", "error"), [(calls.leave_program, SystemExit), (calls.interrupt, KeyboardInterrupt)]
)
def test_a_function_that_wants_to_end_the_program_ends_its_call_only(kind, fn, error):
    with penstock.WorkerPool(1, kind=kind) as pool:
        with pytest.raises(error):
            pool.submit(fn).result(30)

        assert 1 == pool.submit(calls.echo, 1).result(30)
        assert 0 == pool.snapshot().totals["crashed"]


def test_an_argument_that_cannot_be_pickled_is_refused_at_once_and_named():
    with penstock.WorkerPool(1) as pool:
        with pytest.raises(penstock.NotPicklable, match="argument 1.*lock"):
            pool.submit(calls.echo, threading.Lock())

        assert pool.state.idle
        assert 1 == pool.submit(calls.echo, 1).result(30)


def test_a_result_that_cannot_be_pickled_fails_its_call_only(monkeypatch):
    with penstock.WorkerPool(1) as pool:
        with pytest.raises(penstock.NotPicklable, match="result"):
            pool.submit(calls.make_lock).result(30)
        with pytest.raises(penstock.NotPicklable, match="async def"):
            pool.submit(calls.coroutine).result(30)

        assert 1 == pool.submit(calls.echo, 1).result(30)


def test_a_lambda_reaches_the_worker_through_cloudpickle():
    factor = 3
    with penstock.WorkerPool(1) as pool:
        assert 12 == pool.submit(lambda x: factor * x, 4).result(30)


def test_a_lambda_without_cloudpickle_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("penstock.pools.child.protocol.cloudpickle", lambda: None)
    with (
        penstock.WorkerPool(1) as pool,
        pytest.raises(penstock.NotPicklable, match=r"pip install 'penstock\[pools\]'"),
    ):
        pool.submit(lambda: 1)


def test_two_calls_never_share_an_object():
    shared = [0]
    with penstock.WorkerPool(1, max_in_flight=4) as pool:
        results = [pool.submit(calls.echo, shared) for _ in range(4)]

        assert 4 == len({id(future.result(30)) for future in results})


def test_what_the_caller_changes_after_submit_does_not_reach_the_worker(gate):
    with penstock.WorkerPool(1) as pool:
        blocker = pool.submit(calls.wait_for, str(gate))
        data = [1]
        future = pool.submit(calls.echo, data)
        data.append(2)
        gate.touch()

        assert [1] == future.result(30)
        blocker.result(30)


# Bounds


def test_submit_waits_at_the_call_site_while_the_queue_is_full(kind, gate):
    with full_pool(gate, kind) as (pool, running, pending), ThreadPoolExecutor(1) as caller:
        third = caller.submit(pool.submit, calls.echo, "third")
        until(lambda: pool.state.waiting == 1)

        assert not third.done()
        assert (1, 1) == (pool.state.in_flight, pool.state.pending)

        gate.touch()
        assert ["ran", "pending", "third"] == [f.result(30) for f in (running, pending, third.result(30))]


def test_waiters_are_served_first_come_first_served(gate, tmp_path):
    order = tmp_path / "order"
    with full_pool(gate) as (pool, *_), ThreadPoolExecutor(5) as callers:
        waiting = []
        for place in range(5):
            waiting.append(callers.submit(pool.submit, calls.mark, str(order), place))
            until(lambda place=place: pool.state.waiting == place + 1)
        gate.touch()
        for future in waiting:
            future.result(30).result(30)

    assert ["0", "1", "2", "3", "4"] == order.read_text().split()


class SlowToPickle:
    """Arrives as the string "slow", once the event is set."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        self.made.wait(60)
        return str, ("slow",)


def test_waiters_whose_payloads_take_long_to_make_keep_their_order(gate, tmp_path):
    order, made = tmp_path / "order", threading.Event()
    with full_pool(gate) as (pool, _, first), ThreadPoolExecutor(2) as callers:
        try:
            second = callers.submit(pool.submit, calls.mark, str(order), SlowToPickle(made))
            until(lambda: pool.state.waiting == 1)
            third = callers.submit(pool.submit, calls.mark, str(order), ["quick"])
            until(lambda: pool.state.waiting == 2)
            first.cancel()
            until(lambda: pool.state.reserved == 1)
            gate.touch()
            until(lambda: pool.state.in_flight == 0)

            assert 1 == pool.state.waiting, "there is room, but it is not its turn"
        finally:
            made.set()
        for future in (second, third):
            future.result(30).result(30)

    assert ["slow", "['quick']"] == order.read_text().splitlines()


def test_a_newcomer_does_not_overtake_a_call_whose_payload_is_being_made(gate, tmp_path):
    order, made = tmp_path / "order", threading.Event()
    with full_pool(gate) as (pool, _, first), ThreadPoolExecutor(2) as callers:
        try:
            second = callers.submit(pool.submit, calls.mark, str(order), SlowToPickle(made))
            until(lambda: pool.state.waiting == 1)
            first.cancel()
            gate.touch()
            until(lambda: pool.state.reserved == 1 and pool.state.in_flight == 0)
            newcomer = callers.submit(pool.submit, calls.mark, str(order), "newcomer")
            until(lambda: pool.state.waiting == 1)
        finally:
            made.set()
        for future in (second, newcomer):
            future.result(30).result(30)

    assert ["slow", "newcomer"] == order.read_text().split()


def test_a_reservation_holds_up_no_other_while_its_payload_is_made(gate):
    with full_pool(gate) as (pool, *_), ThreadPoolExecutor(2) as callers:
        placed, made = threading.Event(), threading.Event()

        def reserve():
            with pool.reserve() as place:
                placed.set()
                made.wait(60)
                return place.submit(calls.echo, "reserved").result(60)

        reserved = callers.submit(reserve)
        until(lambda: pool.state.waiting == 1)
        other = callers.submit(pool.submit, calls.echo, ["other"])
        until(lambda: pool.state.waiting == 2)
        gate.touch()
        try:
            assert ["other"] == other.result(60).result(60)
        finally:
            made.set()
        assert "reserved" == reserved.result(60)


@pytest.mark.parametrize("policy", ["reject", "drop-latest"])
def test_a_shedding_policy_refuses_the_newcomer_and_says_which_limits(kind, gate, policy):
    with full_pool(gate, kind, policy=policy) as (pool, running, pending):
        with pytest.raises(penstock.QueueDropError) as caught:
            pool.submit(calls.echo, "one too many")
        gate.touch()

        assert (policy, 1, 1) == (
            caught.value.policy,
            caught.value.max_in_flight,
            caught.value.max_queue_depth,
        )
        assert ["ran", "pending"] == [running.result(30), pending.result(30)]
        assert 1 == pool.snapshot().totals["rejected"]


def test_drop_oldest_fails_the_oldest_pending_call_and_accepts_the_newcomer(kind, gate):
    with full_pool(gate, kind, policy="drop-oldest") as (pool, running, oldest):
        newest = pool.submit(calls.echo, "newest")
        gate.touch()

        with pytest.raises(penstock.QueueDropError, match="newer"):
            oldest.result(30)
        assert ["ran", "newest"] == [running.result(30), newest.result(30)]


@pytest.mark.parametrize("policy", ["reject", "drop-oldest"])
def test_depth_zero_accepts_only_what_can_start_at_once(kind, gate, policy):
    with penstock.WorkerPool(1, kind=kind, max_queue_depth=0, policy=policy) as pool:
        running = pool.submit(calls.wait_for, str(gate), "ran")
        with pytest.raises(penstock.QueueDropError):
            pool.submit(calls.echo, 1)
        gate.touch()

        assert "ran" == running.result(30)
        until(lambda: pool.state.idle)
        assert 2 == pool.submit(calls.echo, 2).result(30)


def test_a_queue_without_bound_is_there_for_those_who_ask(gate):
    with penstock.WorkerPool(1, max_queue_depth=math.inf) as pool:
        pool.submit(calls.wait_for, str(gate))
        futures = [pool.submit(calls.echo, n) for n in range(1000)]
        gate.touch()

        assert list(range(1000)) == [future.result(30) for future in futures]


def test_work_goes_to_the_least_loaded_worker_and_no_pipe_gets_more_than_its_share(gate):
    with penstock.WorkerPool(2, max_in_flight=6, max_queue_depth=10) as pool:
        futures = [pool.submit(calls.wait_for, str(gate)) for _ in range(8)]

        assert (3, 3) == pool.snapshot().load_by_worker
        assert 2 == pool.snapshot().pending_queue_depth
        gate.touch()
        for future in futures:
            future.result(30)


@pytest.mark.parametrize(("workers", "in_flight"), [(2, 2), (4, 64)])
def test_a_long_call_after_many_brief_ones_holds_nobody_up(workers, in_flight):
    together = threading.Barrier(workers)

    with penstock.WorkerPool(workers, kind="thread", max_in_flight=in_flight) as pool:
        for _ in range(20):
            brief = [pool.submit(calls.echo, number) for number in range(60)]
            long = [pool.submit(together.wait, 20) for _ in range(workers)]

            assert list(range(60)) == [call.result(30) for call in brief]
            assert set(range(workers)) == {call.result(30) for call in long}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_call_that_ended_is_told_while_a_long_one_runs_behind_it(workers):
    results = []

    with penstock.WorkerPool(workers, kind="thread", max_in_flight=64) as pool:
        for _ in range(20):
            may_end = threading.Event()
            brief = [pool.submit(calls.echo, number) for number in range(200)]
            long = [pool.submit(may_end.wait, 20) for _ in range(workers)]
            results += [call.result(10) for call in brief]
            may_end.set()

            assert [True] * workers == [call.result(30) for call in long]

    assert 20 * sum(range(200)) == sum(results)


def test_a_paused_pool_accepts_and_hands_out_nothing_until_resumed(kind):
    with penstock.WorkerPool(1, kind=kind) as pool:
        pool.pause()
        future = pool.submit(calls.echo, 1)

        assert (0, 1, True) == (pool.state.in_flight, pool.state.pending, pool.state.paused)
        pool.resume()
        assert 1 == future.result(30)


def test_the_wait_of_a_call_includes_its_waiting_and_is_told_in_two_parts(gate):
    with full_pool(gate) as (pool, *_), ThreadPoolExecutor(1) as caller:
        late = caller.submit(pool.submit, calls.echo, 1)
        until(lambda: pool.state.waiting == 1)
        gate.touch()
        call = late.result(30)
        call.result(30)

    assert call.waiting_for > 0
    assert call.pending_for >= 0
    assert call.waited == call.waiting_for + call.pending_for == pytest.approx(call.last_wait)


# Where blocking is forbidden


def test_submit_from_a_done_callback_never_blocks(kind, gate):
    submitted = threading.Event()
    chained = []

    with full_pool(gate, kind) as (pool, running, pending):

        def submit_more(_):
            chained.extend(pool.submit(calls.echo, n) for n in range(20))
            submitted.set()

        running.add_done_callback(submit_more)
        gate.touch()
        assert submitted.wait(30)

        assert list(range(20)) == [future.result(30) for future in chained]
        assert "pending" == pending.result(30)


def test_the_timer_thread_never_blocks():
    """It runs the done-callbacks of calls that timed out, and all timeouts of the program need it."""
    answers: SimpleQueue[bool] = SimpleQueue()
    call_at(clock(), lambda: answers.put(may_block()))

    assert not answers.get(timeout=30)


async def test_submit_from_a_running_event_loop_never_blocks_it(kind, gate):
    with full_pool(gate, kind) as (pool, *_):
        futures = [pool.submit(calls.echo, n) for n in range(20)]

        assert 20 == pool.state.waiting
        gate.touch()
        await pool.aclose()
        assert list(range(20)) == [future.result(0) for future in futures]


# Reserve, then build


def test_a_reserved_place_is_kept_and_given_back_if_unused(gate):
    with full_pool(gate, policy="reject") as (pool, running, pending):
        gate.touch()
        running.result(30), pending.result(30)
        with pool.reserve(), pool.reserve(), pytest.raises(penstock.QueueDropError):
            pool.submit(calls.echo, 1)

        assert pool.state.idle
        with pool.reserve() as place:
            future = place.submit(calls.echo, "built late")
        assert "built late" == future.result(30)
        with pytest.raises(RuntimeError, match="one call"):
            place.submit(calls.echo, 1)


def test_with_reserve_there_are_never_more_payloads_than_places():
    held = []

    def produce(pool, n):
        with pool.reserve() as place:
            state = pool.state
            held.append(state.in_flight + state.pending + state.reserved)
            payload = [n] * 100
            future = place.submit(calls.echo, payload)
        assert payload == future.result(30)

    with penstock.WorkerPool(2, max_queue_depth=3) as pool, ThreadPoolExecutor(16) as producers:
        for future in [producers.submit(produce, pool, n) for n in range(200)]:
            future.result(60)

    assert 200 == len(held)
    assert max(held) <= 2 + 3


def test_a_payload_that_cannot_be_built_gives_its_place_to_the_next(gate):
    with full_pool(gate) as (pool, *_), ThreadPoolExecutor(2) as callers:
        bad = callers.submit(pool.submit, calls.echo, threading.Lock())
        until(lambda: pool.state.waiting == 1)
        good = callers.submit(pool.submit, calls.echo, 1)
        until(lambda: pool.state.waiting == 2)
        gate.touch()

        with pytest.raises(penstock.NotPicklable):
            bad.result(30)
        assert 1 == good.result(30).result(30)


# Tasks


def test_a_task_is_its_function_with_options(kind):
    with penstock.WorkerPool(1, kind=kind) as pool:
        add = pool.task(calls.add, timeout=30, key_of=lambda a, b=0: a)

        assert 3 == add(1, 2)
        assert 3 == add.submit(1, b=2).result(30)
        assert "add" == add.name


def test_a_function_knows_its_call(kind):
    with penstock.WorkerPool(1, kind=kind) as pool:
        assert (True, None, 1, False) == pool.submit(calls.about).result(30)
        assert (True, "k", 1, True) == pool.task(calls.about, key_of=lambda: "k", timeout=60)()
        assert (True, ("a", 1), 1, False) == pool.task(calls.about, key_of=lambda: ("a", 1))()
        assert (True, b"k", 1, False) == pool.task(calls.about, key_of=lambda: b"k")()
    assert penstock.current_call() is None


def test_the_reader_thread_waits_for_a_caller_that_is_about_to_release_the_pipes(monkeypatch):
    """Polling again and again would take the interpreter from the thread that needs it to let go."""
    with penstock.WorkerPool(1) as pool:
        pool.submit(calls.echo, 1).result(30)
        reader = pool.internals.group.reader
        until(lambda: not reader.muted)
        looks = []
        wait = reader.poller.wait
        monkeypatch.setattr(
            reader.poller, "wait", lambda patience: (looks.append(patience), wait(patience))[1]
        )
        with reader.reading:
            call = pool.submit(calls.echo, 2)
            until(lambda: looks)
            time.sleep(0.2)
            seen = len(looks)

        assert 2 == call.result(30)
        assert seen < 1000
