"""
The API as an ASGI application: every request passes the same checks in the same order.

    host, origin, site -> token -> route -> scope -> limits -> query, body -> handler -> answer

It speaks ASGI itself. A framework in between cost as much again as the rest of a small request, and the route table has all that it would add.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec

from penstock import wire
from penstock.core.errors import StaleDispatch
from penstock.server.accepting import Exposure, check_request
from penstock.server.app_state import AppState, Request
from penstock.server.body import MAX_BODY, Decoder, Receive, read_body, read_query
from penstock.server.handlers.status import problems_of
from penstock.server.metrics import CONTENT_TYPE, metrics
from penstock.server.page import WebPage
from penstock.server.problems import (
    BadToken,
    Forbidden,
    Stopping,
    TooLarge,
    TooMany,
    TooSlow,
    WrongVerb,
    problem_of,
)
from penstock.server.routes import OPEN, ROUTES, OpenRoute, Route, Router, describe
from penstock.server.tokens import LOCAL, Principal, TokenWatch
from penstock.wire import PREFIX, Scope

Scoped = MutableMapping[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_JSON: Final = (b"content-type", b"application/json")
_PROBLEM: Final = (b"content-type", b"application/problem+json")
#: On every answer: no cache keeps it, no browser guesses its type, and no page frames it.
_ALWAYS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Of one token, and of one request."""

    requests: int = 256
    waiting: int = 64
    #: However long a client asks to be kept waiting. Some proxies cut a silent connection early.
    longest_wait_sec: float = wire.MAX_WAIT_SEC
    #: A stream whose client has not taken anything for so long is dropped.
    unread_sec: float = 10.0


