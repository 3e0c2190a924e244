"""
Guards of a call: keys, cancel signals and timeouts, which can end it; and the errors that they cause.

A canceled key stays canceled: it refuses later calls too, until it is cleared.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final

from penstock.core.calls.ticket import CancelPhase, Policy, QueueLimits
from penstock.core.errors import CallCanceled, CallTimeout, QueueDropError
from penstock.core.text import safe_repr

if TYPE_CHECKING:
    from penstock.pools.future import Call


class CancelSignal:
    """
    One switch for many calls: `signal.cancel()` cancels all calls that were made with it, and later ones at
    once.

    A call may also have a key, a timeout and asyncio's own cancellation (DQ-5).

    For example:

        signal = penstock.CancelSignal()
        resize = pool.task(thumbnail, signal=signal)
        calls = [resize.submit(path) for path in paths]
        signal.cancel("the album was closed")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[Call[Any]] = set()
        self.canceled = False
        self.reason: str | None = None

    def cancel(self, reason: str | None = None) -> None:
        with self._lock:
            if self.canceled:
                return
            self.canceled, self.reason = True, reason
            calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel(reason)

    def add(self, call: Call[Any]) -> bool:
        """Add this call. False: the signal is canceled already, so the call must not begin."""
        with self._lock:
            if not self.canceled:
                self._calls.add(call)
            return not self.canceled

    def discard(self, call: Call[Any]) -> None:
        with self._lock:
            self._calls.discard(call)


class Keys:
    """
    The keys of a queue: the calls of each key, and the canceled keys.

    Used with the queue's lock held, so that no cancel can fall between the check of a key and the entry of
    its call.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, dict[Call[Any], None]] = {}  # a dict, because a set has no order
        self._canceled: dict[Hashable, str | None] = {}

    def enter(self, call: Call[Any]) -> None:
        """Raise if the key of this call is canceled or cannot be a key."""
        if call.key is None:
            return
        try:
            canceled = call.key in self._canceled
        except TypeError:
            key, call.key = call.key, None
            raise TypeError(
                f"key is {safe_repr(key, 200)}; it must be hashable, like a string or a number"
            ) from None
        if canceled:
            why = f"its key {safe_repr(call.key, 200)} is canceled until cleared"
            raise CallCanceled(why, phase=CancelPhase.WAITING, reason=self._canceled[call.key])
        self._calls.setdefault(call.key, {})[call] = None

    def leave(self, call: Call[Any]) -> None:
        same = self._calls.get(call.key)
        if same is not None:
            same.pop(call, None)
            if not same:
                del self._calls[call.key]

    def cancel(self, key: Hashable, reason: str | None) -> list[Call[Any]]:
        """Cancel the key. Returns the calls that have it, in the order in which they entered."""
        self._canceled[key] = reason
        return list(self._calls.get(key, ()))

    def clear(self, key: Hashable) -> bool:
        """Accept the key again. False if it was not canceled."""
        return self._canceled.pop(key, self) is not self

    def __len__(self) -> int:
        """The number of keys that calls have at present."""
        return len(self._calls)


_WHERE: Final = {
    CancelPhase.WAITING: "while it waited for room",
    CancelPhase.QUEUED: "in the queue",
    CancelPhase.IN_FLIGHT: "while it ran",
}


def canceled(reason: str | None, phase: CancelPhase) -> CallCanceled:
    why = f": {reason}" if reason else ""
    return CallCanceled(f"canceled {_WHERE[phase]}{why}", phase=phase, reason=reason)


def timed_out(timeout: float, phase: CancelPhase) -> CallTimeout:
    return CallTimeout(f"timed out after {timeout:g} s, {_WHERE[phase]}", phase=phase, timeout=timeout)


def dropped(pool: str, limits: QueueLimits) -> QueueDropError:
    how = "dropped for a newer call" if limits.policy is Policy.DROP_OLDEST else "refused"
    return QueueDropError(
        f"{how}: {pool} is full ({limits.max_in_flight} in flight, {limits.max_queue_depth} pending)",
        policy=limits.policy,
        max_in_flight=limits.max_in_flight,
        max_queue_depth=limits.max_queue_depth,
    )
