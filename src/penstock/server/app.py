"""
The API as an ASGI application: every request passes the same checks in the same order.

    host, origin, site -> token -> route -> scope -> limits -> query, body -> handler -> answer

There is no web framework: it doubled the cost of a small request, and the route table has everything that a
framework would add.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock import wire
from penstock.core.errors import StaleDispatch
from penstock.server.app_state import AppState
from penstock.server.page import WebPage
from penstock.server.problems import (
    BadToken,
    Forbidden,
    NoRoute,
    Stopping,
    TooLarge,
    TooMany,
    TooSlow,
    WrongVerb,
    problem_of,
)
from penstock.server.request import MAX_BODY, Decoder, Header, Receive, Request, Send, read_query
from penstock.server.routes import ALL_ROUTES, OpenRoute, Route
from penstock.server.tokens import LOCAL, Principal, TokenWatch
from penstock.wire import Scope

_JSON: Final = (b"content-type", b"application/json")
_PROBLEM: Final = (b"content-type", b"application/problem+json")
#: Headers of every answer: no cache keeps it, no browser guesses its type, and no page frames it.
_ALWAYS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one token (open requests, of these the waiting ones), and of one request."""

    requests: int = 256
    waiting: int = 64
    #: The longest wait that a client may ask for: some proxies close a silent connection early.
    longest_wait_sec: float = wire.MAX_WAIT_SEC
    #: A stream is closed if its client reads nothing for this many seconds.
    unread_sec: float = 10.0


LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SAME_SITE: Final = frozenset({b"same-origin", b"none"})
#: Headers that a request may have only once: of two copies a proxy could read one, and this server the other.
_SINGLE: Final = frozenset(
    {b"host", b"authorization", b"origin", b"content-type", b"content-length", b"sec-fetch-site"}
)


def check_origin(headers: Mapping[bytes, bytes], hosts: frozenset[str], *, any_site: bool = False) -> None:
    """
    Refuse a request that another site makes in a user's browser. `hosts`: the names of this server, without a
    port. `any_site`: accept any Sec-Fetch-Site.

    A web page in a browser on this machine can reach a loopback port: by a form, by a script, or by a name
    that it points at 127.0.0.1 later. It cannot choose the headers Host, Origin and Sec-Fetch-Site.
    """
    host = _without_port(headers.get(b"host", b"").decode("latin-1")).lower()
    if host not in hosts:
        raise Forbidden("the Host header names a host that is not allowed here")
    origin = headers.get(b"origin")
    if origin is not None and not _is_own(origin.decode("latin-1").lower(), hosts):
        raise Forbidden("the Origin header names a site that is not allowed here")
    if not any_site and headers.get(b"sec-fetch-site", b"none") not in _SAME_SITE:
        raise Forbidden("requests from other sites (Sec-Fetch-Site) are not allowed")


def _is_own(origin: str, hosts: frozenset[str]) -> bool:
    scheme, _, authority = origin.partition("://")
    return scheme in {"http", "https"} and _without_port(authority) in hosts


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) and not host.endswith("]") else host


def _refuse_repeated_headers(pairs: list[Header]) -> None:
    seen = Counter(name for name, _ in pairs)
    for name in _SINGLE:
        if seen[name] > 1:
            raise Forbidden(f"the header {name.decode()} must be sent once")


