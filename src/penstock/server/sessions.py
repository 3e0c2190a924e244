"""
The page's way in: a code that is good once becomes a session of two halves.

A session is a token like any other, with twelve hours to live: it is listed, revoked and kept over a restart like one, and it ends with the token that
asked for it. The browser has to show two independent random halves: a cookie, which no script can read, and a header that the page's script sends.
Browsers send a cookie to every port of a host, so any other local server may come to know it: what it has then is of no use. The other half cannot be
computed from it, it is no bearer token, and the daemon keeps only one hash over both halves and the name of the cookie, which is this instance's own.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Final, NamedTuple

from penstock.core.jobs.types import MINUTE, SECOND, Moment
from penstock.server.problems import BadToken
from penstock.server.tokens import Principal, TokenFile, new_token_id
from penstock.wire import NewToken, Scope

__all__ = ["CODE_LASTS", "HEADER", "LASTS", "Opened", "Sessions"]

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
        """For whoever is asked for the page: it can do there what the asker can."""
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
        asked = NewToken(
            name=_NAME,
            scopes=sorted(who.scopes),
            addon_id=who.addon_id,
            max_cost_units=who.max_cost_units,
            max_priority=who.max_priority,
            expires_at=datetime.fromtimestamp(now / SECOND, UTC) + LASTS,
        )
        token_id = new_token_id()
        cookie, half = f"{token_id}.{secrets.token_urlsafe(32)}", secrets.token_urlsafe(32)
        self._tokens.add(token_id, self._proof(cookie, half), asked, who)
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
