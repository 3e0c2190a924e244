"""
Bearer tokens, sessions of the page, and what each allows. Also ends waiting requests whose token has ended.

A token is 256 random bits, so its plain SHA-256 is safe to store. Tokens are in a file beside the database,
not in a table: then a backup of the jobs has no hashes of secrets, and an operator without a token can edit a
text file. The file is replaced as a whole, so a reader sees the old or the new one. Every process notices a
change within half a second.

A token made with another token is that token's child: it expires no later, and it ends when its parent is
revoked, expires or is removed from the file.
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
#: The file with the secret of the first token, for the command line of the user that started the daemon.
FIRST_FILE: Final = "token"
_LOOK_EVERY: Final = 0.5
_PREFIX: Final = "pst"


@dataclass(frozen=True, slots=True)
class Principal:
    """The client of a request, after its token was checked."""

    name: str
    scopes: frozenset[Scope]
    addon_id: str | None = None
    max_cost_units: int | None = None
    max_priority: int | None = None
    #: The id of its token. None: the local user, or a running job with its own token.
    token_id: str | None = None
    #: When the token or the first of its ancestors expires.
    expires_at: datetime | None = None


#: The principal of the Unix socket: the daemon's own user, who could read the token file anyway.
LOCAL: Final = Principal("local", frozenset(Scope))


class _StoredToken(msgspec.Struct, frozen=True):
    """A token as the file has it: with the hash of its secret."""

    token: Token
    sha256: str


class TokenFile:
    """
    The file with all tokens. `clock` decides expiry. `first`: the file for the secret of the first token.
    `timer` decides when to read the file again.
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
        self._kept: dict[str, tuple[_StoredToken, Principal]] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._look_at = 0.0
        if not self.path.exists():
            self._make_first_token(first or directory / FIRST_FILE)
        self._load()

    def principal(self, authorization: bytes) -> Principal:
        """
        The principal of a request with this header. BadToken gives no reason, which would help an attacker.
        """
        scheme, _, secret = authorization.partition(b" ")
        lead, _, tail = secret.strip().partition(b"_")
        token_id, _, _ = tail.partition(b"_")
        if scheme.lower() != b"bearer" or lead != _PREFIX.encode():
            raise BadToken("a bearer token is needed")
        return self.verify(token_id.decode("latin-1"), secret.strip())

    def verify(self, token_id: str, proof: bytes) -> Principal:
        """The principal of the token, if `proof` is the one with which it was added; else BadToken."""
        self._refresh()
        entry = self._kept.get(token_id)
        digest = hashlib.sha256(proof).hexdigest()
        # Compare even for an unknown id, so that it takes as long as a known one.
        same = hmac.compare_digest(digest, entry[0].sha256 if entry else "0" * 64)
        if entry is None or not same or self._expired(entry[1]):
            raise BadToken("the token is not valid, or no longer valid")
        return entry[1]

    def alive(self, principal: Principal) -> bool:
        """
        Whether a checked token is still valid: neither it nor an ancestor was revoked or has expired.
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
        """Add a token, as a child of the token of `by`. Only the hash of `proof` is kept."""
        with self._lock:
            self._load()
            if by is not None and not self.alive(by):
                raise BadToken("the token that this request was made with has ended")
            kept = self._new(token_id, proof, new, by)
            self._save([*(k for k, _ in self._kept.values()), kept])
        return kept.token

    def revoke(self, token_id: str) -> bool:
        """
        Revoke a token and its children: at once in this process, within half a second in others with this
        file.
        """
        with self._lock:
            self._load()
            if token_id not in self._kept:
                return False
            self._save(_without_orphans(k for k, _ in self._kept.values() if k.token.token_id != token_id))
        return True

    def _new(self, token_id: str, proof: str, new: NewToken, by: Principal | None = None) -> _StoredToken:
        ends = [end for end in (new.expires_at, None if by is None else by.expires_at) if end is not None]
        changed = {"scopes": sorted(set(new.scopes)), "expires_at": min(ends, default=None)}
        token = Token(
            **msgspec.structs.asdict(new) | changed,
            token_id=token_id,
            created_at=when(self._clock()),
            parent_id=None if by is None else by.token_id,
        )
        return _StoredToken(token, _digest(proof))

    def _make_first_token(self, secret_file: Path) -> None:
        token_id, secret = _new_secret()
        kept = self._new(token_id, secret, NewToken(name="made at first start", scopes=list(Scope)))
        # Write the secret first: the token file with its hash, but no secret, would lock all clients out.
        replace_file(secret_file, f"{secret}\n".encode())
        self._save([kept])

    def _save(self, kept: list[_StoredToken]) -> None:
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
            kept = msgspec.json.decode(self.path.read_bytes(), type=list[_StoredToken])
        except msgspec.DecodeError as error:
            raise Unsafe(
                f"{self.path} is damaged ({error}): fix it, or remove it for a new first token",
                path=str(self.path),
            ) from None
        living = _without_orphans(kept)
        tokens = {k.token.token_id: k.token for k in living}
        self._kept = {k.token.token_id: (k, _principal(k.token, tokens)) for k in living}
        self._stamp = stamp


def _new_token_id() -> str:
    return secrets.token_hex(5)


def _new_secret() -> tuple[str, str]:
    token_id = _new_token_id()
    return token_id, f"{_PREFIX}_{token_id}_{secrets.token_urlsafe(32)}"


def _without_orphans(kept: Iterable[_StoredToken]) -> list[_StoredToken]:
    """The tokens whose ancestors all exist."""
    remaining = list(kept)
    while True:
        ids = {k.token.token_id for k in remaining}
        living = [k for k in remaining if k.token.parent_id is None or k.token.parent_id in ids]
        if len(living) == len(remaining):
            return living
        remaining = living


def _principal(token: Token, tokens: dict[str, Token]) -> Principal:
    ends = [one.expires_at for one in _ancestors(token, tokens) if one.expires_at is not None]
    return Principal(
        token.token_id,
        frozenset(token.scopes),
        token.addon_id,
        token.max_cost_units,
        token.max_priority,
        token.token_id,
        min(ends, default=None),
    )


def _ancestors(token: Token, tokens: dict[str, Token]) -> Iterable[Token]:
    seen: dict[str, Token] = {}
    while token.token_id not in seen:
        seen[token.token_id] = token
        token = tokens.get(token.parent_id or "", token)
    return seen.values()


#: Seconds between two checks. Together with the half second for reading the file: less than a second.
_WATCH_EVERY: Final = 0.3


class TokenWatch:
    """
    Ends streams and long polls when their token ends.

    The application checks a token when a request comes in, but some requests last for hours. While there are
    such requests, this checks their tokens several times a second. It belongs to one event loop.
    """

    def __init__(self, tokens: TokenFile, loop: asyncio.AbstractEventLoop) -> None:
        self._tokens, self._loop = tokens, loop
        self._waiting: dict[object, tuple[Principal, Callable[[], object]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, principal: Principal, end: Callable[[], object]) -> Iterator[None]:
        """Call `end` once if the principal's token ends within this block."""
        if principal.token_id is None:
            yield
            return
        key = object()
        self._waiting[key] = (principal, end)
        self._check_later()
        try:
            yield
        finally:
            self._waiting.pop(key, None)

    def _check_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_WATCH_EVERY, self._check)

    def _check(self) -> None:
        self._timer = None
        for key, (principal, end) in list(self._waiting.items()):
            if not self._tokens.alive(principal):
                del self._waiting[key]
                end()
        if self._waiting:
            self._check_later()


