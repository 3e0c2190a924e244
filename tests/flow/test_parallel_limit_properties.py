"""
Random schedules of calls that end, results that are taken, and ways to leave, against a model in plain lists.

In the first test every event is followed by enough turns of the event loop for everything to come to rest, so the model
knows exactly what must run and what must be out. In the second, events fall into the same turn, where only bounds and
outcomes are promised.
"""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flow.parallel import parallel_limit

SETTLE = 12  # turns of the loop after which nothing moves any more, for flows as small as these


class Failure(Exception):
    pass


class Model:
    """parallel_limit in lists: what is at work, in line, ready, taken."""

    def __init__(self, total, n, ordered, errors):
        self.items = deque(range(total))
        self.n, self.ordered, self.errors = n, ordered, errors
        self.wanted = 0
        self.begun = False
        self.running = []
        self.line = []  # in input order: [item, outcome or None]
        self.ready = []
        self.taken = []
        self.error = None
        self.over = False

    def want(self):
        self.begun = True
        self.wanted += 1
        self._move()

    def end(self, item, failed):
        self.running.remove(item)
        outcome = ("failed", item) if failed else ("ok", item)
        if failed and self.errors == "raise":
            self.error = outcome
            self.running.clear()
            self.items.clear()
            self.line.clear()
        elif self.ordered:
            next(slot for slot in self.line if slot[0] == item)[1] = outcome
            while self.line and self.line[0][1]:
                self._ready(self.line.pop(0)[1])
        else:
            self._ready(outcome)
        self._move()

    def leave(self):
        self.running.clear()
        self.over = True

    def _ready(self, outcome):
        if outcome[0] == "ok" or self.errors == "settled":
            self.ready.append(outcome)

    def _move(self):
        while self.wanted and self.ready:
            self.wanted -= 1
            self.taken.append(self.ready.pop(0))
        piled = sum(1 for slot in self.line if slot[1])
        while self.begun and self.items and len(self.running) + piled + len(self.ready) < self.n:
            item = self.items.popleft()
            self.running.append(item)
            if self.ordered:
                self.line.append([item, None])
        if self.wanted and not self.ready and not self.running and not self.items:
            self.wanted = 0
            self.taken.append(self.error or "end")
            self.over = True


class DrivenFlow:
    """A real flow, driven by the same events as the model."""

    def __init__(self, total, n, ordered, errors, asynchronous=False):
        self.gates = {}
        self.most = 0
        self.pulled = 0
        self.taken = []
        self.permits = asyncio.Semaphore(0)
        source = self.asource(total) if asynchronous else self.source(total)
        self.flow = parallel_limit(source, n, self.call, ordered=ordered, errors=errors)
        self.task = asyncio.ensure_future(self.loop(errors))

    def source(self, total):
        for item in range(total):
            self.pulled += 1
            yield item

    async def asource(self, total):
        for item in range(total):
            if item % 3:
                await asyncio.sleep(0)
            self.pulled += 1
            yield item

    async def call(self, item):
        gate = self.gates[item] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.gates))
        try:
            if await gate:
                raise Failure(item)
            return item
        finally:
            del self.gates[item]

    async def loop(self, errors):
        try:
            await self.permits.acquire()
            async for result in self.flow:
                if errors == "settled":
                    self.taken.append(("ok" if result.ok else "failed", result.item))
                else:
                    self.taken.append(("ok", result))
                del result
                await self.permits.acquire()
            self.taken.append("end")
        except Failure as error:
            self.taken.append(("failed", error.args[0]))

    def end(self, item, failed):
        self.gates[item].set_result(failed)

    async def leave(self, how):
        if how == "close":
            await self.flow.aclose()
        self.task.cancel()
        if how == "cancel":
            await asyncio.wait([self.task])
        del self.flow


async def rest(turns=SETTLE):
    for _ in range(turns):
        await asyncio.sleep(0)


