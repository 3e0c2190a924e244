"""When the job runner reports what has ended and claims more: attempts that end together share one commit."""

from __future__ import annotations

from threading import Event, Semaphore, Thread, current_thread
from types import SimpleNamespace
from unittest.mock import Mock, NonCallableMock

import pytest
from tests.waiting import LONG, until

from penstock.core.errors import StoreFailed
from penstock.core.jobs.types import SECOND, EndReason
from penstock.core.jobs.workers import AHEAD, HELD, SOON
from penstock.library import job_runner as job_runner_module
from penstock.library.job_runner import JobRunner
from penstock.work.executors import ThreadExecutor
from penstock.work.outcome import Outcome

DONE = Outcome(EndReason.COMPLETED)
NOW = 10**9


class Service:
    """A job service that records which dispatches each commit reports, and grants nothing."""

    def __init__(self):
        self.commits, self.before, self.error = [], lambda: None, None

    def exchange_soon(self, reports, *_, **__):
        self.before()
        if self.error is not None:
            raise self.error
        self.commits.append([report.dispatch_id for report in reports])
        return [None] * len(reports)

    def finish_exchange(self, pending, prepare):
        return pending, prepare([])

    def granted(self, grants):
        return []


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def tasks():
    """What the job runner lets an idle thread of the executor do."""
    return []


@pytest.fixture
def job_runner(service, tasks):
    executors = Mock(ahead=AHEAD, run_soon=lambda task: tasks.append(task) or True)
    job_runner = JobRunner({"f": Mock()}, lambda *_: executors, workers=2, name="test", now=lambda: NOW)
    job_runner.wake = Mock()
    job_runner.join(service, job_runner.wake)
    job_runner.batching.mean_run, job_runner.batching.expensive = 10, True
    return job_runner


def waiting(job_runner, name):
    attempt = SimpleNamespace(dispatch_id=name, claimed_at=NOW)
    job_runner.waiting[name] = attempt
    return attempt


def running(job_runner, name):
    attempt = waiting(job_runner, name)
    job_runner.begin(attempt)
    return attempt


def test_the_last_of_a_batch_has_no_commit_of_its_own_when_it_is_about_to_end(
    job_runner, service, monkeypatch
):
    first, last = running(job_runner, "first"), running(job_runner, "last")
    job_runner.finish(first, DONE)
    monkeypatch.setattr(job_runner_module.time, "sleep", lambda _: job_runner.finish(last, DONE))
    job_runner.step(NOW)

    assert [["first", "last"]] == service.commits


def test_a_function_that_goes_on_is_waited_for_once(job_runner, service, monkeypatch):
    slept = []
    first, _ = running(job_runner, "first"), running(job_runner, "goes on")
    job_runner.finish(first, DONE)
    monkeypatch.setattr(job_runner_module.time, "sleep", slept.append)
    job_runner.step(NOW)

    assert [["first"]] == service.commits
    assert 1 == len(slept)


def test_a_batch_that_is_half_through_is_reported_whole(job_runner, service):
    first, second = running(job_runner, "first"), running(job_runner, "second")
    waiting(job_runner, "third")
    job_runner.given_at = NOW
    job_runner.finish(first, DONE)
    job_runner.finish(second, DONE)

    assert job_runner.step(NOW) > NOW
    assert [] == service.commits
    job_runner.step(NOW + HELD)
    assert [["first", "second"]] == service.commits


def test_long_functions_are_not_waited_for(job_runner, service, monkeypatch):
    first, _ = running(job_runner, "first"), running(job_runner, "goes on")
    job_runner.batching.mean_run = SECOND
    job_runner.finish(first, DONE)
    monkeypatch.setattr(job_runner_module.time, "sleep", pytest.fail)
    job_runner.step(NOW)

    assert [["first"]] == service.commits


def test_a_wake_up_does_not_split_a_batch_that_is_on_its_way(job_runner, service):
    first, job_runner.given_at = running(job_runner, "first"), NOW
    waiting(job_runner, "second")
    job_runner.finish(first, DONE)

    assert NOW < job_runner.step(NOW + 1) <= NOW + 1 + SOON
    assert [] == service.commits
    job_runner.executors.wake_threads.assert_not_called()


def test_a_batch_that_does_not_end_soon_is_reported_as_far_as_it_is_and_wakes_more_threads(
    job_runner, service
):
    first, job_runner.given_at = running(job_runner, "first"), NOW
    waiting(job_runner, "second")
    job_runner.finish(first, DONE)
    job_runner.batching.expensive = False
    job_runner.step(NOW + SOON)

    assert [["first"]] == service.commits
    job_runner.executors.wake_threads.assert_called_once()


