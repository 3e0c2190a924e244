"""
The way to `loops`, which imports asyncio: that takes longer than the whole package, and many never need it.

Not an import inside each function that needs it, because that looks the module up anew for every call: 1 us of the 25 that
a call from a coroutine takes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from penstock.local.call import Call
    from penstock.local.gate import Gate

R = TypeVar("R")


def awaited(gate: Gate, call: Call[R], prepare: Callable[[], None] | None) -> Awaitable[R]:
    """See `loops.run`."""
    run: Callable[..., Awaitable[R]] = _run()
    return run(gate, call, prepare)


@cache
def _run() -> Callable[..., Awaitable[Any]]:
    from penstock.local.loops import run  # noqa: PLC0415  # see above

    return run
