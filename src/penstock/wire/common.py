"""What every body is made of: bounded words and numbers, and the two kinds of bodies."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from penstock.core.jobs.intent import LABEL, LABEL_WORDS, MAX_SPAN_SEC
from penstock.core.jobs.load import TOLD
from penstock.core.jobs.states import JobState

__all__ = [
    "MAX_BULK",
    "MAX_NUMBER",
    "MAX_PAGE",
    "MAX_WAIT_SEC",
    "PREFIX",
    "_STATES",
    "AddonName",
    "Delay",
    "Description",
    "Duration",
    "Fraction",
    "Ident",
    "Key",
    "Label",
    "Line",
    "MoneyIn",
    "Nothing",
    "PageSize",
    "Pid",
    "PriorityWord",
    "Seconds",
    "SignalName",
    "Spent",
    "Tag",
    "TypeName",
    "Units",
    "Wait",
    "When",
    "WireAnswer",
    "WireRequest",
    "Words",
]

PREFIX: Final = "/api/system/scheduler"
MAX_PAGE: Final = 500
MAX_BULK: Final = 1_000
MAX_WAIT_SEC: Final = 60

# In Python a `$` also matches before a last line feed, hence what stands behind it.
_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$(?!\n)"

# Bounds stand here as well as in the core: here they are what the API's description promises, there they are the rule.
AddonName: TypeAlias = Annotated[str, Meta(pattern=_NAME, max_length=128, description="The tenant.")]
TypeName: TypeAlias = Annotated[str, Meta(pattern=_NAME, max_length=128)]
Units: TypeAlias = Annotated[int, Meta(ge=1, le=100, description="Of the 100 that the whole machine is.")]
PriorityWord: TypeAlias = (
    Annotated[int, Meta(ge=1, le=100)]
    | Annotated[
        str,
        Meta(
            pattern=r"^([Ll][Oo][Ww]|[Nn][Oo][Rr][Mm][Aa][Ll]|[Hh][Ii][Gg][Hh]|[Uu][Rr][Gg][Ee][Nn][Tt])$",
            description="LOW 25, NORMAL 50, HIGH 75, URGENT 95.",
        ),
    ]
)
Seconds: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SPAN_SEC)]
Duration: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_SPAN_SEC)]
Delay: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SPAN_SEC)]
Wait: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_WAIT_SEC)]
When: TypeAlias = Annotated[datetime, Meta(tz=True)]
MoneyIn: TypeAlias = Annotated[float, Meta(gt=0, le=1e9, description="In the job's unit.")]
Spent: TypeAlias = Annotated[float, Meta(ge=0, le=1e9, description="In the job's unit.")]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
# No NUL: not every database can keep one in a text.
Line: TypeAlias = Annotated[str, Meta(max_length=200, pattern=r"^[^\u0000]*$")]
Words: TypeAlias = Annotated[str, Meta(max_length=20_000, pattern=r"^[^\u0000]*$")]
Label: TypeAlias = Annotated[str, Meta(pattern=f"^{LABEL.pattern}$(?!\\n)", description=LABEL_WORDS)]
Tag: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\u0000]*$")]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\u0000]*$")]
SignalName: TypeAlias = Annotated[str, Meta(pattern="^({})$(?!\\n)".format("|".join(TOLD)))]
Pid: TypeAlias = Annotated[
    int, Meta(ge=1, le=2**31 - 1, description="Of the process that runs the job, on its own machine.")
]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
MAX_NUMBER: Final = 2**62
_STATES: Final = "^({0})(,({0}))*$(?!\\n)".format("|".join(JobState))
Ident: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[0-9A-Za-z._-]+$(?!\n)")]


class WireRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a request."""


class WireAnswer(Struct):
    """The body of an answer."""


class Nothing(WireRequest):
    """Nothing is to be said."""


class Description(WireAnswer):
    """The API in OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
