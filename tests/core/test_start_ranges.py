"""Start ranges: the rules played forward, with what was learned."""

from __future__ import annotations

from random import Random

import pytest

from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Caps, Conditions, Ledger
from penstock.core.jobs.explain import due_between
from penstock.core.jobs.learning import Distribution, Sketch, Stretch
from penstock.core.jobs.ordering import Ordering, QueuedJob, order_key
from penstock.core.jobs.start_ranges import (
    ArrivalStream,
    HostNow,
    RunNow,
    StartRange,
    World,
    start_ranges,
)
from penstock.core.jobs.types import MINUTE, SECOND

T0 = 1_900_000_000 * SECOND
ORDERING = Ordering()
MAIL, SCAN = AdmissionClass("mail", "send", 10), AdmissionClass("scan", "page", 10)


def lasting(*durations_sec, times=200):
    """A type that was seen often enough to be known well."""
    sketch = Sketch()
    for number in range(times):
        sketch.observe(round(durations_sec[number % len(durations_sec)] * SECOND))
    return Distribution.of(sketch.weights)


TEN = lasting(10)


def waiting(n, name="m", priority=50, since=T0):
    turn = order_key(priority, since, ORDERING.aging)
    return [QueuedJob(number, f"{name}{number}", priority, turn, 0) for number in range(n)]


def world(
    queues, *, runs=4, duration=TEN, hosts=1, capacity=40, caps=None, arrivals=(), lasted=0, durations=None
):
    """Each host runs `runs` jobs of MAIL, which began `lasted` seconds ago."""
    ledger, started = Ledger(), []
    for host in range(hosts):
        for _ in range(runs):
            ledger.take(MAIL, T0, ORDERING.sharing)
            started.append(RunNow(host, MAIL, T0 - round(lasted * SECOND), None, duration))
    return World(
        now=T0,
        hosts=[HostNow(Conditions(capacity), 10 * runs, runs) for _ in range(hosts)],
        runs=started,
        queues=queues,
        ledger=ledger,
        limits=AdmissionLimits(caps or Caps()),
        ordering=ORDERING,
        duration_of=lambda each, _: (durations or {}).get(each, duration),
        arrivals=arrivals,
    )


def seconds_of(one):
    return [(moment - T0) / SECOND for moment in (one.low_at, one.middle_at, one.high_at)]


def range_of(made, job_id, seed=1):
    return start_ranges(made, [job_id], Random(seed)).get(job_id)


def test_the_same_dice_give_the_same_range():
    made = world([(MAIL, False, waiting(10))], duration=lasting(3, 10, 30))

    assert range_of(made, "m9", seed=5) == range_of(made, "m9", seed=5)
    assert range_of(made, "m9", seed=5) != range_of(made, "m9", seed=6)


def test_known_durations_give_a_narrow_range():
    low, middle, high = seconds_of(range_of(world([(MAIL, False, waiting(9))]), "m8"))

    assert middle == pytest.approx(30, rel=0.1)  # two whole generations of four, and the third
    assert low <= middle <= high <= 1.2 * low


def test_unequal_durations_give_a_wide_one():
    low, _, high = seconds_of(
        range_of(world([(MAIL, False, waiting(3))], duration=lasting(1, 4, 16, 64)), "m2")
    )

    assert high > 2 * low


def test_little_knowledge_gives_a_wider_range_than_much():
    def width(times):
        made = world([(MAIL, False, waiting(30))], duration=lasting(5, 10, 20, times=times))
        low, _, high = seconds_of(range_of(made, "m29"))
        return (high - low) / low

    assert width(6) > 1.5 * width(300)


def test_a_range_holds_what_other_plays_find():
    made = world([(MAIL, False, waiting(8))], duration=lasting(2, 5, 10, 20, 40))
    ranges = [range_of(made, "m7", seed) for seed in range(8)]
    starts = [
        start_ranges(made, ["m7"], Random(100 + seed), may_go_on=lambda _: False)["m7"].middle_at
        for seed in range(8)
    ]

    assert all(one.covers(start) for one in ranges for start in starts)


