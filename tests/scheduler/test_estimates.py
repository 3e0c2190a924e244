"""
The start estimates on four loads, with nothing told by the user: a small version of `bench/estimates.py`, which
makes the table of docs/estimates.md. Seeds are fixed and time is virtual, so the figures are the same each time.
"""

from __future__ import annotations

import pytest
from bench.estimates import LOADS, measured

NAMES = [load.name for load in LOADS]


@pytest.mark.long
@pytest.mark.parametrize("load", LOADS, ids=NAMES)
def test_ranges_hold_and_beat_the_moving_average_of_waits(load):
    """Few predictions of one stretch of time depend on each other, so the bounds are wider than those of the table."""
    result = measured(load, jobs=420, seeds=[3], every=6)

    assert result.scored >= 20
    assert 0.65 <= result.covered <= 0.95
    assert result.error <= max(1 / 3, 1.2 * result.oracle_error)
    assert result.error < result.average_error
