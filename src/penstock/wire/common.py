"""
Types that several modules share: bounded texts and numbers, the bases of requests and answers, tokens with
their scopes, and the body of a refusal.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct, field

from penstock.core.jobs.intent import LABEL, LABEL_WORDS, MAX_SPAN_SEC
from penstock.core.jobs.load import REPORTED
from penstock.core.jobs.states import JobState

PREFIX: Final = "/api/system/scheduler"
MAX_PAGE: Final = 500
MAX_BULK: Final = 1_000
MAX_WAIT_SEC: Final = 60

#: The patterns below, in words: a refusal must not show a regular expression.
PATTERN_WORDS: Final[dict[str, str]] = {}


def matching(pattern: str, words: str, **more: Any) -> Meta:
    """The pattern of a text. `words`: what a refusal says after the name of the field."""
    PATTERN_WORDS[pattern] = words
    return Meta(pattern=pattern, **more)


# In Python a `$` also matches before a last line feed, so `(?!\n)` must follow it.
_NAME: Final = matching(
    r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,127}$(?!\n)",
    "must be 1..128 characters of A-Z a-z 0-9 _ . : / @ - and begin with a letter or digit",
)
_NO_NUL: Final = r"^[^\u0000]*$"
PATTERN_WORDS[_NO_NUL] = "must not contain NUL"

# The bounds are also in the core, which enforces them; here they are part of the API's description.
AddonName: TypeAlias = Annotated[str, _NAME, Meta(description="The tenant.")]
TypeName: TypeAlias = Annotated[str, _NAME]
Units: TypeAlias = Annotated[int, Meta(ge=1, le=100, description="Units of the 100 of the whole machine.")]
PriorityWord: TypeAlias = (
    Annotated[int, Meta(ge=1, le=100)]
    | Annotated[
        str,
        matching(
            r"^([Ll][Oo][Ww]|[Nn][Oo][Rr][Mm][Aa][Ll]|[Hh][Ii][Gg][Hh]|[Uu][Rr][Gg][Ee][Nn][Tt])$",
            "must be 1..100, or LOW, NORMAL, HIGH, URGENT",
            description="LOW 25, NORMAL 50, HIGH 75, URGENT 95.",
        ),
    ]
)
Seconds: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SPAN_SEC)]
Duration: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_SPAN_SEC)]
Delay: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SPAN_SEC)]
Wait: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_WAIT_SEC)]
When: TypeAlias = Annotated[datetime, Meta(tz=True)]
MoneyIn: TypeAlias = Annotated[float, Meta(gt=0, le=1e9, description="An amount in the job's unit.")]
Spent: TypeAlias = Annotated[float, Meta(ge=0, le=1e9, description="An amount in the job's unit.")]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
# No NUL: not every database can store one in a text.
Line: TypeAlias = Annotated[str, Meta(max_length=200, pattern=_NO_NUL)]
Words: TypeAlias = Annotated[str, Meta(max_length=20_000, pattern=_NO_NUL)]
Label: TypeAlias = Annotated[
    str, matching(f"^{LABEL.pattern}$(?!\\n)", f"must be {LABEL_WORDS}", description=LABEL_WORDS)
]
Tag: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64, pattern=_NO_NUL)]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200, pattern=_NO_NUL)]
SignalName: TypeAlias = Annotated[
    str, matching("^({})$(?!\\n)".format("|".join(REPORTED)), f"must be one of {', '.join(REPORTED)}")
]
Pid: TypeAlias = Annotated[
    int, Meta(ge=1, le=2**31 - 1, description="The process that runs the job, on the machine of its worker.")
]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
MAX_NUMBER: Final = 2**62
_STATES: Final = matching(
    "^({0})(,({0}))*$(?!\\n)".format("|".join(JobState)),
    f"must be states with commas between them, of {', '.join(JobState)}",
    max_length=100,
)
Ident: TypeAlias = Annotated[
    str,
    matching(r"^[0-9A-Za-z._-]+$(?!\n)", "must be an id: 0-9 A-Z a-z . _ -", min_length=1, max_length=100),
]


class WireRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a request."""


class WireAnswer(Struct):
    """The body of an answer."""


class Nothing(WireRequest):
    """A body without fields."""


class Description(WireAnswer):
    """The API in OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class Scope(StrEnum):
    """What a token may do."""

    JOBS_READ = "jobs:read"
    JOBS_SUBMIT = "jobs:submit:registered"
    #: Also commands, or shell scripts. A client with this scope has a shell on the host.
    JOBS_SUBMIT_COMMAND = "jobs:submit:command"
    JOBS_SUBMIT_SHELL = "jobs:submit:shell"
    JOBS_CANCEL = "jobs:cancel"
    WORKER_LEASE = "worker:lease"
    #: The scope of a running job's own token, which is valid for that attempt only.
    RUN_SELF = "run:self"
    SIGNALS_REPORT = "signals:report"
    METRICS_READ = "metrics:read"
    ADMIN_CONFIG = "admin:config"
    ADMIN_TOKENS = "admin:tokens"


class NewToken(WireRequest):
    """
    A token to make. `addon_id` binds it: it then sees and changes only that addon's jobs. It ends with the
    token that made it.
    """

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=_NO_NUL)]
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=20)]
    addon_id: AddonName | None = None
    max_cost_units: Units | None = None
    max_priority: Annotated[int, Meta(ge=1, le=100)] | None = None
    expires_at: When | None = None


class Token(WireAnswer):
    """
    A token without its secret. `parent_id`: the token that made it, and with which it ends. Null: the local
    user made it, or the first start.
    """

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
    """A new token. Only this answer has `secret`: the scheduler keeps its hash."""

    token: Token
    secret: str


class Tokens(WireAnswer):
    tokens: list[Token]


class FieldProblem(WireAnswer):
    field: str
    message: str


class ProblemDetails(WireAnswer):
    """A refusal (application/problem+json). `hint`: what to do. `data`: further facts, by name."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    problems: list[FieldProblem] = field(default_factory=list)
    retry_after_sec: float | None = None
    data: dict[str, Any] = field(default_factory=dict)
