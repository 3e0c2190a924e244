"""
The intent: the request of a submitter, and its bounds.

The scheduler never corrects an intent: it accepts it as it is, or refuses it and names every problem.
`payload` stays JSON text, because the scheduler passes it on and reads it only for a title.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Final

from msgspec import Struct

from penstock.core.errors import BadIntent
from penstock.core.jobs import dependencies
from penstock.core.jobs.dependencies import Dependency, IfUnmet
from penstock.core.jobs.types import (
    BATCH_NAME,
    BATCH_NAME_WORDS,
    BATCH_TAG,
    FAR_MOMENT,
    OWN_TYPES,
    AddonId,
    Constraint,
    Moment,
    Money,
    Priority,
    RunWhen,
)
from penstock.core.text import is_storable, parsed

MAX_PAYLOAD: Final = 1_000_000  # characters of JSON
MAX_SPAN_SEC: Final = 366 * 86_400
#: A label: hosts have labels, jobs require them.
LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@=-]{0,63}")
LABEL_WORDS: Final = "1 to 64 letters, digits and _.:/@=- beginning with a letter or digit"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,127}")


class Intent(Struct, frozen=True, gc=False):
    """What a submitter asks for."""

    addon_id: AddonId
    job_type: str
    cost_units: int = 10
    priority: int = Priority.NORMAL
    constraints: Constraint = Constraint.NONE
    run_when: RunWhen = RunWhen.NORMAL
    quiet_for_sec: int = 0
    expected_duration_sec: float | None = None
    payload: str = "null"
    tags: tuple[str, ...] = ()
    time_sensitive: bool = False
    deadline_at: Moment | None = None
    earliest_start_at: Moment | None = None
    max_runtime_sec: int | None = None
    max_active_sec: int | None = None
    cost_limit: Money | None = None
    unit: str = "USD"
    idempotency_key: str | None = None
    #: The delays of the retries after the job's own error. Without any the first error is final.
    retry_delays_sec: tuple[int, ...] = ()
    #: The job starts only on a host that has all these labels.
    labels: tuple[str, ...] = ()
    #: Whether an attempt may be asked, and then forced, to give its units to a job of much higher priority.
    preemptible: bool = True
    #: The job starts when the conditions on all of these parents hold.
    after: tuple[Dependency, ...] = ()
    if_unmet: IfUnmet = IfUnmet.CANCEL


#: All fields but the payload: most jobs that are submitted together share them.
all_but_payload: Final = attrgetter(*(name for name in Intent.__struct_fields__ if name != "payload"))


def check(intent: Intent, now: Moment, *, most_units: int) -> None:
    """
    Refuse an intent with problems (BadIntent names all of them). `most_units`: the units of the quietest
    host; a job that costs more would wait for ever.
    """
    problems = list(_problems(intent, now, most_units))
    if problems:
        raise BadIntent.of(*problems)


def _problems(intent: Intent, now: Moment, most_units: int) -> Iterator[tuple[str, str]]:
    for field in ("addon_id", "job_type"):
        if not _NAME.fullmatch(getattr(intent, field)):
            yield (
                field,
                "must be 1..128 characters of A-Z a-z 0-9 _ . : / @ - and begin with a letter or digit",
            )
    yield from _numbers(intent, most_units)
    yield from _when(intent)
    yield from _texts(intent)
    yield from _times(intent, now)
    yield from dependencies.problems(intent.after, intent.if_unmet)


def _numbers(intent: Intent, most_units: int) -> Iterator[tuple[str, str]]:
    if not 1 <= intent.cost_units <= 100:
        yield "cost_units", "must be 1..100"
    elif intent.cost_units > most_units:
        yield (
            "cost_units",
            f"must be at most {most_units}: more is never free here, even when nothing else runs",
        )
    if not Priority.LEAST <= intent.priority <= Priority.MOST:
        yield "priority", "must be 1..100, or LOW, NORMAL, HIGH, URGENT"
    for field in ("expected_duration_sec", "max_runtime_sec", "max_active_sec"):
        value = getattr(intent, field)
        # Written so that NaN, which compares false with everything, is refused too.
        if value is not None and not 0 < value <= MAX_SPAN_SEC:
            yield field, f"must be above 0 and at most {MAX_SPAN_SEC}"
    if intent.cost_limit is not None and intent.cost_limit <= 0:
        yield "cost_limit", "must be above 0"
    if len(intent.retry_delays_sec) > 20 or not all(0 <= d <= MAX_SPAN_SEC for d in intent.retry_delays_sec):
        yield "retry_delays_sec", f"must be at most 20 delays of 0..{MAX_SPAN_SEC}"


def _when(intent: Intent) -> Iterator[tuple[str, str]]:
    if intent.run_when not in list(RunWhen):
        yield "run_when", f"must be one of {', '.join(RunWhen)}"
    if not 0 <= intent.quiet_for_sec <= MAX_SPAN_SEC:
        yield "quiet_for_sec", f"must be 0..{MAX_SPAN_SEC}"
    elif intent.quiet_for_sec and intent.run_when != RunWhen.QUIET:
        yield "quiet_for_sec", 'needs run_when "quiet"'


def _texts(intent: Intent) -> Iterator[tuple[str, str]]:
    if len(intent.payload) > MAX_PAYLOAD:
        yield "payload", f"must be at most {MAX_PAYLOAD} characters of JSON"
    if len(intent.tags) > 32 or not all(0 < len(tag) <= 64 for tag in intent.tags):
        yield "tags", "must be at most 32 tags of 1..64 characters"
    batches = [tag.removeprefix(BATCH_TAG) for tag in intent.tags if tag.startswith(BATCH_TAG)]
    if len(batches) > 1:
        yield "tags", f"name {len(batches)} batches with {BATCH_TAG}NAME: a job can be in one"
    elif batches and not BATCH_NAME.fullmatch(batches[0]):
        yield "tags", f"name a batch with {BATCH_TAG}NAME, where NAME {BATCH_NAME_WORDS}"
    for field, texts in (
        ("tags", intent.tags),
        ("unit", (intent.unit,)),
        ("idempotency_key", (intent.idempotency_key or "",)),
    ):
        # Refused, never replaced: two keys could become one.
        if not all(map(is_storable, texts)):
            yield field, "must be valid UTF-8 without NUL"
    labels = intent.labels
    if len(labels) > 16 or len(set(labels)) < len(labels) or not all(map(LABEL.fullmatch, labels)):
        yield "labels", f"must be at most 16 different labels, each {LABEL_WORDS}"
    if not 0 < len(intent.unit) <= 16:
        yield "unit", "must be 1..16 characters"
    if intent.idempotency_key is not None and not 0 < len(intent.idempotency_key) <= 200:
        yield "idempotency_key", "must be 1..200 characters"


def _times(intent: Intent, now: Moment) -> Iterator[tuple[str, str]]:
    deadline, earliest = intent.deadline_at, intent.earliest_start_at
    if earliest is not None and not 0 <= earliest < FAR_MOMENT:
        yield "earliest_start_at", "must lie between the years 1970 and 9999"
    if deadline is None:
        if intent.time_sensitive:
            yield "time_sensitive", "needs deadline_at"
    elif deadline <= now:
        yield "deadline_at", "has passed already"
    elif deadline >= FAR_MOMENT:
        yield "deadline_at", "must lie before the year 9999"
    elif earliest is not None and earliest >= deadline:
        yield "earliest_start_at", "must lie before deadline_at"


MAX_TITLE: Final = 200
#: A longer payload is not read for a title: a list of 500 jobs must stay cheap.
_MOST_READ: Final = 20_000


def title_of(intent: Intent) -> str:
    """
    One line that says what the job is: its command line, its function call, or its type with the payload.
    """
    payload = intent.payload
    if len(payload) > _MOST_READ:
        return _one_line(f"{intent.job_type} {payload[:MAX_TITLE]}")
    try:
        fields = parsed(payload)
    except (ValueError, RecursionError):
        fields = None
    match fields:
        case {"argv": [*words]} if intent.job_type.startswith(OWN_TYPES):
            return _one_line(shlex.join(map(str, words)))
        case {"script": str(script)} if intent.job_type.startswith(OWN_TYPES):
            return _one_line(script.strip())
        case {"function": str(function)} if intent.job_type.startswith(OWN_TYPES):
            arguments = [repr(value) for value in _items(fields.get("args"))]
            return _one_line(f"{function}({', '.join([*arguments, *_named(fields.get('kwargs'))])})")
        case None:
            return intent.job_type
        case dict():
            return _one_line(f"{intent.job_type}({', '.join(_named(fields))})")
        case _:
            return _one_line(f"{intent.job_type} {payload}")


def _items(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def _named(values: Any) -> list[str]:
    return [f"{name}={value!r}" for name, value in values.items()] if isinstance(values, dict) else []


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TITLE else f"{line[: MAX_TITLE - 3]}..."
