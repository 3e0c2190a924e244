"""
What telemetry calls a pool and a function.

Every label becomes a time series that somebody pays for, so there may only be as many as a programmer has written
down: functions by their qualified names, and pools by the names they were given. Pools without one share one label,
because a program may make thousands of them.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.local.pool import WorkerPool

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
