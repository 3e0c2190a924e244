"""
The way to `loops`, which imports asyncio: that takes longer than the whole package, and many never need it.

Not an import inside each function that needs it, because that looks the module up anew for every call: 1 us of the 25 that
a call from a coroutine takes.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from penstock.local.call import Call
    from penstock.local.gate import CallQueue

R = TypeVar("R")


def awaited(call_queue: CallQueue, call: Call[R], prepare: Callable[[], None] | None) -> Awaitable[R]:
    """See `loops.run`."""
    run: Callable[..., Awaitable[R]] = _run()
    return run(call_queue, call, prepare)


async def in_daemon(fn: Callable[[], object]) -> None:
    """
    Await a blocking function in a daemon thread. Not in the loop's own executor: the end of the program waits for that one,
    and Ctrl-C must not wait for what `fn` waits for.
    """
    import asyncio  # noqa: PLC0415  # see above

    done: Future[None] = Future()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                fn()
            except BaseException as error:  # noqa: BLE001  # it is the awaiting task's to see
                done.set_exception(error)
            else:
                done.set_result(None)

    threading.Thread(target=run, name="penstock-closer", daemon=True).start()
    await asyncio.wrap_future(done)


@cache
def _run() -> Callable[..., Awaitable[Any]]:
    from penstock.local.loops import run  # noqa: PLC0415  # see above

    return run
