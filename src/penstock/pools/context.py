"""
The state of this thread and process: the call that runs here, whether the thread may block, and whether the
process is a forked copy.

A fork copies descriptors and objects, but no threads. In a copy of a program its pools refuse calls, because
their workers belong to the parent. A copy that a function makes inside a worker ends when the function
returns; otherwise it would take and answer the worker's next calls.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from penstock.core.calls.ticket import CancelPhase
from penstock.core.errors import CallCanceled
from penstock.pools.timers import clock


@dataclass(frozen=True, slots=True)
class CallContext:
    """
    The call that a function runs for, as that function sees it.

    For example:

        def render(frames: list[str]) -> None:
            for frame in frames:
                penstock.current_call().check()  # raises CallCanceled once the call is canceled
                draw(frame)
    """

    id: int
    key: Hashable
    attempt: int
    deadline: float | None
    poll: Callable[[], bool] = field(repr=False)

    @property
    def canceled(self) -> bool:
        """Whether this call was canceled. A function that checks in time keeps its worker alive."""
        return self.poll()

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline. None: there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - clock())

    def check(self) -> None:
        """Raise CallCanceled if the call was canceled; useful in a deep loop."""
        if self.poll():
            raise CallCanceled(
                "the call was canceled, and its function stopped", phase=CancelPhase.IN_FLIGHT, reason=None
            )


class _ThreadState(threading.local):
    make_context: Callable[[], CallContext | None] | None = None
    #: True on Penstock's own threads, and on a user's thread while it does their work.
    never_blocks = False


#: A worker thread sets `make_context`; the context of its call is made only if the function asks for it.
thread_state = _ThreadState()

#: In a worker process: makes the context of the running call, for all threads of its function.
process_contexts: list[Callable[[], CallContext]] = []

#: True in a worker while it imports the pool's `__main__`: a pool made then lacks an `if __name__ ==
#: "__main__":`.
importing_main = False


def current_call() -> CallContext | None:
    """
    The call that this code runs for, or None outside of a worker.

    For example:

        def render(frames: list[str]) -> None:
            call = penstock.current_call()
            for frame in frames:
                if call is not None:
                    call.check()
    """
    make = thread_state.make_context or (process_contexts[-1] if process_contexts else None)
    return make() if make is not None else None


# Which threads may block (DQ-11)


def never_block_here() -> None:
    """Mark this thread as one of Penstock's own: a `submit` on it, as in a done-callback, must not wait."""
    thread_state.never_blocks = True


def may_block() -> bool:
    """False on Penstock's own threads and on a thread with a running event loop."""
    if thread_state.never_blocks:
        return False
    events = sys.modules.get("asyncio.events")
    return events is None or events._get_running_loop() is None  # noqa: SLF001  # `get_running_loop` raises instead


@contextmanager
def never_blocking() -> Iterator[None]:
    """A block in which `submit` on this thread does not wait."""
    before, thread_state.never_blocks = thread_state.never_blocks, True
    try:
        yield
    finally:
        thread_state.never_blocks = before


# Forked copies of this process


class Forkable(Protocol):
    def abandon(self) -> None:
        """Called in the copy, before any other code runs there."""


def watch_forks(part: Forkable) -> None:
    """Call `part.abandon` in each forked copy of this process, for as long as the part lives."""
    _parts.add(part)


def end_copy(error: BaseException | None) -> NoReturn:
    """
    Exit as a program exits whose main function returned or raised `error`, but run no exit handlers: they
    belong to the process that was copied.
    """
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = 1
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


_parts: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _abandon_all() -> None:
    for part in list(_parts):
        part.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
