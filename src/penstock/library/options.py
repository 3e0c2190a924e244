"""
What `@scheduler.job(...)` and `.options(...)` take, in a program's own types, and the intent made of it.

Shape and type are checked where the option is given, so the traceback points there; bounds are the intent's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final, Literal, Self, TypeAlias, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import (
    SECOND,
    AddonId,
    Constraint,
    Moment,
    Money,
    RunWhen,
    money_of,
    priority_of,
)

__all__ = ["JobOptions", "Options", "Seconds", "When", "moment", "money", "span_sec", "words"]

Seconds: TypeAlias = "int | float | timedelta"
#: A moment with its time zone, or how far from now.
When: TypeAlias = "datetime | timedelta | int | float"
RunWhenWord: TypeAlias = Literal["any", "normal", "quiet"]


class Options(TypedDict, total=False):
    """Every option by name, for type checkers; `JobOptions.take` is what checks them."""

    addon: str
    cost: int
    priority: int | str
    run_when: RunWhenWord
    quiet_for: Seconds
    constraints: Iterable[str]
    max_runtime: Seconds | None
    max_active: Seconds | None
    expected_duration: Seconds | None
    retries: Sequence[Seconds]
    unique: bool | Callable[..., str]
    unique_key: str | None
    tags: Iterable[str]
    labels: Iterable[str]
    deadline: When | None
    time_sensitive: bool
    not_before: When | None
    cost_limit: float | str | Decimal | None
    unit: str
    wait_for_space: Seconds


_KNOWN: Final = tuple(Options.__annotations__)


class JobOptions(Struct, frozen=True):
    """`like`: an intent with all that does not depend on the call."""

    like: Intent
    unique: bool | Callable[..., str] = False
    deadline: When | None = None
    not_before: When | None = None
    wait_for_space: float = 0.0

    def take(self, given: dict[str, Any]) -> Self:
        fields: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, value in given.items():
            if name not in _KNOWN:
                raise TypeError(f"{name!r} is not an option of a job; there are {', '.join(_KNOWN)}")
            if name in ("deadline", "not_before"):
                if value is not None:
                    moment(name, value, 0)
                own[name] = value
            elif name == "wait_for_space":
                own[name] = span_sec(name, value)
            elif name == "unique":
                if not isinstance(value, bool) and not callable(value):
                    raise TypeError(
                        f"unique is {value!r}; it must be True (the same arguments are the same job), or a function of the "
                        "arguments that gives the key; for one fixed key there is options(unique_key=...)"
                    )
                own[name] = value
            else:
                field, check = _FIELDS[name]
                fields[field] = check(name, value)
        return replace(self, like=replace(self.like, **fields), **own)

    def intents(self) -> Callable[[str], Intent] | None:
        """Of the payload alone, where nothing else depends on the call or the moment."""
        if self.unique or self.deadline is not None or self.not_before is not None:
            return None
        return lambda payload: replace(self.like, payload=payload)

    def intent(self, payload: str, now: Moment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Intent:
        like = self.like
        key = like.idempotency_key
        if key is None and self.unique:
            key = self._key(payload, args, kwargs)
        return replace(
            like,
            payload=payload,
            idempotency_key=key,
            deadline_at=None if self.deadline is None else moment("deadline", self.deadline, now),
            earliest_start_at=None if self.not_before is None else moment("not_before", self.not_before, now),
        )

    def _key(self, payload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """With the job's name in it: two functions may be unique by the same word."""
        if callable(self.unique):
            word = self.unique(*args, **kwargs)
            if not isinstance(word, str) or not word:
                raise TypeError(f"unique gave {word!r}; it must give the key, a string")
            return f"{self.like.job_type}:{word}"
        return f"{self.like.job_type}#{blake2b(payload.encode(), digest_size=16).hexdigest()}"


def moment(name: str, value: Any, now: Moment) -> Moment:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(
                f"{name} is {value!r}, which has no time zone; say which: .replace(tzinfo=UTC), or .astimezone()"
            )
        return int(value.timestamp() * SECOND)
    return now + round(
        span_sec(name, value, "a datetime with a time zone, or a timedelta or seconds from now") * SECOND
    )


def span_sec(name: str, value: Any, want: str = "a number of seconds or a timedelta, 0 or more") -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be {want}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be {want}")
    return float(value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string")
    return value


def _addon(name: str, value: Any) -> AddonId:
    return AddonId(_text(name, value))


def _priority(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} is {value!r}; it must be 1..100, or LOW, NORMAL, HIGH, URGENT")
    return priority_of(value)


def _run_when(name: str, value: Any) -> RunWhen:
    if value not in list(RunWhen):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, map(str, RunWhen)))}")
    return RunWhen(value)


def _constraints(name: str, value: Any) -> Constraint:
    found = Constraint.NONE
    for word in words(name, value):
        try:
            found |= Constraint[word.upper()]
        except KeyError:
            raise ValueError(f"{name} has {word!r}; there are {', '.join(Constraint(7).names)}") from None
    return found


def words(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a list of strings: [{value!r}]")
    try:
        found = tuple(value)
    except TypeError:
        found = (None,)
    if not all(isinstance(word, str) for word in found):
        raise TypeError(f"{name} is {value!r}; it must be a list of strings")
    return found


def _limit_sec(name: str, value: Any) -> int | None:
    """Rounded up: a limit of half a second is one of a second, and never none."""
    return None if value is None else math.ceil(span_sec(name, value))


def _expected(name: str, value: Any) -> float | None:
    return None if value is None else span_sec(name, value)


def _delays(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | int | float | timedelta) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}; it must be the delays before each retry, e.g. (60, 300)")
    return tuple(math.ceil(span_sec(name, delay)) for delay in value)


def _key(name: str, value: Any) -> str | None:
    return None if value is None else _text(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return value


def money(name: str, value: Any) -> Money:
    """In millionths, so that sums stay exact."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise TypeError(f"{name} is {value!r}; it must be a sum of money")
    try:
        return money_of(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}; it must be a sum of money") from None


def _limit(name: str, value: Any) -> Money | None:
    return None if value is None else money(name, value)


_FIELDS: Final[dict[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "addon": ("addon_id", _addon),
    "cost": ("cost_units", _whole),
    "priority": ("priority", _priority),
    "run_when": ("run_when", _run_when),
    "quiet_for": ("quiet_for_sec", _limit_sec),
    "constraints": ("constraints", _constraints),
    "max_runtime": ("max_runtime_sec", _limit_sec),
    "max_active": ("max_active_sec", _limit_sec),
    "expected_duration": ("expected_duration_sec", _expected),
    "retries": ("retry_delays_sec", _delays),
    "unique_key": ("idempotency_key", _key),
    "tags": ("tags", words),
    "labels": ("labels", words),
    "time_sensitive": ("time_sensitive", _flag),
    "cost_limit": ("cost_limit", _limit),
    "unit": ("unit", _text),
}
