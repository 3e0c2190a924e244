"""
The table of the API, and its OpenAPI 3.1 description. Routing, rights, validation and the list in
`docs/http.md` are made from the table.

Every route must name the scope that it needs: the field has no default. A route that needs no token is OPEN,
and a test lists these. The handler declares the types of its query, body and answer: `def edit(request:
Request[None, wire.Edit]) -> wire.JobInfo` has no query, the body `Edit` and the answer `JobInfo`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec.structs import fields

from penstock import wire
from penstock.scheduler.hosts import VERSION
from penstock.server.handlers import admin, arrays, batches, jobs, live, schedules, workers
from penstock.server.metrics import CONTENT_TYPE, metrics
from penstock.server.request import Decoder, Request
from penstock.wire import PREFIX, ProblemDetails, Scope


class OpenRoute(Enum):
    """The scope of routes that are open to every client."""

    OPEN = "open"


OPEN: Final = OpenRoute.OPEN


@dataclass
class Route:
    """A line of the table: verb and path, the scope that they need, and the handler that answers."""

    verb: str
    path: str
    scope: Scope | OpenRoute
    handler: Callable[..., Any]
    summary: str
    #: For an answer that is a stream: the type of its server-sent events.
    streams: type[msgspec.Struct] | None = None
    #: The content type of an answer that is not JSON.
    plain: bytes = b""

    def __post_init__(self) -> None:
        request, answer = get_type_hints(self.handler).values()
        query, body = get_args(request)
        self.query: type[msgspec.Struct] | None = None if query is NoneType else query
        self.body: type[msgspec.Struct] | None = None if body is NoneType else body
        self.answer: type[msgspec.Struct] | None = None if self.plain else self.streams or answer
        self.decode = None if self.body is None else Decoder(self.body)
        #: Whether the body may be left out, because none of its fields is required.
        self.body_optional = self.body is None or not any(one.required for one in fields(self.body))
        self.in_pool = not inspect.iscoroutinefunction(self.handler)
        parameter = re.search(r"\{(\w+)\}", self.path)
        self.parameter = parameter[1] if parameter else None


def _get(path: str, *options: Any, **more: Any) -> Route:
    return Route("GET", f"{PREFIX}/{path}", *options, **more)


def _post(path: str, *options: Any) -> Route:
    return Route("POST", f"{PREFIX}/{path}", *options)


_READ, _SUBMIT, _CANCEL = Scope.JOBS_READ, Scope.JOBS_SUBMIT, Scope.JOBS_CANCEL
_LEASE, _CONFIG, _TOKENS = Scope.WORKER_LEASE, Scope.ADMIN_CONFIG, Scope.ADMIN_TOKENS

ROUTES: Final[tuple[Route, ...]] = (
    # jobs
    _post("queue/jobs/submit", _SUBMIT, jobs.submit, "Submit a job; the answer means that it is on disk"),
    _post("queue/jobs/submit/bulk", _SUBMIT, jobs.submit_bulk, "Submit many jobs, all or none"),
    _get("queue/jobs", _READ, jobs.listing, "List jobs"),
    _get("queue/count", _READ, jobs.count, "Count the jobs of each state that a filter finds"),
    _get("queue/find", _READ, jobs.find, "Find jobs by a part of their id"),
    _get("queue/jobs/{job_id}", _READ, jobs.get, "Get a job, at once or when it is settled"),
    _get(
        "queue/jobs/{job_id}/dependencies",
        _READ,
        jobs.dependencies,
        "List the jobs that it waits for, and those that wait for it",
    ),
    _get("queue/jobs/{job_id}/explain", _READ, jobs.explain, "Explain why the job is in its state"),
    _get("queue/jobs/{job_id}/logs", _READ, live.logs, "Read the output of a command or function"),
    _post("queue/jobs/{job_id}/cancel", _CANCEL, jobs.cancel, "Cancel a job; a running job is asked to stop"),
    _post("queue/jobs/{job_id}/retry", _SUBMIT, jobs.retry, "Queue a FAILED or BLOCKED job again"),
    _post("queue/jobs/{job_id}/edit", _SUBMIT, jobs.edit, "Change priority, times or load of a QUEUED job"),
    _post("queue/jobs/{job_id}/rerun", _SUBMIT, jobs.rerun, "Submit a new job with the request of this one"),
    _post(
        "queue/cancel/bulk", _CANCEL, jobs.cancel_bulk, "Cancel the jobs that a filter finds, 500 at a time"
    ),
    _post("queue/retry/bulk", _SUBMIT, jobs.retry_bulk, "Retry the jobs that a filter finds, 500 at a time"),
    # arrays and batches
    _post("arrays/submit", _SUBMIT, arrays.array_submit, "Submit an array: a job for each index"),
    _get("arrays", _READ, arrays.array_list, "List arrays, the newest first"),
    _get(
        "arrays/{array_id}", _READ, arrays.array_get, "Get an array, at once or when its last index has ended"
    ),
    _post("arrays/{array_id}/cancel", _CANCEL, arrays.array_cancel, "Cancel all indices that have not ended"),
    _post("arrays/{array_id}/retry", _SUBMIT, arrays.array_retry, "Run the failed indices of an array again"),
    _post("batches/submit", _SUBMIT, batches.batch_submit, "Submit a batch with its jobs and callbacks"),
    _get("batches", _READ, batches.batch_list, "List batches, the newest first"),
    _get("batches/{name}", _READ, batches.batch_get, "Get a batch, at once or when it has ended"),
    _post("batches/{name}/close", _SUBMIT, batches.batch_close, "Close a batch: it ends with its last job"),
    _post("batches/{name}/cancel", _CANCEL, batches.batch_cancel, "Cancel all jobs that have not ended"),
    _post("batches/{name}/retry", _SUBMIT, batches.batch_retry, "Queue the failed jobs of a batch again"),
    # schedules
    _get("schedules", _READ, schedules.schedule_list, "List schedules with their next moments and last jobs"),
    _get("schedules/{name}", _READ, schedules.schedule_get, "Get a schedule"),
    _post(
        "schedules/add",
        _SUBMIT,
        schedules.schedule_add,
        "Add a schedule: a job at the moments of a cron line",
    ),
    _post(
        "schedules/{name}/edit",
        _SUBMIT,
        schedules.schedule_edit,
        "Change a schedule; its next moments follow",
    ),
    _post(
        "schedules/{name}/pause",
        _CANCEL,
        schedules.schedule_pause,
        "Pause a schedule: no moment becomes a job",
    ),
    _post(
        "schedules/{name}/resume",
        _SUBMIT,
        schedules.schedule_resume,
        "Resume a schedule from its next moment on",
    ),
    _post("schedules/{name}/run", _SUBMIT, schedules.schedule_run, "Submit a job of the schedule now"),
    _post("schedules/{name}/remove", _CANCEL, schedules.schedule_remove, "Remove a schedule; its jobs stay"),
    # workers
    _get("queue/dispatchable", _LEASE, workers.dispatchable, "List jobs that wait for their worker"),
    _post("queue/claim", _LEASE, workers.claim, "Dispatch and lease in one step"),
    _post("queue/jobs/{job_id}/ack", _LEASE, workers.ack, "Report that the worker has started"),
    _post("queue/jobs/{job_id}/complete", _LEASE, workers.complete, "Report the outcome: DONE or FAILED"),
    _post("queue/complete/bulk", _LEASE, workers.complete_bulk, "Report outcomes, each judged on its own"),
    _post("queue/exchange", _LEASE, workers.exchange, "Report outcomes and claim jobs in one commit"),
    _post("lease/request", _LEASE, workers.lease_request, "Request a lease, for a job or for other work"),
    _post("lease/heartbeat", _LEASE, workers.heartbeat, "Renew a lease; the answer says whether to stop"),
    _post("lease/report", _LEASE, workers.report, "Report progress, spending and perhaps the outcome"),
    _post("lease/release", _LEASE, workers.release, "Release a lease; its job returns to the queue"),
    _post(
        "run/self",
        Scope.RUN_SELF,
        workers.job_request,
        "Report or ask as a running job, with its own token",
    ),
    # status
    _get("events", _READ, live.events, "Read the trail, page by page"),
    _get("events/stream", _READ, live.stream, "Follow the trail, event by event", streams=wire.EventInfo),
    _get("stats", _READ, admin.stats, "Count jobs by state and addon"),
    _get(
        "types",
        _READ,
        admin.types,
        "Show what was learned about each job type, and how good predictions were",
    ),
    _get("leases", _READ, admin.leases, "List the leases that hold units now"),
    _get("capacity", _READ, admin.capacity, "Show the usable units, and what limits them"),
    _get("addons", _READ, admin.addons, "List addons: weight, paused, share, jobs"),
    _get("hosts", _READ, admin.hosts, "List hosts: alive or lost, capacity, units, labels"),
    _get(
        "stats/stream",
        _READ,
        live.stats_stream,
        "Follow the live stats, second by second",
        streams=wire.StatsFrame,
    ),
    _get("stats/history", _READ, live.stats_history, "Get the live stats of the last quarter of an hour"),
    _get("alerts", _READ, live.alerts, "List the newest alerts to owners"),
    _get("programs", _READ, live.programs, "List the pools and graphs of attached programs"),
    _get("health", _READ, admin.health, "Show the health of this host"),
    # administration
    _post("signals", Scope.SIGNALS_REPORT, admin.signals, "Report an application's own load signals"),
    _post("programs/attach", Scope.SIGNALS_REPORT, live.attach, "Show a program's pools and graphs here"),
    _post("login", _TOKENS, admin.login, "Make a link that opens the page once"),
    _post("addons/edit", _CONFIG, admin.addon_edit, "Set an addon's weight, pause or resume it"),
    _post("pause", _CONFIG, admin.pause, "Pause an addon, or everything: no further job starts"),
    _post("resume", _CONFIG, admin.resume, "Resume an addon, or everything"),
    _post("hosts/drain", _CONFIG, admin.drain, "Drain a host: no further job starts there"),
    _post("hosts/undrain", _CONFIG, admin.undrain, "Undrain a host: jobs start there again"),
    _post("kick", _CONFIG, admin.kick, "Run a round now instead of at the next tick"),
    _get("tokens", _TOKENS, admin.token_list, "List the tokens, without their secrets"),
    _post("tokens/create", _TOKENS, admin.token_make, "Make a token; only this answer shows its secret"),
    _post("tokens/{token_id}/revoke", _TOKENS, admin.token_revoke, "Revoke a token at once"),
)


async def healthz(request: Request[None, None]) -> wire.Health:
    return wire.Health("ok" if await request.app_state.is_healthy() else "degraded")


def openapi(_: Request[None, None]) -> wire.Description:
    """No coroutine, so that it runs in a thread: making the first description takes long."""
    return _description()


@cache
def _description() -> wire.Description:
    """The description, made at the first request: it takes longer than starting the rest of the server."""
    return wire.Description(**describe(ALL_ROUTES))


#: All routes, with those for monitors and tools.
ALL_ROUTES: Final[tuple[Route, ...]] = (
    *ROUTES,
    Route("GET", "/healthz", OPEN, healthz, "Whether this host is ok or degraded"),
    Route("GET", "/metrics", Scope.METRICS_READ, metrics, "Metrics for Prometheus", plain=CONTENT_TYPE),
    _get("openapi.json", _READ, openapi, "The API as an OpenAPI description"),
)


_REF: Final = "#/components/schemas/{name}"
_REFUSALS: Final = {
    401: "no valid token",
    403: "the token's scope or limits, or a foreign Host, Origin or site",
    404: "it does not exist, or this token may not see it",
    405: "the path does not have this verb",
    408: "the request took too long to arrive",
    409: "the job or lease is not in a state for this; nothing was changed",
    413: "the request is too large",
    415: "the body is not JSON",
    422: "fields are wrong; `problems` names each",
    429: "the queue is full, or too many requests are open; see Retry-After",
    503: "the database or the scheduler is not available",
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    kinds = {kind for route in routes for kind in (route.body, route.answer) if kind} | {ProblemDetails}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=_REF)
    ref: dict[type | None, dict[str, Any]] = dict(zip(ordered, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.verb.lower()] = _operation(route, ref)
    about = "Admits, queues and dispatches work. Times are RFC 3339, durations are in seconds."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": VERSION, "description": about},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, ref: dict[type | None, dict[str, Any]]) -> dict[str, Any]:
    is_open, content = isinstance(route.scope, OpenRoute), _content(route, ref)
    problem = {"application/problem+json": {"schema": ref[ProblemDetails]}}
    refusals = {str(status): {"description": why, "content": problem} for status, why in _REFUSALS.items()}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__.strip("_"),
        "summary": route.summary,
        "description": "open to every client" if is_open else f"needs the scope `{route.scope}`",
        "parameters": [*_path_parameter(route), *_query_parameters(route)],
        "responses": {"200": {"description": "done", "content": content}, **refusals},
        "security": [] if is_open else [{"token": []}],
    }
    if is_open:
        operation["responses"]["503"] = {"description": "degraded", "content": content | problem}
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": ref[route.body]}},
        }
    return operation


def _content(route: Route, ref: dict[type | None, dict[str, Any]]) -> dict[str, Any]:
    if route.streams:
        return {"text/event-stream": {"schema": {"type": "string"}}}
    if route.plain:
        return {route.plain.decode().partition(";")[0]: {"schema": {"type": "string"}}}
    return {"application/json": {"schema": ref[route.answer]}}


def _path_parameter(route: Route) -> Iterable[dict[str, Any]]:
    if route.parameter is not None:
        schema = {"type": "string", "pattern": "^[0-9A-Za-z_-][0-9A-Za-z._-]{0,99}$"}
        yield {"name": route.parameter, "in": "path", "required": True, "schema": schema}


def _query_parameters(route: Route) -> Iterable[dict[str, Any]]:
    if route.query is None:
        return
    (_,), schemas = msgspec.json.schema_components([route.query], ref_template=_REF)
    properties = schemas[route.query.__name__]["properties"]
    for one in fields(route.query):
        name = one.encode_name
        yield {"name": name, "in": "query", "required": one.required, "schema": properties[name]}
