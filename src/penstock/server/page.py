"""
Serves the web page: its files, and the request that turns the code of a login link into a session.
"""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.core.jobs.job import EventKind
from penstock.server.problems import BadFields, NoRoute, WrongVerb, naming_fields
from penstock.server.request import Request
from penstock.server.tokens import Sessions
from penstock.wire import Scope

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
    """The answer to a login: the half of the session that the page's script keeps."""

    session: str


class Code(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a login: the code of its link."""

    code: str


class WebPage:
    """Serves the page. Its files are read once: they are few and small."""

    def __init__(self, static: Path, sessions: Sessions) -> None:
        self._sessions = sessions
        self._files = {path: _read(file) for path, file in _listed(static)}

    def owns(self, path: str) -> bool:
        return path in ("/", "/session") or path.startswith("/assets/")

    def is_opened_by(self, request: Request[Any, Any]) -> bool:
        """
        Whether this request opens the page itself. A link in a mail does that too, and the browser marks such
        a request as cross-site; no other path accepts those.
        """
        return bool(request.scope["path"] == "/" and request.scope["method"] == "GET")

    async def __call__(self, request: Request[Any, Any]) -> None:
        if request.scope["path"] == "/session":
            await self._session(request)
        elif request.scope["method"] not in ("GET", "HEAD"):
            raise WrongVerb("the page is read with GET", allowed=["GET", "HEAD"])
        else:
            await self._file(request)

    async def _file(self, request: Request[Any, Any]) -> None:
        file = self._files.get(request.scope["path"])
        if file is None:
            raise NoRoute("there is nothing at this path")
        kind, content, tag = file
        is_known = request.headers.get(b"if-none-match") == tag
        headers = [(b"content-type", kind), (b"etag", tag), (b"cache-control", b"no-cache"), *_ALWAYS]
        await request.answer(304 if is_known else 200, b"" if is_known else content, headers)

    async def _session(self, request: Request[Any, Any]) -> None:
        if request.scope["method"] != "POST":
            raise WrongVerb("a session is opened with POST", allowed=["POST"])
        try:
            login = msgspec.json.decode((await request.read_body())[:_MAX_CODE], type=Code)
        except msgspec.MsgspecError:
            raise naming_fields(BadFields, ("code", "must be the code of a login link")) from None
        app_state = request.app_state
        opened = self._sessions.open(login.code, app_state.store.now())
        read_only = opened.principal.scopes <= {Scope.JOBS_READ}
        facts = {"token_id": opened.token_id, "read_only": read_only}
        await app_state.run(app_state.record, EventKind.LOGIN, "session_opened", opened.principal, facts)
        headers = [
            (b"set-cookie", self._sessions.set_cookie(opened.cookie).encode()),
            (b"content-type", b"application/json"),
            (b"cache-control", b"no-store"),
            *_ALWAYS,
        ]
        await request.answer(200, msgspec.json.encode(Session(opened.half)), headers)


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