class Api:
    """`page`: what a browser gets at paths of its own. It does its own checking."""

    def __init__(
        self,
        app_state: AppState,
        *,
        exposure: Exposure = Exposure(),  # noqa: B008 - a frozen value
        limits: RequestLimits = RequestLimits(),  # noqa: B008 - a frozen value
        page: WebPage | None = None,
    ) -> None:
        self._app_state, self._exposure, self._limits = app_state, exposure, limits
        self._page = page
        self._token_watch = TokenWatch(app_state.tokens, app_state.loop)
        self._router = Router((*ROUTES, *self._own_routes()))
        self._open: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._health: tuple[float, bool] = (-1e9, True)
        self._probe: asyncio.Future[list[str]] | None = None
        self.stopping = False

    def _own_routes(self) -> Iterator[Route]:
        yield Route(
            verb="GET",
            path="/healthz",
            scope=OPEN,
            summary="ok or degraded, and no more",
            handler=self._healthz,
            answer=wire.Health,
        )
        yield Route(
            verb="GET",
            path="/metrics",
            scope=Scope.METRICS_READ,
            summary="For Prometheus",
            handler=metrics,
            answer=wire.Exposition,
            plain=CONTENT_TYPE,
        )
        yield Route(
            verb="GET",
            path=f"{PREFIX}/openapi.json",
            scope=Scope.JOBS_READ,
            summary="This description",
            handler=self._openapi,
            answer=wire.Description,
        )

    @property
    def routes(self) -> list[Route]:
        return list(self._router)

    async def __call__(self, scope: Scoped, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served here")
        if scope.get("penstock.proxied", False) and _in_the_clear(scope["headers"]):
            error = Forbidden("the proxy took this request in the clear; use HTTPS")
            await _refuse(scope, send, error)
            return
        if self._page is not None and self._page.owns(scope["path"]):
            try:
                await self._page(scope, receive, send)
            except Exception as error:  # noqa: BLE001 - every error becomes an answer
                await _refuse(scope, send, error)
            return
        request: _Request | None = None
        try:
            request = _Request(scope, receive, send)
            await self._serve(request)
        except Exception as error:  # noqa: BLE001 - every error becomes an answer
            if isinstance(error, StaleDispatch):
                self._app_state.beats.pulse.tallies.fenced += 1
            await _refuse(scope, send, error)
        finally:
            if request is not None:
                request.close()

    async def _serve(self, request: _Request) -> None:
        check_request(request.headers, self._exposure)
        path, verb = request.scope["path"], request.scope["method"]
        who = _NOBODY if path == "/healthz" else self._principal(request)
        if who is not _NOBODY:
            request.prove()
        route, parameter = self._router.find(verb, path)
        if not isinstance(route.scope, OpenRoute) and route.scope not in who.scopes:
            raise Forbidden(f"this needs a token with the scope {route.scope}", scope=str(route.scope))
        if self.stopping:
            raise Stopping("the scheduler is stopping")
        _enter(self._open, who.name, self._limits.requests)
        try:
            call = await self._understood(request, route, parameter, who)
            if route.waits or self._shortened(call.query) or self._shortened(call.body):
                await self._wait_and_answer(request, route, call)
            else:
                await self._answer(request, route, call)
        finally:
            _leave(self._open, who.name)

    async def _wait_and_answer(self, request: _Request, route: Route, call: Request[Any, Any]) -> None:
        name = call.principal.name
        _enter(self._waiting, name, self._limits.waiting)
        try:
            request.waits = True
            with self._token_watch.watching(call.principal, request.end):
                await self._answer(request, route, call)
        finally:
            _leave(self._waiting, name)

    def _shortened(self, query: Any) -> float:
        seconds: float = getattr(query, "wait_sec", 0.0)
        if seconds > self._limits.longest_wait_sec:
            seconds = query.wait_sec = self._limits.longest_wait_sec
        return seconds

    def _principal(self, request: _Request) -> Principal:
        authorization = request.headers.get(b"authorization")
        if authorization is not None:
            if (
                self._app_state.runs is not None
                and (run := self._app_state.run_of(request.headers)) is not None
            ):
                return run
            return self._app_state.tokens.principal(authorization)
        if request.scope.get("penstock.local", False):
            return LOCAL
        if self._app_state.sessions is not None:
            principal = self._app_state.sessions.principal(request.headers)
            if principal is not None:
                return principal
        raise BadToken("a bearer token is needed")

    async def _understood(
        self, request: _Request, route: Route, parameter: str, who: Principal
    ) -> Request[Any, Any]:
        query_string = request.scope["query_string"]
        query = None
        if route.query is not None or query_string:
            query = read_query(query_string, route.query or wire.Nothing)
        body = None
        if route.verb != "GET":
            body = await self._body(request, route)
        return Request(self._app_state, who, parameter, query, body, request.headers, request.watch)

    async def _body(self, request: _Request, route: Route) -> Any:
        try:
            content = await read_body(request.receive, request.headers)
        except TooLarge as error:
            raise _naming_payload(error, route) from None
        if route.decode is None or route.body is None:
            # The route has no fields; an empty object is as good as no body.
            return _NOTHING(content, request.headers) if content else None
        if not content and route.body_optional:
            return route.body()
        return route.decode(content, request.headers)

    async def _answer(self, request: _Request, route: Route, call: Request[Any, Any]) -> None:
        if route.in_pool:
            answer = await call.run(route.handler, call)
        else:
            answer = await route.handler(call)
        if request.waits and not self._app_state.tokens.alive(call.principal):
            raise BadToken("the token has ended while the request waited")
        if route.streams:
            await self._stream(request, answer, call.principal)
        else:
            if route.plain:
                await request.answer(200, answer, (b"content-type", route.plain))
                return
            status = 503 if isinstance(answer, wire.Health) and answer.status != "ok" else 200
            await request.answer(status, msgspec.json.encode(answer), _JSON)

    async def _stream(self, request: _Request, chunks: AsyncIterator[bytes], who: Principal) -> None:
        headers = [(b"content-type", b"text/event-stream"), *_ALWAYS]
        await request.send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in chunks:
                if not self._app_state.tokens.alive(who):
                    break
                async with asyncio.timeout(self._limits.unread_sec):
                    await request.send({"type": "http.response.body", "body": chunk, "more_body": True})
            await request.send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            request.abort()
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]  # it is a generator, and must leave the trail

    async def _healthz(self, _: Request[None, None]) -> wire.Health:
        """Looked into once a second at most: it is open to everybody, so it must cost nothing."""
        at, well = self._health
        now = self._app_state.loop.time()
        if now - at > 1.0:
            if (
                self._probe is None or self._probe.done()
            ):  # one that hangs must not take a thread for each call
                self._probe = asyncio.ensure_future(self._app_state.run(problems_of, self._app_state))
            try:
                async with asyncio.timeout(2.0):
                    well = not await asyncio.shield(self._probe)
            except TimeoutError:
                well = False
            self._health = (now, well)
        return wire.Health("ok" if well else "degraded")

    def _openapi(self, _: Request[None, None]) -> msgspec.Raw:
        """Not a coroutine: the first description is made beside the loop, which has others to serve."""
        return msgspec.Raw(self._description)

    @cached_property
    def _description(self) -> bytes:
        """Made at the first request: making it takes longer than all the rest of a start."""
        return msgspec.json.encode(describe(list(self._router)))


