"""
Programs that show their pools and graphs here: each tells its snapshot about once a second, and is forgotten soon after it stops.

Only the latest is kept, in memory: these are gauges to look at. Nothing is decided by them, so nothing is lost with them.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Final

from penstock.core.words import SECOND, Moment
from penstock.http import wire
from penstock.http.problems import TooMany
from penstock.http.views import when

__all__ = ["Programs"]

_FORGOTTEN_AFTER: Final = 30 * SECOND
_MOST: Final = 64


class Programs:
    def __init__(self) -> None:
        self._told: dict[tuple[str | None, str], tuple[Moment, wire.Attach]] = {}
        self._lock = Lock()

    def hear(self, addon_id: str | None, told: wire.Attach, now: Moment) -> None:
        with self._lock:
            self._told = {key: kept for key, kept in self._told.items() if kept[0] > now - _FORGOTTEN_AFTER}
            if len(self._told) >= _MOST and (addon_id, told.name) not in self._told:
                self._make_room(addon_id)
            self._told[addon_id, told.name] = (now, told)

    def _make_room(self, addon_id: str | None) -> None:
        """The addon with the most programs gives one up, unless the newcomer would then have as many: no addon can take all places."""
        held = Counter(owner for owner, _ in self._told)
        [(largest, most)] = held.most_common(1)
        if held[addon_id] + 1 >= most:
            raise TooMany(f"{_MOST} programs are attached already", retry_after_sec=30.0)
        of_largest = [key for key in self._told if key[0] == largest]
        del self._told[min(of_largest, key=lambda key: self._told[key][0])]

    def shown(self, addon_id: str | None, now: Moment) -> list[wire.Program]:
        with self._lock:
            told = sorted(self._told.items(), key=lambda item: (item[0][1], item[0][0] or ""))
        return [
            wire.Program(kept.name, when(at), kept.tasks)
            for (owner, _), (at, kept) in told
            if at > now - _FORGOTTEN_AFTER and addon_id in (None, owner)
        ]
