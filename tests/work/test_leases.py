"""The lease keeper on a clock of the test: when a lease is renewed, and when a process gives it up by itself."""

from __future__ import annotations

import os

import pytest

from penstock.client.worker import AT_RISK
from penstock.core.errors import JobStopped, Refused, StaleDispatch, Unreachable
from penstock.core.jobs.types import EndReason
from penstock.work.context import JobContext, JobFacts
from penstock.work.leases import FunctionLease, LeaseKeeper, RenewalReply

TTL = 30.0


class Scheduler:
    """Answers renewals with the next of `answers`, `delay` seconds late, on the clock of the test."""

    def __init__(self):
        self.now, self.delay, self.answers, self.requests = 1_000.0, 0.0, [], []

    def clock(self):
        return self.now

    def renew(self, requests):
        replies = []
        for request in requests:
            self.requests.append((self.now, request))
            self.now += self.delay
            answer = self.answers.pop(0) if self.answers else RenewalReply(TTL)
            if isinstance(answer, Exception):
                raise answer
            replies.append(answer)
        return replies


@pytest.fixture
def scheduler():
    return Scheduler()


@pytest.fixture
def ended():
    return []


@pytest.fixture
def keeper(scheduler, ended):
    return LeaseKeeper(
        scheduler.renew,
        on_stop=ended.append,
        on_yield=lambda _: None,
        at_risk=AT_RISK,
        clock=scheduler.clock,
    )


def lease_of(keeper, name="j.1"):
    facts = JobFacts(name.partition(".")[0], "thumb", name, 1, payload='{"path": "a"}')
    lease = FunctionLease(facts, None, keeper, keeper.clock(), TTL)
    lease.began_at = keeper.clock()
    keeper.live[name] = lease
    return lease


def live_until(keeper, scheduler, moment):
    while scheduler.now < moment:
        scheduler.now = min(moment, max(scheduler.now + 0.001, keeper.step()))


LOST = Unreachable("away", sent=True)


def test_the_process_of_a_job_is_told_once_and_not_for_short_jobs(keeper, scheduler):
    lease_of(keeper)
    live_until(keeper, scheduler, 1_000.9)
    early = list(scheduler.requests)
    live_until(keeper, scheduler, 1_060.0)

    assert early == []
    pids = [request.pid for _, request in scheduler.requests]
    assert pids[0] == os.getpid()
    assert set(pids[1:]) == {None}


def test_a_lease_is_renewed_long_before_it_is_at_risk(keeper, scheduler):
    lease = lease_of(keeper)

    live_until(keeper, scheduler, 1_600.0)

    assert not lease.canceled
    gaps = [b[0] - a[0] for a, b in zip(scheduler.requests, scheduler.requests[1:], strict=False)]
    assert 60 <= len(scheduler.requests) <= 80
    assert max(gaps) < 0.4 * TTL


def test_one_lost_beat_is_nothing(keeper, scheduler):
    lease = lease_of(keeper)
    scheduler.answers = [RenewalReply(TTL), LOST]

    live_until(keeper, scheduler, 1_100.0)

    assert not lease.canceled


def test_without_a_renewal_the_function_is_told_to_stop_before_the_lease_is_over(keeper, scheduler):
    lease = lease_of(keeper)
    job = JobContext(lease.facts, lease)
    scheduler.answers = [LOST] * 1_000

    live_until(keeper, scheduler, 1_000.0 + 0.6 * TTL)
    before = job.canceled
    live_until(keeper, scheduler, 1_000.0 + 0.7 * TTL)

    assert (False, True) == (before, job.canceled)
    assert lease.lost
    assert not lease.over
    with pytest.raises(JobStopped):
        job.check()


def test_it_is_told_even_if_no_thread_of_ours_came_to_run(keeper, scheduler):
    lease = lease_of(keeper)

    scheduler.now += 0.7 * TTL

    assert JobContext(lease.facts, lease).canceled


def test_a_stopped_process_that_wakes_after_its_lease_does_not_beat_and_does_not_believe(keeper, scheduler):
    lease = lease_of(keeper)

    scheduler.now += 3 * TTL
    keeper.step()

    assert [] == scheduler.requests
    assert lease.lost
    assert lease.over


def test_a_renewal_counts_from_when_it_was_sent_not_from_when_it_was_answered(keeper, scheduler):
    lease = lease_of(keeper)
    scheduler.delay = 5.0

    live_until(keeper, scheduler, 1_000.0 + 0.4 * TTL)

    sent_at = scheduler.requests[-1][0]
    assert sent_at == lease.sent_at < scheduler.now


def test_an_answer_that_was_overtaken_moves_nothing_back(keeper):
    lease = lease_of(keeper)
    lease.renewed(RenewalReply(TTL), 1_020.0)
    lease.renewed(RenewalReply(TTL), 1_010.0)

    assert lease.sent_at == 1_020.0


def test_once_let_go_a_lease_is_not_taken_up_again(keeper, scheduler):
    lease = lease_of(keeper)
    scheduler.answers = [LOST] * 1_000
    live_until(keeper, scheduler, 1_000.0 + 0.7 * TTL)
    scheduler.answers, beats = [], len(scheduler.requests)

    live_until(keeper, scheduler, 1_000.0 + 0.9 * TTL)

    assert lease.lost
    assert beats == len(scheduler.requests)


