"""
Handlers for administrators: stats, leases, capacity, addons, hosts, health; pause and drain; load signals;
tokens.

No token can make another with more rights than its own.
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


def stats(request: Request[None, None]) -> wire.Stats:
    """
    Counts of jobs. A bound token gets those of its addon; the use of the whole machine is shown to all.
    """
    service, store = request.app_state.service, request.store
    now, shown = store.now(), _shown(request)
    conditions = service.machine.conditions(now)
    per_addon = {a.addon_id: _job_counts(a) for a in shown}
    totals: Counter[str] = Counter()
    for jobs in per_addon.values():
        totals.update(jobs)
    return wire.Stats(
        jobs=dict(totals),
        addons={str(name): jobs for name, jobs in per_addon.items()},
        oldest_queued_sec=oldest_queued_sec(store, now, request.addon(None)),
        units_in_use=store.ledger(service.rules.host).units,
        in_flight=sum(totals[state] for state in (JobState.DISPATCHING, JobState.RUNNING)),
        capacity=conditions.capacity,
        quiet=conditions.quiet,
        paused=all_paused(store),
        waiting=len(service.waitlist.waiters),
        newest_event=store.newest(),
        now=when(now),
        hosts=_hosts(request),
    )


def types(request: Request[None, None]) -> wire.TypeList:
    """Learned job types. A bound token gets those of its addon."""
    stats = request.app_state.service.job_service.type_stats()
    return wire.TypeList(
        types=[as_answer(wire.TypeInfo, one) for one in stats if request.owns(AddonId(one.addon_id))]
    )


def _shown(request: Request[Any, Any]) -> list[Addon]:
    return [a for a in request.store.addons() if a.addon_id != EVERYTHING and request.owns(a.addon_id)]


def leases(request: Request[wire.LeasesQuery, None]) -> wire.LeaseList:
    """Leases and free workers. A bound token gets its addon's leases, and workers that take only its jobs."""
    addon_id, service = request.addon(or_none(request.query.addon_id)), request.app_state.service
    leases_now = request.store.live(addon_id=addon_id, limit=request.query.limit)
    jobs = request.store.jobs([dispatch.job_id for dispatch in leases_now if dispatch.job_id is not None])
    titles = {job.job_id: title_of(job.intent) for job in jobs}
    free = service.pulling_workers.at(request.store.now()).free
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


def capacity(request: Request[None, None]) -> wire.CapacityInfo:
    service = request.app_state.service
    now = request.store.now()
    conditions, rules = service.machine.conditions(now), service.rules
    lasting = service.machine.in_state_for(now)
    in_use = request.store.ledger(rules.host).units
    readings = [
        as_answer(wire.LoadReading, r, fresh=is_fresh(r, now, rules.senses))
        for r in service.machine.readings()
        if not r.source or request.owns(r.source)
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
        busy_by=conditions.busy.by if request.viewer is None else request.viewer.signal(conditions.busy.by),
        paused=all_paused(request.store),
        draining=conditions.draining,
        readings=readings,
        hosts=_hosts(request),
    )


def signals(request: Request[None, wire.LoadSignals]) -> wire.Ok:
    body = request.body
    source = request.addon(body.addon_id)
    bound = request.principal.addon_id is not None
    service, ttl = request.app_state.service, None if body.ttl_sec is None else int(body.ttl_sec * SECOND)
    now = request.store.now()
    service.machine.report_application(AddonId(str(source)), body.readings, now, ttl, bound=bound)
    service.wake()
    return wire.Ok()


def addons(request: Request[None, None]) -> wire.Addons:
    return wire.Addons(_views(request, _shown(request)), all_paused(request.store))


def _views(request: Request[Any, Any], shown: list[Addon]) -> list[wire.AddonInfo]:
    """The addons as the API shows them, with their spending on all hosts."""
    rules, now = request.app_state.service.rules, request.store.now()
    spent, budgets = request.store.ledger(rules.host).spent, rules.limits.budgets
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


def addon_edit(request: Request[None, wire.AddonEdit]) -> wire.AddonInfo:
    body = request.body
    addon_id = AddonId(str(request.addon(body.addon_id)))
    if isinstance(body.weight, UnsetType) and isinstance(body.paused, UnsetType):
        raise naming_fields(BadIntent, ("body", "must have weight, paused or both"))
    _check_known(request, addon_id, create=body.create)
    by = request.principal.name
    committed(
        request.store, SetAddon(addon_id, weight=or_none(body.weight), paused=or_none(body.paused), by=by)
    )
    [edited] = _views(request, [a for a in request.store.addons() if a.addon_id == addon_id])
    return edited


def pause(request: Request[None, wire.AddonScope]) -> wire.Ok:
    return _set_paused(request, paused=True)


