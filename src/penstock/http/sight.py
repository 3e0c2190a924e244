"""Handlers for those who look: stats, leases, capacity, addons, health, and what the machine is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from msgspec import UnsetType

from penstock.core.books import EVERYTHING
from penstock.core.quiet import is_fresh
from penstock.core.refusals import BadIntent, NotFound
from penstock.core.spend import uses
from penstock.core.states import State
from penstock.core.words import AddonId, HostId, seconds
from penstock.engine.version import VERSION
from penstock.http import wire
from penstock.http.office import Call, Office
from penstock.http.problems import Forbidden
from penstock.http.views import addon_view, host_view, job_counts, lease_view, said, when
from penstock.stores.protocol import Addon, Query

__all__ = [
    "addon_edit",
    "addons",
    "capacity",
    "drain",
    "health",
    "hosts",
    "kick",
    "leases",
    "pause",
    "problems_of",
    "resume",
    "signals",
    "stats",
    "undrain",
]


def stats(call: Call[None, None]) -> wire.Stats:
    """To a token that is bound to an addon: that addon's numbers. What the machine is used by in all is everybody's business."""
    house, store = call.office.house, call.store
    now, shown = store.now(), _shown(call)
    conditions = house.machine.conditions(now)
    per_addon = {a.addon_id: job_counts(a) for a in shown}
    totals: Counter[str] = Counter()
    for jobs in per_addon.values():
        totals.update(jobs)
    oldest = store.find(Query(states=[State.QUEUED], addon_id=call.addon(None), limit=1))
    return wire.Stats(
        jobs=dict(totals),
        addons={str(name): jobs for name, jobs in per_addon.items()},
        oldest_queued_sec=seconds(max(0, now - oldest[0].created_at)) if oldest else None,
        units_in_use=store.books(house.rules.host).units,
        in_flight=sum(totals[state] for state in (State.DISPATCHING, State.RUNNING)),
        capacity=conditions.capacity,
        quiet=conditions.quiet,
        paused=_all_paused(store.addons()),
        waiting=call.office.desk.waiting,
        newest_event=store.newest(),
        now=when(now),
        hosts=_hosts(call),
    )


def _shown(call: Call[Any, Any]) -> list[Addon]:
    return [a for a in call.store.addons() if a.addon_id != EVERYTHING and call.owns(a.addon_id)]


def _all_paused(addons: list[Addon]) -> bool:
    return any(addon.paused for addon in addons if addon.addon_id == EVERYTHING)


def leases(call: Call[wire.LeasesQuery, None]) -> wire.Leases:
    found = call.store.live(addon_id=call.addon(said(call.query.addon_id)), limit=call.query.limit)
    return wire.Leases([lease_view(dispatch) for dispatch in found])


def capacity(call: Call[None, None]) -> wire.Capacity:
    house = call.office.house
    now = call.store.now()
    conditions, rules = house.machine.conditions(now), house.rules
    in_use = call.store.books(rules.host).units
    readings = [
        wire.Reading(r.name, r.value, when(r.at), is_fresh(r, now, rules.senses), r.source)
        for r in house.machine.readings()
        if not r.source or call.owns(r.source)
    ]
    return wire.Capacity(
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


def signals(call: Call[None, wire.Signals]) -> wire.Done:
    asked = call.body
    source = call.addon(asked.addon_id)
    bound = call.principal.addon_id is not None
    call.office.desk.hear(AddonId(str(source)), asked.readings, asked.ttl_sec, bound=bound)
    call.office.house.driver.ring()
    return wire.Done()


def addons(call: Call[None, None]) -> wire.Addons:
    return wire.Addons(_views(call, _shown(call)), _all_paused(call.store.addons()))


def _views(call: Call[Any, Any], shown: list[Addon]) -> list[wire.Addon]:
    """With what each has spent, of a budget that holds on all hosts."""
    rules, now = call.office.house.rules, call.store.now()
    spent, budgets = call.store.books(rules.host).spent, rules.limits.budgets
    return [addon_view(a, uses(budgets.get(a.addon_id), spent.get(a.addon_id, {}), now)) for a in shown]


def addon_edit(call: Call[None, wire.AddonEdit]) -> wire.Addon:
    asked = call.body
    addon_id = AddonId(str(call.addon(asked.addon_id)))
    if isinstance(asked.weight, UnsetType) and isinstance(asked.paused, UnsetType):
        problem = {"field": "body", "message": "must have weight, paused or both"}
        raise BadIntent(f"body {problem['message']}", problems=[problem])
    by = call.principal.name
    call.store.set_addon(addon_id, weight=said(asked.weight), paused=said(asked.paused), by=by)
    [edited] = _views(call, [a for a in call.store.addons() if a.addon_id == addon_id])
    return edited


def pause(call: Call[None, wire.Scoped]) -> wire.Done:
    return _set_paused(call, paused=True)


def resume(call: Call[None, wire.Scoped]) -> wire.Done:
    return _set_paused(call, paused=False)


def _set_paused(call: Call[None, wire.Scoped], *, paused: bool) -> wire.Done:
    if call.body.addon_id is None and call.principal.addon_id is not None:
        raise Forbidden(f"this token is bound to addon {call.principal.addon_id}: name that one")
    desk, addon_id = call.office.desk, call.addon(call.body.addon_id) or EVERYTHING
    by = call.principal.name
    desk.pause(addon_id, by) if paused else desk.resume(addon_id, by)
    return wire.Done()


def kick(call: Call[None, None]) -> wire.Done:
    """A round now. Nobody needs it; people like to be sure."""
    call.office.house.driver.ring()
    return wire.Done()


def hosts(call: Call[None, None]) -> wire.Hosts:
    return wire.Hosts(call.office.house.rules.host, _hosts(call))


def _hosts(call: Call[Any, Any]) -> list[wire.KnownHost]:
    """Of itself it knows better than what it last wrote down."""
    house, now = call.office.house, call.store.now()
    here, conditions = house.rules.host, house.machine.conditions(now)
    known = [
        replace(h, capacity=conditions.capacity, quiet=conditions.quiet, seen_at=now) if h.host == here else h
        for h in call.store.hosts()
    ]
    return [host_view(host, now) for host in known]


def drain(call: Call[None, wire.HostNamed]) -> wire.Done:
    return _set_draining(call, draining=True)


def undrain(call: Call[None, wire.HostNamed]) -> wire.Done:
    return _set_draining(call, draining=False)


def _set_draining(call: Call[None, wire.HostNamed], *, draining: bool) -> wire.Done:
    if call.principal.addon_id is not None:
        raise Forbidden(f"this token is bound to addon {call.principal.addon_id}: a host is everybody's")
    name = call.body.host
    if not call.store.drain(HostId(name), draining, call.principal.name):
        known = ", ".join(host.host for host in call.store.hosts())
        raise NotFound(f"there is no host {name}; there is {known}", host=name)
    return wire.Done()


def health(call: Call[None, None]) -> wire.Host:
    office = call.office
    problems = problems_of(office)
    return wire.Host(
        status="degraded" if problems else "ok",
        problems=problems,
        version=VERSION,
        host=office.house.rules.host,
        started_at=when(office.started_at),
        now=when(office.store.now()),
    )


def problems_of(office: Office) -> list[str]:
    problems = []
    try:
        office.store.alarm()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is asked for
        problems.append(f"the store cannot be read: {error}")
    try:
        trouble = office.store.trouble()
        office.house.roll.prove()
    except Exception as error:  # noqa: BLE001 - as above
        trouble = str(error)
    if trouble is not None:
        problems.append(f"the store cannot be written: {trouble}")
    if office.house.machine.draining:
        problems.append("it is stopping")
    if office.house.machine.drained:
        problems.append("this host is drained: it starts nothing more")
    return problems
