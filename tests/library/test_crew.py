"""When the crew tells what has ended, and asks for more: what ends together is told together, for a commit is dear."""

from __future__ import annotations

from threading import current_thread
from types import SimpleNamespace
from unittest.mock import Mock, NonCallableMock

import pytest
from tests.waiting import until

from penstock.core.errors import StoreFailed
from penstock.core.jobs.batching import HELD, SOON
from penstock.core.jobs.types import EndReason
from penstock.library import job_runner as crew_file
from penstock.library.job_runner import JobRunner
from penstock.work.executors import ThreadExecutor
from penstock.work.outcome import Outcome

DONE = Outcome(EndReason.COMPLETED)


@pytest.fixture
def told():
    return []


@pytest.fixture
def job_runner(told):
    def exchange_soon(reports, *_, **__):
        told.append([report.dispatch_id for report in reports])
        return lambda ready: ([None] * len(reports), ready([]))

    job_runner = JobRunner(
        {"f": Mock()}, lambda *_: Mock(ahead=1), workers=2, name="crew", now=lambda: 10**9, far=True
    )
    job_runner.join(Mock(exchange_soon=exchange_soon, granted=lambda _: []), ring=Mock())
    job_runner._mean_sec, job_runner._guessed = 0.00001, False
    return job_runner


def test_the_first_run_says_how_long_they_take_and_the_next_ones_only_correct_it(job_runner):
    first, second = running(job_runner, "first"), running(job_runner, "second")
    job_runner._mean_sec, job_runner._guessed = 1.0, True
    second.began_at -= 16
    job_runner._finish(first, DONE)
    assert job_runner._mean_sec < 0.5
    job_runner._finish(second, DONE)

    assert 1 <= job_runner._mean_sec < 2


def running(job_runner, name):
    attempt = SimpleNamespace(dispatch_id=name, claimed_at=10**9)
    job_runner._waiting[name] = attempt
    job_runner._begin(attempt)
    return attempt


def test_the_last_of_a_batch_has_no_commit_of_its_own_when_it_is_about_to_end(job_runner, told, monkeypatch):
    first, last = running(job_runner, "first"), running(job_runner, "last")
    job_runner._finish(first, DONE)
    monkeypatch.setattr(crew_file.time, "sleep", lambda _: job_runner._finish(last, DONE))
    job_runner.step(10**9)

    assert [["first", "last"]] == told


def test_one_that_goes_on_is_not_waited_for_again_and_again(job_runner, told, monkeypatch):
    slept = []
    first, _ = running(job_runner, "first"), running(job_runner, "goes on")
    job_runner._finish(first, DONE)
    monkeypatch.setattr(crew_file.time, "sleep", slept.append)
    job_runner.step(10**9)

    assert [["first"]] == told
    assert 1 == len(slept)


def test_a_batch_that_is_half_through_is_told_whole(job_runner, told):
    first, second = running(job_runner, "first"), running(job_runner, "second")
    job_runner._waiting["third"] = running(job_runner, "third")
    job_runner._took_at = 10**9
    job_runner._finish(first, DONE)
    job_runner._finish(second, DONE)

    assert job_runner.step(10**9) > 10**9
    assert [] == told
    job_runner.step(10**9 + HELD)
    assert [["first", "second"]] == told


def test_nobody_waits_for_functions_that_take_long(job_runner, told, monkeypatch):
    first, _ = running(job_runner, "first"), running(job_runner, "goes on")
    job_runner._mean_sec = 1.0
    job_runner._finish(first, DONE)
    monkeypatch.setattr(crew_file.time, "sleep", pytest.fail)
    job_runner.step(10**9)

    assert [["first"]] == told


def test_a_ring_does_not_split_a_batch_that_is_on_its_way(job_runner, told):
    given = 10**9
    first, job_runner._took_at = running(job_runner, "first"), given
    job_runner._waiting["second"] = SimpleNamespace(claimed_at=given)
    job_runner._finish(first, DONE)

    assert given < job_runner.step(given + 1) <= given + 1 + SOON
    assert [] == told
    job_runner.executors.rouse.assert_not_called()


