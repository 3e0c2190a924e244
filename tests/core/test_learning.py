"""What is learned about job types: quantiles that follow changes, priors, sizes, arrivals, scores."""

from __future__ import annotations

from math import exp
from random import Random
from statistics import median

import pytest

from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.learning import (
    MOST_TYPES,
    Arrivals,
    Distribution,
    Knowledge,
    ObservedJob,
    Prediction,
    Score,
    Shape,
    Sketch,
    TypeRecord,
    decode,
    encode,
    parts_of,
    type_stats,
)
from penstock.core.jobs.types import MINUTE, SECOND, EndReason

T0 = 1_900_000_000 * SECOND


def observed(duration_sec=10.0, *, addon="a", job_type="t", at=T0, end=EndReason.COMPLETED, **fields):
    return ObservedJob(
        job_id="j",
        admission_class=AdmissionClass(addon, job_type, 10),
        priority=50,
        tags=fields.pop("tags", ()),
        expected_sec=fields.pop("expected_sec", None),
        created_at=at,
        fence=1,
        started_at=at,
        ended_at=at + round(duration_sec * SECOND),
        end=end,
        **fields,
    )


def taught(*durations_sec, **fields):
    knowledge = Knowledge()
    for duration_sec in durations_sec:
        knowledge.saw_end(observed(duration_sec, **fields))
    return knowledge


def predicted(low_sec=1, middle_sec=2, high_sec=3):
    """As it was played."""
    low_at, middle_at, high_at = (T0 + round(sec * SECOND) for sec in (low_sec, middle_sec, high_sec))
    return Prediction("j", 0, "a t", T0, low_at, middle_at, high_at, low_at, high_at)


def middle_sec(distribution):
    return distribution.at(0.5) / SECOND


def test_quantiles_are_exact_to_a_few_percent():
    dice, sketch = Random(1), Sketch()
    values = [round(dice.lognormvariate(16, 1.5)) for _ in range(150)]
    for value in values:
        sketch.observe(value)

    exact = sorted(values)
    for part in (0.1, 0.5, 0.9):
        assert sketch.quantile(part) == pytest.approx(exact[int(part * len(exact))], rel=0.3)


def test_one_outlier_does_not_move_the_middle():
    sketch = Sketch()
    for value in [1_000] * 20 + [10**12]:
        sketch.observe(value)

    assert sketch.quantile(0.5) == pytest.approx(1_000, rel=0.1)


def test_a_type_that_changed_is_learned_anew():
    sketch = Sketch()
    for value in [1_000] * 500 + [50_000] * 250:
        sketch.observe(value)

    assert sketch.quantile(0.5) == pytest.approx(50_000, rel=0.1)


def test_a_sketch_stays_small_whatever_it_observes():
    dice, sketch = Random(2), Sketch()
    for _ in range(5_000):
        sketch.observe(round(10 ** dice.uniform(0, 14)))

    assert len(sketch.weights) < 400
    assert sketch.weight < 300
    assert len(encode(TypeRecord(durations=sketch))) < 10_000


def test_sketches_add_up():
    one, two = Sketch(), Sketch()
    for _ in range(10):
        one.observe(100)
        two.observe(10_000)
    one.add(two)

    assert one.count == 20
    assert one.quantile(0.25) == pytest.approx(100, rel=0.1)
    assert one.quantile(0.75) == pytest.approx(10_000, rel=0.1)


def test_a_record_survives_its_journey_through_the_store():
    knowledge = taught(3, 4, 5, expected_sec=2.0, spent=500_000)
    knowledge.saw_arrival(observed())
    record = knowledge.records["a t"]
    record.score.observe(predicted(), T0 + 3 * SECOND)

    again = decode(encode(record))
    assert again.durations.count == 3
    assert again.durations.weights == pytest.approx(record.durations.weights, abs=1e-3)
    assert again.arrivals.shapes == record.arrivals.shapes
    assert type_stats("a t", again, T0).coverage == 1.0
    assert decode("{}") == TypeRecord()
    assert decode("[1]") is None


def test_a_run_that_had_lasted_long_lasts_longer():
    distribution = Distribution.of(_sketch(5, 10, 20, 40, 80).weights)
    rests = [distribution.beyond(30 * SECOND, part / 10) for part in range(10)]

    assert all(30 * SECOND <= rest for rest in rests)
    assert rests == sorted(rests)