def test_a_lease_that_was_refused_is_not_beaten_again(keeper, scheduler):
    lease = lease_of(keeper)
    scheduler.answers = [StaleDispatch("gone")]

    live_until(keeper, scheduler, 1_100.0)

    assert 1 == len(scheduler.requests)
    assert lease.lost


def test_a_cancel_reaches_the_function_and_is_not_our_own_judgement(keeper, scheduler):
    lease = lease_of(keeper)
    scheduler.answers = [RenewalReply(TTL, EndReason.CANCELED)]

    live_until(keeper, scheduler, 1_010.0)

    assert JobContext(lease.facts, lease).canceled
    assert not lease.lost


def test_a_yield_is_not_a_cancel(keeper, scheduler):
    lease = lease_of(keeper)
    scheduler.answers = [RenewalReply(TTL, should_yield=True)]

    live_until(keeper, scheduler, 1_010.0)

    job = JobContext(lease.facts, lease)
    assert (True, False) == (job.should_yield, job.canceled)


def test_one_silent_scheduler_is_asked_once_a_round_not_once_a_lease(keeper, scheduler):
    for n in range(50):
        lease_of(keeper, f"j{n}.1")
    scheduler.now += 0.31 * TTL
    scheduler.answers = [LOST] * 1_000

    keeper.step()

    assert 1 == len(scheduler.requests)


def test_progress_and_spending_are_sent_within_a_second_and_again_until_answered(keeper, scheduler):
    lease = lease_of(keeper)
    job = JobContext(lease.facts, lease)
    job.progress(0.25)
    job.spend(0.5)
    job.spend(0.25)
    scheduler.answers = [LOST]

    live_until(keeper, scheduler, 1_001.5)
    job.progress(0.5)
    live_until(keeper, scheduler, 1_004.0)

    sent = [(request.progress, request.spent) for _, request in scheduler.requests]
    assert [(0.25, 750_000), (0.5, 750_000)] == sent


def test_a_checkpoint_is_sent_at_once(keeper, scheduler):
    lease = lease_of(keeper)

    JobContext(lease.facts, lease).save_checkpoint({"page": 3})

    [(sent_at, request)] = scheduler.requests
    assert (1_000.0, "j.1", '{"page":3}') == (sent_at, request.dispatch_id, request.checkpoint)


def test_a_report_that_is_refused_is_dropped_and_the_lease_goes_on(keeper, scheduler):
    lease = lease_of(keeper)
    lease.progress(0.5)
    scheduler.answers = [Refused("no such progress")]

    live_until(keeper, scheduler, 1_040.0)

    assert not lease.canceled
    assert [0.5, None] == [request.progress for _, request in scheduler.requests][:2]


def test_the_owner_learns_of_every_lease_that_must_end(keeper, scheduler, ended):
    canceled, elsewhere, lost, fine = (lease_of(keeper, f"{name}.1") for name in ("a", "b", "c", "d"))
    keeper.note_stops({"b.1": EndReason.CANCELED, "x.1": EndReason.CANCELED})
    assert ended == [elsewhere]
    scheduler.answers = [RenewalReply(TTL, EndReason.CANCELED), RenewalReply(TTL), StaleDispatch("gone")]

    scheduler.now += 10
    keeper.step()

    assert ended[1:] == [canceled, elsewhere, lost]
    assert [lease.lost for lease in (canceled, elsewhere, lost, fine)] == [False, False, True, False]


def test_leases_that_are_kept_together_are_renewed_in_one_request(scheduler):
    batches = []
    keeper = LeaseKeeper(
        lambda requests: batches.append(len(requests)) or [RenewalReply(TTL)] * len(requests),
        on_stop=lambda _: None,
        on_yield=lambda _: None,
        together=True,
        clock=scheduler.clock,
    )
    lease_of(keeper, "a.1")
    scheduler.now += 8
    lease_of(keeper, "b.1")

    scheduler.now += 2
    keeper.step()
    keeper.step()

    assert batches == [2]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, True, "half", float("nan")])
def test_progress_that_is_no_fraction_is_refused(keeper, scheduler, fraction):
    lease = lease_of(keeper)

    with pytest.raises(ValueError, match="from 0 to 1"):
        JobContext(lease.facts, lease).progress(fraction)


@pytest.mark.parametrize("amount", [-1, True, "much", float("nan"), float("inf")])
def test_spending_that_is_no_amount_is_refused(keeper, scheduler, amount):
    lease = lease_of(keeper)

    with pytest.raises(ValueError, match="0 or more"):
        JobContext(lease.facts, lease).spend(amount)


def test_a_renewal_that_crosses_the_report_of_its_job_loses_nothing(keeper, scheduler, ended, caplog):
    lease = lease_of(keeper)
    lease.finished = True
    scheduler.answers = [StaleDispatch("it has ended")]
    scheduler.now += TTL / 2
    keeper.step()

    assert len(scheduler.requests) == 1
    assert (lease.lost, ended, caplog.records) == (False, [], [])


def test_a_finished_job_does_not_send_its_process_id_any_more(keeper, scheduler):
    lease_of(keeper).finished = True
    scheduler.now += 2.0
    keeper.step()

    assert scheduler.requests == []
