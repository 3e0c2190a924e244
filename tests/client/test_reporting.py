"""How the reporter sends outcomes: together, again until answered, and never for a lease that is over."""

from __future__ import annotations

import re
from threading import Thread

import pytest

from penstock.client import reporter as reporter_module
from penstock.client.reporter import Reporter
from penstock.client.transport import decoded, from_answer
from penstock.client.worker import AT_RISK, JobHandler
from penstock.core.errors import (
    BadIntent,
    IllegalMove,
    JobStopped,
    QueueFull,
    Refused,
    StaleDispatch,
    Unavailable,
    Unreachable,
)
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import EndReason
from penstock.core.jobs.workers import BatchPlan
from penstock.wire import Health, OutcomeAnswer, ProblemDetails
from penstock.work.context import JobContext, JobFacts
from penstock.work.leases import FunctionLease, LeaseKeeper
from penstock.work.outcome import DONE, RELEASED, STOPPED, CurrentJob, Outcome
from penstock.work.outcome import run as run_function

TTL = 30.0
LOST = Unreachable("away", sent=True)


def problem(code, status):
    return ProblemDetails(type="", title="No", status=status, detail="it may not", code=code, hint="")


class Scheduler:
    def __init__(self):
        self.answers, self.batches, self.released, self.now = [], [], [], 1_000.0
        self.spent, self.unanswered = [], 0

    def renew(self, lease):
        if self.unanswered:
            self.unanswered -= 1
            return False
        request = lease.request()
        lease.was_sent(request)
        self.spent.append((len(self.batches), request.spent))
        return True

    def complete_many(self, outcomes):
        self.batches.append(outcomes)
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        return [OutcomeAnswer(o.lease_id, "j", JobState.DONE, answer.get(o.lease_id)) for o in outcomes]

    def release(self, lease_id):
        self.released.append(lease_id)


@pytest.fixture
def scheduler(monkeypatch):
    scheduler = Scheduler()
    monkeypatch.setattr(reporter_module, "PAUSE", 0.001)
    return scheduler


def lease_of(scheduler, lease_id, payload="null"):
    facts = JobFacts(lease_id, "thumb", lease_id, 1, payload=payload)
    keeper = LeaseKeeper(None, on_stop=None, on_yield=None, at_risk=AT_RISK, clock=lambda: scheduler.now)
    return FunctionLease(facts, None, keeper, scheduler.now, TTL)


def done(result):
    return Outcome(EndReason.COMPLETED, result)


