"""The file of tokens: private, whole, and believed for half a second at most."""

from __future__ import annotations

import hashlib
import json
import os
import stat

import pytest
from http_kit import ServerKit, read_secret

from penstock.core.jobs.types import SECOND, when
from penstock.scheduler.permissions import Unsafe, private_directory, secret_key
from penstock.server.problems import BadToken
from penstock.server.tokens import FIRST_FILE, TOKENS_FILE, TokenFile
from penstock.wire import NewToken, Scope

NOW = 1_900_000_000 * SECOND


class Time:
    def __init__(self):
        self.moment, self.ticks = NOW, 0.0

    def clock(self):
        return self.moment

    def timer(self):
        return self.ticks


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def tokens(directory, time):
    return TokenFile(directory, time.clock, timer=time.timer)


def bearer(secret):
    return f"Bearer {secret}".encode()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_start_makes_a_token_that_only_its_owner_can_read(directory, tokens):
    secret = read_secret(directory / FIRST_FILE)

    assert mode(directory / FIRST_FILE) == mode(directory / TOKENS_FILE) == 0o600
    assert len(secret.split("_", 2)[2]) >= 42
    assert tokens.principal(bearer(secret)).scopes == frozenset(Scope)


def test_a_directory_is_made_private_and_one_that_is_not_is_refused(tmp_path, time):
    TokenFile(tmp_path / "new" / "deep", time.clock)
    assert mode(tmp_path / "new" / "deep") == 0o700

    for bits in (0o710, 0o701, 0o750, 0o777):
        shared = tmp_path / f"shared{bits}"
        shared.mkdir()
        shared.chmod(bits)
        with pytest.raises(Unsafe, match="chmod 700"):
            private_directory(shared)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(directory, tokens, time, bits):
    (directory / TOKENS_FILE).chmod(bits)
    with pytest.raises(Unsafe, match="chmod 600"):
        TokenFile(directory, time.clock)


def test_only_a_hash_is_kept(directory, tokens):
    _, secret = tokens.make(NewToken(name="n", scopes=[Scope.JOBS_READ]))

    kept = (directory / TOKENS_FILE).read_text()
    assert secret not in kept
    assert secret.split("_", 2)[2] not in kept
    assert hashlib.sha256(secret.encode()).hexdigest() in kept


def test_a_token_survives_a_restart_and_the_first_is_made_once(directory, tokens, time):
    _, secret = tokens.make(NewToken(name="n", scopes=[Scope.JOBS_READ], addon_id="a"))
    first = read_secret(directory / FIRST_FILE)

    again = TokenFile(directory, time.clock)
    assert again.principal(bearer(secret)).addon_id == "a"
    assert read_secret(directory / FIRST_FILE) == first
    assert len(again.all()) == 2


def test_a_token_expires_by_the_clock(tokens, time):
    asked = NewToken(name="n", scopes=[Scope.JOBS_READ], expires_at=when(NOW + 60 * SECOND))
    _, secret = tokens.make(asked)

    time.moment += 59 * SECOND
    tokens.principal(bearer(secret))
    time.moment += 1 * SECOND
    with pytest.raises(BadToken):
        tokens.principal(bearer(secret))


def test_a_revoked_token_is_refused_at_once(tokens):
    token, secret = tokens.make(NewToken(name="n", scopes=[Scope.JOBS_READ]))
    tokens.principal(bearer(secret))

    assert tokens.revoke(token.token_id) is True
    with pytest.raises(BadToken):
        tokens.principal(bearer(secret))
    assert tokens.revoke(token.token_id) is False


def test_a_token_revoked_elsewhere_is_refused_within_a_second(directory, tokens, time):
    token, secret = tokens.make(NewToken(name="n", scopes=[Scope.JOBS_READ]))
    tokens.principal(bearer(secret))
    TokenFile(directory, time.clock).revoke(token.token_id)

    time.ticks += 1.0
    with pytest.raises(BadToken):
        tokens.principal(bearer(secret))


def child_of(tokens, secret=None, **fields):
    by = None if secret is None else tokens.principal(bearer(secret))
    return tokens.make(NewToken(**{"name": "n", "scopes": list(Scope)} | fields), by)


def test_a_child_expires_no_later_than_its_parent(tokens, time):
    _, parent = child_of(tokens, expires_at=when(NOW + 4 * SECOND))
    token, child = child_of(tokens, parent)
    grandchild = child_of(tokens, child)[1]

    assert token.expires_at == when(NOW + 4 * SECOND)
    time.moment += 4 * SECOND
    for secret in (child, grandchild):
        with pytest.raises(BadToken):
            tokens.principal(bearer(secret))


def test_children_end_with_their_parent(directory, tokens, time):
    token, parent = child_of(tokens)
    child = child_of(tokens, parent)[1]
    grandchild = child_of(tokens, child)[1]
    beside = child_of(tokens)[1]
    elsewhere = TokenFile(directory, time.clock, timer=time.timer)
    known = elsewhere.principal(bearer(grandchild))
    tokens.revoke(token.token_id)
    time.ticks += 1.0

    for served in (tokens, elsewhere, TokenFile(directory, time.clock)):
        assert not served.alive(known)
        assert served.principal(bearer(beside)).token_id is not None
        for secret in (parent, child, grandchild):
            with pytest.raises(BadToken):
                served.principal(bearer(secret))


def test_a_parent_that_is_taken_out_of_the_file_takes_its_children_with_it(directory, tokens, time):
    token, parent = child_of(tokens)
    child = child_of(tokens, parent)[1]
    kept = json.loads((directory / TOKENS_FILE).read_text())
    left = [entry for entry in kept if entry["token"]["token_id"] != token.token_id]
    (directory / TOKENS_FILE).write_text(json.dumps(left))
    time.ticks += 1.0

    with pytest.raises(BadToken):
        tokens.principal(bearer(child))


def test_a_token_that_has_ended_makes_no_child(tokens):
    token, secret = child_of(tokens)
    by = tokens.principal(bearer(secret))
    tokens.revoke(token.token_id)

    with pytest.raises(BadToken):
        tokens.make(NewToken(name="n", scopes=[Scope.JOBS_READ]), by)


def test_a_damaged_file_lets_nobody_in_and_says_what_to_do(directory, tokens, time):
    (directory / TOKENS_FILE).write_text("{")

    with pytest.raises(Unsafe, match="fix it, or remove it"):
        TokenFile(directory, time.clock)


def test_a_file_that_was_removed_lets_nobody_in(directory, tokens, time):
    secret = read_secret(directory / FIRST_FILE)
    (directory / TOKENS_FILE).unlink()

    time.ticks += 1.0
    with pytest.raises(BadToken):
        tokens.principal(bearer(secret))


def test_a_failed_replacement_leaves_the_old_file_whole(directory, tokens, monkeypatch):
    before = (directory / TOKENS_FILE).read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    with pytest.raises(OSError, match="No space"):
        tokens.make(NewToken(name="n", scopes=[Scope.JOBS_READ]))
    assert (directory / TOKENS_FILE).read_bytes() == before
    assert sorted(path.name for path in directory.iterdir()) == [FIRST_FILE, TOKENS_FILE]


def test_a_key_that_others_can_read_is_refused(tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    key.touch(), cert.touch()
    for bits in (0o644, 0o604, 0o660):
        key.chmod(bits)
        with pytest.raises(Unsafe, match="chmod 600"):
            ServerKit(tmp_path / "home", start=False, tls_cert=cert, tls_key=key)
    key.chmod(0o640)

    assert secret_key(key) == key
