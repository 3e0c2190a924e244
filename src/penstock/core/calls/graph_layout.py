"""
The last step of compiling, when nothing can be wrong any more: numbers instead of names.

All that a run needs of a node goes into one tuple, because a big graph is bound by memory: with a closure per
node, which is a function, a tuple and a cell for each variable, 100,000 nodes cost almost twice as much each
as 1,000.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from penstock.core.calls.graph_plan import (
    BOUND,
    CAREFUL,
    ITEM,
    NOWHERE,
    UNSET,
    Binding,
    Const,
    Env,
    Feed,
    Leaf,
    Node,
    Plan,
    Queue,
    Resolved,
    Step,
)

_Call: TypeAlias = tuple[int, Callable[..., Any], int, int, int]  # the first five fields of a step


def lay_out(name: str, order: Sequence[tuple[Node, Sequence[str]]], env: Iterable[str]) -> Plan:
    """`order`: the nodes, each after those that feed it, with the names of its feeders."""
    placed = [node for node, _ in order]
    index = {node.name: number for number, node in enumerate(placed)}
    # The same int objects everywhere: a hundred thousand more would compete for the cache.
    numbers = list(index.values())
    slots = _Slots(index, env)
    bindings = tuple(slots.binding(node) for node in placed)
    rules = tuple(
        node.rules if node.over is None else replace(node.rules, over=slots.feed(node.over))
        for node in placed
    )
    predecessors = tuple(tuple(sorted(map(index.__getitem__, feeders))) for _, feeders in order)
    queues = bytes([*(node.queue for node in placed), NOWHERE])
    successors = _successors(numbers, predecessors)
    functions = tuple(node.spec.fn for node in placed)
    calls = [
        _call(fn, binding) if rule.plain else (CAREFUL, fn, -1, -1, -1)
        for fn, binding, rule in zip(functions, bindings, rules, strict=True)
    ]
    return Plan(
        name=name,
        names=tuple(index),
        index=MappingProxyType(index),
        functions=functions,
        bindings=bindings,
        rules=rules,
        queues=queues,
        predecessors=predecessors,
        successors=successors,
        steps=_steps(calls, queues, predecessors, successors),
        roots=_by_queue([node for node in numbers if not predecessors[node]], queues),
        values=tuple(slots.values),
        pending=(*map(len, predecessors), sum(not fed for fed in successors)),
        env=MappingProxyType(slots.env),
        tolerant=any(rule.skip_dependents for rule in rules),
        simple=all(rule.plain for rule in rules) and set(queues[:-1]) <= {Queue.COMPUTE, Queue.IO},
        lanes=tuple(sorted(set(queues[:-1]))),
    )


def cycles(feeders: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """
    One path for each group of nodes that wait for each other, in the direction of the data: a -> b -> a.
    """
    paths: list[list[str]] = []
    remaining = dict(feeders)
    while stuck := remaining.keys() - set(topological(remaining)):
        # Each stuck node waits for another stuck one: walk against the data until one comes up twice.
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
    Kahn's algorithm with the author's order as the tie-breaker, so that a picture and a trace read as the
    code does. Nodes that wait for themselves are left out.
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


class _Slots:
    """
    Allocates slots in the list of values: the nodes first, the end of the run, then the environment and
    constants.
    """

    def __init__(self, index: Mapping[str, int], env: Iterable[str]) -> None:
        self._index = index
        self.values: list[Any] = [UNSET] * (len(index) + 1)
        self.env: dict[str, int] = {name: self._add(UNSET) for name in env}

    def _add(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def binding(self, node: Node) -> Binding:
        positional: list[Feed] = []
        keywords: list[tuple[str, Feed]] = []
        for name, source in node.feeds.items():
            kind = node.parameters[name].kind if name in node.parameters else inspect.Parameter.VAR_KEYWORD
            if kind is inspect.Parameter.VAR_POSITIONAL:
                many = source if isinstance(source, tuple) else (source,)
                positional.extend(self._leaf(leaf) for leaf in many)
            elif kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
                positional.append(self.feed(source))
            else:
                keywords.append((name, self.feed(source)))
        return Binding(tuple(positional), tuple(keywords))

    def feed(self, source: Resolved) -> Feed:
        return tuple(map(self._leaf, source)) if isinstance(source, tuple) else self._leaf(source)

    def _leaf(self, leaf: Leaf) -> int:
        match leaf:
            case str():
                return self._index[leaf]
            case Env(name=name):
                return self.env[name]
            case Const(value=value):
                return self._add(value)
            case _:
                return ITEM


def _successors(numbers: Sequence[int], predecessors: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Those with the longest way still to go come first: a worker goes straight on with the first."""
    successors: list[list[int]] = [[] for _ in predecessors]
    for node, feeders in zip(numbers, predecessors, strict=True):
        for feeder in feeders:
            successors[feeder].append(node)
    height = [0] * len(successors)
    for node in reversed(range(len(successors))):
        following = successors[node]
        following.sort(key=lambda successor: -height[successor])
        height[node] = 1 + height[following[0]] if following else 0
    return tuple(map(tuple, successors))


def _steps(
    calls: Sequence[_Call],
    queues: bytes,
    predecessors: Sequence[Sequence[int]],
    successors: Sequence[Sequence[int]],
) -> tuple[Step, ...]:
    end = len(calls)
    steps: list[Step] = []
    for node, call in enumerate(calls):
        solo = [one for one in successors[node] if len(predecessors[one]) == 1]
        straight = next((one for one in solo if queues[one] == queues[node]), -1)
        shared = tuple(one for one in successors[node] if len(predecessors[one]) > 1)
        pushes = _by_queue([one for one in solo if one != straight], queues)
        steps.append((*call, straight, pushes, shared if successors[node] else (end,)))
    return tuple(steps)


def _by_queue(nodes: Iterable[int], queues: bytes) -> tuple[tuple[int, tuple[int, ...]], ...]:
    by_queue: dict[int, list[int]] = {}
    for node in nodes:
        by_queue.setdefault(queues[node], []).append(node)
    return tuple((queue, tuple(members)) for queue, members in by_queue.items())


def _call(fn: Callable[..., Any], binding: Binding) -> _Call:
    """The call of a node. Up to three inputs, which most nodes have, are read by the hot loop itself."""
    if binding.keywords:
        return BOUND, _general_call(fn, binding), -1, -1, -1
    match binding.positional:
        case ():
            return 0, fn, -1, -1, -1
        case (int(a),):
            return 1, fn, a, -1, -1
        case (int(a), int(b)):
            return 2, fn, a, b, -1
        case (int(a), int(b), int(c)):
            return 3, fn, a, b, c
    return BOUND, _general_call(fn, binding), -1, -1, -1


def _general_call(fn: Callable[..., Any], binding: Binding) -> Callable[[list[Any]], Any]:
    """Two forms that may have many inputs, made quick; and one for everything."""
    slots = [feed for feed in binding.positional if isinstance(feed, int)]
    match binding:
        case Binding(positional=((_, _, *_) as gathered,), keywords=()):
            pick = itemgetter(*gathered)
            return lambda values: fn(list(pick(values)))
        case Binding(positional=many, keywords=()) if len(slots) == len(many):
            pick = itemgetter(*slots)
            return lambda values: fn(*pick(values))

    def call(values: list[Any]) -> Any:
        args, kwargs = binding.arguments(values)
        return fn(*args, **kwargs)

    return call
