"""
From the graph as written to a `Plan`, or to one GraphError with all problems.

Compiling does not stop at the first mistake: each check notes its problems and the next check goes on with
the rest, so that an author with five mistakes reads five lines once instead of one line five times. Every
problem names its node and says what to change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType
from typing import Any

from penstock.core.calls.graph_layout import cycles, lay_out, topological
from penstock.core.calls.graph_plan import (
    ITEM_SOURCE,
    Const,
    Env,
    GraphProblem,
    Lane,
    Leaf,
    Node,
    NodeRules,
    NodeSpec,
    OnError,
    Plan,
    Queue,
    Resolved,
)
from penstock.core.calls.graph_types import TypeCheck
from penstock.core.errors import GraphError
from penstock.core.text import safe_repr, safe_str


def compile_plan(name: str, specs: Sequence[NodeSpec], env: Mapping[str, Any]) -> Plan:
    """`env` maps each name that runs bring along to its type hint, or to Any."""
    compiler = _Compiler(specs, env)
    nodes = compiler.nodes()
    feeders = {node: nodes[node].feeders() for node in nodes}
    order = topological(feeders)
    problems = [*compiler.problems, *TypeCheck(nodes, env).problems()]
    if len(order) < len(nodes):
        problems += _cycle_problems(feeders)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"graph {name!r} has {count}:", *(f"  - {problem}" for problem in problems)]
        raise GraphError("\n".join(lines), problems=problems)
    return lay_out(name, [(nodes[node], feeders[node]) for node in order], env)


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
    """Collects the problems; each method is one check and goes on after a mistake."""

    def __init__(self, specs: Sequence[NodeSpec], env: Mapping[str, Any]) -> None:
        self._specs = specs
        self._env = env
        self._by_function: dict[int, str] = {}
        self._signatures: dict[tuple[int, bool], Mapping[str, inspect.Parameter] | None] = {}
        self.problems: list[GraphProblem] = []

    def nodes(self) -> dict[str, Node]:
        nodes = self._named()
        if not nodes and not self.problems:
            self._note(None, "empty", "it has no nodes", "add one with @graph.node or graph.add(...)")
        for node in nodes.values():
            self._bind(node, nodes)
        return nodes

    def _note(self, node: str | None, kind: str, text: str, fix: str) -> None:
        self.problems.append(GraphProblem(node, kind, text, fix))

    def _named(self) -> dict[str, Node]:
        nodes: dict[str, Node] = {}
        for spec in self._specs:
            name = spec.title
            if not self._name_is_good(spec, name, nodes):
                continue
            queue, wrong_lane = checked_queue(name, spec)
            rules, wrong_options = checked_rules(name, spec)
            self.problems += [*wrong_lane, *wrong_options]
            nodes[name] = Node(name, spec, queue, rules, self._parameters(name, spec))
            if callable(spec.fn):
                self._by_function.setdefault(id(spec.fn), name)
        return nodes

    def _name_is_good(self, spec: NodeSpec, name: str, nodes: Mapping[str, Node]) -> bool:
        before = len(self.problems)
        if not callable(spec.fn):
            self._note(name, "function", f"{safe_repr(spec.fn, 200)} cannot be called", "give it a function")
        elif spec.name is not None and (not isinstance(spec.name, str) or not spec.name):
            self._note(
                name,
                "name",
                f"{safe_repr(spec.name, 200)} is not a name",
                "give name= a string that is not empty",
            )
        elif spec.name is None and (not hasattr(spec.fn, "__name__") or spec.fn.__name__ == "<lambda>"):
            self._note(name, "name", "its function has no name of its own", "give it one with name=...")
        elif name in nodes:
            self._note(
                name, "duplicate", "two nodes have this name", "give one of them another with name=..."
            )
        elif name in self._env:
            self._note(name, "duplicate", "the environment has an input of this name", "rename one of them")
        return len(self.problems) == before

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

    def _bind(self, node: Node, nodes: Mapping[str, Node]) -> None:
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
            node.over = self._resolve(node, "over", node.spec.over, nodes)
        each = self._each(node)
        for parameter in node.parameters.values():
            if parameter.name == each:
                node.feeds[each] = ITEM_SOURCE
            elif parameter.name in inputs:
                self._feed(node, parameter.name, inputs[parameter.name], nodes)
            elif parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                self._feed_by_name(node, parameter, nodes)
        self._bind_extra(node, nodes)

    def _each(self, node: Node) -> str | None:
        """
        The parameter of a map node that gets the item: the named one, or the first that nothing else feeds.
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
            self._note(
                node.name,
                "map",
                "it has no parameter for the item",
                "give its function one, or name it by each=",
            )
            return None
        return free[0]

    def _bind_extra(self, node: Node, nodes: Mapping[str, Node]) -> None:
        """
        Inputs for parameters that the signature does not name: a mistake, unless the function takes any
        keyword.
        """
        takes_any = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in node.parameters.values()
        )
        for name, source in node.spec.inputs.items():
            if name in node.parameters:
                continue
            if takes_any:
                self._feed(node, name, source, nodes)
            else:
                self._unknown_parameter(node, "inputs name", name)

    def _unknown_parameter(self, node: Node, where: str, name: str) -> None:
        if not node.parameters:
            fix = "its function has no parameters at all"
        else:
            fix = _did_you_mean(name, node.parameters) or f"it has {_listed(node.parameters)}"
        self._note(node.name, "arity", f"{where} {name!r}, which is no parameter of its function", fix)

    def _feed_by_name(self, node: Node, parameter: inspect.Parameter, nodes: Mapping[str, Node]) -> None:
        name, default = parameter.name, parameter.default
        if isinstance(default, (Env, Const)):
            self._feed(node, name, default, nodes)
        elif name in nodes:
            node.feeds[name] = name
        elif name in self._env:
            node.feeds[name] = Env(name)
        elif default is not inspect.Parameter.empty:
            node.feeds[name] = Const(default)
        else:
            hint = _did_you_mean(name, [*nodes, *self._env])
            fix = f"add a node of that name, declare it with graph.env({name!r}), or bind it by inputs={{{name!r}: ...}}"
            self._note(
                node.name,
                "unknown input",
                f"its parameter {name!r} matches no node and no input of the environment",
                f"{hint}; or {fix}" if hint else fix,
            )

    def _feed(self, node: Node, parameter: str, source: Any, nodes: Mapping[str, Node]) -> None:
        resolved = self._resolve(node, parameter, source, nodes)
        if resolved is not None:
            node.feeds[parameter] = resolved

    def _resolve(self, node: Node, parameter: str, source: Any, nodes: Mapping[str, Node]) -> Resolved | None:
        if not isinstance(source, (list, tuple)):
            return self._leaf(node, parameter, source, nodes)
        resolved = [self._leaf(node, parameter, part, nodes) for part in source]
        return tuple(leaf for leaf in resolved if leaf is not None)

    def _leaf(self, node: Node, parameter: str, source: Any, nodes: Mapping[str, Node]) -> Leaf | None:
        match source:
            case Const():
                return source
            case Env(name=name):
                if name in self._env:
                    return source
                fix = _did_you_mean(name, self._env) or f"declare it with graph.env({name!r})"
                self._note(
                    node.name,
                    "unknown input",
                    f"{parameter!r} reads Env({name!r}), which is not declared",
                    fix,
                )
                return None
            case str():
                return self._named_leaf(node, parameter, source, nodes)
        if callable(source) and id(source) in self._by_function:
            return self._by_function[id(source)]
        what = f"{parameter!r} is given {safe_repr(source, 200)}, which is no node"
        if callable(source):
            self._note(node.name, "unknown input", what, "add that function to the graph first")
        else:
            self._note(
                node.name, "unknown input", what, f"for a fixed value write Const({safe_repr(source, 200)})"
            )
        return None

    def _named_leaf(self, node: Node, parameter: str, name: str, nodes: Mapping[str, Node]) -> Leaf | None:
        if name in nodes:
            return name
        if name in self._env:
            return Env(name)
        fix = (
            _did_you_mean(name, [*nodes, *self._env])
            or f"add that node, or write Const({name!r}) for the text itself"
        )
        self._note(
            node.name, "unknown input", f"{parameter!r} is fed by {name!r}, and there is no such node", fix
        )
        return None


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


