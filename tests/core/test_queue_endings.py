"""How calls leave the dispatch queue: canceled, lost, settled, closed (DQ-5 to DQ-8), and how long they waited (DQ-10)."""

from __future__ import annotations

import pytest

from penstock.core.calls.ticket import CancelPhase, EnterResult, Policy, Stage

# DQ-5: cancelling


def test_a_waiter_that_gives_up_leaves_the_line(make_scene):
    scene = make_scene(depth=1)
    scene.start("a")
    scene.enter("b c d e")

    assert scene.cancel("c") is CancelPhase.WAITING
    assert scene.waiting == "d e"
    scene.cancel("b")
    assert scene.collect("granted") == "d"


def test_a_pending_call_that_is_cancelled_never_starts_and_gives_its_place_to_the_next_in_line(make_scene):
    scene = make_scene(depth=2)
    scene.start("a")
    scene.enter("b c d")

    assert scene.cancel("b") is CancelPhase.QUEUED
    assert scene.collect("granted") == "d"
    scene.settle("a")
    assert scene.take() == "c"


def test_a_cancelled_call_in_flight_holds_its_slot_until_its_run_ends(make_scene):
    scene = make_scene(depth=0)
    scene.start("a")
    scene.enter("b")

    assert scene.cancel("a") is CancelPhase.IN_FLIGHT
    assert scene.counts == (1, 0, 1, 0)
    assert not scene.settle("a")
    assert scene.take() == "b"


def test_a_cancelled_call_in_flight_gives_its_slot_back_when_its_worker_is_ended(make_scene):
    scene = make_scene(depth=0)
    scene.start("a")
    scene.enter("b")
    scene.cancel("a")

    assert scene.requeue_lost("a", blame="a") == ""
    assert scene.take() == "b"
    assert scene.counts == (1, 0, 0, 0)


@pytest.mark.parametrize("ended", ["settled", "canceled", "canceled in flight", "evicted", "lost", "cleared"])
def test_a_call_ends_once(make_scene, ended):
    scene = make_scene(depth=1, policy=Policy.DROP_OLDEST, max_attempts=1)
    scene.start("a")
    match ended:
        case "settled":
            scene.settle("a")
        case "canceled in flight":
            scene.cancel("a")
        case "lost":
            scene.requeue_lost("a", blame="a")
    scene.enter("b")
    match ended:
        case "canceled":
            scene.cancel("b")
        case "evicted":
            scene.enter("c")
        case "cleared":
            scene.clear()
    before = scene.everything()

    assert scene.cancel("b" if ended in {"canceled", "evicted", "cleared"} else "a") is None
    assert before == scene.everything()


# DQ-6: crashes


def test_calls_that_are_requeued_go_to_the_front_in_their_original_order(make_scene):
    scene = make_scene(in_flight=3, depth=2)
    scene.start("a b c")
    scene.enter("d e")

    scene.requeue_lost("c a b")

    assert scene.pending == "a b c d e"


def test_the_order_holds_over_two_losses_one_after_the_other(make_scene):
    scene = make_scene(in_flight=4, depth=1)
    scene.start("a b c d")
    scene.enter("e")

    scene.requeue_lost("b")
    scene.requeue_lost("d a")

    assert scene.pending == "a b d e"
    assert scene.pump() == "a b d"


def test_requeued_calls_go_to_the_back_if_asked(make_scene):
    scene = make_scene(in_flight=2, depth=2, requeue_to_front=False)
    scene.start("a b")
    scene.enter("c d")

    scene.requeue_lost("b a")

    assert scene.pending == "c d a b"


def test_requeued_calls_pass_the_limit_and_waiters_wait_until_the_excess_is_gone(make_scene):
    scene = make_scene(in_flight=2, depth=1)
    scene.start("a b")
    scene.enter("c d")
    scene.queue.set_slots(1, scene.now)

    scene.requeue_lost("a b")
    assert scene.counts == (0, 3, 1, 0)

    assert scene.pump() == "a"
    scene.settle("a")
    assert scene.pump() == "b"
    assert scene.collect("granted") == ""

    scene.settle("b")
    assert scene.collect("granted") == "d"


