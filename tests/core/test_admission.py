from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from penstock.core.jobs.admission import (
    EVERYTHING,
    Account,
    AdmissionClass,
    AdmissionLimits,
    Budget,
    Caps,
    Conditions,
    FairShare,
    Gates,
    Kept,
    Ledger,
)
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.reason_base import SHORT, Hides
from penstock.core.jobs.reasons import (
    REASONS,
    BudgetSpent,
    CapReached,
    Draining,
    LabelMissing,
    NotEnoughUnits,
    NotQuiet,
    NotQuietLongEnough,
    NotReady,
    Paused,
    QueuedAhead,
    UnitsKept,
    WaitsForParents,
    from_json,
    retry_after_sec,
    words,
)
from penstock.core.jobs.refusals import all_refusals
from penstock.core.jobs.round import Placement, RoundInputs
from penstock.core.jobs.types import SECOND, AddonId, Constraint, JobId, RunWhen
from penstock.core.jobs.worker_reasons import (
    AwaitsWorker,
    NoFunction,
    NotDispatched,
    NoWorkerSeen,
    RunnerDisabled,
    WorkerElsewhere,
    WorkerGone,
    WorkersFull,
)

NOW = 1_900_000_000 * SECOND
JOB = AdmissionClass(AddonId("a"), "index", 10)
CALM = Conditions(capacity=90)
Q = QuietState


def decide(*given, kept=None, ends_at=None, **more):
    return Gates(*given, **more).refusal(kept, ends_at)


def code(admission_class=JOB, ledger=None, conditions=CALM, limits=None, **more):
    reason = decide(admission_class, ledger or Ledger(), conditions, limits or AdmissionLimits(), NOW, **more)
    return "admitted" if reason is None else reason.code


def held(*demands):
    ledger = Ledger()
    for admission_class in demands:
        ledger.take(admission_class, NOW, FairShare())
    return ledger


def test_a_job_starts_only_if_its_cost_fits():
    assert code(replace(JOB, cost_units=90)) == "admitted"
    assert code(replace(JOB, cost_units=81), held(JOB)) == "no_room"
    assert code(replace(JOB, cost_units=80), held(JOB)) == "admitted"


def test_a_job_starts_only_where_everything_is_that_it_asks_for():
    asks = replace(JOB, labels=("gpu", "large"))

    assert "label_missing" == code(asks) == code(asks, conditions=replace(CALM, labels=frozenset({"gpu"})))
    assert "admitted" == code(asks, conditions=replace(CALM, labels=frozenset({"gpu", "large", "arm"})))
    assert "admitted" == code(JOB, conditions=replace(CALM, labels=frozenset({"gpu"})))


def test_capacity_that_fell_below_what_runs_admits_nothing_and_shows_no_negative_room():
    reason = decide(JOB, held(JOB, JOB, JOB), Conditions(capacity=20), AdmissionLimits(), NOW)

    assert reason.free == 0


# SPEC AD-4
@pytest.mark.parametrize(
    ("run_when", "high", "worst"),
    [
        (RunWhen.ANY, False, Q.BUSY),
        (RunWhen.NORMAL, False, Q.NORMAL),
        (RunWhen.NORMAL, True, Q.BUSY),
        (RunWhen.QUIET, False, Q.QUIET),
        (RunWhen.QUIET, True, Q.QUIET),
    ],
)
def test_run_when_says_how_busy_the_machine_may_be(run_when, high, worst):
    admission_class = replace(JOB, run_when=run_when, high=high)
    states = [state for state in Q if code(admission_class, conditions=Conditions(90, state)) == "admitted"]

    assert states == list(Q)[: list(Q).index(worst) + 1]


def test_panic_admits_nothing_new():
    for run_when in RunWhen:
        admission_class = replace(JOB, run_when=run_when, high=True)
        assert code(admission_class, conditions=Conditions(90, Q.PANIC), urgent=True) == "not_quiet"


