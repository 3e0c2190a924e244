"""One worker whose state is kept between calls: a loaded model, an open device, a counter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from penstock.pools.pool import WorkerPool
from penstock.pools.task import Task


class SingletonWorker(WorkerPool):
    """
    `SingletonWorker(Model, "weights.bin")` makes a Model in a worker process; `worker.predict(x)` calls its method there
    and returns the result, `worker.predict.submit(x)` gives a Future, `await worker.predict.call(x)` waits in a
    coroutine. With a plain function as target, `worker(x)` calls it. After a crash the object is made anew.

    Methods whose names a pool has itself are reached by `worker.method("submit")`. To give the constructor keyword
    arguments, wrap it: `functools.partial(Model, device="cpu")`.
    """

    def __init__(self, target: Callable[..., Any], *args: Any, **options: Any) -> None:
        if not callable(target):
            raise TypeError(f"target is {target!r}; it must be a class, whose object is kept, or a function")
        made = _makes_an_object(target)
        if args and not made:
            raise TypeError(
                "arguments after target go to a class's constructor; a function gets its own when called"
            )
        if "workers" in options or "max_workers" in options:
            raise TypeError("a SingletonWorker has one worker; use WorkerPool for more")
        self._function = None if made else target
        super().__init__(1, _target=target if made else None, _args=args, _singleton=True, **options)

    def method(self, name: str, *, timeout: float | None = None) -> Task[..., Any]:
        """A method of the object in the worker, with a timeout of its own if need be."""
        return Task(self, name, timeout=timeout)

    def __getattr__(self, name: str) -> Task[..., Any]:
        if (
            name.startswith("_")
            or self.__dict__.get("_function") is not None
            or "_group" not in self.__dict__
        ):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return self.method(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            return self.method("__call__")(*args, **kwargs)
        return self.submit(self._function, *args, **kwargs).result()


def _makes_an_object(target: Callable[..., Any]) -> bool:
    while isinstance(target, functools.partial):
        target = target.func
    return isinstance(target, type)