def test_a_run_that_began_long_ago_ends_sooner_if_durations_are_known():
    soon = seconds_of(range_of(world([(MAIL, False, waiting(1))], lasted=8), "m0"))
    later = seconds_of(range_of(world([(MAIL, False, waiting(1))], lasted=0), "m0"))

    assert soon[1] == pytest.approx(2, abs=1)
    assert later[1] == pytest.approx(10, abs=1)


def test_a_run_that_outlasted_the_short_ones_is_a_long_one():
    made = world([(MAIL, False, waiting(1))], runs=1, capacity=10, duration=lasting(1, 100), lasted=50)

    assert seconds_of(range_of(made, "m0"))[0] == pytest.approx(50, abs=10)


def test_all_hosts_take_part():
    one = seconds_of(range_of(world([(MAIL, False, waiting(24))]), "m23"))
    three = seconds_of(range_of(world([(MAIL, False, waiting(24))], hosts=3), "m23"))

    assert one[1] == pytest.approx(60, rel=0.1)
    assert three[1] == pytest.approx(20, rel=0.1)


def test_a_host_without_the_label_takes_no_part():
    picky = AdmissionClass("mail", "send", 10, labels=("gpu",))
    made = world([(picky, False, waiting(1))], runs=0)

    assert range_of(made, "m0") is None


def test_caps_and_priorities_count():
    queues = [(MAIL, False, waiting(8))]
    free = seconds_of(range_of(world(queues), "m7"))
    capped = seconds_of(range_of(world(queues, caps=Caps(types={"mail/send": 2})), "m7"))
    ahead = [(MAIL, False, waiting(1)), (SCAN, False, waiting(8, "s", priority=90))]

    assert capped[1] > 1.5 * free[1]
    assert seconds_of(range_of(world(ahead), "m0"))[1] == pytest.approx(30, rel=0.1)


def test_jobs_that_will_arrive_ahead_make_the_wait_longer():
    queues = [(MAIL, False, waiting(8))]
    busy = [ArrivalStream(SCAN, 90, per_second=0.3)]
    idle = [ArrivalStream(MAIL, 50, per_second=0.3)]
    alone = range_of(world(queues), "m7")

    assert seconds_of(range_of(world(queues, arrivals=busy), "m7"))[1] > 1.5 * seconds_of(alone)[1]
    assert range_of(world(queues, arrivals=idle), "m7") == alone  # these stand behind it


def test_without_any_knowledge_there_is_no_range():
    assert range_of(world([(MAIL, False, waiting(1))], duration=None), "m0") is None


def test_a_job_that_can_start_has_no_wait():
    assert seconds_of(range_of(world([(MAIL, False, waiting(1))], runs=3), "m0")) == [0, 0, 0]


def test_work_is_bounded_by_the_stages_that_the_caller_allows():
    asked = []

    def may_go_on(played):
        asked.append(played)
        return played < 19

    start_ranges(world([(MAIL, False, waiting(2))]), ["m1"], Random(1), may_go_on=may_go_on)

    assert asked == [9, 19]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (3 * MINUTE, 7 * MINUTE, "in 3 to 7 min"),
        (40 * SECOND, 5 * MINUTE, "in 40 s to 5 min"),
        (3 * MINUTE, 3 * MINUTE + SECOND, "in about 3 min"),
        (0, 20 * SECOND, "within 20 s"),
        (0, 0, "now"),
    ],
)
def test_a_range_in_words(low, high, words):
    assert due_between(StartRange(T0 + low, T0 + low, T0 + high), T0) == words


def test_a_stretched_range_keeps_its_middle_and_does_not_begin_before_now():
    played = StartRange(T0 + 10, T0 + 20, T0 + 25)

    assert played.stretched(Stretch(0.5, 3), T0) == StartRange(T0 + 15, T0 + 20, T0 + 35)
    assert played.stretched(Stretch(8, 1), T0) == StartRange(T0, T0 + 20, T0 + 25)