def test_near_its_deadline_a_job_may_start_on_a_busy_machine_but_never_over_capacity():
    busy = Conditions(capacity=22, quiet=Q.BUSY)

    assert code(conditions=busy) == "not_quiet"
    assert code(conditions=busy, urgent=True) == "admitted"
    assert code(replace(JOB, cost_units=23), conditions=busy, urgent=True) == "no_room"


def test_quiet_for_waits_for_a_streak():
    overnight = replace(JOB, run_when=RunWhen.QUIET, quiet_for_sec=600)

    assert code(overnight, conditions=Conditions(90, streak=599 * SECOND)) == "not_quiet_long_enough"
    assert code(overnight, conditions=Conditions(90, streak=600 * SECOND)) == "admitted"


@pytest.mark.parametrize(
    ("caps", "scope"),
    [
        (Caps(concurrent=1), "concurrent"),
        (Caps(per_addon=1), "addon"),
        (Caps(per_addon=9, addons={"a": 1}), "addon"),
        (Caps(per_type=1), "type"),
        (Caps(types={"index": 1}), "type"),
        (Caps(types={"a/index": 1, "index": 9}), "type"),
        (Caps(constraints={"disk_write_heavy": 1}), "constraint"),
    ],
)
def test_each_cap_holds_at_its_number_and_not_below(caps, scope):
    disk = replace(JOB, constraints=Constraint.DISK_WRITE_HEAVY | Constraint.CPU_HEAVY)
    reason = decide(disk, held(disk), CALM, AdmissionLimits(caps), NOW)

    assert code(disk, Ledger(), limits=AdmissionLimits(caps)) == "admitted"
    assert reason.scope == scope


def test_the_cap_of_one_addon_type_or_constraint_is_not_anothers():
    caps = Caps(per_addon=1, per_type=1, constraints={"disk_write_heavy": 1})
    other = AdmissionClass("b", "index", 10, Constraint.CPU_HEAVY)

    assert (
        code(other, held(replace(JOB, constraints=Constraint.DISK_WRITE_HEAVY)), limits=AdmissionLimits(caps))
        == "admitted"
    )


def test_a_spent_budget_closes_until_its_window_is_over():
    limits = AdmissionLimits(budgets={"a": Budget(day=5_000_000)})
    ledger = Ledger(spent={"a": {"day": 5_000_000}})
    reason = decide(JOB, ledger, CALM, limits, NOW)

    assert reason.code == "budget_spent"
    assert NOW < reason.until <= NOW + 86_400 * SECOND
    assert code(replace(JOB, addon_id="b"), ledger, limits=limits) == "admitted"


@pytest.mark.parametrize("scope", ["a", EVERYTHING])
def test_what_is_paused_waits(scope):
    assert code(ledger=Ledger(accounts={scope: Account(paused=True)})) == "paused"


def test_not_its_time_and_draining():
    assert code(ready_at=NOW + 1) == "not_ready"
    assert code(conditions=replace(CALM, draining=True)) == "draining"


def test_kept_room_lets_past_only_what_ends_in_time_or_fits_beside():
    kept = Kept("big", 90, NOW + 60 * SECOND, spare=5)

    assert code(kept=kept) == "room_kept"
    assert code(kept=kept, ends_at=NOW + 61 * SECOND) == "room_kept"
    assert code(kept=kept, ends_at=NOW + 60 * SECOND) == "admitted"
    assert code(replace(JOB, cost_units=5), kept=kept) == "admitted"


def test_no_room_means_that_nothing_else_is_in_the_way():
    full = Conditions(capacity=0, quiet=Q.BUSY)

    assert code(conditions=full) == "not_quiet"
    assert (
        code(conditions=Conditions(capacity=0), limits=AdmissionLimits(Caps(concurrent=0))) == "cap_reached"
    )


