from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.jobs.admission import (
    EVERYTHING,
    Account,
    AdmissionClass,
    AdmissionLimits,
    Caps,
    Conditions,
    Ledger,
)
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.ordering import (
    Aging,
    Ordering,
    QueuedJob,
    effective,
    head_key,
    order_key,
    urgent_from,
)
from penstock.core.jobs.round import Placement, ReadyQueue, RoundInputs, RunningJob, run_round
from penstock.core.jobs.types import MINUTE, SECOND, AddonId, RunWhen

NOW = 1_900_000_000 * SECOND
AGING = Aging()
ORDERING = Ordering()


class ListView:
    """An admission view on plain lists. `pulled` counts the jobs that rounds have read."""

    def __init__(self, ledger=None, now=NOW):
        self.now, self.ledger = now, ledger or Ledger()
        self.waiting, self.runs, self.pulled, self.number = {}, [], 0, count(1)

    def queue(
        self,
        admission_class,
        priority=50,
        since=None,
        n=1,
        urgent=False,
        expected=None,
        passed=None,
        denied="",
    ):
        ready = self.now if since is None else since
        for _ in range(n):
            no = next(self.number)
            job = QueuedJob(
                no, f"job-{no:08}", priority, order_key(priority, ready, AGING), 0, expected, passed, denied
            )
            self.waiting.setdefault((admission_class, urgent), []).append(job)
        return self.waiting[admission_class, urgent][-1].job_id

    def ready_queues(self):
        for (admission_class, urgent), jobs in self.waiting.items():
            if jobs:
                yield ReadyQueue(
                    admission_class, urgent, self._pull(sorted(jobs, key=lambda j: (j.turn, j.no)))
                )

    def _pull(self, jobs):
        for job in jobs:
            self.pulled += 1
            yield job

    def running(self):
        return self.runs

    def round(
        self,
        capacity=90,
        offer=lambda admission_class: Placement.RESERVE,
        caps=None,
        quiet=QuietState.QUIET,
        **more,
    ):
        round_result = run_round(
            RoundInputs(self, Conditions(capacity, quiet), AdmissionLimits(caps or Caps()), ORDERING, offer),
            **more,
        )
        for pick in round_result.picks:
            for jobs in self.waiting.values():
                if pick.waiting in jobs:
                    jobs.remove(pick.waiting)
        return round_result


def ids(round_result):
    return [pick.waiting.job_id for pick in round_result.picks]


A, B, C = (AdmissionClass(AddonId(name), "t", 10) for name in "abc")


def test_ten_points_for_every_ten_minutes():
    key = order_key(20, NOW, AGING)

    assert effective(key, NOW, AGING) == 20
    assert effective(key, NOW + 10 * MINUTE, AGING) == 30


def band(turn, now, aging):
    job = QueuedJob(no=1, job_id="1", priority=50, turn=turn, fence=0)
    return -head_key(job, False, 0.0, now, aging)[0]


def test_the_lowest_job_is_in_the_top_band_after_ninety_minutes_at_most():
    key = order_key(1, NOW, AGING)

    assert band(key, NOW + 88 * MINUTE, AGING) == 8
    assert band(key, NOW + 90 * MINUTE, AGING) == band(order_key(100, NOW, AGING), NOW, AGING) == 9


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10**10)), min_size=2, max_size=2),
    st.integers(0, 10**10),
)
def test_the_order_within_an_addon_never_changes_as_time_passes(jobs, later):
    (p, s), (q, t) = jobs
    one, other = order_key(p, s, AGING), order_key(q, t, AGING)
    if one > other:
        one, other = other, one
    start = max(s, t)

    for now in (start, start + later):
        assert effective(one, now, AGING) >= effective(other, now, AGING)
        assert band(one, now, AGING) >= band(other, now, AGING)


def test_a_higher_band_goes_first_whatever_the_shares():
    view = ListView(Ledger(accounts={"b": Account(average=80.0, at=NOW)}))
    low, high = view.queue(A, priority=39), view.queue(B, priority=40)

    assert ids(view.round()) == [high, low]


def test_within_a_band_the_addon_furthest_below_its_share_goes_first():
    view = ListView(
        Ledger(accounts={"a": Account(average=8.0, at=NOW), "b": Account(average=9.0, weight=200, at=NOW)})
    )
    first, second = view.queue(A, priority=45), view.queue(B, priority=41)

    assert ids(view.round()) == [second, first]


def test_within_an_addon_higher_priority_then_first_in_first_out():
    view = ListView()
    one, two, three = view.queue(A, 41), view.queue(A, 45), view.queue(A, 41)

    assert ids(view.round()) == [two, one, three]


def test_lines_of_one_addon_mix_by_turn():
    view, other = ListView(), replace(A, job_type="other")
    one, two, three = view.queue(A), view.queue(other), view.queue(A)

    assert ids(view.round()) == [one, two, three]


