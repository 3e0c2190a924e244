"""The crew of a store that is far away: a commit costs round trips, so what ends together is told together."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from penstock.core.landing import End
from penstock.jobs import crew as crew_file
from penstock.jobs.crew import Crew

DONE = SimpleNamespace(end=End.COMPLETED, result=None, error=None)


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
    crew._mean_sec = 0.00001
    return crew


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
