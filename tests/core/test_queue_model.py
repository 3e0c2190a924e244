"""
Random schedules on the dispatch queue, beside a model of it that is written with plain lists and no thought of speed.

A schedule is a list of steps (what, a number, a number). `Comparison` carries each out on both and compares all that can be
seen. Hypothesis makes short schedules and shrinks them; seeded walks of a thousand steps go where short ones do not.
"""

from __future__ import annotations

import math
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.calls.queue import DispatchQueue
from penstock.core.calls.ticket import CancelPhase, EnterResult, Policy, QueueLimits, Stage, Ticket

SOAK = float(os.environ.get("PENSTOCK_SOAK", "1"))

# How often a random schedule takes each step.
STEPS = {
    "enter": 7, "enter run": 2, "reserve": 6, "fill": 6, "take": 6, "settle": 6, "settle stale": 3, "cancel": 3, "cancel live": 4,
    "lose": 3, "pause": 1, "resume": 2, "offer": 2, "clear": 0.2, "dispose": 0.1,
}  # fmt: skip
SCHEDULE = st.lists(
    st.tuples(
        st.sampled_from([what for what, weight in STEPS.items() for _ in range(math.ceil(weight))]),
        st.integers(0, 255),
        st.integers(0, 255),
    ),
    max_size=50,
)
LIMITS = st.builds(
    QueueLimits,
    max_in_flight=st.integers(1, 4),
    max_queue_depth=st.sampled_from([0, 1, 2, 5, math.inf]),
    policy=st.sampled_from(Policy),
    max_attempts=st.integers(1, 3),
    requeue_to_front=st.booleans(),
)


@settings(max_examples=int(400 * SOAK), deadline=None)
@given(LIMITS, st.booleans(), SCHEDULE)
def test_the_queue_does_what_the_model_does_and_everything_ends_once(limits, pumped, schedule):
    comparison = Comparison(limits, pumped=pumped)

    for what, one, two in schedule:
        comparison.step(what, one, two)

    comparison.finish()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(int(32 * SOAK)))
def test_it_does_so_for_as_long_as_one_likes(seed):
    """Now this and now that happens more often, so that long lines form, are canceled, and come back from crashes."""
    dice = random.Random(seed)
    limits = QueueLimits(
        max_in_flight=dice.choice([1, 2, 4, 8]),
        max_queue_depth=dice.choice([0, 1, 3, 10, 50, math.inf]),
        policy=Policy.BLOCK if seed % 2 else dice.choice(list(Policy)),
        max_attempts=dice.choice([1, 2, 3]),
        requeue_to_front=dice.random() < 0.7,
    )
    comparison = Comparison(limits, pumped=dice.random() < 0.5)

    for spell in range(10):
        weights = {**STEPS, "dispose": 0.05 if spell == 9 else 0}
        weights[dice.choice(["enter", "reserve", "fill", "take", "settle", "cancel live", "lose"])] *= 6
        for what in dice.choices(list(weights), list(weights.values()), k=100):
            comparison.step(what, dice.randrange(256), dice.randrange(256))

    comparison.finish()