def test_a_start_counts_against_every_line_of_its_addon():
    view = ListView()
    one = view.queue(A, since=NOW - 3)
    view.queue(replace(A, job_type="other"), since=NOW - 2)
    two = view.queue(B, since=NOW - 1)

    assert ids(view.round())[:2] == [one, two]


def test_ten_thousand_jobs_of_one_addon_do_not_keep_another_waiting():
    view = ListView()
    view.queue(A, since=NOW - MINUTE, n=10_000)
    lonely = view.queue(B)

    assert lonely in ids(view.round())[:2]


def test_addons_with_equal_weight_get_equal_room_within_one_round():
    view = ListView()
    for admission_class in (A, B, C):
        view.queue(admission_class, n=100)

    assert Counter(pick.admission_class.addon_id for pick in view.round().picks) == {"a": 3, "b": 3, "c": 3}


def test_weights_divide_the_room():
    view = ListView(Ledger(accounts={"a": Account(weight=200), "b": Account(weight=100)}))
    view.queue(A, n=100)
    view.queue(B, n=100)

    assert Counter(pick.admission_class.addon_id for pick in view.round().picks) == {"a": 6, "b": 3}


def test_a_job_that_does_not_fit_does_not_stop_the_ones_behind_it():
    view = ListView()
    big = view.queue(replace(A, cost_units=60), since=NOW - MINUTE)
    small = view.queue(A)
    round_result = view.round(capacity=50)

    assert ids(round_result) == [small]
    assert [w.job_id for w in round_result.passed] == [big]
    assert [(d.waiting.job_id, d.reason.code) for d in round_result.denials] == [(big, "no_room")]


def test_a_job_behind_which_nothing_started_was_not_passed_over():
    view = ListView()
    view.queue(replace(A, cost_units=60))

    assert view.round(capacity=50).passed == []


def test_a_denial_is_told_when_its_reason_changes_and_not_again():
    view = ListView()
    view.queue(replace(A, cost_units=60), denied="no_room")
    view.queue(replace(B, cost_units=60), denied="not_quiet")
    round_result = view.round(capacity=50)

    assert [d.reason.code for d in round_result.denials] == ["no_room"]
    assert len(round_result.picks) + len(round_result.refused) == 2


def waiting_long(view, cost=90):
    passed = NOW - ORDERING.patience
    return view.queue(AdmissionClass("big", "t", cost), since=NOW - MINUTE, passed=passed, denied="no_room")


def test_room_is_kept_for_a_job_that_was_passed_over_for_thirty_seconds():
    view = ListView(Ledger(units=40, running=1))
    view.runs = [RunningJob(40, NOW - MINUTE, NOW + 20 * SECOND)]
    big = waiting_long(view)
    view.queue(A, expected=21)
    short = view.queue(B, expected=20)
    round_result = view.round()

    assert ids(round_result) == [short]
    assert (round_result.kept.job_id, round_result.kept.starts_at) == (big, NOW + 20 * SECOND)
    assert [d.reason.code for d in round_result.denials] == ["room_kept"]


def test_before_thirty_seconds_no_room_is_kept():
    view = ListView(Ledger(units=40, running=1))
    view.queue(AdmissionClass("big", "t", 90), since=NOW - MINUTE, passed=NOW - ORDERING.patience + 1)
    later = view.queue(A)

    assert ids(view.round()) == [later]


def test_what_fits_beside_the_kept_job_may_start_but_only_as_much_as_that():
    view = ListView(Ledger(units=40, running=1))
    view.runs = [RunningJob(40, NOW - MINUTE, None)]
    waiting_long(view, cost=70)
    view.queue(A, n=3)

    assert len(view.round().picks) == 2


def test_only_enough_of_what_runs_is_waited_for():
    view = ListView(Ledger(units=90, running=3))
    view.runs = [
        RunningJob(30, NOW - 3, NOW + 50 * SECOND),
        RunningJob(30, NOW - 2, None),
        RunningJob(30, NOW - 1, NOW + 10 * SECOND),
    ]
    waiting_long(view, cost=60)
    round_result = view.round()

    assert round_result.kept.starts_at == NOW + 50 * SECOND


def test_a_job_that_the_present_capacity_could_not_hold_keeps_no_room():
    view = ListView()
    waiting_long(view, cost=90)
    small = view.queue(A)

    assert ids(view.round(capacity=58)) == [small]


def test_what_is_ahead_of_the_kept_job_is_not_held_back_by_it():
    view = ListView(Ledger(units=40, running=1))
    view.runs = [RunningJob(40, NOW, None)]
    waiting_long(view)
    higher = view.queue(A, priority=95)

    assert ids(view.round()) == [higher]


