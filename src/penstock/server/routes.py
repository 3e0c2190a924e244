"""
The API as one table, and its OpenAPI 3.1 description. Routing, rights, validation and the list in
`docs/http.md` are made from the table.

A route cannot be made without the scope that it needs: the scope is a field without a default. A route that
needs no token is OPEN, and a test holds the list of those.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from typing import Any, Final

import msgspec

from penstock import wire
from penstock.scheduler.hosts import VERSION
from penstock.server.handlers import admin, jobs, live, workers
from penstock.server.metrics import CONTENT_TYPE, metrics
from penstock.server.request import Decoder, Request
from penstock.wire import PREFIX, ProblemDetails, Scope


class OpenRoute(Enum):
    """For every client that can reach the port."""

    OPEN = "open"


OPEN: Final = OpenRoute.OPEN


@dataclass(frozen=True, kw_only=True)
class Route:
    verb: str
    path: str
    scope: Scope | OpenRoute
    summary: str
    handler: Callable[..., Any]
    answer: type[msgspec.Struct]
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    #: The body may be left out: none of its fields is required.
    body_optional: bool = False
    #: The answer goes on for as long as the client reads.
    streams: bool = False
    #: The answer is bytes of this type instead of JSON.
    plain: bytes = b""
    #: It may keep a client waiting, so it counts against the token's long polls.
    waits: bool = False
    #: Made once, here, because they cost more to make than to use.
    decode: Decoder | None = field(init=False)
    in_pool: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", None if self.body is None else Decoder(self.body))
        object.__setattr__(self, "in_pool", not inspect.iscoroutinefunction(self.handler))

    @property
    def parameter(self) -> str | None:
        match = re.search(r"\{(\w+)\}", self.path)
        return match[1] if match else None


def _route(path: str, scope: Scope, handler: Any, answer: Any, summary: str, **more: Any) -> Route:
    return Route(
        path=f"{PREFIX}/{path}",
        scope=scope,
        handler=handler,
        answer=answer,
        summary=summary,
        **more,
    )


_get, _post = partial(_route, verb="GET"), partial(_route, verb="POST")


_READ, _SUBMIT, _CANCEL = Scope.JOBS_READ, Scope.JOBS_SUBMIT, Scope.JOBS_CANCEL
_LEASE, _CONFIG, _TOKENS = Scope.WORKER_LEASE, Scope.ADMIN_CONFIG, Scope.ADMIN_TOKENS

ROUTES: Final[tuple[Route, ...]] = (
    # submitters and people
    _post("queue/jobs/submit", _SUBMIT, jobs.submit, wire.Submitted, "Submit a job; the answer means that it is on disk", body=wire.SubmitBody),
    _post("queue/jobs/submit/bulk", _SUBMIT, jobs.submit_bulk, wire.BulkSubmitted, "Submit many jobs, all or none", body=wire.SubmitMany),
    _get("queue/jobs", _READ, jobs.listing, wire.Jobs, "List jobs", query=wire.JobsQuery),
    _get("queue/find", _READ, jobs.find, wire.Found, "Find jobs by a part of their id", query=wire.FindQuery),
    _get("queue/jobs/{job_id}", _READ, jobs.get, wire.JobInfo, "Get a job, at once or when it is settled", query=wire.WaitQuery),
    _get("queue/jobs/{job_id}/explain", _READ, jobs.explain, wire.Explained, "Explain why the job is in its state"),
    _get("queue/jobs/{job_id}/logs", _READ, live.logs, wire.Logs, "Read the output of a command or function", query=wire.LogsQuery),
    _post("queue/jobs/{job_id}/cancel", _CANCEL, jobs.cancel, wire.JobInfo, "Cancel a job; a running job is asked to stop", body=wire.Cancel, body_optional=True),
    _post("queue/jobs/{job_id}/retry", _SUBMIT, jobs.retry, wire.JobInfo, "Queue a FAILED or BLOCKED job again"),
    _post("queue/jobs/{job_id}/edit", _SUBMIT, jobs.edit, wire.JobInfo, "Change priority or times of a QUEUED job", body=wire.Edit),
    # workers
    _get("queue/dispatchable", _LEASE, workers.dispatchable, wire.Dispatchable, "List jobs that wait for a worker to request their lease", query=wire.DispatchableQuery),
    _post("queue/claim", _LEASE, workers.claim, wire.ClaimAnswer, "Dispatch and lease in one step", body=wire.ClaimRequest, body_optional=True),
    _post("queue/jobs/{job_id}/ack", _LEASE, workers.ack, wire.HeartbeatAnswer, "Report that the worker has started", body=wire.Ack),
    _post("queue/jobs/{job_id}/complete", _LEASE, workers.complete, wire.Completed, "Report the outcome of a job: DONE or FAILED", body=wire.OutcomeReport),
    _post("queue/complete/bulk", _LEASE, workers.complete_bulk, wire.SettledJob, "Report the outcomes of many jobs, each settled or refused on its own", body=wire.Outcomes),
    _post("queue/exchange", _LEASE, workers.exchange, wire.ExchangeAnswerBody, "Report outcomes and claim jobs in one commit", body=wire.ExchangeRequest),
    _post("lease/request", _LEASE, workers.lease_request, wire.LeaseGranted, "Request a lease for a job, or for work without a job", body=wire.LeaseRequest),
    _post("lease/heartbeat", _LEASE, workers.heartbeat, wire.HeartbeatAnswer, "Renew a lease; the answer says whether to stop", body=wire.Heartbeat),
    _post("lease/report", _LEASE, workers.report, wire.LoadReported, "Report progress, spending and perhaps the outcome, in one call", body=wire.LoadReport),
    _post("lease/release", _LEASE, workers.release, wire.Completed, "Release a lease; its job returns to the queue", body=wire.Release),
    _post("run/say", Scope.RUN_SELF, workers.say, wire.Said, "Report or ask something as a running job, with that attempt's own token", body=wire.Say),
    # looking
    _get("events", _READ, live.events, wire.Events, "Read the trail, page by page", query=wire.EventsQuery),
    _get("events/stream", _READ, live.stream, wire.EventInfo, "Follow the trail as server-sent events", query=wire.StreamQuery, streams=True, waits=True),
    _get("stats", _READ, admin.stats, wire.Stats, "Count jobs by state and addon"),
    _get("leases", _READ, admin.leases, wire.LeaseList, "List the leases that hold units now", query=wire.LeasesQuery),
    _get("capacity", _READ, admin.capacity, wire.CapacityInfo, "Show the usable units, and what limits them"),
    _get("addons", _READ, admin.addons, wire.Addons, "List addons: weight, paused, share, jobs"),
    _get("hosts", _READ, admin.hosts, wire.Hosts, "List hosts: alive or lost, capacity, units, labels"),
    _get("pulse", _READ, live.pulse, wire.StatsFrame, "Follow the live stats of the page as server-sent events, one frame a second", streams=True, waits=True),
    _get("pulse/history", _READ, live.history, wire.History, "Get the live stats of the last quarter of an hour, one value a second"),
    _get("programs", _READ, live.programs, wire.ProgramList, "List the pools and graphs of attached programs"),
    _get("health", _READ, admin.health, wire.HostInfo, "Show the health of this host, and what is wrong"),
    # running it
    _post("signals", Scope.SIGNALS_REPORT, admin.signals, wire.Ok, "Report an application's own load signals", body=wire.LoadSignals),
    _post("programs/attach", Scope.SIGNALS_REPORT, live.attach, wire.Ok, "Show a program's pools and graphs here", body=wire.Attach),
    _post("login", _TOKENS, admin.login, wire.Login, "Make a link that opens the page once"),
    _post("addons/edit", _CONFIG, admin.addon_edit, wire.AddonInfo, "Set an addon's weight, pause or resume it", body=wire.AddonEdit),
    _post("pause", _CONFIG, admin.pause, wire.Ok, "Pause an addon, or everything: no further job starts", body=wire.Scoped, body_optional=True),
    _post("resume", _CONFIG, admin.resume, wire.Ok, "Resume an addon, or everything", body=wire.Scoped, body_optional=True),
    _post("hosts/drain", _CONFIG, admin.drain, wire.Ok, "Drain a host: no further job starts there, running jobs continue", body=wire.HostNamed),
    _post("hosts/undrain", _CONFIG, admin.undrain, wire.Ok, "Undrain a host: jobs start there again", body=wire.HostNamed),
    _post("kick", _CONFIG, admin.kick, wire.Ok, "Run a round now instead of at the next tick"),
    _get("tokens", _TOKENS, admin.token_list, wire.Tokens, "List the tokens, without their secrets"),
    _post("tokens/create", _TOKENS, admin.token_make, wire.TokenMade, "Make a token; only this answer shows its secret", body=wire.NewToken),
    _post("tokens/{token_id}/revoke", _TOKENS, admin.token_revoke, wire.Ok, "Revoke a token at once"),
)  # fmt: skip


async def healthz(request: Request[None, None]) -> wire.Health:
    return wire.Health("ok" if await request.app_state.is_healthy() else "degraded")


def openapi(_: Request[None, None]) -> msgspec.Raw:
    """Not a coroutine: the first description is made beside the loop, which has others to serve."""
    return msgspec.Raw(_description())


@cache
def _description() -> bytes:
    """Made at the first request: making it takes longer than all the rest of a start."""
    return msgspec.json.encode(describe(ALL_ROUTES))


#: With those that are for monitors and tools.
ALL_ROUTES: Final[tuple[Route, ...]] = (
    *ROUTES,
    Route(verb="GET", path="/healthz", scope=OPEN, summary="ok or degraded, and no more", handler=healthz, answer=wire.Health),
    Route(verb="GET", path="/metrics", scope=Scope.METRICS_READ, summary="For Prometheus", handler=metrics, answer=wire.Exposition, plain=CONTENT_TYPE),
    _get("openapi.json", _READ, openapi, wire.Description, "This description"),
)  # fmt: skip


_REF: Final = "#/components/schemas/{name}"
_REFUSALS: Final = {
    401: "no token, or none that is valid",
    403: "the token's scope or limits, or a foreign Host, Origin or site",
    404: "nothing by that name, or not yours",
    405: "another verb",
    408: "the request took too long to arrive",
    409: "the job or lease is not in a state for this; nothing was changed",
    413: "too large",
    415: "not JSON",
    422: "fields are wrong; `problems` names each",
    429: "the queue is full, or too many requests are open; see Retry-After",
    503: "the database or the scheduler is not available",
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    kinds = {kind for route in routes for kind in (route.body, route.answer) if kind is not None} | {
        ProblemDetails
    }
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=_REF)
    ref = dict(zip(ordered, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.verb.lower()] = _operation(route, ref)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": VERSION,
            "description": "Admits, queues and dispatches work. Moments are RFC 3339, spans are seconds.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, ref: dict[type, dict[str, Any]]) -> dict[str, Any]:
    scope = (
        "open to every client" if isinstance(route.scope, OpenRoute) else f"needs the scope `{route.scope}`"
    )
    media, shown = _shown(route, ref)
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__.strip("_"),
        "summary": route.summary,
        "description": scope,
        "parameters": [*_path_parameter(route), *_query_parameters(route)],
        "responses": {
            "200": {"description": "done", "content": {media: {"schema": shown}}},
            **{str(status): _refusal(words, ref) for status, words in _REFUSALS.items()},
        },
        "security": [] if isinstance(route.scope, OpenRoute) else [{"token": []}],
    }
    if isinstance(route.scope, OpenRoute):
        operation["responses"]["503"] = {
            "description": "degraded",
            "content": {"application/json": {"schema": shown}, "application/problem+json": _problem(ref)},
        }
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": ref[route.body]}},
        }
    return operation


def _shown(route: Route, ref: dict[type, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    if route.streams:
        return "text/event-stream", {"type": "string"}
    if route.plain:
        return route.plain.decode().partition(";")[0], {"type": "string"}
    return "application/json", ref[route.answer]


def _refusal(words: str, ref: dict[type, dict[str, Any]]) -> dict[str, Any]:
    return {"description": words, "content": {"application/problem+json": _problem(ref)}}


def _problem(ref: dict[type, dict[str, Any]]) -> dict[str, Any]:
    return {"schema": ref[ProblemDetails]}


def _path_parameter(route: Route) -> Iterable[dict[str, Any]]:
    if route.parameter is not None:
        schema = {"type": "string", "pattern": "^[0-9A-Za-z_-][0-9A-Za-z._-]{0,99}$"}
        yield {"name": route.parameter, "in": "path", "required": True, "schema": schema}


def _query_parameters(route: Route) -> Iterable[dict[str, Any]]:
    if route.query is None:
        return
    (_,), schemas = msgspec.json.schema_components([route.query], ref_template=_REF)
    properties = schemas[route.query.__name__]["properties"]
    for one in msgspec.structs.fields(route.query):
        name = one.encode_name
        yield {"name": name, "in": "query", "required": one.required, "schema": properties[name]}
