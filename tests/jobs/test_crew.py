"""When the crew tells what has ended, and asks for more: what ends together is told together, for a commit is dear."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from penstock.core.landing import End
from penstock.jobs import crew as crew_file
from penstock.jobs.crew import Crew
from penstock.jobs.outcomes import Outcome

DONE = Outcome(End.COMPLETED)


@pytest.fixture
def told():
    return []


@pytest.fixture
def crew(told):
    def exchange_soon(reports, *_):
        told.append([report.dispatch_id for report in reports])
        return lambda: ([None] * len(reports), [])

    crew = Crew({"f": Mock()}, lambda *_: Mock(ahead=1), workers=2, name="crew", now=lambda: 10**9, far=True)
    crew.join(Mock(exchange_soon=exchange_soon, claimed=lambda _: []), ring=Mock())
    crew._mean_sec, crew._guessed = 0.00001, False
    return crew


def test_the_first_run_says_how_long_they_take_and_the_next_ones_only_correct_it(crew):
    first, second = running(crew, "first"), running(crew, "second")
    crew._mean_sec, crew._guessed = 1.0, True
    second.began -= 16
    crew._finish(first, DONE)
    assert crew._mean_sec < 0.5
    crew._finish(second, DONE)

    assert 1 <= crew._mean_sec < 2


def running(crew, name):
    attempt = SimpleNamespace(facts=SimpleNamespace(dispatch_id=name), claimed_at=10**9)
    crew._waiting[name] = attempt
    crew._begin(attempt)
    return attempt


def test_the_last_of_a_batch_has_no_commit_of_its_own_when_it_is_about_to_end(crew, told, monkeypatch):
    first, last = running(crew, "first"), running(crew, "last")
    crew._finish(first, DONE)
    monkeypatch.setattr(crew_file.time, "sleep", lambda _: crew._finish(last, DONE))
    crew.step(10**9)

    assert [["first", "last"]] == told


def test_one_that_goes_on_is_not_waited_for_again_and_again(crew, told, monkeypatch):
    slept = []
    first, _ = running(crew, "first"), running(crew, "goes on")
    crew._finish(first, DONE)
    monkeypatch.setattr(crew_file.time, "sleep", slept.append)
    crew.step(10**9)

    assert [["first"]] == told
    assert 1 == len(slept)


def test_a_batch_that_is_half_through_is_told_whole(crew, told):
    first, second = running(crew, "first"), running(crew, "second")
    crew._waiting["third"] = running(crew, "third")
    crew._took_at = 10**9
    crew._finish(first, DONE)
    crew._finish(second, DONE)

    assert crew.step(10**9) > 10**9
    assert [] == told
    crew.step(10**9 + crew_file.HELD)
    assert [["first", "second"]] == told


def test_nobody_waits_for_functions_that_take_long(crew, told, monkeypatch):
    first, _ = running(crew, "first"), running(crew, "goes on")
    crew._mean_sec = 1.0
    crew._finish(first, DONE)
    monkeypatch.setattr(crew_file.time, "sleep", pytest.fail)
    crew.step(10**9)

    assert [["first"]] == told


def test_a_ring_does_not_split_a_batch_that_is_on_its_way(crew, told):
    given = 10**9
    first, crew._took_at = running(crew, "first"), given
    crew._waiting["second"] = SimpleNamespace(claimed_at=given)
    crew._finish(first, DONE)

    assert given < crew.step(given + 1) <= given + 1 + crew_file.SOON
    assert [] == told
    crew.hands.rouse.assert_not_called()


def test_a_batch_that_does_not_come_back_soon_is_told_as_far_as_it_is_and_wakes_the_others(crew, told):
    given = 10**9
    first, crew._took_at = running(crew, "first"), given
    crew._waiting["second"] = SimpleNamespace(claimed_at=given)
    crew._finish(first, DONE)
    crew._far = False
    crew.step(given + crew_file.SOON)

    assert [["first"]] == told
    crew.hands.rouse.assert_called_once()


def test_functions_that_take_long_are_told_of_by_halves(crew, told):
    crew._far, crew._mean_sec = False, 1.0
    first, crew._took_at = running(crew, "first"), 10**9
    crew._waiting["second"] = SimpleNamespace(claimed_at=10**9)
    crew._finish(first, DONE)
    crew.step(10**9)

    assert [["first"]] == told