def _enter(counter: Counter[str], name: str, limit: int) -> None:
    if counter[name] >= limit:
        raise TooMany(f"this token has {limit} such requests open already", retry_after_sec=1.0)
    counter[name] += 1


def _leave(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


_NOBODY: Final = Principal("nobody", frozenset())
_NOTHING: Final = Decoder(wire.Nothing)


@dataclass(slots=True)
class _Request:
    scope: Scoped
    receive: Receive
    send: Send
    headers: dict[bytes, bytes] = field(init=False)
    _gone: asyncio.Future[Any] | None = None
    #: It may take long, so its token may have ended by its end.
    waits: bool = False

    def __post_init__(self) -> None:
        pairs = self.scope["headers"]
        self.headers = dict(pairs)
        if len(self.headers) < len(pairs):
            _refuse_doubles(pairs)

    def watch(self) -> asyncio.Future[Any]:
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._until_gone())
        return self._gone

    def end(self) -> None:
        """As if the client had gone: what waits for it stops waiting, and gives back what it has claimed."""
        self.watch().cancel()

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self.send(
            {"type": "http.response.start", "status": status, "headers": [*headers, length, *_ALWAYS]}
        )
        await self.send({"type": "http.response.body", "body": body})

    def prove(self) -> None:
        """The client has shown a token: its connection gives way after those that have shown nothing."""
        proven = self.scope.get("penstock.proven")
        if proven is not None:
            proven()

    def abort(self) -> None:
        """Not to be closed in good order: what waits to be sent would wait for ever."""
        abort = self.scope.get("penstock.abort")
        if abort is not None:
            abort()

    def close(self) -> None:
        if self._gone is not None:
            self._gone.cancel()


def _in_the_clear(headers: list[tuple[bytes, bytes]]) -> bool:
    """What a declared proxy says of its own client. Of other peers no such header is read at all."""
    return any(name == b"x-forwarded-proto" and value.lower() != b"https" for name, value in headers)


#: Sent twice, these could mean one thing to a proxy and another to us.
_SINGLE: Final = frozenset(
    {b"host", b"authorization", b"origin", b"content-type", b"content-length", b"sec-fetch-site"}
)


def _refuse_doubles(pairs: list[tuple[bytes, bytes]]) -> None:
    seen = Counter(name for name, _ in pairs)
    for name in _SINGLE:
        if seen[name] > 1:
            raise Forbidden(f"the header {name.decode()} must be sent once")


async def _refuse(scope: Scoped, send: Send, error: Exception) -> None:
    problem = problem_of(error)
    headers = [_PROBLEM, *_ALWAYS]
    match error:
        case BadToken():
            headers.append((b"www-authenticate", b'Bearer realm="penstock"'))
        case WrongVerb():
            headers.append((b"allow", ", ".join(error.allowed).encode()))
        case TooLarge() | TooSlow():
            # The rest of the body may still be on its way; it must not be taken for the next request.
            headers.append((b"connection", b"close"))
        case _:
            pass
    if problem.retry_after_sec is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(problem.retry_after_sec)))
    body = msgspec.json.encode(problem)
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body if scope["method"] != "HEAD" else b""})


def _naming_payload(error: TooLarge, route: Route) -> TooLarge:
    names = () if route.body is None else route.body.__struct_fields__
    for name in ("payload", "jobs", "result", "outcomes", "checkpoint"):
        if name in names:
            problem = {"field": name, "message": "is most likely what makes the request too large"}
            return TooLarge(f"{error}; {name} {problem['message']}", problems=[problem], limit=MAX_BODY)
    return error
