"""When the crew tells what has ended, and asks for more: what ends together is told together, for a commit is dear."""

from __future__ import annotations

from threading import current_thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tests.waiting import until

from penstock.core.landing import End
from penstock.core.refusals import StoreFailed
from penstock.jobs import crew as crew_file
from penstock.jobs.attempt import Attempt
from penstock.jobs.crew import Crew
from penstock.jobs.hands import LocalHands
from penstock.jobs.outcomes import Outcome

DONE = Outcome(End.COMPLETED)


@pytest.fixture
def told():
    return []


@pytest.fixture
def crew(told):
    def exchange_soon(reports, *_):
        told.append([report.dispatch_id for report in reports])
        return lambda ready: ([None] * len(reports), ready([]))

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


# Who looks when something was committed


@pytest.fixture
def errands(crew):
    sent = []
    crew.hands.send = lambda errand: sent.append(errand) or True
    return sent


def test_an_idle_thread_looks_for_itself_and_the_driver_does_not_look_again(crew, told, errands):
    crew.heard()
    crew._ring.assert_not_called()
    errands.pop()()

    assert [[]] == told
    crew._ring.assert_called_once()  # for the other parts
    crew.step(10**9)
    assert [[]] == told


def test_what_is_told_while_somebody_looks_is_looked_for_again(crew, told, errands):
    looking = crew._desk.exchange_soon

    def told_of_another(*args):
        crew._scout = 0  # as in any other thread
        crew.heard()
        return looking(*args)

    crew.heard()
    crew._desk.exchange_soon = told_of_another
    errands.pop()()
    assert not errands
    crew._desk.exchange_soon = looking
    crew.step(10**9)

    assert [[], []] == told


def test_our_own_commit_is_no_reason_to_look_again(crew, told, errands):
    looking = crew._desk.exchange_soon
    crew._desk.exchange_soon = lambda *args: crew.heard() or looking(*args)
    crew.heard()
    errands.pop()()
    crew.step(10**9)

    assert [[]] == told


def test_where_one_who_looks_fails_the_driver_looks(crew, told, errands):
    looking = crew._desk.exchange_soon
    crew._desk.exchange_soon = Mock(side_effect=StoreFailed("away", kind="away"))
    crew.heard()
    errands.pop()()
    crew._ring.assert_called_once()
    crew._desk.exchange_soon = looking
    crew.step(10**9)
    crew.heard()

    assert [[]] == told
    assert 1 == len(errands)


def test_nobody_looks_beside_one_who_claims(crew, told, errands):
    crew.heard()
    with crew._claiming:
        errands.pop()()
        crew.heard()
    assert not errands
    crew.step(10**9)

    assert [[]] == told


@pytest.mark.parametrize("busy", ["ended", "full", "closing"])
def test_where_no_thread_is_free_or_something_has_ended_the_driver_is_rung(crew, errands, busy):
    if busy == "ended":
        crew._over.append((running(crew, "one"), DONE))
    elif busy == "full":
        running(crew, "one"), running(crew, "two")
    crew._closing = busy == "closing"
    crew.heard()

    assert not errands
    crew._ring.assert_called_once()


def test_the_thread_that_looked_runs_what_it_brought():
    ran = []
    hands = LocalHands(2, lambda _: True, lambda *_: None)
    hands._perform = lambda attempt: ran.append(current_thread())
    attempt = Mock(spec=Attempt, function=Mock(is_async=False), given_up=False)

    def look():
        ran.append(current_thread())
        hands.start([attempt], awake=1)

    assert hands.send(look)
    until(lambda: len(ran) == 2)
    hands.close(wait=5)

    assert ran[0] is ran[1]
