"""
Checks of one node or one edge of a graph: wrong options, and type hints that contradict each other.

Only certain contradictions of hints are reported, because a false alarm would stop a correct graph. This is
not a type checker. It accepts hints that it cannot decide (type variables, protocols, hints that cannot be
evaluated), and a wider type for a narrower one, because the value may fit. It reports obvious mistakes: a
`str` for an `int`, a `list[str]` for a `list[float]`.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum
from types import FunctionType
from typing import Any, Union, get_args, get_origin

from penstock.core.calls.graph_plan import (
    Const,
    Env,
    GraphProblem,
    Lane,
    Leaf,
    Node,
    NodeRules,
    NodeSpec,
    OnError,
    Queue,
    leaves,
)
from penstock.core.text import safe_repr, safe_str

#: The numeric tower of PEP 484, and what type checkers accept for `bytes`.
_ALSO = {float: (int,), complex: (int, float), bytes: (bytearray, memoryview)}
_UNKNOWN = Any


class TypeCheck:
    """Finds every edge of a graph whose two ends contradict each other."""

    def __init__(self, nodes: Mapping[str, Node], env: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._env = dict(env)
        self._hints: dict[int, dict[str, Any]] = {}

    def problems(self) -> Iterator[GraphProblem]:
        for node in self._nodes.values():
            hints = self._hints_of(node)
            for parameter, source in node.feeds.items():
                wanted = hints.get(parameter, _UNKNOWN)
                if isinstance(source, tuple):
                    wanted = item_hint(wanted)
                if wanted is _UNKNOWN:
                    continue
                for leaf in leaves(source):
                    yield from self._edge(node, parameter, leaf, wanted)
            yield from self._map(node)

    def _edge(self, node: Node, parameter: str, leaf: Leaf, wanted: Any) -> Iterator[GraphProblem]:
        match leaf:
            case Const(value=value):
                wrong, source = value_clash(value, wanted), f" and gets the constant {safe_repr(value, 200)}"
            case Env(name=name):
                made = self._env[name]
                wrong, source = clash(made, wanted), f", but Env({name!r}) is {hint_text(made)}"
                if made is _UNKNOWN:
                    self._env[name] = wanted  # the first hint decides an undeclared type
            case str():
                made = self._result(leaf)
                wrong, source = clash(made, wanted), f", but node {leaf!r} returns {hint_text(made)}"
            case _:
                made = item_hint(self._over(node))
                wrong, source = clash(made, wanted), f", but the items it maps over are {hint_text(made)}"
        if wrong:
            text = f"{parameter!r} wants {hint_text(wanted)}{source}"
            fix = f"change the hint of {parameter!r}, or feed it from something else"
            yield GraphProblem(node.name, "types", text, fix)

    def _map(self, node: Node) -> Iterator[GraphProblem]:
        over = self._over(node)
        if over is _UNKNOWN:
            return
        if clash(over, collections.abc.Iterable) or _plain(over) in (str, bytes):
            text = f"it maps over {hint_text(over)}"
            yield GraphProblem(
                node.name, "types", text, "map over a list, or any iterable that is not a text"
            )

    def _over(self, node: Node) -> Any:
        match node.over:
            case Const(value=value):
                return type(value)
            case Env(name=name):
                return self._env[name]
            case str(name):
                return self._result(name)
            case _:
                return _UNKNOWN

    def _result(self, name: str) -> Any:
        node = self._nodes[name]
        made = self._hints_of(node).get("return", _UNKNOWN)
        return list_of(made) if node.spec.maps else made

    def _hints_of(self, node: Node) -> dict[str, Any]:
        fn = node.spec.fn
        key = id(getattr(fn, "__func__", fn))
        if key not in self._hints:
            self._hints[key] = hints_of(fn)
        return self._hints[key]


def hints_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """
    The hints of parameters and `return`; empty where they cannot be evaluated (for example a name under
    TYPE_CHECKING).
    """
    target: Any = fn
    if isinstance(fn, FunctionType) and not fn.__annotations__:
        return {}
    if inspect.isclass(fn):
        target = fn.__init__
    elif not (inspect.isroutine(fn) or hasattr(fn, "__annotations__")):
        target = type(fn).__call__
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # noqa: BLE001  # evaluating hints runs user code, which may raise anything
        return {}
    if inspect.isclass(fn):
        hints["return"] = fn
    return hints


def clash(produced: Any, wanted: Any) -> bool:
    """Whether certainly no value of type `produced` fits `wanted`."""
    produced, wanted = _plain(produced), _plain(wanted)
    if _open(produced) or _open(wanted):
        return False
    pairs = [(made, expected) for made in _choices(produced) for expected in _choices(wanted)]
    if pairs != [(produced, wanted)]:
        return all(clash(made, expected) for made, expected in pairs)
    made, expected = _class(produced), _class(wanted)
    if made is None or expected is None or _is_protocol(made) or _is_protocol(expected):
        return False
    if not _related(made, expected):
        return True
    return _parameters_clash(produced, wanted)


def value_clash(value: Any, wanted: Any) -> bool:
    """The same for a constant."""
    wanted = _plain(wanted)
    if _open(wanted) or isinstance(value, (FunctionType, type)):
        return False
    if _is_union(wanted):
        return all(value_clash(value, part) for part in get_args(wanted))
    if get_origin(wanted) is typing.Literal:
        return value not in get_args(wanted)
    expected = _class(wanted)
    if expected is None or _is_protocol(expected) or isinstance(value, expected):
        return False
    # NumPy's scalars and the like count as the numbers that they convert to.
    stand_in = {int: "__index__", float: "__float__", complex: "__complex__"}.get(expected)
    return not (stand_in and hasattr(value, stand_in)) and clash(type(value), expected)


def item_hint(container: Any) -> Any:
    """The hint of a container's items, if its hint has one."""
    container = _plain(container)
    arguments = get_args(container)
    kind = _class(container)
    if kind is None or not arguments or _is_union(container):
        return _UNKNOWN
    if kind is tuple:
        return arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else _UNKNOWN
    if issubclass(kind, collections.abc.Iterable) and len(arguments) == 1:
        return arguments[0]
    return _UNKNOWN


