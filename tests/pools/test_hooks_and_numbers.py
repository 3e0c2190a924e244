"""What a pool tells: hooks, state, snapshots; and what it says to bad options."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading

import calls
import pytest

import penstock
from penstock.core.calls.ticket import QueueState
from tests.pools.test_pool_calls import full_pool, gate, kind  # noqa: F401  # fixtures
from tests.waiting import until


class ReplyHandler(penstock.QueueHooks):
    def __init__(self):
        self.events = []
        self.states = []

    def on_queued(self, call):
        self.events.append(("queued", call))

    def on_dispatch(self, call):
        self.events.append(("dispatch", call))

    def on_settle(self, call):
        self.events.append(("settle", call))

    def on_cancel(self, call, phase):
        self.events.append((f"cancel {phase}", call))

    def on_reject(self, call):
        self.events.append(("reject", call))

    def on_requeue(self, call):
        self.events.append(("requeue", call))

    def on_state_change(self, state):
        self.states.append(state)

    def of(self, call):
        return [what for what, about in self.events if about is call]


def test_hooks_hear_the_life_of_a_call_in_order(kind):
    listener = ReplyHandler()
    with penstock.WorkerPool(1, kind=kind, hooks=listener) as pool:
        call = pool.submit(calls.echo, 1)
        call.result(30)
        until(lambda: len(listener.events) == 3)

        assert ["queued", "dispatch", "settle"] == listener.of(call)
        assert call.ran_for >= 0
        assert all(isinstance(state, QueueState) for state in listener.states)
        assert 1 in {state.in_flight for state in listener.states}
        until(lambda: listener.states[-1].idle)


def test_each_call_ends_in_exactly_one_of_settle_cancel_and_reject(gate):
    listener = ReplyHandler()
    with full_pool(gate, policy="drop-oldest", hooks=listener) as (pool, running, evicted):
        newest = pool.submit(calls.echo, 1)
        newest.cancel()
        gate.touch()
        running.result(30)
        until(lambda: "settle" in listener.of(running))

        assert ["queued", "dispatch", "settle"] == listener.of(running)
        assert ["queued", "reject"] == listener.of(evicted)
        assert ["queued", "cancel queued"] == listener.of(newest)


def test_a_requeue_is_told(tmp_path):
    listener = ReplyHandler()
    options = {"crash_policy": "restart-requeue-in-flight", "restart_delay": 0.001}
    with penstock.WorkerPool(1, hooks=[listener], **options) as pool:
        call = pool.submit(calls.die_until, str(tmp_path / "log"), 1)
        call.result(30)
        until(lambda: "settle" in listener.of(call))

    assert ["queued", "dispatch", "requeue", "dispatch", "settle"] == listener.of(call)


def test_dispose_tells_the_hooks_of_every_call_that_it_ends(gate):
    listener = ReplyHandler()
    pool = penstock.WorkerPool(1, hooks=listener)
    running, pending = pool.submit(calls.wait_for, str(gate)), pool.submit(calls.echo, 1)
    pool.dispose()

    assert "cancel in-flight" == listener.of(running)[-1]
    assert "cancel queued" == listener.of(pending)[-1]
    assert listener.states[-1].disposed


class Broken(penstock.QueueHooks):
    def on_queued(self, call):
        raise RuntimeError("my mistake")

    def on_dispatch(self, call):
        raise RuntimeError("my mistake")


def test_a_hook_that_raises_is_logged_and_nothing_else_breaks(kind, caplog):
    with (
        caplog.at_level(logging.ERROR, "penstock"),
        penstock.WorkerPool(1, kind=kind, hooks=Broken()) as pool,
    ):
        assert [1, 2] == [pool.submit(calls.echo, number).result(30) for number in (1, 2)]

    for hook in ("on_queued", "on_dispatch"):
        assert 2 == sum(f"Broken.{hook}" in record.getMessage() for record in caplog.records)


def test_a_hook_that_raises_keeps_the_news_from_no_other(kind, caplog):
    listener = ReplyHandler()
    with (
        caplog.at_level(logging.ERROR, "penstock"),
        penstock.WorkerPool(1, kind=kind, hooks=[Broken(), listener]) as pool,
    ):
        call = pool.submit(calls.echo, 1)

        assert 1 == call.result(30)
        until(lambda: listener.of(call) == ["queued", "dispatch", "settle"])
    assert "my mistake" in caplog.text


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError, BaseException])
@pytest.mark.parametrize("others", [0, 1])
def test_a_hook_that_raises_no_exception_but_a_base_exception_is_logged_as_well(kind, error, others, caplog):
    class Leaving(penstock.QueueHooks):
        def on_queued(self, call):
            raise error("my mistake")

        on_dispatch = on_settle = on_queued

    listeners = [ReplyHandler() for _ in range(others)]
    with (
        caplog.at_level(logging.ERROR, "penstock"),
        penstock.WorkerPool(1, kind=kind, hooks=[Leaving(), *listeners]) as pool,
    ):
        made = [pool.submit(calls.echo, number) for number in range(3)]

        assert [0, 1, 2] == [call.result(30) for call in made]
        for listener in listeners:
            until(lambda: [["queued", "dispatch", "settle"]] * 3 == [listener.of(call) for call in made])  # noqa: B023 - called at once
    assert 9 == caplog.text.count("Leaving.on_queued")


def test_ctrl_c_while_a_hook_runs_reaches_the_main_thread():
    class Interrupted(penstock.QueueHooks):
        def on_queued(self, call):
            signal.raise_signal(signal.SIGINT)

    with penstock.WorkerPool(1, kind="thread", hooks=Interrupted()) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.submit(calls.echo, 1)


def test_a_hook_that_raises_for_one_call_of_a_run_hears_of_the_others(caplog):
    class Fussy(ReplyHandler):
        def on_settle(self, call):
            super().on_settle(call)
            raise RuntimeError("not this one")

    hooks = Fussy()
    with penstock.WorkerPool(1, max_in_flight=64, hooks=hooks) as pool, caplog.at_level(logging.CRITICAL):
        assert list(range(500)) == list(pool.map(calls.echo, range(500)))

    for what in ("queued", "dispatch", "settle"):
        assert 500 == len({call for event, call in hooks.events if event == what})


def test_a_hook_may_call_back_into_its_pool():
    class Curious(penstock.QueueHooks):
        seen = None

        def on_settle(self, call):
            self.seen = pool.state

    hooks = Curious()
    with penstock.WorkerPool(1, hooks=hooks) as pool:
        pool.submit(calls.echo, 1).result(30)
        until(lambda: hooks.seen is not None)


# Numbers


def test_a_snapshot_says_what_every_pool_of_the_process_does(gate):
    with full_pool(gate, name="thumbnails") as (pool, running, _):
        [mine] = [task for task in penstock.snapshot() if task.name == "thumbnails"]

        assert ("process", {"running": 1}, 1, 1, 0) == (
            mine.kind, mine.workers, mine.in_flight, mine.pending_queue_depth, mine.waiting_queue_depth,
        )  # fmt: skip
        assert ("block", 1, 1, (1,)) == (
            mine.policy,
            mine.max_in_flight,
            mine.max_queue_depth,
            mine.load_by_worker,
        )
        assert "thumbnails" in repr(pool)
        gate.touch()
        running.result(30)
        until(lambda: pool.snapshot().totals["succeeded"] == 2)


def test_subscribers_are_told_again_and_again_until_they_leave():
    snapshots = []
    twice = threading.Event()

    def hear(snapshot):
        snapshots.append(snapshot)
        if len(snapshots) == 2:
            twice.set()

    with penstock.subscribe(0.01, hear):
        assert twice.wait(20)
    count = len(snapshots)
    threading.Event().wait(0.05)
    assert len(snapshots) <= count + 1


# Options


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": 1.5}, "workers is 1.5"),
        ({"workers": True}, "workers is True"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"max_queue_depth": -1}, "max_queue_depth is -1"),
        ({"max_queue_depth": 2.5}, "max_queue_depth is 2.5"),
        ({"policy": "shrug"}, "policy is 'shrug'.*'block'"),
        ({"kind": "fiber"}, "kind is 'fiber'"),
        ({"crash_policy": "pray"}, "crash_policy is 'pray'"),
        ({"crash_max_retries": -1}, "crash_max_retries is -1"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"requeue": "middle"}, "requeue is 'middle'"),
        ({"start": "soon"}, "start is 'soon'"),
        ({"timeout": -1}, "timeout is -1"),
        ({"grace": "long"}, "grace is 'long'"),
        ({"idle_stop": -0.1}, "idle_stop is -0.1"),
        ({"recycle_after_calls": 0}, "recycle_after_calls is 0"),
        ({"recycle_above_rss": 0}, "recycle_above_rss is 0"),
    ],
)
def test_a_wrong_option_is_named_at_once(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        penstock.WorkerPool(**options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"workers": 1, "max_workers": 1}, "two names"),
        ({"key_of": "id"}, "key_of is 'id'"),
        ({"initializer": 3}, "initializer is 3"),
        ({"name": 3}, "name is 3"),
        ({"initializer": lambda: None, "initargs": (threading.Lock(),)}, "initializer"),
    ],
)
def test_an_option_of_a_wrong_type_is_named_at_once(options, complaint):
    with pytest.raises(TypeError, match=complaint):
        penstock.WorkerPool(**options)


def test_the_default_depth_is_twice_what_is_in_flight_and_two_for_a_singleton():
    with penstock.WorkerPool(3) as pool, penstock.SingletonWorker(calls.echo) as one:
        assert (3, 6) == (pool.state.max_in_flight, pool.state.max_queue_depth)
        assert (1, 2) == (one.state.max_in_flight, one.state.max_queue_depth)


def test_a_default_for_the_whole_program_can_replace_it():
    penstock.set_defaults(max_queue_depth=math.inf)
    try:
        with penstock.WorkerPool(1) as pool, penstock.WorkerPool(1, max_queue_depth=3) as other:
            assert (math.inf, 3) == (pool.state.max_queue_depth, other.state.max_queue_depth)
        with pytest.raises(ValueError, match="max_queue_depth is -2"):
            penstock.set_defaults(max_queue_depth=-2)
    finally:
        penstock.set_defaults()


# One worker whose state is kept


def test_a_singleton_keeps_its_object_between_calls(kind):
    with penstock.SingletonWorker(calls.Counter, 10, kind=kind) as counter:
        assert [11, 12, 17] == [counter.add(), counter.add.submit(1).result(30), counter.add(n=5)]
        assert "mine 1" == counter.method("submit")(1)


async def test_a_singleton_can_be_awaited():
    async with penstock.SingletonWorker(calls.Counter) as counter:
        assert 1 == await counter.add.call()


def test_after_a_crash_a_singletons_object_is_made_anew():
    with penstock.SingletonWorker(calls.Counter, 10, restart_delay=0.001) as counter:
        counter.add(5)
        with pytest.raises(penstock.WorkerCrashedError):
            counter.die()

        assert 11 == counter.add()


def test_a_singleton_runs_a_function():
    with penstock.SingletonWorker(calls.add) as worker:
        assert 3 == worker(1, b=2)
        with pytest.raises(AttributeError):
            worker.nothing  # noqa: B018


def test_a_singleton_whose_object_cannot_be_made_says_so():
    with penstock.SingletonWorker(calls.Broken, crash_max_retries=0) as worker:
        with pytest.raises(penstock.WorkerCrashedError, match="cannot be made"):
            worker.anything()


@pytest.mark.parametrize(
    ("args", "options", "complaint"),
    [
        ((3,), {}, "target is 3"),
        ((calls.echo, 1), {}, "constructor"),
        ((calls.Counter,), {"workers": 2}, "one worker"),
    ],
)
def test_a_singleton_made_wrongly_says_how(args, options, complaint):
    with pytest.raises(TypeError, match=complaint):
        penstock.SingletonWorker(*args, **options)