class Api:
    """The API as an ASGI application. `page` serves the paths of the web page."""

    def __init__(
        self, app_state: AppState, *, hosts: frozenset[str], limits: RequestLimits, page: WebPage | None
    ) -> None:
        self._app_state, self._hosts, self._limits, self._page = app_state, hosts, limits, page
        self._token_watch = TokenWatch(app_state.tokens, app_state.loop)
        self._waiting: Counter[str] = Counter()
        self.stopping = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served here")
        request: Request[Any, Any] = Request(self._app_state, scope, receive, send)
        try:
            if request.connection.proxied and _came_without_tls(scope["headers"]):
                raise Forbidden("the proxy received this request without TLS; use HTTPS")
            if self._page is not None and self._page.owns(scope["path"]):
                check_origin(request.headers, self._hosts, any_site=self._page.is_opened_by(request))
                await self._page(request)
            else:
                await self._serve(request)
        except Exception as error:  # noqa: BLE001 - every error becomes an answer
            if isinstance(error, StaleDispatch):
                self._app_state.stats.live.counters.fenced += 1
            await _refuse(request, error)
        finally:
            if request.gone is not None:
                request.gone.cancel()

    async def _serve(self, request: Request[Any, Any]) -> None:
        scope = request.scope
        if len(request.headers) < len(scope["headers"]):
            _refuse_repeated_headers(scope["headers"])
        check_origin(request.headers, self._hosts)
        principal = request.principal = (
            _ANONYMOUS if scope["path"] == "/healthz" else self._principal(request)
        )
        if principal is not _ANONYMOUS:
            request.connection.prove()
        route, request.path = _ROUTER.find(scope["method"], scope["path"])
        if not isinstance(route.scope, OpenRoute) and route.scope not in principal.scopes:
            raise Forbidden(f"this needs a token with the scope {route.scope}", scope=str(route.scope))
        if self.stopping:
            raise Stopping("the scheduler is stopping")
        with _limited(self._app_state.open_requests, principal.name, self._limits.requests):
            await self._read(request, route)
            if route.streams or self._shortened(request.query) or self._shortened(request.body):
                request.waits = True
                with (
                    _limited(self._waiting, principal.name, self._limits.waiting),
                    self._token_watch.watching(principal, request.end),
                ):
                    await self._answer(request, route)
            else:
                await self._answer(request, route)

    def _shortened(self, query: Any) -> float:
        seconds: float = getattr(query, "wait_sec", 0.0)
        if seconds > self._limits.longest_wait_sec:
            seconds = query.wait_sec = self._limits.longest_wait_sec
        return seconds

    def _principal(self, request: Request[Any, Any]) -> Principal:
        runner, sessions = self._app_state.runner, self._app_state.sessions
        authorization = request.headers.get(b"authorization")
        if authorization is not None:
            token = None if runner is None else request.token
            if (
                runner is not None
                and token is not None
                and (dispatch := runner.dispatch_of(token)) is not None
            ):
                return Principal(f"attempt {dispatch}", frozenset({Scope.RUN_SELF}))
            return self._app_state.tokens.principal(authorization)
        if request.connection.local:
            return LOCAL
        if sessions is not None and (principal := sessions.principal(request.headers)) is not None:
            return principal
        raise BadToken("a bearer token is needed")

    async def _read(self, request: Request[Any, Any], route: Route) -> None:
        query_string = request.scope["query_string"]
        request.query = request.body = None
        if route.query is not None or query_string:
            request.query = read_query(query_string, route.query or wire.Nothing)
        if route.verb != "GET":
            request.body = await self._body(request, route)

    async def _body(self, request: Request[Any, Any], route: Route) -> Any:
        try:
            content = await request.read_body()
        except TooLarge as error:
            raise _naming_payload(error, route) from None
        if route.body is None or route.decode is None:
            # The route takes no body. An empty object is accepted as none.
            return _NOTHING(content, request.headers) if content else None
        if not content and route.body_optional:
            return route.body()
        return route.decode(content, request.headers)

    async def _answer(self, request: Request[Any, Any], route: Route) -> None:
        if route.in_pool:
            answer = await request.run(route.handler, request)
        else:
            answer = await route.handler(request)
        if request.waits and not self._app_state.tokens.alive(request.principal):
            raise BadToken("the token has ended while the request waited")
        if route.streams:
            await self._stream(request, answer)
        elif route.plain:
            await request.answer(200, answer, ((b"content-type", route.plain), *_ALWAYS))
        else:
            status = 503 if isinstance(answer, wire.Health) and answer.status != "ok" else 200
            await request.answer(status, msgspec.json.encode(answer), (_JSON, *_ALWAYS))

    async def _stream(self, request: Request[Any, Any], chunks: AsyncIterator[bytes]) -> None:
        headers = [(b"content-type", b"text/event-stream"), *_ALWAYS]
        await request.send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if request.scope["method"] == "HEAD":
                await request.send({"type": "http.response.body", "body": b""})
                return
            async for chunk in chunks:
                if not self._app_state.tokens.alive(request.principal):
                    break
                async with asyncio.timeout(self._limits.unread_sec):
                    await request.send({"type": "http.response.body", "body": chunk, "more_body": True})
            await request.send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            request.connection.abort()
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]  # it is a generator, and must leave the trail


