"""
Handlers for live data: the trail as JSON pages and as server-sent events, the live stats, the pools and
graphs of attached programs, and the output of commands and functions.

The ids of a stream are numbers of the trail, so a client that reconnects with its Last-Event-ID misses no
event and gets none twice. Each stream reads at its own pace. If a client does not read, its stream is closed,
and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import UnsetType

from penstock import wire
from penstock.core.errors import NotFound
from penstock.core.jobs.job import Event, EventKind, Job, shown
from penstock.core.jobs.states import SETTLED, DispatchPhase
from penstock.core.jobs.types import AddonId, JobId, dispatch_id_of, when
from penstock.core.jobs.workers import WorkerKinds
from penstock.runner.output import Piece
from penstock.server.event_hub import event_view, second_view
from penstock.server.problems import BadFields, naming_fields
from penstock.server.request import Request, as_answer, number, or_none

HEARTBEAT_SEC: Final = 15.0
_PAGE: Final = 500


async def events(request: Request[wire.EventsQuery, None]) -> wire.Events:
    query, app_state = request.query, request.app_state
    cursor = _Cursor(request, query.after, or_none(query.job_id), or_none(query.addon_id))
    await cursor.check()
    if not query.wait_sec:
        return await _page(cursor, query.limit)
    until = app_state.loop.time() + query.wait_sec
    gone = request.watch()
    async with app_state.event_hub as hub:
        while True:
            seen, before = hub.position, cursor.after
            page = await _page(cursor, query.limit)
            remaining = until - app_state.loop.time()
            if page.events or remaining <= 0 or gone.done() or hub.closed:
                return page
            if cursor.after == before:
                await request.unless_gone(hub.wait(seen, remaining, cursor.wants))


async def _page(cursor: _Cursor, limit: int) -> wire.Events:
    """A page read from the store, not from the hub: a client whose submit was answered must find it there."""
    entries = await cursor.read(limit, direct=True)
    return wire.Events([event_view(event) for entry in entries for event in shown(entry)], cursor.after)


async def stream(request: Request[wire.StreamQuery, None]) -> AsyncIterator[bytes]:
    """Follow the trail. The request is checked here, before the stream begins, so that it can be refused."""
    query = request.query
    after = _last_event_id(request) if b"last-event-id" in request.headers else or_none(query.after)
    addon_id = or_none(query.addon_id)
    cursor = _Cursor(request, after or 0, or_none(query.job_id), addon_id)
    await cursor.check()
    worker = None
    if addon_id is not None and cursor.job_id is None and wire.Scope.WORKER_LEASE in request.principal.scopes:
        worker = WorkerKinds(AddonId(addon_id))
    return _stream(request, cursor, worker, from_now=after is None and cursor.job_id is None)


def _last_event_id(request: Request[Any, Any]) -> int:
    given = number(request.headers[b"last-event-id"])
    if given is None or given > wire.MAX_NUMBER:
        raise naming_fields(BadFields, ("Last-Event-ID", "must be an id that this stream has sent"))
    return given


async def _stream(
    request: Request[Any, Any], cursor: _Cursor, worker: WorkerKinds | None, *, from_now: bool
) -> AsyncIterator[bytes]:
    """
    The lines of a stream. `worker`: the kinds of jobs of a polling worker that learns of reservations from
    this stream; it counts as present while it reads.
    """
    gone, app_state = request.watch(), request.app_state
    offer_at = 0.0
    async with request.app_state.event_hub as hub:
        if from_now:
            cursor.after = hub.position
        yield b"retry: 1000\n\n"
        while not (gone.done() or hub.closed):
            if worker is not None and app_state.loop.time() >= offer_at:
                await request.run(app_state.job_service.offer_to, worker)
                offer_at = app_state.loop.time() + HEARTBEAT_SEC
            seen, before = hub.position, cursor.after
            entries = await cursor.read(_PAGE)
            if entries:
                yield b"".join(cursor.line(event) for entry in entries for event in shown(entry))
            elif cursor.after == before and (
                await request.unless_gone(hub.wait(seen, HEARTBEAT_SEC, cursor.wants)) is False
            ):
                yield b": still here\n\n"


class _Cursor:
    """The position of a reader of the trail: `seq`, or `n` if it reads the events of one job."""

    def __init__(
        self, request: Request[Any, Any], after: int, job_id: str | None, addon_id: str | None
    ) -> None:
        self._call, self.after = request, after
        self.job_id = None if job_id is None else JobId(job_id)
        self._addon_id = request.addon(addon_id)

    async def check(self) -> None:
        if self.job_id is not None:
            await self._call.run(self._call.own_job, self.job_id)

    async def read(self, limit: int, *, direct: bool = False) -> list[Event]:
        """Read the next events for this reader, and skip those that it may not see."""
        app_state = self._call.app_state
        if self.job_id is not None:
            entries = await self._call.run(app_state.store.events, self.after, limit, self.job_id)
            self.after = entries[-1].n if entries else self.after
            return await self._seen(entries)
        entries = await (
            self._call.run(app_state.store.events, self.after, limit)
            if direct
            else app_state.event_hub.page(self.after, limit, self._call.run)
        )
        if entries:
            self.after = entries[-1].seq
            if self._addon_id is not None:
                entries = await self._call.run(app_state.event_addons.filter, entries, self._addon_id)
        return await self._seen(entries)

    async def _seen(self, events: list[Event]) -> list[Event]:
        """
        The events without what this token may not see. Runs in a thread, because it may have to read the
        addon of a job.
        """
        viewer = self._call.viewer
        if viewer is None or not events:
            return events
        return await self._call.run(lambda: [viewer.event(event) for event in events])

    def wants(self, event: Event) -> bool:
        return self.job_id is None or event.job_id == self.job_id

    def line(self, event: Event) -> bytes:
        number = event.seq if self.job_id is None else event.n
        if event.kind is EventKind.ADMITTED and event.job_id is not None:
            number -= 1  # a client that reconnects after this event must get the entry's other event
        data = msgspec.json.encode(event_view(event))
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, event.kind.encode(), data)


async def stats_stream(request: Request[None, None]) -> AsyncIterator[bytes]:
    """Follow the live stats. They cover all addons, so a bound token is refused."""
    request.check_unbound(", and this shows all addons")
    return _frames(request)


async def _frames(request: Request[Any, Any]) -> AsyncIterator[bytes]:
    stats, gone = request.app_state.stats, request.watch()
    if stats.line:
        yield stats.line
    while not (gone.done() or stats.closed):
        await request.unless_gone(stats.next())
        if not (gone.done() or stats.closed):
            yield stats.line


#: How many of the newest events are searched for alerts, and how many alerts are listed.
_ALERTS_AMONG: Final = 500_000
_MOST_ALERTS: Final = 200


def alerts(request: Request[None, None]) -> wire.AlertList:
    """The newest alerts. A bound token gets those of its addon."""
    store, bound = request.store, request.principal.addon_id
    events: list[Event] = []
    after = max(0, store.newest() - _ALERTS_AMONG)
    while page := store.events_of([EventKind.ALERT], after, _PAGE):
        events = [*events, *page][-_MOST_ALERTS:] if bound is None else [*events, *page]
        after = page[-1].seq
    alert_list = [
        wire.AlertInfo(
            seq=event.seq,
            at=when(event.at),
            kind=event.reason,
            addon_id=event.data.get("addon_id"),
            job_id=event.job_id,
            text=str(event.data.get("text", "")),
        )
        for event in reversed(events)
        if bound is None or event.data.get("addon_id") == bound
    ]
    return wire.AlertList(alert_list[:_MOST_ALERTS])


#: Ranges up to this many seconds are shown second by second.
_BY_SECOND: Final = 900


def stats_history(request: Request[wire.HistoryQuery, None]) -> wire.History:
    request.check_unbound(", and this shows all addons")
    stats, span = request.app_state.stats, request.query.range_sec
    now = request.store.now() / 1e6
    rows: Sequence[wire.StatsSecond | wire.StatsPoint]
    if span <= _BY_SECOND:
        rows = [row for second in stats.live.history() if (row := second_view(second)).at > now - span]
    else:
        rows = stats.history.points(now, span)
    return wire.History(
        **{name: [getattr(row, name) for row in rows] for name in wire.StatsSecond.__struct_fields__}
    )


def attach(request: Request[None, wire.AttachRequest]) -> wire.Ok:
    request.app_state.programs.update(request.principal.addon_id, request.body, request.store.now())
    return wire.Ok()


def programs(request: Request[None, None]) -> wire.ProgramList:
    return wire.ProgramList(request.app_state.programs.shown(request.principal.addon_id, request.store.now()))


_MOST_BYTES: Final = 262_144
#: Seconds between two reads of output: another process writes it, without an event.
_READ_AGAIN: Final = 0.1


async def logs(request: Request[wire.LogsQuery, None]) -> wire.Logs:
    app_state, query = request.app_state, request.query
    until = app_state.loop.time() + query.wait_sec
    gone = request.watch() if query.wait_sec else None
    while True:
        answer = await request.run(_logs, request)
        remaining = until - app_state.loop.time()
        if (
            answer.pieces
            or answer.over
            or remaining <= 0
            or app_state.event_hub.closed
            or (gone is not None and gone.done())
        ):
            return answer
        await asyncio.sleep(min(remaining, _READ_AGAIN))


def _logs(request: Request[wire.LogsQuery, None]) -> wire.Logs:
    query, job = request.query, request.own_job(request.job_id)
    attempt = job.fence if isinstance(query.attempt, UnsetType) else query.attempt
    if attempt > job.fence:
        raise NotFound(f"there is no attempt {attempt} of job {job.job_id}", job_id=job.job_id)
    # Check this before reading the output: then the output of an ended attempt is complete.
    over = _is_over(request, job, attempt)
    pieces = [] if not attempt else list(_pieces(request, job, attempt))
    return wire.Logs(
        job_id=job.job_id,
        attempt=attempt,
        pieces=[
            as_answer(wire.LogPiece, piece, text=piece.data.decode(errors="replace")) for piece in pieces
        ],
        next=pieces[-1].end if pieces else query.offset,
        over=over,
    )


def _is_over(request: Request[Any, Any], job: Job, attempt: int) -> bool:
    if not attempt:
        return job.state in SETTLED
    lease = request.store.dispatch(dispatch_id_of(job.job_id, attempt))
    return lease is None or lease.phase is DispatchPhase.ENDED


def _pieces(request: Request[wire.LogsQuery, None], job: Job, attempt: int) -> Iterable[Piece]:
    if request.app_state.output is None:
        return ()
    output = request.app_state.output(dispatch_id_of(job.job_id, attempt))
    return output.read(request.query.offset, _MOST_BYTES)
