from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.errors import BadIntent
from penstock.core.jobs.intent import MAX_PAYLOAD, Intent, check
from penstock.core.jobs.types import SECOND, AddonId, Constraint, RunWhen, priority_of

NOW = 1_900_000_000 * SECOND
PLAIN = Intent(addon_id=AddonId("visuals"), job_type="indexing")


def test_the_seeds_own_body_is_taken():
    check(
        Intent(
            addon_id="visuals",
            job_type="indexing",
            cost_units=30,
            priority=priority_of("NORMAL"),
            constraints=Constraint.CPU_HEAVY,
            expected_duration_sec=120,
            payload='{"path": "/some/dir"}',
            earliest_start_at=NOW + 3_600 * SECOND,
        ),
        NOW,
        most_units=90,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("addon_id", ""),
        ("addon_id", "a b"),
        ("addon_id", "../etc"),
        ("job_type", "x" * 129),
        ("job_type", "new\nline"),
        ("cost_units", 0),
        ("cost_units", 101),
        ("cost_units", 91),
        ("priority", 0),
        ("priority", 101),
        ("run_when", "sometimes"),
        ("quiet_for_sec", -1),
        ("quiet_for_sec", 60),
        ("expected_duration_sec", 0),
        ("expected_duration_sec", float("nan")),
        ("expected_duration_sec", float("inf")),
        ("max_runtime_sec", 0),
        ("max_active_sec", -5),
        ("cost_limit", 0),
        ("payload", " " * (MAX_PAYLOAD + 1)),
        ("tags", ("",)),
        ("labels", ("",)),
        ("labels", ("two words",)),
        ("labels", ("gpu", "gpu")),
        ("labels", ("x" * 65,)),
        ("labels", tuple(f"l{n}" for n in range(17))),
        ("tags", ("t",) * 33),
        ("time_sensitive", True),
        ("deadline_at", NOW),
        ("deadline_at", 10**20),
        ("earliest_start_at", -1),
        ("idempotency_key", ""),
        ("idempotency_key", "k" * 201),
        ("retry_delays_sec", (1,) * 21),
        ("retry_delays_sec", (-1,)),
        ("unit", ""),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_its_name(field, value):
    with pytest.raises(BadIntent) as refusal:
        check(replace(PLAIN, **{field: value}), NOW, most_units=90)

    assert [p["field"] for p in refusal.value.data["problems"]] == [field]
    assert str(refusal.value).startswith(field)


def test_all_problems_are_named_at_once():
    with pytest.raises(BadIntent) as refusal:
        check(replace(PLAIN, cost_units=0, priority=0, deadline_at=NOW - 1), NOW, most_units=90)

    assert {p["field"] for p in refusal.value.data["problems"]} == {"cost_units", "priority", "deadline_at"}


def test_a_start_after_the_deadline_is_refused():
    with pytest.raises(BadIntent, match="before deadline_at"):
        check(replace(PLAIN, earliest_start_at=NOW + 2, deadline_at=NOW + 2), NOW, most_units=90)


def test_quiet_for_goes_with_quiet():
    check(replace(PLAIN, run_when=RunWhen.QUIET, quiet_for_sec=600), NOW, most_units=90)


@pytest.mark.parametrize(
    ("word", "number"), [("low", 25), ("Normal", 50), ("HIGH", 75), ("urgent", 95), (7, 7)]
)
def test_a_priority_may_be_a_name_in_either_case(word, number):
    assert priority_of(word) == number


@pytest.mark.parametrize("word", ["", "medium", "50", True, None, 7.5])
def test_anything_else_is_no_priority(word):
    with pytest.raises(ValueError, match="priority"):
        priority_of(word)
