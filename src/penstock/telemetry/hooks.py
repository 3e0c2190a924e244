"""
Being told what happens in a queue (DQ-9).

Events are noted under the queue's lock and told after it is released, in order, by one thread at a time. So a hook may
call back into the pool, and two threads cannot tell it things in the wrong order. Whatever happens under one hold of the
lock is one change of state: what lies between was never there for anybody to see.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import current_thread, main_thread
from typing import Any

from penstock.core.calls.ticket import CancelPhase, QueueState
from penstock.core.text import is_kind, safe_repr
from penstock.pools.future import Call

log = logging.getLogger("penstock")


class QueueHooks:
    """
    Override what you want to hear. Every call ends in exactly one of `on_settle` (its run gave a result or an error, or its
    worker died), `on_cancel` (a cancel, its timeout or a closed or halted pool ended it, or its payload could not be made)
    and `on_reject` (a load-shedding policy did). That includes a call that is refused at once and a place that was reserved
    and not used.
    A hook that raises is logged, whatever it raises, and nothing else breaks. Only Ctrl-C in the main thread passes.
    """

    def on_queued(self, call: Call[Any]) -> None:
        """It was accepted."""

    def on_dispatch(self, call: Call[Any]) -> None:
        """It was handed to a worker; `call.attempt` says for the how manieth time, `call.last_wait` after how long."""

    def on_settle(self, call: Call[Any]) -> None:
        """It has a result or an error; `call.ran_for` is how long the function ran."""

    def on_cancel(self, call: Call[Any], phase: CancelPhase) -> None: ...

    def on_reject(self, call: Call[Any]) -> None: ...

    def on_requeue(self, call: Call[Any]) -> None:
        """Its worker was lost and it went back to the queue."""

    def on_state_change(self, state: QueueState) -> None: ...


class HookDispatcher:
    """
    Tells the hooks of one queue. For each event there is one function that takes what happened, or None if nobody
    listens: a look at it is then all that the event costs. News is noted as a pair of the two. What happens to many calls
    at once is one piece of news, told in half the time (`note_run`).
    """

    __slots__ = (
        "_hooks",
        "_turn",
        "cancel",
        "dispatch",
        "news",
        "queued",
        "reject",
        "requeue",
        "settle",
        "state",
    )

    def __init__(self, hooks: Iterable[QueueHooks] = ()) -> None:
        self.news: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._turn = [True]  # whoever takes it out tells; a list's `pop` takes a third of the time of a lock
        self._hooks: tuple[QueueHooks, ...] = tuple(hooks)
        self._listen()

    def add(self, hooks: QueueHooks) -> None:
        self._hooks = (*self._hooks, hooks)
        self._listen()

    def _listen(self) -> None:
        self.queued = _together(self._who("on_queued"))
        self.dispatch = _together(self._who("on_dispatch"))
        self.settle = _together(self._who("on_settle"))
        self.cancel = _together([partial(_spread, hook) for hook in self._who("on_cancel")])
        self.reject = _together(self._who("on_reject"))
        self.requeue = _together(self._who("on_requeue"))
        self.state = _together(self._who("on_state_change"))

    def _who(self, name: str) -> list[Callable[..., object]]:
        default = getattr(QueueHooks, name)
        return [getattr(hook, name) for hook in self._hooks if getattr(type(hook), name, None) is not default]

    def note(self, who: Callable[[Any], object] | None, what: Any) -> None:
        """`what` is the call, the state, or for `cancel` the call and its phase."""
        if who is not None:
            self.news.append((who, what))

    def note_run(self, who: Callable[[Any], object] | None, calls: Sequence[Call[Any]]) -> None:
        """The same has happened to all of these, one at least."""
        if who is not None:
            self.news.append((who, calls[0]) if len(calls) == 1 else (_tell_of_each, (who, calls)))

    def tell(self) -> None:
        """
        Whoever finds the turn taken leaves: the one who has it looks again after giving it back, so no news is left
        behind. That also makes a hook that comes back here while it is being told harmless.
        """
        news, turn = self.news, self._turn
        while news:
            try:
                turn.pop()
            except IndexError:
                return
            try:
                while news:
                    hook, what = news.popleft()
                    hook(what)
            except BaseException as error:  # noqa: BLE001  # a hook is foreign code, and what it tells of has happened all the same
                _log(hook, error)
            finally:
                turn.append(True)


def _spread(hook: Callable[..., object], what: tuple[Any, ...]) -> None:
    hook(*what)


def _together(hooks: list[Callable[..., object]]) -> Callable[[Any], object] | None:
    """As one function: one that raises must not keep the news from the others."""
    if len(hooks) < 2:
        return hooks[0] if hooks else None

    def tell_each(what: Any) -> None:
        for hook in hooks:
            try:
                hook(what)
            except BaseException as error:  # noqa: BLE001  # as above; and the next hook hears of it
                _log(hook, error)

    return tell_each


def _tell_of_each(run: tuple[Callable[[Any], object], Sequence[Call[Any]]]) -> None:
    """A call that the hook fails for must not keep it from the others."""
    hook, calls = run
    for call in calls:
        try:
            hook(call)
        except BaseException as error:  # noqa: BLE001  # as above
            _log(hook, error)


def _log(hook: Callable[..., object], error: BaseException) -> None:
    """A KeyboardInterrupt in the main thread is raised again: it may be a Ctrl-C, which came while the hook ran."""
    if is_kind(error, KeyboardInterrupt) and current_thread() is main_thread():
        raise error
    log.error("the hook %s failed", safe_repr(hook), exc_info=error)
