from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.jobs.admission import Budget, windows
from penstock.core.jobs.spending import SpendMark, judge, uses
from penstock.core.jobs.types import SECOND


def moment(*parts):
    return int(datetime(*parts, tzinfo=UTC).timestamp()) * SECOND


@settings(deadline=None)
@given(st.integers(1, 1_000), st.lists(st.integers(0, 300), max_size=40))
def test_each_mark_is_reached_once_however_the_spending_is_cut(limit, amounts):
    spent, marks = 0, []
    for amount in amounts:
        mark = judge(spent, amount, limit)
        marks += [mark] if mark else []
        spent += amount

    assert marks.count(SpendMark.REACHED) == (spent >= limit)
    assert marks.count(SpendMark.WARNED) <= 1
    assert marks == sorted(marks, key=[SpendMark.WARNED, SpendMark.REACHED].index)


def test_the_warning_comes_at_eighty_per_cent():
    assert judge(79, 0, 100) is None
    assert judge(79, 1, 100) is SpendMark.WARNED
    assert judge(80, 1, 100) is None


def test_an_amount_that_crosses_both_marks_reaches_the_limit():
    assert judge(0, 500, 100) is SpendMark.REACHED


def test_without_a_limit_nothing_is_judged():
    assert judge(0, 10**12, None) is None


def test_days_and_months_end_at_midnight_utc():
    day, month = windows(moment(2028, 2, 28, 23, 59, 59))

    assert (day.name, day.ends_at) == ("2028-02-28", moment(2028, 2, 29))
    assert (month.name, month.ends_at) == ("2028-02", moment(2028, 3, 1))


def test_december_ends_in_january():
    _, month = windows(moment(2027, 12, 31, 12))

    assert month.ends_at == moment(2028, 1, 1)


def test_a_budget_knows_only_the_windows_it_limits():
    assert [window.kind for window, _ in Budget(month=5).limits(moment(2028, 1, 1))] == ["month"]


def test_how_a_budget_stands_is_told_with_the_worst_mark_that_it_has_passed():
    noon = moment(2026, 11, 16, 12)
    day, month = uses(Budget(day=100, month=1_000), {"day": 80, "month": 1_200}, noon)

    assert (day.window.name, day.spent, day.limit, day.mark) == ("2026-11-16", 80, 100, SpendMark.WARNED)
    assert (month.window.name, month.spent, month.limit, month.mark) == (
        "2026-11",
        1_200,
        1_000,
        SpendMark.REACHED,
    )


def test_a_window_without_limit_is_told_once_something_was_spent_in_it():
    noon = moment(2026, 11, 16, 12)

    assert uses(None, {}, noon) == []
    assert [(use.window.kind, use.limit, use.mark) for use in uses(None, {"month": 5}, noon)] == [
        ("month", None, None)
    ]
    assert [use.spent for use in uses(Budget(day=100), {}, noon)] == [0]
