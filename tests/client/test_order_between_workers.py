"""
Order and shares between real workers, in real time: `make soak` alone runs these. The same scenes on the
virtual clock are in tests/scheduler/test_one_round.py.
"""

from __future__ import annotations

import os
import time

import pytest
from tests.waiting import until

from penstock.client.client import job_of

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
pytestmark = pytest.mark.skipif(SOAK == 1, reason="in real time: make soak runs it")

LENGTH = 3.0


@pytest.fixture
def host(daemon, workers):
    """40 units, and a worker with 40 threads for each of two addons."""
    host = daemon("capacity.units=40")
    for addon in ("first", "second"):
        workers.start(host, "--concurrency=40", addon=addon)
    until(lambda: all(begins(host, workers, addon) for addon in ("first", "second")))
    return host


def submit(host, addon, count, seconds, **more):
    jobs = [job_of(addon, "sleep", {"seconds": seconds}, cost_units=1, **more)] * count
    return {receipt.job_id for receipt in host.client.submit_many(jobs)}


def begins(host, workers, addon):
    """A first job of this addon has started, so its worker is there."""
    [job] = submit(host, addon, 1, 0)
    until(lambda: job in {line[2] for line in workers.started()})
    return True


def test_the_first_job_of_a_higher_band_starts_within_one_job_length(host, workers):
    submit(host, "first", 320, LENGTH, priority=10)
    until(lambda: len(workers.started()) >= 42)
    began = time.monotonic()
    high = submit(host, "second", 40, LENGTH, priority=95)
    until(lambda: high <= {line[2] for line in workers.started()})

    first = min(float(line[0]) for line in workers.started() if line[2] in high)
    assert first - began <= LENGTH + 1


def test_equal_addons_get_equal_shares_of_a_thousand_starts(host, workers):
    of_first, of_second = submit(host, "first", 1_000, 1), submit(host, "second", 1_000, 1)

    def started():
        return {line[2] for line in workers.started()} & (of_first | of_second)

    until(lambda: len(started()) >= 1_000, within=600)
    assert len(started() & of_second) == pytest.approx(len(started() & of_first), rel=0.1)