def report(scheduler, *pairs):
    """Let a reporter send all of them; return each lease with the outcome that the scheduler accepted, or None."""
    reported = []
    reporter = Reporter(
        scheduler.complete_many,
        scheduler.release,
        lambda lease, outcome: reported.append((lease.dispatch_id, outcome)),
        scheduler.renew,
        plan=lambda ended: BatchPlan(report=ended),
        on_idle=lambda: None,
    )
    for lease, outcome in pairs:
        reporter.put(lease, outcome)
    reporter.close()
    thread = Thread(target=reporter.run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return reported


def test_many_outcomes_share_one_request(scheduler):
    pairs = [(lease_of(scheduler, f"j{n}"), done("1")) for n in range(200)]

    reported = report(scheduler, *pairs)

    assert [200] == [len(batch) for batch in scheduler.batches]
    assert 200 == len(reported)


def test_large_results_do_not_share_a_request(scheduler):
    pairs = [(lease_of(scheduler, f"j{n}"), done("1" * 400_000)) for n in range(4)]

    report(scheduler, *pairs)

    assert [2, 2] == [len(batch) for batch in scheduler.batches]


def test_an_outcome_is_sent_until_it_is_answered(scheduler):
    scheduler.answers = [LOST, Unavailable("busy"), LOST]

    reported = report(scheduler, (lease_of(scheduler, "a"), done("1")))

    assert 4 == len(scheduler.batches)
    assert [("a", done("1"))] == reported


def test_an_outcome_is_given_up_when_the_lease_is_over(scheduler):
    lease = lease_of(scheduler, "a")
    scheduler.now += 1.1 * TTL

    reported = report(scheduler, (lease, done("1")))

    assert [] == scheduler.batches
    assert [("a", None)] == reported


def test_an_attempt_that_lost_its_lease_is_not_reported_as_done(scheduler):
    lease = lease_of(scheduler, "a")
    scheduler.now += 0.7 * TTL

    report(scheduler, (lease, done("1")))

    assert [] == scheduler.batches
    assert ["a"] == scheduler.released


def test_a_canceled_attempt_reports_its_outcome_and_the_scheduler_keeps_its_first_reason(scheduler):
    lease = lease_of(scheduler, "a")
    lease.stop = EndReason.CANCELED

    report(scheduler, (lease, done("1")))

    assert ["a"] == [outcome.lease_id for outcome in scheduler.batches[0]]


def test_a_stale_outcome_does_not_spoil_the_others(scheduler):
    scheduler.answers = [{"a": problem("stale_dispatch", 409)}]
    pairs = [(lease_of(scheduler, name), done("1")) for name in "ab"]

    reported = report(scheduler, *pairs)

    assert [("a", None), ("b", done("1"))] == reported


def test_a_result_that_is_not_accepted_fails_its_job_and_no_other(scheduler):
    scheduler.answers = [Refused("too large"), Refused("too large"), {}, {}]
    pairs = [(lease_of(scheduler, name), done("1")) for name in "ab"]

    report(scheduler, *pairs)

    last = scheduler.batches[-1][0]
    assert ("a", "FAILED") == (last.lease_id, last.state)
    assert "too large" in last.error
    assert [["a", "b"], ["a"], ["b"], ["a"]] == [[o.lease_id for o in batch] for batch in scheduler.batches]


def test_spoutcome_is_reported_before_the_outcome(scheduler):
    lease = lease_of(scheduler, "a")
    JobContext(lease.facts, lease).spend(0.5)
    scheduler.unanswered = 2

    reported = report(scheduler, (lease, done("1")))

    assert [(0, 500_000)] == scheduler.spent
    assert [("a", done("1"))] == reported


def test_an_attempt_that_never_began_is_released(scheduler):
    assert [("a", RELEASED)] == report(scheduler, (lease_of(scheduler, "a"), RELEASED))
    assert ["a"] == scheduler.released


# How a function ends


def run(scheduler, function, payload="null"):
    lease = lease_of(scheduler, "a", payload)
    return run_function(JobHandler(function).invoke, CurrentJob(lease.facts, lease))


@pytest.mark.parametrize(
    ("payload", "result"),
    [('{"path":"a"}', '["a",1]'), ('["a",2]', '["a",2]'), ('"a"', '["a",1]')],
)
def test_a_payload_becomes_the_arguments(scheduler, payload, result):
    assert done(result) == run(scheduler, lambda job, path, size=1: [path, size], payload)


def test_no_payload_is_no_argument(scheduler):
    assert DONE == run(scheduler, lambda job: None)


def test_a_payload_that_does_not_fit_fails_the_job_with_the_reason(scheduler):
    outcome = run(scheduler, lambda job, path: path, '{"pth": 1}')

    assert outcome.end == "job_error"
    assert "does not fit" in outcome.error
    assert "'pth'" in outcome.error


def test_a_type_error_of_the_function_itself_is_its_own(scheduler):
    def broken(job):
        return 1 + "1"

    outcome = run(scheduler, broken)

    assert outcome.error.startswith("TypeError: unsupported operand")


def test_a_coroutine_is_run(scheduler):
    async def later(job):
        return 7

    assert done("7") == run(scheduler, later)


def test_an_exception_is_the_jobs_own_error_with_its_traceback(scheduler):
    def broken(job):
        raise KeyError("colour")

    outcome = run(scheduler, broken)

    assert outcome.end == "job_error"
    assert outcome.error.startswith("KeyError: 'colour'\n")
    assert "in broken" in outcome.error
    assert "outcome.py" not in outcome.error


def test_a_long_error_keeps_its_head_and_its_tail(scheduler):
    def broken(job):
        raise ValueError("x" * 50_000 + "END")

    error = run(scheduler, broken).error

    assert error.startswith("ValueError: xxx")
    assert error.endswith("END\n")
    assert len(error) < 17_000


def test_unavailable_is_its_own_kind_of_failure(scheduler):
    def broken(job):
        raise Unavailable("the database is away")

    assert run(scheduler, broken).end == "unavailable"


def test_a_function_that_stops_by_check_releases_its_lease(scheduler):
    def patient(job):
        lease.yielding = True
        job.check()

    lease = lease_of(scheduler, "a")

    assert STOPPED == run_function(JobHandler(patient).invoke, CurrentJob(lease.facts, lease))
    assert [("a", STOPPED)] == report(scheduler, (lease, STOPPED))
    assert ["a"] == scheduler.released


def test_a_function_that_stops_without_being_asked_fails(scheduler):
    """A job that goes back to the queue by itself would start again at once, and for ever."""

    def impatient(job):
        raise JobStopped("enough")

    assert run(scheduler, impatient).end == "job_error"


def test_exit_fails_the_job_and_not_the_worker(scheduler):
    def leaves(job):
        raise SystemExit(3)

    assert run(scheduler, leaves).end == "job_error"


def test_a_result_that_json_has_no_form_for_fails_the_job(scheduler):
    outcome = run(scheduler, lambda job: object())

    assert "JSON" in outcome.error


# Refusals over HTTP are the errors of the library


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("stale_dispatch", 409, StaleDispatch),
        ("illegal_move", 409, IllegalMove),
        ("queue_full", 429, QueueFull),
        ("bad_intent", 422, BadIntent),
        ("store_failed", 503, Unavailable),
        ("a_code_of_tomorrow", 418, Refused),
        ("a_code_of_tomorrow", 503, Unavailable),
    ],
)
def test_a_problem_is_raised_as_the_error_of_the_library(code, status, kind):
    body = (
        b'{"type": "", "title": "No", "status": %d, "detail": "it may not", "code": "%s", "hint": "Do this.",'
        b' "problems": [{"field": "cost_units", "message": "must be 1..100"}], "retry_after_sec": 2.5, "data": {"state": "DONE"}}'
    ) % (status, code.encode())

    error = from_answer(status, body)

    assert isinstance(error, kind)
    assert (code, status, 2.5, "DONE") == (error.code, error.status, error.retry_after_sec, error.state)
    assert [{"field": "cost_units", "message": "must be 1..100"}] == error.problems
    assert "it may not" == str(error)
    assert ["Do this."] == error.__notes__


def test_an_answer_that_is_not_ours_says_so():
    error = from_answer(502, b"<html>Bad Gateway</html>")

    assert isinstance(error, Unavailable)
    assert "does not come from a scheduler" in str(error)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>Welcome</html>", "the answer 200 does not come from a scheduler: '<html>Welcome</html>'"),
        (b"", "the answer 200 does not come from a scheduler: ''"),
        (b'{"status": 3}', "another version of Penstock"),
    ],
)
def test_a_good_answer_that_cannot_be_read_says_where_it_comes_from(body, says):
    with pytest.raises(Unavailable, match=re.escape(says)):
        decoded(body, Health)