DEMANDS = st.builds(
    AdmissionClass,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["x", "y"]),
    st.integers(1, 100),
    st.integers(0, 7).map(Constraint),
    st.sampled_from(RunWhen),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 4),
)
CAPS = st.builds(
    Caps,
    concurrent=st.none() | st.integers(0, 4),
    per_addon=st.none() | st.integers(0, 3),
    per_type=st.none() | st.integers(0, 3),
    constraints=st.dictionaries(st.sampled_from(["cpu_heavy", "network_heavy"]), st.integers(0, 2)),
)


@settings(deadline=None)
@given(st.lists(DEMANDS, max_size=30), CAPS, st.integers(0, 100), st.sampled_from(Q), st.booleans())
def test_whatever_comes_capacity_and_caps_hold_and_every_refusal_explains_itself(
    asks, caps, capacity, quiet, urgent
):
    ledger, conditions = Ledger(), Conditions(capacity, quiet, streak=2 * SECOND)
    for admission_class in asks:
        reason = decide(admission_class, ledger, conditions, AdmissionLimits(caps), NOW, urgent=urgent)
        if reason is None:
            ledger.take(admission_class, NOW, FairShare())
        else:
            assert retry_after_sec(reason, NOW) >= 1
            assert words(reason, NOW)
            assert from_json(reason.code, asdict(reason)) == reason

    assert ledger.units <= capacity
    assert caps.concurrent is None or ledger.running <= caps.concurrent
    for (scope, name), count in ledger.counts.items():
        limit = caps.limit(scope, name)
        assert limit is None or count <= limit


@settings(deadline=None)
@example(JOB, [JOB], Caps(per_type=3), 90, Q.QUIET)
@example(JOB, [], Caps(concurrent=2), 90, Q.QUIET)
@example(JOB, [JOB], Caps(), 90, Q.QUIET)
@given(DEMANDS, st.lists(DEMANDS, max_size=10), CAPS, st.integers(0, 100), st.sampled_from(Q))
def test_there_is_room_for_as_many_as_would_start_one_by_one(admission_class, before, caps, capacity, quiet):
    ledger, conditions = held(*before), Conditions(capacity, quiet, streak=2 * SECOND)
    gates = Gates(admission_class, ledger, conditions, AdmissionLimits(caps), NOW)
    room, started = gates.room_for(), 0
    while gates.refusal() is None:
        ledger.take(admission_class, NOW, FairShare())
        started += 1

    assert room == started


EXAMPLES = [
    WaitsForParents((JobId("job-00000017"), None), ("ok", "done"), ("FAILED", "RUNNING"), 4),
    Draining(),
    LabelMissing(("gpu",)),
    LabelMissing(("gpu", "large"), ("render-1",)),
    Paused("a"),
    Paused("*"),
    NotReady(NOW + 90 * SECOND),
    NotQuiet(Q.BUSY, Q.QUIET, 6.2, "cpu"),
    NotQuietLongEnough(12.0, 600),
    CapReached("concurrent", "", 4),
    CapReached("constraint", "disk_write_heavy", 1),
    BudgetSpent("day", 5_100_000, 5_000_000, NOW + 3_600 * SECOND),
    NotEnoughUnits(8, 5, 90),
    NotEnoughUnits(8, 5, 90, NOW + 7 * SECOND),
    UnitsKept(JobId("job-00000017"), 90, NOW - SECOND),
    QueuedAhead(JobId("job-00000017"), 50),
    AwaitsWorker(NOW - 12 * SECOND),
    WorkerElsewhere(("render-1", "r" * 64), 1),
    WorkersFull("w1", 4),
    WorkersFull("runner", 64),
    NoWorkerSeen("thumnail", ("resize", "thumbnail"), NOW - 5 * SECOND),
    NoWorkerSeen("t" * 128),
    NoWorkerSeen("resize", ("resize", "resized")),
    WorkerGone(NOW - 300 * SECOND, 2),
    WorkerGone(None),
    RunnerDisabled("local"),
    NotDispatched("jobs.db"),
    NoFunction("thumnail", ("thumbnail",)),
    CapReached("type", "a" * 128 + "/" + "t" * 128, 1),
    LabelMissing(("l" * 64,) * 16),
]


