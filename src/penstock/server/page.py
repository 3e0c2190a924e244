"""
The page: files that lie in the package, and the door by which a browser comes in.

Everything it shows comes from the API like everybody else's. Its policy lets it load from here alone and run nothing that is written in a page,
so that a payload that looks like a script stays a text.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.server.body import Receive, read_body
from penstock.server.guard import Exposure, check_request
from penstock.server.problems import BadFields, NoRoute, WrongVerb
from penstock.server.sessions import Opened, Sessions
from penstock.stores.api import Clock

__all__ = ["WebPage"]

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
        found = self._files.get(scope["path"])
        if found is None:
            raise NoRoute("there is nothing at this path")
        kind, content, tag = found
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
            asked = msgspec.json.decode((await read_body(receive, headers))[:_MAX_CODE], type=Code)
        except msgspec.MsgspecError:
            problem = {"field": "code", "message": "must be the code of a login link"}
            raise BadFields(f"code {problem['message']}", problems=[problem]) from None
        opened = self._sessions.open(asked.code, self._clock())
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
