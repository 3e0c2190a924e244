"""Handlers for tokens. A token cannot make one with more rights than its own."""

from __future__ import annotations

from typing import Any

from penstock import wire
from penstock.core.errors import NotFound
from penstock.core.jobs.job import EventKind
from penstock.server.app_state import Request
from penstock.server.problems import OverLimit


def login(call: Request[None, None]) -> wire.Login:
    """A link that opens the page once, with the rights of the token that asks for it."""
    link = call.app_state.login(call.principal)
    call.app_state.record(EventKind.LOGIN, "link_made", call.principal, {})
    return link


def token_list(call: Request[None, None]) -> wire.Tokens:
    return wire.Tokens([token for token in call.app_state.tokens.all() if _visible(call, token)])


def _visible(call: Request[Any, Any], token: wire.Token) -> bool:
    return call.principal.addon_id in (None, token.addon_id)


def token_make(call: Request[None, wire.NewToken]) -> wire.TokenMade:
    body, own = call.body, call.principal
    problems = []
    more = sorted(set(body.scopes) - own.scopes)
    if more:
        problems.append(
            {"field": "scopes", "message": f"{', '.join(more)}: your own token does not have that"}
        )
    if own.addon_id is not None and body.addon_id != own.addon_id:
        problems.append({"field": "addon_id", "message": f"must be {own.addon_id}, as your own token's"})
    for name in ("max_cost_units", "max_priority"):
        given, most = getattr(body, name), getattr(own, name)
        if most is not None and (given is None or given > most):
            problems.append({"field": name, "message": f"must be at most {most}, as your own token's"})
    if own.expires_at is not None and body.expires_at is not None and body.expires_at > own.expires_at:
        problems.append(
            {"field": "expires_at", "message": f"must be at most {own.expires_at}, as your own token's"}
        )
    if problems:
        raise OverLimit(f"{problems[0]['field']} {problems[0]['message']}", problems=problems)
    token, secret = call.app_state.tokens.make(body, own)
    try:
        call.app_state.record(EventKind.TOKEN_MADE, "", own, _facts(token))
    except (
        BaseException
    ):  # a token must be in the trail: without its event it is revoked before the client gets its secret
        call.app_state.tokens.revoke(token.token_id)
        raise
    return wire.TokenMade(token, secret)


def _facts(token: wire.Token) -> dict[str, Any]:
    expires_at = None if token.expires_at is None else token.expires_at.isoformat()
    return {
        "token_id": token.token_id,
        "name": token.name,
        "scopes": [str(scope) for scope in token.scopes],
        "bound_to": token.addon_id,
        "expires_at": expires_at,
        "parent_id": token.parent_id,
    }


def token_revoke(call: Request[None, None]) -> wire.Ok:
    tokens = call.app_state.tokens
    visible = {token.token_id: token for token in tokens.all() if _visible(call, token)}
    if call.path not in visible or not tokens.revoke(call.path):
        raise NotFound(f"there is no token {call.path}", token_id=call.path)
    facts = _facts(visible[call.path])
    call.app_state.record(
        EventKind.TOKEN_REVOKED,
        "",
        call.principal,
        {name: facts[name] for name in ("token_id", "name", "bound_to")},
    )
    return wire.Ok()
