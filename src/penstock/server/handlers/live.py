"""Handlers for what moves by the second: the pulse, and the pools and graphs of programs that attached them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from penstock import wire
from penstock.server.app_state import Request
from penstock.server.problems import Forbidden
from penstock.server.stats_stream import second_view

__all__ = ["attach", "history", "programs", "pulse"]


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
