"""
The page's way in: a code that is good once becomes a cookie.

A session is a token like any other, with twelve hours to live: it is listed, revoked and kept over a restart like one. The cookie holds its secret, which
no script can read. A second half, derived from it, goes to the page's script, which sends it as a header with every request. Another
site can make a browser send the cookie, but not the header; so a cookie alone is good for nothing, and GET needs both as well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Final

from penstock.core.words import MINUTE, SECOND, Moment
from penstock.http.problems import BadToken
from penstock.http.tokens import Principal, TokenFile
from penstock.http.wire import NewToken, Scope

__all__ = ["CODE_LASTS", "HEADER", "LASTS", "Sessions"]

HEADER: Final = b"x-penstock-session"
LASTS: Final = timedelta(hours=12)
CODE_LASTS: Final = 10 * MINUTE
_MOST_CODES: Final = 100
_NAME: Final = "page"


class Sessions:
    """`port` is in the cookie's name: two schedulers on one host share a cookie jar."""

    def __init__(self, tokens: TokenFile, *, secure: bool, port: int) -> None:
        self._tokens, self._secure = tokens, secure
        self._codes: dict[str, tuple[Moment, Principal]] = {}
        self._lock = Lock()
        self.cookie = f"__Host-penstock-{port}" if secure else f"penstock-{port}"

    def code(self, who: Principal, now: Moment) -> str:
        """For whoever is asked for the page: it can do there what the asker can."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            alive = {key: kept for key, kept in self._codes.items() if kept[0] > now}
            while len(alive) >= _MOST_CODES:
                del alive[next(iter(alive))]
            self._codes = {**alive, _digest(code): (now + CODE_LASTS, who)}
        return code

    def open(self, code: str, now: Moment) -> tuple[str, str]:
        """The cookie's value and the page's half."""
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
        expires_at = datetime.fromtimestamp(now / SECOND, UTC) + LASTS
        asked = NewToken(
            name=_NAME,
            scopes=sorted(who.scopes),
            addon_id=who.addon_id,
            max_cost_units=who.max_cost_units,
            max_priority=who.max_priority,
            expires_at=expires_at,
        )
        _, secret = self._tokens.make(asked)
        return secret, _half(secret)

    def set_cookie(self, secret: str) -> str:
        secure = "; Secure" if self._secure else ""
        age = int(LASTS.total_seconds())
        return f"{self.cookie}={secret}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"

    def principal(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Of a request with both halves; None without a cookie of ours."""
        secret = self._secret(headers.get(b"cookie", b"").decode("latin-1"))
        if secret is None:
            return None
        if not hmac.compare_digest(_half(secret).encode(), headers.get(HEADER, b"")):
            raise BadToken("the session's cookie came without its other half")
        return self._tokens.principal(b"Bearer " + secret.encode())

    def _secret(self, cookies: str) -> str | None:
        for one in cookies.split(";"):
            name, _, value = one.strip().partition("=")
            if name == self.cookie and value:
                return value
        return None


_NOBODY: Final = Principal("nobody", frozenset[Scope]())


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


def _half(secret: str) -> str:
    return hmac.new(secret.encode(), b"penstock page", hashlib.sha256).hexdigest()
