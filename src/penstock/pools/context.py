"""What a function can know about the call it runs in.

The way to `loops`, which imports asyncio: that takes longer than the whole package, and many never need it.

Not an import inside each function that needs it, because that looks the module up anew for every call: 1 us of the 25 that
a call from a coroutine takes.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.calls.ticket import CancelPhase
from penstock.core.errors import CallCanceled
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.pools.call_queue import CallQueue
    from penstock.pools.future import Call


@dataclass(frozen=True, slots=True)
class CallContext:
    id: int
    key: Hashable
    attempt: int
    deadline: float | None
    _look: Callable[[], bool] = field(repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked this call to stop. A function that looks in time keeps its worker alive."""
        return self._look()

    @property
    def remaining(self) -> float | None:
        """Seconds until its deadline; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - clock())

    def check(self) -> None:
        """Raise CallCanceled if the call was asked to stop: the way out of a deep loop."""
        if self._look():
            raise CallCanceled("stopped by itself, as asked", phase=CancelPhase.IN_FLIGHT, reason=None)


class _Here(threading.local):
    make: Callable[[], CallContext | None] | None = None


#: A worker thread sets `here.make`: the context of the call that it runs is made only if the function asks for it.
here = _Here()

#: In a worker process the one call that runs, seen from whatever thread the function starts.
in_process: list[Callable[[], CallContext]] = []


def current_call() -> CallContext | None:
    """The call that this code runs for, or None outside of a worker."""
    make = here.make or (in_process[-1] if in_process else None)
    return make() if make is not None else None


#: True in a worker while it imports what is `__main__` in the pool's process: a pool made now has no guard around it.
importing_main = False


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
    from penstock.pools.loops import run  # noqa: PLC0415  # see above

    return run