def test_an_urgent_job_goes_ahead_of_its_band_and_not_of_the_next():
    view = ListView()
    same = view.queue(A, priority=55, since=NOW - MINUTE)
    urgent = view.queue(B, priority=50, urgent=True)
    higher = view.queue(C, priority=60)

    assert ids(view.round()) == [higher, urgent, same]


def test_urgent_begins_early_enough_for_the_expected_duration():
    deadline = NOW + 1_000 * SECOND

    urgent = Intent(
        addon_id="a", job_type="t", deadline_at=deadline, expected_duration_sec=100, time_sensitive=True
    )
    assert urgent_from(urgent, ORDERING) == deadline - 100 * SECOND - ORDERING.slack
    assert urgent_from(replace(urgent, expected_duration_sec=None), ORDERING) == deadline - ORDERING.slack
    assert urgent_from(replace(urgent, time_sensitive=False), ORDERING) is None
    assert urgent_from(replace(urgent, deadline_at=None), ORDERING) is None


def test_what_nobody_is_here_to_fetch_is_left_in_line_untouched():
    view = ListView()
    view.queue(A)
    taken = view.queue(B)
    round_result = view.round(
        offer=lambda admission_class: Placement.LEASE if admission_class == B else Placement.LEAVE
    )

    assert ids(round_result) == [taken]
    assert round_result.denials == []


def test_a_worker_gets_no_more_than_it_asked_for():
    view = ListView()
    view.queue(A, n=9)
    view.queue(B, n=9)
    round_result = view.round(offer=lambda d: Placement.LEASE if d == A else Placement.RESERVE, most_leases=2)

    assert [p.offer for p in round_result.picks].count(Placement.LEASE) == 2


@pytest.mark.parametrize(
    "shut",
    [
        {"quiet": QuietState.PANIC},
        {"capacity": 0},
        {"caps": Caps(concurrent=0)},
    ],
)
def test_when_nothing_can_start_one_head_is_weighed_and_no_more(shut):
    view = ListView()
    for i in range(50):
        view.queue(replace(A, job_type=f"t{i}"), n=3)
    round_result = view.round(**shut)

    assert round_result.picks == []
    assert len(round_result.picks) + len(round_result.refused) == 1


def test_a_paused_addon_is_weighed_once_however_many_lines_it_has():
    view = ListView(Ledger(accounts={"a": Account(paused=True)}))
    for i in range(50):
        view.queue(replace(A, job_type=f"t{i}"))
    other = view.queue(B)
    round_result = view.round()

    assert ids(round_result) == [other]
    assert len(round_result.picks) + len(round_result.refused) == 2


def test_everything_paused():
    view = ListView(Ledger(accounts={EVERYTHING: Account(paused=True)}))
    view.queue(A)
    view.queue(B)

    assert len(view.round().refused) == 1


@pytest.mark.parametrize("depth", [10, 10_000])
def test_a_round_looks_at_heads_and_starts_and_never_at_the_depth(depth):
    view = ListView()
    view.queue(A, n=depth)
    view.queue(replace(B, run_when=RunWhen.QUIET), n=depth)
    round_result = view.round(capacity=30, quiet=QuietState.NORMAL)

    assert len(round_result.picks) == 3
    assert view.pulled == 2 + 3


JOBS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from([1, 7, 20, 45, 90]),
        st.integers(1, 100),
        st.integers(0, 7_200),
        st.booleans(),
        st.sampled_from([None, 5, 300]),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None)
@given(JOBS, st.integers(0, 90), st.integers(0, 90))
def test_the_verdict_is_that_of_weighing_every_job_one_by_one(jobs, capacity, used):
    """The slow and obvious way: look at all jobs, take the best that may start, begin again."""
    view = ListView(Ledger(units=used))
    for addon, cost, priority, age, urgent, expected in jobs:
        admission_class = AdmissionClass(
            addon, "t", cost, duration_class=0 if expected is None else expected.bit_length()
        )
        view.queue(admission_class, priority, NOW - age * SECOND, urgent=urgent, expected=expected)
    everyone = [(d, u, job) for (d, u), waiting in view.waiting.items() for job in waiting]
    round_result = view.round(capacity)

    ledger, expected_ids = Ledger(units=used), []
    while True:
        fitting = [c for c in everyone if c[0].cost_units <= capacity - ledger.units]
        if not fitting:
            break
        best = min(
            fitting,
            key=lambda c: (
                -band(c[2].turn, NOW, AGING),
                not c[1],
                ledger.share(c[0].addon_id, NOW, ORDERING.sharing),
                c[2].turn,
                c[2].no,
            ),
        )
        everyone.remove(best)
        ledger.take(best[0], NOW, ORDERING.sharing)
        expected_ids.append(best[2].job_id)

    assert ids(round_result) == expected_ids
    assert view.ledger.units <= max(capacity, used)
