"""The options of a pool: their defaults, and what is wrong with the ones given, said at once and by name.

What a pool does when one of its worker processes dies unasked (PL-4).

What telemetry calls a pool and a function.

Every label becomes a time series that somebody pays for, so there may only be as many as a programmer has written
down: functions by their qualified names, and pools by the names they were given. Pools without one share one label,
because a program may make thousands of them.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.core.calls.ticket import Policy, QueueLimits
from penstock.pools import context
from penstock.pools.child import protocol

if TYPE_CHECKING:
    from penstock.cluster.engine import Cluster
    from penstock.pools.pool import WorkerPool

__all__ = ["CrashPolicy", "Kind", "WorkerOptions", "make_limits", "set_defaults"]

Kind = Literal["process", "thread", "cluster"]


@dataclass(slots=True)
class _Defaults:
    max_queue_depth: float | None = None


_defaults = _Defaults()


def set_defaults(*, max_queue_depth: float | None = None) -> None:
    """
    For all pools made from now on in this program, where they do not say otherwise.
    None goes back to Penstock's own default: twice `max_in_flight` for a pool, 2 for a singleton.
    """
    if max_queue_depth is not None:
        QueueLimits(max_in_flight=1, max_queue_depth=max_queue_depth)  # checks it
    _defaults.max_queue_depth = max_queue_depth


def make_limits(
    *,
    workers: int,
    max_in_flight: int | None,
    max_queue_depth: float | None,
    policy: str,
    max_attempts: int,
    requeue: str,
    singleton: bool = False,
) -> QueueLimits:
    in_flight = workers if max_in_flight is None else max_in_flight
    depth = max_queue_depth if max_queue_depth is not None else _defaults.max_queue_depth
    if depth is None:
        depth = 2 if singleton else 2 * in_flight if isinstance(in_flight, int) else 0
    one_of("requeue", requeue, ("front", "back"))
    one_of("policy", policy, [str(known) for known in Policy])
    return QueueLimits(
        max_in_flight=in_flight,
        max_queue_depth=depth,
        policy=Policy(policy),
        max_attempts=max_attempts,
        requeue_to_front=requeue == "front",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    workers: int
    kind: str
    eager: bool
    idle_stop: float | None
    crash_policy: CrashPolicy
    crash_max_retries: int
    restart_delay: float
    restart_delay_max: float
    grace: float
    max_calls: int | None
    max_memory: int | None
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    target: Callable[..., object] | None
    args: tuple[Any, ...]
    name: str
    cluster: Cluster | None = None
    trim_after: float = 30.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, get_args(Kind))
        if self.cluster is not None and self.kind != "cluster":
            raise TypeError(f'cluster= is for kind="cluster"; this pool has kind={self.kind!r}')
        whole("workers", self.workers, least=1)
        whole("crash_max_retries", self.crash_max_retries, least=0)
        if self.max_calls is not None:
            whole("recycle_after_calls", self.max_calls, least=1)
        if self.max_memory is not None:
            whole("recycle_above_rss", self.max_memory, least=1)
        seconds("idle_stop", self.idle_stop, or_none=True)
        seconds("grace", self.grace)
        if self.initializer is not None and not callable(self.initializer):
            raise TypeError(f"initializer is {self.initializer!r}; it must be callable")
        if context.importing_main and self.kind != "thread":
            raise RuntimeError(
                "a worker imports your script to find the functions in it, and the script makes a pool while it is "
                'imported; put what it does below  if __name__ == "__main__":'
            )

    def setup(self) -> dict[str, Any]:
        """What a worker that is not of this process has to make before its first call."""
        return {
            "initializer": self.initializer,
            "initargs": self.initargs,
            "target": self.target,
            "args": self.args,
        }

    def pack_setup(self) -> tuple[tuple[list[str], str, list[str]], str, bytes, tuple[str, str] | None]:
        """The first message to a worker process: where it is, and what to make there."""
        blob = protocol.pack_setup(self.setup())
        main = protocol.main_module() if b"__main__" in blob else None
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109  # pathlib is slow to import
        place = paths, os.getcwd(), sys.argv  # noqa: PTH109  # as above
        return place, f"penstock: {self.name}", blob, main


def whole(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def seconds(name: str, value: Any, *, or_none: bool = False) -> None:
    if or_none and value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(
            f"{name} is {value!r}; it must be a number of seconds, 0 or more{' or None' * or_none}"
        )


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}")


class CrashPolicy(StrEnum):
    """
    In each case only the dead worker's calls are touched, and a call that it had not begun yet goes back to the front
    of the queue: it has done nothing, so running it now is not running it twice.
    """

    RESTART_FAIL = "restart-fail-in-flight"  # the call that it ran fails
    RESTART_REQUEUE = (
        "restart-requeue-in-flight"  # the call that it ran is tried again, `max_attempts` times at most
    )
    FAIL_TASK = "fail-task"  # everything fails, and the pool halts until somebody restarts it


_made_up = re.compile(r"(pool|singleton)-\d+")


def labels_of(pool: WorkerPool) -> dict[str, str]:
    made_up = _made_up.fullmatch(pool.name)
    return {
        "pool": made_up[1] if made_up else pool.name,
        "kind": pool._group.kind,
        "policy": str(pool._call_queue.queue.limits.policy),
    }


def task_name(fn: Any, target: Any = None) -> str:
    """`target` is what a singleton makes its object from: there, `fn` is only the name of a method."""
    if isinstance(fn, str):
        return f"{task_name(target)}.{fn}" if target is not None else fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"