def test_each_attempt_is_counted_and_has_an_id_of_its_own(make_scene):
    scene = make_scene(in_flight=2)
    scene.start("a b")
    first = scene["a"].dispatch
    scene.requeue_lost("a")

    assert scene.take() == "a"
    assert scene["a"].attempt == 2
    assert len({first, scene["a"].dispatch, scene["b"].dispatch}) == 3


def test_a_call_that_crashes_its_worker_every_time_fails_after_so_many_and_the_others_go_on(make_scene):
    scene = make_scene(in_flight=2, depth=2, max_attempts=3)
    scene.start("bad good")

    for _ in range(2):
        assert scene.requeue_lost("bad good", blame="bad") == ""
        assert scene.pump() == "bad good"

    assert scene.requeue_lost("bad good", blame="bad") == "bad"
    assert (scene["bad"].crashes, scene["good"].crashes) == (3, 0)
    assert scene.pump() == "good"
    assert scene.settle("good")
    assert scene.queue.state().idle


def test_a_call_that_a_dead_worker_had_not_begun_is_requeued_as_often_as_it_takes(make_scene):
    scene = make_scene(max_attempts=1)
    scene.start("a")

    for _ in range(10):
        assert scene.requeue_lost("a") == ""
        assert scene.take() == "a"

    assert (scene["a"].attempt, scene["a"].crashes) == (11, 0)


# DQ-7: completions


@pytest.mark.parametrize("stage", ["pending again", "in flight again", "settled again", "canceled again"])
def test_a_stale_completion_changes_nothing(make_scene, stage):
    scene = make_scene(in_flight=1, depth=1)
    scene.start("a")
    stale = scene["a"].dispatch
    scene.enter("b c")
    scene.requeue_lost("a")
    if stage != "pending again":
        scene.take()
    if stage == "settled again":
        scene.settle("a")
    if stage == "canceled again":
        scene.cancel("a")
    before = scene.everything()

    assert not scene.settle("a", stale)
    assert before == scene.everything()


def test_a_second_completion_of_the_same_dispatch_changes_nothing(make_scene):
    scene = make_scene(in_flight=1, depth=1)
    scene.start("a")
    scene.enter("b c")
    assert scene.settle("a")
    before = scene.everything()

    assert not scene.settle("a")
    assert before == scene.everything()


# DQ-8: holding back and closing


def test_a_paused_queue_admits_but_does_not_dispatch(make_scene):
    scene = make_scene(in_flight=2, depth=1)
    scene.queue.pause()

    verdicts = scene.enter("a b")

    assert verdicts == [EnterResult.ACCEPTED, EnterResult.WAIT]
    assert scene.take() is None
    assert scene.queue.state().paused


def test_resume_lets_them_go_and_makes_room(make_scene):
    scene = make_scene(in_flight=1, depth=1)
    scene.queue.pause()
    scene.enter("a b")

    scene.queue.resume(scene.now)

    assert scene.collect("granted") == "b"
    assert scene.pump() == "a"
    assert not scene.queue.state().paused


def test_slots_that_are_offered_while_paused_count_after(make_scene):
    scene = make_scene(in_flight=2, depth=2)
    scene.queue.set_slots(1, scene.now)
    scene.queue.pause()
    scene.enter("a b")

    scene.queue.set_slots(2, scene.now)

    assert scene.take() is None
    scene.queue.resume(scene.now)
    assert scene.pump() == "a b"


@pytest.mark.parametrize("how", ["clear", "dispose"])
def test_clear_and_dispose_end_all_who_are_pending_or_wait_first_come_first(make_scene, how):
    scene = make_scene(in_flight=2, depth=2)
    scene.start("a b")
    scene.enter("c d e f")
    scene.requeue_lost("b")

    ended = getattr(scene, how)()

    assert ended == "b c d e f"
    assert {scene[name].stage for name in ended.split()} == {Stage.SETTLED}
    assert scene.counts == (1, 0, 0, 0)
    assert (scene.pending, scene.waiting) == ("", "")


def test_a_cleared_queue_goes_on(make_scene):
    scene = make_scene()
    scene.enter("a b")
    scene.clear()

    scene.start("c")

    assert scene.settle("c")


