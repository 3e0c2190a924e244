"""
Being told what happens in a queue (DQ-9).

Events are noted under the queue's lock and told after it is released, in order, by one thread at a time. So a hook may
call back into the pool, and two threads cannot tell it things in the wrong order. Whatever happens under one hold of the
lock is one change of state: what lies between was never there for anybody to see.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from penstock.core.queue import Phase, QueueState
from penstock.local.call import Call

log = logging.getLogger("penstock")


class QueueHooks:
    """
    Override what you want to hear. Every call ends in exactly one of `on_settle` (it has a result or an error),
    `on_cancel` (somebody, its timeout or a closed pool ended it) and `on_reject` (a load-shedding policy did).
    A hook that raises is logged, and nothing else breaks.
    """

    def on_queued(self, call: Call[Any]) -> None:
        """It was accepted."""

    def on_dispatch(self, call: Call[Any]) -> None:
        """It was handed to a worker; `call.attempt` says for the how manieth time, `call.last_wait` after how long."""

    def on_settle(self, call: Call[Any]) -> None:
        """It has a result or an error; `call.ran_for` is how long the function ran."""

    def on_cancel(self, call: Call[Any], phase: Phase) -> None: ...

    def on_reject(self, call: Call[Any]) -> None: ...

    def on_requeue(self, call: Call[Any]) -> None:
        """Its worker was lost and it went back to the queue."""

    def on_state_change(self, state: QueueState) -> None: ...


class Herald:
    """Tells the hooks of one queue. Where there is nobody to tell, a look at an empty tuple is all it costs."""

    def __init__(self, hooks: Iterable[QueueHooks] = ()) -> None:
        self.news: deque[tuple[Any, ...]] = deque()
        self._telling = threading.Lock()
        self._hooks: tuple[QueueHooks, ...] = tuple(hooks)
        self._listen()

    def add(self, hooks: QueueHooks) -> None:
        self._hooks = (*self._hooks, hooks)
        self._listen()

    def _listen(self) -> None:
        self.queued = self._who("on_queued")
        self.dispatch = self._who("on_dispatch")
        self.settle = self._who("on_settle")
        self.cancel = self._who("on_cancel")
        self.reject = self._who("on_reject")
        self.requeue = self._who("on_requeue")
        self.state = self._who("on_state_change")

    def _who(self, name: str) -> tuple[Callable[..., None], ...]:
        default = getattr(QueueHooks, name)
        return tuple(
            getattr(hook, name) for hook in self._hooks if getattr(type(hook), name, None) is not default
        )

    def note(self, who: tuple[Callable[..., None], ...], *args: Any) -> None:
        if who:
            self.news.append((who, args))

    def tell(self) -> None:
        """
        Whoever finds the turn taken leaves: the one who has it looks again after giving it back, so no news is left
        behind. That also makes a hook that comes back here while it is being told harmless.
        """
        news = self.news
        while news:
            if not self._telling.acquire(blocking=False):
                return
            try:
                while news:
                    who, args = news.popleft()
                    for hook in who:
                        try:
                            hook(*args)
                        except Exception:
                            log.exception("the hook %r failed", hook)
            finally:
                self._telling.release()