def _sketch(*durations_sec):
    sketch = Sketch()
    for each in durations_sec:
        sketch.observe(round(each * SECOND))
    return sketch


def test_an_expected_duration_is_a_prior_and_not_the_truth():
    unknown = Knowledge().durations("a t", expected_sec=10)
    known = taught(*[40.0] * 30, expected_sec=10.0).durations("a t", expected_sec=10)

    assert middle_sec(unknown) == pytest.approx(10, rel=0.2)
    assert middle_sec(known) == pytest.approx(40, rel=0.2)


def test_exact_expectations_make_a_narrow_range():
    dice, knowledge = Random(3), Knowledge()
    for _ in range(100):
        duration = dice.uniform(1, 1_000)
        knowledge.saw_end(observed(duration, expected_sec=duration))
    distribution = knowledge.durations("a t", expected_sec=60)

    assert distribution.at(0.1) == pytest.approx(60 * SECOND, rel=0.15)
    assert distribution.at(0.9) == pytest.approx(60 * SECOND, rel=0.15)


def test_expectations_that_mislead_are_left_aside():
    dice, knowledge = Random(4), Knowledge()
    for _ in range(100):
        knowledge.saw_end(observed(20, expected_sec=dice.choice([1, 30, 5_000])))

    assert middle_sec(knowledge.durations("a t", expected_sec=5_000)) == pytest.approx(20, rel=0.2)


def test_sizes_are_learned_apart_and_with_their_type():
    knowledge = taught(*[2.0] * 20, tags=("size:small",))
    for _ in range(20):
        knowledge.saw_end(observed(200, tags=("size:big",)))

    assert middle_sec(knowledge.durations("a t", "small")) == pytest.approx(2, rel=0.2)
    assert middle_sec(knowledge.durations("a t", "big")) == pytest.approx(200, rel=0.2)
    assert knowledge.records["a t"].durations.count == 40
    assert middle_sec(knowledge.durations("a t", "new")) == pytest.approx(20, rel=10)
    assert knowledge.sized("a t")
    assert parts_of("a t big one") == ("a", "t", "big one")


def test_a_new_type_is_guessed_from_the_others_and_nothing_from_nothing():
    assert Knowledge().durations("a t") is None
    assert middle_sec(taught(*[7.0] * 9).durations("b new")) == pytest.approx(7, rel=0.2)


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        (EndReason.COMPLETED, True),
        (EndReason.JOB_ERROR, True),
        (EndReason.MAX_RUNTIME_EXCEEDED, True),
        (EndReason.CANCELED, False),
        (EndReason.PREEMPTION_TIMEOUT, False),
        (EndReason.LEASE_EXPIRED, False),
    ],
)
def test_a_run_that_was_cut_short_from_outside_teaches_nothing(end, counts):
    assert ("a t" in taught(5, end=end).records) is counts


def test_the_type_that_was_seen_longest_ago_is_forgotten_first():
    knowledge = Knowledge()
    for number in range(MOST_TYPES + 3):
        knowledge.saw_end(observed(1, job_type=f"t{number}", at=T0 + number * SECOND))

    assert knowledge.drop_oldest() == ["a t0", "a t1", "a t2"]
    assert len(knowledge.records) == MOST_TYPES
    assert knowledge.drop_oldest() == []


def test_the_rate_of_arrivals_follows_the_recent_past():
    arrivals, shape = Arrivals(), Shape(50, 10)
    for number in range(600):
        arrivals.observe(T0 + number * 2 * SECOND, shape)
    now = T0 + 1_200 * SECOND

    assert arrivals.per_second(now) == pytest.approx(0.5, rel=0.1)
    assert arrivals.per_second(now + 60 * MINUTE) < 0.05
    assert arrivals.burst == pytest.approx(1.0)


def test_jobs_that_come_together_are_one_burst():
    arrivals = Arrivals()
    for number in range(20):
        for _ in range(10):
            arrivals.observe(T0 + number * MINUTE, Shape(50, 10))

    assert arrivals.burst == pytest.approx(10, rel=0.05)
    assert len(arrivals.shapes) == 1