def resume(request: Request[None, wire.AddonScope]) -> wire.Ok:
    return _set_paused(request, paused=False)


def _set_paused(request: Request[None, wire.AddonScope], *, paused: bool) -> wire.Ok:
    if request.body.addon_id is None:
        request.check_unbound(": name that one")
    job_service, addon_id = request.app_state.job_service, request.addon(request.body.addon_id) or EVERYTHING
    _check_known(request, addon_id, create=request.body.create)
    by = request.principal.name
    job_service.pause(addon_id, by) if paused else job_service.resume(addon_id, by)
    return wire.Ok()


def _check_known(request: Request[Any, Any], addon_id: AddonId, *, create: bool) -> None:
    """
    Refuse an addon that has never had a job, unless `create`. The addon of a bound token is always known.
    """
    if not create and request.principal.addon_id is None:
        request.app_state.job_service.require_addon(addon_id)


def kick(request: Request[None, None]) -> wire.Ok:
    """Run a round now. The scheduler does not need this: it is for people who want to see one."""
    request.app_state.service.wake()
    return wire.Ok()


def hosts(request: Request[None, None]) -> wire.Hosts:
    return wire.Hosts(request.app_state.service.rules.host, _hosts(request))


def _hosts(request: Request[Any, Any]) -> list[wire.KnownHost]:
    """All hosts: this one with its present state, the others as they last wrote it."""
    service, now = request.app_state.service, request.store.now()
    here, conditions = service.rules.host, service.machine.conditions(now)
    visible = [
        replace(h, capacity=conditions.capacity, quiet=conditions.quiet, seen_at=now) if h.host == here else h
        for h in request.store.hosts()
    ]
    return [
        as_answer(wire.KnownHost, host, state="alive" if host.alive(now) else "lost", url=host.url or None)
        for host in visible
    ]


def drain(request: Request[None, wire.HostRequest]) -> wire.Ok:
    return _set_draining(request, draining=True)


def undrain(request: Request[None, wire.HostRequest]) -> wire.Ok:
    return _set_draining(request, draining=False)


def _set_draining(request: Request[None, wire.HostRequest], *, draining: bool) -> wire.Ok:
    request.check_unbound(": it may not change hosts")
    name = request.body.host
    if not committed(request.store, DrainHost(HostId(name), draining, request.principal.name)):
        names = ", ".join(host.host for host in request.store.hosts())
        raise NotFound(f"there is no host {name}; the hosts are {names}", host=name)
    return wire.Ok()


def health(request: Request[None, None]) -> wire.HostInfo:
    app_state = request.app_state
    problems = app_state.problems()
    return wire.HostInfo(
        status="degraded" if problems else "ok",
        problems=problems,
        version=VERSION,
        host=app_state.service.rules.host,
        started_at=when(app_state.started_at),
        now=when(app_state.store.now()),
        scopes=sorted(request.principal.scopes),
    )


def login(request: Request[None, wire.LoginRequest]) -> wire.Login:
    """A link that opens the page once, with the rights of this token, or read-only."""
    sessions = request.app_state.sessions
    if sessions is None:
        raise NotFound(
            "this scheduler serves no page: the page's files are missing, or it has no TCP address"
        )
    principal = request.principal
    if request.body.read_only:
        principal = dataclasses.replace(principal, scopes=principal.scopes & {wire.Scope.JOBS_READ})
    link = sessions.link(principal, request.store.now())
    request.app_state.record(
        EventKind.LOGIN, "link_made", request.principal, {"read_only": request.body.read_only}
    )
    return link


def token_list(request: Request[None, None]) -> wire.Tokens:
    return wire.Tokens([token for token in request.app_state.tokens.all() if _visible(request, token)])


def _visible(request: Request[Any, Any], token: wire.Token) -> bool:
    return request.principal.addon_id in (None, token.addon_id)


def token_make(request: Request[None, wire.NewToken]) -> wire.TokenMade:
    body, own = request.body, request.principal
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
    token, secret = request.app_state.tokens.make(body, own)
    try:
        request.app_state.record(EventKind.TOKEN_MADE, "", own, _facts(token))
    except BaseException:  # the trail must have every token: without its event the client gets no secret
        request.app_state.tokens.revoke(token.token_id)
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


def token_revoke(request: Request[None, None]) -> wire.Ok:
    tokens = request.app_state.tokens
    visible = {token.token_id: token for token in tokens.all() if _visible(request, token)}
    if request.path not in visible or not tokens.revoke(request.path):
        raise NotFound(f"there is no token {request.path}", token_id=request.path)
    facts = _facts(visible[request.path])
    request.app_state.record(
        EventKind.TOKEN_REVOKED,
        "",
        request.principal,
        {name: facts[name] for name in ("token_id", "name", "bound_to")},
    )
    return wire.Ok()
