"""Handlers for people: stats, leases, capacity, addons, hosts, health, pause and resume, and load signals of applications."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec import UnsetType
from msgspec.structs import replace

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.admission import EVERYTHING
from penstock.core.jobs.load import is_fresh
from penstock.core.jobs.spending import uses
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, HostId, seconds
from penstock.scheduler.hosts import VERSION
from penstock.server.app_state import AppState, Request
from penstock.server.problems import Forbidden
from penstock.server.views import addon_view, host_view, job_counts, lease_view, or_none, when
from penstock.stores.api import Addon, DrainHost, Query, SetAddon, committed


def stats(call: Request[None, None]) -> wire.Stats:
    """To a token that is bound to an addon: that addon's numbers. What the machine is used by in all is everybody's business."""
    service, store = call.app_state.service, call.store
    now, shown = store.now(), _shown(call)
    conditions = service.machine.conditions(now)
    per_addon = {a.addon_id: job_counts(a) for a in shown}
    totals: Counter[str] = Counter()
    for jobs in per_addon.values():
        totals.update(jobs)
    oldest = store.find(Query(states=[JobState.QUEUED], addon_id=call.addon(None), limit=1))
    return wire.Stats(
        jobs=dict(totals),
        addons={str(name): jobs for name, jobs in per_addon.items()},
        oldest_queued_sec=seconds(max(0, now - oldest[0].created_at)) if oldest else None,
        units_in_use=store.ledger(service.rules.host).units,
        in_flight=sum(totals[state] for state in (JobState.DISPATCHING, JobState.RUNNING)),
        capacity=conditions.capacity,
        quiet=conditions.quiet,
        paused=_all_paused(store.addons()),
        waiting=call.app_state.job_service.waiting,
        newest_event=store.newest(),
        now=when(now),
        hosts=_hosts(call),
    )


def _shown(call: Request[Any, Any]) -> list[Addon]:
    return [a for a in call.store.addons() if a.addon_id != EVERYTHING and call.owns(a.addon_id)]


def _all_paused(addons: list[Addon]) -> bool:
    return any(addon.paused for addon in addons if addon.addon_id == EVERYTHING)


def leases(call: Request[wire.LeasesQuery, None]) -> wire.LeaseList:
    leases_now = call.store.live(addon_id=call.addon(or_none(call.query.addon_id)), limit=call.query.limit)
    return wire.LeaseList([lease_view(dispatch) for dispatch in leases_now])


def capacity(call: Request[None, None]) -> wire.CapacityInfo:
    service = call.app_state.service
    now = call.store.now()
    conditions, rules = service.machine.conditions(now), service.rules
    in_use = call.store.ledger(rules.host).units
    readings = [
        wire.LoadReading(r.name, r.value, when(r.at), is_fresh(r, now, rules.senses), r.source)
        for r in service.machine.readings()
        if not r.source or call.owns(r.source)
    ]
    return wire.CapacityInfo(
        host=rules.host,
        capacity=conditions.capacity,
        most=rules.capacity.most,
        in_use=in_use,
        free=max(0, conditions.capacity - in_use),
        quiet=conditions.quiet,
        quiet_sec=None if rules.capacity.fixed is not None else seconds(conditions.streak),
        busy=conditions.busy.score,
        busy_by=conditions.busy.by if call.viewer is None else call.viewer.signal(conditions.busy.by),
        draining=conditions.draining,
        readings=readings,
        hosts=_hosts(call),
    )


def signals(call: Request[None, wire.LoadSignals]) -> wire.Ok:
    body = call.body
    source = call.addon(body.addon_id)
    bound = call.principal.addon_id is not None
    call.app_state.job_service.hear(AddonId(str(source)), body.readings, body.ttl_sec, bound=bound)
    call.app_state.service.wake()
    return wire.Ok()


def addons(call: Request[None, None]) -> wire.Addons:
    return wire.Addons(_views(call, _shown(call)), _all_paused(call.store.addons()))


def _views(call: Request[Any, Any], shown: list[Addon]) -> list[wire.AddonInfo]:
    """With what each has spent, of a budget that holds on all hosts."""
    rules, now = call.app_state.service.rules, call.store.now()
    spent, budgets = call.store.ledger(rules.host).spent, rules.limits.budgets
    return [addon_view(a, uses(budgets.get(a.addon_id), spent.get(a.addon_id, {}), now)) for a in shown]


def addon_edit(call: Request[None, wire.AddonEdit]) -> wire.AddonInfo:
    body = call.body
    addon_id = AddonId(str(call.addon(body.addon_id)))
    if isinstance(body.weight, UnsetType) and isinstance(body.paused, UnsetType):
        problem = {"field": "body", "message": "must have weight, paused or both"}
        raise BadIntent(f"body {problem['message']}", problems=[problem])
    by = call.principal.name
    committed(call.store, SetAddon(addon_id, weight=or_none(body.weight), paused=or_none(body.paused), by=by))
    [edited] = _views(call, [a for a in call.store.addons() if a.addon_id == addon_id])
    return edited


def pause(call: Request[None, wire.Scoped]) -> wire.Ok:
    return _set_paused(call, paused=True)


def resume(call: Request[None, wire.Scoped]) -> wire.Ok:
    return _set_paused(call, paused=False)


def _set_paused(call: Request[None, wire.Scoped], *, paused: bool) -> wire.Ok:
    if call.body.addon_id is None and call.principal.addon_id is not None:
        raise Forbidden(f"this token is bound to addon {call.principal.addon_id}: name that one")
    job_service, addon_id = call.app_state.job_service, call.addon(call.body.addon_id) or EVERYTHING
    by = call.principal.name
    job_service.pause(addon_id, by) if paused else job_service.resume(addon_id, by)
    return wire.Ok()


def kick(call: Request[None, None]) -> wire.Ok:
    """A round now. Nobody needs it; people like to be sure."""
    call.app_state.service.wake()
    return wire.Ok()


def hosts(call: Request[None, None]) -> wire.Hosts:
    return wire.Hosts(call.app_state.service.rules.host, _hosts(call))


def _hosts(call: Request[Any, Any]) -> list[wire.KnownHost]:
    """Of itself it knows better than what it last wrote down."""
    service, now = call.app_state.service, call.store.now()
    here, conditions = service.rules.host, service.machine.conditions(now)
    visible = [
        replace(h, capacity=conditions.capacity, quiet=conditions.quiet, seen_at=now) if h.host == here else h
        for h in call.store.hosts()
    ]
    return [host_view(host, now) for host in visible]


def drain(call: Request[None, wire.HostNamed]) -> wire.Ok:
    return _set_draining(call, draining=True)


def undrain(call: Request[None, wire.HostNamed]) -> wire.Ok:
    return _set_draining(call, draining=False)


def _set_draining(call: Request[None, wire.HostNamed], *, draining: bool) -> wire.Ok:
    if call.principal.addon_id is not None:
        raise Forbidden(f"this token is bound to addon {call.principal.addon_id}: it may not change hosts")
    name = call.body.host
    if not committed(call.store, DrainHost(HostId(name), draining, call.principal.name)):
        names = ", ".join(host.host for host in call.store.hosts())
        raise NotFound(f"there is no host {name}; there is {names}", host=name)
    return wire.Ok()


def health(call: Request[None, None]) -> wire.HostInfo:
    app_state = call.app_state
    problems = problems_of(app_state)
    return wire.HostInfo(
        status="degraded" if problems else "ok",
        problems=problems,
        version=VERSION,
        host=app_state.service.rules.host,
        started_at=when(app_state.started_at),
        now=when(app_state.store.now()),
    )


def problems_of(app_state: AppState) -> list[str]:
    problems = []
    try:
        app_state.store.alarm()
    except Exception as error:  # noqa: BLE001 - every error is a part of the answer
        problems.append(f"the store cannot be read: {error}")
    try:
        trouble = app_state.store.trouble()
        app_state.service.registration.prove()
    except Exception as error:  # noqa: BLE001 - as above
        trouble = str(error)
    if trouble is not None:
        problems.append(f"the store cannot be written: {trouble}")
    if app_state.service.machine.draining:
        problems.append("it is stopping")
    if app_state.service.machine.drained:
        problems.append("this host is drained: it starts nothing more")
    return problems
