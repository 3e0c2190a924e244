"""
The page: its files, and the way into it, where a code that works once becomes a session of two halves.

A session is a token with twelve hours to live: it is listed, revoked and kept over a restart like any other, and it ends with the
token that asked for it. The browser has to show two independent random halves: a cookie, which no script can read, and a header
that the page's script sends. Browsers send a cookie to every port of a host, so another local server may learn it. The cookie alone
is of no use: the other half cannot be computed from it, it is no bearer token, and the daemon keeps only one hash over both halves and
the name of the cookie, which belongs to this instance.
"""

from __future__ import annotations

import hashlib
import mimetypes
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec

from penstock.core.jobs.types import MINUTE, SECOND, Moment
from penstock.server.accepting import Exposure, check_request
from penstock.server.body import Receive, read_body
from penstock.server.problems import BadFields, BadToken, NoRoute, WrongVerb
from penstock.server.tokens import Principal, TokenFile, new_token_id
from penstock.stores.api import Clock
from penstock.wire import NewToken, Scope

HEADER: Final = b"x-penstock-session"
LASTS: Final = timedelta(hours=12)
CODE_LASTS: Final = 10 * MINUTE
_MOST_CODES: Final = 100
_NAME: Final = "page"


class Opened(NamedTuple):
    """`cookie` and `half` are the two halves of the session; `who` asked for the link."""

    cookie: str
    half: str
    token_id: str
    who: Principal


class Sessions:
    """`port` and the file of tokens are in the cookie's name: schedulers on one host share a cookie jar, at once or in turn."""

    def __init__(self, tokens: TokenFile, *, secure: bool, port: int) -> None:
        self._tokens, self._secure = tokens, secure
        self._codes: dict[str, tuple[Moment, Principal]] = {}
        self._lock = Lock()
        lead = "__Host-penstock" if secure else "penstock"
        self.cookie = f"{lead}-{port}-{_digest(str(tokens.path.resolve()))[:10]}"

    def code(self, who: Principal, now: Moment) -> str:
        """A code for a login link; its session has the rights of `who`."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            alive = {key: kept for key, kept in self._codes.items() if kept[0] > now}
            while len(alive) >= _MOST_CODES:
                del alive[next(iter(alive))]
            self._codes = {**alive, _digest(code): (now + CODE_LASTS, who)}
        return code

    def open(self, code: str, now: Moment) -> Opened:
        """A code ends with the token that it was made with."""
        with self._lock:
            until, who = self._codes.pop(_digest(code), (0, _NOBODY))
        if until <= now:
            raise BadToken("this code has been used, has expired, or never was")
        for token in self._tokens.all():
            if (
                token.name == _NAME
                and token.expires_at is not None
                and token.expires_at.timestamp() * SECOND <= now
            ):
                self._tokens.revoke(token.token_id)
        new_token = NewToken(
            name=_NAME,
            scopes=sorted(who.scopes),
            addon_id=who.addon_id,
            max_cost_units=who.max_cost_units,
            max_priority=who.max_priority,
            expires_at=datetime.fromtimestamp(now / SECOND, UTC) + LASTS,
        )
        token_id = new_token_id()
        cookie, half = f"{token_id}.{secrets.token_urlsafe(32)}", secrets.token_urlsafe(32)
        self._tokens.add(token_id, self._proof(cookie, half), new_token, who)
        return Opened(cookie, half, token_id, who)

    def set_cookie(self, value: str) -> str:
        secure = "; Secure" if self._secure else ""
        age = int(LASTS.total_seconds())
        return f"{self.cookie}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"

    def principal(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Of a request with both halves; None without a cookie of ours."""
        cookie = self._value(headers.get(b"cookie", b"").decode("latin-1"))
        if cookie is None:
            return None
        half = headers.get(HEADER, b"").decode("latin-1")
        return self._tokens.proven(cookie.partition(".")[0], self._proof(cookie, half).encode())

    def _proof(self, cookie: str, half: str) -> str:
        """Begins otherwise than any bearer token, so that neither can be shown in the place of the other."""
        return f"session {self.cookie} {cookie} {half}"

    def _value(self, cookies: str) -> str | None:
        for one in cookies.split(";"):
            name, _, value = one.strip().partition("=")
            if name == self.cookie and value:
                return value
        return None


