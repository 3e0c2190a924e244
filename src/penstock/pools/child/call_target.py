"""Where a call runs away from its caller: what a worker process and a worker on a cluster have in common."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from penstock.core.errors import NotPicklable
from penstock.core.text import error_line, safe_str, traceback_text, type_name
from penstock.pools.child import protocol
from penstock.pools.context import CallContext


class SetupFailed(Exception):
    """No call can run in this worker. The pool gets `reason` and `trace` before the worker exits."""

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trace = trace


def or_setup_failed(what: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn`, without which no call can run here."""
    try:
        return fn(*args)
    except BaseException as error:  # SystemExit, too
        raise SetupFailed(f"{what} {error_line(error)}", traceback_text(error)) from error


class CallTarget:
    """The functions that were sent to this worker, by number, and the object whose methods it calls."""

    def __init__(self) -> None:
        self.functions: dict[int, Any] = {}
        self._object: Any = None

    def set_up(self, blob: bytes) -> None:
        setup: dict[str, Any] = or_setup_failed("its setup could not be read:", pickle.loads, blob)
        if setup["initializer"] is not None:
            or_setup_failed("its initializer raised", setup["initializer"], *setup["initargs"])
        if setup["target"] is not None:
            self._object = or_setup_failed("its object could not be made:", setup["target"], *setup["args"])

    def function(self, name: Any) -> Any:
        if type(name) is str:
            return getattr(self._object, name)
        if name == 0:
            return self._object
        function = self.functions[name]
        if type(function) is bytes:
            function = self.functions[name] = pickle.loads(function)
        return function

    def invoke(self, name: Any, call: tuple[Any, tuple[Any, ...], dict[str, Any]], trace: Any) -> Any:
        """`call` is (the function, or None if it is named; arguments; keyword arguments)."""
        fn, args, kwargs = call
        fn = self.function(name) if fn is None else fn
        if trace is None:
            return fn(*args, **kwargs)
        from penstock.telemetry.otel import run_traced  # noqa: PLC0415  # only where the caller traces

        return run_traced(trace, fn, args, kwargs)


def make_context(dispatch: int, terms: Any, look: Callable[[], bool]) -> CallContext:
    """`terms` are (attempt, key, deadline), or None for a first attempt without the others."""
    attempt, key, deadline = terms if terms is not None else (1, None, None)
    return CallContext(dispatch, pickle.loads(key) if type(key) is bytes else key, attempt, deadline, look)


def is_plain_result(value: Any) -> bool:
    kind = type(value)
    return kind in protocol.PLAIN_TYPES or (kind is str and len(value) <= protocol.SHORT)


def unsendable(value: Any, error: Exception) -> NotPicklable:
    import inspect  # noqa: PLC0415  # only on errors

    if inspect.iscoroutine(value):
        value.close()
        return NotPicklable(
            "the function is `async def`: it gave a coroutine, not a result; call it with asyncio.run"
        )
    return NotPicklable(
        f"the result ({type_name(value)}) cannot be sent back to the caller: {safe_str(error)}{protocol.advice()}"
    )