def test_every_reason_has_an_example_here():
    assert {type(example) for example in EXAMPLES} == set(REASONS.values())


@pytest.mark.parametrize("reason", EXAMPLES, ids=lambda reason: reason.code)
def test_every_reason_has_words_a_hint_and_survives_being_recorded(reason):
    recorded = json.loads(json.dumps(asdict(reason)))

    assert from_json(reason.code, recorded | {"added_later": 1}) == reason
    assert retry_after_sec(reason, NOW) >= 1
    assert words(reason, NOW) == words(from_json(reason.code, recorded), NOW)
    assert reason.waited
    assert reason.next_step()
    assert reason.way_out("00000017")
    assert 0 < len(reason.short(NOW)) <= SHORT
    assert not reason.short(NOW).endswith(".") or reason.short(NOW).endswith("...")


def test_a_short_clause_names_no_other_job_and_no_signal_of_another_addon():
    for reason in EXAMPLES:
        assert "00000017" not in reason.short(NOW)
    assert "shop" not in NotQuiet(Q.BUSY, Q.NORMAL, 6.2, "p95_ms of shop").short(NOW)


def test_a_reason_with_a_name_of_others_takes_it_out():
    """A field that names a job, a worker or a source needs `hidden`."""
    hides = Hides(AddonId("a"), lambda job_id: None, lambda by: "another")
    named = {"job_id", "kept_for", "worker", "by"}
    for reason in EXAMPLES:
        for name in named & set(reason.__struct_fields__):
            if getattr(reason, name) != "runner":
                assert getattr(reason.hidden(hides), name) != getattr(reason, name), (reason, name)


@settings(deadline=None)
@given(DEMANDS, st.lists(DEMANDS, max_size=10), CAPS, st.integers(0, 100), st.sampled_from(Q), st.booleans())
def test_the_first_of_all_refusals_is_the_one_that_a_round_records(
    admission_class, before, caps, capacity, quiet, draining
):
    view = SimpleNamespace(now=NOW, ledger=held(*before))
    conditions = Conditions(capacity, quiet, streak=2 * SECOND, draining=draining)
    inputs = RoundInputs(view, conditions, AdmissionLimits(caps), Ordering(), lambda _: Placement.LEAVE)
    ledger = replace(view.ledger, counts=dict(view.ledger.counts))
    refusals = all_refusals(inputs, admission_class, ready_at=NOW + SECOND * draining)
    first = inputs.gates(admission_class, ready_at=NOW + SECOND * draining).refusal()

    assert first == next(iter(refusals), None)
    assert len(set(map(repr, refusals))) == len(refusals)
    assert view.ledger == ledger
    if draining:
        assert {"draining", "not_ready"} <= {reason.code for reason in refusals}


def test_the_words_name_the_numbers():
    assert (
        words(NotEnoughUnits(8, 5, 90, NOW + 7 * SECOND), NOW)
        == "It needs 8 units; 5 of 90 are free, and enough are expected in 7 s."
    )
    assert words(LabelMissing(("a", "b")), NOW) == "No running host has the labels a and b."
    assert "4 slots" in words(CapReached("concurrent", "", 4), NOW)
    assert "in about 2 h" in words(NotReady(NOW + 7_500 * SECOND), NOW)


def test_a_type_that_only_other_addons_have_workers_for_is_not_called_unknown():
    reason = NoWorkerSeen("resize", ("resize", "resized"))

    assert reason.words(NOW) == (
        "No worker for type 'resize' of this addon has been seen; "
        "the workers for this type ask for jobs of other addons."
    )
    assert reason.short(NOW) == "no worker for type resize of its addon has been seen"
    assert reason.nearest == ""
