"""
What an executor has done so far.

Many threads end runs, and none of them should wait for another to count them: each leaves a note, and whoever asks, or
finds that there are many, adds them up.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.core.graph import RunStatus

if TYPE_CHECKING:
    from penstock.local.graphs.result import RunResult

__all__ = ["Totals"]

_MANY: Final = 1000


class Totals:
    def __init__(self) -> None:
        self.last_error: str | None = None
        self._sums = {**{str(status): 0 for status in RunStatus}, "nodes": 0}
        self._notes: deque[tuple[str, int]] = deque()
        self._adding = threading.Lock()

    def add(self, result: RunResult) -> None:
        self._notes.append((result.status, len(result) if result.whole else len(result.values)))
        if result.failed:
            node, error = next(iter(result.errors.items()))
            self.last_error = f"node {node!r} of {result.plan.name!r}: {type(error).__name__}: {error}"
        if len(self._notes) > _MANY and self._adding.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._adding.release()

    def as_dict(self) -> dict[str, int]:
        with self._adding:
            self._add_up()
            return dict(self._sums)

    def _add_up(self) -> None:
        for _ in range(len(self._notes)):
            status, nodes = self._notes.popleft()
            self._sums[status] += 1
            self._sums["nodes"] += nodes