def list_of(hint: Any) -> Any:
    return list if hint is _UNKNOWN else list[hint]


def hint_text(hint: Any) -> str:
    return (
        hint.__name__
        if isinstance(hint, type) and not get_args(hint)
        else safe_str(hint, 200).replace("typing.", "")
    )


def _plain(hint: Any) -> Any:
    """The hint without Annotated, Final and NewType; None becomes its type."""
    while True:
        if get_origin(hint) in (typing.Annotated, typing.Final, typing.ClassVar):
            hint = get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            return type(None) if hint is None else hint


def _open(hint: Any) -> bool:
    return hint is _UNKNOWN or hint is object or isinstance(hint, (typing.TypeVar, typing.ParamSpec, str))


def _choices(hint: Any) -> tuple[Any, ...]:
    """The members of a union, and the types of a Literal's values; any other hint is its own only choice."""
    if get_origin(hint) is typing.Literal:
        return tuple({type(value) for value in get_args(hint)})
    return get_args(hint) if _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _class(hint: Any) -> type | None:
    origin = get_origin(hint) or hint
    return origin if isinstance(origin, type) else None


def _is_protocol(kind: type) -> bool:
    # The collection ABCs are structural too, but support issubclass; a Protocol may not.
    return bool(getattr(kind, "_is_protocol", False))


def _related(made: type, expected: type) -> bool:
    try:
        return (
            issubclass(made, expected)
            or issubclass(expected, made)
            or issubclass(made, _ALSO.get(expected, ()))
        )
    except TypeError:
        return True


def _parameters_clash(produced: Any, wanted: Any) -> bool:
    """
    Whether the parameters of two generics contradict. Checks only collections of one type, and mappings.
    """
    made, expected = get_args(produced), get_args(wanted)
    if not made or not expected or tuple in (_class(produced), _class(wanted)):
        return False
    kinds = (_class(produced), _class(wanted))
    if all(kind is not None and issubclass(kind, collections.abc.Collection) for kind in kinds):
        return len(made) == len(expected) and any(map(clash, made, expected))
    return False


# The options of a node

_PLAIN = NodeRules()


def checked_queue(name: str, spec: NodeSpec, problems: list[GraphProblem]) -> Queue:
    """The lane comes from the function (`async def`: io, `def`: compute) unless the node names one."""
    if _yields(spec.fn):
        text = "its function yields, so its value could be read by one reader only"
        problems.append(GraphProblem(name, "function", text, "return a list instead"))
    elif spec.lane is not None and spec.lane not in list(Lane):
        problems.append(_not_one_of(name, "lane", spec.lane, Lane))
    elif not _is_async(spec.fn):
        return Queue[Lane(spec.lane or Lane.COMPUTE).name]
    elif spec.lane not in (None, Lane.IO):
        text = f"an async def cannot run on the {spec.lane} lane"
        problems.append(GraphProblem(name, "lane", text, "leave lane= out, or make it a plain def"))
    return Queue.LOOP


def checked_rules(name: str, spec: NodeSpec, problems: list[GraphProblem]) -> NodeRules:
    if _given(spec) == _GIVEN_NOTHING:
        return _PLAIN
    errors = spec.retry_on if isinstance(spec.retry_on, tuple) else (spec.retry_on,)
    timeout, limit = spec.timeout, spec.limit
    checks = {
        "retries": (_is_int(spec.retries) and spec.retries >= 0, "give a whole number from 0 up"),
        "retry_delay": (_is_seconds(spec.retry_delay), "give seconds, from 0 up"),
        "retry_on": (all(map(_is_exception, errors)), "give exception classes"),
        "timeout": (
            timeout is None or (_is_seconds(timeout) and timeout > 0),
            "give seconds above 0, or None for no timeout",
        ),
        "limit": (
            limit is None or (_is_int(limit) and limit >= 1),
            "give a whole number from 1 up, or None for what the lane allows",
        ),
    }
    wrong = [
        GraphProblem(name, "option", f"{option}={safe_repr(getattr(spec, option), 200)} makes no sense", fix)
        for option, (good, fix) in checks.items()
        if not good
    ]
    if spec.on_error not in list(OnError):
        wrong.append(_not_one_of(name, "on_error", spec.on_error, OnError))
    if wrong:
        problems += wrong
        return _PLAIN
    return NodeRules(
        retries=spec.retries,
        retry_delay=spec.retry_delay,
        retry_on=errors,
        timeout=timeout,
        skip_dependents=spec.on_error == OnError.SKIP_DEPENDENTS,
        limit=limit,
    )


def _given(spec: NodeSpec) -> tuple[Any, ...]:
    return spec.retries, spec.retry_delay, spec.retry_on, spec.timeout, spec.on_error, spec.limit


_GIVEN_NOTHING = _given(NodeSpec(fn=None))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _not_one_of(name: str, option: str, given: object, choices: Iterable[StrEnum]) -> GraphProblem:
    names = [str(choice) for choice in choices]
    fix = did_you_mean(safe_str(given, 200), names) or f"it is one of {', '.join(map(repr, names))}"
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
