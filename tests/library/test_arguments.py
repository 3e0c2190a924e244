"""What travels to a job and back, and what is refused before it is written."""

from __future__ import annotations

import enum
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import penstock


@dataclass
class Photo:
    path: Path
    taken: datetime
    size: tuple[int, int]


class Colour(enum.Enum):
    RED = "red"


class Opaque:
    pass


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
PHOTO = Photo(Path("/a.jpg"), NOW, (3, 4))


def echo_photo(value: Photo) -> Photo:
    return value


def echo_path(value: Path) -> Path:
    return value


def echo_enum(value: Colour | None) -> Colour | None:
    return value


def echo_when(value: list[datetime]) -> list[datetime]:
    return value


def echo_tuple(value: tuple[int, str]) -> tuple[int, str]:
    return value


def echo_set(value: set[int]) -> set[int]:
    return value


def echo_bytes(value: bytes) -> bytes:
    return value


def echo_span(value: timedelta) -> timedelta:
    return value


def echo_decimal(value: Decimal) -> Decimal:
    return value


def echo_uuid(value: uuid.UUID) -> uuid.UUID:
    return value


def echo_keys(value: dict[int, date]) -> dict[int, date]:
    return value


def echo_any(value: Any) -> Any:
    return value


def echo_bare(value):
    return value


@pytest.mark.parametrize(
    ("fn", "value"),
    [
        (echo_photo, PHOTO),
        (echo_path, Path("/data/ü.txt")),
        (echo_enum, Colour.RED),
        (echo_enum, None),
        (echo_when, [NOW, NOW + timedelta(microseconds=1)]),
        (echo_tuple, (1, "x")),
        (echo_set, {1, 2}),
        (echo_bytes, b"\x00\xff"),
        (echo_span, timedelta(days=3, microseconds=5)),
        (echo_decimal, Decimal("0.10")),
        (echo_uuid, uuid.UUID(int=7)),
        (echo_keys, {1: date(2030, 1, 1)}),
        (echo_any, {"a": [1, 2.5, None, True, "x"]}),
        (echo_bare, "ü\n\0"),
        (echo_bare, 10**15),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_annotations_describe_goes_there_and_back(scheduler, fn, value):
    job = scheduler.job(fn).enqueue(value)
    scheduler.drain()

    back = job.result(0)

    assert value == back
    assert type(value) is type(back)


@pytest.mark.parametrize(
    ("fn", "value", "why"),
    [
        (echo_bare, Opaque(), "is a Opaque, which JSON cannot carry"),
        (
            echo_bare,
            NOW,
            "would come back as '2030-01-01T12:00:00Z', not as the datetime that it is; annotate",
        ),
        (echo_bare, PHOTO, "annotate the parameter with its type"),
        (echo_bare, (1, 2), "would come back as [1, 2], not as the tuple that it is; annotate"),
        (echo_bare, {1: "a"}, "would come back as {'1': 'a'}, not as the dict that it is"),
        (echo_bare, float("nan"), "would come back as None, not as the float that it is"),
        (echo_bare, "\ud800", "cannot carry"),
        (echo_any, {1, 2}, "would come back as [1, 2], not as the set"),
        (echo_path, 7, "is 7 and does not fit its annotation"),
        (echo_tuple, (1, 2), "does not fit its annotation: Expected `str`, got `int`"),
        (echo_enum, "blue", "does not fit its annotation: Invalid enum value 'blue'"),
        (echo_photo, None, "does not fit its annotation"),
    ],
)
def test_what_would_not_come_back_is_refused_by_name_and_nothing_is_enqueued(scheduler, fn, value, why):
    job = scheduler.job(fn)

    with pytest.raises(penstock.BadArgument) as refused:
        job.enqueue(value)

    assert why in str(refused.value)
    assert str(refused.value).startswith(f"{fn.__name__}: argument 'value' ")
    assert ("value", fn.__name__) == (refused.value.argument, refused.value.job)
    assert [] == scheduler.enqueued()


def every_kind(a, /, b, *more, c=3, d, **rest):
    return [a, b, list(more), c, d, rest]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2), {"d": 4}),
        ((1, 2, 3, 4), {"c": 0, "d": 4, "e": 5}),
        ((1,), {"b": 2, "d": 4}),
    ],
)
def test_every_kind_of_parameter_is_called_as_python_would(scheduler, args, kwargs):
    job = scheduler.job(every_kind).enqueue(*args, **kwargs)
    scheduler.drain()

    assert every_kind(*args, **kwargs) == job.result(0)


def test_a_default_is_the_functions_own_when_it_runs(scheduler):
    def register_host(name, greeting="Hello"):
        return f"{greeting}, {name}"

    job = scheduler.job(register_host).enqueue("Ada")
    register_host.__defaults__ = ("Good night",)
    scheduler.drain()

    assert "Good night, Ada" == job.result(0)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "echo_bare: missing a required argument: 'value'"),
        ((1, 2), {}, "echo_bare: too many positional arguments"),
        ((1,), {"other": 2}, "echo_bare: got an unexpected keyword argument 'other'"),
    ],
)
def test_a_call_that_does_not_fit_the_function_is_refused_at_once(scheduler, args, kwargs, message):
    with pytest.raises(penstock.BadArgument, match=message):
        scheduler.job(echo_bare).enqueue(*args, **kwargs)


def test_the_payload_is_json_that_another_language_could_have_written(scheduler):
    job = scheduler.job(echo_photo).enqueue(PHOTO)

    assert {"value": {"path": "/a.jpg", "taken": "2030-01-01T12:00:00Z", "size": [3, 4]}} == json.loads(
        job.job.intent.payload
    )


def test_a_function_that_has_changed_since_fails_the_job_with_a_reason(scheduler):
    scheduler.job(name="f")(lambda old: old).enqueue(1)
    del scheduler.functions["f"]
    scheduler.job(name="f")(lambda new: new)
    [job] = scheduler.find("QUEUED")

    scheduler.drain()

    with pytest.raises(penstock.JobFailed, match="unknown field `old`"):
        job.result(0)


@pytest.mark.parametrize("value", [Opaque(), "x" * 1_000_001])
def test_a_result_that_cannot_be_kept_fails_the_job_and_says_why(scheduler, value):
    job = scheduler.job(name="f")(lambda: value).enqueue()

    scheduler.drain()

    with pytest.raises(penstock.JobFailed, match="it returned"):
        job.result(0)


def test_a_result_that_is_not_what_the_function_promised_is_given_as_it_is(scheduler):
    def liar() -> int:
        return "not a number"

    job = scheduler.job(liar).enqueue()
    scheduler.drain()

    assert "not a number" == job.result(0)


def test_enqueue_many_takes_tuples_dicts_and_single_values(scheduler):
    pair = scheduler.job(name="pair")(lambda a, b=0: [a, b])

    jobs = pair.enqueue_many([(1, 2), {"a": 3}, 4, "ab", ([5],)])
    scheduler.drain()

    assert [[1, 2], [3, 0], [4, 0], ["ab", 0], [[5], 0]] == [job.result(0) for job in jobs]


def test_one_bad_call_of_many_means_that_none_is_enqueued(scheduler):
    one = scheduler.job(name="one")(lambda a: a)

    with pytest.raises(penstock.BadArgument):
        one.enqueue_many([1, 2, Opaque()])

    assert [] == scheduler.enqueued()
    assert [] == one.enqueue_many([])
