"""
Handlers for what a client follows: the trail, as JSON pages and as server-sent events; the live stats; the
pools and graphs of attached programs; and the output of jobs that the scheduler runs itself.

An id of the stream is a number of the trail, so a client that comes back with its Last-Event-ID misses
nothing and sees nothing twice. Each stream reads at its own pace. A stream whose client does not read is
dropped, and the other streams do not notice.
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


async def events(call: Request[wire.EventsQuery, None]) -> wire.Events:
    query, app_state = call.query, call.app_state
    cursor = _Cursor(call, query.after, or_none(query.job_id), or_none(query.addon_id))
    await cursor.check()
    if not query.wait_sec:
        return await _page(cursor, query.limit)
    until = app_state.loop.time() + query.wait_sec
    gone = call.watch()
    async with app_state.trail as trail:
        while True:
            seen, before = trail.position, cursor.after
            page = await _page(cursor, query.limit)
            remaining = until - app_state.loop.time()
            if page.events or remaining <= 0 or gone.done() or trail.closed:
                return page
            if cursor.after == before:
                await call.sooner(trail.wait(seen, remaining, cursor.wants))


async def _page(cursor: _Cursor, limit: int) -> wire.Events:
    """Read the store itself: a client whose submit was answered must find it in the trail."""
    entries = await cursor.read(limit, direct=True)
    return wire.Events([event_view(event) for entry in entries for event in shown(entry)], cursor.after)


async def stream(call: Request[wire.StreamQuery, None]) -> AsyncIterator[bytes]:
    """The first step checks and may refuse; everything after it is the stream itself."""
    query = call.query
    after = _last_event_id(call) if b"last-event-id" in call.headers else or_none(query.after)
    addon_id = or_none(query.addon_id)
    cursor = _Cursor(call, after or 0, or_none(query.job_id), addon_id)
    await cursor.check()
    worker = None
    if addon_id is not None and cursor.job_id is None and wire.Scope.WORKER_LEASE in call.principal.scopes:
        worker = WorkerKinds(AddonId(addon_id))
    return _stream(call, cursor, worker, from_now=after is None and cursor.job_id is None)


def _last_event_id(call: Request[Any, Any]) -> int:
    given = number(call.headers[b"last-event-id"])
    if given is None or given > wire.MAX_NUMBER:
        raise naming_fields(BadFields, ("Last-Event-ID", "must be an id that this stream has sent"))
    return given


async def _stream(
    call: Request[Any, Any], cursor: _Cursor, worker: WorkerKinds | None, *, from_now: bool
) -> AsyncIterator[bytes]:
    """
    `worker`: the kinds of jobs of a two-step worker that hears of reservations by this stream. It is present
    while it reads.
    """
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
            entries = await cursor.read(_PAGE)
            if entries:
                yield b"".join(cursor.line(event) for entry in entries for event in shown(entry))
            elif cursor.after == before and (
                await call.sooner(trail.wait(seen, HEARTBEAT_SEC, cursor.wants)) is False
            ):
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
            entries = await self._call.run(app_state.store.events, self.after, limit, self.job_id)
            self.after = entries[-1].n if entries else self.after
            return await self._seen(entries)
        entries = await (
            self._call.run(app_state.store.events, self.after, limit)
            if direct
            else app_state.trail.page(self.after, limit, self._call.run)
        )
        if entries:
            self.after = entries[-1].seq
            if self._addon_id is not None:
                entries = await self._call.run(app_state.owners.only, entries, self._addon_id)
        return await self._seen(entries)

    async def _seen(self, events: list[Event]) -> list[Event]:
        """
        The events as this token may see them. Beside the loop: the addon of a job may have to be looked up.
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
            number -= 1  # a client that comes back after it has not seen the other event of its entry
        data = msgspec.json.encode(event_view(event))
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, event.kind.encode(), data)


async def pulse(call: Request[None, None]) -> AsyncIterator[bytes]:
    """Only for a token that is bound to no addon: the live stats are of all addons."""
    call.check_unbound(", and this shows all addons")
    return _frames(call)


