from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.jobs.admission import Account, AdmissionClass, AdmissionLimits, Conditions, Ledger
from penstock.core.jobs.forecast import forecast, try_round
from penstock.core.jobs.ordering import Ordering, QueuedJob
from penstock.core.jobs.round import Placement, ReadyQueue, RoundInputs, RunningJob
from penstock.core.jobs.types import SECOND

NOW = 1_900_000_000 * SECOND


@dataclass
class FixedView:
    """An admission view that can be read any number of times."""

    jobs: list
    runs: list = field(default_factory=list)
    now: int = NOW
    ledger: Ledger = field(default_factory=Ledger)

    def ready_queues(self):
        for admission_class in dict.fromkeys(admission_class for admission_class, _ in self.jobs):
            yield ReadyQueue(admission_class, False, iter([w for d, w in self.jobs if d == admission_class]))

    def running(self):
        return self.runs


def job(no, cost=90, expected=None, addon="a", priority=50):
    turn = NOW - priority * 60 * SECOND
    return AdmissionClass(addon, "t", cost), QueuedJob(no, f"j{no}", priority, turn, 0, expected)


def starts(*jobs, runs=(), capacity=90):
    view = FixedView(list(jobs), list(runs))
    view.ledger.units = sum(run.cost for run in runs)
    starts_at = forecast(
        RoundInputs(view, Conditions(capacity), AdmissionLimits(), Ordering(), lambda _: Placement.RESERVE)
    )
    return {job_id: None if at is None else (at - NOW) // SECOND for job_id, at in starts_at.items()}


def test_each_starts_when_its_units_are_free():
    assert starts(job(1, expected=10), job(2, expected=5), job(3)) == {"j1": 0, "j2": 10, "j3": 15}


def test_what_fits_side_by_side_starts_side_by_side():
    assert starts(job(1, 45, 10), job(2, 45, 20), job(3, 45, 1)) == {"j1": 0, "j2": 0, "j3": 10}


def test_a_run_that_is_late_may_end_at_any_moment():
    late = RunningJob(90, NOW - 100 * SECOND, NOW - 50 * SECOND)

    assert starts(job(1), runs=[late]) == {"j1": 0}


def test_behind_a_run_whose_length_nobody_told_nothing_is_known():
    assert starts(job(1, 10), job(2), runs=[RunningJob(80, NOW, None)]) == {"j1": 0, "j2": None}


def test_nothing_slips_past_one_that_must_wait():
    assert starts(job(1, 90), job(2, 10), runs=[RunningJob(45, NOW, NOW + 30 * SECOND)]) == {
        "j1": 30,
        "j2": None,
    }


def test_what_the_machine_cannot_hold_now_has_no_moment():
    assert starts(job(1, 90), capacity=45) == {"j1": None}


def test_addons_take_turns_as_they_will():
    a, b = [job(n, 30, 10) for n in (1, 2, 3)], [job(n, 30, 10, "b") for n in (4, 5)]

    assert starts(*a, *b) == {"j1": 0, "j4": 0, "j2": 0, "j5": 10, "j3": 10}


def test_trying_leaves_no_trace():
    view = FixedView([job(1, 10), job(2, 10)], ledger=Ledger(accounts={"a": Account(average=3.0, at=NOW)}))
    verdict, after = try_round(
        RoundInputs(view, Conditions(90), AdmissionLimits(), Ordering(), lambda _: Placement.RESERVE)
    )

    assert len(verdict.picks) == 2
    assert (after.units, after.accounts["a"].units) == (20, 20)
    assert view.ledger == Ledger(accounts={"a": Account(average=3.0, at=NOW)})