class Comparison:
    """
    `pumped`: hand out all calls that can be handed out after every step, as the shells do. Without it the machine passes
    through states with free slots and pending calls, and must be right there too.
    """

    def __init__(self, limits, *, pumped):
        self.queue: DispatchQueue[Call] = DispatchQueue(limits)
        self.model = Model(limits)
        self.pumped = pumped
        self.now = 0.0
        self.calls = []
        self.ended = set()
        self.dispatches = {}

    def step(self, what, one, two):
        """The numbers choose: which call, which of its dispatches, how many slots, how much later."""
        before = self.model.free_places()
        self.now += one % 4
        getattr(self, what.replace(" ", "_"))(one, two)
        while self.pumped and self.take():
            pass
        self.compare()

        lifted = self.model.free_places() < min(before, 0)
        assert not lifted or what in {"lose", "pause", "offer", "dispose"}, (
            "nothing else lifts it past its bounds"
        )

    def finish(self):
        """Whatever the schedule did, nobody is left behind: let it run, and everything ends."""
        self.pumped = True
        self.step("resume", 0, 0)
        self.step("offer", 0, self.model.limits.max_in_flight)
        while not self.queue.state().idle:
            self.step("fill", 0, 0)
            self.step("settle", 0, 0)
        assert set(self.calls) <= self.ended

    # The steps

    def enter(self, one, two):
        self.come(built=True)

    def enter_run(self, one, two):
        calls = [self.make(built=True) for _ in range(two % 5)]
        entered = self.queue.enter_run(calls, self.now)
        assert entered == len(calls) or not self.queue.free_places()
        for call in calls[:entered]:
            assert EnterResult.ACCEPTED is self.model.come(call, self.now, built=True)
        self.calls += calls[:entered]

    def reserve(self, one, two):
        self.come(built=False, in_turn=one % 8 < 4)

    def make(self, *, built, in_turn=False):
        call = Call()
        call.eager, call.in_turn, call.expected = built, in_turn, ExpectedCall(self.now)
        return call

    def come(self, *, built, in_turn=False):
        call = self.make(built=built, in_turn=in_turn)
        self.calls.append(call)
        verdict = self.model.come(call, self.now, built=built)
        room = self.queue.free_places()
        assert verdict is self.queue.enter(call, self.now)
        assert (room > 0) is (
            verdict in {EnterResult.ACCEPTED, EnterResult.RESERVED} and not self.queue.evicted
        )
        if verdict in {EnterResult.REFUSED, EnterResult.CLOSED}:
            self.end(call)

    def fill(self, one, two):
        call = pick(self.model.reserved, one) or pick(self.calls, two)
        if call is not None:
            gone = call.expected.stage is Stage.RESERVED and self.model.disposed
            assert self.model.fill(call, self.now) is self.queue.fill(call, self.now)
            if gone:
                self.end(call)

    def take(self, one=0, two=0):
        call = self.model.take(self.now)
        assert call is self.queue.take(self.now)
        if call is not None:
            assert call.dispatch not in self.dispatches, "a dispatch id is never used again"
            self.dispatches[call.dispatch] = call
        return call

    def settle(self, one, two):
        """One that is in flight, or whose caller was released while it was."""
        call = pick(self.model.in_flight(), one)
        if call is not None:
            self.settle_as(call, call.expected.dispatch)

    def settle_stale(self, one, two):
        """The completion of an attempt that was lost, or of one that ended before; or a number of somebody else's."""
        call = pick(self.calls, one)
        if call is not None:
            mine = [dispatch for dispatch, other in self.dispatches.items() if other is call]
            dispatch = pick(mine, two // 2) if two % 2 else two
            if dispatch is not None and (dispatch, call.expected.stage) != (
                call.expected.dispatch,
                Stage.IN_FLIGHT,
            ):
                self.settle_as(call, dispatch)

    def settle_as(self, call, dispatch):
        counts = self.model.settle(call, dispatch, self.now)
        assert counts is self.queue.settle(call, dispatch, self.now)
        if counts:
            self.end(call)

    def cancel(self, one, two):
        self.cancel_one(pick(self.calls, one))

    def cancel_live(self, one, two):
        model = self.model
        self.cancel_one(pick([*model.waiting, *model.reserved, *model.pending, *model.running], one))

    def cancel_one(self, call):
        if call is None:
            return
        phase = self.model.cancel(call, self.now)
        assert phase is self.queue.cancel(call, self.now)
        if phase is not None:
            self.end(call)
        # Those that are marked and still stand in line are never many: to feed and cancel for ever takes no memory.
        if phase is CancelPhase.QUEUED:
            entered = sum(call.eager for call in self.model.granted)
            assert self.queue.stored()[0] <= 2 * len(self.model.pending) + 32 + entered
        if phase is CancelPhase.WAITING:
            assert self.queue.stored()[2] <= 2 * len(self.model.waiting) + 32

    def lose(self, one, two):
        """What one worker had, in any order; it died of the first, or of no call of ours. Some have ended before."""
        had = [call for place, call in enumerate(self.model.in_flight()) if one >> place & 1]
        blame = had[:1] if two % 3 else []
        other = pick(self.calls, two)
        if other is not None and other not in had:
            had.append(other)
        random.Random(two).shuffle(had)
        failed = self.model.requeue_lost(had, self.now, blame)
        assert failed == self.queue.requeue_lost(iter(had), self.now, blame=iter(blame))
        self.end(*failed)

    def pause(self, one, two):
        self.model.paused = True
        self.queue.pause()

    def resume(self, one, two):
        self.model.paused = False
        self.model.grant(self.now)
        self.queue.resume(self.now)

    def offer(self, one, two):
        self.model.slots = two % (self.model.limits.max_in_flight + 2)
        self.model.grant(self.now)
        self.queue.set_slots(self.model.slots, self.now)

    def clear(self, one, two):
        ended = self.model.clear()
        assert ended == self.queue.clear()
        self.end(*ended)

    def dispose(self, one, two):
        self.model.disposed = True
        ended = self.model.clear()
        assert ended == self.queue.dispose()
        self.end(*ended)

    # What must be true after each of them

    def compare(self):
        queue, model, state = self.queue, self.model, self.queue.state()
        assert model.waiting == list(queue.waiters())
        assert model.pending == list(queue)
        assert (len(model.waiting), len(model.reserved)) == (state.waiting, state.reserved)
        assert (len(model.pending), len(model.in_flight())) == (state.pending, state.in_flight)
        assert (model.paused, model.disposed, model.limit()) == (state.paused, state.disposed, queue.limit)
        assert state.idle is not any((state.waiting, state.reserved, state.pending, state.in_flight))
        assert model.granted == queue.granted, "one room, one wake-up, first come first served"
        assert model.evicted == queue.evicted
        self.end(*queue.evicted)
        for collected in (model.granted, model.evicted, queue.granted, queue.evicted):
            collected.clear()
        for call in self.calls:
            compare_call(call)
        self.check_bounds(state)
        self.forget()

    def check_bounds(self, state):
        limits = self.model.limits
        free = max(0, self.queue.limit - state.in_flight)
        bound = limits.max_queue_depth + free
        room = state.pending + state.reserved < bound and not self.model.building()
        assert not (state.waiting and room), "somebody waits and there is room"
        assert (
            state.pending + state.reserved + state.in_flight <= limits.max_queue_depth + limits.max_in_flight
        )
        assert not (self.pumped and free and state.pending)
        assert self.queue.stored()[1] <= limits.max_in_flight

    def end(self, *calls):
        for call in calls:
            assert call not in self.ended, "a call ends once"
            self.ended.add(call)

    def forget(self):
        """So that a long walk stays fast. A few that have ended stay, for late completions and cancels."""
        if len(self.calls) > 60:
            gone = {call for call in self.calls[:-10] if call.expected.stage in {Stage.SETTLED, Stage.NEW}}
            assert gone <= self.ended
            self.calls = [call for call in self.calls if call not in gone]


def compare_call(call):
    expected = call.expected
    assert expected.stage is call.stage
    assert (expected.dispatch, expected.attempt, expected.crashes) == (
        call.dispatch,
        call.attempt,
        call.crashes,
    )
    if expected.waits:
        assert expected.waits[-1] == call.last_wait
        assert sum(expected.waits) == call.waited == call.waiting_for + call.pending_for
        assert expected.waiting_for == call.waiting_for


def pick(some, number):
    return some[number % len(some)] if some else None


class Model:
    """Every list is in the order in which its calls come out."""

    def __init__(self, limits):
        self.limits = limits
        self.slots = limits.max_in_flight
        self.paused = self.disposed = False
        self.waiting, self.reserved, self.pending, self.running, self.ending = [], [], [], [], []
        self.granted, self.evicted = [], []
        self.turn = None  # the last waiter whose turn it was
        self.accepted = self.dispatched = 0

    def in_flight(self):
        return [*self.running, *self.ending]

    def limit(self):
        return 0 if self.paused or self.disposed else min(self.slots, self.limits.max_in_flight)

    def free_places(self):
        """Less than none after a crash, or if slots are gone that were promised."""
        free = max(0, self.limit() - len(self.in_flight()))
        return self.limits.max_queue_depth + free - len(self.pending) - len(self.reserved)

    def building(self):
        """Whether a call has its place after waiting for it, and those behind it wait for its payload."""
        return self.turn is not None and self.turn.expected.stage is Stage.RESERVED

    def put(self, call, stage):
        """Out of the list where it is, to the end of the one where it belongs."""
        lists = {
            Stage.WAITING: self.waiting,
            Stage.RESERVED: self.reserved,
            Stage.PENDING: self.pending,
            Stage.IN_FLIGHT: self.running,
            Stage.ENDING: self.ending,
        }
        if call.expected.stage in lists:
            lists[call.expected.stage].remove(call)
        if stage in lists:
            lists[stage].append(call)
        call.expected.stage = stage

    def come(self, call, now, *, built):
        if self.disposed:
            return EnterResult.CLOSED
        if self.free_places() <= 0 or self.waiting or self.building():
            if self.limits.policy is Policy.BLOCK:
                self.put(call, Stage.WAITING)
                return EnterResult.WAIT
            if self.limits.policy is not Policy.DROP_OLDEST or not (
                self.pending and self.limits.max_queue_depth
            ):
                return EnterResult.REFUSED
            self.evicted.append(self.pending[0])
            self.put(self.pending[0], Stage.SETTLED)
        if built:
            self.accept(call, now)
            return EnterResult.ACCEPTED
        self.put(call, Stage.RESERVED)
        return EnterResult.RESERVED

    def accept(self, call, now):
        self.put(call, Stage.PENDING)
        self.accepted += 1
        call.expected.accepted, call.expected.since, call.expected.waiting_for = (
            self.accepted,
            now,
            now - call.expected.called_at,
        )

    def fill(self, call, now):
        if call.expected.stage is not Stage.RESERVED:
            return False
        if self.disposed:
            self.put(call, Stage.SETTLED)
            return False
        self.accept(call, now)
        self.grant(now)
        return True

    def take(self, now):
        if not self.pending or len(self.in_flight()) >= self.limit():
            return None
        call, expected = self.pending[0], self.pending[0].expected
        self.put(call, Stage.IN_FLIGHT)
        self.dispatched += 1
        expected.dispatch = self.dispatched
        expected.attempt += 1
        expected.waits.append(now - (expected.since if expected.attempt > 1 else expected.called_at))
        return call

    def settle(self, call, dispatch, now):
        stage = call.expected.stage
        if call.expected.dispatch != dispatch or stage not in {Stage.IN_FLIGHT, Stage.ENDING}:
            return False
        self.put(call, Stage.SETTLED)
        self.grant(now)
        return stage is Stage.IN_FLIGHT

    def cancel(self, call, now):
        stage = call.expected.stage
        if stage in {Stage.NEW, Stage.ENDING, Stage.SETTLED}:
            return None
        self.put(call, Stage.ENDING if stage is Stage.IN_FLIGHT else Stage.SETTLED)
        self.grant(now)
        phases = {Stage.PENDING: CancelPhase.QUEUED, Stage.IN_FLIGHT: CancelPhase.IN_FLIGHT}
        return phases.get(stage, CancelPhase.WAITING)

    def requeue_lost(self, calls, now, blame):
        for call in blame:
            call.expected.crashes += 1
        failed: list[Call] = []
        back: list[Call] = []
        for call in calls:
            if call.expected.stage is Stage.ENDING:
                self.put(call, Stage.SETTLED)
            elif call.expected.stage is Stage.IN_FLIGHT:
                hopeless = self.disposed or call.expected.crashes >= self.limits.max_attempts
                (failed if hopeless else back).append(call)
        for call in failed:
            self.put(call, Stage.SETTLED)
        for call in sorted(back, key=lambda call: call.expected.accepted):
            self.put(call, Stage.PENDING)
            call.expected.since = now
            if not self.limits.requeue_to_front:
                self.accepted += 1
                call.expected.accepted = self.accepted
        # Who was handed out had come before all who were not: with them back, it is as if they had never left.
        self.pending.sort(key=lambda call: call.expected.accepted)
        self.grant(now)
        return failed

    def clear(self):
        ended = [*self.pending, *self.waiting]
        for call in ended:
            self.put(call, Stage.SETTLED)
        return ended

    def grant(self, now):
        while self.waiting and self.free_places() > 0 and not self.building():
            call = self.waiting[0]
            if call.eager:
                self.accept(call, now)
            else:
                self.put(call, Stage.RESERVED)
                self.turn = call if call.in_turn else self.turn
            self.granted.append(call)


class ExpectedCall:
    """The state of one call in the model."""

    def __init__(self, called_at):
        self.called_at = called_at
        self.stage = Stage.NEW
        self.accepted = self.dispatch = self.attempt = self.crashes = 0
        self.since = self.waiting_for = 0.0
        self.waits = []


class Call(Ticket):
    expected: ExpectedCall
