from __future__ import annotations

import pytest

from penstock.core.jobs.states import NONE_YET, Category, Counters, Schedules, after_failure
from penstock.core.jobs.types import MINUTE, SECOND


def delays_of(category, own=()):
    counters, delays = NONE_YET, []
    while True:
        counters, delay = after_failure(category, counters, Schedules(), own)
        if delay is None:
            return delays
        delays.append(delay)


@pytest.mark.parametrize(
    ("category", "minutes"),
    [(Category.CRASH, [1, 5, 15, 30, 30]), (Category.UNAVAILABLE, [2, 5, 10, 15, 15])],
)
def test_all_five_delays_are_used_before_it_is_over(category, minutes):
    assert delays_of(category) == [m * MINUTE for m in minutes]


def test_the_jobs_own_error_is_tried_again_only_as_the_job_asks():
    assert delays_of(Category.ERROR) == []
    assert delays_of(Category.ERROR, own=(3, 7)) == [3 * SECOND, 7 * SECOND]


def test_one_category_does_not_eat_into_another():
    counters, _ = after_failure(Category.CRASH, NONE_YET, Schedules(), ())
    counters, delay = after_failure(Category.UNAVAILABLE, counters, Schedules(), ())

    assert counters == Counters(crash=1, unavailable=1)
    assert delay == 2 * MINUTE
