"""
The start estimates on four loads, with nothing told by the user: a small version of `bench/estimates.py`, which
makes the table of docs/estimates.md. Seeds are fixed and time is virtual, so the figures are the same each time.
"""

from __future__ import annotations

import os

import pytest
from bench.estimate_loads import LOADS, PUBLISHED_SEEDS, TUNING_SEEDS
from bench.estimates import measured

#: Every so many jobs get a prediction: seldom where queues are long and plays take long.
EVERY = {"steady": 12, "bursty": 24, "wide": 12, "several": 16}


def test_the_published_seeds_were_not_used_for_tuning():
    assert set(TUNING_SEEDS).isdisjoint(PUBLISHED_SEEDS)


@pytest.mark.long
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_ranges_hold_and_beat_the_moving_average_of_waits(load):
    """Predictions of one stretch of time depend on each other, so the bounds are wider than for the table."""
    result = measured(load, jobs=700, seeds=PUBLISHED_SEEDS[:2], every=EVERY[load.name])

    assert result.scored >= 25
    assert 0.7 <= result.covered <= 0.93
    assert result.error <= max(1 / 3, 1.35 * result.oracle_error)
    assert result.error < result.average_error


@pytest.mark.skipif("PENSTOCK_SOAK" not in os.environ, reason="some minutes of plays: part of make soak")
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_the_published_figures_stay_within_their_bounds(load):
    result = measured(load, jobs=1_200, seeds=PUBLISHED_SEEDS, every=15)

    assert 0.75 <= result.covered <= 0.85
    assert result.error <= max(0.35, 1.2 * result.oracle_error)
    assert result.error < result.average_error
