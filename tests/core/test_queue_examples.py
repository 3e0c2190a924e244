"""How calls come into the dispatch queue (DQ-1 to DQ-4), one small scene each. `test_queue_model` has the long ones."""

from __future__ import annotations

import math

import pytest

from penstock.core.calls.ticket import CancelPhase, EnterResult, Policy, QueueLimits, Stage

SHEDDING = [Policy.REJECT, Policy.DROP_LATEST, Policy.DROP_OLDEST]


# DQ-1: limits


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_in_flight": -1}, "max_in_flight"),
        ({"max_in_flight": 1.5}, "max_in_flight"),
        ({"max_in_flight": True}, "max_in_flight"),
        ({"max_in_flight": math.inf}, "max_in_flight"),
        ({"max_in_flight": "2"}, "max_in_flight"),
        ({"max_in_flight": None}, "max_in_flight"),
        ({"max_queue_depth": -1}, "max_queue_depth"),
        ({"max_queue_depth": 2.0}, "max_queue_depth"),
        ({"max_queue_depth": False}, "max_queue_depth"),
        ({"max_queue_depth": math.nan}, "max_queue_depth"),
        ({"max_queue_depth": -math.inf}, "max_queue_depth"),
        ({"max_queue_depth": None}, "max_queue_depth"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"policy": "drop-newest"}, "policy"),
        ({"policy": None}, "policy"),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name_when_they_are_made(limits, field):
    with pytest.raises(ValueError, match=rf"^{field} is .*must be"):
        QueueLimits(**{"max_in_flight": 1, **limits})


@pytest.mark.parametrize("policy", Policy)
def test_a_policy_may_be_given_as_the_plain_word_and_means_the_same(make_scene, policy):
    scene = make_scene(policy=str(policy))

    assert scene.queue.limits.policy is policy


def test_only_infinity_takes_the_bound_away(make_scene):
    scene = make_scene(depth=math.inf)

    verdicts = scene.enter("a b c d e f g h i j")

    assert set(verdicts) == {EnterResult.ACCEPTED}
    assert scene.counts == (0, 10, 0, 0)


def test_a_depth_of_zero_accepts_what_can_start_at_once_and_no_more(make_scene):
    scene = make_scene(in_flight=2, depth=0)

    verdicts = scene.enter("a b c")

    assert verdicts == [EnterResult.ACCEPTED, EnterResult.ACCEPTED, EnterResult.WAIT]
    assert scene.pump() == "a b"
    assert scene.counts == (2, 0, 1, 0)


@pytest.mark.parametrize("policy", SHEDDING)
def test_a_depth_of_zero_refuses_what_cannot_start_at_once(make_scene, policy):
    scene = make_scene(depth=0, policy=policy)
    scene.start("a")

    assert scene.enter("b") is EnterResult.REFUSED
    assert scene.reserve("c") is EnterResult.REFUSED


def test_a_depth_of_zero_does_not_drop_a_call_that_came_back_from_a_crash(make_scene):
    scene = make_scene(depth=0, policy=Policy.DROP_OLDEST)
    scene.start("a")
    scene.requeue_lost("a")
    scene.queue.set_slots(0, scene.now)

    assert scene.enter("b") is EnterResult.REFUSED
    assert scene.reserve("c") is EnterResult.REFUSED
    assert scene.pending == "a"


def test_a_depth_of_zero_accepts_nothing_while_paused(make_scene):
    scene = make_scene(depth=0)
    scene.queue.pause()

    assert scene.enter("a") is EnterResult.WAIT


# DQ-2: policies


@pytest.mark.parametrize("policy", SHEDDING)
def test_a_policy_that_sheds_load_never_makes_anybody_wait(make_scene, policy):
    scene = make_scene(depth=2, policy=policy)
    scene.start("a")

    verdicts = [*scene.enter("b c d e"), *scene.reserve("f g")]

    assert EnterResult.WAIT not in verdicts
    assert scene.queue.waiting == 0


@pytest.mark.parametrize("policy", [Policy.REJECT, Policy.DROP_LATEST])
def test_reject_and_drop_latest_refuse_the_newcomer(make_scene, policy):
    scene = make_scene(depth=2, policy=policy)
    scene.start("a")
    scene.enter("b c")

    assert scene.enter("d") is EnterResult.REFUSED
    assert scene.reserve("e") is EnterResult.REFUSED
    assert scene.pending == "b c"
    assert not scene.queue.evicted


def test_drop_oldest_ends_the_oldest_pending_call_and_accepts_the_newcomer(make_scene):
    scene = make_scene(depth=2, policy=Policy.DROP_OLDEST)
    scene.start("a")
    scene.enter("b c")

    assert scene.enter("d") is EnterResult.ACCEPTED
    assert scene.collect("evicted") == "b"
    assert scene["b"].stage is Stage.SETTLED
    assert scene.pending == "c d"


