"""A function together with the pool that runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from penstock.core.text import safe_repr
from penstock.pools.context import awaited
from penstock.pools.future import Call, CancelSignal
from penstock.pools.options import seconds

if TYPE_CHECKING:
    from penstock.pools.pool import WorkerPool

P = ParamSpec("P")
R = TypeVar("R")


class Task(Generic[P, R]):
    """`task(...)` blocks for the result, `task.submit(...)` is a Future, `await task.call(...)` waits in a coroutine."""

    __slots__ = ("_fn", "_key_of", "_pool", "_signal", "_timeout", "name")

    def __init__(
        self,
        pool: WorkerPool,
        fn: Callable[P, R] | str,
        *,
        timeout: float | None = None,
        key_of: Callable[..., Hashable] | None = None,
        signal: CancelSignal | None = None,
    ) -> None:
        seconds("timeout", timeout, or_none=True)
        if not callable(fn) and not isinstance(fn, str):
            raise TypeError(f"fn is {fn!r}; it must be a function")
        if key_of is not None and not callable(key_of):
            raise TypeError(f"key_of is {key_of!r}; it must be a function of the call's arguments, or None")
        self._pool = pool
        self._fn: Any = fn
        self._timeout = timeout
        self._key_of = key_of
        self._signal = signal
        self.name = fn if isinstance(fn, str) else getattr(fn, "__qualname__", None) or safe_repr(fn, 200)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        call, prepare = self._make(args, kwargs)
        self._pool._call_queue.submit(call, prepare)
        return call

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        call, prepare = self._make(args, kwargs)
        return awaited(self._pool._call_queue, call, prepare)

    def _make(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call[R], Callable[[], None] | None]:
        key = self._key_of(*args, **kwargs) if self._key_of is not None else None
        return self._pool._make(self._fn, args, kwargs, timeout=self._timeout, key=key, signal=self._signal)

    def __repr__(self) -> str:
        return f"<Task {self.name} on {self._pool.name!r}>"
