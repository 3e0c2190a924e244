"""
Handlers for operators: stats, leases, capacity, addons, hosts and health; pausing and draining; load signals
of applications; tokens.

A token cannot make one with more rights than its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from msgspec import UnsetType
from msgspec.structs import replace

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.admission import EVERYTHING
from penstock.core.jobs.intent import title_of
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import is_fresh
from penstock.core.jobs.spending import Use, uses
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, AddonId, HostId, seconds, when
from penstock.scheduler.hosts import VERSION
from penstock.server.event_hub import all_paused, oldest_queued_sec
from penstock.server.handlers.jobs import amount
from penstock.server.problems import OverLimit, naming_fields
from penstock.server.request import Request, as_answer, or_none
from penstock.stores.api import Addon, DrainHost, SetAddon, committed


def stats(call: Request[None, None]) -> wire.Stats:
    """
    To a token that is bound to an addon: that addon's numbers. The use of the whole machine is shown to all.
    """
    service, store = call.app_state.service, call.store
    now, shown = store.now(), _shown(call)
    conditions = service.machine.conditions(now)
    per_addon = {a.addon_id: _job_counts(a) for a in shown}
    totals: Counter[str] = Counter()
    for jobs in per_addon.values():
        totals.update(jobs)
    return wire.Stats(
        jobs=dict(totals),
        addons={str(name): jobs for name, jobs in per_addon.items()},
        oldest_queued_sec=oldest_queued_sec(store, now, call.addon(None)),
        units_in_use=store.ledger(service.rules.host).units,
        in_flight=sum(totals[state] for state in (JobState.DISPATCHING, JobState.RUNNING)),
        capacity=conditions.capacity,
        quiet=conditions.quiet,
        paused=all_paused(store),
        waiting=len(service.waitlist.waiters),
        newest_event=store.newest(),
        now=when(now),
        hosts=_hosts(call),
    )


def types(call: Request[None, None]) -> wire.TypeList:
    """To a token that is bound to an addon: that addon's types."""
    stats = call.app_state.service.job_service.type_stats()
    return wire.TypeList(
        types=[as_answer(wire.TypeInfo, one) for one in stats if call.owns(AddonId(one.addon_id))]
    )


def _shown(call: Request[Any, Any]) -> list[Addon]:
    return [a for a in call.store.addons() if a.addon_id != EVERYTHING and call.owns(a.addon_id)]


def leases(call: Request[wire.LeasesQuery, None]) -> wire.LeaseList:
    """To a token that is bound to an addon: its leases, and the workers that take no other addon's jobs."""
    addon_id, service = call.addon(or_none(call.query.addon_id)), call.app_state.service
    leases_now = call.store.live(addon_id=addon_id, limit=call.query.limit)
    jobs = call.store.jobs([dispatch.job_id for dispatch in leases_now if dispatch.job_id is not None])
    titles = {job.job_id: title_of(job.intent) for job in jobs}
    free = service.fetchers.at(call.store.now()).free
    return wire.LeaseList(
        leases=[
            as_answer(
                wire.Lease,
                dispatch,
                dispatch.admission_class,
                lease_id=dispatch.dispatch_id,
                title="" if dispatch.job_id is None else titles.get(dispatch.job_id, ""),
                spent=amount(dispatch.spent),
            )
            for dispatch in leases_now
        ],
        free_workers=[
            wire.FreeWorker(name, service.rules.host, kinds.addon_id, sorted(kinds.job_types), room)
            for name, (kinds, room) in free.items()
            if isinstance(name, str) and addon_id in (None, kinds.addon_id)
        ],
    )


