"""`commit`: several operations in one transaction, each answered for itself."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.waiting import until

from penstock.core.errors import QueueFull, StoreFailed
from penstock.core.jobs.admission import AdmissionLimits, Conditions
from penstock.core.jobs.changes import Renewal, end
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, RoundResult, run_round
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import (
    Admit,
    Apply,
    Complete,
    CompletedDispatch,
    Depth,
    Prune,
    Renew,
    SetAddon,
    Submit,
    Terms,
    committed,
    committed_apart,
)
from penstock.stores.sqlite.store import SqliteStore

T0 = 1_900_000_000_000_000
JOB = Intent(addon_id="a", job_type="t", cost_units=1)


def claim(most=10, worker="w"):
    def decide(admission_view):
        here = Conditions(90, labels=frozenset({"a", "b"}))
        return run_round(
            RoundInputs(admission_view, here, AdmissionLimits(), Ordering(), lambda _: Placement.LEASE),
            most_leases=most,
        )

    return Admit("here", decide, Terms(worker=worker))


def failing(_):
    raise RuntimeError("in the middle of a round")


def answers(futures):
    return [future.exception() or future.result() for future in futures]


def test_a_write_on_its_way_cannot_be_canceled(kit):
    """A client that goes away cancels what it waits for, and the batch has the operations of others too."""
    futures = kit.store.commit(Submit([JOB])), kit.store.commit(Submit([JOB]))

    assert not futures[0][0].cancel()
    assert all(answers(each) for each in futures)


@pytest.mark.parametrize("wait", [False, True])
def test_operations_take_effect_in_their_order(kit, wait):
    store = kit.store
    receipts, grants = answers(store.commit(Submit([JOB]), claim(), wait=wait))

    assert [receipt.job_id for receipt in receipts] == [grant.dispatch.job_id for grant in grants]
    assert ["SUBMITTED", "DISPATCHING", "RUNNING"] == kit.kinds(receipts[0].job_id)

    done = CompletedDispatch(grants[0].dispatch.dispatch_id)
    ended, again, beat = answers(
        store.commit(
            Complete([done]),
            Complete([done]),
            Renew([Renewal(dispatch_id=done.dispatch_id, expires_at=kit.now + SECOND)]),
            wait=wait,
        )
    )
    assert ([True], [False], [None]) == (ended, again, beat)


def test_a_job_that_goes_back_to_the_queue_is_seen_by_the_claim_behind_it(kit):
    kit.submit(1)
    [first] = committed(kit.store, claim())
    released = end(
        first.job, first.dispatch, EndReason.RELEASED, kit.now, schedules=Schedules(), ordering=Ordering()
    )
    [applied], [second] = answers(kit.store.commit(Apply([released]), claim()))

    assert applied
    assert (first.dispatch.job_id, 2) == (second.dispatch.job_id, second.dispatch.fence)


def test_what_a_worker_has_done_makes_room_for_what_it_claims(kit):
    kit.submit(2, cost_units=60)
    [first] = committed(kit.store, claim())
    done = CompletedDispatch(first.dispatch.dispatch_id)

    assert [] == committed(kit.store, claim())
    ended, [second] = answers(kit.store.commit(Complete([done]), claim()))

    assert [True] == ended
    assert first.dispatch.job_id != second.dispatch.job_id


def test_a_grant_has_its_job_as_if_it_had_been_read(kit):
    deadline = kit.now + 3_600 * SECOND
    for intent in (
        replace(JOB, payload="[1]", tags=("x",), priority=70, deadline_at=deadline, time_sensitive=True),
        replace(JOB, labels=("b", "a"), expected_duration_sec=5, max_runtime_sec=7, retry_delays_sec=(1,)),
        JOB,
    ):
        _, [grant] = answers(kit.store.commit(Submit([intent]), claim()))

        assert [grant.job] == kit.store.jobs([grant.dispatch.job_id])
        assert grant.dispatch == kit.store.dispatch(grant.dispatch.dispatch_id)


def test_jobs_of_the_same_commit_stand_in_line_with_those_that_waited(kit):
    first, middle = kit.submit(cost_units=1, priority=90), kit.submit(cost_units=1, priority=50)
    delayed = replace(JOB, earliest_start_at=kit.now + 3_600 * SECOND)
    other = replace(JOB, addon_id="b", cost_units=2)
    submits = Submit([replace(JOB, priority=70), delayed, replace(JOB, priority=40), other])
    receipts, grants = answers(kit.store.commit(submits, claim(4)))

    second, not_yet, last, alone = (receipt.job_id for receipt in receipts)
    of_a = [grant.job.job_id for grant in grants if grant.job.intent.addon_id == "a"]
    assert {*first, second, *middle, alone} == {grant.job.job_id for grant in grants}
    assert [*first, second, *middle] == of_a
    assert {"QUEUED"} == {kit.store.job(job_id).state for job_id in (not_yet, last)}

    assert [last] == [grant.job.job_id for grant in committed(kit.store, claim())]
    kit.later(3_601)
    assert [not_yet] == [grant.job.job_id for grant in committed(kit.store, claim())]
    assert [] == kit.store.audit()


def test_a_job_that_is_denied_in_the_commit_of_its_submit_has_its_reason(kit):
    [receipt], grants = answers(kit.store.commit(Submit([replace(JOB, cost_units=95)]), claim()))

    assert [] == grants
    assert "no_room" == kit.store.job(receipt.job_id).denied
    assert ["SUBMITTED", "DENIED"] == kit.kinds(receipt.job_id)


def test_a_later_attempt_has_its_job_as_it_is_by_then(kit):
    _, [first] = answers(kit.store.commit(Submit([JOB]), claim()))
    ended = end(
        first.job,
        first.dispatch,
        EndReason.GRACEFUL_SHUTDOWN,
        kit.now,
        schedules=Schedules(),
        ordering=Ordering(),
    )
    committed(kit.store, Apply([ended]))
    [second] = committed(kit.store, claim())

    assert 2 == second.job.fence == second.dispatch.fence
    assert [second.job] == kit.store.jobs([second.dispatch.job_id])


def test_a_reservation_comes_without_its_job(kit):
    kit.submit()
    reserve = Admit(
        "here",
        lambda view: run_round(
            RoundInputs(view, Conditions(90), AdmissionLimits(), Ordering(), lambda _: Placement.RESERVE)
        ),
    )
    [grant] = committed(kit.store, reserve)

    assert grant.job is None
    assert grant.dispatch.started_at is None


def test_a_claim_beside_a_submit_is_a_round_and_jobs_that_wait_longer_go_first(kit):
    old = kit.submit(2)
    _, [grant] = answers(kit.store.commit(Submit([JOB]), claim(most=1)))

    assert old[0] == grant.dispatch.job_id


@pytest.mark.parametrize("wait", [False, True])
def test_an_operation_that_fails_harms_no_other_of_its_commit(kit, wait):
    before, failed, after = kit.store.commit(
        Submit([JOB]), Admit("here", failing), SetAddon("a", weight=7), wait=wait
    )

    assert [True] == [receipt.created for receipt in before.result()]
    with pytest.raises(RuntimeError, match="in the middle"):
        failed.result()
    assert after.result() is None
    assert [("a", 7)] == [(addon.addon_id, addon.weight) for addon in kit.store.addons()]
    assert ["QUEUED"] == [kit.state(receipt.job_id) for receipt in before.result()]


def test_a_bulk_submit_is_one_operation_all_of_it_or_none(kit):
    depth = Depth(total=3)
    first, second, third = kit.store.commit(*(Submit([JOB] * n, depth) for n in (2, 2, 1)))

    assert 2 == len(first.result())
    with pytest.raises(QueueFull):
        second.result()
    assert 1 == len(third.result())


def test_a_submit_that_is_refused_brings_no_job_for_the_claim_beside_it(kit):
    refused, claimed = kit.store.commit(Submit([JOB], Depth(total=0)), claim())

    with pytest.raises(QueueFull):
        refused.result()
    assert [] == claimed.result()


def test_operations_that_write_nothing_are_answered(kit):
    nothing = (Apply([]), Complete([]), Renew([]))

    assert [[]] * 3 == answers(kit.store.commit(*nothing))
    assert [[]] == answers(kit.store.commit(Apply([]), wait=True))
    assert [[], [], 0] == answers(kit.store.commit(Complete([]), claim(), Prune(0, 10)))
    assert 0 == kit.store.newest()


def test_listeners_hear_of_a_commit_that_wrote_events_and_of_no_other(kit):
    heard = []
    kit.store.on_change(lambda: heard.append(kit.store.newest()))
    answers(kit.store.commit(Submit([JOB]), claim()))
    until(lambda: heard and heard[-1] == 3)
    seen = list(heard)
    answers(kit.store.commit(Admit("here", lambda _: RoundResult())))

    assert seen == heard


class Refusing:
    """A store that cannot write items marked as bad."""

    def __init__(self, store, bad, error):
        self._store, self._bad, self._error = store, bad, error
        self.commits = []

    def commit(self, *operations, wait=False):
        self.commits.append([len(operation.done) for operation in operations])
        refuse = Admit("here", self._refuse)
        return [
            self._store.commit(refuse if self._bad in operation.done else operation, wait=wait)[0]
            for operation in operations
        ]

    def _refuse(self, _):
        raise self._error


def completions(kit, n):
    kit.submit(n, cost_units=1)
    return [CompletedDispatch(grant.dispatch.dispatch_id) for grant in committed(kit.store, claim(n))]


def test_an_item_that_cannot_be_written_fails_alone(kit):
    done = completions(kit, 4)
    refusing = Refusing(kit.store, done[2], ValueError("no"))
    written = committed_apart(refusing, Complete, done)

    assert [[4], [1, 1, 1, 1]] == refusing.commits
    assert [True, True, True] == [written[n] for n in (0, 1, 3)]
    assert "no" == str(written[2])
    assert [] == committed_apart(refusing, Complete, [])
    [alone] = committed_apart(refusing, Complete, done[2:3])
    assert isinstance(alone, ValueError)


def test_a_store_that_cannot_write_at_all_is_asked_once(kit):
    done = completions(kit, 2)
    refusing = Refusing(kit.store, done[0], StoreFailed("full", kind="full"))
    with pytest.raises(StoreFailed):
        committed_apart(refusing, Complete, done)

    assert [[2]] == refusing.commits


# one transaction, where it can be counted


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "jobs.db", lambda: T0)
    yield store
    problems = store.audit()
    store.close()
    assert problems == []


def test_a_job_is_submitted_and_claimed_by_one_transaction(store):
    commits = []
    store._con.set_commit_hook(lambda: bool(commits.append(1)))
    answers(store.commit(Submit([JOB]), claim()))

    assert 1 == len(commits)


def test_what_is_answered_is_on_disk(store, tmp_path):
    seen = []

    def look(answer):
        other = SqliteStore(tmp_path / "jobs.db", lambda: T0)
        seen.extend(str(other.job(grant.dispatch.job_id).state) for grant in answer.result())
        other.close()

    _, claimed = store.commit(Submit([JOB]), claim())
    claimed.add_done_callback(look)
    until(lambda: seen)

    assert ["RUNNING"] == seen


def test_a_preview_comes_before_the_answer_with_the_same_grants(store, tmp_path):
    committed(store, Submit([JOB]))
    other, seen = SqliteStore(tmp_path / "jobs.db", lambda: T0), []

    def preview(grants):
        seen.append((grants, [str(other.job(grant.job.job_id).state) for grant in grants]))

    admit = claim()
    grants = committed(store, Admit(admit.host, admit.run_round, admit.terms, preview))
    other.close()

    [(foreseen, states)] = seen
    assert foreseen is grants
    assert ["QUEUED"] == states
    assert "RUNNING" == str(grants[0].job.state)


@pytest.mark.parametrize("wait", [False, True])
def test_a_claim_is_answered_before_listeners_hear_of_its_commit(kit, wait):
    if kit.store.shared:
        pytest.skip("an idle worker claims in the commit of a submit only where one process dispatches")
    order = []
    kit.store.on_change(lambda: order.append("listener"))
    admit = replace(claim(), on_answer=lambda answer: order.append(str(answer.result()[0].job.state)))
    kit.store.commit(Submit([JOB]), admit, wait=wait)
    until(lambda: len(order) == 2)

    assert ["RUNNING", "listener"] == order


def test_a_callback_that_fails_stops_no_other(store):
    def fails(_):
        raise RuntimeError("no hands")

    for _ in range(2):
        [submitted] = store.commit(Submit([JOB]))
        submitted.add_done_callback(fails)

        assert 1 == len(submitted.result())
