"""
Bearer tokens and sessions of the page: what each client may do, and the end of requests that wait with a
token that has ended.

A token is 256 random bits, so only its plain SHA-256 is kept. Tokens live in a file beside the database, not
in a table: the stores need no table for them, a backup of the jobs carries no hashes of secrets, and a
locked-out operator can edit a text file. The file is replaced as a whole, so a reader sees the old one or the
new one; every process notices a change within half a second.

A token made with another token is that token's child: it expires no later, and it ends when its parent is
revoked, expires or is taken out of the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from penstock.core.jobs.types import MINUTE, SECOND, Moment, when
from penstock.scheduler.permissions import Unsafe, private_directory, private_file, replace_file
from penstock.server.problems import BadToken
from penstock.wire import Login, NewToken, Scope, Token

TOKENS_FILE: Final = "tokens.json"
#: The first token, in full, for the command line of the user that started the daemon.
FIRST_FILE: Final = "token"
_LOOK_EVERY: Final = 0.5
_LEAD: Final = "pst"


@dataclass(frozen=True, slots=True)
class Principal:
    """The client of a request, after its token was checked."""

    name: str
    scopes: frozenset[Scope]
    addon_id: str | None = None
    max_cost_units: int | None = None
    max_priority: int | None = None
    #: The token that was shown. None: the local user, or a run with its own token.
    token_id: str | None = None
    #: When that token or the first of its ancestors expires.
    expires_at: datetime | None = None


#: Came by the Unix socket, as the user that runs the daemon: it could read the token file anyway.
LOCAL: Final = Principal("local", frozenset(Scope))


class _Kept(msgspec.Struct, frozen=True):
    token: Token
    sha256: str


class TokenFile:
    """
    `clock`: for expiry; `first`: where the first token goes in full; `timer`: when to look at the file again.
    """

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], Moment],
        *,
        first: Path | None = None,
        timer: Callable[[], float] = monotonic,
    ) -> None:
        self.path = private_directory(directory) / TOKENS_FILE
        self._clock, self._timer, self._lock = clock, timer, Lock()
        self._kept: dict[str, tuple[_Kept, Principal]] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._look_at = 0.0
        if not self.path.exists():
            self._first(first or directory / FIRST_FILE)
        self._load()

    def principal(self, authorization: bytes) -> Principal:
        """Of a request with this header. BadToken gives no reason: a stranger must not learn one."""
        scheme, _, secret = authorization.partition(b" ")
        lead, _, rest = secret.strip().partition(b"_")
        token_id, _, _ = rest.partition(b"_")
        if scheme.lower() != b"bearer" or lead != _LEAD.encode():
            raise BadToken("a bearer token is needed")
        return self.proven(token_id.decode("latin-1"), secret.strip())

    def proven(self, token_id: str, proof: bytes) -> Principal:
        """The token's principal, if `proof` is what `add` was given for it."""
        self._refresh()
        entry = self._kept.get(token_id)
        digest = hashlib.sha256(proof).hexdigest()
        # Compared even when there is nothing to compare with, so that an id that exists takes no longer than
        # one that does not.
        same = hmac.compare_digest(digest, entry[0].sha256 if entry else "0" * 64)
        if entry is None or not same or self._expired(entry[1]):
            raise BadToken("the token is not valid, or no longer valid")
        return entry[1]

    def alive(self, principal: Principal) -> bool:
        """
        Whether what was proven once still holds: neither the token nor an ancestor was revoked or has
        expired.
        """
        if principal.token_id is None:
            return True
        try:
            self._refresh()
        except Unsafe:
            return False
        entry = self._kept.get(principal.token_id)
        return entry is not None and not self._expired(entry[1])

    def _expired(self, principal: Principal) -> bool:
        ends_at = principal.expires_at
        return ends_at is not None and ends_at.timestamp() * SECOND <= self._clock()

    def all(self) -> list[Token]:
        self._load()
        return [kept.token for kept, _ in self._kept.values()]

    def make(self, new: NewToken, by: Principal | None = None) -> tuple[Token, str]:
        token_id, secret = _new_secret()
        return self.add(token_id, secret, new, by), secret

    def add(self, token_id: str, proof: str, new: NewToken, by: Principal | None = None) -> Token:
        """`by`: the token that it is a child of. Only the hash of `proof` is kept."""
        with self._lock:
            self._load()
            if by is not None and not self.alive(by):
                raise BadToken("the token that this request was made with has ended")
            kept = self._new(token_id, proof, new, by)
            self._save([*(k for k, _ in self._kept.values()), kept])
        return kept.token

    def revoke(self, token_id: str) -> bool:
        """
        With its children. At once here; in another process that serves from this file, within half a second.
        """
        with self._lock:
            self._load()
            if token_id not in self._kept:
                return False
            self._save(_living(k for k, _ in self._kept.values() if k.token.token_id != token_id))
        return True

    def _new(self, token_id: str, proof: str, new: NewToken, by: Principal | None = None) -> _Kept:
        ends = [end for end in (new.expires_at, None if by is None else by.expires_at) if end is not None]
        changed = {"scopes": sorted(set(new.scopes)), "expires_at": min(ends, default=None)}
        token = Token(
            **msgspec.structs.asdict(new) | changed,
            token_id=token_id,
            created_at=when(self._clock()),
            parent_id=None if by is None else by.token_id,
        )
        return _Kept(token, _digest(proof))

    def _first(self, secret_file: Path) -> None:
        token_id, secret = _new_secret()
        kept = self._new(token_id, secret, NewToken(name="made at first start", scopes=list(Scope)))
        # The secret first: without it a list that holds its hash would lock all clients out.
        replace_file(secret_file, f"{secret}\n".encode())
        self._save([kept])

    def _save(self, kept: list[_Kept]) -> None:
        replace_file(self.path, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
        self._load(anyway=True)

    def _refresh(self) -> None:
        if self._timer() >= self._look_at:
            self._load()

    def _load(self, *, anyway: bool = False) -> None:
        self._look_at = self._timer() + _LOOK_EVERY
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._kept, self._stamp = {}, None
            return
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._stamp and not anyway:
            return
        private_file(self.path)
        try:
            kept = msgspec.json.decode(self.path.read_bytes(), type=list[_Kept])
        except msgspec.DecodeError as error:
            raise Unsafe(
                f"{self.path} is damaged ({error}): fix it, or remove it for a new first token",
                path=str(self.path),
            ) from None
        living = _living(kept)
        tokens = {k.token.token_id: k.token for k in living}
        self._kept = {k.token.token_id: (k, _principal(k.token, tokens)) for k in living}
        self._stamp = stamp


def _new_token_id() -> str:
    return secrets.token_hex(5)


def _new_secret() -> tuple[str, str]:
    token_id = _new_token_id()
    return token_id, f"{_LEAD}_{token_id}_{secrets.token_urlsafe(32)}"


def _living(kept: Iterable[_Kept]) -> list[_Kept]:
    """Without those that have lost an ancestor."""
    remaining = list(kept)
    while True:
        ids = {k.token.token_id for k in remaining}
        living = [k for k in remaining if k.token.parent_id is None or k.token.parent_id in ids]
        if len(living) == len(remaining):
            return living
        remaining = living


def _principal(token: Token, tokens: dict[str, Token]) -> Principal:
    ends = [one.expires_at for one in _lineage(token, tokens) if one.expires_at is not None]
    return Principal(
        token.token_id,
        frozenset(token.scopes),
        token.addon_id,
        token.max_cost_units,
        token.max_priority,
        token.token_id,
        min(ends, default=None),
    )


def _lineage(token: Token, tokens: dict[str, Token]) -> Iterable[Token]:
    seen: dict[str, Token] = {}
    while token.token_id not in seen:
        seen[token.token_id] = token
        token = tokens.get(token.parent_id or "", token)
    return seen.values()


#: With the half second after which the file of tokens is read again it is less than one.
_WATCH_EVERY: Final = 0.3


class TokenWatch:
    """
    Ends the streams and long polls of a token that has ended.

    A token is checked when a request comes in, and some requests stay for hours. While there are any, this
    checks their tokens several times a second; while there are none, it does nothing. Lives on one event
    loop.
    """

    def __init__(self, tokens: TokenFile, loop: asyncio.AbstractEventLoop) -> None:
        self._tokens, self._loop = tokens, loop
        self._waiting: dict[object, tuple[Principal, Callable[[], object]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, principal: Principal, end: Callable[[], object]) -> Iterator[None]:
        """Calls `end` once, if the principal's token ends before the block does."""
        if principal.token_id is None:
            yield
            return
        key = object()
        self._waiting[key] = (principal, end)
        self._look_later()
        try:
            yield
        finally:
            self._waiting.pop(key, None)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_WATCH_EVERY, self._look)

    def _look(self) -> None:
        self._timer = None
        for key, (principal, end) in list(self._waiting.items()):
            if not self._tokens.alive(principal):
                del self._waiting[key]
                end()
        if self._waiting:
            self._look_later()


#: The other half of a session.
_SESSION_HEADER: Final = b"x-penstock-session"
SESSION_LASTS: Final = timedelta(hours=12)
_CODE_LASTS: Final = 10 * MINUTE
_MOST_CODES: Final = 100
#: The name of every token that is a session.
_SESSION: Final = "page"


class Opened(NamedTuple):
    """`cookie` and `half` are the two halves of the session; `principal` requested the link."""

    cookie: str
    half: str
    token_id: str
    principal: Principal


class Sessions:
    """
    Sessions of the page: a code that works once becomes a session of two halves.

    A session is a token with twelve hours to live: it is listed, revoked and kept over a restart like any
    other, and it ends with the token that requested it. The browser has to show two independent random
    halves: a cookie, which no script can read, and a header that the page's script sends. Browsers send a
    cookie to every port of a host, so another local server may learn it. The cookie alone is of no use: the
    other half cannot be computed from it, it is no bearer token, and the daemon keeps only one hash over both
    halves and the name of the cookie, which belongs to this instance.

    `port` and the file of tokens are in the cookie's name: schedulers on one host share a cookie jar, at once
    or in turn.
    """

    def __init__(self, tokens: TokenFile, *, secure: bool, url: str, port: int) -> None:
        self._tokens, self._secure, self._url = tokens, secure, url
        self._codes: dict[str, tuple[Moment, Principal]] = {}
        self._lock = Lock()
        lead = "__Host-penstock" if secure else "penstock"
        self.cookie = f"{lead}-{port}-{_digest(str(tokens.path.resolve()))[:10]}"

    def link(self, principal: Principal, now: Moment) -> Login:
        """A link that opens the page once; its session has the rights of `principal`."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            alive = {key: kept for key, kept in self._codes.items() if kept[0] > now}
            while len(alive) >= _MOST_CODES:
                del alive[next(iter(alive))]
            self._codes = {**alive, _digest(code): (now + _CODE_LASTS, principal)}
        return Login(f"{self._url}/#code={code}", when(now + _CODE_LASTS))

    def open(self, code: str, now: Moment) -> Opened:
        """A code ends with the token that it was made with."""
        with self._lock:
            kept = self._codes.pop(_digest(code), None)
        if kept is None or kept[0] <= now:
            raise BadToken("this login code was used already, has expired, or does not exist")
        principal = kept[1]
        for token in self._tokens.all():
            ends_at = token.expires_at
            if token.name == _SESSION and ends_at is not None and ends_at.timestamp() * SECOND <= now:
                self._tokens.revoke(token.token_id)
        new_token = NewToken(
            name=_SESSION,
            scopes=sorted(principal.scopes),
            addon_id=principal.addon_id,
            max_cost_units=principal.max_cost_units,
            max_priority=principal.max_priority,
            expires_at=when(now) + SESSION_LASTS,
        )
        token_id = _new_token_id()
        cookie, half = f"{token_id}.{secrets.token_urlsafe(32)}", secrets.token_urlsafe(32)
        self._tokens.add(token_id, self._proof(cookie, half), new_token, principal)
        return Opened(cookie, half, token_id, principal)

    def set_cookie(self, value: str) -> str:
        secure = "; Secure" if self._secure else ""
        age = int(SESSION_LASTS.total_seconds())
        return f"{self.cookie}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"

    def principal(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Of a request with both halves; None without a cookie of ours."""
        cookie = self._value(headers.get(b"cookie", b"").decode("latin-1"))
        if cookie is None:
            return None
        half = headers.get(_SESSION_HEADER, b"").decode("latin-1")
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
