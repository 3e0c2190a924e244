"""Short functions are handed to a worker several at a time. Nobody should notice, but for the speed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.waiting import alive, until

from .plant import count_calls


@pytest.fixture
def handful(plants, tmp_path):
    """Submits calls that are all in one worker's hands before the first has ended: it is stopped until then."""
    ran = tmp_path / "ran"

    def hand_over(*calls, workers=1):
        plant = plants(workers=workers, ahead_sec=60.0)
        # So that it is known to be short.
        while plant.runner.batching.claim_ahead() < len(calls):
            plant.settled(plant.function("maybe_long", str(ran)))
        ran.write_text("")
        pids = plant.runner.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        plant.job_service.pause()
        jobs = [plant.function("maybe_long", str(ran), **call) for call in calls]
        plant.job_service.resume()
        until(lambda: all(plant.last(job) for job in jobs), what="the claim of all")
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        return plant, jobs, pids

    hand_over.ran = lambda: ran.read_text().split()[::2]
    hand_over.pids = lambda: ran.read_text().split()[1::2]
    return hand_over


def test_each_runs_once(handful):
    plant, jobs, _ = handful(*[{}] * 20)

    for job in jobs:
        assert plant.settled(job).end == "completed"
    assert sorted(handful.ran()) == jobs


def test_what_each_printed_is_its_own(handful):
    plant, jobs, _ = handful(*({"words": f"number {n}\n" * (n % 3)} for n in range(20)))

    for n, job in enumerate(jobs):
        plant.settled(job)
        assert plant.output(job)["stdout"] == f"number {n}\n" * (n % 3)


def test_when_the_worker_dies_only_the_call_that_it_ran_has_crashed(handful):
    plant, jobs, _ = handful({}, {"die": True}, {}, {})

    assert [plant.settled(job).end for job in jobs] == [
        "completed",
        "worker_crashed",
        "completed",
        "completed",
    ]
    assert sorted(handful.ran()) == sorted([*jobs, jobs[1], jobs[1]])  # it is tried three times
    assert "worker_crashed" not in {a.end for job in jobs[2:] for a in plant.store.attempts(job)}


def test_who_waits_behind_a_call_that_takes_longer_than_expected_is_run_by_another_worker(handful):
    plant, jobs, _ = handful({"seconds": 300}, *[{}] * 5, workers=2)

    for job in jobs[1:]:
        assert plant.settled(job).end == "completed"
    assert plant.state(jobs[0]) == "RUNNING"
    plant.job_service.cancel(jobs[0])
    plant.until(jobs[0], "CANCELED")


def test_with_no_other_worker_they_go_back_to_the_queue_and_stay_there(handful, monkeypatch):
    plant, jobs, _ = handful({"seconds": 300}, {}, {})
    for job in jobs[1:]:
        plant.until(job, "QUEUED")
    assert [plant.events(job)[-1] for job in jobs[1:]] == [("REQUEUED", "released")] * 2
    exchanges = count_calls(plant.runner, "exchange", monkeypatch)
    until(lambda: len(exchanges) > 3)
    assert [plant.state(job) for job in jobs[1:]] == ["QUEUED"] * 2
    plant.job_service.cancel(jobs[0])

    for job in jobs[1:]:
        plant.settled(job)
        *before, last = [str(attempt.end) for attempt in plant.store.attempts(job)]
        assert (set(before), last) == ({"released"}, "completed")
    assert sorted(handful.ran()) == jobs


def test_one_that_waits_in_a_workers_hands_is_canceled_at_once_and_the_one_before_it_goes_on(handful):
    plant, jobs, [pid] = handful({"seconds": 300}, {}, {})
    until(lambda: plant.store.job(jobs[0]) and handful.ran())
    plant.job_service.cancel(jobs[2])

    plant.until(jobs[2], "CANCELED")
    assert plant.state(jobs[0]) == "RUNNING"
    assert alive(pid)
    plant.job_service.cancel(jobs[0])
    plant.until(jobs[0], "CANCELED")
    assert plant.settled(jobs[1]).end == "completed"
    assert jobs[2] not in handful.ran()


def test_a_stop_gives_back_what_has_not_begun(handful):
    plant, jobs, _ = handful({"seconds": 300}, {}, {})
    until(handful.ran)
    plant.runner.stop(1)

    assert [plant.state(job) for job in jobs] == ["QUEUED"] * 3
    assert [plant.events(job)[-1] for job in jobs] == [("REQUEUED", "graceful_shutdown")] * 3
    assert handful.ran() == jobs[:1]
    assert plant.units() == 0


def test_a_function_that_leaves_a_process_running_ends_with_its_worker_and_the_next_has_another(handful):
    plant, jobs, [pid] = handful({"behind": True}, {}, {})

    for job in jobs:
        assert plant.settled(job).end == "completed"
    until(lambda: not alive(pid), what="the end of the worker")
    assert str(pid) not in handful.pids()[1:]
    assert sorted(handful.ran()) == jobs
