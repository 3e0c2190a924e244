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


@pytest.fixture(params=["sqlite", "postgres"])
def database(request):
    """The settings that name the database."""
    if request.param == "sqlite":
        return ()
    place = request.getfixturevalue("postgres")
    return f"database={place.dsn}", f"postgres.schema={place.schema}"


@pytest.fixture
def start(database, daemon):
    """A function that starts a daemon with these settings. It ends before the tables of its database."""
    return lambda *flags: daemon(*database, *flags)


@pytest.fixture
def host(start, workers):
    """40 units, and a worker with 40 threads for each of two addons."""
    host = start("capacity.units=40")
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


def test_units_kept_for_a_large_command_are_given_to_no_addon_job(start, workers):
    """Without kept units the command waits for the last of the small jobs: there is never a moment without them."""
    host = start("capacity.units=40", "order.patience=1s")
    workers.start(host, "--concurrency=40", addon="first")
    begins(host, workers, "first")
    small = [
        job_of("first", "sleep", {"seconds": 0.7 + n % 5 * 0.2}, cost_units=10, expected_duration_sec=1)
        for n in range(200)
    ]
    ids = {receipt.job_id for receipt in host.client.submit_many(small)}
    until(lambda: len(started_of(workers, ids)) >= 4)
    command = host.client.submit("cli", "penstock.shell", {"script": "true"}, cost_units=40).job_id
    until(lambda: host.client.job(command).state == "DONE")

    before = len(started_of(workers, ids))
    assert before <= 60, f"{before} of 200 small jobs started before the command"
    assert {"no_room"} == {e.reason for e in events_of(host, command) if e.kind == "DENIED"}


def test_jobs_without_a_worker_hold_no_units_after_the_third_start_timeout(start, workers):
    host = start("capacity.units=40", "leases.start_timeout=1s", "retry.start=1s")
    workers.start(host, "--concurrency=40", addon="first")
    begins(host, workers, "first")
    alone = submit(host, "absent", 3, 0, priority=95)
    until(lambda: all(timeouts_of(host, job_id) >= 3 for job_id in alone), within=300)
    # Ready again: only that no worker comes holds them now.
    until(lambda: {host.client.explain(job_id).reason for job_id in alone} == {"no_worker"})
    reserved = [reservations_of(host, job_id) for job_id in alone]
    for _ in range(20):
        [job] = host.client.submit_many([job_of("first", "sleep", {"seconds": 0}, cost_units=40)])
        until(lambda job=job: host.client.job(job.job_id).state == "DONE")

    assert [reservations_of(host, job_id) for job_id in alone] == reserved == [3, 3, 3]
    workers.start(host, "--concurrency=4", addon="absent")
    until(lambda: all(host.client.job(job_id).state == "DONE" for job_id in alone))


def started_of(workers, ids):
    return {line[2] for line in workers.started()} & ids


def events_of(host, job_id):
    return host.client.events(job_id=job_id, limit=500).events


def timeouts_of(host, job_id):
    return sum(event.reason == "start_timeout" for event in events_of(host, job_id))


def reservations_of(host, job_id):
    return sum(event.kind == "DISPATCHING" for event in events_of(host, job_id))
