"""
The pulse for whoever watches: a frame a second, put into bytes once and sent to all. Ten open pages cost what one costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from penstock import wire
from penstock.core.jobs.job import Event
from penstock.core.jobs.ledger import EVERYTHING
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import seconds
from penstock.scheduler.service import SchedulerService
from penstock.scheduler.stats import Frame, LiveStats, Second, percentiles
from penstock.server.event_hub import EventRun
from penstock.server.views import event_view, when
from penstock.stores.api import Query, Store

__all__ = ["StatsStream", "second_view"]

log = logging.getLogger("penstock.server")

_EVERY: Final = 1.0
#: A commit that nobody told us of is seen after so many beats.
_UNTOLD: Final = 10


class StatsStream:
    """Beats on the server's loop; the reading is done in the pool."""

    def __init__(self, service: SchedulerService, run: EventRun, loop: asyncio.AbstractEventLoop) -> None:
        self._service, self._run, self._loop = service, run, loop
        self.pulse = LiveStats(service.store, service.machine, service.rules.host)
        self.line = b""
        self._news, self._rested = True, 0
        service.store.on_change(self._heard)
        self._beaten = asyncio.Condition()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    def _heard(self) -> None:
        """From any thread, at every commit."""
        self._news = True

    def start(self) -> None:
        self._task = self._loop.create_task(self._beat())

    async def _beat(self) -> None:
        while not self.closed:
            try:
                await self._beat_once()
            except Exception:  # the store is in trouble, which others tell; the next second may be better
                log.exception("the pulse was missed")
                self._news = True
            async with self._beaten:
                self._beaten.notify_all()
            await asyncio.sleep(_EVERY)

    async def _beat_once(self) -> None:
        """What nobody waits for is counted, and not put into words; and where there is nothing to count, the store is left alone."""
        if self._watchers:
            self.line = await self._run(self._step)
            return
        self.line = b""  # or whoever comes next would begin with an old one
        if self._news or self._rested >= _UNTOLD:
            await self._run(self._count)
        elif self._service.store.shared:
            await self._run(self._rest)  # the clock of a server may have to be asked for
        else:
            self._rest()

    def _count(self) -> None:
        self._news, self._rested = False, 0  # before it looks: what comes after that is news again
        self.pulse.step(self._service.store.now())

    def _rest(self) -> None:
        self._rested += 1
        self.pulse.rest(self._service.store.now())

    def _step(self) -> bytes:
        self._count()
        frame = self.pulse.frame()
        assert frame is not None
        return b"id: %d\ndata: %b\n\n" % (frame.number, msgspec.json.encode(_view(self._service, frame)))

    async def next(self) -> bytes:
        self._watchers += 1
        try:
            async with self._beaten:
                await self._beaten.wait()
        finally:
            self._watchers -= 1
        return self.line

    async def close(self) -> None:
        self.closed = True
        if self._task is not None:
            self._task.cancel()
        async with self._beaten:
            self._beaten.notify_all()


def _names(store: Store, events: Sequence[Event]) -> dict[str, tuple[str, str]]:
    jobs = store.jobs(list({event.job_id: None for event in events if event.job_id is not None}))
    return {str(job.job_id): (str(job.intent.addon_id), job.intent.job_type) for job in jobs}


def _view(service: SchedulerService, frame: Frame) -> wire.StatsFrame:
    store, now = service.store, frame.second.at
    conditions = service.machine.conditions(now)
    oldest = store.find(Query(states=[JobState.QUEUED], limit=1)) if frame.second.queued else []
    return wire.StatsFrame(
        now=when(now),
        second=second_view(frame.second),
        jobs=frame.jobs,
        waiting=service.job_service.waiting,
        quiet=conditions.quiet,
        paused=any(addon.paused for addon in store.addons() if addon.addon_id == EVERYTHING),
        oldest_queued_sec=seconds(max(0, now - oldest[0].created_at)) if oldest else None,
        wait=_pair(frame.wait),
        run=_pair(frame.run),
        events=[event_view(event) for event in frame.events],
        names=_names(store, frame.events),
        denials=dict(frame.denials),
    )


def _pair(spans: tuple[int, int] | None) -> tuple[float, float] | None:
    return None if spans is None else (seconds(spans[0]), seconds(spans[1]))


def second_view(second: Second) -> wire.StatsSecond:
    wait, run = _pair(percentiles(second.waits)), _pair(percentiles(second.runs))
    return wire.StatsSecond(
        at=second.at / 1e6,
        submitted=second.counts["submitted"],
        started=second.counts["started"],
        done=second.counts["done"],
        failed=second.counts["failed"],
        queued=second.queued,
        in_use=second.in_use,
        capacity=second.capacity,
        busy=second.busy,
        wait_p50=wait and wait[0],
        wait_p95=wait and wait[1],
        run_p50=run and run[0],
        run_p95=run and run[1],
    )
