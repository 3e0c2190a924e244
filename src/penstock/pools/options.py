"""The options of a pool, with defaults and checks. A wrong option is refused at once, by its name."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.core.calls.ticket import QueueLimits, check_count
from penstock.pools import context
from penstock.pools.child import protocol

if TYPE_CHECKING:
    from penstock.cluster.engine import Cluster


Kind = Literal["process", "thread", "cluster"]
Start = Literal["lazy", "eager"]
Requeue = Literal["front", "back"]
PolicyName = Literal["block", "reject", "drop-latest", "drop-oldest"]
CrashPolicyName = Literal["restart-fail-in-flight", "restart-requeue-in-flight", "fail-task"]


_default_depth: float | None = None


def set_defaults(*, max_queue_depth: float | None = None) -> None:
    """
    Set defaults for all pools that this program makes from now on. None restores Penstock's own default:
    twice `max_in_flight` for a pool, 2 for a singleton.

    For example:

        penstock.set_defaults(max_queue_depth=100)
    """
    global _default_depth  # noqa: PLW0603  # a default of the whole program
    if max_queue_depth is not None:
        QueueLimits(max_in_flight=1, max_queue_depth=max_queue_depth)  # raises if it is no depth
    _default_depth = max_queue_depth


def default_depth(max_in_flight: int, *, singleton: bool) -> float:
    """The `max_queue_depth` of a pool that is given none."""
    if _default_depth is not None:
        return _default_depth
    return 2 if singleton else 2 * max_in_flight if isinstance(max_in_flight, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    workers: int
    kind: str
    eager: bool
    idle_stop: float | None
    crash_policy: CrashPolicy
    crash_max_retries: int
    restart_delay: float
    grace: float
    max_calls: int | None
    max_memory: int | None
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    target: Callable[..., object] | None
    args: tuple[Any, ...]
    name: str
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, get_args(Kind))
        if self.cluster is not None and self.kind != "cluster":
            raise TypeError(f'cluster= is for kind="cluster"; this pool has kind={self.kind!r}')
        check_count("workers", self.workers, least=1)
        check_count("crash_max_retries", self.crash_max_retries, least=0)
        if self.max_calls is not None:
            check_count("recycle_after_calls", self.max_calls, least=1)
        if self.max_memory is not None:
            check_count("recycle_above_rss", self.max_memory, least=1)
        seconds("idle_stop", self.idle_stop, or_none=True)
        seconds("grace", self.grace)
        if self.initializer is not None and not callable(self.initializer):
            raise TypeError(f"initializer is {self.initializer!r}; it must be callable")
        if context.importing_main and self.kind != "thread":
            raise RuntimeError(
                "a worker imports your script to find the functions in it, and the script makes a pool while it is "
                'imported; move its statements below  if __name__ == "__main__":'
            )

    def setup(self) -> dict[str, Any]:
        """The objects that a worker outside of this process makes before its first call."""
        return {
            "initializer": self.initializer,
            "initargs": self.initargs,
            "target": self.target,
            "args": self.args,
        }

    def pack_setup(self) -> tuple[tuple[list[str], str, list[str]], str, bytes, tuple[str, str] | None]:
        """The first message to a worker process: its environment and its setup."""
        blob = protocol.pack_setup(self.setup())
        main = protocol.main_module() if b"__main__" in blob else None
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109  # pathlib is slow to import
        environment = paths, os.getcwd(), sys.argv  # noqa: PTH109  # as above
        return environment, f"penstock: {self.name}", blob, main


def seconds(name: str, value: Any, *, or_none: bool = False) -> None:
    if or_none and value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(
            f"{name} is {value!r}; it must be a number of seconds, 0 or more{' or None' * or_none}"
        )


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


class CrashPolicy(StrEnum):
    """
    What a pool does when one of its workers dies unexpectedly (PL-4).

    In each case only the dead worker's calls are touched, and a call that it had not begun goes back to the
    front of the queue: it has done nothing yet, so running it now is not running it twice.
    """

    RESTART_FAIL = "restart-fail-in-flight"  # the call that it ran fails
    RESTART_REQUEUE = "restart-requeue-in-flight"  # the call that it ran is tried again, up to `max_attempts`
    FAIL_TASK = "fail-task"  # all calls fail, and the pool halts until `restart()`