_PLAIN = NodeRules()
_QUEUES = {
    Lane.COMPUTE: Queue.COMPUTE,
    Lane.IO: Queue.IO,
    Lane.PROCESS: Queue.PROCESS,
    Lane.CLUSTER: Queue.CLUSTER,
}


def checked_queue(name: str, spec: NodeSpec) -> tuple[Queue, list[GraphProblem]]:
    """The lane comes from the function (`async def`: io, `def`: compute) unless the node names one."""
    if _yields(spec.fn):
        text = "its function yields, so its value could be read by one reader only"
        return Queue.COMPUTE, [GraphProblem(name, "function", text, "return a list instead")]
    waits = _is_async(spec.fn)
    if spec.lane is not None and spec.lane not in _QUEUES:
        return Queue.COMPUTE, [_not_one_of(name, "lane", spec.lane, [str(lane) for lane in Lane])]
    if waits and spec.lane not in (None, Lane.IO):
        text = f"an async def cannot run on the {spec.lane} lane"
        return Queue.LOOP, [GraphProblem(name, "lane", text, "leave lane= out, or make it a plain def")]
    if waits:
        return Queue.LOOP, []
    return _QUEUES[Lane(spec.lane or Lane.COMPUTE)], []


def checked_rules(name: str, spec: NodeSpec) -> tuple[NodeRules, list[GraphProblem]]:
    if _given(spec) == _GIVEN_NOTHING:
        return _PLAIN, []
    wrong: list[GraphProblem] = []

    def check(good: bool, option: str, value: object, fix: str) -> None:
        if not good:
            wrong.append(
                GraphProblem(name, "option", f"{option}={safe_repr(value, 200)} makes no sense", fix)
            )

    errors = spec.retry_on if isinstance(spec.retry_on, tuple) else (spec.retry_on,)
    check(
        _is_int(spec.retries) and spec.retries >= 0, "retries", spec.retries, "give a whole number from 0 up"
    )
    check(_is_seconds(spec.retry_delay), "retry_delay", spec.retry_delay, "give seconds, from 0 up")
    check(all(map(_is_exception, errors)), "retry_on", spec.retry_on, "give exception classes")
    check(
        spec.timeout is None or (_is_seconds(spec.timeout) and spec.timeout > 0),
        "timeout",
        spec.timeout,
        "give seconds above 0, or None for no timeout",
    )
    check(
        spec.limit is None or (_is_int(spec.limit) and spec.limit >= 1),
        "limit",
        spec.limit,
        "give a whole number from 1 up, or None for what the lane allows",
    )
    if spec.on_error not in list(OnError):
        wrong.append(_not_one_of(name, "on_error", spec.on_error, [str(choice) for choice in OnError]))
    if wrong:
        return _PLAIN, wrong
    return NodeRules(
        retries=spec.retries,
        retry_delay=spec.retry_delay,
        retry_on=errors,
        timeout=spec.timeout,
        skip_dependents=spec.on_error == OnError.SKIP_DEPENDENTS,
        limit=spec.limit,
    ), []


def _given(spec: NodeSpec) -> tuple[Any, ...]:
    return spec.retries, spec.retry_delay, spec.retry_on, spec.timeout, spec.on_error, spec.limit


_GIVEN_NOTHING = _given(NodeSpec(fn=None))


def _not_one_of(name: str, option: str, given: object, choices: list[str]) -> GraphProblem:
    close = get_close_matches(safe_str(given, 200), choices, n=1)
    fix = f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(map(repr, choices))}"
    return GraphProblem(name, "option", f"there is no {option}={safe_repr(given, 200)}", fix)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _is_async(fn: Callable[..., Any]) -> bool:
    # Nearly all are plain functions, for which this costs a tenth of `inspect`.
    if isinstance(fn, FunctionType) and not fn.__dict__:
        return bool(fn.__code__.co_flags & inspect.CO_COROUTINE)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004  # an object's own


def _yields(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, FunctionType):
        return bool(fn.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR))
    return inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
