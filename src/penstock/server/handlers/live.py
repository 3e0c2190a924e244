"""
Handlers for what a client follows: the trail, as JSON pages and as server-sent events; the live stats; and the pools and graphs of attached programs.

An id of the stream is a number of the trail, so a client that comes back with its Last-Event-ID misses nothing and sees nothing twice. Each
stream reads at its own pace. A stream whose client does not read is dropped, and the other streams do not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from penstock import wire
from penstock.core.jobs.job import Event, EventKind, shown
from penstock.core.jobs.types import AddonId, JobId
from penstock.scheduler.pulling_workers import WorkerKinds
from penstock.server.app_state import Request
from penstock.server.body import number
from penstock.server.event_hub import second_view
from penstock.server.problems import BadFields, Forbidden
from penstock.server.views import event_view, said

__all__ = ["HEARTBEAT_SEC", "attach", "events", "history", "programs", "pulse", "stream"]

HEARTBEAT_SEC: Final = 15.0
_PAGE: Final = 500


async def events(call: Request[wire.EventsQuery, None]) -> wire.Events:
    asked, app_state = call.query, call.app_state
    cursor = _Cursor(call, asked.after, said(asked.job_id), said(asked.addon_id))
    await cursor.check()
    if not asked.wait_sec:
        return await _page(cursor, asked.limit)
    until = app_state.loop.time() + asked.wait_sec
    gone = call.watch()
    async with app_state.trail as trail:
        while True:
            seen, before = trail.position, cursor.after
            page = await _page(cursor, asked.limit)
            left = until - app_state.loop.time()
            if page.events or left <= 0 or gone.done() or trail.closed:
                return page
            if cursor.after == before:
                await call.sooner(trail.wait(seen, left, cursor.wants))


async def _page(cursor: _Cursor, limit: int) -> wire.Events:
    """From the store itself: who has just been told of a submit must find it in the trail."""
    found = await cursor.read(limit, direct=True)
    return wire.Events([event_view(event) for entry in found for event in shown(entry)], cursor.after)


async def stream(call: Request[wire.StreamQuery, None]) -> AsyncIterator[bytes]:
    """The first step checks and may refuse; everything after it is the stream itself."""
    asked = call.query
    after = _last_event_id(call) if b"last-event-id" in call.headers else said(asked.after)
    addon_id = said(asked.addon_id)
    cursor = _Cursor(call, after or 0, said(asked.job_id), addon_id)
    await cursor.check()
    worker = None
    if addon_id is not None and cursor.job_id is None and wire.Scope.WORKER_LEASE in call.principal.scopes:
        worker = WorkerKinds(AddonId(addon_id))
    return _stream(call, cursor, worker, from_now=after is None and cursor.job_id is None)


def _last_event_id(call: Request[Any, Any]) -> int:
    given = number(call.headers[b"last-event-id"])
    if given is None or given > wire.MAX_NUMBER:
        problem = {"field": "Last-Event-ID", "message": "must be an id that this stream has sent"}
        raise BadFields(f"Last-Event-ID {problem['message']}", problems=[problem])
    return given


async def _stream(
    call: Request[Any, Any], cursor: _Cursor, worker: WorkerKinds | None, *, from_now: bool
) -> AsyncIterator[bytes]:
    """`worker`: what a two-step worker that is told of reservations by this stream can run. It is present while it listens."""
    gone, app_state = call.watch(), call.app_state
    offer_at = 0.0
    async with call.app_state.trail as trail:
        if from_now:
            cursor.after = trail.position
        yield b"retry: 1000\n\n"
        while not (gone.done() or trail.closed):
            if worker is not None and app_state.loop.time() >= offer_at:
                await call.run(app_state.job_service.offer_to, worker)
                offer_at = app_state.loop.time() + HEARTBEAT_SEC
            seen, before = trail.position, cursor.after
            found = await cursor.read(_PAGE)
            if found:
                yield b"".join(cursor.line(event) for entry in found for event in shown(entry))
            elif cursor.after == before:
                told = asyncio.ensure_future(trail.wait(seen, HEARTBEAT_SEC, cursor.wants))
                await asyncio.wait((told, gone), return_when=asyncio.FIRST_COMPLETED)
                if not told.done():
                    told.cancel()
                elif not told.result():
                    yield b": still here\n\n"


class _Cursor:
    """Where a reader is. With a job it counts that job's `n`, without one the `seq` of everything."""

    def __init__(self, call: Request[Any, Any], after: int, job_id: str | None, addon_id: str | None) -> None:
        self._call, self.after = call, after
        self.job_id = None if job_id is None else JobId(job_id)
        self._addon_id = call.addon(addon_id)

    async def check(self) -> None:
        if self.job_id is not None:
            await self._call.run(self._call.own_job, self.job_id)

    async def read(self, limit: int, *, direct: bool = False) -> list[Event]:
        """Moves on past what is not for this reader too: it need not be looked at twice."""
        app_state = self._call.app_state
        if self.job_id is not None:
            found = await self._call.run(app_state.store.events, self.after, limit, self.job_id)
            self.after = found[-1].n if found else self.after
            return await self._seen(found)
        found = await (
            self._call.run(app_state.store.events, self.after, limit)
            if direct
            else app_state.trail.page(self.after, limit, self._call.run)
        )
        if found:
            self.after = found[-1].seq
            if self._addon_id is not None:
                found = await self._call.run(app_state.owners.only, found, self._addon_id)
        return await self._seen(found)

    async def _seen(self, events: list[Event]) -> list[Event]:
        """As this token may see them. Beside the loop: whose job one names may have to be looked up."""
        viewer = self._call.viewer
        if viewer is None or not events:
            return events
        return await self._call.run(lambda: [viewer.event(event) for event in events])

    def wants(self, event: Event) -> bool:
        return self.job_id is None or event.job_id == self.job_id

    def line(self, event: Event) -> bytes:
        number = event.seq if self.job_id is None else event.n
        if event.kind is EventKind.ADMITTED and event.job_id is not None:
            number -= 1  # a client that comes back after it has not seen the other event of its entry
        data = msgspec.json.encode(event_view(event))
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, event.kind.encode(), data)


async def pulse(call: Request[None, None]) -> AsyncIterator[bytes]:
    """To whoever may see everything: it tells of all addons."""
    _unbound(call)
    return _beats(call)


async def _beats(call: Request[Any, Any]) -> AsyncIterator[bytes]:
    beats, gone = call.app_state.beats, call.watch()
    if beats.line:
        yield beats.line
    while not (gone.done() or beats.closed):
        await call.sooner(beats.next())
        if not (gone.done() or beats.closed):
            yield beats.line


def history(call: Request[None, None]) -> wire.History:
    _unbound(call)
    past = call.app_state.beats.pulse.history()
    rows = [second_view(second) for second in past]
    return wire.History(
        **{name: [getattr(row, name) for row in rows] for name in wire.StatsSecond.__struct_fields__}
    )


def _unbound(call: Request[Any, Any]) -> None:
    if call.principal.addon_id is not None:
        raise Forbidden(f"this token is bound to addon {call.principal.addon_id}, and this tells of all")


def attach(call: Request[None, wire.Attach]) -> wire.Ok:
    call.app_state.programs.hear(call.principal.addon_id, call.body, call.store.now())
    return wire.Ok()


def programs(call: Request[None, None]) -> wire.ProgramList:
    return wire.ProgramList(call.app_state.programs.shown(call.principal.addon_id, call.store.now()))