def flows():
    return st.tuples(
        st.integers(0, 12), st.integers(1, 5), st.booleans(), st.sampled_from(["raise", "skip", "settled"])
    )


@settings(max_examples=200, deadline=None)
@given(
    flows(),
    st.lists(
        st.one_of(
            st.just(("take",)),
            st.tuples(st.just("end"), st.integers(0, 99), st.sampled_from([False, False, False, True])),
        ),
        max_size=40,
    ),
    st.sampled_from(["cancel", "close", "drop"]),
)
def test_events_that_come_one_by_one_do_exactly_what_the_model_says(flow, events, leaving):
    async def main():
        model, driven = Model(*flow), DrivenFlow(*flow)
        for event in events:
            match event:
                case ("take",) if not model.over:
                    model.want()
                    driven.permits.release()
                case ("end", which, failed) if model.running:
                    item = model.running[which % len(model.running)]
                    model.end(item, failed)
                    driven.end(item, failed)
            await rest()

            assert sorted(model.running) == sorted(driven.gates)
            assert model.taken == driven.taken
        await driven.leave(leaving)
        await rest()
        assert driven.gates == {}
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert set() == asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(
    flows(),
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["take", "end", "end", "end", "rest"]),
            st.integers(0, 99),
            st.integers(0, 9).map((9).__eq__),
        ),
        max_size=60,
    ),
    st.sampled_from(["cancel", "close", "drop", "finish"]),
)
def test_events_in_one_turn_keep_the_bounds_and_lose_nothing(flow, asynchronous, events, leaving):
    total, n, ordered, errors = flow

    async def main():
        driven = DrivenFlow(total, n, ordered, errors, asynchronous)
        ended = []
        for kind, which, failed in events:
            if kind == "take":
                driven.permits.release()
            elif kind == "end":
                waiting = [item for item, gate in driven.gates.items() if not gate.done()]
                if waiting:
                    item = waiting[which % len(waiting)]
                    driven.end(item, failed)
                    ended.append(("failed" if failed else "ok", item))
            else:
                await rest(which % 4)
            assert len(driven.gates) <= n
            assert driven.pulled - len(driven.taken) - driven.flow.skipped <= 2 * n + 1
        if leaving == "finish":
            await finish(driven, ended)
            check_everything_came_out(driven, total, ordered, errors, ended)
        else:
            await driven.leave(leaving)
            await rest()
        assert driven.gates == {}
        assert driven.most <= n
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert set() == asyncio.run(main())


async def finish(driven, ended):
    while not driven.task.done():
        driven.permits.release()
        for item, gate in list(driven.gates.items()):
            if not gate.done():
                driven.end(item, False)
                ended.append(("ok", item))
        await rest(1)


def check_everything_came_out(driven, total, ordered, errors, ended):
    failed = [item for outcome, item in ended if outcome == "failed"]
    if errors == "raise" and failed:
        *results, last = driven.taken
        assert last[0] == "failed"
        assert last[1] in failed
    else:
        *results, last = driven.taken
        assert last == "end"
        kept = ended if errors == "settled" else [e for e in ended if e[0] == "ok"]
        assert sorted(kept) == sorted(results)
        assert total == len(ended)
    items = [item for _, item in results]
    if ordered:
        assert sorted(items) == items
    assert len(set(items)) == len(items)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_flow_of_bursts_never_stalls(ordered, asynchronous):
    """Twenty calls end in one turn, again and again, while the loop takes three results between two rests."""

    async def main():
        driven = DrivenFlow(2000, 20, ordered, "raise", asynchronous)
        ended = []
        while not driven.task.done():
            for _ in range(3):
                driven.permits.release()
            for item, gate in list(driven.gates.items()):
                if not gate.done():
                    driven.end(item, False)
                    ended.append(item)
            await asyncio.sleep(0)
            assert driven.pulled - len(driven.taken) <= 2 * 20 + 1
        return driven.taken

    taken = asyncio.run(main())

    assert len(taken) == 2001
