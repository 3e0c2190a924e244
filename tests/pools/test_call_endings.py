"""Each call ends in exactly one of `on_settle`, `on_cancel` and `on_reject`, wherever it ends (DQ-9)."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter

import calls
import pytest

import penstock
from penstock.core.calls.ticket import CancelPhase
from tests.pools.test_pool_calls import gate, kind  # noqa: F401  # fixtures
from tests.waiting import until

SOAK = float(os.environ.get("PENSTOCK_SOAK", "1"))


class Endings(penstock.QueueHooks):
    def __init__(self):
        self.events = []

    def on_settle(self, call):
        self.events.append(("settle", call))

    def on_cancel(self, call, phase):
        self.events.append((f"cancel {phase}", call))

    def on_reject(self, call):
        self.events.append(("reject", call))

    def names(self):
        return [what for what, _ in self.events]


def test_a_call_whose_key_is_canceled_ends_in_on_cancel(kind):
    hooks = Endings()
    with penstock.WorkerPool(1, kind=kind, hooks=hooks, key_of=lambda value: value) as pool:
        pool.cancel("a", "no more of these")
        with pytest.raises(penstock.CallCanceled):
            pool.submit(calls.echo, "a")

        [(what, call)] = hooks.events
        assert f"cancel {CancelPhase.WAITING}" == what
        assert call.cancelled()
        assert 1 == pool.internals.call_queue.totals.canceled


def test_a_call_whose_signal_is_canceled_ends_in_on_cancel(kind):
    hooks, signal = Endings(), penstock.CancelSignal()
    signal.cancel("enough")
    with penstock.WorkerPool(1, kind=kind, hooks=hooks) as pool:
        with pytest.raises(penstock.CallCanceled):
            pool.task(calls.echo, signal=signal).submit(1)

        assert [f"cancel {CancelPhase.WAITING}"] == hooks.names()


@pytest.mark.parametrize("close", ["shutdown", "dispose"])
def test_a_call_to_a_closed_pool_ends_in_on_cancel(kind, close):
    hooks = Endings()
    pool = penstock.WorkerPool(1, kind=kind, hooks=hooks)
    getattr(pool, close)()
    with pytest.raises(penstock.PoolClosedError):
        pool.submit(calls.echo, 1)
    with pytest.raises(penstock.PoolClosedError):
        pool.map(calls.echo, range(3))
    with pytest.raises(penstock.PoolClosedError), pool.reserve():
        pass

    assert 3 * [f"cancel {CancelPhase.WAITING}"] == hooks.names()
    assert isinstance(hooks.events[0][1].exception(), penstock.PoolClosedError)


def test_a_call_that_a_policy_refuses_is_settled_when_its_hook_hears_of_it(kind, gate):
    hooks = Endings()
    with penstock.WorkerPool(1, kind=kind, hooks=hooks, max_queue_depth=0, policy="reject") as pool:
        running = pool.submit(calls.wait_for, str(gate))
        try:
            with pytest.raises(penstock.QueueDropError):
                pool.submit(calls.echo, 1)

            [(what, call)] = hooks.events
            assert "reject" == what
            assert isinstance(call.exception(0), penstock.QueueDropError)
        finally:
            gate.touch()
        running.result(30)


def test_a_call_whose_payload_cannot_be_made_ends_in_on_cancel():
    hooks = Endings()
    with penstock.WorkerPool(1, hooks=hooks) as pool:
        with pytest.raises(penstock.NotPicklable):
            pool.submit(calls.echo, threading.Lock())

        async def from_a_loop():
            with pytest.raises(penstock.NotPicklable):
                pool.submit(calls.echo, threading.Lock())
            with pytest.raises(penstock.NotPicklable):
                await pool.call(calls.echo, threading.Lock())

        asyncio.run(from_a_loop())

    assert 3 * [f"cancel {CancelPhase.WAITING}"] == hooks.names()


@pytest.mark.parametrize("seed", range(int(8 * SOAK)))
def test_whatever_happens_to_them_calls_end_in_exactly_one_of_settle_cancel_and_reject(kind, seed):
    """From an event loop, where no `submit` blocks: so one thread can carry out any order of steps."""
    made, hooks = asyncio.run(Play(kind, random.Random(seed)).run())

    assert made == len(hooks.events), Counter(hooks.names())
    assert made == len({call for _, call in hooks.events})
    assert all(call.done() for _, call in hooks.events)


class Play:
    def __init__(self, kind, dice):
        self.dice = dice
        self.hooks = Endings()
        self.pool = penstock.WorkerPool(
            2,
            kind=kind,
            hooks=self.hooks,
            max_queue_depth=dice.choice([0, 1, 4]),
            policy=dice.choice(["block", "reject", "drop-latest", "drop-oldest"]),
            crash_policy=dice.choice(["restart-fail-in-flight", "restart-requeue-in-flight", "fail-task"]),
            restart_delay=0.001,
            grace=0.05,
            key_of=lambda value=None, *_: str(value)[:1],
        )
        self.signal = penstock.CancelSignal()
        self.made = 0
        self.futures = []
        self.tasks = []

    async def run(self):
        steps = {
            self.submit: 8, self.call: 4, self.with_signal: 3, self.unpicklable: 1, self.reserve: 2, self.map: 1,
            self.cancel: 3, self.cancel_task: 1, self.key: 2, self.cancel_signal: 0.3, self.crash: 0.5, self.restart: 1,
            self.breathe: 3,
        }  # fmt: skip
        for step in self.dice.choices(list(steps), list(steps.values()), k=80):
            try:
                await step()
            except (penstock.CallEnded, penstock.NotPicklable):
                continue  # the hooks have to hear of it all the same
        close = self.dice.choice([self.pool.shutdown, self.pool.dispose])
        await asyncio.to_thread(close)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for _ in range(3):
            await self.after_the_end()
        until(lambda: len(self.hooks.events) >= self.made)
        return self.made, self.hooks

    async def after_the_end(self):
        with pytest.raises(penstock.CallEnded):
            await self.submit()

    async def submit(self):
        self.made += 1
        self.futures.append(self.pool.submit(calls.echo, self.dice.randrange(5)))

    async def call(self):
        self.made += 1
        self.tasks.append(asyncio.create_task(self.pool.call(calls.echo, [self.dice.randrange(5)])))
        await asyncio.sleep(0)  # a task that is canceled before it began has made no call

    async def with_signal(self):
        self.made += 1
        self.futures.append(self.pool.task(calls.echo, signal=self.signal).submit(self.dice.randrange(5)))

    async def unpicklable(self):
        self.made += 1
        self.futures.append(self.pool.submit(calls.echo, threading.Lock()))

    async def reserve(self):
        used = self.dice.random() < 0.5
        self.made += 1

        async def build():
            async with self.pool.reserve(key="r") as place:
                await asyncio.sleep(0)
                if used:
                    place.submit(calls.echo, 1)

        self.tasks.append(asyncio.create_task(build()))
        await asyncio.sleep(0)

    async def map(self):
        """It makes as many calls as there is room for."""
        if (
            self.pool.internals.call_queue.refusal is None
            and self.pool.internals.call_queue.queue.limits.policy == "block"
        ):
            results = self.pool.map(calls.echo, ["m", "m", "m"])
            self.made += len(results.calls)
            results.close()

    async def cancel(self):
        if self.futures:
            self.dice.choice(self.futures).cancel()

    async def cancel_task(self):
        if self.tasks:
            self.dice.choice(self.tasks).cancel()

    async def key(self):
        key = str(self.dice.randrange(5))
        if not self.pool.clear(key):
            self.pool.cancel(key)

    async def cancel_signal(self):
        self.signal.cancel()

    async def crash(self):
        if self.pool.internals.group.kind == "process":
            self.made += 1
            self.futures.append(self.pool.submit(calls.die))

    async def restart(self):
        if self.pool.internals.call_queue.refusal is not None:
            self.pool.restart()

    async def breathe(self):
        running = [future for future in self.futures if not future.done()]
        if running:
            await asyncio.wait([asyncio.wrap_future(running[0])])