def test_a_batch_that_does_not_come_back_soon_is_told_as_far_as_it_is_and_wakes_the_others(job_runner, told):
    given = 10**9
    first, job_runner._took_at = running(job_runner, "first"), given
    job_runner._waiting["second"] = SimpleNamespace(claimed_at=given)
    job_runner._finish(first, DONE)
    job_runner._far, job_runner._commit_cost = False, 0
    job_runner.step(given + SOON)

    assert [["first"]] == told
    job_runner.executors.rouse.assert_called_once()


def test_functions_that_take_long_are_told_of_by_halves(job_runner, told):
    job_runner._far, job_runner._commit_cost, job_runner._mean_sec = False, 0, 1.0
    first, job_runner._took_at = running(job_runner, "first"), 10**9
    job_runner._waiting["second"] = SimpleNamespace(claimed_at=10**9)
    job_runner._finish(first, DONE)
    job_runner.step(10**9)

    assert [["first"]] == told


# Who looks when something was committed


@pytest.fixture
def errands(job_runner):
    sent = []
    job_runner.executors.send = lambda node_call: sent.append(node_call) or True
    return sent


def test_an_idle_thread_looks_for_itself_and_the_driver_does_not_look_again(job_runner, told, errands):
    job_runner.heard()
    job_runner._ring.assert_not_called()
    errands.pop()()

    assert [[]] == told
    job_runner._ring.assert_called_once()  # for the other parts
    job_runner.step(10**9)
    assert [[]] == told


def test_what_is_told_while_somebody_looks_is_looked_for_again(job_runner, told, errands):
    looking = job_runner._job_service.exchange_soon

    def told_of_another(*args, **more):
        job_runner._scout = 0  # as in any other thread
        job_runner.heard()
        return looking(*args, **more)

    job_runner.heard()
    job_runner._job_service.exchange_soon = told_of_another
    errands.pop()()
    assert not errands
    job_runner._job_service.exchange_soon = looking
    job_runner.step(10**9)

    assert [[], []] == told


def test_our_own_commit_is_no_reason_to_look_again(job_runner, told, errands):
    looking = job_runner._job_service.exchange_soon
    job_runner._job_service.exchange_soon = lambda *args, **more: job_runner.heard() or looking(*args, **more)
    job_runner.heard()
    errands.pop()()
    job_runner.step(10**9)

    assert [[]] == told


def test_where_one_who_looks_fails_the_driver_looks(job_runner, told, errands):
    looking = job_runner._job_service.exchange_soon
    job_runner._job_service.exchange_soon = Mock(side_effect=StoreFailed("away", kind="away"))
    job_runner.heard()
    errands.pop()()
    job_runner._ring.assert_called_once()
    job_runner._job_service.exchange_soon = looking
    job_runner.step(10**9)
    job_runner.heard()

    assert [[]] == told
    assert 1 == len(errands)


def test_nobody_looks_beside_one_who_claims(job_runner, told, errands):
    job_runner.heard()
    with job_runner._claiming:
        errands.pop()()
        job_runner.heard()
    assert not errands
    job_runner.step(10**9)

    assert [[]] == told


@pytest.mark.parametrize("busy", ["ended", "full", "closing"])
def test_where_no_thread_is_free_or_something_has_ended_the_driver_is_rung(job_runner, errands, busy):
    if busy == "ended":
        job_runner._over.append((running(job_runner, "one"), DONE))
    elif busy == "full":
        running(job_runner, "one"), running(job_runner, "two")
    job_runner._closing = busy == "closing"
    job_runner.heard()

    assert not errands
    job_runner._ring.assert_called_once()


def test_the_thread_that_looked_runs_what_it_brought():
    ran = []
    executors = ThreadExecutor(2, lambda _: True, lambda *_: None)
    executors._perform = lambda attempt: ran.append(current_thread())
    attempt = NonCallableMock(function=Mock(is_async=False), given_up=False)

    def look():
        ran.append(current_thread())
        executors.start([attempt], awake=1)

    assert executors.send(look)
    until(lambda: len(ran) == 2)
    executors.close(wait=5)

    assert ran[0] is ran[1]
