"""
Runs that were asked to make room for another, and have not ended since.

Kept in the memory of the scheduler that asked: a run of our own hears of it at once, a worker of an add-on with its next heartbeat. After a crash nobody
is asked any more, and whoever still should make room is asked anew.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.words import DispatchId

__all__ = ["YieldRequests"]


class YieldRequests:
    def __init__(self) -> None:
        self._asked: set[DispatchId] = set()
        self._listeners: list[Callable[[DispatchId], None]] = []

    def __contains__(self, dispatch_id: DispatchId) -> bool:
        return dispatch_id in self._asked

    def on_ask(self, listener: Callable[[DispatchId], None]) -> None:
        """Also called when somebody is asked again."""
        self._listeners.append(listener)

    def ask(self, dispatch_id: DispatchId) -> None:
        self._asked.add(dispatch_id)
        for listener in self._listeners:
            listener(dispatch_id)

    def withdraw(self, dispatch_id: DispatchId) -> None:
        """It has ended, or its room is no longer needed."""
        self._asked.discard(dispatch_id)
