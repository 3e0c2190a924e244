"""Who may do what, and how a refusal is told."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, field

from penstock.wire.common import AddonName, Units, When, WireAnswer, WireRequest

__all__ = ["FieldProblem", "NewToken", "ProblemDetails", "Scope", "Token", "TokenMade", "Tokens"]


class Scope(StrEnum):
    """What a token may do."""

    JOBS_READ = "jobs:read"
    JOBS_SUBMIT = "jobs:submit:registered"
    #: Besides: a job that is a command, or a shell script. Whoever may submit one has a shell on the host.
    JOBS_SUBMIT_COMMAND = "jobs:submit:command"
    JOBS_SUBMIT_SHELL = "jobs:submit:shell"
    JOBS_CANCEL = "jobs:cancel"
    WORKER_LEASE = "worker:lease"
    #: Of a run's own token, which the scheduler makes for it and which is good for that run alone.
    RUN_SELF = "run:self"
    SIGNALS_REPORT = "signals:report"
    METRICS_READ = "metrics:read"
    ADMIN_CONFIG = "admin:config"
    ADMIN_TOKENS = "admin:tokens"


class NewToken(WireRequest):
    """`addon_id` binds it: it then sees and touches that addon's jobs, and no others. It ends with the token that it is made with."""

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\u0000]*$")]
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=20)]
    addon_id: AddonName | None = None
    max_cost_units: Units | None = None
    max_priority: Annotated[int, Meta(ge=1, le=100)] | None = None
    expires_at: When | None = None


class Token(WireAnswer):
    """`parent_id`: the token that it was made with, and ends with. Null: it was made by the local user, or at the first start."""

    token_id: str
    name: str
    scopes: list[Scope]
    addon_id: str | None
    max_cost_units: int | None
    max_priority: int | None
    created_at: datetime
    expires_at: datetime | None
    parent_id: str | None = None


class TokenMade(WireAnswer):
    """`secret` is shown this once: only its hash is kept."""

    token: Token
    secret: str


class Tokens(WireAnswer):
    tokens: list[Token]


class FieldProblem(WireAnswer):
    field: str
    message: str


class ProblemDetails(WireAnswer):
    """application/problem+json. `hint` says what to do about it; `data` has what the error knows, by name."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    problems: list[FieldProblem] = field(default_factory=list)
    retry_after_sec: float | None = None
    data: dict[str, Any] = field(default_factory=dict)
