"""The numbers that a program may set by keyword, and the rules made of them. Whoever needs more of them hands in `rules`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict

from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.intent import LABEL, LABEL_WORDS
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import SECOND, Constraint, Span
from penstock.library.options import Seconds, span_sec, words
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Depth

__all__ = ["LibrarySettings", "make_rules"]


class LibrarySettings(TypedDict, total=False):
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


#: A program that submits to itself may queue as much as it likes, unless it sets `max_queued`.
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
    known = Constraint(7).names
    if not isinstance(value, Mapping) or not value.keys() <= set(known):
        raise ValueError(f"{name} is {value!r}; it must be a dict with {', '.join(known)} as keys")
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
