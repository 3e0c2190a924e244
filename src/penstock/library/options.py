"""
The options of a job function, the settings of a `Scheduler`, and the location of its jobs.

`JobOptions` has what `@scheduler.job(...)` and `.options(...)` take, in a program's own types, and makes
intents. Shape and type are checked where the option is given, so the traceback points there; the intent
checks bounds. The keywords of `Scheduler` become `SchedulerRules`; a program that needs more of them passes
`rules`. The location is a file, a PostgreSQL database that several programs share, or memory.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.dependencies import Dependency, IfUnmet, ParentCondition
from penstock.core.jobs.groups import batch_id, is_batch_id
from penstock.core.jobs.intent import LABEL, LABEL_WORDS, Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.types import (
    SECOND,
    Constraint,
    HostId,
    JobId,
    Moment,
    Money,
    RunWhen,
    Span,
    money_of,
    priority_of,
)
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import LOCAL, SchedulerRules
from penstock.stores.api import Depth, Store
from penstock.stores.opening import is_address, open_store

Seconds: TypeAlias = "int | float | timedelta"
#: A moment with a time zone, or a span from now.
When: TypeAlias = "datetime | timedelta | int | float"
RunWhenWord: TypeAlias = Literal["any", "normal", "quiet"]
#: A job or its id. It must become DONE; with "done" it must end, with "failed" it must become FAILED.
Parent: TypeAlias = "str | HasId | tuple[str | HasId, Literal['ok', 'done', 'failed']]"
IfUnmetWord: TypeAlias = Literal["cancel", "fail", "wait", "any"]


class HasId(Protocol):
    """A handle of a job, an array or a batch."""

    @property
    def id(self) -> str: ...


class HasName(Protocol):
    """A batch."""

    @property
    def name(self) -> str: ...


class Options(TypedDict, total=False):
    """The options of a job by name, for type checkers. `JobOptions.take` checks them."""

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
    preemptible: bool
    not_before: When | None
    cost_limit: float | str | Decimal | None
    unit: str
    batch: str | HasName | None
    after: Iterable[Parent]
    if_unmet: IfUnmetWord
    wait_for_space: Seconds


_KNOWN: Final = tuple(Options.__annotations__)


class JobOptions(Struct, frozen=True):
    """The options of a job function. `template`: an intent with all fields that do not depend on the call."""

    template: Intent
    unique: bool | Callable[..., str] = False
    deadline: When | None = None
    not_before: When | None = None
    wait_for_space: float = 0.0

    def take(self, given: dict[str, Any]) -> Self:
        """These options with the given ones in place. TypeError, ValueError: an option is wrong."""
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
            elif name == "batch":
                pass  # a tag, see below
            else:
                field, check = _FIELDS[name]
                fields[field] = check(name, value)
        template = replace(self.template, **fields)
        if "batch" in given:
            template = replace(template, tags=_in_batch(template.tags, given["batch"]))
        return replace(self, template=template, **own)

    def intents(self) -> Callable[[str], Intent] | None:
        """Makes an intent of the payload. None: the intent depends on more of the call, or on the moment."""
        if self.unique or self.deadline is not None or self.not_before is not None:
            return None
        return lambda payload: replace(self.template, payload=payload)

    def intent(self, payload: str, now: Moment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Intent:
        """The intent of one call."""
        template = self.template
        key = template.idempotency_key
        if key is None and self.unique:
            key = self._key(payload, args, kwargs)
        return replace(
            template,
            payload=payload,
            idempotency_key=key,
            deadline_at=None if self.deadline is None else moment("deadline", self.deadline, now),
            earliest_start_at=None if self.not_before is None else moment("not_before", self.not_before, now),
        )

    def _key(self, payload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """
        The idempotency key of a call. It contains the job's name: two functions may be unique by the same
        word.
        """
        if callable(self.unique):
            word = self.unique(*args, **kwargs)
            if not isinstance(word, str) or not word:
                raise TypeError(f"unique gave {word!r}; it must give the key, a string")
            return f"{self.template.job_type}:{word}"
        return f"{self.template.job_type}#{blake2b(payload.encode(), digest_size=16).hexdigest()}"


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


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string")
    return value


def _priority(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} is {value!r}; it must be 1..100, or LOW, NORMAL, HIGH, URGENT")
    return priority_of(value)


def _run_when(name: str, value: Any) -> RunWhen:
    if value not in list(RunWhen):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, map(str, RunWhen)))}")
    return RunWhen(value)


def _constraints(name: str, value: Any) -> Constraint:
    constraints = Constraint.NONE
    for word in words(name, value):
        try:
            constraints |= Constraint[word.upper()]
        except KeyError:
            raise ValueError(f"{name} has {word!r}; there are {', '.join(Constraint(7).names)}") from None
    return constraints


def words(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a list of strings: [{value!r}]")
    try:
        words = tuple(value)
    except TypeError:
        words = (None,)
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"{name} is {value!r}; it must be a list of strings")
    return words


def _whole_sec(name: str, value: Any) -> int:
    """The seconds, rounded up: a limit of half a second becomes one second, and not 0."""
    return math.ceil(span_sec(name, value))


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _delays(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | int | float | timedelta) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}; it must be the delays before each retry, e.g. (60, 300)")
    return tuple(_whole_sec(name, delay) for delay in value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return value


def dependencies(name: str, value: Any) -> tuple[Dependency, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}; it must be a list of jobs: [{value!r}]")
    return tuple(_dependency(name, parent) for parent in value)


def _dependency(name: str, value: Any) -> Dependency:
    job, condition = value if isinstance(value, tuple) and len(value) == 2 else (value, "ok")
    job_id = getattr(job, "id", job)
    if not isinstance(job_id, str) or condition not in list(ParentCondition):
        raise TypeError(
            f"{name} has {value!r}; it must be a job, the id of one, or a tuple of it and "
            f"{', '.join(map(repr, map(str, ParentCondition)))}"
        )
    return Dependency(JobId(job_id), ParentCondition(condition))


def _in_batch(tags: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """The tags of a job that is put into the batch `value`; None: into no batch."""
    others = tuple(tag for tag in tags if not is_batch_id(tag))
    if value is None:
        return others
    return (*others, batch_id(getattr(value, "name", value)))


def _if_unmet(name: str, value: Any) -> IfUnmet:
    if value not in list(IfUnmet):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, map(str, IfUnmet)))}")
    return IfUnmet(value)


def money(name: str, value: Any) -> Money:
    """The amount in millionths, so that sums stay exact."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise TypeError(f"{name} is {value!r}; it must be a sum of money")
    try:
        return money_of(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}; it must be a sum of money") from None


