"""What a function can know about the call it runs in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from penstock.core.errors import CallCanceled
from penstock.core.ticket import CancelPhase
from penstock.local.timers import clock


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