def capacity(call: Request[None, None]) -> wire.CapacityInfo:
    service = call.app_state.service
    now = call.store.now()
    conditions, rules = service.machine.conditions(now), service.rules
    lasting = service.machine.in_state_for(now)
    in_use = call.store.ledger(rules.host).units
    readings = [
        as_answer(wire.LoadReading, r, fresh=is_fresh(r, now, rules.senses))
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
        quiet_sec=None if lasting is None else seconds(lasting),
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
    service, ttl = call.app_state.service, None if body.ttl_sec is None else int(body.ttl_sec * SECOND)
    now = call.store.now()
    service.machine.report_application(AddonId(str(source)), body.readings, now, ttl, bound=bound)
    service.wake()
    return wire.Ok()


def addons(call: Request[None, None]) -> wire.Addons:
    return wire.Addons(_views(call, _shown(call)), all_paused(call.store))


def _views(call: Request[Any, Any], shown: list[Addon]) -> list[wire.AddonInfo]:
    """With what each has spent, of a budget that holds on all hosts."""
    rules, now = call.app_state.service.rules, call.store.now()
    spent, budgets = call.store.ledger(rules.host).spent, rules.limits.budgets
    return [
        as_answer(
            wire.AddonInfo,
            addon,
            jobs=_job_counts(addon),
            budgets=[
                _use(use) for use in uses(budgets.get(addon.addon_id), spent.get(addon.addon_id, {}), now)
            ],
        )
        for addon in shown
    ]


def _job_counts(addon: Addon) -> dict[str, int]:
    return {str(state): count for state, count in addon.jobs.items() if count}


def _use(use: Use) -> wire.BudgetUse:
    limit = None if use.limit is None else amount(use.limit)
    return as_answer(
        wire.BudgetUse, use, use.window, window=use.window.kind, spent=amount(use.spent), limit=limit
    )


def addon_edit(call: Request[None, wire.AddonEdit]) -> wire.AddonInfo:
    body = call.body
    addon_id = AddonId(str(call.addon(body.addon_id)))
    if isinstance(body.weight, UnsetType) and isinstance(body.paused, UnsetType):
        raise naming_fields(BadIntent, ("body", "must have weight, paused or both"))
    _check_known(call, addon_id, create=body.create)
    by = call.principal.name
    committed(call.store, SetAddon(addon_id, weight=or_none(body.weight), paused=or_none(body.paused), by=by))
    [edited] = _views(call, [a for a in call.store.addons() if a.addon_id == addon_id])
    return edited


def pause(call: Request[None, wire.Scoped]) -> wire.Ok:
    return _set_paused(call, paused=True)


def resume(call: Request[None, wire.Scoped]) -> wire.Ok:
    return _set_paused(call, paused=False)


def _set_paused(call: Request[None, wire.Scoped], *, paused: bool) -> wire.Ok:
    if call.body.addon_id is None:
        call.check_unbound(": name that one")
    job_service, addon_id = call.app_state.job_service, call.addon(call.body.addon_id) or EVERYTHING
    _check_known(call, addon_id, create=call.body.create)
    by = call.principal.name
    job_service.pause(addon_id, by) if paused else job_service.resume(addon_id, by)
    return wire.Ok()


def _check_known(call: Request[Any, Any], addon_id: AddonId, *, create: bool) -> None:
    """The addon of a token that is bound to one is known by that."""
    if not create and call.principal.addon_id is None:
        call.app_state.job_service.require_addon(addon_id)


def kick(call: Request[None, None]) -> wire.Ok:
    """Run a round now. The scheduler does not need it; people like to be sure."""
    call.app_state.service.wake()
    return wire.Ok()


def hosts(call: Request[None, None]) -> wire.Hosts:
    return wire.Hosts(call.app_state.service.rules.host, _hosts(call))


def _hosts(call: Request[Any, Any]) -> list[wire.KnownHost]:
    """This host shows its present state, and of the others what they last wrote."""
    service, now = call.app_state.service, call.store.now()
    here, conditions = service.rules.host, service.machine.conditions(now)
    visible = [
        replace(h, capacity=conditions.capacity, quiet=conditions.quiet, seen_at=now) if h.host == here else h
        for h in call.store.hosts()
    ]
    return [
        as_answer(wire.KnownHost, host, state="alive" if host.alive(now) else "lost", url=host.url or None)
        for host in visible
    ]


def drain(call: Request[None, wire.HostNamed]) -> wire.Ok:
    return _set_draining(call, draining=True)


def undrain(call: Request[None, wire.HostNamed]) -> wire.Ok:
    return _set_draining(call, draining=False)


def _set_draining(call: Request[None, wire.HostNamed], *, draining: bool) -> wire.Ok:
    call.check_unbound(": it may not change hosts")
    name = call.body.host
    if not committed(call.store, DrainHost(HostId(name), draining, call.principal.name)):
        names = ", ".join(host.host for host in call.store.hosts())
        raise NotFound(f"there is no host {name}; the hosts are {names}", host=name)
    return wire.Ok()


def health(call: Request[None, None]) -> wire.HostInfo:
    app_state = call.app_state
    problems = app_state.problems()
    return wire.HostInfo(
        status="degraded" if problems else "ok",
        problems=problems,
        version=VERSION,
        host=app_state.service.rules.host,
        started_at=when(app_state.started_at),
        now=when(app_state.store.now()),
        scopes=sorted(call.principal.scopes),
    )


def login(call: Request[None, wire.LoginRequest]) -> wire.Login:
    """A link that opens the page once, with the rights of the token that asks for it, or to read only."""
    sessions = call.app_state.sessions
    if sessions is None:
        raise NotFound("this scheduler serves no page: its files are missing, or it has no TCP address")
    principal = call.principal
    if call.body.read_only:
        principal = dataclasses.replace(principal, scopes=principal.scopes & {wire.Scope.JOBS_READ})
    link = sessions.link(principal, call.store.now())
    call.app_state.record(EventKind.LOGIN, "link_made", call.principal, {"read_only": call.body.read_only})
    return link


def token_list(call: Request[None, None]) -> wire.Tokens:
    return wire.Tokens([token for token in call.app_state.tokens.all() if _visible(call, token)])


def _visible(call: Request[Any, Any], token: wire.Token) -> bool:
    return call.principal.addon_id in (None, token.addon_id)


def token_make(call: Request[None, wire.NewToken]) -> wire.TokenMade:
    body, own = call.body, call.principal
    problems = []
    more = sorted(set(body.scopes) - own.scopes)
    if more:
        problems.append(("scopes", f"{', '.join(more)}: your own token does not have that"))
    if own.addon_id is not None and body.addon_id != own.addon_id:
        problems.append(("addon_id", f"must be {own.addon_id}, as your own token's"))
    for name in ("max_cost_units", "max_priority"):
        given, most = getattr(body, name), getattr(own, name)
        if most is not None and (given is None or given > most):
            problems.append((name, f"must be at most {most}, as your own token's"))
    if own.expires_at is not None and body.expires_at is not None and body.expires_at > own.expires_at:
        problems.append(("expires_at", f"must be at most {own.expires_at}, as your own token's"))
    if problems:
        raise naming_fields(OverLimit, *problems)
    token, secret = call.app_state.tokens.make(body, own)
    try:
        call.app_state.record(EventKind.TOKEN_MADE, "", own, _facts(token))
    except BaseException:  # a token must be in the trail: without its event the client gets no secret
        call.app_state.tokens.revoke(token.token_id)
        raise
    return wire.TokenMade(token, secret)


def _facts(token: wire.Token) -> dict[str, Any]:
    expires_at = None if token.expires_at is None else token.expires_at.isoformat()
    return {
        "token_id": token.token_id,
        "name": token.name,
        "scopes": [str(scope) for scope in token.scopes],
        "bound_to": token.addon_id,
        "expires_at": expires_at,
        "parent_id": token.parent_id,
    }


def token_revoke(call: Request[None, None]) -> wire.Ok:
    tokens = call.app_state.tokens
    visible = {token.token_id: token for token in tokens.all() if _visible(call, token)}
    if call.path not in visible or not tokens.revoke(call.path):
        raise NotFound(f"there is no token {call.path}", token_id=call.path)
    facts = _facts(visible[call.path])
    call.app_state.record(
        EventKind.TOKEN_REVOKED,
        "",
        call.principal,
        {name: facts[name] for name in ("token_id", "name", "bound_to")},
    )
    return wire.Ok()