#: The header with the second half of a session.
_SESSION_HEADER: Final = b"x-penstock-session"
SESSION_LASTS: Final = timedelta(hours=12)
_CODE_LASTS: Final = 10 * MINUTE
_MOST_CODES: Final = 100
#: The name of the tokens of sessions.
_SESSION: Final = "page"


class OpenedSession(NamedTuple):
    """A new session. `cookie` and `half` are its two halves; `principal` made the login link."""

    cookie: str
    half: str
    token_id: str
    principal: Principal


class Sessions:
    """
    Sessions of the page: the code of a login link works once and becomes a session of two halves.

    A session is a token that expires after twelve hours: it is listed, revoked and kept over a restart like
    any other, and it ends with the token that made its link. The browser must send two independent random
    halves: a cookie, which no script can read, and a header from the page's script. Browsers send a cookie to
    every port of a host, so another local server may learn it. The cookie alone is of no use: it says nothing
    about the other half, it is no bearer token, and the daemon keeps only one hash over both halves and the
    cookie's name.

    The cookie's name contains the port and a hash of the token file's path, because all schedulers of a host
    share the browser's cookies.
    """

    def __init__(self, tokens: TokenFile, *, secure: bool, url: str, port: int) -> None:
        self._tokens, self._secure, self._url = tokens, secure, url
        self._codes: dict[str, tuple[Moment, Principal]] = {}
        self._lock = Lock()
        lead = "__Host-penstock" if secure else "penstock"
        self.cookie = f"{lead}-{port}-{_digest(str(tokens.path.resolve()))[:10]}"

    def link(self, principal: Principal, now: Moment) -> Login:
        """A link that opens the page once, with the rights of `principal`."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            alive = {key: kept for key, kept in self._codes.items() if kept[0] > now}
            while len(alive) >= _MOST_CODES:
                del alive[next(iter(alive))]
            self._codes = {**alive, _digest(code): (now + _CODE_LASTS, principal)}
        return Login(f"{self._url}/#code={code}", when(now + _CODE_LASTS))

    def open(self, code: str, now: Moment) -> OpenedSession:
        """
        Turn the code of a login link into a session, and remove expired sessions. BadToken: the code is not
        valid.
        """
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
        return OpenedSession(cookie, half, token_id, principal)

    def set_cookie(self, value: str) -> str:
        secure = "; Secure" if self._secure else ""
        age = int(SESSION_LASTS.total_seconds())
        return f"{self.cookie}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"

    def principal(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """The principal of a request with both halves. None: the request has no cookie of this server."""
        cookie = self._value(headers.get(b"cookie", b"").decode("latin-1"))
        if cookie is None:
            return None
        half = headers.get(_SESSION_HEADER, b"").decode("latin-1")
        return self._tokens.verify(cookie.partition(".")[0], self._proof(cookie, half).encode())

    def _proof(self, cookie: str, half: str) -> str:
        """
        The text that is hashed for a session. It begins unlike any bearer token, so neither can replace the
        other.
        """
        return f"session {self.cookie} {cookie} {half}"

    def _value(self, cookies: str) -> str | None:
        for one in cookies.split(";"):
            name, _, value = one.strip().partition("=")
            if name == self.cookie and value:
                return value
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