@contextmanager
def _limited(counter: Counter[str], name: str, limit: int) -> Iterator[None]:
    if counter[name] >= limit:
        raise TooMany(f"this token already has {limit} requests of this kind open", retry_after_sec=1.0)
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


_ANONYMOUS: Final = Principal("anonymous", frozenset())
_NOTHING: Final = Decoder(wire.Nothing)


def _came_without_tls(headers: Iterable[Header]) -> bool:
    """Whether the headers of a declared proxy say that it received the request without TLS."""
    return any(name == b"x-forwarded-proto" and value.lower() != b"https" for name, value in headers)


async def _refuse(request: Request[Any, Any], error: Exception) -> None:
    problem = problem_of(error)
    headers = [_PROBLEM, *_ALWAYS]
    match error:
        case BadToken():
            headers.append((b"www-authenticate", b'Bearer realm="penstock"'))
        case WrongVerb():
            headers.append((b"allow", ", ".join(error.allowed).encode()))
        case TooLarge() | TooSlow():
            # Close the connection: the rest of the body must not be read as the next request.
            headers.append((b"connection", b"close"))
        case _:
            pass
    if problem.retry_after_sec is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(problem.retry_after_sec)))
    await request.answer(problem.status, msgspec.json.encode(problem), headers)


def _naming_payload(error: TooLarge, route: Route) -> TooLarge:
    names = () if route.body is None else route.body.__struct_fields__
    for name in ("payload", "jobs", "result", "outcomes", "checkpoint"):
        if name in names:
            message = "is most likely what makes the request too large"
            problem = {"field": name, "message": message}
            return TooLarge(f"{error}; {name} {message}", problems=[problem], limit=MAX_BODY)
    return error


class Router:
    """
    Finds the route of a path. If the path is not in the table as it is, the part after a known head is an id. A name
    can be a word of the table too: a schedule may be called `add`, and a batch `submit`.
    """

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._verbs: dict[str, dict[str, Route]] = {}
        #: The parts of the paths before an id.
        self._heads: set[str] = set()
        for route in routes:
            head, brace, after_brace = route.path.partition("{")
            _, _, tail = after_brace.partition("}")
            self._verbs.setdefault(f"{head}{brace}{tail}", {})[route.verb] = route
            if brace:
                self._heads.add(head)

    def find(self, verb: str, path: str) -> tuple[Route, str]:
        """
        The route, and the value of its path parameter. HEAD finds the route of GET. Raises NoRoute or
        WrongVerb.
        """
        verb = "GET" if verb == "HEAD" else verb
        verbs = self._verbs.get(path, {})
        if verb in verbs:
            return verbs[verb], ""
        parameter, with_id = self._with_id(path)
        verbs = verbs | {v: route for v, route in with_id.items() if not verbs or route.parameter == "name"}
        if not verbs:
            raise NoRoute("there is nothing at this path")
        route = verbs.get(verb)
        if route is None:
            allowed = sorted(verbs)
            raise WrongVerb(f"this path takes {' and '.join(allowed)} only", allowed=_with_head(allowed))
        return route, parameter

    def _with_id(self, path: str) -> tuple[str, dict[str, Route]]:
        for head in self._heads:
            if path.startswith(head):
                parameter, slash, tail = path.removeprefix(head).partition("/")
                verbs = self._verbs.get(f"{head}{{{slash}{tail}")
                if verbs is not None and _IDENT.fullmatch(parameter):
                    return parameter, verbs
        return "", {}


def _with_head(verbs: list[str]) -> list[str]:
    return [each for verb in verbs for each in ([verb, "HEAD"] if verb == "GET" else [verb])]


_IDENT: Final = re.compile(r"[0-9A-Za-z._-]{1,100}")
_ROUTER: Final = Router(ALL_ROUTES)
