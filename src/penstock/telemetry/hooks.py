"""
Hooks of a call queue: methods that are called for its events (DQ-9).

Events are recorded under the queue's lock and delivered after its release, in order, by one thread at a time.
So a hook may call the pool, and events stay in order. Everything that happens while the lock is held once is
one change of state: intermediate states are not reported.
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
    The base class of hooks: override the methods that you need. Every call ends with exactly one of
    `on_settle` (its function returned or raised, or its worker died), `on_cancel` (a cancel, its timeout or a
    closed or halted pool ended it, or its payload could not be made) and `on_reject` (a load-shedding policy
    refused it). That includes calls that are refused at once and reserved places that are not used.

    An exception from a hook is logged, whatever it is, and breaks nothing else. Only Ctrl-C in the main
    thread is raised.

    For example:

        class Slow(penstock.QueueHooks):
            def on_settle(self, call):
                if call.ran_for > 1:
                    print("slow:", call)

        pool = penstock.WorkerPool(4, hooks=Slow())
    """

    def on_queued(self, call: Call[Any], /) -> None:
        """The call was accepted."""

    def on_dispatch(self, call: Call[Any], /) -> None:
        """
        The call was given to a worker; `call.attempt` says which attempt this is, `call.last_wait` how long
        it waited.
        """

    def on_settle(self, call: Call[Any], /) -> None:
        """The call has a result or an error; `call.ran_for` is how long the function ran."""

    def on_cancel(self, call: Call[Any], phase: CancelPhase, /) -> None: ...

    def on_reject(self, call: Call[Any], /) -> None: ...

    def on_requeue(self, call: Call[Any], /) -> None:
        """The worker of the call was lost, and the call went back to the queue."""

    def on_state_change(self, state: QueueState, /) -> None: ...


class HookDispatcher:
    """
    Calls the hooks of one queue. For each kind of event there is one function, or None if no hook overrides
    it, so that an unused event costs only a check. An event is recorded as a pair (function, argument). One
    event for many calls takes half the time (`record_all`).
    """

    __slots__ = (
        "_hooks", "_token", "cancel", "dispatch", "events", "queued", "reject", "requeue", "settle",
        "state",
    )  # fmt: skip

    def __init__(self, hooks: Iterable[QueueHooks] = ()) -> None:
        self.events: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._token = [True]  # taken while delivering; a list's `pop` takes a third of the time of a lock
        self._hooks: tuple[QueueHooks, ...] = tuple(hooks)
        self._combine_hooks()

    def add(self, hooks: QueueHooks) -> None:
        self._hooks = (*self._hooks, hooks)
        self._combine_hooks()

    def _combine_hooks(self) -> None:
        self.queued = _combined(self._listeners("on_queued"))
        self.dispatch = _combined(self._listeners("on_dispatch"))
        self.settle = _combined(self._listeners("on_settle"))
        self.cancel = _combined([partial(_with_pair, hook) for hook in self._listeners("on_cancel")])
        self.reject = _combined(self._listeners("on_reject"))
        self.requeue = _combined(self._listeners("on_requeue"))
        self.state = _combined(self._listeners("on_state_change"))

    def _listeners(self, name: str) -> list[Callable[..., object]]:
        default = getattr(QueueHooks, name)
        return [getattr(hook, name) for hook in self._hooks if getattr(type(hook), name, None) is not default]

    def record(self, hook: Callable[[Any], object] | None, subject: Any) -> None:
        """`subject` is the call, the state, or for `cancel` the call and its phase."""
        if hook is not None:
            self.events.append((hook, subject))

    def record_all(self, hook: Callable[[Any], object] | None, calls: Sequence[Call[Any]]) -> None:
        """One event for each of these calls, at least one."""
        if hook is not None:
            self.events.append((hook, calls[0]) if len(calls) == 1 else (_call_for_each, (hook, calls)))

    def deliver(self) -> None:
        """
        Call the hooks for all recorded events. If another thread delivers, return: that thread checks again
        at its end, so no event is left. This also makes a hook that gets here again harmless.
        """
        events, token = self.events, self._token
        while events:
            try:
                token.pop()
            except IndexError:
                return
            try:
                while events:
                    hook, subject = events.popleft()
                    hook(subject)
            except BaseException as error:  # noqa: BLE001  # a hook is foreign code
                _log(hook, error)
            finally:
                token.append(True)


def _with_pair(hook: Callable[..., object], pair: tuple[Any, ...]) -> None:
    hook(*pair)


def _combined(hooks: list[Callable[..., object]]) -> Callable[[Any], object] | None:
    """Combine hooks into one function: if one raises, the others still get the event."""
    if len(hooks) < 2:
        return hooks[0] if hooks else None

    def call_each(subject: Any) -> None:
        for hook in hooks:
            try:
                hook(subject)
            except BaseException as error:  # noqa: BLE001  # as above; the next hook is still called
                _log(hook, error)

    return call_each


def _call_for_each(batch: tuple[Callable[[Any], object], Sequence[Call[Any]]]) -> None:
    """Call the hook for each call, even if it fails for one of them."""
    hook, calls = batch
    for call in calls:
        try:
            hook(call)
        except BaseException as error:  # noqa: BLE001  # as above
            _log(hook, error)


def _log(hook: Callable[..., object], error: BaseException) -> None:
    """
    Log the error of a hook. A KeyboardInterrupt in the main thread is raised again, because it may be a
    Ctrl-C.
    """
    if is_kind(error, KeyboardInterrupt) and current_thread() is main_thread():
        raise error
    log.error("the hook %s failed", safe_repr(hook), exc_info=error)
