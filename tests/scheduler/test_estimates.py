"""
The start estimates on four loads, with nothing told by the user: a small version of `bench/estimates.py`, which
makes the table of docs/estimates.md. Seeds are fixed and time is virtual, so the figures are the same each time.
"""

from __future__ import annotations

import pytest
from bench.estimates import LOADS, measured

#: Every so many jobs get a prediction: seldom where queues are long and plays take long.
EVERY = {"steady": 20, "bursty": 40, "wide": 16, "several": 8}


@pytest.mark.long
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_ranges_hold_and_beat_the_moving_average_of_waits(load):
    """Few predictions of one stretch of time depend on each other, so the bounds are wider than for the table."""
    result = measured(load, jobs=800, seeds=[1], every=EVERY[load.name])

    assert result.scored >= 12
    assert 0.6 <= result.covered <= 0.97
    assert result.error <= max(1 / 3, 1.35 * result.oracle_error)
    assert result.error < result.average_error
