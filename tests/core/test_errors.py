from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import copy
import pickle
import re
from itertools import takewhile

import pytest

from penstock.core import errors
from penstock.core.errors import PenstockError

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and value.__module__ == errors.__name__
]
LEAVES = [kind for kind in KINDS if not any(other.__mro__[1] is kind for other in KINDS)]


class Custom(errors.CallTimeout):
    """What a program might derive from one of ours."""

    code = "custom"


# The tree


def test_the_drawing_shows_the_classes_that_there_are():
    drawn = {name: parent for name, parent, _ in drawing()}

    assert drawn == {kind.__name__: kind.__mro__[1].__name__ for kind in KINDS}


def test_what_the_drawing_calls_a_standard_error_is_one():
    also = {name: re.search(r"also a ([\w.]+)", remark) for name, _, remark in drawing()}

    for name, found in also.items():
        if found is not None:
            *module, family = found[1].split(".")
            expected = getattr(concurrent.futures if module else builtins, family)
            assert issubclass(getattr(errors, name), expected), name


def drawing():
    """(name, parent, remark) of each line of the tree in the module's docstring."""
    lines = (errors.__doc__ or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == "PenstockError")
    parents = ["Exception"]
    for line in takewhile(str.strip, lines[start:]):
        found = re.fullmatch(r" {4}([ │├└─]*)(\w+) *(.*)", line)
        assert found is not None, line
        depth = len(found[1]) // 4
        yield found[2], parents[depth], found[3]
        parents[depth + 1 :] = [found[2]]


def test_each_kind_has_a_code_of_its_own():
    codes = [kind.code for kind in KINDS]

    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)


@pytest.mark.parametrize("kind", LEAVES)
def test_the_first_level_says_whose_move_it_is(kind):
    first = (errors.CallEnded, errors.BadCall, errors.Refused, errors.Unavailable)

    assert sum(issubclass(kind, family) for family in first) == 1


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        (errors.CallCanceled, concurrent.futures.CancelledError),
        (errors.CallTimeout, TimeoutError),
        (errors.PoolClosedError, RuntimeError),
        (errors.NotPicklable, TypeError),
        (errors.GraphError, ValueError),
        (errors.BadArgument, TypeError),
        (errors.BadIntent, ValueError),
        (errors.NotFound, LookupError),
        (errors.JobCanceled, concurrent.futures.CancelledError),
    ],
)
def test_code_written_for_the_standard_library_catches_ours(kind, family):
    with pytest.raises(family):
        raise kind("ended")


@pytest.mark.parametrize("kind", KINDS)
def test_none_passes_for_a_cancellation_of_the_surrounding_task(kind):
    """asyncio would take it for its own and cancel a task that nobody meant to cancel."""
    assert not issubclass(kind, asyncio.CancelledError)
    assert issubclass(kind, Exception)


# The fields


def test_a_field_is_an_attribute():
    error = errors.QueueDropError("full", policy="reject", max_in_flight=2, max_queue_depth=4)

    assert (error.policy, error.max_in_flight, error.max_queue_depth) == ("reject", 2, 4)
    assert error.data == {"policy": "reject", "max_in_flight": 2, "max_queue_depth": 4}


def test_a_field_that_is_not_there_is_an_attribute_error_with_both_names():
    error = errors.CallCanceled("canceled", phase="queued")

    assert not hasattr(error, "worker")
    with pytest.raises(AttributeError, match="'CallCanceled' has no attribute 'worker'"):
        _ = error.worker


def test_an_instance_without_fields_does_not_look_for_them_for_ever():
    bare = PenstockError.__new__(PenstockError)

    assert not hasattr(bare, "phase")


# Across processes


@pytest.mark.parametrize("kind", [*KINDS, Custom])
@pytest.mark.parametrize("travel", ["pickle", "copy", "deepcopy"])
def test_an_error_arrives_as_it_was_sent(kind, travel):
    sent = kind("it ended: 50 %", phase="queued", attempt=2, cause={"signal": 9})

    match travel:
        case "pickle":
            got = pickle.loads(pickle.dumps(sent))
        case "copy":
            got = copy.copy(sent)
        case _:
            got = copy.deepcopy(sent)

    assert type(got) is kind
    assert (str(got), got.args, got.data) == (str(sent), sent.args, sent.data)
    assert (got.phase, got.attempt, got.cause) == ("queued", 2, {"signal": 9})
