"""The options of a node: which lane it may have, and what its numbers must be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from types import FunctionType
from typing import Any

from penstock.core.graph import Lane, NodeRules, OnError, Queue
from penstock.core.graph_spec import GraphProblem, NodeSpec
from penstock.core.text import safe_repr, safe_str

__all__ = ["checked_queue", "checked_rules"]

_PLAIN = NodeRules()
_QUEUES = {
    Lane.COMPUTE: Queue.COMPUTE,
    Lane.IO: Queue.IO,
    Lane.PROCESS: Queue.PROCESS,
    Lane.CLUSTER: Queue.CLUSTER,
}


def checked_queue(name: str, spec: NodeSpec) -> tuple[Queue, list[GraphProblem]]:
    """The lane comes from the function (`async def`: io, `def`: compute) unless the node says otherwise."""
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
    # Nearly all are plain functions, for which this is a tenth of what asking `inspect` costs.
    if isinstance(fn, FunctionType) and not fn.__dict__:
        return bool(fn.__code__.co_flags & inspect.CO_COROUTINE)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004  # an object's own


def _yields(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, FunctionType):
        return bool(fn.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR))
    return inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