def test_long_functions_are_reported_by_halves(job_runner, service):
    job_runner.batching.expensive, job_runner.batching.mean_run = False, SECOND
    first, job_runner.given_at = running(job_runner, "first"), NOW
    waiting(job_runner, "second")
    job_runner.finish(first, DONE)
    job_runner.step(NOW)

    assert [["first"]] == service.commits


# Which thread claims after a commit


def test_an_idle_thread_claims_and_the_driver_does_not_claim_again(job_runner, service, tasks):
    job_runner.on_commit()
    job_runner.wake.assert_not_called()
    tasks.pop()()

    assert [[]] == service.commits
    job_runner.wake.assert_called_once()  # for the other parts
    job_runner.step(NOW)
    assert [[]] == service.commits


def test_a_commit_during_the_claim_is_claimed_for_again(job_runner, service, tasks):
    def commit_elsewhere():
        service.before = lambda: None
        thread = Thread(target=job_runner.on_commit)
        thread.start()
        thread.join()

    job_runner.on_commit()
    service.before = commit_elsewhere
    tasks.pop()()
    assert not tasks
    job_runner.step(NOW)

    assert [[], []] == service.commits


def test_the_claimers_own_commit_is_no_reason_to_claim_again(job_runner, service, tasks):
    service.before = job_runner.on_commit
    job_runner.on_commit()
    tasks.pop()()
    job_runner.step(NOW)

    assert [[]] == service.commits


def test_the_drivers_own_commit_is_no_reason_to_claim_again(job_runner, service):
    service.before = job_runner.on_commit
    job_runner.finish(running(job_runner, "first"), DONE)
    for _ in range(2):
        job_runner.step(NOW)
    assert [["first"]] == service.commits

    job_runner.step(NOW)  # woken for another reason
    assert [["first"], []] == service.commits


def test_the_driver_claims_again_after_a_commit_that_did_not_claim(job_runner, service):
    """A failed job, for example, is requeued by a commit behind that of the claim."""
    finish_exchange = service.finish_exchange

    def finish_and_requeue(*args):
        job_runner.on_commit()
        return finish_exchange(*args)

    service.before, service.finish_exchange = job_runner.on_commit, finish_and_requeue
    job_runner.finish(running(job_runner, "first"), DONE)
    for _ in range(2):
        job_runner.step(NOW)

    assert [["first"], []] == service.commits


def test_where_the_claim_of_a_thread_fails_the_driver_claims(job_runner, service, tasks):
    service.error = StoreFailed("away", kind="away")
    job_runner.on_commit()
    tasks.pop()()
    job_runner.wake.assert_called_once()
    service.error = None
    job_runner.step(NOW)
    job_runner.on_commit()

    assert [[]] == service.commits
    assert 1 == len(tasks)


def test_two_threads_do_not_claim_at_once(job_runner, service, tasks):
    job_runner.on_commit()
    assert job_runner.claim() is not None
    tasks.pop()()
    job_runner.on_commit()
    assert not tasks
    job_runner.take([])
    job_runner.step(NOW)

    assert [[]] == service.commits


@pytest.mark.parametrize("busy", ["ended", "full", "closing"])
def test_where_no_thread_is_free_or_an_attempt_has_ended_the_driver_is_woken(job_runner, tasks, busy):
    if busy == "ended":
        job_runner.ended.append((running(job_runner, "one"), DONE))
    elif busy == "full":
        running(job_runner, "one"), running(job_runner, "two")
    else:
        job_runner.drain(0)
    job_runner.on_commit()

    assert not tasks
    job_runner.wake.assert_called_once()


def test_the_thread_that_claimed_runs_what_it_claimed():
    ran = []
    executors = ThreadExecutor(2, lambda _: bool(ran.append(current_thread())), lambda *_: None)

    def claim():
        ran.append(current_thread())
        executors.start([plain_attempt()], awake=1)

    assert executors.run_soon(claim)
    until(lambda: len(ran) == 2)
    executors.close(wait=5)

    assert ran[0] is ran[1]


def test_a_thread_from_outside_works_in_place_of_one_of_the_executors():
    began, go_on, ran = Semaphore(0), Event(), []

    def begin(attempt):
        began.release()
        go_on.wait(LONG)
        ran.append(current_thread())
        return False

    executors = ThreadExecutor(1, begin, Mock())
    executors.start([plain_attempt()], awake=1)
    outside = Thread(target=executors.work)
    outside.start()
    began.acquire()
    executors.start([plain_attempt()])
    executors.work()  # no place is free: returns, though an attempt is ready
    one_at_once = not began.acquire(blocking=False)
    go_on.set()
    outside.join(LONG)
    until(lambda: len(ran) == 2)
    executors.close(wait=LONG)

    assert one_at_once
    assert outside is ran[0]


def plain_attempt():
    return NonCallableMock(function=Mock(is_async=False), given_up=False)
