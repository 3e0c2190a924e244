from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import NamedTuple

import pytest

from penstock.core.jobs.intent import Intent, alike
from penstock.core.jobs.quick import quick, quick_but_one, quick_tuple


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0
    name: str = ""


class Pair(NamedTuple):
    left: int
    right: int


def test_what_is_made_quickly_is_what_the_class_would_have_made():
    made = quick(Point)(1, 2, "p")

    assert (type(made), made, hash(made)) == (Point, Point(1, 2, "p"), hash(Point(1, 2, "p")))
    with pytest.raises(FrozenInstanceError):
        made.x = 3


def test_others_differ_by_the_one_field_alone():
    make = quick_but_one(Point, "y")

    assert [Point(1, 5, "p"), Point(1, 6, "p")] == [make(Point(1, 2, "p"))(y) for y in (5, 6)]
    assert Point(9, 5) == make(Point(9))(5)


def test_intents_that_are_alike_share_all_but_their_payload():
    like = Intent(addon_id="a", job_type="t", tags=("x",), payload="[1]", labels=("gpu",))

    assert alike(like)("[2]") == Intent(
        addon_id="a", job_type="t", tags=("x",), payload="[2]", labels=("gpu",)
    )


def test_a_tuple_made_quickly_has_its_names():
    made = quick_tuple(Pair)((1, 2))

    assert (type(made), made.left, made.right) == (Pair, 1, 2)
