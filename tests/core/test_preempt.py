from __future__ import annotations

import pytest

from penstock.core.jobs.admission import (
    Account,
    AdmissionClass,
    AdmissionLimits,
    Caps,
    Conditions,
    FairShare,
    Ledger,
)
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.ordering import Ordering, QueuedJob
from penstock.core.jobs.preemption import (
    Act,
    Candidate,
    Cycle,
    Preemption,
    advance,
    begin,
    choose,
    still_wanted,
    wanted,
)
from penstock.core.jobs.round import Placement, ReadyQueue, RoundInputs
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import SECOND

NOW = 10_000 * SECOND
RULES = Preemption()


def admission_class(cost=10, addon="a", job_type="t"):
    return AdmissionClass(addon, job_type, cost)


def flight(name, priority, started=0, cost=10, *, ending=False, preemptible=True):
    dispatch = Dispatch(
        dispatch_id=f"{name}.1",
        job_id=name,
        addon_id="a",
        host="h",
        admission_class=admission_class(cost),
        fence=1,
        phase=DispatchPhase.ENDING if ending else DispatchPhase.LEASED,
        admitted_at=NOW,
        expires_at=NOW,
        started_at=NOW - started * SECOND,
    )
    return Candidate(priority, dispatch, preemptible)


class FixedView:
    """An admission view with given waiting and running jobs."""

    def __init__(self, waiting, running, *, capacity=90, caps=None, paused=()):
        self.now, self.ledger = NOW, Ledger()
        self.running_ = running
        for run in running:
            self.ledger.take(run.dispatch.admission_class, NOW, FairShare())
        for addon in paused:
            self.ledger.accounts[addon] = Account(paused=True)
        self.waiting = waiting
        self.inputs = RoundInputs(
            self,
            Conditions(capacity),
            AdmissionLimits(caps or Caps()),
            Ordering(),
            lambda _: Placement.LEAVE,
        )

    def ready_queues(self):
        for no, (name, priority, cost, addon) in enumerate(self.waiting):
            head = QueuedJob(no, name, priority, NOW - priority, 0)
            yield ReadyQueue(admission_class(cost, addon), False, iter([head]))

    def victim(self, preemption=RULES):
        for want in wanted(self.inputs):
            if found := choose(want, self.running_, preemption):
                return want.waiting.job_id, found.job_id
        return None


def view(priority=70, cost=10, addon="a", *, running, **more):
    return FixedView([("w", priority, cost, addon)], running, **more)


def test_the_lowest_priority_goes_and_of_these_the_latest_started():
    running = [flight("x", 40, 5), flight("y", 30, 900), flight("z", 30, 60), flight("v", 50)]

    assert view(running=running, capacity=40).victim() == ("w", "z")


@pytest.mark.parametrize(("priority", "victim"), [(69, None), (70, ("w", "x"))])
def test_only_a_priority_that_is_higher_by_the_threshold_counts(priority, victim):
    assert view(priority, running=[flight("x", 50)], capacity=10).victim() == victim


def test_nothing_is_evicted_while_there_is_room():
    assert view(running=[flight("x", 10)], capacity=20).victim() is None


def test_nothing_is_evicted_for_who_could_not_start_then():
    running = [flight("x", 10)]

    assert view(running=running, capacity=10, addon="b", paused=["b"]).victim() is None
    assert view(cost=30, running=running, capacity=20).victim() is None
    assert view(addon="b", running=running, capacity=10, caps=Caps(addons={"b": 0})).victim() is None


def test_a_slot_counts_as_much_as_room():
    assert view(running=[flight("x", 10)], caps=Caps(concurrent=1)).victim() == ("w", "x")


def test_who_frees_too_little_is_spared_for_one_that_frees_enough():
    running = [flight("small", 10, cost=5), flight("big", 40, cost=20)]

    assert view(cost=20, running=running, capacity=25).victim() == ("w", "big")


def test_room_that_comes_back_by_itself_is_waited_for():
    running = [flight("x", 10), flight("going", 90, ending=True)]

    assert view(running=running, capacity=20).victim() is None


def test_a_job_that_is_not_preemptible_is_never_a_victim():
    spared = flight("spared", 10, preemptible=False)

    assert view(100, running=[spared], capacity=10).victim() is None
    assert view(running=[spared, flight("x", 40)], capacity=20).victim() == ("w", "x")


def test_units_of_an_ending_run_are_waited_for_even_if_it_was_not_preemptible():
    running = [flight("x", 10), flight("going", 90, ending=True, preemptible=False)]

    assert view(running=running, capacity=20).victim() is None


def test_the_highest_of_those_that_wait_is_served_first():
    waiting = [("w1", 70, 10, "a"), ("w2", 90, 10, "a")]

    assert FixedView(waiting, [flight("x", 10)], capacity=10).victim() == ("w2", "x")


def test_it_can_be_switched_off():
    assert view(running=[flight("x", 10)], capacity=10).victim(Preemption(threshold=None)) is None


def go_on(cycle, seconds, *, victim_runs=True, still_wanted=True):
    return advance(
        cycle,
        victim_runs=victim_runs,
        still_wanted=still_wanted,
        now=NOW + int(seconds * SECOND),
        preemption=RULES,
    )


def test_a_victim_is_asked_twice_and_then_made_to():
    cycle = begin("x.1", "w", NOW, RULES)

    assert go_on(cycle, 59.9) == (cycle, None)
    again, act = go_on(cycle, 60)
    assert (again, act) == (Cycle("x.1", "w", 2, NOW + 120 * SECOND), Act.ASK)
    assert go_on(again, 119.9) == (again, None)
    assert go_on(again, 120) == (None, Act.FORCE)


@pytest.mark.parametrize("how", [{"victim_runs": False}, {"still_wanted": False}])
@pytest.mark.parametrize("seconds", [1, 60, 300])
def test_a_victim_that_ended_or_a_job_that_found_room_closes_the_cycle(how, seconds):
    assert go_on(begin("x.1", "w", NOW, RULES), seconds, **how) == (None, None)


def is_wanted(*, due=True, ending=(), **view_options):
    running = [flight("x", 30, cost=80), *(flight(f"e{n}", 30, cost=cost) for n, cost in enumerate(ending))]
    fixed = view(cost=60, running=running, **view_options)
    classes = [admission_class(cost) for cost in ending]
    victim = running[0].dispatch.admission_class
    return still_wanted(fixed.inputs, admission_class(60), victim, classes, due=due)


@pytest.mark.parametrize("due", [True, False])
def test_a_cycle_goes_on_while_the_job_would_start_without_the_victim(due):
    assert is_wanted(due=due)


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.parametrize("change", [{"paused": ("a",)}, {"caps": Caps(addons={"a": 0})}])
def test_a_cycle_ends_at_once_if_the_job_may_not_start_in_any_case(change, due):
    assert not is_wanted(due=due, **change)


@pytest.mark.parametrize("change", [{"capacity": 200}, {"capacity": 50}, {"ending": (70,), "capacity": 160}])
def test_units_end_a_cycle_only_when_its_next_act_is_due(change):
    """Because they come and go: there are enough now, or too few even with the victim's."""
    assert is_wanted(due=False, **change)
    assert not is_wanted(due=True, **change)
