"""
Random graphs against a plain loop: what a run must do, said by something too simple to be wrong.

Each case is made from its own seed. A failure prints the seed; `PENSTOCK_SEED=... pytest` runs that one alone.
`PENSTOCK_SOAK` multiplies the number of cases, and of the slices that workers share.
"""

import asyncio
import os
import random
import sys
import threading
from collections import Counter

import pytest

from penstock.core.calls.graph_plan import NodeStatus, Plan, RunStatus
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
CASES = 5_000 * SOAK
ONLY = os.environ.get("PENSTOCK_SEED")
SLICES = 5 * SOAK


class Boom(Exception):
    pass


class Case:
    """A graph whose nodes write down that they were called, and the truth about it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.calls: Counter[tuple[str, object]] = Counter()
        self.lock = threading.Lock()
        self.graph = Graph(f"seed {seed}", env=("x",))
        self.truth: dict[str, object] = {}  # a value, or the Boom
        self.policy: dict[str, str] = {}
        self.feeds: dict[str, list[str]] = {}
        self.run_ended_by = self.random.choice(
            ["nothing"] * 3 + ["cancel inside", "cancel outside", "deadline", "past deadline"]
        )
        self.bomb: str | None = None
        self.flaky: set[str] = set()
        self.items_of: set[str] = set()  # nodes that only make the list for a map
        size = self.random.randint(1, self.random.choice([4, 10, 25]))
        for number in range(size):
            self._add(f"n{number}", [f"n{one}" for one in range(number)])
        if self.run_ended_by == "cancel inside":
            self.bomb = self.random.choice(list(self.feeds))
        self.plan = self.graph.compile()

    def _add(self, name: str, earlier: list[str]) -> None:
        rnd = self.random
        feeds = rnd.sample(earlier, min(len(earlier), rnd.choice([0, 1, 1, 2, 3])))
        kind = rnd.choice(["compute", "compute", "io", "async", "map", "async map"])
        fails_first = rnd.random() < 0.1
        retries = rnd.choice([0, 0, 2])
        fails = rnd.random() < 0.06
        self.policy[name] = rnd.choice(["fail", "skip_dependents", "skip_dependents"])
        self.feeds[name] = feeds
        inputs = [self.truth[feed] for feed in feeds]
        if any(isinstance(one, Boom) for one in inputs):
            self.truth[name] = Boom("upstream")
        elif "map" in kind and not self._items(inputs):
            self.truth[name] = []
        elif fails or (fails_first and not retries):
            self.truth[name] = Boom(name)
        elif "map" in kind:
            self.truth[name] = [value * 2 + 1 for value in self._items(inputs)]
        else:
            self.truth[name] = 3 + sum(map(_number, inputs))
        if fails_first:
            self.flaky.add(name)
        options = {
            "lane": kind if kind in ("compute", "io") else None,
            "retries": retries,
            "on_error": self.policy[name],
            "timeout": rnd.choice([None, None, 60]),
            "inputs": {"feeds": feeds},
        }
        if "map" in kind:
            self.graph.add(self._items, name=f"{name} items", inputs={"inputs": feeds})
            self.policy[f"{name} items"] = "fail"
            self.items_of.add(f"{name} items")
            self.feeds[f"{name} items"] = feeds
            self.truth[f"{name} items"] = (
                Boom("upstream") if any(isinstance(one, Boom) for one in inputs) else self._items(inputs)
            )
            self.feeds[name] = [f"{name} items"]
            options |= {"over": f"{name} items", "limit": rnd.choice([None, 1, 2]), "each": "item"}
            del options["inputs"]
        self.graph.add(self._function(name, kind, fails=fails, fails_first=fails_first), name=name, **options)

    @staticmethod
    def _items(inputs: list) -> list[int]:
        return list(range(sum(map(_number, inputs)) % 7))

    def _function(self, name: str, kind: str, *, fails: bool, fails_first: bool):
        def work(value: int, item: object = None) -> int:
            with self.lock:
                self.calls[name, item] += 1
                called = self.calls[name, item]
            if self.bomb == name and (run := self.run) is not None:
                run.cancel("inside")
            if fails or (fails_first and called == 1):
                raise Boom(name)
            return value

        async def async_fn(feeds):
            await asyncio.sleep(0)
            return work(3 + sum(map(_number, feeds)))

        async def async_each(item):
            await asyncio.sleep(0)
            return work(item * 2 + 1, item)

        def each(item):
            return work(item * 2 + 1, item)

        def fn(feeds):
            return work(3 + sum(map(_number, feeds)))

        return {"async": async_fn, "async map": async_each, "map": each}.get(kind, fn)

    run = None

    def play(self, executor: GraphExecutor):
        timeout: float | None
        match self.run_ended_by:
            case "deadline":
                timeout = self.random.choice([0.0001, 0.0005, 0.002])
            case "past deadline":
                timeout = 0
            case _:
                timeout = None
        self.run = executor.submit(self.plan, {"x": 1}, timeout=timeout, trace=self.random.random() < 0.2)
        if self.run_ended_by == "cancel outside":
            self.run.cancel("outside")
        return self.run.result(timeout=30)


def _number(value) -> int:
    return sum(value) if isinstance(value, list) else value


def fails(case: Case, name: str) -> bool:
    return isinstance(case.truth[name], Boom)


def check_the_values(case: Case, result) -> None:
    for name, value in result.values.items():
        assert value == case.truth[name], name
    for name, error in result.errors.items():
        assert isinstance(error, Boom), (name, error)
        assert str(error) == name
        # A node that would have succeeded at the next attempt keeps its error when the run ends before that.
        assert str(case.truth[name]) == name or (name in case.flaky and result.status is not RunStatus.OK)


def check_each_was_called_once(case: Case, result) -> None:
    with case.lock:  # a node that was in flight when the run ended may be called just now
        calls = dict(case.calls)
    for (name, item), count in calls.items():
        attempts = 1 + case.plan.rules[case.plan.index[name]].retries
        assert count <= attempts, (name, item)
        assert result.node(name) is not NodeStatus.SKIPPED, name
    for name, value in result.values.items():
        if name in case.items_of:
            continue
        items = value if isinstance(value, list) else [value]
        assert len(items) == sum(called == name for called, _ in calls), name


def check_the_order(case: Case, result) -> None:
    """Nothing has a value whose inputs have none."""
    for name in result.values:
        for feed in case.feeds[name]:
            assert result.node(feed) is NodeStatus.OK, (name, feed)


def check_the_end(case: Case, result) -> None:
    fatal = [
        name for name, policy in case.policy.items() if policy == "fail" and str(case.truth[name]) == name
    ]
    plan: Plan = case.plan
    assert sum(len(result.nodes(status)) for status in NodeStatus) == len(plan)
    match result.status:
        case RunStatus.OK:
            assert result.canceled == []
            wrong = {name for name in plan.names if fails(case, name)}
            assert wrong == set(result.errors) | set(result.skipped)
            assert set(result.errors) == {
                name for name in wrong if str(case.truth[name]) == name and reached(case, name)
            }
        case RunStatus.ERROR:
            assert result.cause in fatal
        case RunStatus.CANCELED:
            assert "cancel" in case.run_ended_by
        case RunStatus.DEADLINE:
            assert "deadline" in case.run_ended_by
    if case.run_ended_by == "nothing":
        assert result.status is (
            RunStatus.ERROR if any(reached(case, name) for name in fatal) else RunStatus.OK
        )
        assert result.canceled == [] or result.status is RunStatus.ERROR
    if case.run_ended_by == "past deadline":
        assert result.status is RunStatus.DEADLINE
        assert not case.calls


def reached(case: Case, name: str) -> bool:
    return not any(fails(case, feed) for feed in case.feeds[name])


@pytest.fixture
def executor():
    with GraphExecutor(compute=3, io=3, tasks=4) as executor:
        yield executor


@pytest.fixture(autouse=True, params=[0.005, 0.00001], ids=["calm", "hectic"])
def switching(request):
    """Threads change every 5 ms by default, so most races never happen. The other half changes 500 times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield request.param_index
    sys.setswitchinterval(before)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(SLICES) if ONLY is None else [0])
def test_a_random_graph_does_what_a_plain_loop_does(executor, part, switching):
    seeds = range(part + switching * SLICES, CASES, SLICES * 2) if ONLY is None else [int(ONLY)]
    for seed in seeds:
        case = Case(seed)
        result = case.play(executor)
        try:
            check_the_values(case, result)
            check_each_was_called_once(case, result)
            check_the_order(case, result)
            check_the_end(case, result)
        except AssertionError as error:
            error.add_note(f"PENSTOCK_SEED={seed}; {case.run_ended_by}; {result!r}")
            raise