_FIELDS: Final[dict[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "addon": ("addon_id", _text),
    "cost": ("cost_units", whole),
    "priority": ("priority", _priority),
    "run_when": ("run_when", _run_when),
    "quiet_for": ("quiet_for_sec", _optional(_whole_sec)),
    "constraints": ("constraints", _constraints),
    "max_runtime": ("max_runtime_sec", _optional(_whole_sec)),
    "max_active": ("max_active_sec", _optional(_whole_sec)),
    "expected_duration": ("expected_duration_sec", _optional(span_sec)),
    "retries": ("retry_delays_sec", _delays),
    "unique_key": ("idempotency_key", _optional(_text)),
    "tags": ("tags", words),
    "labels": ("labels", words),
    "time_sensitive": ("time_sensitive", _flag),
    "preemptible": ("preemptible", _flag),
    "cost_limit": ("cost_limit", _optional(money)),
    "unit": ("unit", _text),
    "after": ("after", dependencies),
    "if_unmet": ("if_unmet", _if_unmet),
}


class LibrarySettings(TypedDict, total=False):
    """The settings of a `Scheduler` by name, for type checkers. `make_rules` checks them."""

    capacity: int | Literal["auto"]
    labels: Sequence[str]
    lease: Seconds
    crash_retries: Sequence[Seconds]
    unavailable_retries: Sequence[Seconds]
    max_queued: int | None
    max_concurrent: int | None
    max_per_job: int | Mapping[str, int] | None
    max_per_constraint: Mapping[str, int]
    keep_settled: Seconds


#: Without a depth limit: a program that runs its own jobs may queue any number, unless it sets `max_queued`.
DEFAULT: Final = SchedulerRules(capacity=Capacity(fixed=100), depth=Depth())


def make_rules(rules: SchedulerRules | None, given: Mapping[str, Any]) -> SchedulerRules:
    if rules is not None:
        if not isinstance(rules, SchedulerRules):
            raise TypeError(f"rules is {rules!r}; it must be a penstock.scheduler.rules.SchedulerRules")
        if given:
            raise TypeError(f"{', '.join(given)} and rules say the same thing twice; put it into rules")
        return rules
    made = DEFAULT
    for name, value in given.items():
        if name not in _SETTERS:
            raise TypeError(
                f"{name!r} is not a setting of a Scheduler; there are {', '.join(_SETTERS)}, workers, kind, addon, stop_timeout, rules"
            )
        made = _SETTERS[name](made, name, value)
    return made


def _capacity(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    if value == "auto":
        return replace(rules, capacity=Capacity())
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100:
        raise ValueError(f"{name} is {value!r}; it must be 1..100 units, or 'auto'")
    return replace(rules, capacity=Capacity(fixed=value))


def _labels(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    labels = words(name, value)
    if not all(map(LABEL.fullmatch, labels)):
        raise ValueError(f"{name} is {value!r}; it must be a list of labels, each {LABEL_WORDS}")
    return replace(rules, labels=labels)


def _lease(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    span = _span(name, value)
    if span < SECOND // 10:
        raise ValueError(f"{name} is {value!r}; it must be at least 0.1 s, or no heartbeat could keep it")
    return replace(rules, lease_for=span)


def _crash(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    return replace(rules, schedules=replace(rules.schedules, crash=_spans(name, value)))


def _unavailable(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    return replace(rules, schedules=replace(rules.schedules, unavailable=_spans(name, value)))


def _max_queued(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    return replace(rules, depth=Depth(total=_count(name, value)))


def _max_concurrent(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    return _with_caps(rules, concurrent=_count(name, value))


def _max_per_job(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    if isinstance(value, Mapping):
        return _with_caps(rules, types={job: _count(f"{name}[{job!r}]", most) for job, most in value.items()})
    return _with_caps(rules, per_type=_count(name, value))


def _max_per_constraint(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    names = Constraint(7).names
    if not isinstance(value, Mapping) or not value.keys() <= set(names):
        raise ValueError(f"{name} is {value!r}; it must be a dict with {', '.join(names)} as keys")
    return _with_caps(
        rules, constraints={word: _count(f"{name}[{word!r}]", most) for word, most in value.items()}
    )


def _keep(rules: SchedulerRules, name: str, value: Any) -> SchedulerRules:
    return replace(rules, retention=_span(name, value))


_SETTERS: Final[dict[str, Callable[[SchedulerRules, str, Any], SchedulerRules]]] = {
    "capacity": _capacity,
    "labels": _labels,
    "lease": _lease,
    "crash_retries": _crash,
    "unavailable_retries": _unavailable,
    "max_queued": _max_queued,
    "max_concurrent": _max_concurrent,
    "max_per_job": _max_per_job,
    "max_per_constraint": _max_per_constraint,
    "keep_settled": _keep,
}


def _with_caps(rules: SchedulerRules, **fields: Any) -> SchedulerRules:
    caps: Caps = replace(rules.limits.caps, **fields)
    return replace(rules, limits=AdmissionLimits(caps, rules.limits.budgets))


def _span(name: str, value: Any) -> Span:
    return round(span_sec(name, value) * SECOND)


def _spans(name: str, value: Any) -> tuple[Span, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be the delays before each retry, e.g. (60, 300)")
    return tuple(_span(name, delay) for delay in value)


def _count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1, or None")
    return value


MEMORY: Final = ":memory:"


def location(where: Any) -> str:
    if not isinstance(where, str | os.PathLike):
        raise TypeError(f"{where!r} is not a path; {_GIVE}")
    text = os.fspath(where)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where!r} is not a path; {_GIVE}")
    if isinstance(where, str) and is_address(text):
        return text
    scheme, separator, _ = text.partition("://")
    if separator and isinstance(where, str):
        raise ValueError(f"{scheme}:// is not supported; {_GIVE}")
    return text if text == MEMORY else str(Path(text).absolute())


_GIVE: Final = "give the file that holds the jobs, 'postgresql://...' or ':memory:'"


def as_host(rules: SchedulerRules, place: str) -> SchedulerRules:
    """
    The rules with a host name of its own if processes share a database, where each process is a host. The
    name has a random part, because pids come again in containers: a start requeues what an earlier host of
    its name ran.
    """
    if not is_address(place) or rules.host != LOCAL:
        return rules
    name = HostId(f"{platform.node() or 'local'}-{os.getpid()}-{secrets.token_hex(3)}")
    return replace(rules, host=name)


def store_at(place: str, clock: SteadyClock, ordering: Ordering) -> Store:
    if place == MEMORY:
        from penstock.stores.memory.store import MemoryStore  # noqa: PLC0415  # only the store that is used

        return MemoryStore(clock, ordering=ordering)
    return open_store(place, clock, ordering)
