"""
A plan (a compiled graph) and its parts.

`graph_compile.compile_plan` makes a `Plan` once; any number of runs then read it at the same time. A run owns
two flat lists, copied from templates: the values (one slot per node, then the constants, then the
environment) and the pending counts. All other data of a node is in one tuple of the plan, its `Step`, so that
the hot loop reads one object per node and allocates nothing.

Two properties make counting cheap:

- A successor with a single predecessor needs no count: it is ready when that predecessor is done. Only
  *shared* successors (with two or more predecessors) are counted, and only they need a lock.
- The end of the run is one more shared successor, numbered `end`, of all nodes without successors. So no node
has to check whether the run is complete: a count reaches zero.

Nodes are numbered in topological order. So the index order is a valid serial order (the reference in the
tests is a plain loop), and neighbors in the graph are neighbors in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from heapq import heapify, heappop, heappush
from typing import Any, Final, TypeAlias

from penstock.core.text import is_kind, safe_repr


@dataclass(frozen=True, slots=True)
class Env:
    """
    An input that each run provides: `executor.run(plan, {"user_id": 7})`.

    For example:

        g = penstock.Graph(env={"user_id": int})
        g.node(inputs={"key": penstock.Env("user_id")})(load)
    """

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """
    A constant input. It is wrapped, so that a string is not taken for the name of a node.

    For example:

        g.node(inputs={"mode": penstock.Const("fast")})(render)
    """

    value: Any


class Lane(StrEnum):
    """
    The lane in which a node runs.

    For example:

        @g.node(lane=penstock.Lane.IO)  # or lane="io"
        async def profile(user_id: int) -> str: ...
    """

    COMPUTE = "compute"
    IO = "io"
    PROCESS = "process"
    CLUSTER = "cluster"


class Queue(IntEnum):
    """
    The queue in which a node waits: that of its lane. `async def` nodes of the I/O lane have a queue of their
    own, because they wait for its event loop and not for its threads.
    """

    COMPUTE = 0
    IO = 1
    LOOP = 2
    PROCESS = 3
    CLUSTER = 4


#: The queue number of the end of the run, which is in no lane.
NOWHERE: Final = 255


class OnError(StrEnum):
    FAIL = "fail"
    SKIP_DEPENDENTS = "skip_dependents"


class RunStatus(StrEnum):
    """
    How a run of a graph ended: ok, error, canceled or deadline; each is a string.

    For example:

        if result.status == penstock.RunStatus.DEADLINE:
            print("the run took too long")
    """

    OK = "ok"
    ERROR = "error"
    CANCELED = "canceled"
    DEADLINE = "deadline"


class NodeStatus(StrEnum):
    """
    How a node of a run ended; each is a string.

    For example:

        result = executor.run(plan, {"user_id": 7})
        print(result.nodes(penstock.NodeStatus.SKIPPED))
    """

    OK = "ok"
    ERROR = "error"
    SKIPPED = "skipped"  # never called, and never will be
    CANCELED = "canceled"  # in flight when the run ended, called or about to be; its result was dropped


class _Unset:
    """A slot without a value. `None` is a value like any other."""

    def __repr__(self) -> str:
        return "<unset>"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset()

#: The input of one parameter: a slot, several slots collected into a list, or (`ITEM`) the item of a map
#: node.
Feed: TypeAlias = int | tuple[int, ...]
ITEM: Final = -1


def _slots(*feeds: Feed) -> set[int]:
    return {slot for feed in feeds for slot in (feed if isinstance(feed, tuple) else (feed,))}


@dataclass(frozen=True, slots=True)
class Binding:
    """How a node's arguments are made from the values of a run."""

    positional: tuple[Feed, ...]
    keywords: tuple[tuple[str, Feed], ...] = ()

    def arguments(self, values: Sequence[Any], item: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def feed(source: Feed) -> Any:
            if isinstance(source, tuple):
                return [item if slot == ITEM else values[slot] for slot in source]
            return item if source == ITEM else values[source]

        return tuple(map(feed, self.positional)), {name: feed(source) for name, source in self.keywords}

    def slots(self) -> set[int]:
        return _slots(*self.positional, *(source for _, source in self.keywords))


@dataclass(frozen=True, slots=True)
class NodeRules:
    """The options of a node beyond a plain call. Most nodes share one default object."""

    retries: int = 0
    retry_delay: float = 0.0
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    timeout: float | None = None
    skip_dependents: bool = False
    over: Feed | None = None  # of a map node: the slots of its list
    limit: int | None = None  # of a map node: how many items at once

    @property
    def plain(self) -> bool:
        return self.retries == 0 and self.timeout is None and self.over is None

    def slots(self) -> set[int]:
        return set() if self.over is None else _slots(self.over)

    def retry_in(self, attempt: int, error: BaseException) -> float | None:
        """
        Seconds to wait after failed attempt number `attempt` (from 1), doubling. None: that was the last
        attempt.
        """
        if attempt > self.retries or not is_kind(error, self.retry_on):
            return None
        return float(self.retry_delay * 2 ** min(attempt - 1, 16))


#: Values in place of the number of inputs. BOUND: the function takes the list of values itself. CAREFUL: the
#: node needs an attempt of its own (see `NodeAttempts`).
BOUND: Final = 4
CAREFUL: Final = 5

#: (inputs, fn, a, b, c, straight, pushes, shared): all that the hot loop needs to know of a node, in one
#: object. `inputs` is 0 to 3, and a, b, c are their slots; or BOUND or CAREFUL. `straight` is the successor
#: to go on with, ready and of the same queue, or -1; `pushes` are the other successors that are ready now, by
#: queue; `shared` are those whose count must be taken down.
Step: TypeAlias = tuple[
    int, Callable[..., Any], int, int, int, int, tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Plan:
    """
    A compiled graph: immutable, reusable, and run concurrently with itself.

    For example:

        plan = g.compile()  # once
        results = [executor.run(plan, {"user_id": n}) for n in range(10)]
    """

    name: str
    names: tuple[str, ...]
    index: Mapping[str, int]
    functions: tuple[Callable[..., Any], ...]
    bindings: tuple[Binding, ...]
    rules: tuple[NodeRules, ...]
    queues: bytes  # and `NOWHERE` for the end
    predecessors: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    roots: tuple[tuple[int, tuple[int, ...]], ...]
    values: tuple[Any, ...]
    pending: tuple[int, ...]
    env: Mapping[str, int]  # name -> slot
    simple: bool  # whether all nodes are plain calls in worker threads
    tolerant: bool  # whether a node may fail without failing the run
    lanes: tuple[int, ...]  # the queues that its nodes wait in

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        edges = sum(map(len, self.successors))
        return f"<Plan {self.name!r}: {len(self)} nodes, {edges} edges, env {sorted(self.env)}>"

    @property
    def end(self) -> int:
        return len(self.names)

    def lane(self, node: int) -> Lane:
        queue = Queue(self.queues[node])
        return Lane.IO if queue is Queue.LOOP else Lane[queue.name]

    def own_steps(self, watched: bool) -> list[Step]:
        """
        The steps for one run. A copy, if the run may change them: in a `watched` (traced) run no node takes
        the fast path, and in some runs a node may fail alone (see `skip_dependents`). Other runs share the plan's
        steps.
        """
        if watched:
            return [(CAREFUL, *step[1:]) for step in self.steps]
        return list(self.steps)

    def count_done(self, pending: list[int], node: int) -> list[int]:
        """
        Count a node that is done: decrement its successors' counts, and return the successors that are ready
        now (with `end` if the run is complete). Call it once per node, one caller at a time. The hot loop
        repeats this code.
        """
        straight, pushes, shared = self.steps[node][-3:]
        ready = [straight] if straight >= 0 else []
        for _, nodes in pushes:
            ready.extend(nodes)
        for successor in shared:
            pending[successor] -= 1
            if not pending[successor]:
                ready.append(successor)
        return ready

    def skip_dependents(self, steps: list[Step], skipped: dict[int, int], node: int) -> None:
        """
        Skip the dependents of a failed node: enter each descendant into `skipped` with the number of the
        failed node, and make its call do nothing. They still count, so that the run ends when the last other
        node has. None of them can have started, because they all need the failed node, which is counted after
        this.
        """
        stack = [node]
        while stack:
            for successor in self.successors[stack.pop()]:
                if successor not in skipped:
                    skipped[successor] = node
                    steps[successor] = (BOUND, _nothing, *steps[successor][2:])
                    stack.append(successor)


def _nothing(_: list[Any]) -> Any:
    return UNSET


def critical_path(plan: Plan, durations: Mapping[int, float]) -> list[int]:
    """
    The chain of nodes with the longest total duration. The run gets shorter only if this chain does.
    """
    best: list[float] = [0.0] * len(plan)
    before: list[int] = [-1] * len(plan)
    for node, predecessors in enumerate(plan.predecessors):
        chosen = max(predecessors, key=best.__getitem__, default=-1)
        before[node] = chosen
        best[node] = durations.get(node, 0.0) + (best[chosen] if chosen >= 0 else 0.0)
    path: list[int] = []
    node = max(range(len(plan)), key=best.__getitem__, default=-1)
    while node >= 0:
        path.append(node)
        node = before[node]
    return path[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node as its author wrote it. Compiling the graph checks it."""

    fn: Any
    name: Any = None
    inputs: Any = field(default_factory=dict)
    lane: Any = None
    retries: Any = 0
    retry_delay: Any = 0.0
    retry_on: Any = (Exception,)
    timeout: Any = None
    on_error: Any = OnError.FAIL
    maps: bool = False
    over: Any = None
    each: Any = None
    limit: Any = None

    @property
    def title(self) -> str:
        given = self.name if self.name is not None else getattr(self.fn, "__name__", None)
        return (
            given
            if isinstance(given, str) and given
            else safe_repr(given if given is not None else self.fn, 200)
        )


@dataclass(frozen=True, slots=True)
class GraphProblem:
    """One mistake: its node, its kind, what is wrong, and what to change."""

    node: str | None
    kind: str
    text: str
    fix: str

    def __str__(self) -> str:
        where = f"node {self.node!r}: " if self.node is not None else ""
        return f"{where}{self.text}; {self.fix}"


class _Item:
    """The input that stands for a map node's item."""


ITEM_SOURCE: Final = _Item()

#: A node's name, an input of the environment, a constant, or the item of a map.
Leaf: TypeAlias = str | Env | Const | _Item
#: The input of one parameter: one leaf, or several that become a list.
Resolved: TypeAlias = Leaf | tuple[Leaf, ...]


def leaves(source: Resolved) -> tuple[Leaf, ...]:
    return source if isinstance(source, tuple) else (source,)


@dataclass(slots=True)
class Node:
    """A node all of whose inputs exist."""

    name: str
    spec: NodeSpec
    queue: Queue
    rules: NodeRules
    parameters: Mapping[str, inspect.Parameter]
    feeds: dict[str, Resolved] = field(default_factory=dict)  # by parameter, in the function's order
    over: Resolved | None = None

    def feeders(self) -> list[str]:
        """The nodes that this one waits for, each once, in the order of its parameters."""
        sources = [*self.feeds.values(), *([] if self.over is None else [self.over])]
        return list(dict.fromkeys(leaf for s in sources for leaf in leaves(s) if isinstance(leaf, str)))


def cycles(feeders: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """
    One path for each group of nodes that wait for each other, in the direction of the data: a -> b -> a.
    """
    paths: list[list[str]] = []
    remaining = dict(feeders)
    while stuck := remaining.keys() - set(topological(remaining)):
        # Each stuck node waits for another stuck one: walk against the direction of the data until one
        # repeats.
        name, seen = next(name for name in remaining if name in stuck), list[str]()
        while name not in seen:
            seen.append(name)
            name = next(feeder for feeder in remaining[name] if feeder in stuck)
        cycle = seen[seen.index(name) :][::-1]
        first = cycle.index(next(name for name in feeders if name in cycle))
        path = cycle[first:] + cycle[:first]
        paths.append([*path, path[0]])
        remaining = {
            name: [feeder for feeder in names if feeder not in cycle]
            for name, names in remaining.items()
            if name not in cycle
        }
    return paths


def topological(feeders: Mapping[str, Sequence[str]]) -> list[str]:
    """
    The nodes in topological order (Kahn's algorithm), with ties in the author's order, so that a picture and
    a trace read like the code. Nodes that wait for themselves are left out.
    """
    names = list(feeders)
    rank = {name: number for number, name in enumerate(names)}
    waits = {name: len(feeders[name]) for name in names}
    feeds: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for feeder in feeders[name]:
            feeds[feeder].append(name)
    ready = [rank[name] for name in names if not waits[name]]
    heapify(ready)
    order: list[str] = []
    while ready:
        name = names[heappop(ready)]
        order.append(name)
        for fed in feeds[name]:
            waits[fed] -= 1
            if not waits[fed]:
                heappush(ready, rank[fed])
    return order
