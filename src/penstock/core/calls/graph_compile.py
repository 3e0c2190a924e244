"""
Compiles a graph into a `Plan`, or raises one GraphError with all problems.

Compiling does not stop at the first mistake: each check notes its problems, and the next check continues, so
that an author sees all mistakes at once. Every problem names its node and says what to change.

The last step replaces names by numbers. All data of a node that a run needs is in one tuple, because memory
limits big graphs: with a closure per node (a function, a tuple and a cell for each variable), each of 100,000
nodes cost almost twice as much as each of 1,000.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from penstock.core.calls.graph_checks import TypeCheck, checked_queue, checked_rules, did_you_mean
from penstock.core.calls.graph_plan import (
    BOUND,
    CAREFUL,
    ITEM,
    ITEM_SOURCE,
    NOWHERE,
    UNSET,
    Binding,
    Const,
    Env,
    Feed,
    GraphProblem,
    Leaf,
    Node,
    NodeSpec,
    Plan,
    Queue,
    Resolved,
    Step,
    cycles,
    topological,
)
from penstock.core.errors import GraphError
from penstock.core.text import safe_repr


def compile_plan(name: str, specs: Sequence[NodeSpec], env: Mapping[str, Any]) -> Plan:
    """Compile a graph. `env`: the type hint of each input of the environment, or Any."""
    compiler = _Compiler(specs, env)
    nodes = compiler.nodes
    feeders = {node: nodes[node].feeders() for node in nodes}
    order = topological(feeders)
    problems = [*compiler.problems, *TypeCheck(nodes, env).problems()]
    if len(order) < len(nodes):
        problems += _cycle_problems(feeders)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"graph {name!r} has {count}:", *(f"  - {problem}" for problem in problems)]
        raise GraphError("\n".join(lines), problems=problems)
    return _lay_out(name, [(nodes[node], feeders[node]) for node in order], env)


def _cycle_problems(feeders: Mapping[str, Sequence[str]]) -> list[GraphProblem]:
    return [
        GraphProblem(
            path[0],
            "cycle",
            f"it waits for itself: {' -> '.join(path)}",
            f"take {path[-2]!r} out of the inputs of {path[0]!r}, or compute one of them from something else",
        )
        for path in cycles(feeders)
    ]


class _Compiler:
    """Collects the problems. Each method is one check and continues after a mistake."""

    def __init__(self, specs: Sequence[NodeSpec], env: Mapping[str, Any]) -> None:
        self._env = env
        self._by_function: dict[int, str] = {}
        self._signatures: dict[tuple[int, bool], Mapping[str, inspect.Parameter] | None] = {}
        self.problems: list[GraphProblem] = []
        self.nodes: dict[str, Node] = {}
        for spec in specs:
            self._add(spec)
        if not self.nodes and not self.problems:
            self._note(None, "empty", "it has no nodes", "add one with @graph.node or graph.add(...)")
        for node in self.nodes.values():
            self._bind(node)

    def _note(self, node: str | None, kind: str, text: str, fix: str) -> None:
        self.problems.append(GraphProblem(node, kind, text, fix))

    def _add(self, spec: NodeSpec) -> None:
        name = spec.title
        problem = self._name_problem(spec, name)
        if problem is not None:
            self._note(name, *problem)
            return
        queue = checked_queue(name, spec, self.problems)
        rules = checked_rules(name, spec, self.problems)
        self.nodes[name] = Node(name, spec, queue, rules, self._parameters(name, spec))
        self._by_function.setdefault(id(spec.fn), name)

    def _name_problem(self, spec: NodeSpec, name: str) -> tuple[str, str, str] | None:
        """The kind, text and fix of a problem with the node's function or name. None: there is none."""
        fn, given = spec.fn, spec.name
        if not callable(fn):
            return "function", f"{safe_repr(fn, 200)} cannot be called", "give it a function"
        if given is not None and (not isinstance(given, str) or not given):
            return "name", f"{safe_repr(given, 200)} is not a name", "give name= a string that is not empty"
        if given is None and (not hasattr(fn, "__name__") or fn.__name__ == "<lambda>"):
            return "name", "its function has no name of its own", "give it one with name=..."
        if name in self.nodes:
            return "duplicate", "two nodes have this name", "give one of them another with name=..."
        if name in self._env:
            return "duplicate", "the environment has an input of this name", "rename one of them"
        return None

    def _parameters(self, name: str, spec: NodeSpec) -> Mapping[str, inspect.Parameter]:
        # Bound methods are made anew at each access; their functions are the same.
        key = (id(getattr(spec.fn, "__func__", spec.fn)), hasattr(spec.fn, "__func__"))
        if key not in self._signatures:
            try:
                self._signatures[key] = inspect.signature(spec.fn).parameters
            except (TypeError, ValueError):
                self._signatures[key] = None
        parameters = self._signatures[key]
        if parameters is None:
            self._note(name, "signature", "its parameters cannot be read", "wrap the function in a def")
            return {}
        return parameters

    def _bind(self, node: Node) -> None:
        inputs = node.spec.inputs
        if not isinstance(inputs, Mapping):
            self._note(
                node.name,
                "inputs",
                f"inputs={safe_repr(inputs, 200)} is not a mapping",
                'write inputs={"parameter": "node"}',
            )
            return
        if node.spec.maps:
            node.over = self._resolve(node, "over", node.spec.over)
        each = self._each(node)
        for parameter in node.parameters.values():
            if parameter.name == each:
                node.feeds[each] = ITEM_SOURCE
            elif parameter.name in inputs:
                self._feed(node, parameter.name, inputs[parameter.name])
            elif parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                self._feed_by_name(node, parameter)
        self._bind_extra(node)

    def _each(self, node: Node) -> str | None:
        """
        The parameter of a map node for the item: the named one, or the first without another input.
        """
        spec = node.spec
        if not spec.maps:
            return None
        if spec.each is not None:
            if spec.each in node.parameters:
                return str(spec.each)
            self._unknown_parameter(node, "each=", spec.each)
            return None
        free = [
            p.name
            for p in node.parameters.values()
            if p.name not in spec.inputs and p.kind != inspect.Parameter.VAR_KEYWORD
        ]
        if not free:
            fix = "give its function one, or name it by each="
            self._note(node.name, "map", "it has no parameter for the item", fix)
            return None
        return free[0]

    def _bind_extra(self, node: Node) -> None:
        """
        Bind inputs for parameters that the signature does not name: a mistake, unless the function takes any
        keyword.
        """
        takes_any = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in node.parameters.values()
        )
        for name, source in node.spec.inputs.items():
            if name in node.parameters:
                continue
            if takes_any:
                self._feed(node, name, source)
            else:
                self._unknown_parameter(node, "inputs name", name)

    def _unknown_parameter(self, node: Node, where: str, name: str) -> None:
        if not node.parameters:
            fix = "its function has no parameters at all"
        else:
            fix = did_you_mean(name, node.parameters) or f"it has {_listed(node.parameters)}"
        self._note(node.name, "arity", f"{where} {name!r}, which is no parameter of its function", fix)

    def _feed_by_name(self, node: Node, parameter: inspect.Parameter) -> None:
        name, default = parameter.name, parameter.default
        if isinstance(default, (Env, Const)):
            self._feed(node, name, default)
        elif name in self.nodes:
            node.feeds[name] = name
        elif name in self._env:
            node.feeds[name] = Env(name)
        elif default is not inspect.Parameter.empty:
            node.feeds[name] = Const(default)
        else:
            hint = did_you_mean(name, [*self.nodes, *self._env])
            fix = f"add a node of that name, declare it with graph.env({name!r}), or bind it by inputs={{{name!r}: ...}}"
            text = f"its parameter {name!r} matches no node and no input of the environment"
            self._note(node.name, "unknown input", text, f"{hint}; or {fix}" if hint else fix)

    def _feed(self, node: Node, parameter: str, source: Any) -> None:
        resolved = self._resolve(node, parameter, source)
        if resolved is not None:
            node.feeds[parameter] = resolved

    def _resolve(self, node: Node, parameter: str, source: Any) -> Resolved | None:
        if not isinstance(source, (list, tuple)):
            return self._leaf(node, parameter, source)
        resolved = [self._leaf(node, parameter, part) for part in source]
        return tuple(leaf for leaf in resolved if leaf is not None)

    def _leaf(self, node: Node, parameter: str, source: Any) -> Leaf | None:
        match source:
            case Const():
                return source
            case Env(name=name):
                if name in self._env:
                    return source
                text = f"{parameter!r} reads Env({name!r}), which is not declared"
                fix = did_you_mean(name, self._env) or f"declare it with graph.env({name!r})"
            case str(name):
                if name in self.nodes or name in self._env:
                    return name if name in self.nodes else Env(name)
                text = f"{parameter!r} is fed by {name!r}, and there is no such node"
                fix = did_you_mean(name, [*self.nodes, *self._env])
                fix = fix or f"add that node, or write Const({name!r}) for the text itself"
            case _:
                if callable(source) and id(source) in self._by_function:
                    return self._by_function[id(source)]
                given = safe_repr(source, 200)
                text = f"{parameter!r} is given {given}, which is no node"
                fix = f"for a fixed value write Const({given})"
                if callable(source):
                    fix = "add that function to the graph first"
        self._note(node.name, "unknown input", text, fix)
        return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


# Laying out a graph without problems: numbers instead of names

_Call: TypeAlias = tuple[int, Callable[..., Any], int, int, int]  # the first five fields of a step


def _lay_out(name: str, order: Sequence[tuple[Node, Sequence[str]]], env: Iterable[str]) -> Plan:
    """`order`: the nodes, each after those that feed it, with the names of its feeders."""
    placed = [node for node, _ in order]
    index = {node.name: number for number, node in enumerate(placed)}
    # Use the same int objects everywhere: a hundred thousand more would compete for the cache.
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
        simple=all(rule.plain for rule in rules) and set(queues[:-1]) <= {Queue.COMPUTE, Queue.IO},
        tolerant=any(rule.skip_dependents for rule in rules),
        lanes=tuple(sorted(set(queues[:-1]))),
    )


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
    """The successors of each node, those with the longest path first: a worker continues with the first."""
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
    """The call of a node. The hot loop itself reads up to three inputs, which are enough for most nodes."""
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
    """A call with any inputs: two fast forms for common cases, and a general one."""
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