def test_drop_oldest_makes_room_for_a_reservation_too(make_scene):
    scene = make_scene(depth=2, policy=Policy.DROP_OLDEST)
    scene.start("a")
    scene.enter("b c")

    assert scene.reserve("d") is EnterResult.RESERVED
    assert scene.collect("evicted") == "b"
    assert scene.counts == (1, 1, 0, 1)


def test_drop_oldest_refuses_the_newcomer_when_all_places_are_reserved(make_scene):
    scene = make_scene(depth=1, policy=Policy.DROP_OLDEST)
    scene.start("a")
    scene.reserve("b")

    assert scene.enter("c") is EnterResult.REFUSED
    assert scene.fill("b")


# DQ-3, DQ-11: waiting for room


def test_a_full_queue_makes_its_callers_wait_first_come_first_served(make_scene):
    scene = make_scene(depth=1)
    scene.start("a")
    scene.enter("b")

    verdicts = scene.enter("c d e")
    for name in "abc":
        scene.settle(name)
        scene.pump()

    assert verdicts == [EnterResult.WAIT] * 3
    assert scene.collect("granted") == "c d e"


def test_one_room_is_one_wake_up(make_scene):
    scene = make_scene(depth=1)
    scene.start("a")
    scene.enter("b c d")

    scene.settle("a")
    scene.pump()

    assert scene.collect("granted") == "c"
    assert scene.counts == (1, 1, 1, 0)


def test_a_completion_makes_no_room_if_nothing_may_start_in_its_stead(make_scene):
    scene = make_scene(in_flight=2, depth=1)
    scene.start("a b")
    scene.enter("c d")
    scene.queue.pause()

    scene.settle("a")

    assert scene.collect("granted") == ""
    assert scene.counts == (1, 1, 1, 0)


def test_a_newcomer_cannot_take_the_place_of_one_who_waited(make_scene):
    scene = make_scene(depth=1)
    scene.start("a")
    scene.enter("b")
    scene.reserve("c")
    scene.settle("a")
    scene.pump()

    assert scene.collect("granted") == "c"
    assert scene.enter("d") is EnterResult.WAIT
    assert scene.fill("c")
    assert scene.pending == "c"


def test_a_waiter_is_given_a_place_and_enters_when_its_payload_is_made(make_scene):
    scene = make_scene(depth=0)
    scene.start("a")
    scene.reserve("b")

    scene.settle("a")

    assert scene.counts == (0, 0, 0, 1)
    assert scene.take() is None
    assert scene.fill("b")
    assert scene.take() == "b"


def test_a_waiter_that_holds_its_payload_enters_by_itself(make_scene):
    scene = make_scene(depth=0)
    scene.start("a")
    scene.enter("b")

    scene.settle("a")

    assert scene.collect("granted") == "b"
    assert scene.take() == "b"


def test_more_slots_are_room_for_those_who_wait_but_never_more_than_the_limit(make_scene):
    scene = make_scene(in_flight=3, depth=0)
    scene.queue.set_slots(1, scene.now)
    scene.start("a")
    scene.enter("b c d")

    scene.queue.set_slots(100, scene.now)

    assert scene.collect("granted") == "b c"
    assert scene.pump() == "b c"
    assert scene.counts == (3, 0, 1, 0)


def test_with_fewer_slots_nothing_starts_until_enough_has_ended(make_scene):
    scene = make_scene(in_flight=3, depth=3)
    scene.start("a b c")
    scene.enter("d")
    scene.queue.set_slots(1, scene.now)

    scene.settle("a")
    scene.settle("b")

    assert scene.take() is None
    scene.settle("c")
    assert scene.take() == "d"


# DQ-4: reserve, then build


def test_there_are_never_more_payloads_than_places(make_scene):
    scene = make_scene(in_flight=1, depth=2)
    scene.start("a")

    verdicts = scene.reserve("b c d e")

    assert verdicts == [EnterResult.RESERVED] * 2 + [EnterResult.WAIT] * 2
    assert scene.enter("f") is EnterResult.WAIT


def test_a_place_is_good_for_one_payload(make_scene):
    scene = make_scene(depth=1)
    scene.reserve("a")

    assert scene.fill("a")
    assert not scene.fill("a")
    assert scene.pending == "a"


def test_a_place_that_is_given_back_goes_to_the_next_in_line(make_scene):
    scene = make_scene(depth=1)
    scene.start("a")
    scene.reserve("b c d")

    assert scene.cancel("b") is CancelPhase.WAITING
    assert scene.collect("granted") == "c"
    assert not scene.fill("b")
    assert scene.counts == (1, 0, 1, 1)