def test_a_disposed_queue_accepts_and_hands_out_nothing_whatever_comes(make_scene):
    scene = make_scene(in_flight=2)
    scene.start("a b")
    scene.queue.pause()
    scene.dispose()

    scene.queue.resume(scene.now)
    scene.queue.set_slots(2, scene.now)

    assert scene.enter("c") is EnterResult.CLOSED
    assert scene.reserve("d") is EnterResult.CLOSED
    assert scene.take() is None
    assert scene.queue.limit == 0
    assert scene.queue.state().disposed


def test_a_place_is_gone_when_the_queue_is_disposed(make_scene):
    scene = make_scene(depth=1)
    scene.reserve("a")
    scene.dispose()

    assert not scene.fill("a")
    assert scene.queue.state().idle


def test_a_call_that_is_lost_after_dispose_is_returned_to_be_failed(make_scene):
    scene = make_scene()
    scene.start("a")
    scene.dispose()

    assert scene.requeue_lost("a") == "a"
    assert scene.queue.state().idle


def test_idle_means_that_nobody_is_anywhere(make_scene):
    scene = make_scene(depth=1)

    assert scene.queue.state().idle
    scene.reserve("a")
    assert not scene.queue.state().idle
    scene.fill("a")
    assert not scene.queue.state().idle
    scene.take()
    scene.cancel("a")
    assert not scene.queue.state().idle
    scene.settle("a")
    assert scene.queue.state().idle


def test_the_state_says_the_limits_too(make_scene):
    scene = make_scene(in_flight=3, depth=7, policy=Policy.REJECT)
    scene.queue.set_slots(1, scene.now)

    state = scene.queue.state()

    assert (state.max_in_flight, state.max_queue_depth, state.policy) == (3, 7, Policy.REJECT)


# DQ-10: wait time


def test_the_wait_is_counted_from_the_call_and_falls_into_two_parts(make_scene):
    scene = make_scene(depth=1)
    scene.start("a")
    scene.enter("b c")
    scene.now = 5.0
    scene.settle("a")
    scene.take()
    scene.now = 8.0
    scene.settle("b")

    assert scene.take() == "c"
    assert (scene["c"].waiting_for, scene["c"].pending_for) == (5.0, 3.0)
    assert scene["c"].waited == scene["c"].last_wait == 8.0


def test_the_time_in_which_the_payload_is_made_is_part_of_the_wait(make_scene):
    scene = make_scene(depth=0)
    scene.start("a")
    scene.reserve("b")
    scene.now = 5.0
    scene.settle("a")
    scene.now = 6.0
    scene.fill("b")
    scene.now = 8.0

    assert scene.take() == "b"
    assert (scene["b"].waiting_for, scene["b"].pending_for) == (6.0, 2.0)
    assert scene["b"].waited == 8.0


def test_a_requeued_call_keeps_the_sum_of_its_waits_and_the_last(make_scene):
    scene = make_scene(depth=1)
    scene.enter("a")
    scene.now = 2.0
    scene.take()
    scene.now = 10.0
    scene.requeue_lost("a")
    scene.now = 13.0

    assert scene.take() == "a"
    assert scene["a"].last_wait == 3.0
    assert scene["a"].waited == 5.0


# Memory


def test_a_paused_queue_that_is_fed_and_cancelled_for_ever_stays_small(make_scene):
    scene = make_scene(depth=10)
    scene.queue.pause()
    scene.enter("keep")
    longest = 0

    for _ in range(1000):
        scene.enter("a")
        scene.cancel("a")
        longest = max(longest, scene.queue.stored()[0])

    assert longest < 50
    assert scene.pending == "keep"


def test_a_full_queue_whose_waiters_give_up_for_ever_stays_small(make_scene):
    scene = make_scene(depth=0)
    scene.start("a")
    scene.enter("keep")
    longest = 0

    for _ in range(1000):
        scene.enter("b")
        scene.cancel("b")
        longest = max(longest, scene.queue.stored()[2])

    assert longest < 50
    assert scene.waiting == "keep"
