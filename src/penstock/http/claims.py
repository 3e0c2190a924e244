"""
Everybody who waits for jobs of the same kinds, one behind the other.

When something happens the first one looks; those behind it only if it found enough. A thousand idle workers then cost one
look and not a thousand.
"""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.engine.desk import GrantedJob, JobService
from penstock.engine.dispatcher import WorkerKinds
from penstock.http.trail import EventHub, EventRun

__all__ = ["ClaimQueue"]

#: What was found empty with nothing told since is believed for so long: time alone can change it.
_EMPTY_FOR: Final = 1.0
_MOST_KINDS: Final = 1_000


class ClaimQueue:
    def __init__(self, job_service: JobService, trail: EventHub) -> None:
        self._job_service, self._trail = job_service, trail
        self._locks: dict[WorkerKinds, asyncio.Lock] = {}
        self._empty: dict[WorkerKinds, tuple[int, float]] = {}

    async def take(self, run: EventRun, kinds: WorkerKinds, limit: int, worker: str) -> list[GrantedJob]:
        clock = asyncio.get_running_loop().time
        async with self._lock(kinds):
            position, now = self._trail.position, clock()
            at, until = self._empty.get(kinds, (-1, 0.0))
            if at == position and now < until:
                return []
            claimed = await run(self._job_service.claim, kinds, limit, worker)
            if len(claimed) < limit:
                self._empty[kinds] = (position, now + _EMPTY_FOR)
            return claimed

    def _lock(self, kinds: WorkerKinds) -> asyncio.Lock:
        if len(self._locks) > _MOST_KINDS:
            idle = [known for known, lock in self._locks.items() if not lock.locked()]
            for known in idle:
                del self._locks[known]
                self._empty.pop(known, None)
        return self._locks.setdefault(kinds, asyncio.Lock())