def test_arrivals_that_were_not_read_are_counted_by_those_that_were():
    arrivals = Arrivals()
    for number in range(100):
        arrivals.observe(T0 + number * 10 * SECOND, Shape(50, 10), weight=5.0)

    assert arrivals.per_second(T0 + 1_000 * SECOND) == pytest.approx(0.5, rel=0.1)


def test_a_score_counts_ranges_that_held_and_the_error():
    score = Score()
    for number in range(10):
        score.observe(predicted(5, 10, 15 if number < 8 else 11), T0 + 12 * SECOND)
    stats = type_stats("a t", TypeRecord(score=score), T0)

    assert stats.coverage == pytest.approx(0.8, abs=0.02)
    assert stats.error_sec == pytest.approx(2, rel=0.1)
    assert stats.error_share == pytest.approx(1 / 6, rel=0.1)
    assert (stats.predictions, stats.attempts, stats.duration_sec) == (10, 0, None)


def test_ranges_that_were_too_narrow_are_stretched_until_eight_of_ten_starts_lie_within():
    """The plays of this type are wrong: twice as many starts lie outside on each side as should, and far out."""
    dice, score = Random(5), Score()
    for _ in range(400):
        score.observe(predicted(90, 100, 110), T0 + round(dice.gauss(100, 20) * SECOND))
    low, high = 100 - 10 * score.stretch.early, 100 + 10 * score.stretch.late
    starts = [dice.gauss(100, 20) for _ in range(1_000)]

    assert score.coverage < 0.5
    assert 0.73 < sum(low <= start <= high for start in starts) / 1_000 < 0.85


def test_ranges_that_were_too_wide_shrink():
    score = Score()
    for number in range(400):
        score.observe(predicted(50, 100, 150), T0 + (95 + number % 11) * SECOND)

    assert max(score.stretch) < 0.6


def test_a_few_starts_of_one_busy_stretch_do_not_decide():
    score = Score()
    for _ in range(3):
        score.observe(predicted(90, 100, 110), T0 + 200 * SECOND)

    assert score.stretch.late < 1.6
    assert Score().stretch == (1.0, 1.0)


def test_a_prediction_of_an_earlier_version_is_scored_and_stretches_nothing():
    score = Score()
    score.observe(
        Prediction("j", 0, "a t", T0, T0 + SECOND, T0 + 2 * SECOND, T0 + 3 * SECOND), T0 + 9 * SECOND
    )

    assert (score.count, score.stretch) == (1, (1.0, 1.0))


@pytest.mark.parametrize("seen", [20, 60, 300])
def test_few_wide_observations_do_not_make_the_mean_too_long(seen):
    """Their tail is played, but the mean of many draws stays near the mean of the distribution they came from."""
    dice, means = Random(3), []
    for _ in range(60):
        sketch = Sketch()
        for _ in range(seen):
            sketch.observe(round(dice.lognormvariate(0, 1.0) * SECOND))
        drawn = Distribution.of(sketch.weights)
        means.append(sum(drawn.at((part + 0.5) / 2_000) for part in range(2_000)) / 2_000)

    assert median(means) / (exp(0.5) * SECOND) == pytest.approx(1.0, abs=0.12)


def test_the_first_burst_is_no_rate():
    """The time that is counted began with it, so it counts half: else a type that came twice is played too often."""
    arrivals = Arrivals()
    for at in (0, 600):
        arrivals.observe(T0 + at * SECOND, Shape(50, 10))

    assert arrivals.per_second(T0 + 600 * SECOND) * 600 == pytest.approx(1.7, abs=0.1)


def test_one_type_of_short_jobs_does_not_promise_that_a_new_type_is_short():
    other = taught(0.01, 0.01, 0.01).durations("b new")

    assert middle_sec(other) < 0.1
    assert other.at(0.9) > 30 * SECOND
    assert Knowledge().durations("b new") is None


def test_a_run_that_outlasted_all_others_may_go_on_for_long():
    known = taught(*[1.0] * 50).durations("a t")

    assert known.beyond(60 * SECOND, 0.5) == pytest.approx(120 * SECOND, rel=0.01)
    assert known.beyond(60 * SECOND, 0.9) == pytest.approx(600 * SECOND, rel=0.01)
