"""Workers as programs that get SIGSTOP, SIGCONT, SIGTERM and SIGKILL."""

from __future__ import annotations

import signal

import pytest
from tests.client.conftest import overlaps
from tests.waiting import LONG, alive, until

from penstock.core.errors import StaleDispatch

LEASE = 4


def submit(client, job_type, **payload):
    return client.submit("photos", job_type, payload, cost_units=1).job_id


def fence_and_pid(job):
    return [int(part) for part in bytes(job.result).decode().strip("[]").split(",")]


def test_a_worker_that_was_stopped_past_its_lease_reports_nothing_when_it_wakes(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    sleeper = workers.start(one, "--concurrency=1")
    job_id = submit(client, "sleep", seconds=LEASE + 2, later=0.1)
    until(workers.started)
    sleeper.send_signal(signal.SIGSTOP)
    other = workers.start(one, "--concurrency=1")
    second = client.wait(job_id, LONG)

    sleeper.send_signal(signal.SIGCONT)
    until(lambda: "its lease was over before its outcome could be reported" in workers.said())

    after = client.job(job_id)
    assert ("DONE", [2, other.pid]) == (second.state, fence_and_pid(second))
    assert (second.result, second.fence) == (after.result, after.fence)
    with pytest.raises(StaleDispatch):
        client.complete(job_id, f"{job_id}.1", "late")
    # It is of use again: the next job is its to run.
    other.terminate()
    other.wait(LONG)
    assert [1, sleeper.pid] == fence_and_pid(client.wait(submit(client, "sleep", seconds=0), LONG))


@pytest.mark.long
def test_an_attentive_function_notices_when_its_worker_was_away_too_long(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    sleeper = workers.start(one, "--concurrency=1")
    job_id = submit(client, "attentive", seconds=LEASE + 3)
    until(workers.started)
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: client.job(job_id).state in ("QUEUED", "DISPATCHING"))
    sleeper.send_signal(signal.SIGCONT)

    job = client.wait(job_id, LONG)

    assert ("DONE", [2, sleeper.pid]) == (job.state, fence_and_pid(job))
    assert [] == overlaps(workers.lines())


@pytest.mark.long
def test_a_function_in_a_process_stops_by_itself_while_its_worker_is_frozen(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    sleeper = workers.start(one, "--concurrency=1", "--processes")
    job_id = submit(client, "attentive", seconds=2 * LEASE)
    until(workers.started)
    sleeper.send_signal(signal.SIGSTOP)
    other = workers.start(one, "--concurrency=1")

    job = client.wait(job_id, LONG)

    assert ("DONE", [2, other.pid]) == (job.state, fence_and_pid(job))
    assert [] == overlaps(workers.lines())


@pytest.mark.long
def test_a_worker_that_gets_sigterm_lets_its_job_yield_and_another_goes_on(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    first = workers.start(one, "--concurrency=1")
    job_id = submit(client, "pages", count=200, seconds=0.02)
    until(lambda: bytes(client.job(job_id).checkpoint) not in (b"null", b"1"))

    first.send_signal(signal.SIGTERM)
    assert 0 == first.wait(LONG)
    between = client.job(job_id)
    workers.start(one, "--concurrency=1")
    job = client.wait(job_id, LONG)

    assert between.state in ("QUEUED", "DISPATCHING")
    assert "DONE" == job.state
    assert f'"first":{int(bytes(between.checkpoint))}' in bytes(job.result).decode()


def test_a_function_that_does_not_look_is_left_to_its_lease_and_not_given_back(daemon, workers):
    """To give the lease back while the thread still runs would let the job run twice at once."""
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    first = workers.start(one, "--concurrency=1", "--stop-within=0.3")
    job_id = submit(client, "sleep", seconds=30)
    until(workers.started)

    first.send_signal(signal.SIGTERM)
    assert 0 == first.wait(LONG)

    assert "their leases will expire" in workers.said()
    until(lambda: client.job(job_id).state in ("QUEUED", "DISPATCHING"))
    assert "lease_expired" in {event.reason for event in client.events(job_id=job_id).events}


def test_a_function_in_a_process_is_ended_when_the_stop_takes_too_long_and_its_lease_given_back(
    daemon, workers
):
    one = daemon("leases.ttl=30s")
    client = one.client
    first = workers.start(one, "--concurrency=1", "--stop-within=0.3", "--processes")
    job_id = submit(client, "sleep", seconds=300)
    [begun] = until(workers.started)

    first.send_signal(signal.SIGTERM)
    assert 0 == first.wait(LONG)

    assert client.job(job_id).state in ("QUEUED", "DISPATCHING")
    assert not alive(int(begun[4]))


def test_kill_9_of_a_worker_costs_its_job_one_lease(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    first = workers.start(one, "--concurrency=1")
    job_id = submit(client, "sleep", seconds=LEASE + 2, later=0.1)
    until(workers.started)
    first.kill()
    second = workers.start(one, "--concurrency=1")

    job = client.wait(job_id, LONG)

    assert ("DONE", [2, second.pid]) == (job.state, fence_and_pid(job))


def test_a_killed_worker_takes_its_processes_along(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    first = workers.start(one, "--concurrency=1", "--processes")
    submit(one.client, "sleep", seconds=300)
    [begun] = until(workers.started)

    first.kill()

    until(lambda: not alive(int(begun[4])))