_NOBODY: Final = Principal("nobody", frozenset[Scope]())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_ALWAYS: Final = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_MAX_CODE: Final = 4_096


class Session(msgspec.Struct):
    session: str


class Code(msgspec.Struct, forbid_unknown_fields=True):
    code: str


class WebPage:
    """Its files are read once: they are few, small, and do not change while it runs."""

    LEADS: Final = ("/", "/assets/", "/session")

    def __init__(
        self,
        static: Path,
        sessions: Sessions,
        exposure: Exposure,
        clock: Clock,
        record: Callable[[Opened], Awaitable[None]],
    ) -> None:
        self._sessions, self._exposure, self._clock, self._record = sessions, exposure, clock, record
        self._files = {path: _read(file) for path, file in _listed(static)}

    def owns(self, path: str) -> bool:
        return path in ("/", "/session") or path.startswith("/assets/")

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        headers = dict(scope["headers"])
        # A link from a mail or a chat opens the page: the browser calls that cross-site. Nothing but the page itself is to be had so.
        opens = scope["path"] == "/" and scope["method"] == "GET"
        check_request({**headers, b"sec-fetch-site": b"none"} if opens else headers, self._exposure)
        if scope["path"] == "/session":
            await self._session(scope, receive, send, headers)
        elif scope["method"] not in ("GET", "HEAD"):
            raise WrongVerb("the page is read with GET", allowed=["GET"])
        else:
            await self._file(scope, send, headers)

    async def _file(self, scope: Any, send: Any, headers: dict[bytes, bytes]) -> None:
        file = self._files.get(scope["path"])
        if file is None:
            raise NoRoute("there is nothing at this path")
        kind, content, tag = file
        common = [(b"content-type", kind), (b"etag", tag), (b"cache-control", b"no-cache"), *_ALWAYS]
        if headers.get(b"if-none-match") == tag:
            await _answer(send, 304, b"", common)
        else:
            length = (b"content-length", b"%d" % len(content))
            await _answer(send, 200, b"" if scope["method"] == "HEAD" else content, [*common, length])

    async def _session(self, scope: Any, receive: Receive, send: Any, headers: dict[bytes, bytes]) -> None:
        if scope["method"] != "POST":
            raise WrongVerb("a session is opened with POST", allowed=["POST"])
        try:
            login = msgspec.json.decode((await read_body(receive, headers))[:_MAX_CODE], type=Code)
        except msgspec.MsgspecError:
            problem = {"field": "code", "message": "must be the code of a login link"}
            raise BadFields(f"code {problem['message']}", problems=[problem]) from None
        opened = self._sessions.open(login.code, self._clock())
        await self._record(opened)
        body = msgspec.json.encode(Session(opened.half))
        extra = [
            (b"set-cookie", self._sessions.set_cookie(opened.cookie).encode()),
            (b"content-type", b"application/json"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"%d" % len(body)),
            *_ALWAYS,
        ]
        await _answer(send, 200, body, extra)


async def _answer(send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _listed(static: Path) -> list[tuple[str, Path]]:
    files = [
        (f"/assets/{file.relative_to(static)}", file)
        for file in static.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    ]
    return [("/", static / "index.html"), *files]


def _read(file: Path) -> tuple[bytes, bytes, bytes]:
    kind = (
        {".js": "text/javascript"}.get(file.suffix)
        or mimetypes.guess_type(file.name)[0]
        or "application/octet-stream"
    )
    content = file.read_bytes()
    text = "; charset=utf-8" if kind.startswith("text/") else ""
    return f"{kind}{text}".encode(), content, b'"' + hashlib.sha256(content).hexdigest()[:20].encode() + b'"'
