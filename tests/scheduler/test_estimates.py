"""
The start estimates on four loads, with nothing told by the user: a small version of `bench/estimates.py`, which
makes the table of docs/estimates.md. Seeds are fixed and time is virtual, so the figures are the same each time.
"""

from __future__ import annotations

import pytest
from bench.estimates import LOADS, figures, outcomes_of


@pytest.mark.long
def test_ranges_hold_and_beat_the_moving_average_of_waits():
    """Few predictions of one stretch of time depend on each other: the bounds of one load are wider than of all."""
    outcomes = {load.name: outcomes_of(load, jobs=900, seed=1, every=25) for load in LOADS}
    results = {name: figures(each) for name, each in outcomes.items()}
    together = figures([one for each in outcomes.values() for one in each])

    assert together.scored >= 80
    assert 0.72 <= together.covered <= 0.88
    assert together.error <= 1 / 3
    for name, result in results.items():
        assert 0.6 <= result.covered <= 0.97, name
        assert result.error <= max(1 / 3, 1.35 * result.oracle_error), name
        assert result.error < result.average_error, name
