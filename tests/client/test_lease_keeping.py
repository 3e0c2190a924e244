"""Heart, holds and tenure on a clock of our own: when a lease is renewed, and when a worker lets go of it by itself."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

from penstock.client import leases as holds_module
from penstock.client.leases import ActiveLease, ActiveLeases, Heartbeater, LeaseTimer
from penstock.core.errors import JobStopped, StaleDispatch, Unreachable
from penstock.core.jobs.types import EndReason
from penstock.wire import HeartbeatAnswer
from penstock.work.context import JobContext, JobFacts

TTL = 30.0


class Scheduler:
    """Answers heartbeats as it is told to, `delay` seconds late, on the clock of the test."""

    def __init__(self):
        self.now, self.delay, self.answers, self.beats = 1_000.0, 0.0, [], []
        self.pids = []

    def clock(self):
        return self.now

    def heartbeat(self, lease_id, *, progress=None, spent=None, checkpoint=None, pid=None, timeout=None):
        self.pids.append(pid)
        self.beats.append((self.now, lease_id, progress, spent, checkpoint))
        self.now += self.delay
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        return HeartbeatAnswer(
            lease_id=lease_id, expires_at=datetime(2026, 1, 1, tzinfo=UTC), ttl_sec=TTL, **answer
        )


@pytest.fixture
def scheduler(monkeypatch):
    scheduler = Scheduler()
    monkeypatch.setattr(holds_module, "monotonic", scheduler.clock)
    return scheduler


@pytest.fixture
def leases():
    return ActiveLeases()


@pytest.fixture
def heartbeater(scheduler, leases):
    return Heartbeater(scheduler, leases, scheduler.clock)


def hold_of(heartbeater, leases, scheduler, name="j.1"):
    facts = JobFacts(name.partition(".")[0], "thumb", name, 1, payload='{"path": "a"}')
    lease = ActiveLease(facts, LeaseTimer(scheduler.now, TTL), heartbeater.beat_now, None)
    leases.add(lease)
    return lease


def live_until(heartbeater, scheduler, moment):
    while scheduler.now < moment:
        scheduler.now = min(moment, heartbeater.step(scheduler.now))


LOST = Unreachable("away", sent=True)


def test_the_process_of_a_job_is_told_once_and_not_for_short_jobs(heartbeater, leases, scheduler):
    hold_of(heartbeater, leases, scheduler)
    live_until(heartbeater, scheduler, 1_000.9)
    early = list(scheduler.pids)
    live_until(heartbeater, scheduler, 1_060.0)

    assert early == []
    assert scheduler.pids[0] == os.getpid()
    assert set(scheduler.pids[1:]) == {None}


def test_a_lease_is_renewed_long_before_it_is_at_risk(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)

    live_until(heartbeater, scheduler, 1_600.0)

    assert not lease.canceled
    gaps = [b[0] - a[0] for a, b in zip(scheduler.beats, scheduler.beats[1:], strict=False)]
    assert 60 <= len(scheduler.beats) <= 80
    assert max(gaps) < 0.4 * TTL


def test_one_lost_beat_is_nothing(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)
    scheduler.answers = [{}, LOST]

    live_until(heartbeater, scheduler, 1_100.0)

    assert not lease.canceled


def test_without_a_renewal_the_function_is_told_to_stop_before_the_lease_is_over(
    heartbeater, leases, scheduler
):
    lease = hold_of(heartbeater, leases, scheduler)
    job = JobContext(lease.facts, lease)
    scheduler.answers = [LOST] * 1_000

    live_until(heartbeater, scheduler, 1_000.0 + 0.6 * TTL)
    before = job.canceled
    live_until(heartbeater, scheduler, 1_000.0 + 0.7 * TTL)

    assert (False, True) == (before, job.canceled)
    assert lease.lost
    assert not lease.over
    with pytest.raises(JobStopped):
        job.check()


def test_it_is_told_even_if_no_thread_of_ours_came_to_run(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)

    scheduler.now += 0.7 * TTL

    assert JobContext(lease.facts, lease).canceled


def test_a_stopped_process_that_wakes_after_its_lease_does_not_beat_and_does_not_believe(
    heartbeater, leases, scheduler
):
    lease = hold_of(heartbeater, leases, scheduler)

    scheduler.now += 3 * TTL
    heartbeater.step(scheduler.now)

    assert [] == scheduler.beats
    assert lease.lost
    assert lease.over


def test_a_renewal_counts_from_when_it_was_sent_not_from_when_it_was_answered(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)
    scheduler.delay = 5.0

    live_until(heartbeater, scheduler, 1_000.0 + 0.4 * TTL)

    sent_at = scheduler.beats[-1][0]
    assert sent_at == lease.timer.sent_at < scheduler.now


def test_an_answer_that_was_overtaken_moves_nothing_back():
    timer = LeaseTimer(100.0, TTL).renewed(120.0, TTL)

    assert timer == timer.renewed(110.0, TTL)


def test_once_let_go_a_lease_is_not_taken_up_again(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)
    scheduler.answers = [LOST] * 1_000
    live_until(heartbeater, scheduler, 1_000.0 + 0.7 * TTL)
    scheduler.answers, beats = [], len(scheduler.beats)

    live_until(heartbeater, scheduler, 1_000.0 + 0.9 * TTL)

    assert lease.lost
    assert beats == len(scheduler.beats)


def test_a_lease_that_was_refused_is_not_beaten_again(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)
    scheduler.answers = [StaleDispatch("gone")]

    live_until(heartbeater, scheduler, 1_100.0)

    assert 1 == len(scheduler.beats)
    assert lease.lost


def test_a_cancel_reaches_the_function_and_is_not_our_own_judgement(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)
    scheduler.answers = [{"stop": EndReason.CANCELED, "cancel": True}]

    live_until(heartbeater, scheduler, 1_010.0)

    assert JobContext(lease.facts, lease).canceled
    assert not lease.lost


def test_a_yield_is_not_a_cancel(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)
    scheduler.answers = [{"stop": EndReason.COOPERATIVE_PREEMPTION, "yield_": True}]

    live_until(heartbeater, scheduler, 1_010.0)

    job = JobContext(lease.facts, lease)
    assert (True, False) == (job.should_yield, job.canceled)


def test_one_silent_scheduler_is_asked_once_a_round_not_once_a_lease(heartbeater, leases, scheduler):
    for n in range(50):
        hold_of(heartbeater, leases, scheduler, f"j{n}.1")
    scheduler.now += 0.31 * TTL
    scheduler.answers = [LOST] * 1_000

    heartbeater.step(scheduler.now)

    assert 1 == len(scheduler.beats)


def test_progress_and_spending_ride_on_a_beat_within_a_second_and_are_told_again_if_unheard(
    heartbeater, leases, scheduler
):
    lease = hold_of(heartbeater, leases, scheduler)
    job = JobContext(lease.facts, lease)
    job.progress(0.25)
    job.spend(0.5)
    job.spend(0.25)
    scheduler.answers = [LOST]

    live_until(heartbeater, scheduler, 1_000.5)
    job.progress(0.5)
    live_until(heartbeater, scheduler, 1_003.0)

    assert [(0.25, 0.75), (0.5, 0.75)] == [beat[2:4] for beat in scheduler.beats]


def test_a_checkpoint_is_told_at_once(heartbeater, leases, scheduler):
    lease = hold_of(heartbeater, leases, scheduler)

    JobContext(lease.facts, lease).save_checkpoint({"page": 3})

    assert [(1_000.0, "j.1", None, None, b'{"page":3}')] == scheduler.beats


@pytest.mark.parametrize("fraction", [-0.1, 1.1, True, "half", float("nan")])
def test_progress_that_is_no_fraction_is_refused(heartbeater, leases, scheduler, fraction):
    lease = hold_of(heartbeater, leases, scheduler)

    with pytest.raises(ValueError, match="from 0 to 1"):
        JobContext(lease.facts, lease).progress(fraction)


@pytest.mark.parametrize("amount", [-1, True, "much", float("nan"), float("inf")])
def test_spending_that_is_no_amount_is_refused(heartbeater, leases, scheduler, amount):
    lease = hold_of(heartbeater, leases, scheduler)

    with pytest.raises(ValueError, match="0 or more"):
        JobContext(lease.facts, lease).spend(amount)
