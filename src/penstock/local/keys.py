"""
The keys of a gate's calls: which calls have which, and which are canceled.

A canceled key is sticky: it refuses later calls, too, until it is cleared. All of this is done with the gate's lock held,
so that no cancel can fall between the look at a key and the entry of its call.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from penstock.core.errors import CallCanceled
from penstock.core.text import safe_repr
from penstock.core.ticket import CancelPhase
from penstock.local.call import Call


class Keys:
    def __init__(self) -> None:
        self._calls: dict[Hashable, dict[Call[Any], None]] = {}  # a dict, because a set has no order
        self._canceled: dict[Hashable, str | None] = {}

    def enter(self, call: Call[Any]) -> None:
        """Raises if its key is canceled, or is none."""
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
        """The calls that have it, in the order in which they came."""
        self._canceled[key] = reason
        return list(self._calls.get(key, ()))

    def clear(self, key: Hashable) -> bool:
        """False if it was not canceled."""
        return self._canceled.pop(key, self) is not self

    def __len__(self) -> int:
        """How many keys calls have at present."""
        return len(self._calls)