async def _frames(call: Request[Any, Any]) -> AsyncIterator[bytes]:
    stats, gone = call.app_state.stats, call.watch()
    if stats.line:
        yield stats.line
    while not (gone.done() or stats.closed):
        await call.sooner(stats.next())
        if not (gone.done() or stats.closed):
            yield stats.line


#: So many of the newest events are searched for alerts, and so many alerts are listed.
_ALERTS_AMONG: Final = 500_000
_MOST_ALERTS: Final = 200


def alerts(call: Request[None, None]) -> wire.AlertList:
    """The newest alerts. A bound token sees those of its addon."""
    store, bound = call.store, call.principal.addon_id
    events: list[Event] = []
    after = max(0, store.newest() - _ALERTS_AMONG)
    while page := store.events_of([EventKind.ALERT], after, _PAGE):
        events = [*events, *page][-_MOST_ALERTS:] if bound is None else [*events, *page]
        after = page[-1].seq
    found = [
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
    return wire.AlertList(found[:_MOST_ALERTS])


#: Up to so many seconds the charts show single seconds.
_BY_SECOND: Final = 900


def history(call: Request[wire.HistoryQuery, None]) -> wire.History:
    call.check_unbound(", and this shows all addons")
    stats, span = call.app_state.stats, call.query.range_sec
    now = call.store.now() / 1e6
    rows: Sequence[wire.StatsSecond | wire.StatsPoint]
    if span <= _BY_SECOND:
        rows = [row for second in stats.live.history() if (row := second_view(second)).at > now - span]
    else:
        rows = stats.history.points(now, span)
    return wire.History(
        **{name: [getattr(row, name) for row in rows] for name in wire.StatsSecond.__struct_fields__}
    )


def attach(call: Request[None, wire.Attach]) -> wire.Ok:
    call.app_state.programs.update(call.principal.addon_id, call.body, call.store.now())
    return wire.Ok()


def programs(call: Request[None, None]) -> wire.ProgramList:
    return wire.ProgramList(call.app_state.programs.shown(call.principal.addon_id, call.store.now()))


_MOST_BYTES: Final = 262_144
#: Another process writes the output, and its writing causes no event.
_READ_AGAIN: Final = 0.1


async def logs(call: Request[wire.LogsQuery, None]) -> wire.Logs:
    app_state, query = call.app_state, call.query
    until = app_state.loop.time() + query.wait_sec
    gone = call.watch() if query.wait_sec else None
    while True:
        answer = await call.run(_logs, call)
        remaining = until - app_state.loop.time()
        if (
            answer.pieces
            or answer.over
            or remaining <= 0
            or app_state.trail.closed
            or (gone is not None and gone.done())
        ):
            return answer
        await asyncio.sleep(min(remaining, _READ_AGAIN))


def _logs(call: Request[wire.LogsQuery, None]) -> wire.Logs:
    query, job = call.query, call.own_job(call.job_id)
    attempt = job.fence if isinstance(query.attempt, UnsetType) else query.attempt
    if attempt > job.fence:
        raise NotFound(f"there is no attempt {attempt} of job {job.job_id}", job_id=job.job_id)
    # Before the last look at the output: whatever was written by the end of the run is then in it.
    over = _is_over(call, job, attempt)
    pieces = [] if not attempt else list(_pieces(call, job, attempt))
    return wire.Logs(
        job_id=job.job_id,
        attempt=attempt,
        pieces=[
            as_answer(wire.LogPiece, piece, text=piece.data.decode(errors="replace")) for piece in pieces
        ],
        next=pieces[-1].end if pieces else query.offset,
        over=over,
    )


def _is_over(call: Request[Any, Any], job: Job, attempt: int) -> bool:
    if not attempt:
        return job.state in SETTLED
    lease = call.store.dispatch(dispatch_id_of(job.job_id, attempt))
    return lease is None or lease.phase is DispatchPhase.ENDED


def _pieces(call: Request[wire.LogsQuery, None], job: Job, attempt: int) -> Iterable[Piece]:
    if call.app_state.output is None:
        return ()
    output = call.app_state.output(dispatch_id_of(job.job_id, attempt))
    return output.read(call.query.offset, _MOST_BYTES)
