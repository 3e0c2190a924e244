"""One client with many slow requests delays no other: threads are shared between addons and tokens, which take turns."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.waiting import LONG, until

from penstock.server.app_state import SERVER_OWNER, FairPool


class Gate:
    """A function whose calls wait until the test opens it. `begun` lists the calls that have begun."""

    def __init__(self):
        self.open, self.begun = threading.Event(), []

    def __call__(self, name):
        self.begun.append(name)
        assert self.open.wait(LONG)
        return name


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open.set()


def pooled(test, threads, per_owner):
    """Runs a coroutine with a pool on a loop of its own."""

    async def with_pool():
        pool = FairPool(threads, per_owner, asyncio.get_running_loop())
        try:
            return await test(pool)
        finally:
            pool.close()

    return asyncio.run(with_pool())


def test_owners_take_turns_and_each_is_served_in_its_order(gate):
    async def test(pool):
        first = pool.run("a", gate, "a0")
        rest = [pool.run("a", gate, f"a{n}") for n in range(1, 4)]
        rest += [pool.run("b", gate, "b1"), pool.run("b", gate, "b2"), pool.run("c", gate, "c1")]
        gate.open.set()
        await asyncio.gather(first, *rest)

    pooled(test, threads=1, per_owner=1)
    assert gate.begun == ["a0", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_owner_never_has_all_threads(gate):
    async def test(pool):
        slow = [pool.run("a", gate, n) for n in range(50)]
        assert await pool.run("b", lambda: "at once") == "at once"
        assert await pool.run(SERVER_OWNER, lambda: "at once") == "at once"
        assert len(gate.begun) <= 3
        gate.open.set()
        assert await asyncio.gather(*slow) == list(range(50))

    pooled(test, threads=4, per_owner=3)


def test_the_servers_own_calls_have_no_limit(gate):
    async def test(pool):
        slow = [pool.run(SERVER_OWNER, gate, n) for n in range(4)]
        await asyncio.to_thread(until, lambda: len(gate.begun) == 4)
        gate.open.set()
        await asyncio.gather(*slow)

    pooled(test, threads=4, per_owner=1)


def test_a_call_that_is_given_up_while_it_waits_is_never_made(gate):
    async def test(pool):
        running, waiting = pool.run("a", gate, "first"), pool.run("a", gate, "given up")
        running_too = pool.run("a", gate, "last")
        waiting.cancel()
        gate.open.set()
        await asyncio.gather(running, running_too)

    pooled(test, threads=1, per_owner=1)
    assert gate.begun == ["first", "last"]


def test_a_call_that_is_given_up_while_it_runs_keeps_its_thread_until_it_ends(gate):
    async def test(pool):
        running = pool.run("a", gate, "first")
        await asyncio.to_thread(until, lambda: gate.begun == ["first"])
        running.cancel()
        waiting = pool.run("a", gate, "second")
        assert await pool.run("b", lambda: "at once") == "at once"
        assert gate.begun == ["first"]
        gate.open.set()
        assert await waiting == "second"

    pooled(test, threads=2, per_owner=1)


def test_what_a_call_raises_is_its_callers():
    async def test(pool):
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 / 0)
        assert await pool.run("a", lambda: 1) == 1

    pooled(test, threads=1, per_owner=1)


def test_slow_reads_of_one_addon_delay_no_heartbeat_of_another(kit, gate):
    greedy = [
        kit.client.mint(addon_id="greedy") for _ in range(2)
    ]  # two tokens of one addon are no more than one
    kit.client.submit(addon_id="modest")
    modest = kit.client.mint(addon_id="modest")
    [claimed] = modest.claim(wait_sec=1)
    find = kit.store.find
    kit.store.find = lambda query: gate(query) and find(query)
    with ThreadPoolExecutor(40) as visitors:
        reads = [visitors.submit(greedy[n % 2].get, "/queue/jobs") for n in range(40)]
        try:
            until(lambda: len(gate.begun) == 8)
            assert modest.post("/lease/heartbeat", {"lease_id": claimed["lease_id"]}).status == 200
            assert kit.client.get(f"/queue/jobs/{claimed['job_id']}").status == 200
            assert len(gate.begun) == 8
        finally:
            gate.open.set()
        assert {read.result(LONG).status for read in reads} == {200}
