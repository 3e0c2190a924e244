"""The API in OpenAPI 3.1, from the route table and the wire types: there is no second description that could be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from penstock.scheduler.version import VERSION
from penstock.server.body import fields_of
from penstock.server.routes import OpenRoute, Route
from penstock.wire import ProblemDetails

__all__ = ["describe"]

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
    scope = "open to everybody" if isinstance(route.scope, OpenRoute) else f"needs the scope `{route.scope}`"
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
    for field in fields_of(route.query):
        name = field.encode_name
        yield {"name": name, "in": "query", "required": field.required, "schema": properties[name]}
