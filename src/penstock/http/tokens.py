"""
Who may do what: bearer tokens.

A token is 256 random bits, so its plain SHA-256 is all that is kept. They live in a file of their own beside the database, not in a table: then the
stores stay the same three, a backup of the jobs carries no secrets' hashes, and an operator who is locked out can mend a text file. It is replaced as a
whole, so a reader sees the old or the new; a change by anybody is noticed within half a second.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Final

import msgspec

from penstock.core.words import SECOND, Moment
from penstock.engine.private import Unsafe, private_directory, private_file, replace_file
from penstock.http.problems import BadToken
from penstock.http.wire import NewToken, Scope, Token

__all__ = ["FIRST_FILE", "LOCAL", "TOKENS_FILE", "Principal", "TokenFile", "read_secret"]

TOKENS_FILE: Final = "tokens.json"
#: The first token, in full, for the command line of whoever started the daemon.
FIRST_FILE: Final = "token"
_LOOK_EVERY: Final = 0.5
_LEAD: Final = "pst"


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever asks, once that is known."""

    name: str
    scopes: frozenset[Scope]
    addon_id: str | None = None
    max_cost_units: int | None = None
    max_priority: int | None = None


#: Came by the Unix socket, as the user that runs the daemon: it could read the token file anyway.
LOCAL: Final = Principal("local", frozenset(Scope))


class _Kept(msgspec.Struct, frozen=True):
    token: Token
    sha256: str


class TokenFile:
    """`clock`: for expiry; `first`: where the first token goes in full; `timer`: when to look at the file again."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], Moment],
        *,
        first: Path | None = None,
        timer: Callable[[], float] = monotonic,
    ) -> None:
        self._path = private_directory(directory) / TOKENS_FILE
        self._clock, self._timer, self._lock = clock, timer, Lock()
        self._kept: dict[str, tuple[_Kept, Principal]] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._look_at = 0.0
        if not self._path.exists():
            self._first(first or directory / FIRST_FILE)
        self._load()

    def principal(self, authorization: bytes) -> Principal:
        """Of a request with this header. BadToken says no more than that: why is nobody's business."""
        scheme, _, secret = authorization.partition(b" ")
        lead, _, rest = secret.strip().partition(b"_")
        token_id, _, _ = rest.partition(b"_")
        if scheme.lower() != b"bearer" or lead != _LEAD.encode():
            raise BadToken("a bearer token is needed")
        if self._timer() >= self._look_at:
            self._load()
        found = self._kept.get(token_id.decode("latin-1"))
        digest = hashlib.sha256(secret.strip()).hexdigest()
        # Compared even when there is nothing to compare with, so that an id that exists takes no longer than one that does not.
        same = hmac.compare_digest(digest, found[0].sha256 if found else "0" * 64)
        if found is None or not same or self._expired(found[0].token):
            raise BadToken("the token is not valid, or no longer")
        return found[1]

    def _expired(self, token: Token) -> bool:
        return token.expires_at is not None and token.expires_at.timestamp() * SECOND <= self._clock()

    def all(self) -> list[Token]:
        self._load()
        return [kept.token for kept, _ in self._kept.values()]

    def make(self, asked: NewToken) -> tuple[Token, str]:
        with self._lock:
            self._load()
            kept, secret = self._new(asked)
            self._save([*(k for k, _ in self._kept.values()), kept])
        return kept.token, secret

    def revoke(self, token_id: str) -> bool:
        """At once here; in another process that serves from this file, within half a second."""
        with self._lock:
            self._load()
            if token_id not in self._kept:
                return False
            self._save([k for k, _ in self._kept.values() if k.token.token_id != token_id])
        return True

    def _new(self, asked: NewToken) -> tuple[_Kept, str]:
        token_id = secrets.token_hex(5)
        secret = f"{_LEAD}_{token_id}_{secrets.token_urlsafe(32)}"
        token = Token(
            token_id=token_id,
            name=asked.name,
            scopes=sorted(set(asked.scopes)),
            addon_id=asked.addon_id,
            max_cost_units=asked.max_cost_units,
            max_priority=asked.max_priority,
            created_at=datetime.fromtimestamp(self._clock() / SECOND, UTC),
            expires_at=asked.expires_at,
        )
        return _Kept(token, hashlib.sha256(secret.encode()).hexdigest()), secret

    def _first(self, secret_file: Path) -> None:
        kept, secret = self._new(NewToken(name="made at first start", scopes=list(Scope)))
        # The secret first: without it a list that holds its hash would lock everybody out.
        replace_file(secret_file, f"{secret}\n".encode())
        self._save([kept])

    def _save(self, kept: list[_Kept]) -> None:
        replace_file(self._path, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
        self._load(anyway=True)

    def _load(self, *, anyway: bool = False) -> None:
        self._look_at = self._timer() + _LOOK_EVERY
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._kept, self._stamp = {}, None
            return
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp == self._stamp and not anyway:
            return
        private_file(self._path)
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=list[_Kept])
        except msgspec.DecodeError as error:
            raise Unsafe(
                f"{self._path} is damaged ({error}): mend it, or remove it to have a first token made anew",
                path=str(self._path),
            ) from None
        self._kept = {k.token.token_id: (k, _principal(k.token)) for k in kept}
        self._stamp = stamp


def _principal(token: Token) -> Principal:
    return Principal(
        token.token_id, frozenset(token.scopes), token.addon_id, token.max_cost_units, token.max_priority
    )


def read_secret(file: Path) -> str:
    """The token made at first start. Refused when others can read it, for then it is no secret."""
    return private_file(file).read_text("ascii").strip()
